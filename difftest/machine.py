"""One state machine drives every implementation through the life of an engine; they must agree throughout."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_canary.backends import implementation
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest.simulator import Action, Call, Engine, EngineConfig, Memory, corrupt, perform
from kv_canary.difftest.simulator.actions import opening
from kv_canary.difftest.simulator.snapshot import snapshot
from kv_canary.difftest.strategies.engine import actions, corruptions, engine_configs
from kv_canary.specs import get_spec
from kv_canary.specs.violation_row import VIOLATION_WORDS

# Makes one call of an op, in place.
Launch = Callable[[str, Mapping[str, Any]], None]


class Disagreement(Mismatch):
    """Two implementations left different bytes behind after the same call.

    Args:
        arguments: the complete arguments of the call, as they were before it.
        implementations: names of the two, the one that others are held against first.
    """

    def __init__(
        self,
        outcome: Outcome,
        *,
        op: str,
        path: str,
        detail: str,
        arguments: Mapping[str, Any],
        implementations: tuple[str, str],
    ) -> None:
        first, other = implementations
        detail = f"{other} against {first}: {detail}"
        super().__init__(outcome, op=op, backend=other, path=path, detail=detail)
        self.arguments, self.implementations = arguments, implementations


class FalseAlarm(Exception):  # noqa: N818 - it is what the machine is for, not an error of the machine
    """Violations were found although nothing was corrupted."""


def default_implementations() -> dict[str, Launch]:
    """Return the implementations there are, the plainest first; Triton's needs a GPU or its interpreter."""
    from kv_canary.difftest.naive.ops import IMPLEMENTATIONS

    def backend(name: str) -> Launch:
        return lambda op, arguments: implementation(op, name)(**arguments)

    def plain(op: str, arguments: Mapping[str, Any]) -> None:
        IMPLEMENTATIONS[op](**arguments)

    return {"plain": plain, "reference": backend("reference"), "triton": backend("triton")}


class Ensemble:
    """Several implementations, each with its own memory beside one engine."""

    def __init__(self, engine: Engine, implementations: Mapping[str, Launch]) -> None:
        self.engine = engine
        self.launches = dict(implementations)
        self.memories: dict[str, Memory] = {name: engine.new_memory() for name in implementations}

    def make(self, calls: Iterator[Call]) -> None:
        """Make every call on every implementation.

        Raises:
            Disagreement: two of them differ after a call, or one wrote to an input.
        """
        for call in calls:
            self._make(call)

    def _make(self, call: Call) -> None:
        arguments = {name: call.arguments(memory) for name, memory in self.memories.items()}
        first, *others = arguments
        before = {name: snapshot(call.op, given) for name, given in arguments.items()}
        for name, launch in self.launches.items():
            launch(call.op, arguments[name])
            self._check_inputs(call.op, name, before=before[name], after=arguments[name])
        for other in others:
            path, detail = self._difference(call.op, before, arguments, (first, other))
            if path:
                raise Disagreement(
                    Outcome.BYTES_DIFFER,
                    op=call.op,
                    path=path,
                    detail=detail,
                    arguments=before[first],
                    implementations=(first, other),
                )

    def _check_inputs(self, op: str, name: str, *, before: dict[str, Any], after: dict[str, Any]) -> None:
        pairs = zip(get_spec(op).leaves(before), get_spec(op).leaves(after), strict=True)
        for was, now in pairs:
            if was.role == "in" and not torch.equal(was.tensor, now.tensor):
                raise Disagreement(
                    Outcome.INPUT_CHANGED,
                    op=op,
                    path=now.path,
                    detail=_first_difference(was.tensor, now.tensor),
                    arguments=before,
                    implementations=(name, name),
                )

    def _difference(
        self, op: str, before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]], pair: tuple[str, str]
    ) -> tuple[str, str]:
        """Return the first tensor in which two implementations differ, and how; ("", "") where they agree."""
        expected, got = (list(get_spec(op).leaves(after[name])) for name in pair)
        for wanted, leaf in zip(expected, got, strict=True):
            compared = leaf.role in ("out", "inout") and leaf.path != "violations.ring"
            if compared and not torch.equal(wanted.tensor, leaf.tensor):
                return leaf.path, _first_difference(wanted.tensor, leaf.tensor)
        if "violations" in after[pair[0]]:
            detail = self._ring_difference(op, before, after, pair)
            return ("violations.ring", detail) if detail else ("", "")
        return "", ""

    def _ring_difference(
        self, op: str, before: Mapping[str, dict[str, Any]], after: Mapping[str, dict[str, Any]], pair: tuple[str, str]
    ) -> str:
        """Compare what two implementations added to their rings, in any order; return what differs, or ""."""
        start, end = (int(of[pair[0]]["violations"].count) for of in (before, after))
        capacity = len(after[pair[0]]["violations"].ring)
        low, high = min(max(start, 0), capacity), min(max(end, 0), capacity)
        for name in pair:
            was, now = before[name]["violations"].ring, after[name]["violations"].ring
            if not torch.equal(was[:low], now[:low]) or not torch.equal(was[high:], now[high:]):
                return f"{name} touched rows outside [count before, count after)"
        added = [Counter(_rows(after[name]["violations"].ring[low:high])) for name in pair]
        if end > capacity:
            # Which rows found room is free, but each must be one that there is.
            roomy = dict(before[pair[0]])
            ring = torch.zeros(end, VIOLATION_WORDS, dtype=torch.int64)
            roomy["violations"] = dataclasses.replace(roomy["violations"], ring=ring)
            roomy = snapshot(op, roomy)
            self.launches[pair[0]](op, roomy)
            extra = added[1] - Counter(_rows(roomy["violations"].ring[start:end]))
            return f"overflowed, and {next(extra.elements())} is no row of {pair[0]}" if extra else ""
        missing, extra = added[0] - added[1], added[1] - added[0]
        return f"expected {next(iter(missing), None)}, got {next(iter(extra), None)}" if missing or extra else ""


