"""SGLang's requests that have ended: where all that each rested on lies, before the scheduler gives its slots back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import batches
from kv_canary.runtime.pools import BufferGroup


class Ended:
    """Notes requests as they end.

    Args:
        tree_cache: the scheduler's prefix cache, which is asked about every row that is given back before it is.
        groups: those that share each table of rows.
        patches: what its methods are wrapped with.
        row_ended: called with the row of a request that gives its slots back, for good or for a while.
        frees: called with a request whose slots are given back from here on, and with None once they are.
        noting: the context of what is noted, entered again and again: it may fail where the engine must not.
        completes: whether what ended requests rested on is to be taken.
        keeps: called with tensors that were made on the scheduler's stream, before launches on the forwards' read them.
    """

    def __init__(
        self,
        tree_cache: Any,
        groups: Sequence[tuple[torch.Tensor, Sequence[BufferGroup]]],
        *,
        patches: Patches,
        row_ended: Callable[[int], None],
        frees: Callable[[Any], None] = lambda req: None,
        noting: AbstractContextManager[Any],
        completes: bool,
        keeps: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None,
    ) -> None:
        self._completes, self._keeps = completes, keeps
        self._groups, self._row_ended, self._frees, self._noting = groups, row_ended, frees, noting
        self._ended: list[tuple[str, Mapping[str, torch.Tensor]]] = []
        patches.wrap(tree_cache, "claim_kv_row", self._claim)
        patches.wrap(tree_cache, "on_release", self._release)

    def __bool__(self) -> bool:
        """Whether requests have ended since the last `take`."""
        return bool(self._ended)

    def take(self) -> list[tuple[str, Mapping[str, torch.Tensor]]]:
        """Return the requests that have ended since the last call: their names, and by group their int64 slots.

        To be called on the stream of the forwards, before what was freed is retired. Does not wait for the device.
        """
        ended, self._ended = self._ended, []
        self._keeps([its for _, slots in ended for its in slots.values()])
        return ended

    def forget(self) -> None:
        """Drop the requests that `take` would return."""
        self._ended.clear()

    def _claim(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        is_kept = original(req, *args, **kwargs)
        # A session's request goes on, in its row.
        if not is_kept:
            with self._noting:
                self._frees(req)
                self._note(req)
        return is_kept

    def _release(self, original: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        """Called around what a prefix cache does once a request has given its slots back."""
        with self._noting:
            self._frees(None)
        return original(req, *args, **kwargs)

    def _note(self, req: Any) -> None:
        row = batches.row_of(req)
        if row is None:
            return
        self._row_ended(row)
        length = int(req.owned_kv_len())
        # One that is put off comes again.
        if not self._completes or not req.finished() or length <= 0:
            return
        slots: dict[str, torch.Tensor] = {}
        for table, groups in self._groups:
            # A copy: the row is somebody else's soon.
            named = table[row, :length].to(torch.int64)
            # What a window has left behind is translated to 0, which is no slot, or is another's by now.
            slots |= {g.name: named if g.lut is None else g.lut[named] for g in groups}
        self._ended.append((req.rid, slots))
