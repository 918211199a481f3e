"""The engine with the canary installed: its forwards go through a `CanaryManager`, as a real engine's would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kv_canary.config import CanaryConfig
from kv_canary.constants import HEAD_OF_CHAIN, UNCHECKED
from kv_canary.difftest.simulator.actions import Action, perform
from kv_canary.difftest.simulator.config import EngineConfig
from kv_canary.difftest.simulator.engine import Engine
from kv_canary.difftest.simulator.groups import Group, LutGroup, RingGroup
from kv_canary.difftest.simulator.kv_bytes import copy_slots, fill_slots
from kv_canary.difftest.simulator.op_calls import Call
from kv_canary.difftest.simulator.requests import Request
from kv_canary.observers import Observer
from kv_canary.perturb import PerturbConfig
from kv_canary.reports import ViolationReport
from kv_canary.runtime.batch import ForwardBatch
from kv_canary.runtime.cached import CachedSlots
from kv_canary.runtime.capacities import CanaryLimits
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.specs.structures import KvSource

OnReport = Callable[[ViolationReport], None]


class CanaryEngine(Engine):
    """An engine whose forwards, frees and copies a canary follows.

    Its books are kept on the CPU. On another device the K/V bytes lie there, and tables and LUTs are copied there
    before each forward.

    Args:
        config: the engine's; what it says of the canary's own set-up (capacities, strides, ...) plays no part.
        canary: the canary's.
        on_report: called with every report.
        perturb: faults that the canary is to inject.
        observers: told of every step and report.
        device: where the canary, the K/V bytes and the tables that it reads are.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        canary: CanaryConfig,
        on_report: OnReport | None = None,
        perturb: PerturbConfig | None = None,
        observers: Sequence[Observer] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        super().__init__(_moved(config, self.device))
        self._copies: dict[str, torch.Tensor] = {}
        self.pools = {
            group.name: KvPool(
                name=group.name,
                num_slots=group.config.num_slots,
                k_source=group.config.k_source,
                v_source=group.config.v_source,
                device=self.device,
            )
            for group in self.groups
        }
        self.manager = CanaryManager(
            [
                BufferGroup(
                    name=group.name,
                    pool=self.pools[group.name],
                    window=group.config.window,
                    ring=group.config.kind == "ring",
                    lut=None if group.lut is None else self._there(f"LUT of {group.name}", group.lut),
                    token_offset=config.token_offset,
                )
                for group in self.groups
            ],
            limits=CanaryLimits(
                max_rows=config.max_rows,
                max_requests=config.max_rows,
                max_tokens=config.max_rows * config.max_len,
                max_len=config.max_len,
            ),
            config=canary,
            on_report=on_report,
            observers=observers,
            perturb=perturb,
            cached=self.cached_slots,
        )
        # The canary's own failures are to be seen here, in log mode too.
        self.manager.guard.contains = False
        # Called once a forward has been prepared and before it runs, between HEAD and the model, and once it has run:
        # for faults. What the second raises is the model's failure.
        self.before_forward: Callable[[ForwardBatch], None] | None = None
        self.during_forward: Callable[[ForwardBatch], None] | None = None
        self.after_forward: Callable[[ForwardBatch], None] | None = None

    def run(self, action: Action) -> None:
        """Perform `action`."""
        for call in perform(self, action):
            raise RuntimeError(f"kv-canary: difftest engine: a guarded engine must make no calls, got {call.op}")

    def finish(self, request: Request, *, keep: bool = True) -> Iterator[Call]:
        self.complete(request)
        yield from super().finish(request, keep=keep)

    def complete(self, request: Request) -> None:
        """Have all that a request rests on held against its seals, which goes away now or is put off."""
        if self.manager.completes:
            slots = {str(group.name): torch.tensor(self.slots_held(group, request)) for group in self.groups}
            self.manager.complete(request.name, slots)
        self.manager.row_ended(request.row)

    def slots_held(self, group: Group, request: Request) -> list[int]:
        """Return the slots of a group that hold positions of a request which may still be read."""
        if isinstance(group, RingGroup):
            return group.ring_slots(request)
        return [slot for page in request.pages for slot in self._resident(group, page)][: request.cached]

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Iterator[Call]:
        if slots:
            self.manager.retire(self.pools[group.name], torch.tensor(slots), owner=owner)
        yield from ()

    def move(self, group: Group, src: Sequence[int], dst: Sequence[int], *, owner: int) -> Iterator[Call]:
        if src and len(set(dst)) == len(dst):
            for source in group.sources:
                copy_slots(source, src, dst)
            self.manager.move(self.pools[group.name], torch.tensor(src), torch.tensor(dst), owner=owner)
        yield from ()

    def restart(self) -> None:
        kept = {group.name: group.lookup for group in getattr(self, "groups", []) if isinstance(group, LutGroup)}
        super().restart()
        for group in self.luts:
            # A LUT stays where the canary knows it to be.
            if group.name in kept:
                group.lookup = group.lut = kept[group.name].zero_()

    def flush(self) -> None:
        super().flush()
        self.manager.clear()

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        batch = self.forward_batch(extends)
        if self.before_forward is not None:
            self.before_forward(batch)
        with self.manager.forward().around(batch):
            if self.during_forward is not None:
                self.during_forward(batch)
            for group in self.groups:
                for source in group.sources:
                    fill_slots(source, batch.out_slots[group.name].tolist(), self.rng)
        if self.after_forward is not None:
            self.after_forward(batch)
        yield from ()

    def cached_slots(self) -> list[CachedSlots]:
        """Return what the prefix cache holds, group by group: in windowed groups, what is resident."""
        found = []
        for group in self.groups:
            entries: list[tuple[int, int, int]] = []
            for page, place, before in self.cache.walk():
                slots = self._resident(group, page)
                # The chain of a first token may start from an identity.
                start = UNCHECKED if self.anchors is not None else HEAD_OF_CHAIN
                last = self._resident(group, before)[-1:] or [UNCHECKED]
                previous = [start if place == 0 else last[0], *slots]
                first = place * self.config.page_size
                entries += zip(slots, range(first, first + len(slots)), previous, strict=False)
            if entries:
                slots_, positions, previous_ = (torch.tensor(column) for column in zip(*entries, strict=True))
                found.append(CachedSlots(group=group.name, slots=slots_, positions=positions, previous=previous_))
        return found

    @staticmethod
    def _resident(group: Group, page: int) -> list[int]:
        """Return the slots of a page in a group; none where it is not there."""
        if page < 0 or (isinstance(group, LutGroup) and page not in group.resident):
            return []
        return group.page_slots([page])

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        """Return the forward that extends requests by so many tokens."""
        batch = self.batch(extends, padding=0)
        for group in self.luts:
            self._there(f"LUT of {group.name}", group.lookup)
        return ForwardBatch(
            requests=[request.extended(extend) for request, extend in extends.items()],
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_slots=batch.out_slots,
            tables={group.name: self._there(_table_name(group), group.table) for group in self.groups},
            expected_input_ids=batch.expected_input_ids,
        )

    def _there(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the books have, on the device and as it is now: on the CPU itself, else a copy, always the same.

        Rows of a copy lie next to each other.
        """
        if self.device.type == "cpu":
            return tensor
        if name not in self._copies:
            self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return self._copies[name].copy_(tensor)


def _table_name(group: Group) -> str:
    """Return what tells tables apart: the groups whose slots come from the pages share one."""
    return f"table of {group.name}" if isinstance(group, RingGroup) else "table of the pages"


def _moved(config: EngineConfig, device: torch.device) -> EngineConfig:
    """Return `config` with its K/V bytes on `device`, in the same layout."""
    if device.type == "cpu":
        return config

    def move(source: KvSource | None) -> KvSource | None:
        if source is None:
            return None
        layers = []
        for layer in source.layers:
            storage = torch.empty(0, dtype=layer.dtype).set_(layer.untyped_storage())  # type: ignore[call-overload]
            layers.append(storage.to(device).as_strided(layer.shape, layer.stride(), layer.storage_offset()))
        return replace(source, layers=tuple(layers))

    groups = [replace(g, k_source=move(g.k_source), v_source=move(g.v_source)) for g in config.groups]
    return replace(config, groups=tuple(groups))