class EngineMachine(RuleBasedStateMachine):
    """The life of an engine under `implementations`, which subclasses give; others are held against the first."""

    implementations: ClassVar[Mapping[str, Launch]]
    # How many positions rows of tables have.
    max_lens: ClassVar[tuple[int, ...]] = (24, 40, 40, 300)

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        config: EngineConfig = data.draw(engine_configs(max_lens=self.max_lens))
        self.engine = Engine(config)
        self.ensemble = Ensemble(self.engine, self.implementations)
        if data.draw(st.sampled_from([True, True, True, False])):
            for action in opening(np.random.default_rng(config.seed), longest=config.max_len):
                self._perform(action)

    @rule(action=actions(("arrive",)))
    def arrive(self, action: Action) -> None:
        self._perform(action)

    @rule(action=actions(("prefill", "mixed")))
    def prefill(self, action: Action) -> None:
        self._perform(action)

    @rule(action=actions(("decode", "speculate", "idle")))
    def decode(self, action: Action) -> None:
        self._perform(action)

    @precondition(lambda self: self.engine.running)
    @rule(action=actions(("finish", "retract", "fork", "compact")))
    def change_request(self, action: Action) -> None:
        self._perform(action)

    @rule(action=actions(("evict", "leave_windows")))
    def make_room(self, action: Action) -> None:
        self._perform(action)

    @precondition(lambda self: self.engine.running)
    @rule(corruption=corruptions())
    def corrupt(self, corruption: dict[str, Any]) -> None:
        corrupt(self.engine, **corruption)

    @precondition(lambda self: not self.engine.healthy)
    @rule(action=actions(("flush",)))
    def flush(self, action: Action) -> None:
        self._perform(action)

    @invariant()
    def books_are_in_order(self) -> None:
        if self.engine.healthy:
            self.engine.check_integrity()

    @invariant()
    def healthy_engine_is_not_accused(self) -> None:
        if self.engine.healthy:
            for name, memory in self.ensemble.memories.items():
                found = int(memory.violations.count)
                if found:
                    rows = memory.violations.ring[:1].tolist()
                    raise FalseAlarm(f"{name} found {found} violations in a healthy engine, the first of them {rows}")

    def _perform(self, action: Action) -> None:
        self.ensemble.make(perform(self.engine, action))


def engine_machine(implementations: Mapping[str, Launch] | None = None) -> type[EngineMachine]:
    """Return the machine that drives `implementations`, by default all three; give it to Hypothesis."""
    chosen = default_implementations() if implementations is None else dict(implementations)
    return type("EngineMachineOf" + "".join(n.title() for n in chosen), (EngineMachine,), {"implementations": chosen})


def _rows(ring: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in ring.tolist()]


def _first_difference(expected: torch.Tensor, got: torch.Tensor) -> str:
    index = [int(i) for i in (expected != got).nonzero()[0]]
    where = tuple(index)
    return f"first at {index}: expected {expected[where].item()}, got {got[where].item()}"
