"""A run of the engine that must find nothing and leave nothing out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import transformers

import kv_canary

from .scenarios import Happened, Server, make_model, serve, watch_engine


@dataclass
class Run:
    """What a scenario works with."""

    server: Server
    happened: Happened
    canary: Any


def run_clean(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    scenario: Callable[[Run], None],
    *,
    samples: int = 1,
    options: dict[str, Any] | None = None,
    config: kv_canary.CanaryConfig | None = None,
    identity: Callable[[Any], Any] | None = None,
) -> Happened:
    """Run the scenario under a canary, assert that it found nothing and left nothing out, and return what happened."""
    happened = watch_engine(monkeypatch)
    model = make_model(kind)
    # All bytes are looked at too, where requests come and end, and all the time in between.
    config = config or kv_canary.CanaryConfig(backend="reference", seals="layer", scrub_share=0.1, check_writes=True)
    canary = kv_canary.install(model, config=config, identity=identity)
    try:
        with serve(model, samples=samples, **(options or {})) as server:
            groups = canary.manager.groups
            scenario(Run(server=server, happened=happened, canary=canary))
            canary.flush()
            canary.manager.scrub()
        canary.flush()
        summary = canary.summary()
        assert [r.sentence for r in canary.reports] == []
        assert (summary.violations, summary.reasons, summary.watching) == (0, {}, "complete")
        assert summary.steps == happened.forwards
        assert summary.positions_relied_on == happened.relied_on(groups) > 0
        if summary.stride == 1:
            assert summary.positions_verified == summary.positions_relied_on
        assert all(summary.launches[g.head_tag.name] for g in groups)
        if summary.audits is not None and summary.scrub is not None:
            assert summary.audits.completed > 0
            assert summary.audits.unsealed == summary.scrub.unsealed == 0
            if summary.writes is not None and transformers.__version__ >= "5.23":
                assert (summary.writes.differ, summary.writes.unknown) == (0, 0)
                assert summary.writes.slots > 0
            assert summary.audits.admitted > 0 or not happened.prefix_hits
    finally:
        canary.uninstall()
    return happened
