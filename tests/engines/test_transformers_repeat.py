"""Decode steps that come again and again in transformers: repeated, and still held against what the model reads."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.continuous_batching.model_runner import ModelRunner

import kv_canary
from kv_canary.engines.transformers_requests import Requests, Written
from kv_canary.engines.transformers_session import Session
from kv_canary.runtime.composition import BatchRequests, Composition
from kv_canary.runtime.forward import SingleForwardManager

from .clean import Run, run_clean
from .scenarios import PAGE, TIMEOUT, Prompts, allow_async_batching, make_model, padding_config, serve
from .test_transformers_block_tables import BlockTables

KINDS = ("llama", "mistral", "gemma3")


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward repeated the one before."""
    happened, repeat = list[bool](), SingleForwardManager.repeat

    def seen(forward: Any, *args: Any, **kwargs: Any) -> bool:
        happened.append(repeat(forward, *args, **kwargs))
        return happened[-1]

    monkeypatch.setattr(SingleForwardManager, "repeat", seen)
    return happened


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, padding_config(), {"use_async_batching": True}], ids=["", "padded", "async"])
def test_decode_steps_are_repeated_and_clean(
    monkeypatch: pytest.MonkeyPatch, repeats: list[bool], kind: str, options: dict[str, Any]
) -> None:
    if options.get("use_async_batching"):
        allow_async_batching(monkeypatch)

    def scenario(run: Run) -> None:
        # Windows of 24 are left behind, and lists get shorter.
        run.server.run(Prompts().of_lengths(5, PAGE), new_tokens=32)
        run.server.add(Prompts(2).of_lengths(4, 9), new_tokens=5)
        run.server.add(Prompts(3).of_lengths(3), new_tokens=12)
        run.server.collect(3)

    run_clean(monkeypatch, kind, scenario, options=options)
    assert sum(repeats) > 30


def test_decode_steps_by_block_tables_are_repeated_and_clean(
    monkeypatch: pytest.MonkeyPatch, repeats: list[bool]
) -> None:
    tables = BlockTables(monkeypatch)

    def scenario(run: Run) -> None:
        tables.show(run.server.manager.batch_processor)
        run.server.run(Prompts().of_lengths(3, PAGE, 2 * PAGE + 1), new_tokens=2 * PAGE)

    run_clean(monkeypatch, "llama", scenario, config=kv_canary.CanaryConfig(backend="reference"))
    assert tables.shown > 25
    assert sum(repeats) > 20


@pytest.mark.parametrize("check_tokens", [True, False])
def test_steps_are_repeated_again_once_requests_have_outgrown_their_table(
    monkeypatch: pytest.MonkeyPatch, repeats: list[bool], check_tokens: bool
) -> None:
    def scenario(run: Run) -> None:
        run.server.run(Prompts().of_lengths(244, 246), new_tokens=24)

    # Where tokens are kept, they outgrow a table of their own in the same step.
    config = kv_canary.CanaryConfig(backend="reference", check_tokens=check_tokens)
    run_clean(monkeypatch, "llama", scenario, config=config)
    # From 256 positions on it is elsewhere, which takes one step that is described in full.
    assert repeats[-12:].count(False) == 1
    assert all(repeats[-3:])


Alter = Callable[[torch.Tensor], torch.Tensor]


