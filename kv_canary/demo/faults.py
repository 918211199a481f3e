"""The faults that the demo plants in a running engine, one per run, and what must be found of each.

A fault waits for a moment at which it can happen (a request with enough cached, another one beside it), is planted
right before a forward, and must be found by that very forward, at the slots it was planted in.

Flipped bits are what `KV_CANARY_PERTURB_MODE=real_kv_used` injects into any engine, here into bytes that are sampled,
which HEAD must find; `random_bits` has those that flip anywhere. The others need more than the
canary knows: they are done to the engine's own block tables, allocator and inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kv_canary.constants import Reason
from kv_canary.demo.serving import Hooks
from kv_canary.engines.transformers import TransformersCanary
from kv_canary.engines.transformers_layouts import BlockLayout, Layout
from kv_canary.perturb import PerturbConfig, Perturber, bytes_of
from kv_canary.perturb_settings import Half
from kv_canary.reports import ViolationReport
from kv_canary.runtime.pools import KvPool

# Forwards before the first fault: enough for a mix of prefills and decodes.
WARM_UP_STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request of the forward about to run, as the engine holds it."""

    request_id: str
    past: int
    extend: int
    index: int


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The engine at the moment before a forward."""

    layout: Layout
    processor: Any
    requests: list[Request]
    rng: random.Random

    def full_group(self) -> int:
        """Return the group with full attention."""
        return next(g for g, group in enumerate(self.layout.groups) if not group.window)


@dataclass(kw_only=True)
class Planted:
    """A planted fault: the step that must find it, the record slots it is in, and how it is described."""

    step: int
    slots: set[int]
    where: str
    undo: Callable[[], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault.

    Args:
        name: short name.
        doc: what goes wrong.
        expected: any of these reasons is the right finding.
        plant: plants it if the moment is right, and returns the slots and a description, and what to undo.
        perturb: where there is no `plant`: what the canary itself is to inject, given where the engine keeps what.
        in_tables: planted before the batch's index tensors are made, else right before the forward.
    """

    name: str
    doc: str
    expected: Reason
    plant: Callable[[Scene, dict[str, Any]], tuple[set[int], str, Callable[[], None] | None] | None] | None = None
    perturb: Callable[[Layout], PerturbConfig] | None = None
    in_tables: bool = False


@dataclass(kw_only=True)
class Planter:
    """Plants one fault into one run of the engine, once."""

    fault: Fault
    seed: int = 0
    _rng: random.Random = field(init=False)
    _planted: Planted | None = None
    _perturber: Perturber | None = None

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    @property
    def planted(self) -> Planted | None:
        """The planted fault; None as long as there is none."""
        if self._perturber is None or not self._perturber.injections:
            return self._planted
        injection = self._perturber.injections[0]
        return Planted(step=injection.step, slots=set(injection.slots), where=injection.where)

    def hooks(self) -> Hooks:
        """Return the hooks to serve with."""
        return Hooks(
            started=self._started,
            before_tables=self._before_tables,
            before_forward=self._before_forward,
            done=self._done,
        )

    def findings(self, reports: Sequence[ViolationReport]) -> list[ViolationReport]:
        """Return the reports that found the fault: of an expected reason, at a planted slot, not before its step."""
        if self.planted is None:
            return []
        wanted = {r.name for r in Reason if r in self.fault.expected}
        step, slots = self.planted.step, self.planted.slots
        return [r for r in reports if r.step >= step and r.slot in slots and wanted & set(r.reasons)]

    def _started(self, canary: TransformersCanary) -> None:
        if self.fault.plant is None and self.fault.perturb is not None:
            config = replace(self.fault.perturb(canary.layout), warm_up=WARM_UP_STEPS, seed=self.seed)
            self._perturber = canary.manager.perturber = Perturber(config, canary.manager.groups)

    def _before_tables(
        self, canary: TransformersCanary, processor: Any, futures: Sequence[Any]
    ) -> Callable[[], None] | None:
        if not self.fault.in_tables:
            return None
        past = [f.state.position_offset for f in futures]
        return self._plant(canary, processor, futures, past, {})

    def _before_forward(self, canary: TransformersCanary, processor: Any, batch_data: dict[str, Any]) -> None:
        if not self.fault.in_tables:
            futures = processor.inputs_and_outputs.requests_in_batch
            past = [f.state.position_offset - f.query_length for f in futures]
            self._plant(canary, processor, futures, past, batch_data)

    def _plant(
        self,
        canary: TransformersCanary,
        processor: Any,
        futures: Sequence[Any],
        past: Sequence[int],
        batch_data: dict[str, Any],
    ) -> Callable[[], None] | None:
        step = canary.manager.step + 1
        plant = self.fault.plant
        if plant is None or self._planted is not None or step <= WARM_UP_STEPS:
            return None
        requests = [
            Request(request_id=f.state.request_id, past=p, extend=f.query_length, index=i)
            for i, (f, p) in enumerate(zip(futures, past, strict=True))
        ]
        scene = Scene(layout=canary.layout, processor=processor, requests=requests, rng=self._rng)
        result = plant(scene, batch_data)
        if result is None:
            return None
        slots, where, undo = result
        self._planted = Planted(step=step, slots=slots, where=where)
        return undo

    def _done(self, canary: TransformersCanary) -> bool:
        planted = self.planted
        return planted is not None and canary.manager.step > planted.step + 1


