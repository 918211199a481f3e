"""A run of SGLang's scheduler that must find nothing and leave nothing out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kv_canary.engines.sglang import session

from . import engine

# By name: arguments of the scheduler, on top of the harness's.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "page 16": {"page_size": 16},
    "overlap": {"disable_overlap_schedule": False},
    "overlap, page 16": {"disable_overlap_schedule": False, "page_size": 16},
    "overlap, mixed": {"disable_overlap_schedule": False, "enable_mixed_chunk": True},
}


@dataclass(kw_only=True)
class Run:
    """What a scenario works with.

    Args:
        scheduler: SGLang's.
        tokens: gives prompts.
        reqs: all requests so far.
        aborted: those of them that were aborted before they had ended.
        modes: forwards so far, counted by mode.
        relied_on: cached positions that forwards were to read, by the name of the group, off the engine's own tensors.
    """

    scheduler: Any
    tokens: Tokens
    reqs: list[Any] = field(default_factory=list)
    aborted: list[Any] = field(default_factory=list)
    modes: Counter[str] = field(default_factory=Counter)
    relied_on: Counter[str] = field(default_factory=Counter)

    def submit(self, prompt: Sequence[int], new_tokens: int, **sampling: Any) -> Any:
        """Hand in a request, and return it."""
        self.reqs.append(engine.submit(self.scheduler, prompt, new_tokens, **sampling))
        return self.reqs[-1]

    def abort(self, req: Any) -> None:
        """Abort a request, wherever it is."""
        self.aborted.append(req)
        engine.abort(self.scheduler, req.rid)

    def alive(self) -> list[Any]:
        """Return the requests that have neither ended nor been aborted."""
        return [req for req in self.reqs if not req.finished() and req not in self.aborted]

    def go(self, before_step: Callable[[int], bool | None] | None = None) -> None:
        """Run until there is nothing left to do."""
        self.modes += engine.run_all(self.scheduler, before_step)

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Any]:
        """Run prompts to their end, and return their requests."""
        reqs = [self.submit(prompt, new_tokens) for prompt in prompts]
        self.go()
        return reqs


class Tokens:
    """Random prompts; the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = Random(seed)

    def __call__(self, n: int) -> list[int]:
        """Return `n` random tokens."""
        return self.random.choices(range(3, engine.VOCABULARY), k=n)


def run_clean(
    model: str,
    scenario: Callable[[Run], None],
    *,
    seed: int = 0,
    settings: dict[str, str] | None = None,
    random: bool = False,
    **args: Any,
) -> Run:
    """Run the scenario under a canary that raises; see that it found nothing, left nothing out and changed no output.

    Args:
        model: a folder of `save_tiny_model`.
        scenario: hands in requests, and runs them.
        seed: of the prompts.
        settings: of the canary, by environment variables.
        random: whether tokens are sampled, so that there is nothing to hold outputs against.
        args: of the scheduler.
    """
    environ = {
        "KV_CANARY_MODE": "raise",
        "KV_CANARY_SWEEP_EVERY": "5",
        # All bytes are looked at too, where requests come and end, and all the time in between.
        "KV_CANARY_SEALS": "layer",
        "KV_CANARY_SCRUB_SHARE": "0.1",
        # And what the model hands over, against what it has written.
        "KV_CANARY_CHECK_WRITES": "1",
        **(settings or {}),
    }
    with engine.overriding(**environ, SGLANG_ON_CPU="hicache,hybrid_swa"):
        run = Run(scheduler=engine.build_scheduler(model, **args), tokens=Tokens(seed))
    manager = session.current().manager
    _watch(run, {g.name: g.window for g in manager.groups})
    scenario(run)
    # An idle iteration has reported what the last forward found.
    assert run.scheduler.is_fully_idle()
    summary = manager.summary()
    assert [r.sentence for r in manager.reports] == []
    assert (summary.violations, summary.reasons, summary.watching) == (0, {}, "complete")
    assert summary.steps == run.modes.total() > 0
    assert summary.stride == 1
    assert summary.positions_relied_on == summary.positions_verified == run.relied_on.total() > 0
    assert all(summary.launches[g.head_tag.name] == run.modes.total() for g in manager.groups)
    swept = 0 < manager.config.sweep_every <= summary.steps
    assert all(bool(summary.launches.get(g.sweep_tag.name)) == swept for g in manager.groups)
    assert run.alive() == []
    if summary.audits is not None:
        assert summary.audits.unsealed == 0
        assert len(run.reqs) - len(run.aborted) <= summary.audits.completed <= len(run.reqs)
        assert summary.audits.verified > 0
        assert summary.audits.admitted > 0 or not any(req.cached_tokens for req in run.reqs)
        if summary.writes is not None:
            assert (summary.writes.differ, summary.writes.unknown) == (0, 0)
            assert summary.writes.forwards == run.modes.total() * len(manager.groups)
            assert summary.writes.slots > 0
        manager.scrub()
        assert [r.sentence for r in manager.reports] == []
        scrub = manager.summary().scrub
        assert scrub is not None
        assert scrub.unsealed == 0
    if not random:
        assert all(engine.is_greedy(model, req.origin_input_ids, req.output_ids) for req in run.reqs)
    return run


def _watch(run: Run, windows: dict[str, int]) -> None:
    """Count what forwards rely on, by the tensors that the model gets: the canary uses the host's mirrors."""
    runner = run.scheduler.tp_worker.model_runner
    forward = runner.forward

    def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_decode():
            prefixes = [length - 1 for length in batch.seq_lens.tolist()]
        else:
            prefixes = batch.extend_prefix_lens.tolist()
        for name, window in windows.items():
            run.relied_on[name] += sum(min(prefix, window) if window else prefix for prefix in prefixes)
        return forward(batch, *args, **kwargs)

    runner.forward = counted
