"""Speculative decoding: what SGLang's EAGLE workers do with a chain of drafts, in the canary's words.

One call of the worker is one step. To decode, the draft model writes its drafts, one in a forward (inner forwards:
they may yet be rejected); the target writes the last token and all drafts, and verifies them; the draft model then
writes all of these positions again, with the tokens that the target has chosen. To prefill, first the target and then
the draft model write the prompt. Positions past what the target accepts are written again by the same request in its
next step.

A slot of the draft pool stands for one position, as everywhere, but is computed from the token that follows it: input
ids are rotated by one, and the last of a prompt is the token that the target has just sampled. So the pool is a group
with token_offset 1, and a request has to give one token more than it has in the cache.

With the overlapped scheduler a step is prepared before the host has taken in what the last one accepted. Those tokens
are copied from the device as soon as they are chosen, before the draft model runs on them. Most attention backends let
the scheduler wait for the new lengths, which come behind that copy: then it has arrived. With those that do without
(`needs_cpu_seq_lens` is off), the canary waits for it behind the launch of a forward that goes by those lengths, where
the scheduler soon waits for it as well, and the device has something to do. With `check_inputs` it waits in front of
it, and so it does before the draft model writes what was chosen.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import batches, compose, support
from kv_canary.engines.sglang.chosen import Chosen, ChosenTokens, Step
from kv_canary.errors import must_be
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s, Newest

# The algorithms whose workers draft a chain and write it as described above.
SERVED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Settings under which they do more, or other things, and which.
_UNSERVED = {
    "enable_multi_layer_eagle": "every layer of it has a pool and positions of its own",
    "speculative_adaptive": "the graphs that drafts are written by change while it runs",
    "speculative_draft_window_size": "the draft model's pool is a window",
    "enable_streaming_session": "the row of a session keeps what was drafted behind its last turn",
}
_SKIPS_DRAFT_EXTEND = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
_COORDINATES_PREFILL = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
_SIMULATES = "SGLANG_SIMULATE_ACC_LEN"
_LAST = itemgetter(-1)


def check_supported(server_args: Any) -> None:
    """See that the adapter serves the speculative decoding that is asked for, or that none is.

    Raises:
        ValueError: it does not; the text names the setting.
    """
    args = support.settled(server_args)
    algorithm = args.speculative_algorithm
    if not algorithm:
        return
    if algorithm.upper() not in SERVED:
        raise ValueError(must_be("sglang adapter", "speculative_algorithm", f"one of {', '.join(SERVED)}", algorithm))
    top_k = args.speculative_eagle_topk
    if top_k not in (None, 1):
        raise ValueError(
            must_be(
                "sglang adapter", "speculative_eagle_topk", "1 (a tree's tokens have several successors)", str(top_k)
            )
        )
    if args.pp_size > 1:
        expected = "1 with speculative decoding (drafts are made in the step before)"
        raise ValueError(must_be("sglang adapter", "pp_size", expected, str(args.pp_size)))
    for name, reason in _UNSERVED.items():
        if value := getattr(args, name, None):
            raise ValueError(must_be("sglang adapter", name, f"off ({reason})", str(value)))
    for name in (_SKIPS_DRAFT_EXTEND, _COORDINATES_PREFILL):
        if os.environ.get(name, "").lower() in ("1", "true", "yes", "y", "on", "t"):
            raise ValueError(must_be("sglang adapter", name, "off", "on"))
    if _is_positive(os.environ.get(_SIMULATES)):
        expected = "off (what is accepted is not what was drafted)"
        raise ValueError(must_be("sglang adapter", _SIMULATES, expected, os.environ[_SIMULATES]))


def _is_positive(text: str | None) -> bool:
    """Whether a text is a number above 0."""
    try:
        return text is not None and float(text) > 0
    except ValueError:
        return False


def draft_runners(scheduler: Any) -> list[Any]:
    """Return the draft models' runners whose pools can be watched.

    None of STANDALONE's with a prefix cache: its keys are the tokens up to a position, without the one behind, so that
    the last slot of a prefix may hold KV that was computed from another request's next token. That costs drafts, and no
    output; to the canary it is another token than the request's own. EAGLE's keys hold the token behind as well.
    """
    args = support.settled(scheduler.server_args)
    if not args.speculative_algorithm or scheduler.draft_worker is None:
        return []
    if args.speculative_algorithm.upper() == "STANDALONE" and not args.disable_radix_cache:
        return []
    return [scheduler.draft_worker.draft_worker.draft_runner]


def describe_forward(
    forward_batch: Any, *, drafted: int = 0, seq_lens: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return (prefix, extend) of every request of a forward with speculation.

    Args:
        forward_batch: of the target or of a draft model.
        drafted: forwards of the draft model that came before this one in the same chain of drafts.
        seq_lens: tokens that each request has in the cache at the beginning of the step; None: as the batch has them on
            the host.

    Raises:
        UnknownKindError: the batch is of a kind that the adapter does not know, or its lengths are not on the host.
    """
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return [(length, forward_batch.spec_info.draft_token_num) for length in _lengths(forward_batch, seq_lens)]
    if mode.is_draft_extend_v2():
        extend = forward_batch.spec_info.num_tokens_per_req
        lengths = _lengths(forward_batch, seq_lens)
        # The batch's own count what is about to be written; what it began with does not.
        return [(length if seq_lens is not None else length - extend, extend) for length in lengths]
    if mode.is_decode():
        return [(length + drafted, 1) for length in _lengths(forward_batch, seq_lens)]
    return batches.lengths(forward_batch)