class Shown:
    """Shows the canary another read index in the sixth forward than the model, which gets what it was to get."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kept: dict[str, Any] = {}
        run = ModelRunner.compute_batch

        def inner(runner: Any, model: Any, batch_data: dict[str, Any]) -> Any:
            return run(runner, model, self._kept)

        monkeypatch.setattr(ModelRunner, "compute_batch", inner)

    def show(self, processor: Any, alter: Alter) -> None:
        runner, steps = processor.model_runner, list[int]()
        watched = runner.compute_batch

        def outer(model: Any, batch_data: dict[str, Any]) -> Any:
            self._kept = batch_data
            steps.append(1)
            if len(steps) == 6:
                batch_data = {**batch_data, "read_index": [alter(batch_data["read_index"][0].clone())]}
            return watched(model, batch_data)

        runner.compute_batch = outer


def _swapped(index: torch.Tensor) -> torch.Tensor:
    index[[3, 7]] = index[[7, 3]]
    return index


def _cut(index: torch.Tensor) -> torch.Tensor:
    return index[:15]


def _far(index: torch.Tensor) -> torch.Tensor:
    index[3] = 1 << 40
    return index


@pytest.mark.parametrize(
    ("alter", "positions", "reasons"),
    [
        (_swapped, {3, 7}, "POSITION"),
        (_cut, {15, 16, 17, 18, 19, 20}, "SLOT_RANGE"),
        (_far, {3}, "SLOT_RANGE"),
    ],
)
def test_a_wrong_read_index_of_an_old_position_is_found_in_a_repeated_step(
    monkeypatch: pytest.MonkeyPatch,
    repeats: list[bool],
    alter: Alter,
    positions: set[int],
    reasons: str,
) -> None:
    index = Shown(monkeypatch)
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        index.show(server.manager.batch_processor, alter)
        server.run([Prompts().random(PAGE + 1)], new_tokens=10)
        canary.flush()
        head = [r for r in canary.reports if r.tag == "HEAD_FULL"]
    canary.uninstall()
    assert repeats[5]
    # The sixth forward alone: nothing of a table is carried on.
    assert {r.step for r in head} == {6}
    assert {r.position for r in head if reasons in r.reasons} == positions


def test_a_wrong_token_that_the_model_is_given_in_a_repeated_step_is_found(repeats: list[bool]) -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        runner = server.manager.batch_processor.model_runner
        watched, steps = runner.compute_batch, list[int]()

        def other(model: Any, batch_data: dict[str, Any]) -> Any:
            steps.append(1)
            if len(steps) == 6:
                batch_data["input_ids"][0, 1] += 1
            return watched(model, batch_data)

        runner.compute_batch = other
        server.run(Prompts().of_lengths(9, 9), new_tokens=10)
        canary.flush()
        found = {(r.step, r.request_id, r.position) for r in canary.reports if r.tag == "HEAD_FULL"}
    canary.uninstall()
    assert repeats[5]
    # The seventh token of the second request, which the next step reads first.
    assert min(found) == (7, "w0_1", 13)
    assert {request for _, request, _ in found} == {"w0_1"}


def test_a_repeated_step_that_raises_is_given_up(repeats: list[bool]) -> None:
    model = make_model("llama")
    canary = kv_canary.install(model, backend="reference", max_reports_per_step=1024)
    with serve(model) as server:
        runner = server.manager.batch_processor.model_runner
        forward, steps = runner._forward_process_and_sample, list[int]()

        def raising(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            if len(steps) == 6:
                raise RuntimeError("out of memory")
            return forward(*args, **kwargs)

        runner._forward_process_and_sample = raising
        server.add(Prompts().of_lengths(9, 9), new_tokens=10)
        manager = canary.manager
        server.manager.stop(block=True, timeout=TIMEOUT)
    assert manager.is_idle
    canary.flush()
    summary = canary.summary()
    canary.uninstall()
    assert (len(steps), repeats[5]) == (6, True)
    assert (summary.violations, summary.failures) == (0, {})


class _Operations(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class _Functions:
    """Counts the functions that are called, Python's and others."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        sys.setprofile(self._see)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


def _launched(tag: str, count: int) -> Callable[[Any], None]:
    """Return what says that HEAD or TAIL has run, and does nothing else."""

    def launch(forward: Any) -> None:
        for group in forward.groups:
            forward.context.state.counters[getattr(group, tag), 0].add_(count)

    return launch


def _count(monkeypatch: pytest.MonkeyPatch, kind: str, requests: int, counter: type[Any]) -> int:
    """Return how often what is counted comes in a repeated step, in the canary's calls without its launches."""
    counts, repeated, repeat = list[int](), list[bool](), SingleForwardManager.repeat

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls = counter()
            try:
                with calls:
                    return original(*args)
            finally:
                counts.append(calls.count)

        return call

    def seen(forward: Any, *args: Any, **kwargs: Any) -> bool:
        repeated.append(repeat(forward, *args, **kwargs))
        return repeated[-1]

    model = make_model(kind)
    with monkeypatch.context() as patch:
        patch.setattr(SingleForwardManager, "_launch_head", _launched("head_tag", 1))
        head = _launched("head_tag", 1)
        patch.setattr(SingleForwardManager, "_opened_head", lambda forward, *_: functools.partial(head, forward))
        patch.setattr(SingleForwardManager, "_launch_tail", _launched("tail_tag", 2))
        patch.setattr(SingleForwardManager, "repeat", seen)
        for name in ("_before", "_after"):
            patch.setattr(Session, name, counted(getattr(Session, name)))
        canary = kv_canary.install(model, backend="reference", seals="off")
        with serve(model) as server:
            server.run(Prompts().of_lengths(*[3] * requests), new_tokens=12)
        canary.uninstall()
    assert repeated[-8:] == [True] * 8
    # Now and then a step does more.
    return min(before + after for before, after in zip(counts[-16::2], counts[-15::2], strict=True))


