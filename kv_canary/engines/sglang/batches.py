"""The requests of SGLang's forward, as the scheduler has them on the host, in the canary's words.

Nothing here reads device memory: lengths and rows come from the mirrors that the scheduler keeps on the host, tokens
from the requests themselves, and the flat tensors are handed on as they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_canary.engines.sglang import beams
from kv_canary.engines.sglang.identities import Identities
from kv_canary.runtime.composition import Composition, ForwardRequest
from kv_canary.runtime.rows import OwnerNumbers

# What a request must have to be described.
_NEEDED = ("rid", "origin_input_ids", "output_ids", "finished")
# Under this name a forward batch carries what `note` has seen.
_NOTED = "kv_canary_requests"
_COMPOSED = "kv_canary_composition"
_MADE_OF = "kv_canary_batch"


class UnknownKindError(ValueError):
    """A forward, or a request in it, that the adapter cannot describe; the text says what it does not know.

    The same for all of a kind: it is logged once for each.
    """


@dataclass(frozen=True, kw_only=True)
class Noted:
    """One row of a batch, as the scheduler had it when it made the batch: it may be another's soon.

    Args:
        req: SGLang's request.
        row: in its tables; None: it has none that the adapter knows.
        beam: which of the request's beams it is; None: it is no beam search, or has no beams yet.
    """

    req: Any
    row: int | None
    beam: beams.Beam | None = None


@dataclass(frozen=True, kw_only=True)
class Described:
    """A description of a forward.

    Args:
        requests: those that could be described, in the order of the flat tensors.
        tokens: of the forward, those of other requests included.
        kept: numbers of the flat tokens that are of `requests`; None: all are.
        left_out: what is not known of each of the other requests.
    """

    requests: list[ForwardRequest]
    tokens: int
    kept: list[int] | None = None
    left_out: list[str] = field(default_factory=list)


class Owners:
    """A serial number for every request; SGLang's rows are reused too soon to name one."""

    def __init__(self) -> None:
        # By request, so that one that comes again under the same name is another.
        self._of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = OwnerNumbers()

    def owner(self, req: Any) -> int:
        """Return the number of a request, which is never 0 and stays with it for as long as it lives."""
        if req not in self._of:
            self._of[req] = number = self._numbers.new(req.rid)
            weakref.finalize(req, self._numbers.release, number)
        return self._of[req]

    def name(self, owner: int) -> str | None:
        """Return the name of the request that `owner` was given to, or None if that is forgotten."""
        return self._numbers.name(owner)


def note(forward_batch: Any, schedule_batch: Any) -> None:
    """Remember with a forward batch which requests it was made of, and which rows are whose."""
    who = [Noted(req=req, row=row_of(req)) for req in schedule_batch.reqs]
    for number, beam, row in beams.rows(schedule_batch):
        if beam.place:
            who.append(Noted(req=who[number].req, row=row, beam=beam))
        else:
            who[number] = Noted(req=who[number].req, row=who[number].row, beam=beam)
    setattr(forward_batch, _NOTED, tuple(who))


def note_later(forward_batch: Any, schedule_batch: Any) -> None:
    """Remember with a forward batch what it was made of, which stays as it is until the forward is launched."""
    setattr(forward_batch, _MADE_OF, schedule_batch)


def noted_later(forward_batch: Any) -> Any:
    """Return, once, what a forward batch was made of; None where that is not remembered."""
    return forward_batch.__dict__.pop(_MADE_OF, None)


def note_composed(forward_batch: Any, composition: Composition) -> None:
    """Remember with a forward batch its requests as a composition, instead of `note`."""
    setattr(forward_batch, _COMPOSED, composition)


def composed(forward_batch: Any) -> Composition | None:
    """Return the requests of a forward batch where they have been composed."""
    return getattr(forward_batch, _COMPOSED, None)


def noted(forward_batch: Any) -> tuple[Noted, ...]:
    """Return the requests of a forward batch, in its order; none where nobody has noted them."""
    composition = composed(forward_batch)
    if composition is not None:
        rows = composition.rows.tolist()
        return tuple(Noted(req=req, row=row) for req, row in zip(composition.members, rows, strict=True))
    found: tuple[Noted, ...] = getattr(forward_batch, _NOTED, ())
    return found


