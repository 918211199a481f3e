"""The blocks that a worker's requests have, as the scheduler says: what is handed out, hit, given back and copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch

from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.runtime.composition import Int64s

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What a request has left behind.

    Args:
        slots: int64 by the number of vLLM's group, of all positions that may still be read.
        unreachable: int64 likewise: slots that no other request can come to rely on.
    """

    slots: dict[int, torch.Tensor] = field(default_factory=dict)
    unreachable: dict[int, torch.Tensor] = field(default_factory=dict)


class Blocks:
    """The blocks of each row, by group.

    Args:
        groups: of the target, that are covered.
        num_rows: rows with the canary.
        max_len: tokens of one request.
        num_blocks: that the scheduler hands out.
        caches: whether full blocks stay in a prefix cache when they are given back.
        caches_parts: whether the last block may, too, though it is not full.
    """

    def __init__(
        self,
        groups: Sequence[AttachedGroup],
        *,
        num_rows: int,
        max_len: int,
        num_blocks: int,
        caches: bool,
        caches_parts: bool = False,
    ) -> None:
        self._groups, self._caches, self._caches_parts = groups, caches, caches_parts
        # A block more than positions need: lookahead of drafts.
        self._tables: list[Int32s] = [np.zeros((num_rows, -(-max_len // g.block_size) + 2), np.int32) for g in groups]
        self._counts = [np.zeros(num_rows, np.int64) for _ in groups]
        self._ends = np.zeros(num_rows, np.int64)
        # Rows and ends of the last forward, which are not among these yet.
        self._went: tuple[Int64s, Int64s] | None = None
        # Whether blocks were handed out; which, and those of them that hold records.
        self.handed_out = False
        self._fresh: list[list[Int64s]] = [[] for _ in groups]
        self._reused: list[list[Int64s]] = [[] for _ in groups]
        # Of each block: whether somebody may have recorded anything there since it was last retired as a whole.
        self._is_recorded = np.zeros(num_blocks, np.bool_)
        # Of each block: the last step in which it was written, and the first offset that was.
        self._step = 0
        self._written = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._from = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._admitted: list[tuple[int, int]] = []
        # Of each block: the row that it was last handed out to, as long as that has it. Blocks that were handed out
        # while another row had them: the place of that row's group here, the block, and the row that got it.
        self._holders = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._twice: list[tuple[int, int, int]] = []
        # Of each block: whether it was handed out for what is brought from outside, and nobody has seen to it since;
        # whether any may be; and what was hit of them in this step, with the place of its group.
        self._promised = [np.zeros(num_blocks, np.bool_) for _ in groups]
        self._promises = False
        self._hits: list[tuple[int, Int64s]] = []

    def forget(self) -> None:
        """Take in that nothing is known of the blocks of any row."""
        for i in range(len(self._groups)):
            self._counts[i][:], self._holders[i][:], self._fresh[i], self._reused[i] = 0, 0, [], []
        self._is_recorded[:] = True
        self.ends[:] = 0
        self._admitted.clear()
        self._twice.clear()
        for promised in self._promised:
            promised[:] = False
        self._hits.clear()
        self._promises = False

    @property
    def ends(self) -> Int64s:
        """int64 [rows] tokens in the cache behind the last forward of each row."""
        if self._went is not None:
            (rows, ends), self._went = self._went, None
            self._ends[rows] = ends
        return self._ends

    def went(self, rows: Int64s, ends: Int64s) -> None:
        """Take in how many tokens are in the cache behind a forward of these rows.

        It is noted where somebody asks: most forwards are of the rows that the forward before was of.
        """
        if self._went is not None and self._went[0] is not rows:
            self._ends[self._went[0]] = self._went[1]
        self._went = rows, ends

    def begin_step(self) -> None:
        """Begin to take in what a step brings."""
        self._step += 1
        self._admitted.clear()

    def admit(
        self,
        row: int,
        blocks: Sequence[Sequence[int]],
        computed: int,
        *,
        hit: int | None = None,
        promised: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Take in the blocks of a request that is new, or was put off.

        Args:
            row: the request's.
            blocks: of each of vLLM's groups, all that it has.
            computed: tokens that are in the cache, or will be before they are read.
            hit: how many of these were found there; None: all. Blocks behind those that these fill are handed out.
            promised: of each of vLLM's groups, the blocks that it had when some of them were promised; None: none were.
        """
        hit = computed if hit is None else hit
        for i, group in enumerate(self._groups):
            ids = blocks[group.number]
            self._counts[i][row] = 0
            self._append(i, row, ids)
            first = -(-hit // group.block_size)
            if self._promises and first:
                self._hits.append((i, np.array(ids[:first], np.int64)))
            if not (fresh := ids[first:]):
                continue
            given = np.array(fresh, np.int64)
            if promised is not None:
                its = np.array(promised[group.number][first : first + len(given)], np.int64)
                is_mine = np.zeros(len(given), np.bool_)
                is_mine[: len(its)] = given[: len(its)] == its
                self._claim(i, row, given[is_mine & (given > 0)])
                given = given[~is_mine]
            if len(given):
                self._take(i, row, given)
        self.ends[row] = computed
        if computed:
            self._admitted.append((row, computed))

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Take in more blocks of a request, all of them just handed out."""
        for i, group in enumerate(self._groups):
            if ids := blocks[group.number]:
                self._append(i, row, ids)
                self._take(i, row, np.array(ids, np.int64))

    def append_each(self, rows: Sequence[int], blocks: Sequence[Sequence[Sequence[int]]]) -> None:
        """Take in more blocks of several requests, all of them just handed out.

        Args:
            rows: the requests'.
            blocks: of each request, and of each of vLLM's groups.
        """
        if len(rows) > 1 and self._append_one_each(rows, blocks):
            return
        for row, its in zip(rows, blocks, strict=True):
            self.append(row, its)

    def _append_one_each(self, rows: Sequence[int], blocks: Sequence[Sequence[Sequence[int]]]) -> bool:
        """Take in one more block of each request in each group, as decodes get them; False: it is not that."""
        at, given = np.array(rows, np.int64), list[list[int]]()
        for i, group in enumerate(self._groups):
            lists = list(map(itemgetter(group.number), blocks))
            ids = list(chain.from_iterable(lists))
            has_room = int(np.maximum.reduce(self._counts[i][at])) < self._tables[i].shape[1]
            if len(ids) != len(rows) or not all(lists) or not has_room:
                return False
            given.append(ids)
        together = set(chain.from_iterable(given))
        if 0 in together or len(together) < len(given) * len(rows) or len(set(rows)) < len(rows):
            # Who gets a block that another one of them gets, too, is told apart one by one.
            return False
        for i, ids in enumerate(given):
            counts = self._counts[i]
            places = counts[at]
            self._tables[i][at, places] = ids
            counts[at] = places + 1
            self._take(i, at, np.array(ids, np.int64))
        return True

    def _take(self, i: int, row: int | Int64s, given: Int64s) -> None:
        """Take in that blocks were handed out.

        Args:
            i: place of their group.
            row: that got them all; int64: the row of each, none of which is there twice.
            given: int64 blocks.
        """
        if np.minimum.reduce(given) < 1:
            if not isinstance(row, int):
                row = row[given > 0]
            given = given[given > 0]
        self.handed_out = True
        self._fresh[i].append(given)
        is_recorded = self._is_recorded[given]
        if np.logical_or.reduce(is_recorded):
            self._reused[i].append(given[is_recorded])
        self._is_recorded[given] = True
        if self._promises:
            for promised in self._promised:
                promised[given] = False
        self._hold(i, row, given)

    def _claim(self, i: int, row: int, given: Int64s) -> None:
        """Take in that a request has got the blocks that it was promised, which were retired then.

        Others may have found there since what was brought.
        """
        self._promised[i][given] = False
        self._hold(i, row, given)

    def _hold(self, i: int, row: int | Int64s, given: Int64s) -> None:
        """Note who has blocks, and who had them up to now; see `_take`."""
        for n, holders in enumerate(self._holders):
            others = holders[given]
            if np.logical_or.reduce(others):
                for k in ((others > 0) & (others != row)).nonzero()[0].tolist():
                    if self._needs(n, int(others[k]), int(given[k])):
                        self._twice.append((n, int(given[k]), row if isinstance(row, int) else int(row[k])))
            holders[given] = row if n == i else 0

    def _needs(self, i: int, row: int, block: int) -> bool:
        """Whether a row has a block, and may still read it: the scheduler takes back what a window has left behind."""
        group, count = self._groups[i], int(self._counts[i][row])
        found = np.flatnonzero(self._tables[i][row, :count] == block)
        window = group.group.window
        return bool(len(found)) and not (window and found[-1] * group.block_size < self.ends[row] - window)

    def _append(self, i: int, row: int, ids: Sequence[int]) -> None:
        count, table = int(self._counts[i][row]), self._tables[i]
        ids = ids[: table.shape[1] - count]
        table[row, count : count + len(ids)] = ids
        self._counts[i][row] = count + len(ids)

    def promise(self, blocks: Sequence[Sequence[int]], hit: int) -> None:
        """Take in that blocks were handed out to a request that waits, and has no row yet.

        Args:
            blocks: of each of vLLM's groups, all that it has.
            hit: tokens that were found in the cache: blocks behind those that these fill are handed out.
        """
        for i, group in enumerate(self._groups):
            if ids := blocks[group.number][-(-hit // group.block_size) :]:
                given = np.array(ids, np.int64)
                self._take(i, 0, given)
                self._promised[i][given[given > 0]] = True
                self._promises = True

    def came(self, number: int, blocks: Sequence[int]) -> None:
        """Take in that what was promised has come to blocks of a group of vLLM's, with its records."""
        for i, group in enumerate(self._groups):
            if group.number == number:
                self._promised[i][blocks] = False

    @property
    def has_promises(self) -> bool:
        """Whether blocks may be promised to somebody, and hit by others: then ask `take_unseen`."""
        return self._promises

    def take_unseen(self) -> list[tuple[int, torch.Tensor]]:
        """Return the int64 slots of blocks that were hit in this step though nobody has seen what was brought there.

        Whoever it was brought for has not come, or not yet. With the number of vLLM's group.
        """
        unseen = []
        hits, self._hits = self._hits, []
        for i, blocks in hits:
            found = blocks[self._promised[i][blocks]]
            if len(found):
                self._promised[i][found] = False
                group = self._groups[i]
                unseen.append((group.number, torch.from_numpy(slots_of(found, group.block_size))))
        if self._promises:
            self._promises = any(map(np.logical_or.reduce, self._promised))
        return unseen

    @property
    def fresh(self) -> Int64s:
        """int64 blocks that were handed out since the last `take_fresh`, in whatever group."""
        parts = list(chain.from_iterable(self._fresh))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def slots(self, row: int, start: int, end: int) -> dict[int, torch.Tensor]:
        """Return the int64 slots of positions [start, end) of a row, by the number of vLLM's group; 0 where none is."""
        found = {}
        for i, group in enumerate(self._groups):
            size = group.block_size
            first, last = start // size, min(-(-end // size), int(self._counts[i][row]))
            blocks = self._tables[i][row, first:last].astype(np.int64)
            slots = np.where(np.repeat(blocks, size) > 0, slots_of(blocks, size), 0)
            found[group.number] = torch.from_numpy(slots[start - first * size : end - first * size].copy())
        return found

    def take_fresh(self, *, only_recorded: bool = False) -> Int64s:
        """Return the int64 blocks that were handed out since the last call, in whatever group.

        Args:
            only_recorded: whether those are left out in which nobody has recorded anything since they were retired.
        """
        self.handed_out, parts = False, []
        for i in range(len(self._groups)):
            if self._fresh[i]:
                parts += (self._reused if only_recorded else self._fresh)[i]
                self._fresh[i], self._reused[i] = [], []
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def copied_to(self, block: int) -> None:
        """Take in that a block has the records of another one."""
        self._is_recorded[block] = True

    def take_handed_out_twice(self) -> list[tuple[AttachedGroup, torch.Tensor, int]]:
        """Return the int64 slots of each block that was handed out while another row had it, and whose it is now."""
        taken = [
            (self._groups[i], torch.from_numpy(slots_of(np.array([block]), self._groups[i].block_size)), row)
            for i, block, row in self._twice
        ]
        self._twice = []
        return taken

    def end(self, row: int, *, lists: bool = True, is_known: bool = True) -> Freed:
        """Take in that the request of a row has given its blocks back, and return what it has left behind.

        Args:
            row: the request's.
            lists: whether the slots of all of its positions are asked for; what is unreachable always is, and is to be
                retired before any of it is handed out again.
            is_known: whether all of the request's forwards have been followed; else nobody can say what of its blocks
                is full, and found by others.
        """
        freed, length = Freed(), int(self.ends[row])
        for i, group in enumerate(self._groups):
            size, count, name = group.block_size, int(self._counts[i][row]), group.number
            blocks = self._tables[i][row, :count].astype(np.int64)
            is_mine = self._holders[i][blocks] == row
            self._holders[i][blocks[is_mine]] = 0
            window = group.group.window
            first = max(0, length - window) if window else 0
            if lists:
                freed.slots[name] = torch.from_numpy(slots_of(blocks, size)[first:length].copy())
            # Blocks that are full are found by their content as long as nobody is given them.
            if self._caches:
                first = length + (size - 1 if self._caches_parts else 0) if is_known else count * size
            first //= size
            left = blocks[first:]
            freed.unreachable[name] = torch.from_numpy(slots_of(left, size))
            self._is_recorded[left[is_mine[first:]]] = False
            self._counts[i][row] = 0
        self.ends[row] = 0
        return freed

    def pending(self, rows: Int64s, prefix: Int64s, extend: Int64s) -> Int64s | None:
        """Return how many of each prefix's last tokens another request of the step writes; None: none of any.

        The scheduler finds a block in its cache as soon as it is handed out, before anybody has written it. Where it is
        not known what some request of the step writes, all that was hit in it is pending.

        Args:
            rows, prefix, extend: of all requests of the step; row 0 where one is not known.
        """
        if not self._admitted:
            return None
        self._mark(rows, prefix, extend)
        is_whole = bool(rows.all())
        found, at = np.zeros(len(rows), np.int64), {int(row): n for n, row in enumerate(rows.tolist())}
        for row, computed in self._admitted:
            if row not in at:
                continue
            first = computed if is_whole else 0
            for i, group in enumerate(self._groups):
                size = group.block_size
                hit = self._tables[i][row, : -(-computed // size)]
                which = np.flatnonzero((self._written[i][hit] == self._step) & (hit > 0))
                if len(which):
                    j = int(which[0])
                    first = min(first, j * size + int(self._from[i][hit[j]]))
            found[at[row]] = computed - first
        return found if found.any() else None

    def _mark(self, rows: Int64s, prefix: Int64s, extend: Int64s) -> None:
        """Note which blocks the step writes, and from which offset on."""
        for i, group in enumerate(self._groups):
            size, table = group.block_size, self._tables[i]
            width = table.shape[1] - 1
            first = table[rows, np.minimum(prefix // size, width)]
            # What a request has in its first block already is there, whoever wrote it.
            self._written[i][first], self._from[i][first] = self._step, prefix % size
            for n in np.flatnonzero(prefix % size + extend > size).tolist():
                row, begin = rows[n], int(prefix[n]) // size + 1
                more = table[row, begin : -(-int(prefix[n] + extend[n]) // size)]
                self._written[i][more], self._from[i][more] = self._step, 0


def together(freed: Iterable[Freed]) -> Freed:
    """Return what several requests have left behind that no other one can come to rely on."""
    parts: dict[int, list[torch.Tensor]] = {}
    for each in freed:
        for number, slots in each.unreachable.items():
            parts.setdefault(number, []).append(slots)
    return Freed(unreachable={number: torch.cat(its) for number, its in parts.items()})


def slots_of(blocks: Int64s, size: int) -> Int64s:
    """Return the slots of blocks of `size`, one block behind the other."""
    return (blocks[:, None] * size + np.arange(size)).ravel()