@pytest.mark.parametrize(("kind", "most"), [("llama", 36), ("gemma3", 100)])
def test_a_repeated_step_takes_few_operations_and_no_python_for_each_request(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    operations = {_count(monkeypatch, kind, requests, _Operations) for requests in (2, 14)}
    assert len(operations) == 1
    assert max(operations) <= most
    assert len({_count(monkeypatch, kind, requests, _Functions) for requests in (2, 14)}) == 1


def _member(prompt: list[int], output: list[int], name: str = "r") -> Any:
    return SimpleNamespace(initial_tokens=prompt, generated_tokens=output, request_id=name)


def test_the_newest_token_of_a_request_is_its_prompt_s_or_its_output_s() -> None:
    members = (_member([1, 2, 3], []), _member([4], [5, 6]), _member([7, 8], [9]))
    source = Requests()
    newest = source.newest(members, np.array([3, 2, 3]))
    assert newest is not None
    assert newest.tolist() == [3, 5, 9]
    assert source.newest(members, np.array([3, 2, 4])) is None


def test_what_forwards_have_written_is_known_of_each_request_until_it_is_let_go_of() -> None:
    written = Written()
    members = [_member([], [], name) for name in ("a", "b")]

    def composed(*mine: Any) -> Composition:
        return Composition(mine, rows=np.arange(len(mine)), owners=np.arange(len(mine)), source=Requests())

    both, first = composed(*members), composed(members[0])

    def note(composition: Composition, *prefix: int) -> None:
        extend = np.ones(len(prefix), np.int64)
        written.note(BatchRequests(composition, prefix=np.array(prefix), extend=extend))

    note(both, 4, 7)
    note(both, 5, 8)
    assert [written.of(name) for name in ("a", "b", "c")] == [6, 9, 0]
    note(first, 6)
    assert [written.of(name) for name in ("a", "b")] == [7, 9]
    written.forget("b")
    assert [written.of(name) for name in ("a", "b")] == [7, 0]
    written.note_futures([SimpleNamespace(state=SimpleNamespace(request_id="b", position_offset=3))])
    assert [written.of(name) for name in ("a", "b")] == [7, 3]
    written.clear()
    assert [written.of(name) for name in ("a", "b")] == [0, 0]


def test_requests_that_end_together_are_held_and_retired_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_canary.runtime.manager import CanaryManager

    retired, completed = list[int](), list[list[str]]()
    retire, complete_all = CanaryManager.retire, CanaryManager.complete_all

    def counted_retire(self: CanaryManager, pool: Any, slots: torch.Tensor, *, owner: int = 0, **more: Any) -> None:
        retired.append(owner)
        retire(self, pool, slots, owner=owner, **more)

    def counted_complete_all(self: CanaryManager, ended: Any) -> None:
        completed.append([request_id for request_id, _ in ended])
        complete_all(self, ended)

    monkeypatch.setattr(CanaryManager, "retire", counted_retire)
    monkeypatch.setattr(CanaryManager, "complete_all", counted_complete_all)

    def scenario(run: Run) -> None:
        run.server.run(Prompts().of_lengths(*[3] * 6), new_tokens=4)
        retired.append(-1)
        # Two, which are told apart.
        run.server.run(Prompts(2).of_lengths(PAGE, PAGE), new_tokens=4)
        run.server.run(Prompts(3).of_lengths(3), new_tokens=2)

    run_clean(monkeypatch, "llama", scenario, config=kv_canary.CanaryConfig(backend="reference", seals="layer"))
    names = [name for those in completed for name in those]
    assert len(names) == len(set(names)) == 9
    # All six are held against their seals by one launch, and what they have freed is retired by one.
    assert max(map(len, completed)) == 6
    many, few = retired[: retired.index(-1)], retired[retired.index(-1) + 1 :]
    assert not any(many)
    assert len(few) >= len({owner for owner in few if owner}) >= 2
