"""The state machine: all implementations agree over engines' lives, and one that is broken is found and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kv_canary.backends import implementation
from kv_canary.cases.comparison import Outcome
from kv_canary.difftest.machine import Disagreement, Ensemble, FalseAlarm, default_implementations, engine_machine
from kv_canary.difftest.simulator import Engine, EngineConfig, GroupConfig
from kv_canary.specs import get_spec

ALL = default_implementations()


def run_machine(names: tuple[str, ...] = (), *, lives: int, **others: Any) -> None:
    """Run `lives` of engines under the implementations of these names, and others."""
    run_state_machine_as_test(
        engine_machine({**{n: ALL[n] for n in names}, **others}),
        settings=settings(
            max_examples=lives,
            stateful_step_count=15,
            deadline=None,
            derandomize=True,
            database=None,
            # What is found is raised as it is found: a test needs no smaller one.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_all_implementations_agree() -> None:
    run_machine(("plain", "reference", "triton"), lives=max(1, settings.default.max_examples // 20))


def test_the_cheap_ones_agree_for_longer() -> None:
    run_machine(("plain", "reference"), lives=max(1, settings.default.max_examples // 4))


def changed(op: str, path: str, *, every: int = 1) -> Any:
    """The reference, but for the last bytes of one output of `op`, in calls of every n-th size."""

    def launch(name: str, arguments: Mapping[str, Any]) -> None:
        implementation(name, "reference")(**arguments)
        if name == op:
            leaves = list(get_spec(op).leaves(arguments))
            leaf = next(leaf for leaf in leaves if leaf.path == path)
            if sum(leaf.tensor.numel() for leaf in leaves) % every == 0 and leaf.tensor.numel():
                leaf.tensor.view(-1)[-1:] ^= 1

    return launch


@pytest.mark.parametrize(
    ("op", "path", "every"),
    [
        ("plan", "verify_plan.num_valid", 1),
        ("plan", "write_plan.offsets", 3),
        ("verify", "counters", 1),
        ("write", "counters", 5),
        ("chain_tails", "tails", 1),
        ("scatter_token_ids", "status", 1),
        ("verify", "violations.count", 1),
        ("verify_prefixes", "resolved.num_requested", 1),
        ("verify_prefixes", "write_plan.offsets", 3),
        ("verify_prefixes", "violations.count", 1),
        ("verify_resolved", "counters", 1),
    ],
)
def test_a_broken_implementation_is_caught(op: str, path: str, every: int) -> None:
    with pytest.raises(Disagreement) as found:
        run_machine(("reference",), lives=60, broken=changed(op, path, every=every))
    error = found.value
    assert (error.outcome, error.op, error.path, error.backend) == (Outcome.BYTES_DIFFER, op, path, "broken")
    assert error.implementations == ("reference", "broken")
    # The call can be repeated from what the error carries.
    leaf = next(leaf for leaf in get_spec(op).leaves(error.arguments) if leaf.path == path)
    before = leaf.tensor.clone()
    implementation(op, "reference")(**get_spec(op).bind(error.arguments))
    assert before.shape == leaf.tensor.shape


def test_a_written_input_is_caught() -> None:
    with pytest.raises(Disagreement) as found:
        run_machine(("reference",), lives=20, broken=changed("plan", "prefix_lens"))
    assert (found.value.outcome, found.value.path) == (Outcome.INPUT_CHANGED, "prefix_lens")


def test_implementations_that_accuse_the_healthy_together_are_caught() -> None:
    def accuse(op: str, arguments: Mapping[str, Any]) -> None:
        implementation(op, "reference")(**arguments)
        if op == "verify":
            arguments["violations"].count.add_(1)

    with pytest.raises(FalseAlarm, match="healthy engine"):
        run_machine(lives=20, first=accuse, second=accuse)


def ring_ensemble(ring_cap: int, *, change: Any) -> tuple[Engine, Ensemble]:
    """An engine whose records are about to be found wrong, under the reference twice, `change` done to the second."""

    def second(op: str, arguments: Mapping[str, Any]) -> None:
        implementation(op, "reference")(**arguments)
        if op == "verify":
            change(arguments["violations"])

    config = EngineConfig(
        groups=(GroupConfig(kind="full", num_slots=41),),
        page_size=1,
        num_pages=40,
        first_slot=1,
        max_rows=3,
        max_len=20,
        ring_cap=ring_cap,
    )
    engine = Engine(config)
    ensemble = Ensemble(engine, {"first": ALL["reference"], "second": second})
    request = engine.arrive(stem=0, shared=0, fresh=6)
    engine.admit(request)
    ensemble.make(engine.step({request: 6}))
    engine.healthy = False
    for memory in ensemble.memories.values():
        memory.groups["full"].records[0].bitwise_xor_(torch.tensor([1 << 33, 0, 0, 0]))
    return engine, ensemble


@pytest.mark.parametrize("ring_cap", [3, 64])
def test_rows_of_a_ring_may_come_in_any_order(ring_cap: int) -> None:
    def backwards(log: Any) -> None:
        n = min(int(log.count), len(log.ring))
        log.ring[:n] = log.ring[:n].flip(0)

    engine, ensemble = ring_ensemble(ring_cap, change=lambda log: None)
    calls = engine.step({engine.running[0]: 1})
    for call in calls:
        ensemble.make(iter([call]))
        if call.op == "verify":
            backwards(ensemble.memories["second"].violations)
            break
    assert int(ensemble.memories["first"].violations.count) >= 6
    # What was there before is compared with itself, whatever its order.
    ensemble.make(calls)


@pytest.mark.parametrize("ring_cap", [3, 64])
def test_rows_of_a_ring_that_nobody_found_are_caught(ring_cap: int) -> None:
    def invent(log: Any) -> None:
        if int(log.count):
            log.ring[min(int(log.count), len(log.ring)) - 1, 6] ^= 1

    engine, ensemble = ring_ensemble(ring_cap, change=invent)
    with pytest.raises(Disagreement, match=r"violations\.ring"):
        ensemble.make(engine.step({engine.running[0]: 1}))
