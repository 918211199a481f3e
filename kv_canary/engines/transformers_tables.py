"""The slots that a forward of transformers reads and writes, as the engine's index tensors of that forward say it.

What attention is about to read is what is verified: tables are filled anew from the engine's read index, or from its
block table, before every forward, and nothing is carried on from one to the next but the memory. That stays where it
is, so that decode steps can be repeated: see `SingleForwardManager.repeat`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kv_canary.constants import BAD_SLOT
from kv_canary.engines.transformers_base import Layout
from kv_canary.errors import must_be
from kv_canary.runtime.batch import ModelInputs
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.composition import BatchRequests, Int64s
from kv_canary.runtime.device_state import widen
from kv_canary.runtime.host import Mailbox, copy_all, front, let_go, send

# Positions that tables and what stands for missing entries have room for before a request needs more.
_FEW = 256
# What is no index of the engine's, in any version.
_NO_INDEX = -1


class Tables:
    """The tables of all groups, and what the model is given, in memory that stays.

    All of it is to be made, filled and read on one stream.

    Args:
        layout: of the engine's cache.
        limits: of the canary.
        device: of the cache.

    Attributes:
        by_group: int32 [rows, positions] by group name, the slots of each row's cached positions; what is past a
            request's prefix, or not read by it, is anything. Replaced by wider ones as requests grow.
        given: what the model is given: input ids and positions once `take_given` was called, slots from `fill` on.
    """

    def __init__(self, layout: Layout, *, limits: CanaryLimits, device: torch.device) -> None:
        self._layout, self._device, groups = layout, device, layout.groups
        self.by_group = {g.name: torch.zeros(limits.max_rows, _FEW, dtype=torch.int32, device=device) for g in groups}
        ids, positions, *slots = (
            torch.zeros(limits.max_tokens, dtype=torch.int64, device=device) for _ in range(2 + len(groups))
        )
        self.given = ModelInputs(
            input_ids=ids,
            positions=positions,
            out_slots={g.name: its for g, its in zip(groups, slots, strict=True)},
            stays=True,
        )
        # Groups of the same window have the same entries.
        self._windows = sorted({g.window for g in groups})
        self._mailbox = Mailbox(device, words=(len(self._windows) + 1) * (limits.max_requests + 2))
        self._missing = self._no_indices(2 * _FEW)
        self._inside = torch.arange(layout.page, device=device)

    def widen(self, length: int) -> bool:
        """Make room for so many positions of a request; return whether tables are elsewhere now."""
        narrow = [name for name, table in self.by_group.items() if table.shape[1] < length]
        # Who was given the ones before keeps them.
        self.by_group |= {name: widen(self.by_group[name], length) for name in narrow}
        return bool(narrow)

    def fill(self, requests: BatchRequests, batch_data: dict[str, Any]) -> None:
        """Take in what a forward is about to read and write. The tables must be wide enough for it.

        Args:
            requests: of the forward.
            batch_data: of the engine.

        Raises:
            ValueError: the engine does not say where all of the new tokens go.
        """
        if batch_data.get("block_table") is None:
            self._fill_by_index(requests, batch_data["read_index"], batch_data["write_index"])
        else:
            self._fill_by_pages(requests, batch_data["block_table"])

    def take_given(self, batch_data: dict[str, Any]) -> None:
        """Take in the input ids and positions as the model was given them, padding included."""
        ids, positions = batch_data["input_ids"][0], batch_data["position_ids"][0]
        copy_all([(self.given.input_ids, ids), (self.given.positions, positions)])

    def written(self, count: int) -> dict[str, torch.Tensor]:
        """Return the slots that so many tokens of the forward are about to be written to, by group name."""
        return {name: front(slots, count) for name, slots in self.given.out_slots.items()}

    def find_written(
        self, prefix: Sequence[int], batch_data: dict[str, Any], *, tokens: int
    ) -> dict[str, torch.Tensor]:
        """Return what `written` would, of a forward that nothing is known of but the engine's own numbers.

        Args:
            prefix: tokens of each request in the cache.
            batch_data: of the engine.
            tokens: that are written.
        """
        found, pages = {}, batch_data.get("block_table")
        if pages is not None:
            # Such a step has one new token a request.
            (there,) = send(self._device, self._in_pages(np.array(prefix, np.int64), pages.shape[-1]))
        for g, group in enumerate(self._layout.groups):
            if pages is None:
                found[group.name] = self._layout.to_slots(g, batch_data["write_index"][g][:tokens])
            else:
                slots = self._slots_of_pages(g, pages[g, : len(prefix)])
                found[group.name] = slots.gather(1, there[:, None])[:, 0]
        return found

    def _fill_by_index(
        self, requests: BatchRequests, read_index: Sequence[torch.Tensor], write_index: Sequence[torch.Tensor]
    ) -> None:
        """Fill from the indices that the model gathers KV by.

        The read index of a group holds, per request, the slots of its cached positions and then one entry per new
        token.
        """
        tokens, longest = requests.num_tokens, requests.longest
        begins, needed = dict[int, Int64s](), dict[int, int]()
        for window in self._windows if longest else ():
            cached = np.minimum(requests.prefix, window) if window else requests.prefix
            entries = cached + requests.extend
            # As if the index began with position 0, which may lie before it where a window leaves it out.
            begins[window] = entries.cumsum() - entries - (requests.prefix - cached)
            needed[window] = int(np.add.reduce(entries))
        before = {window: max(0, -int(np.minimum.reduce(at))) for window, at in begins.items()}
        if longest:
            columns = (at + before[window] for window, at in begins.items())
            rows, *sent = self._mailbox.post(requests.rows, *columns)
            starts = dict(zip(begins, sent, strict=True))
        for g, group in enumerate(self._layout.groups):
            written, out_slots = write_index[g], self.given.out_slots[group.name]
            if written.shape[0] < tokens:
                expected = f"of at least {tokens} tokens"
                raise ValueError(must_be("transformers adapter", "write_index", expected, str(written.shape[0])))
            if not longest:
                front(out_slots, tokens).copy_(self._layout.to_slots(g, front(written, tokens)))
                continue
            read = _at_most(read_index[g], needed[group.window])
            # What the index lacks is reported as out of range, instead of being looked up there.
            lacking = needed[group.window] - read.shape[0] + longest
            parts = [front(written, tokens), read, self._no_index(lacking)]
            if before[group.window]:
                parts.insert(1, self._no_index(before[group.window]))
            slots = self._layout.to_slots(g, torch.cat(parts))
            front(out_slots, tokens).copy_(slots[:tokens])
            narrow = slots[tokens:].to(torch.int32)
            # Row i of it is what begins at entry i.
            by_entry = narrow.as_strided((narrow.shape[0] - longest + 1, longest), (1, 1))
            table = self.by_group[group.name]
            table[:, :longest].index_copy_(0, rows, by_entry.index_select(0, starts[group.window]))

    def _fill_by_pages(self, requests: BatchRequests, pages: torch.Tensor) -> None:
        """Fill from the block table by which a kernel finds slots by itself, in a decode step.

        Per group and request of the batch, where its blocks begin, counted in pages; the requests may be followed by
        padding.
        """
        longest, page, count = requests.longest, self._layout.page, len(requests)
        columns = min(longest // page + 1, pages.shape[-1])
        rows, there = self._mailbox.post(requests.rows, self._in_pages(requests.prefix, columns))
        for g, group in enumerate(self._layout.groups):
            slots = self._slots_of_pages(g, pages[g, :count, :columns])
            front(self.given.out_slots[group.name], count).copy_(slots.gather(1, there[:, None])[:, 0])
            table, width = self.by_group[group.name], min(longest, slots.shape[1])
            table[:, :width].index_copy_(0, rows, slots[:, :width].to(torch.int32))
            if width < longest:
                # The block table does not name them.
                table[:, width:longest].index_fill_(0, rows, BAD_SLOT)

    def _slots_of_pages(self, g: int, pages: torch.Tensor) -> torch.Tensor:
        """Return the slots, int64 [requests, positions], of whole pages of a group, int32 [requests, pages]."""
        indices = torch.add(self._inside, pages[:, :, None], alpha=self._layout.page)
        return self._layout.to_slots(g, indices.flatten(1))

    def _in_pages(self, prefix: Int64s, columns: int) -> Int64s:
        """Return the place of the token behind each prefix in the positions of so many pages."""
        page = self._layout.page
        there: Int64s = np.minimum(prefix // page, columns - 1) * page + prefix % page
        return there

    def _no_index(self, count: int) -> torch.Tensor:
        """Return `count` times what is no index."""
        if count > self._missing.shape[0]:
            let_go(self._missing)
            self._missing = self._no_indices(2 * count)
        return self._missing[:count]

    def _no_indices(self, count: int) -> torch.Tensor:
        return torch.full((count,), _NO_INDEX, dtype=torch.int64, device=self._device)


def _at_most(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` of a tensor, or what there is."""
    return front(tensor, min(count, tensor.shape[0]))