def lengths(forward_batch: Any) -> list[tuple[int, int]]:
    """Return (prefix, extend) of every request of a forward without speculation.

    Raises:
        UnknownKindError: the batch is of a kind that the adapter does not know, or its lengths are not on the host.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        if forward_batch.seq_lens_cpu is None:
            raise UnknownKindError("a forward whose lengths are not on the host (seq_lens_cpu)")
        # The new token is counted already.
        return [(length - 1, 1) for length in forward_batch.seq_lens_cpu.tolist()]
    if mode.is_extend_without_speculative() and not mode.is_dllm_extend() and not mode.is_split_prefill():
        prefixes, extends = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        if prefixes is None or extends is None:
            raise UnknownKindError("a forward whose lengths are not on the host (extend_prefix_lens_cpu)")
        return list(zip(map(int, prefixes), map(int, extends), strict=True))
    raise UnknownKindError(f"a forward of another kind than extend, mixed and decode ({mode.name})")


class Describer:
    """Describes the requests of forwards, one by one: what is not known of one is no other's loss.

    Args:
        owners: the requests' serial numbers.
        identities: what their KV depends on.
        tokens_of: gives a request's own tokens [start, end) as a function.
        known: gives how many of its own tokens a request has by now, as far as so many may be wanted.
        lookahead: tokens past its prefix that have to be known of a request.
        overlap: whether the scheduler prepares a forward before it knows the results of the one before, so that a
            request may turn out to be finished.
    """

    def __init__(
        self,
        *,
        owners: Owners,
        identities: Identities,
        tokens_of: Callable[[Any], Callable[[int, int], Sequence[int]]],
        known: Callable[[Any, int], int],
        lookahead: int,
        overlap: bool,
    ) -> None:
        self._owners, self._identities, self._tokens_of, self._known = owners, identities, tokens_of, known
        self._lookahead, self._overlap = lookahead, overlap
        self._beams = beams.Beams()

    def describe(
        self, who: Sequence[Noted], lens: Sequence[tuple[int, int]], *, drafts: bool = False, ahead: int = 0
    ) -> Described:
        """Describe the requests of a forward; if it is not begun then, `forget` has to be called.

        Args:
            who: the requests, in the order of the flat tensors.
            lens: (prefix, extend) of each.
            drafts: whether all new tokens but the first are drafts, which the request may never own.
            ahead: how many of the tokens before this forward are drafts of the same step, which nobody owns yet.

        Raises:
            UnknownKindError: there are more or fewer requests than lengths.
        """
        if len(who) != len(lens):
            raise UnknownKindError("a forward with more or fewer rows than the adapter knows requests for")
        texts = self._texts(who)
        found: list[ForwardRequest] = []
        kept: list[int] = []
        left_out: list[str] = []
        anew = first = 0
        for w, (prefix, extend) in zip(who, lens, strict=True):
            try:
                if w.beam is None:
                    length = prefix + (1 if drafts else extend)
                    described = self._request(w, prefix, extend, needed=prefix - ahead, length=length)
                else:
                    described, more = self._of_beam(w, w.beam, texts[w.beam.group], prefix, extend, anew)
                    anew += more
            except UnknownKindError as error:
                left_out.append(str(error))
            else:
                found.append(described)
                kept += range(first, first + extend)
            first += extend
        return Described(requests=found, tokens=first, kept=kept if left_out else None, left_out=left_out)

    def forget(self) -> None:
        """Take in that it is not known how far the canary has followed rows whose text may change."""
        self._beams.forget()

    def _texts(self, who: Sequence[Noted]) -> dict[Any, list[list[int]]]:
        """Return what each row of each group of beams has generated; nothing where that cannot be read."""
        texts: dict[Any, list[list[int]]] = {}
        for group in {w.beam.group: None for w in who if w.beam is not None}:
            try:
                texts[group] = self._beams.texts(group)
            except (AttributeError, IndexError, TypeError, ValueError):
                # Not what the adapter knows of SGLang's choices.
                texts[group] = []
        return texts

    def _request(self, w: Noted, prefix: int, extend: int, *, needed: int, length: int) -> ForwardRequest:
        """Describe a request that is no beam search.

        Args:
            w: the request.
            prefix, extend: its lengths.
            needed: how many of its own tokens have to be known, less what all requests need to be known ahead.
            length: of what it is sure to own if the forward's result is taken.
        """
        req, row = w.req, _expect_known(w)
        wanted = needed + self._lookahead
        if needed and self._known(req, wanted) < wanted:
            raise UnknownKindError("a request whose own tokens the host does not have")
        return ForwardRequest(
            request_id=req.rid,
            row=row,
            owner=self._owners.owner(req),
            prefix_len=prefix,
            extend_len=extend,
            tokens=self._tokens_of(req),
            identity=self._identities.of(req),
            discarded=_discarded(req, length) if self._overlap else None,
        )

    def _of_beam(
        self, w: Noted, beam: beams.Beam, texts: list[list[int]], prefix: int, extend: int, anew: int
    ) -> tuple[ForwardRequest, int]:
        """Describe one row of a group of beams; return it, and how many tokens have to be hashed anew for it.

        Args:
            w, beam: the row.
            texts: what each row of the group has generated.
            prefix, extend: its lengths.
            anew: tokens that rows before it in this forward have to be hashed anew.
        """
        req, row = w.req, _expect_known(w)
        prompt = req.origin_input_ids
        if beam.place >= len(texts) or len(prompt) + len(texts[beam.place]) != prefix + extend:
            raise UnknownKindError("a row of a beam search whose tokens the host does not have")
        text = texts[beam.place]
        more = 0 if self._beams.goes_on(beam, text) or (not beam.place and len(text) == 1) else prefix
        if anew + more > beams.MOST_ANEW:
            raise UnknownKindError(
                f"a row of a beam search whose text has changed, behind {beams.MOST_ANEW} such tokens in one forward"
            )
        key = self._beams.owner_key(req, beam, text)
        described = ForwardRequest(
            request_id=f"{req.rid} beam {beam.place + 1}",
            row=row,
            owner=self._owners.owner(key),
            prefix_len=prefix,
            extend_len=extend,
            tokens=_concatenated(prompt, text),
            identity=self._identities.of(req),
            discarded=beams.discarded(beam.group, len(text)) if self._overlap else None,
        )
        return described, more


def own_tokens(req: Any) -> Callable[[int, int], Sequence[int]]:
    """Return a function that gives a request's own tokens, prompt first; it follows the request as it grows."""

    def tokens(start: int, end: int) -> Sequence[int]:
        return _concatenated(req.origin_input_ids, req.output_ids)(start, end)

    return tokens


