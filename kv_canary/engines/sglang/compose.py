"""The requests of SGLang's batches as compositions: a request costs Python when it joins a list, not at every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter, is_not
from typing import Any

import numpy as np

from kv_canary.constants import to_signed
from kv_canary.engines.sglang import batches
from kv_canary.engines.sglang.identities import Identities
from kv_canary.engines.sglang.items import items_at
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s, one_each

# Lists of requests whose prompts' lengths are remembered: those that prefill and those that decode, now and before.
_MOST_LISTS = 4
# Rows that are taken in between two looks at whose requests have ended.
_MOST_TAKEN = 256
_PROMPT, _OUTPUT = attrgetter("origin_input_ids"), attrgetter("output_ids")
# Requests, the lengths of their prompts, and the lists of what they generate.
_Known = tuple[Sequence[Any], Int64s, list[Any]]


class Requests:
    """What the canary asks of SGLang's requests."""

    def __init__(self) -> None:
        # Lists of requests, by their addresses; the lengths of their prompts, which stay as they are; and what each has
        # generated, in lists that grow.
        self._known: OrderedDict[int, _Known] = OrderedDict()

    def prompts(self, members: Sequence[Any]) -> Int64s:
        """Return the lengths of the prompts of a list of requests that never changes."""
        return self._of(members)[1]

    def texts(self, members: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yield the lists of what each has generated, as last seen; then, if another is asked for, as they are now."""
        _, _, texts = self._of(members)
        yield texts
        texts[:] = map(_OUTPUT, members)
        yield texts

    def know(self, members: Sequence[Any], prompts: Int64s, texts: list[Any]) -> _Known:
        """Take in, and return, a list of requests, the lengths of their prompts, and their generated tokens."""
        known = self._known[id(members)] = members, prompts, texts
        if len(self._known) > _MOST_LISTS:
            self._known.popitem(last=False)
        return known

    def _of(self, members: Sequence[Any]) -> _Known:
        known = self._known.get(id(members))
        if known is not None and known[0] is members:
            return known
        prompts = np.fromiter(map(len, map(_PROMPT, members)), np.int64, len(members))
        return self.know(members, prompts, list(map(_OUTPUT, members)))

    def forget(self) -> None:
        """Ask requests anew for their prompts and texts."""
        self._known.clear()

    def name(self, member: Any) -> str:
        """Return SGLang's `rid`."""
        name: str = member.rid
        return name

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request: its prompt, then what it has generated."""
        return batches.own_tokens(member)(start, end)

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        """Return the own token before each end; None where the host has not got one of them yet."""
        _, prompts, texts = self._of(members)
        at = ends - 1 - prompts
        in_prompts = (at < 0).nonzero()[0].tolist() if np.minimum.reduce(at) < 0 else ()
        for _ in range(2):
            asked = list(texts) if in_prompts else texts
            for i in in_prompts:
                # From behind.
                asked[i] = _PROMPT(members[i])
            if (found := items_at(asked, at)) is not None:
                return found
            # Not there yet; or a list was put in the place of another, which grows no more.
            texts[:] = map(_OUTPUT, members)
        return None

    def discarded(self, member: Any, length: int) -> bool:
        """Whether a request finished without the token that was sampled behind its first `length` ones."""
        return batches.was_discarded(member, length)


class _Rows:
    """The requests of the scheduler's rows, and what of them stays as long as they run.

    Attributes:
        owners, identities, prompts: int64 [rows], of the request that is known of each row; the last are lengths.
    """

    def __init__(self) -> None:
        self._members: list[Any] = []
        self._texts: list[Any] = []
        self.owners, self.identities, self.prompts = (np.zeros(0, np.int64) for _ in range(3))
        # Rows that were taken in since those of requests that have ended were let go of.
        self._taken = 0

    def missing(self, reqs: Sequence[Any], rows: Sequence[int]) -> list[int]:
        """Return the places of requests that are not known to have these rows."""
        if max(rows, default=0) >= len(self._members):
            self._grow(max(rows) + 1)
        there = list(map(self._members.__getitem__, rows))
        if there == reqs:
            return []
        return list(compress(range(len(reqs)), map(is_not, there, reqs)))

    def take(self, row: int, req: Any, *, owner: int, identity: int) -> None:
        """Take in whose a row is."""
        self._members[row], self._texts[row], self.prompts[row] = req, _OUTPUT(req), len(_PROMPT(req))
        self.owners[row], self.identities[row] = owner, to_signed(identity)
        self._taken += 1

    def forget(self, row: int) -> None:
        """Take in that a row may be another request's."""
        if row < len(self._members):
            self._members[row] = self._texts[row] = None

    def texts(self, rows: Sequence[int]) -> list[Any]:
        """Return the lists that the requests' generated tokens were in when their rows were taken in."""
        return list(map(self._texts.__getitem__, rows))

    def let_go(self, lists: Iterable[Int64s]) -> None:
        """Keep no request but those of these rows, now and then."""
        if self._taken < _MOST_TAKEN:
            return
        self._taken, kept, texts = 0, [None] * len(self._members), [None] * len(self._members)
        for row in np.concatenate(list(lists)).tolist():
            kept[row], texts[row] = self._members[row], self._texts[row]
        self._members, self._texts = kept, texts

    def _grow(self, rows: int) -> None:
        more = max(rows, 2 * len(self._members)) - len(self._members)
        self._members += [None] * more
        self._texts += [None] * more
        self.owners, self.identities, self.prompts = (
            np.concatenate([x, np.zeros(more, np.int64)]) for x in (self.owners, self.identities, self.prompts)
        )


class Composer:
    """Makes the compositions of batches, and their lengths from those of the step before.

    Args:
        owners: the requests' serial numbers.
        identities: what their KV depends on.
        source: answers for the requests.
    """

    def __init__(self, owners: batches.Owners, identities: Identities, source: Requests | None = None) -> None:
        self._owners, self._identities, self._source = owners, identities, source or Requests()
        self._rows = _Rows()
        # Batches that decode come again and again, with those that prefill between them.
        self._decoding, self._others = _List(), _List()

    def compose(self, schedule_batch: Any) -> Composition | None:
        """Return the composition of a batch; None where one of its requests has no row that the adapter knows."""
        reqs, mirror = schedule_batch.reqs, schedule_batch.req_pool_indices_cpu
        mode = schedule_batch.forward_mode
        decodes = mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend_v2()
        mine = self._decoding if decodes else self._others
        # The scheduler makes a new mirror where rows change.
        if mine.composition is not None and reqs == mine.reqs and mine.has_rows(mirror):
            return mine.composition
        rows = [] if mirror is None else mirror.tolist()
        if not self._know(reqs, rows):
            # The scheduler keeps no rows of the batch, or others than its requests say.
            said = [batches.row_of(req) for req in reqs]
            rows = [row for row in said if row is not None]
            if len(rows) < len(said) or not self._know(reqs, rows):
                return None
        known, at = self._rows, np.array(rows, np.int64)
        composition = Composition(
            reqs, rows=at, owners=known.owners[at], identities=known.identities[at], source=self._source
        )
        self._source.know(composition.members, known.prompts[at], known.texts(rows))
        mine.take(reqs, composition)
        known.let_go((self._decoding.rows, self._others.rows))
        return composition

    def _know(self, reqs: Sequence[Any], rows: Sequence[int]) -> bool:
        """Take in the requests that are new; return False where these are not the rows that they say they have."""
        if len(rows) != len(reqs) or min(rows, default=0) < 0:
            return False
        for i in self._rows.missing(reqs, rows):
            req = reqs[i]
            if batches.row_of(req) != rows[i]:
                return False
            self._rows.take(rows[i], req, owner=self._owners.owner(req), identity=self._identities.of(req))
        return True

    def requests(self, forward_batch: Any, *, lookahead: int) -> BatchRequests | None:
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
        lengths, newest = forward_batch.seq_lens_cpu, None
        decodes = lengths is not None and forward_batch.forward_mode.is_decode()
        if decodes:
            if not lookahead and (following := self._decoding.following(composition, forward_batch)) is not None:
                return following
            # The new token is counted already.
            prefix = np.subtract(lengths.numpy(), 1, dtype=np.int64)
            extend = one_each(len(prefix))
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
        if not has_all:
            return None
        requests = BatchRequests(composition, prefix=prefix, extend=extend, newest=newest)
        if decodes:
            self._decoding.begin(requests, self._source.prompts(composition.members))
        return requests

    def row_ended(self, row: int) -> None:
        """Take in that the request of a row has given it back: if it comes again, its text may be another one."""
        self._rows.forget(row)
        self._source.forget()
        for mine in (self._decoding, self._others):
            mine.end()

    def forget(self) -> None:
        """Compose the next batch from nothing."""
        self._rows, self._decoding, self._others = _Rows(), _List(), _List()


class _List:
    """A list of requests and its composition."""

    def __init__(self) -> None:
        self.reqs: list[Any] = []
        self.composition: Composition | None = None
        # Those of the last composition, over or not.
        self.rows = one_each(0)
        # What was last seen to hold its rows.
        self._mirror: Any = None
        # Its requests in the last decode step; what each has generated, and the place of its newest token there.
        self._last: BatchRequests | None = None
        self._texts: list[Any] = []
        self._at = one_each(0)
        self._prompts = one_each(0)

    def has_rows(self, mirror: Any) -> bool:
        """Whether the composition's rows are those that the scheduler keeps of the batch on the host."""
        if mirror is None or mirror is not self._mirror:
            if self.composition is None or not _is(self.composition.rows, mirror):
                return False
            self._mirror = mirror
        return True

    def begin(self, requests: BatchRequests, prompts: Int64s) -> None:
        """Take in a decode step that has been looked at request by request.

        Args:
            requests: in that step.
            prompts: the lengths of their prompts.
        """
        self._last, self._texts = None, []
        if requests.composition is self.composition:
            self._last, self._prompts = requests, prompts

    def following(self, composition: Composition, forward_batch: Any) -> BatchRequests | None:
        """Return the requests of a decode step if each is one token longer than in the last one, None otherwise.

        From one decode step of the same requests to the next, each has grown by a token at least: where all together
        have grown by as many as they are, each has by one.

        Args:
            composition: of the step.
            forward_batch: likewise, whose `seq_lens_sum` counts the new tokens.
        """
        last = self._last
        if last is None or last.composition is not composition:
            return None
        self._last, count = None, len(composition)
        if forward_batch.seq_lens_sum != last.num_cached + 2 * count:
            return None
        if self._texts:
            self._at += 1
        else:
            self._at = last.prefix - self._prompts
            if np.minimum.reduce(self._at) < 0:
                return None
            self._texts = list(map(_OUTPUT, composition.members))
        if (newest := items_at(self._texts, self._at)) is None:
            # Not there yet, or elsewhere.
            return None
        self._last = requests = last.following(newest)
        return requests

    def take(self, reqs: Sequence[Any], composition: Composition) -> None:
        """Take in a list that is composed."""
        self.end()
        self.reqs, self.composition, self.rows = list(reqs), composition, composition.rows

    def end(self) -> None:
        """Compose the next list anew; what is known of its rows stays."""
        self.reqs, self.composition, self._last, self._texts, self._mirror = [], None, None, [], None


def _is(rows: Int64s, mirror: Any) -> bool:
    """Whether these are the rows that the scheduler keeps of the batch on the host."""
    if mirror is None:
        return False
    there = mirror.numpy()
    return rows.shape == there.shape and bool(np.logical_and.reduce(rows == there))
