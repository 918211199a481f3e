"""What a forward of SGLang is about: its requests, as the scheduler has them on the host, in the canary's words.

Nothing here reads device memory: lengths and rows come from the mirrors that the scheduler keeps on the host, tokens
from the requests themselves, and the flat tensors are handed on as they are.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kv_canary.constants import OWNER_MASK
from kv_canary.errors import must_be
from kv_canary.forward import ForwardRequest
from kv_canary.identity import identity_word
from kv_canary.rows import REMEMBERED_OWNERS

# Under this name a forward batch carries what `note` has seen.
_NOTED = "kv_canary_requests"


@dataclass(frozen=True, kw_only=True)
class Noted:
    """One request of a batch, as the scheduler had it when it made the batch: its row may be another's soon."""

    req: Any
    row: int


class Owners:
    """A serial number for every request; SGLang's rows are reused too soon to name one."""

    def __init__(self) -> None:
        # By request, so that one that comes again under the same name is another.
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._last = 0

    def owner(self, req: Any) -> int:
        """Return the number of a request, which is never 0 and stays with it for as long as it lives."""
        if req not in self._numbers:
            self._last = self._last % OWNER_MASK + 1
            self._numbers[req] = self._last
            self._names[self._last] = req.rid
            if len(self._names) > REMEMBERED_OWNERS:
                self._names.popitem(last=False)
        return self._numbers[req]

    def name(self, owner: int) -> str | None:
        """Return the name of the request that `owner` was given to, or None if that is forgotten."""
        return self._names.get(owner)


def note(forward_batch: Any, schedule_batch: Any) -> None:
    """Remember with a forward batch which requests it was made of."""
    noted = tuple(Noted(req=req, row=req.kv.req_pool_idx) for req in schedule_batch.reqs)
    setattr(forward_batch, _NOTED, noted)


def noted(forward_batch: Any) -> tuple[Noted, ...]:
    """Return the requests of a forward batch, in its order; none where nobody has noted them."""
    found: tuple[Noted, ...] = getattr(forward_batch, _NOTED, ())
    return found


def lengths(forward_batch: Any) -> list[tuple[int, int]]:
    """Return (prefix, extend) of every request of a forward without speculation.

    Raises:
        ValueError: the batch is of a kind that the adapter does not know, or its lengths are not on the host.
    """
    mode = forward_batch.forward_mode
    if mode.is_decode():
        if forward_batch.seq_lens_cpu is None:
            raise ValueError(must_be("sglang adapter", "seq_lens_cpu", "known on the host", "None"))
        # The new token is counted already.
        return [(length - 1, 1) for length in forward_batch.seq_lens_cpu.tolist()]
    if mode.is_extend_without_speculative() and not mode.is_dllm_extend() and not mode.is_split_prefill():
        prefixes, extends = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        if prefixes is None or extends is None:
            raise ValueError(must_be("sglang adapter", "extend_prefix_lens_cpu", "known on the host", "None"))
        return list(zip(map(int, prefixes), map(int, extends), strict=True))
    raise ValueError(must_be("sglang adapter", "forward_mode", "extend, mixed or decode", mode.name))


def requests(
    who: Sequence[Noted],
    lens: Sequence[tuple[int, int]],
    *,
    owners: Owners,
    tokens_of: Callable[[Any], Callable[[int, int], list[int]]],
    overlap: bool,
    drafts: bool = False,
) -> list[ForwardRequest]:
    """Describe the requests of a forward.

    Args:
        who: the requests, in the order of the flat tensors.
        lens: (prefix, extend) of each.
        owners: their serial numbers.
        tokens_of: gives a request's own tokens [start, end) as a function.
        overlap: whether the scheduler prepares a forward before it knows the results of the one before, so that a
            request may turn out to be finished.
        drafts: whether all new tokens but the first are drafts, which the request may never own.

    Raises:
        ValueError: there are more or fewer requests than lengths.
    """
    if len(who) != len(lens):
        raise ValueError(must_be("sglang adapter", "requests", f"as many as the batch's {len(lens)}", str(len(who))))
    return [
        ForwardRequest(
            request_id=w.req.rid,
            row=w.row,
            owner=owners.owner(w.req),
            prefix_len=prefix,
            extend_len=extend,
            tokens=tokens_of(w.req),
            identity=identity_of(w.req),
            discarded=_discarded(w.req, prefix + (1 if drafts else extend)) if overlap else None,
        )
        for w, (prefix, extend) in zip(who, lens, strict=True)
    ]


def own_tokens(req: Any) -> Callable[[int, int], list[int]]:
    """Return a function that gives a request's own tokens, prompt first; it follows the request as it grows."""

    def tokens(start: int, end: int) -> list[int]:
        prompt, output = req.origin_input_ids, req.output_ids
        n = len(prompt)
        if start >= n:
            return list(output[start - n : end - n])
        return list(prompt[start:end]) + list(output[: max(0, end - n)])

    return tokens


def identity_of(req: Any) -> int:
    """Return the word of what a request's KV depends on besides its tokens: what its cache key holds besides them.

    That is the extra key, which names the LoRA adapter too, and the cache salt. Images stand in the tokens themselves,
    by hashes of their content.
    """
    parts = [(name, getattr(req, name, None)) for name in ("extra_key", "cache_salt")]
    return identity_word(*(text for name, value in parts if value for text in (name, str(value))))


def _discarded(req: Any, length: int) -> Callable[[], bool]:
    """Say whether a forward's result was thrown away: the request finished without the token that it sampled."""

    def discarded() -> bool:
        return bool(req.finished()) and len(req.origin_input_ids) + len(req.output_ids) <= length

    return discarded