def known_tokens(req: Any, wanted: int = 0) -> int:
    """Return how many tokens `own_tokens` has of a request by now, however few are `wanted`."""
    return len(req.origin_input_ids) + len(req.output_ids)


def _concatenated(prompt: Sequence[int], output: Sequence[int]) -> Callable[[int, int], Sequence[int]]:
    def tokens(start: int, end: int) -> Sequence[int]:
        n = len(prompt)
        # As they are, mostly an array: a list of so many numbers takes longer than all else.
        if start >= n:
            return output[start - n : end - n]
        if end <= n:
            return prompt[start:end]
        return [*prompt[start:end], *output[: end - n]]

    return tokens


def row_of(req: Any) -> int | None:
    """Return the row that a request has in SGLang's tables, or None if it has none."""
    row = getattr(getattr(req, "kv", None), "req_pool_idx", None)
    return None if row is None else int(row)


def _expect_known(w: Noted) -> int:
    """Return the row of a request that is like those that the adapter knows.

    Raises:
        UnknownKindError: something of it is missing.
    """
    for name in _NEEDED:
        if getattr(w.req, name, None) is None:
            raise UnknownKindError(f"a request without {name}")
    if w.row is None:
        raise UnknownKindError("a request without a row")
    return w.row


def was_discarded(req: Any, length: int) -> bool:
    """Whether a forward's result was thrown away: the request finished without the token behind `length` ones."""
    return bool(req.finished()) and known_tokens(req) <= length


def _discarded(req: Any, length: int) -> Callable[[], bool]:
    return lambda: was_discarded(req, length)
