"""The requests of SGLang's batches as compositions: a request costs Python when it joins a list, not at every step."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, getitem
from typing import Any

import numpy as np

from kv_canary.engines.sglang import batches
from kv_canary.engines.sglang.identities import Identities
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s

# Lists of requests whose prompts' lengths are remembered: those that prefill and those that decode, now and before.
_MOST_LISTS = 4
_PROMPT, _OUTPUT = attrgetter("origin_input_ids"), attrgetter("output_ids")


class Requests:
    """What the canary asks of SGLang's requests."""

    def __init__(self) -> None:
        # Lists of requests, by their addresses, and the lengths of their prompts, which stay as they are.
        self._prompts: OrderedDict[int, tuple[Sequence[Any], Int64s]] = OrderedDict()

    def prompts(self, members: Sequence[Any]) -> Int64s:
        """Return the lengths of the prompts of a list of requests that never changes."""
        known = self._prompts.get(id(members))
        if known is not None and known[0] is members:
            return known[1]
        return self.know(members, np.fromiter(map(len, map(_PROMPT, members)), np.int64, len(members)))

    def know(self, members: Sequence[Any], prompts: Int64s) -> Int64s:
        """Take in, and return, the lengths of the prompts of a list of requests."""
        self._prompts[id(members)] = members, prompts
        if len(self._prompts) > _MOST_LISTS:
            self._prompts.popitem(last=False)
        return prompts

    def name(self, member: Any) -> str:
        """Return SGLang's `rid`."""
        name: str = member.rid
        return name

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request: its prompt, then what it has generated."""
        return batches.own_tokens(member)(start, end)

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        """Return the own token before each end; None where the host has not got one of them yet."""
        at = ends - 1 - self.prompts(members)
        texts = list(map(_OUTPUT, members))
        if np.minimum.reduce(at) < 0:
            for i in (at < 0).nonzero()[0].tolist():
                # From behind.
                texts[i] = _PROMPT(members[i])
        try:
            return np.fromiter(map(getitem, texts, at.tolist()), np.int64, len(members))
        except IndexError:
            return None

    def discarded(self, member: Any, length: int) -> bool:
        """Whether a request finished without the token that was sampled behind its first `length` ones."""
        return batches.was_discarded(member, length)


class Composer:
    """Makes each batch's composition from that of the batch before.

    Args:
        owners: the requests' serial numbers.
        identities: what their KV depends on.
    """

    def __init__(self, owners: batches.Owners, identities: Identities) -> None:
        self._owners, self._identities, self._source = owners, identities, Requests()
        # Batches that decode come again and again, with those that prefill between them.
        self._decoding, self._others = _List(), _List()

    def compose(self, schedule_batch: Any) -> Composition | None:
        """Return the composition of a batch; None where one of its requests has no row that the adapter knows."""
        reqs, mirror = schedule_batch.reqs, schedule_batch.req_pool_indices_cpu
        decodes = schedule_batch.forward_mode.is_decode()
        mine, other = (self._decoding, self._others) if decodes else (self._others, self._decoding)
        # The scheduler makes a new mirror where rows change.
        if mine.composition is not None and reqs == mine.reqs and mine.has_rows(mirror):
            return mine.composition
        rows, owners, identities, prompts = (np.zeros(len(reqs), np.int64) for _ in range(4))
        unknown = np.arange(len(reqs))
        for known in (mine, other):
            if known.composition is not None and len(unknown):
                asked = reqs if len(unknown) == len(reqs) else [reqs[i] for i in unknown.tolist()]
                place = np.fromiter(map(known.index.get, asked, repeat(-1)), np.int64, len(asked))
                old = place >= 0
                at, place = unknown[old], place[old]
                rows[at] = known.composition.rows[place]
                owners[at] = known.composition.owners[place]
                identities[at] = known.composition.identities[place]
                prompts[at] = self._source.prompts(known.composition.members)[place]
                unknown = unknown[~old]
        # A request that was put off has another row when it comes again.
        new = unknown.tolist()
        if not self._read_rows(reqs, rows, new):
            return None
        if not _is(rows, mirror) and not self._read_rows(reqs, rows, range(len(reqs))):
            return None
        for i in new:
            owners[i] = self._owners.owner(reqs[i])
            identities[i] = np.uint64(self._identities.of(reqs[i])).astype(np.int64)
            prompts[i] = len(_PROMPT(reqs[i]))
        composition = Composition(reqs, rows=rows, owners=owners, identities=identities, source=self._source)
        self._source.know(composition.members, prompts)
        mine.take(reqs, composition)
        return composition

    def _read_rows(self, reqs: Sequence[Any], rows: Int64s, which: Iterable[int]) -> bool:
        """Set the rows of some requests; return False where one has none that the adapter knows."""
        for i in which:
            row = batches.row_of(reqs[i])
            if row is None:
                return False
            rows[i] = row
        return True

    def forget(self) -> None:
        """Compose the next batch from nothing."""
        self._decoding, self._others = _List(), _List()


class _List:
    """A list of requests and its composition."""

    def __init__(self) -> None:
        self.reqs: list[Any] = []
        self.index: dict[Any, int] = {}
        self.composition: Composition | None = None
        # What was last seen to hold its rows.
        self._mirror: Any = None

    def has_rows(self, mirror: Any) -> bool:
        """Whether the composition's rows are those that the scheduler keeps of the batch on the host."""
        if mirror is None or mirror is not self._mirror:
            if self.composition is None or not _is(self.composition.rows, mirror):
                return False
            self._mirror = mirror
        return True

    def take(self, reqs: Sequence[Any], composition: Composition) -> None:
        self.reqs, self.composition, self._mirror = list(reqs), composition, None
        self.index = dict(zip(reqs, range(len(reqs)), strict=True))


def _is(rows: Int64s, mirror: Any) -> bool:
    """Whether these are the rows that the scheduler keeps of the batch on the host."""
    if mirror is None:
        return False
    there = mirror.numpy()
    return rows.shape == there.shape and bool(np.logical_and.reduce(rows == there))


@functools.lru_cache(maxsize=256)
def _ones(count: int) -> Int64s:
    ones = np.ones(count, np.int64)
    ones.setflags(write=False)
    return ones


def requests_of(forward_batch: Any, *, lookahead: int) -> BatchRequests | None:
    """Return the requests of a forward that has been composed; None: they have to be described one by one.

    Args:
        forward_batch: without beams and speculation.
        lookahead: tokens past its prefix that have to be known of a request.

    Raises:
        UnknownKindError: as `batches.lengths`.
    """
    composition = batches.composed(forward_batch)
    if composition is None:
        return None
    newest = None
    if forward_batch.forward_mode.is_decode() and forward_batch.seq_lens_cpu is not None:
        # The new token is counted already.
        prefix = np.subtract(forward_batch.seq_lens_cpu.numpy(), 1, dtype=np.int64)
        extend = _ones(len(prefix))
    else:
        prefix, extend = np.array(batches.lengths(forward_batch), np.int64).reshape(-1, 2).T.copy()
    if len(prefix) != len(composition):
        return None
    try:
        if lookahead or not len(prefix) or np.minimum.reduce(prefix) <= 0:
            known = np.fromiter(map(batches.known_tokens, composition.members), np.int64, len(composition))
            has_all = not ((prefix > 0) & (known < prefix + lookahead)).any()
        else:
            newest = composition.source.newest(composition.members, prefix)
            has_all = newest is not None
    except (AttributeError, TypeError):
        # Of another kind than the adapter knows: whose, is found one by one.
        return None
    return BatchRequests(composition, prefix=prefix, extend=extend, newest=newest) if has_all else None