def _allocators(layout: Layout) -> list[Any]:
    return list(layout.managers if isinstance(layout, BlockLayout) else layout.cache.cache_allocators.values())


def _flip(half: Half, *, last_layer: bool) -> Callable[[Layout], PerturbConfig]:
    def perturb(layout: Layout) -> PerturbConfig:
        group, index = _model_layer(layout, last=last_layer)
        name = layout.groups[group].name
        return PerturbConfig(mode="real_kv_used", group=name, half=half, layer=index, covered_only=True)

    return perturb


def _model_layer(layout: Layout, *, last: bool) -> tuple[int, int]:
    """Return the group of the model's first or last layer, and the layer's place in the group's pool."""
    if isinstance(layout, BlockLayout):
        members = layout.cache.layer_index_to_group_indices
        group, index = members[max(members) if last else min(members)]
        return group, index
    places = [(layer, g, i) for g, a in enumerate(_allocators(layout)) for i, layer in enumerate(a.layer_indices)]
    _, group, index = max(places) if last else min(places)
    return group, index


def _two_requests(scene: Scene, *, blocks: int) -> tuple[Request, Request] | None:
    """Return two requests whose first `blocks` pages are complete and differ in the last of them."""
    group = scene.full_group()
    page = _page(scene.layout)
    table = scene.layout.block_table(group)
    long = [r for r in scene.requests if r.past >= (blocks + 1) * page]
    pairs = [
        (a, b)
        for a in long
        for b in long
        if table[a.request_id][blocks] != table[b.request_id][blocks] and a.request_id != b.request_id
    ]
    return scene.rng.choice(pairs) if pairs else None


def _table_entry(scene: Scene, batch_data: dict[str, Any]) -> tuple[set[int], str, Callable[[], None]] | None:
    """One entry of a block table names another request's block, while the batch's indices are made."""
    group = scene.full_group()
    pair = _two_requests(scene, blocks=3)
    if pair is None:
        return None
    victim, other = pair
    table = scene.layout.block_table(group)
    mine, foreign = table[victim.request_id], table[other.request_id][3]
    right, mine[3] = mine[3], foreign

    def undo() -> None:
        mine[3] = right

    slots = set(scene.layout.block_slots(scene.layout.groups[group].pool, [foreign]).tolist())
    return slots, f"page 3 of {victim.request_id} names a page of {other.request_id}", undo


