"""What the canary keeps on the device, and what it knows on the host about each row's tail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kv_canary import ops
from kv_canary.constants import ANCHOR, Tag
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.host import Mailbox, Numbers, let_go, send
from kv_canary.runtime.replays import Replays, layout_of, round_up, rounded
from kv_canary.runtime.tails import FEW, Advance, Progress, Tails, anchor_of, flat_of, ones, segments_of
from kv_canary.specs.structures import ViolationLog
from kv_canary.specs.violation_row import VIOLATION_WORDS

# Tokens of a launch that may be replayed, or wait for HEAD.
MOST_REPLAYED = 4096

# Positions that a row of the token table has room for at least.
LEAST_WIDTH = 256

_NOBODY = np.zeros(0, np.int64), np.zeros(0, np.int64)

# Of all forwards and groups together, two each.
MAX_STATUSES = 256

# Where what is in a state's `words`; each begins on 16 bytes. Status words are int32.
NUM_COUNTERS = 2 * len(Tag)
VIOLATION_COUNT = NUM_COUNTERS
FIRST_STATUS = VIOLATION_COUNT + 2


class CanaryDeviceState:
    """The violation log, the counters, the step number, and each row's identity, tail and tokens.

    Args:
        max_rows: rows, row 0 (padding) included.
        ring_capacity: rows of the violation ring.
        keep_tokens: keep every request's tokens, for TOKEN.
        max_len: tokens of one request that the token table has room for at once; longer ones make it grow.
        offsets: token offsets of the groups.
        replays: runs the launches that come at every step; None: they run as they are.
        device: where all of it lives.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        ring_capacity: int,
        keep_tokens: bool,
        max_len: int = 1,
        offsets: Iterable[int] = (0,),
        replays: Replays | None = None,
        device: torch.device,
    ) -> None:
        self.device = device
        # What a step leaves for the host lies together: counters, the count of violations, status words.
        self.words = torch.zeros(FIRST_STATUS + MAX_STATUSES // 2, dtype=torch.int64, device=device)
        self.counters = self.words[:NUM_COUNTERS].view(len(Tag), 2)
        ring = torch.zeros(ring_capacity, VIOLATION_WORDS, dtype=torch.int64, device=device)
        self.violations = ViolationLog(ring=ring, count=self.words[VIOLATION_COUNT : VIOLATION_COUNT + 1])
        self._statuses = self.words[FIRST_STATUS:].view(torch.int32)
        self._num_statuses = 0
        self.head_writes = torch.zeros_like(self.counters)
        # Of the step: known on the host, and brought to the device where something other than a forward asks for it.
        self.number = 0
        self._own_step = self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._step_there = 0
        self.anchors = torch.full((max_rows,), ANCHOR, dtype=torch.int64, device=device)
        self.tails = {o: Tails(max_rows=max_rows, offset=o, device=device) for o in sorted(set(offsets))}
        self.token_pool: torch.Tensor | None = None
        if keep_tokens:
            self.token_pool = torch.zeros(max_rows, max(max_len, LEAST_WIDTH), dtype=torch.int32, device=device)
        # Where no group's slots hold a later token, one launch brings up tails and tokens alike.
        self._together = set(self.tails) == {0}
        self._tokens = self.tails[0].progress if self._together else Progress(max_rows)
        self._anchored = np.zeros(max_rows, np.int64)
        # False: nobody knows which identity a row's chain starts from.
        self._is_anchored = np.ones(max_rows, np.bool_)
        # The number of the composition all of whose requests' chains were last seen to start from their identities.
        self._all_anchored = 0
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        self._table_is_final = False
        self._mailbox = Mailbox(device, words=4 * max_rows)
        self._replays = replays or Replays(None)
        self._max_rows = max_rows

    @property
    def step(self) -> torch.Tensor:
        """The step number, int64 [1], where a forward has been sent it, or where it always is."""
        if self._step_there != self.number:
            self._own_step.fill_(self.number)
            self._step, self._step_there = self._own_step, self.number
        return self._step

    def take_step(self, there: torch.Tensor) -> None:
        """Take in that int64 `there` [1] holds the step number, and will as long as it is the number."""
        self._step, self._step_there = there, self.number

    def new_status(self) -> int:
        """Return the number of a status word that nobody has.

        Raises:
            RuntimeError: there are too many.
        """
        if self._num_statuses == MAX_STATUSES:
            raise RuntimeError(f"kv-canary: status words must be at most {MAX_STATUSES}, got one more")
        self._num_statuses += 1
        return self._num_statuses - 1

    def status(self, number: int) -> torch.Tensor:
        """Return a status word, int32 [1]."""
        return self._statuses[number : number + 1]

    def keep_status(self, number: int, earlier: int, *, fresh: bool) -> None:
        """Add a status word's bits to those of another; or, if that is `fresh`, copy them there."""
        if fresh:
            self.status(earlier).copy_(self.status(number))
        else:
            self.status(earlier).bitwise_or_(self.status(number))

    @property
    def lookahead(self) -> int:
        """Tokens past a request's prefix that some group's slots hold."""
        return max(self.tails)

    def advance(self, requests: BatchRequests, *, backend: str | None, may_wait: bool = False) -> Advance | None:
        """Bring anchors, tails and tokens of every request's row up to its prefix, from the request's own tokens.

        A row that changed hands, or whose prefix shrank, restarts from 0. With `may_wait`, the launch that does it is
        returned where it is a small one: it is to be made before anything reads tails or tokens, or `forget` called.

        Raises:
            ValueError: a request gives fewer tokens than it was asked for; then no row has changed.
        """
        if may_wait and (advance := self._one_token_each(requests)) is not None:
            return advance
        behind = [(tails, *tails.progress.behind(requests)) for tails in self.tails.values()]
        segments = [
            (tails, which, segments_of(requests, which, starts, offset=tails.offset))
            for tails, which, starts in behind
            if len(which)
        ]
        apart = self.token_pool is not None and not self._together
        missing, starts = self._tokens.behind(requests) if apart else _NOBODY
        tokens = segments_of(requests, missing, starts, more=self.lookahead) if len(missing) else None
        # Only now, so that a history that could not be had leaves every row as it was.
        self._anchor(requests)
        for tails, which, lists in segments:
            where = {"anchors": self.anchors, "tails": tails.chains}
            if self._together:
                self._make_room(_longest(requests.prefix[which]))
                where = self.together
            tails.progress.advanced(requests, which)
            if may_wait and self._together and len(lists[0]) <= MOST_REPLAYED:
                return lists
            self._run("chain_tails", lists, where, backend)
        if tokens is not None and self.token_pool is not None:
            self._make_room(_longest(requests.prefix[missing]))
            self._run("scatter_token_ids", tokens, {"pool": self.token_pool}, backend)
            self._tokens.advanced(requests, missing)
        return None

    def no_advance(self) -> Advance:
        """Return what brings up no row."""
        none = np.zeros(0, np.int64)
        return Advance(none, ones(0), none, none)

    def warm_up(self, *, backend: str | None) -> None:
        """Bring up no row, by every launch that may be made for some, so that all kernels are compiled."""
        for tokens in [*rounded(MOST_REPLAYED), MOST_REPLAYED + 1]:
            lists = np.zeros(tokens, np.int64), ones(1), np.zeros(1, np.int64), np.zeros(1, np.int64)
            for tails in self.tails.values():
                where = self.together if self._together else {"anchors": self.anchors, "tails": tails.chains}
                self._run("chain_tails", lists, where, backend)
            if self.token_pool is not None and not self._together:
                self._run("scatter_token_ids", lists, {"pool": self.token_pool}, backend)

    @property
    def together(self) -> dict[str, torch.Tensor]:
        """What a launch works on that brings up tails and tokens alike, by the names of `chain_tails`."""
        where = {"anchors": self.anchors, "tails": self.tails[0].chains}
        if self.token_pool is not None:
            where["pool"] = self.token_pool
        return where

    def _one_token_each(self, requests: BatchRequests) -> Advance | None:
        """Return what brings up the rows of requests that have all grown by one token, as in most steps; else None."""
        newest = requests.newest_of_all
        if newest is None or not 0 < len(newest) <= MOST_REPLAYED:
            return None
        starts = self.one_behind(requests)
        if starts is None:
            return None
        self._make_room(requests.longest)
        self.went_on(requests)
        return Advance(newest, ones(len(newest)), requests.rows, starts)

    def one_behind(self, requests: BatchRequests) -> Int64s | None:
        """Return how far the requests' rows have come, where each is one token behind; None: that is not known.

        Not known either where one launch does not bring up all that there is.
        """
        tokens, number = self._tokens, requests.composition.number
        if tokens.at is not None and requests.previous is tokens.at and number == self._all_anchored:
            # Of the same list, of which all that is asked below was so a step ago.
            return tokens.at.prefix
        return tokens.one_behind(requests) if self._one_launch_does(requests) else None

    def behind(self, requests: BatchRequests) -> tuple[Int64s, Int64s] | None:
        """Return which requests' rows are not at their prefixes, and the lengths to go on from; None: not known.

        Not known either where one launch does not bring up all that there is.
        """
        return self._tokens.behind(requests) if self._one_launch_does(requests) else None

    def _one_launch_does(self, requests: BatchRequests) -> bool:
        """Whether one launch brings up all that there is of the requests."""
        number = requests.composition.number
        if not self._together or (number != self._all_anchored and len(self._not_anchored(requests))):
            return False
        self._all_anchored = number
        return True

    def bring_up(self, requests: BatchRequests, which: Int64s, starts: Int64s) -> Advance:
        """Return what brings rows up to their prefixes, and take in that it is launched.

        Args:
            requests: of a forward.
            which, starts: what `behind` has said of them.

        Raises:
            ValueError: a request gives fewer tokens than it was asked for; then no row has changed.
        """
        lists = segments_of(requests, which, starts)
        self._make_room(_longest(requests.prefix[which]))
        self._tokens.advanced(requests, which)
        return lists

    def go_ahead(self, requests: BatchRequests) -> Advance | None:
        """Return what brings rows up to the last token that a forward writes of each, and take in that it is launched.

        Of requests of which it writes several, whose rows are at their prefixes: to be launched behind the forward's
        TAIL, when its tails are not needed any more, so that the next forward finds rows where those of decoding
        requests are. None: there are no such requests, or one launch does not do it.

        Raises:
            ValueError: a request gives fewer tokens than it was asked for; then no row has changed.
        """
        if not self._together:
            return None
        if len(requests) <= FEW:
            return self._few_go_ahead(requests)
        which = (requests.extend > 1).nonzero()[0]
        starts = self._tokens.lengths(requests.rows[which])
        if not len(which) or (starts != requests.prefix[which]).any():
            return None
        ends = requests.ends - 1
        ahead = BatchRequests(requests.composition, prefix=ends, extend=requests.extend)
        lists = segments_of(ahead, which, starts)
        self._make_room(_longest(ends[which]))
        self._tokens.went_ahead(requests.rows[which], ends[which])
        return lists

    def _few_go_ahead(self, requests: BatchRequests) -> Advance | None:
        rows, starts, ends, spans = list[int](), list[int](), list[int](), list[tuple[int, int, int]]()
        columns = (requests.rows.tolist(), requests.prefix.tolist(), requests.extend.tolist())
        for i, (row, prefix, extend) in enumerate(zip(*columns, strict=True)):
            if extend > 1:
                if not self._tokens.is_at(row, prefix):
                    return None
                rows.append(row)
                starts.append(prefix)
                ends.append(prefix + extend - 1)
                spans.append((i, prefix, ends[-1]))
        if not rows:
            return None
        flat, offsets = flat_of(requests, spans)
        self._make_room(max(ends))
        self._tokens.went_ahead(rows, ends)
        return Advance(flat, offsets, np.array(rows, np.int64), np.array(starts, np.int64))

    def went_on(self, requests: BatchRequests) -> None:
        """Take in that a launch brings up the rows of the requests, of which `one_behind` knew."""
        self._tokens.went_on(requests)

    def _make_room(self, longest: int) -> None:
        """Make room for a prefix of so many in the token table, if there is one and it may still grow."""
        longest += self.lookahead
        if self.token_pool is not None and longest > self.token_pool.shape[1] and not self._table_is_final:
            self.token_pool = widen(self.token_pool, longest)

    def forget(self, rows: Int64s) -> None:
        """Take in that it is not known how far these rows have come: they start anew."""
        for progress in (self._tokens, *(tails.progress for tails in self.tails.values())):
            progress.forget(rows)
        self._is_anchored[rows] = False
        self._all_anchored = 0

    def forget_owner(self, owner: int) -> None:
        """Take in that the text of a request may be another one: its row starts anew."""
        for progress in (self._tokens, *(tails.progress for tails in self.tails.values())):
            progress.forget(progress.rows_of(owner))

    def _run(self, op: str, lists: Sequence[Numbers], where: dict[str, torch.Tensor], backend: str | None) -> None:
        """Launch an op on flat tokens, offsets, rows and starts; `where` are its other tensors."""
        flat, offsets, rows, starts = lists
        tokens, requests = len(flat), len(rows)
        few = tokens <= MOST_REPLAYED
        if few and self._replays.rounds_up:
            # The requests past the others are padding: of row 0, for which nothing is done.
            tokens, requests = round_up(tokens, MOST_REPLAYED), round_up(requests, self._max_rows)
        posted = self._mailbox.post(flat, offsets, rows, starts, widths=(tokens, requests + 1, requests, requests))
        arguments = dict(zip(("flat", "offsets", "rows", "starts"), posted, strict=True))

        def launch() -> None:
            getattr(ops, op)(**arguments, **where, status=self._status, backend=backend)

        if few:
            memory = (self._mailbox.buffer.data_ptr(), *map(layout_of, where.values()))
            self._replays.run((op, tokens, requests, *memory), launch)
        else:
            launch()

    def forget_graphs(self) -> None:
        """Destroy the graphs that launches are replayed from."""
        self._replays.forget()

    def branch(self, rows: Int64s, offsets: Iterable[int]) -> None:
        """Let the scratch of these rows start from their tails."""
        if not len(rows):
            return
        (rows_there,) = self._mailbox.post(rows)
        for offset in offsets:
            tails = self.tails[offset]
            tails.scratch[rows_there] = tails.chains[rows_there]

    def known_lens(self, requests: BatchRequests) -> Int64s:
        """Return how many of each request's tokens the token table holds."""
        return self._tokens.lengths(requests.rows) + self.lookahead

    def finalize_table(self, max_len: int) -> None:
        """Give the token table room for `max_len` positions, once and for all: a graph will keep its address."""
        self._make_room(max_len)
        self._table_is_final = True

    def _not_anchored(self, requests: BatchRequests) -> Int64s:
        """Return which requests' chains are not known to start from their identities."""
        rows = requests.rows
        which: Int64s = (
            (self._anchored[rows] != requests.composition.identities) | ~self._is_anchored[rows]
        ).nonzero()[0]
        return which

    def _anchor(self, requests: BatchRequests) -> None:
        """Let each request's chain start from its identity."""
        rows, identities = requests.rows, requests.composition.identities
        changed = self._not_anchored(requests)
        self._all_anchored = requests.composition.number
        if not len(changed):
            return
        rows, identities = rows[changed], identities[changed]
        there, anchors = send(self.device, rows, [anchor_of(word) for word in identities.tolist()])
        self.anchors[there] = anchors
        self._anchored[rows], self._is_anchored[rows] = identities, True


def _longest(prefix: Int64s) -> int:
    return int(prefix.max(initial=0))


def widen(table: torch.Tensor, length: int) -> torch.Tensor:
    """Return int32 [rows, length or more] that begins with `table`; grows by doubling, so it is seldom called."""
    width = max(-(-length // 16) * 16, 2 * table.shape[1])
    wider = torch.zeros(table.shape[0], width, dtype=table.dtype, device=table.device)
    wider[:, : table.shape[1]] = table
    let_go(table)
    return wider
