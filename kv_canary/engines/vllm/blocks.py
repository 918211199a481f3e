"""The blocks that a worker's requests have, as the scheduler says: what is handed out, hit, given back and copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    """

    def __init__(
        self, groups: Sequence[AttachedGroup], *, num_rows: int, max_len: int, num_blocks: int, caches: bool
    ) -> None:
        self._groups, self._caches = groups, caches
        # A block more than positions need: lookahead of drafts.
        self._tables: list[Int32s] = [np.zeros((num_rows, -(-max_len // g.block_size) + 2), np.int32) for g in groups]
        self._counts = [np.zeros(num_rows, np.int64) for _ in groups]
        # Tokens in the cache behind the last forward of each row.
        self.ends = np.zeros(num_rows, np.int64)
        self._fresh: list[list[int]] = [[] for _ in groups]
        # Of each block: the last step in which it was written, and the first offset that was.
        self._step = 0
        self._written = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._from = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._admitted: list[tuple[int, int]] = []
        # Of each block: the row that it was last handed out to, as long as that has it. Blocks that were handed out
        # while another row had them: the place of that row's group here, the block, and the row that got it.
        self._holders = [np.zeros(num_blocks, np.int64) for _ in groups]
        self._twice: list[tuple[int, int, int]] = []

    def forget(self) -> None:
        """Take in that nothing is known of the blocks of any row."""
        for i in range(len(self._groups)):
            self._counts[i][:], self._holders[i][:], self._fresh[i] = 0, 0, []
        self.ends[:] = 0
        self._admitted.clear()
        self._twice.clear()

    def begin_step(self) -> None:
        """Begin to take in what a step brings."""
        self._step += 1
        self._admitted.clear()

    def admit(self, row: int, blocks: Sequence[Sequence[int]], computed: int, *, hit: int | None = None) -> None:
        """Take in the blocks of a request that is new, or was put off.

        Args:
            row: the request's.
            blocks: of each of vLLM's groups, all that it has.
            computed: tokens that are in the cache, or will be before they are read.
            hit: how many of these were found there; None: all. Blocks behind those that these fill are handed out.
        """
        hit = computed if hit is None else hit
        for i, group in enumerate(self._groups):
            ids = blocks[group.number]
            self._counts[i][row] = 0
            self._append(i, row, ids)
            self._take(i, row, ids[-(-hit // group.block_size) :])
        self.ends[row] = computed
        if computed:
            self._admitted.append((row, computed))

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Take in more blocks of a request, all of them just handed out."""
        for i, group in enumerate(self._groups):
            if ids := blocks[group.number]:
                self._append(i, row, ids)
                self._take(i, row, ids)

    def _take(self, i: int, row: int, ids: Sequence[int]) -> None:
        """Take in that blocks were handed out to a row."""
        self._fresh[i] += ids
        given = np.array(ids, np.int64)
        given = given[given > 0]
        for n, holders in enumerate(self._holders):
            others = holders[given]
            for k in ((others > 0) & (others != row)).nonzero()[0].tolist():
                if self._needs(n, int(others[k]), int(given[k])):
                    self._twice.append((n, int(given[k]), row))
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
            ids = blocks[group.number][-(-hit // group.block_size) :]
            self._take(i, 0, ids)

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

    def take_fresh(self) -> list[tuple[AttachedGroup, torch.Tensor]]:
        """Return the int64 slots of blocks that were handed out since the last call, by the group that has them."""
        taken = []
        for i, group in enumerate(self._groups):
            if ids := [block for block in self._fresh[i] if block]:
                taken.append((group, torch.from_numpy(slots_of(np.array(ids, np.int64), group.block_size))))
            self._fresh[i] = []
        return taken

    def take_handed_out_twice(self) -> list[tuple[AttachedGroup, torch.Tensor, int]]:
        """Return the int64 slots of each block that was handed out while another row had it, and whose it is now."""
        taken = [
            (self._groups[i], torch.from_numpy(slots_of(np.array([block]), self._groups[i].block_size)), row)
            for i, block, row in self._twice
        ]
        self._twice = []
        return taken

    def end(self, row: int) -> Freed:
        """Take in that the request of a row has given its blocks back, and return what it has left behind."""
        freed, length = Freed(), int(self.ends[row])
        for i, group in enumerate(self._groups):
            size, count, name = group.block_size, int(self._counts[i][row]), group.number
            blocks = self._tables[i][row, :count].astype(np.int64)
            mine = blocks[self._holders[i][blocks] == row]
            self._holders[i][mine] = 0
            slots, window = slots_of(blocks, size), group.group.window
            first = max(0, length - window) if window else 0
            freed.slots[name] = torch.from_numpy(slots[first:length].copy())
            # Blocks that are full are found by their content as long as nobody is given them.
            first = length // size if self._caches else first // size
            freed.unreachable[name] = torch.from_numpy(slots[first * size :].copy())
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


def slots_of(blocks: Int64s, size: int) -> Int64s:
    """Return the slots of blocks of `size`, one block behind the other."""
    return (blocks[:, None] * size + np.arange(size)).ravel()