def given_lengths(forward_batch: Any) -> torch.Tensor | None:
    """Return the lengths, new tokens included, that a forward's attention backend is given on the device.

    None of a draft: its graph counts on from the lengths at the beginning of the chain.
    """
    mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
    if is_draft(forward_batch):
        return None
    if mode.is_target_verify():
        # Its backends add the drafts themselves.
        lengths = lengths + forward_batch.spec_info.draft_token_num
    given: torch.Tensor = lengths
    return given


class _Target(NamedTuple):
    """The requests of the target's last forward: whose they are, and their lengths."""

    members: Sequence[Any]
    rows: Int64s
    owners: Int64s
    prefix: Int64s
    extend: Int64s
    # As the step began with them, where they are composed.
    newest: Newest | None = None


class DraftedRequests(compose.Requests):
    """What the canary asks of SGLang's requests whose tokens may have been chosen and not taken in yet.

    Args:
        tokens: gives a request's own tokens as a function.
    """

    def __init__(self, tokens: Callable[[Any], Callable[[int, int], Sequence[int]]]) -> None:
        super().__init__()
        self._tokens = tokens

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request, those included that the scheduler has not taken in."""
        return self._tokens(member)(start, end)

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        """Return None: they are at hand, or have to be asked for one by one."""
        return None


class Speculation:
    """The state of a speculative worker: how far its chain of drafts is, and what it has accepted that nobody has read.

    Args:
        worker: the scheduler's `EAGLEWorkerV2` or `StandaloneWorkerV2`.
        max_rows: of SGLang's table.
        owner_of: gives a request's serial number.
        patches: takes the wraps back.
        step: makes the forwards inside the block one step of the canary.
        begins: called when a step has begun and nothing of it is launched.
        forward: called around forwards of the draft model that do not go through `ModelRunner.forward`, with the
            original, the runner and the forward batch.
        following: gives the context, by what is done, of a part of the canary that may fail where the engine must not.

    Attributes:
        source: answers for requests that are composed.
    """

    def __init__(
        self,
        worker: Any,
        *,
        max_rows: int,
        owner_of: Callable[[Any], int],
        patches: Patches,
        step: Callable[[], AbstractContextManager[Any]],
        begins: Callable[[], None] = lambda: None,
        forward: Callable[..., Any],
        following: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext(),
    ) -> None:
        self._step, self._begins = step, begins
        self._forward = forward
        self._following, self._owner_of = following, owner_of
        self._runner = worker.draft_worker.draft_runner
        self._drafted = 0
        # Whether a draft of this chain could not be described: those behind it cannot, either.
        self._broken = False
        # None: nothing is known of them.
        self._target: _Target | None = None
        self._chosen = ChosenTokens(max_rows)
        self.source = DraftedRequests(self.tokens)
        patches.wrap(worker, "forward_batch_generation", self._iterate)
        patches.wrap(worker, "verify", self._verify)
        patches.wrap(worker.target_worker, "forward_batch_generation", self._target_forward)
        # The graph of a chain of drafts is left alone: each of its positions is written again, and recorded, by the
        # forward that this graph stands for, before anything relies on it. What others have left in its slots is looked
        # at before: see _iterate.
        graph = getattr(worker.draft_worker, "cuda_graph_runner_for_draft_extend", None)
        if graph is not None:
            patches.wrap(graph, "execute", self._replay)

    def requests(self, forward_batch: Any, *, lookahead: int) -> BatchRequests | None:
        """Return the requests of a forward behind drafts, in arrays; None: they have to be described one by one.

        Where it is the target's, it waits for what was chosen in the step before.

        Args:
            forward_batch: of which the composition is noted.
            lookahead: tokens past its prefix that have to be known of a request.
        """
        composition, mode = batches.composed(forward_batch), forward_batch.forward_mode
        if composition is None or not (mode.is_target_verify() or mode.is_draft_extend_v2()):
            return None
        lengths, info = forward_batch.seq_lens_cpu, forward_batch.spec_info
        prefix = None if lengths is None else lengths.numpy().astype(np.int64)
        if mode.is_target_verify():
            # Nothing is known of them if this raises.
            self._target = None
            newest = self._chosen.newest(composition)
            # The last token is the one that is not in the cache.
            prefix = newest.end - 1 if prefix is None else prefix
            is_known = (newest.end >= prefix + lookahead).all() and np.minimum.reduce(prefix, initial=1) > 0
            if len(prefix) != len(composition) or not is_known or not self._is_text(composition, newest):
                return None
            extend = np.full(len(composition), info.draft_token_num)
            self._target = _Target(
                composition.members, composition.rows, composition.owners, prefix, extend, newest=newest
            )
        else:
            target = self._target
            if target is None or target.newest is None or target.rows is not composition.rows:
                return None
            newest, extend = target.newest, np.full(len(composition), info.num_tokens_per_req)
            # The batch's own count what is about to be written; what it began with does not.
            prefix = target.prefix if prefix is None else prefix - extend
            if len(prefix) != len(composition) or (prefix != target.prefix).any():
                return None
        return BatchRequests(composition, prefix=prefix, extend=extend, drafts=True, recent=newest)

    def _is_text(self, composition: Composition, newest: Newest) -> bool:
        """Whether what was chosen agrees with the requests' own texts, as far as the scheduler has taken it in.

        The last token of each text is looked at: all of them are, in one step or another, where one is accepted.
        """
        for texts in self.source.texts(composition.members):
            prompts, output = self.source.prompts(composition.members), list(map(len, texts))
            generated = np.array(output, np.int64)
            last = np.fromiter(map(_LAST, compress(texts, output)), np.int64)
            there = generated > 0
            at = (prompts + generated - 1)[there]
            known = Newest(*(x[there] for x in newest))
            is_there = (known.first <= at) & (at < known.end)
            places = np.where(is_there, at - known.base, 0)
            if (known.tokens[np.arange(len(at)), places] == last)[is_there].all():
                return True
        return False

    def describe(self, forward_batch: Any) -> list[tuple[int, int]]:
        """Return (prefix, extend) of every request of the forward that is about to run; once for each forward.

        Raises:
            UnknownKindError: see `describe_forward`; or a draft before this one could not be described.
        """
        drafted, draft = self._drafted, is_draft(forward_batch)
        is_target = not draft and not forward_batch.forward_mode.is_draft_extend_v2()
        if draft:
            self._drafted += 1
        if is_target:
            # Nothing is known of it if this raises.
            self._target = None
        try:
            if draft and self._broken:
                raise batches.UnknownKindError("a draft behind one that was not described")
            lens = describe_forward(forward_batch, drafted=drafted, seq_lens=self._seq_lens(forward_batch))
        except Exception:
            self._broken = draft or self._broken
            raise
        who = batches.noted(forward_batch)
        if is_target and len(who) == len(lens):
            prefix, extend = np.array(lens, np.int64).reshape(-1, 2).T.copy()
            self._target = _Target(
                [w.req for w in who],
                np.array([w.row or 0 for w in who], np.int64),
                np.array([self._owner_of(w.req) for w in who], np.int64),
                prefix,
                extend,
            )
        return lens

    def reads_chosen(self, forward_batch: Any) -> bool:
        """Whether what was chosen in the step before has to be known, and may not be yet, to describe a forward."""
        mode = forward_batch.forward_mode
        return forward_batch.seq_lens_cpu is None and (mode.is_decode() or mode.is_target_verify())

    def ahead(self, forward_batch: Any) -> int:
        """Return how many of the tokens before the forward that `describe` was asked for last are drafts."""
        return self._drafted - 1 if is_draft(forward_batch) else 0

    def known(self, req: Any, wanted: int | None = None) -> int:
        """Return how many tokens `tokens` has of a request by now; waits for what was chosen, but for what is behind.

        Args:
            req: the request.
            wanted: how many are wanted: once it has as many, what was chosen later is not waited for. None: all.
        """
        known = batches.known_tokens(req)
        for unread in self._chosen.unread(req):
            if known <= unread.start and (wanted is None or known < wanted):
                known = unread.start + len(unread.read())
        return known

    def tokens(self, req: Any) -> Callable[[int, int], Sequence[int]]:
        """Return a function that gives a request's own tokens, those included that the scheduler has not taken in."""
        own = batches.own_tokens(req)

        def tokens(start: int, end: int) -> Sequence[int]:
            found = own(start, end)
            if len(found) == end - start:
                return found
            found = list(found)
            for unread in self._chosen.unread(req):
                first = start + len(found) - unread.start
                if len(found) < end - start and first >= 0:
                    found = found + unread.read()[first : end - unread.start]
            return found

        return tokens

    def settle(self) -> None:
        """Keep no request: the scheduler has nothing to do, and has taken in all that was chosen."""
        self._target = None
        self._chosen.settle()

    def row_ended(self, row: int) -> None:
        """Take in that a request has given its row back, for good or for a while."""
        self._chosen.row_ended(row)

    def _seq_lens(self, forward_batch: Any) -> list[int] | None:
        """Return the lengths at the beginning of the step of a forward whose batch has none on the host."""
        mode = forward_batch.forward_mode
        if forward_batch.seq_lens_cpu is not None:
            return None
        if mode.is_draft_extend_v2():
            return None if self._target is None else self._target.prefix.tolist()
        if mode.is_decode() or mode.is_target_verify():
            # The last token is the one that is not in the cache.
            return [self.known(noted.req) - 1 for noted in batches.noted(forward_batch)]
        return None

    def _iterate(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return original(batch, *args, **kwargs)
        self._drafted, self._broken = 0, False
        self._target = None
        with self._step():
            # The first that is launched may be a graph of drafts, which nobody watches, and may write to slots that
            # somebody has given back since the step before.
            self._begins()
            return original(batch, *args, **kwargs)

    def _target_forward(self, original: Callable[..., Any], *args: Any, is_verify: bool = False, **kwargs: Any) -> Any:
        result = original(*args, is_verify=is_verify, **kwargs)
        with self._following("what was sampled"):
            target = self._target
            if not is_verify and result.next_token_ids is not None and target is not None:
                # The token behind the prompt; of a chunk that is not the last, the prompt's own comes in its place.
                starts = target.prefix + target.extend
                owned = np.fromiter(map(batches.known_tokens, target.members), np.int64, len(target.members))
                self._note(target, result.next_token_ids, None, starts=starts, counts=owned <= starts)
        return result

    def _verify(self, original: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(batch, *args, **kwargs)
        with self._following("what was accepted"):
            if self._target is not None:
                # The last token of before is the first that was verified.
                self._note(self._target, result.next_token_ids, result.accept_lens, starts=self._target.prefix + 1)
        return result

    def _replay(self, original: Callable[..., Any], forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        def replay(_runner: Any, forward_batch: Any) -> Any:
            return original(forward_batch, *args, **kwargs)

        return self._forward(replay, self._runner, forward_batch)

    def _note(
        self,
        target: _Target,
        tokens: torch.Tensor,
        given: torch.Tensor | None,
        *,
        starts: Int64s,
        counts: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Keep what the target has chosen for the requests of its last forward, without waiting for it.

        Args:
            target: these.
            tokens: int [requests x most], on the device.
            given: int [requests] of them; None: all.
            starts: how many tokens a request has before these.
            counts: for which requests they count; None: for all.
        """
        if len(target.members):
            step = Step(
                members=target.members,
                rows=target.rows,
                owners=target.owners,
                starts=starts,
                counts=counts,
                chosen=Chosen(tokens, given),
            )
            self._chosen.add(step)


def is_draft(forward_batch: Any) -> bool:
    """Say whether a forward writes drafts: an inner forward, on tokens that may yet be rejected."""
    return bool(forward_batch.forward_mode.is_decode())


def _lengths(forward_batch: Any, seq_lens: Sequence[int] | None) -> list[int]:
    if seq_lens is not None:
        return list(seq_lens)
    if forward_batch.seq_lens_cpu is None:
        raise batches.UnknownKindError("a forward whose lengths are not on the host (seq_lens_cpu)")
    lengths: list[int] = forward_batch.seq_lens_cpu.tolist()
    return lengths