def _whole_prefix(scene: Scene, batch_data: dict[str, Any]) -> tuple[set[int], str, Callable[[], None]] | None:
    """A request at the start of a page has its whole cached prefix pointed at another request's."""
    group, page = scene.full_group(), _page(scene.layout)
    table = scene.layout.block_table(group)
    pairs = [
        (a, b)
        for a in scene.requests
        for b in scene.requests
        if a.past
        and a.past % page == 0
        and b.past >= a.past
        and a.extend
        and table[a.request_id][a.past // page - 1] != table[b.request_id][a.past // page - 1]
    ]
    if not pairs:
        return None
    victim, other = scene.rng.choice(pairs)
    pages = victim.past // page
    mine = table[victim.request_id]
    right, mine[:pages] = mine[:pages], table[other.request_id][:pages]
    last = mine[pages - 1]

    def undo() -> None:
        mine[:pages] = right

    # PREFIX names the seed: the slot of the last cached position.
    seed = int(scene.layout.block_slots(scene.layout.groups[group].pool, [last])[-1])
    return {seed}, f"all {pages} pages of {victim.request_id} name pages of {other.request_id}", undo


def _freed_in_use(scene: Scene, batch_data: dict[str, Any]) -> tuple[set[int], str, None] | None:
    """A page of a request in flight is freed, and lies first in line to be handed out."""
    group, layout = scene.full_group(), scene.layout
    candidates = [r for r in scene.requests if r.past >= 4 * _page(layout)]
    if not candidates:
        return None
    request = scene.rng.choice(candidates)
    block = layout.block_table(group)[request.request_id][3]
    cache = layout.cache
    if isinstance(layout, BlockLayout):
        cache._block_manager.free_blocks([block], shareable=False)
        cache._block_manager._uninit_block_ids.rotate(1)
    else:
        cache.pool.free_blocks(_allocators(layout)[group].index, [block])
    slots = set(layout.block_slots(layout.groups[group].pool, [block]).tolist())
    return slots, f"page 3 of {request.request_id} was freed and handed on", None


def _off_by_one(scene: Scene, batch_data: dict[str, Any]) -> tuple[set[int], str, None] | None:
    """A request's new tokens are given positions one too far."""
    group = scene.full_group()
    candidates = [r for r in scene.requests if r.extend and r.past]
    if not candidates:
        return None
    request = scene.rng.choice(candidates)
    first = sum(r.extend for r in scene.requests[: request.index])
    batch_data["position_ids"][0, first : first + request.extend] += 1
    indices = batch_data["write_index"][group][first : first + request.extend]
    slots = set(scene.layout.to_slots(group, indices).tolist())
    return slots, f"{request.extend} tokens of {request.request_id} from position {request.past} on", None


def _zeroed_page(scene: Scene, batch_data: dict[str, Any]) -> tuple[set[int], str, None] | None:
    """All bytes of a page in use become zero."""
    group, page = scene.full_group(), _page(scene.layout)
    candidates = [r for r in scene.requests if r.past >= 3 * page]
    if not candidates:
        return None
    request = scene.rng.choice(candidates)
    pool = scene.layout.groups[group].pool
    block = scene.layout.block_table(group)[request.request_id][2]
    slots = scene.layout.block_slots(pool, [block]).tolist()
    _zero(pool, slots)
    return set(slots), f"page 2 of {request.request_id}", None


def _zero(pool: KvPool, slots: list[int]) -> None:
    for source in (pool.k_source, pool.v_source):
        if source is not None:
            for layer in range(len(source.layers)):
                for slot in slots:
                    bytes_of(source, slot, layer).zero_()


def _page(layout: Layout) -> int:
    return layout.page if isinstance(layout, BlockLayout) else int(_allocators(layout)[0].tokens_per_page)


MOVED = Reason.TOKEN | Reason.POSITION | Reason.CHAIN

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="k-first-layer",
        doc="a sampled bit of K flips in a slot in use, in the first layer",
        expected=Reason.K,
        perturb=_flip("K", last_layer=False),
    ),
    Fault(
        name="k-last-layer",
        doc="a sampled bit of K flips in a slot in use, in the last layer",
        expected=Reason.K,
        perturb=_flip("K", last_layer=True),
    ),
    Fault(
        name="v-first-layer",
        doc="a sampled bit of V flips in a slot in use, in the first layer",
        expected=Reason.V,
        perturb=_flip("V", last_layer=False),
    ),
    Fault(
        name="v-last-layer",
        doc="a sampled bit of V flips in a slot in use, in the last layer",
        expected=Reason.V,
        perturb=_flip("V", last_layer=True),
    ),
    Fault(
        name="table-entry",
        doc="a block-table entry names another request's block",
        expected=MOVED,
        plant=_table_entry,
        in_tables=True,
    ),
    Fault(
        name="whole-prefix",
        doc="a whole prefix names another request's blocks",
        expected=Reason.PREFIX,
        plant=_whole_prefix,
        in_tables=True,
    ),
    Fault(
        name="freed-in-use",
        doc="a page is freed while in use and handed on",
        expected=Reason.FREED,
        plant=_freed_in_use,
    ),
    Fault(
        name="off-by-one",
        doc="new tokens are written one position off",
        expected=Reason.WRITE_POSITION,
        plant=_off_by_one,
    ),
    Fault(
        name="zeroed-page",
        doc="a page in use is zeroed",
        expected=Reason.K | Reason.V,
        plant=_zeroed_page,
    ),
)
