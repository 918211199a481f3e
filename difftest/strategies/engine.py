"""Engines of any geometry and what happens to them; and the calls that they make, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from kv_canary.backends import implementation
from kv_canary.constants import STEP_MASK
from kv_canary.difftest.simulator import (
    ACTIONS,
    FAULTS,
    Action,
    Call,
    Engine,
    EngineConfig,
    GroupConfig,
    Memory,
    corrupt,
    perform,
)
from kv_canary.difftest.simulator.actions import opening, random_action
from kv_canary.difftest.simulator.config import Kind
from kv_canary.difftest.simulator.snapshot import snapshot
from kv_canary.difftest.strategies.domain import kv_sources, seeds
from kv_canary.difftest.strategies.edge_values import HOSTILE
from kv_canary.specs import get_spec

# The kinds of groups that models have together.
_LAYOUTS: tuple[tuple[Kind, ...], ...] = (
    ("full",),
    ("window",),
    ("full", "lut"),
    ("full", "lut"),
    ("window", "lut"),
    ("ring",),
    ("full", "ring"),
    ("window", "ring"),
    ("lut", "ring"),
)
_WITHOUT_RINGS = tuple(kinds for kinds in _LAYOUTS if "ring" not in kinds)
# What HEAD and TAIL call where neither has a plan.
_FUSED = ("verify_prefixes", "verify_resolved")
# Mostly small; the others' requests cross tiles of the kernels.
MAX_LENS = (24, 40, 40, 40, 300, 300, 640)
# The first of each is what Hypothesis shrinks to.
_STEPS = ("mixed", "mixed", "mixed", "prefill", "prefill", "decode", "decode", "speculate", "speculate", "idle", "idle")
_BETWEEN = ("arrive", "arrive", "finish", "finish", "retract", "fork", "fork", "compact", "evict", "leave_windows")
# Those that a plan or a verify sees at once count for more, and so does any input of a call: there are many.
_FAULTS = (*FAULTS, *4 * ("unmap", "unmap", "argument"), *2 * ("table_entry", "lut_entry", "out_slot"))


@st.composite
def engine_configs(
    draw: Any, *, max_lens: tuple[int, ...] = MAX_LENS, layouts: tuple[tuple[Kind, ...], ...] = _LAYOUTS
) -> EngineConfig:
    """An engine of any geometry, whose rows have one of `max_lens` positions, and its groups the kinds of a layout."""
    page = draw(st.sampled_from([1, 1, 2, 3, 16]))
    max_len = draw(st.sampled_from(max_lens))
    rows = draw(st.sampled_from([2, 4, 6])) if max_len < 300 else 5
    # Sometimes too few for all rows, so that requests wait and the cache is evicted.
    num_pages = max(2, int(max_len * draw(st.sampled_from([1.2, 2, 4]))) // page)
    first_slot = draw(st.sampled_from([page, page, 1]))
    groups = []
    for kind in draw(st.sampled_from(layouts)):
        window = 0 if kind == "full" else draw(st.sampled_from([1, 5, 16, 31, 130] if max_len >= 300 else [1, 5, 16]))
        num_slots = first_slot + num_pages * page
        if kind == "ring":
            num_slots = 1 + (rows - 1) * (window + 1)
        if kind == "lut":
            num_slots = (2 + max(num_pages * 2 // 3, 2)) * page
        sources = [draw(st.one_of(st.none(), kv_sources(num_slots, short=False))) for _ in range(2)]
        groups.append(
            GroupConfig(
                kind=kind,
                num_slots=num_slots,
                window=window,
                after_write=kind != "full" and draw(st.booleans()),
                k_source=sources[0],
                v_source=sources[1],
            )
        )
    return EngineConfig(
        groups=tuple(groups),
        page_size=page,
        num_pages=num_pages,
        first_slot=first_slot,
        max_rows=rows,
        max_len=max_len,
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        rewrite_matched=draw(st.booleans()),
        anchors=draw(st.booleans()),
        token_pool=draw(st.booleans()),
        token_offset=draw(st.sampled_from([0, 0, 1])),
        token_oracle=draw(st.booleans()),
        serial_owners=draw(st.booleans()),
        first_owner=draw(st.sampled_from([1, 1, (1 << 24) - 1, 1 << 40])),
        first_step=draw(st.sampled_from([0, 7, STEP_MASK - 1, STEP_MASK, 1 << 62])),
        stride=draw(st.sampled_from([1, 1, 2, 3])),
        track_lifetime=draw(st.booleans()),
        check_positions=draw(st.sampled_from([True, True, False])),
        two_records=draw(st.booleans()),
        fused=draw(st.booleans()),
        verify_cap=draw(st.sampled_from([4096, 20, 20, 150, 300])),
        ring_cap=draw(st.sampled_from([0, 2, 2, 64])),
        gap=draw(st.integers(0, 2)),
        seed=draw(seeds),
    )


def actions(kinds: tuple[str, ...] = tuple(ACTIONS)) -> st.SearchStrategy[Action]:
    """Something that happens, of one of `kinds`."""
    return st.builds(
        Action,
        kind=st.sampled_from(kinds),
        pick=st.integers(0, 7),
        amount=st.one_of(st.integers(1, 20), st.integers(1, 1200)),
        more=st.integers(0, 40),
    )


def corruptions() -> st.SearchStrategy[dict[str, Any]]:
    """The keywords of a `corrupt`."""
    values = st.one_of(st.just(0), st.sampled_from(HOSTILE), st.integers(0, 400))
    return st.fixed_dictionaries({"kind": st.sampled_from(_FAULTS), "pick": st.integers(0, 999), "value": values})


@st.composite
def histories(draw: Any, configs: st.SearchStrategy[EngineConfig], *, faults: bool = True) -> Engine:
    """An engine with a past, its one memory advanced by the reference; with `faults`, corrupt half of the time."""
    engine = Engine(draw(configs))
    memory, longest = engine.new_memory(), engine.config.max_len
    rng = np.random.default_rng(draw(seeds))
    past = opening(rng, longest=longest)
    past += [random_action(rng, longest=longest) for _ in range(draw(st.integers(0, 8)))]
    for action in past:
        run_on_reference(perform(engine, action), memory)
    if faults and draw(st.booleans()):
        for corruption in draw(st.lists(corruptions(), min_size=1, max_size=3)):
            corrupt(engine, **corruption)
        for _ in range(draw(st.integers(1, 2))):
            run_on_reference(perform(engine, random_action(rng, longest=longest)), memory)
            corrupt(engine, **draw(corruptions()))
    return engine


@st.composite
def engine_rounds(
    draw: Any, *, max_lens: tuple[int, ...] = MAX_LENS, faults: bool = True
) -> list[tuple[str, dict[str, Any]]]:
    """The calls of one round of an engine, what happens between two steps and the second of them.

    Each is (op, its complete arguments as they were before the call). With `faults` some engines are corrupt.
    """
    engine = draw(histories(engine_configs(max_lens=max_lens), faults=faults))
    chosen = [*draw(st.lists(actions(_BETWEEN), max_size=2)), draw(actions(_STEPS))]
    return [call for action in chosen for call in recorded(perform(engine, action), engine.memories[0])]


@st.composite
def engine_cases(draw: Any, op: str) -> dict[str, Any]:
    """One call of `op` as an engine makes it, healthy or not."""
    # Rings are planned twice.
    configs = engine_configs(layouts=_WITHOUT_RINGS if op in _FUSED else _LAYOUTS)
    engine = draw(histories(configs.map(lambda config: _calling(op, config))))
    memory = engine.memories[0]
    between = op in ("move", "retire")
    chosen = draw(st.lists(actions(_BETWEEN if between else _STEPS), min_size=1, max_size=2))
    found = [call for action in chosen for call in recorded(perform(engine, action), memory, only=op)]
    if not found and between:
        # Nothing was copied or freed: take the first slots, whatever they hold.
        group = engine.groups[0]
        slots = torch.arange(min(group.config.num_slots, 8))
        named = (
            {"slots": slots, "owner": torch.tensor([3])}
            if op == "retire"
            else {"src": slots, "dst": slots.flip(0), "owner": 3}
        )
        step = torch.tensor([engine.step_number])
        records = memory.groups[group.name].records
        found.append((op, snapshot(op, get_spec(op).bind({**named, "step": step, "records": records}))))
    while not found:
        # A faulty step may have left the call out, since its outcome would be undefined; the next does not.
        found += recorded(perform(engine, Action(kind="idle", more=1)), memory, only=op)
    arguments: dict[str, Any] = found[draw(st.integers(0, len(found) - 1))][1]
    return arguments


def _calling(op: str, config: EngineConfig) -> EngineConfig:
    """Return `config`, changed as far as it takes for its steps to call `op`."""
    if op == "scatter_token_ids":
        # Without an offset, chain_tails keeps the tokens.
        return replace(config, token_pool=True, token_offset=1)
    if op in ("plan", "verify"):
        return replace(config, fused=False)
    if op not in _FUSED:
        return config
    return replace(config, fused=True, groups=tuple(replace(group, after_write=False) for group in config.groups))


def run_on_reference(calls: Iterator[Call], memory: Memory) -> None:
    """Make `calls` on `memory` with the reference."""
    for call in calls:
        implementation(call.op, "reference")(**call.arguments(memory))


def recorded(calls: Iterator[Call], memory: Memory, *, only: str | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make `calls` on `memory` with the reference; yield each, or those of the op `only`, as it was before."""
    for call in calls:
        arguments = call.arguments(memory)
        if only is None or call.op == only:
            yield call.op, snapshot(call.op, arguments)
        implementation(call.op, "reference")(**arguments)
