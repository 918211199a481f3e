"""The canary itself fails at random in SGLang's own engine, which serves as if there were none."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import logging

import numpy as np

from kv_canary.commands.facts import facts
from kv_canary.difftest.stress.canary_faults import Faults, SourHandler, SourObserver
from kv_canary.engines.sglang import session

from .test_contained import build, check_greedy, fail_at_random, plant, serve, state

SHAPES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {}),
    ("llama", {"disable_overlap_schedule": False}),
    ("llama", {"max_total_tokens": 300, "page_size": 16}),
    ("mellum", {}),
    ("mellum", {"disable_overlap_schedule": False}),
)


@pytest.fixture
def minutes(request: pytest.FixtureRequest) -> float:
    return float(request.config.getoption("--chaos-minutes"))


def life(model: str, number: int, args: dict[str, Any], folder: Path, happened: Counter[str]) -> None:
    """Serve requests in an engine whose canary fails; see that nobody notices, and that it finds a fault afterwards."""
    rng = random.Random(number)
    settings = {
        "KV_CANARY_SWEEP_EVERY": rng.choice(["0", "3"]),
        "KV_CANARY_CHECK_INPUTS": rng.choice(["0", "1"]),
        "KV_CANARY_RECORDS": rng.choice(["one", "head_and_tail"]),
        "KV_CANARY_VERIFY_BYTES_AT_TAIL": rng.choice(["0", "1"]),
        "KV_CANARY_EVENT_LOG": str(folder / f"{number}.jsonl"),
        "KV_CANARY_BUNDLES": str(folder / "bundles"),
    }
    scheduler = build(model, "log", settings, **args)
    share = rng.choice([0.003, 0.02, 0.08])
    faults = Faults(np.random.default_rng(number), rate=share / 2)
    session.current().manager.accounts.join(SourObserver(faults))
    handler = SourHandler(faults)
    logging.getLogger("kv_canary").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch, faults.installed():
            failed = fail_at_random(patch, rng, share)
            for wave in range(rng.randrange(2, 5)):
                reqs = serve(scheduler, seed=1000 * number + wave)
                check_greedy(model, reqs)
                happened["requests"] += len(reqs)
        faults.rate = 0.0
        check_greedy(model, serve(scheduler, seed=1000 * number + 99))
    finally:
        logging.getLogger("kv_canary").removeHandler(handler)
    found = state()
    happened["injected"] += sum(failed.values()) + sum(faults.injected.values())
    happened["lives"] += 1
    for name in ("steps", "skipped", "unverified", "violations"):
        happened[name] += found[name]
    strange = [
        k for k in found["failures"] if not k.endswith(("InjectedError", "OwnFailureError", "OSError", "others"))
    ]
    reports = [r.sentence for r in session.current().manager.reports]
    assert (found["off"], found["violations"], strange, reports) == ("", 0, [], [])
    if model.endswith("llama") and not args:
        plant(scheduler, [])
        happened["planted faults found"] += 1


def test_an_engine_whose_canary_fails_at_random_serves_as_if_there_were_none(llama, mellum, tmp_path, minutes, request):
    models = {"llama": llama, "mellum": mellum}
    happened: Counter[str] = Counter()
    began, number = time.monotonic(), int(request.config.getoption("--chaos-seed"))
    while not happened["lives"] or time.monotonic() - began < 60 * minutes:
        model, args = SHAPES[number % len(SHAPES)]
        life(models[model], number, args, tmp_path, happened)
        number += 1
        took = f"{(time.monotonic() - began) / 60:.1f} minutes"
        print(json.dumps({"up to seed": number - 1, "after": took, **happened}), flush=True)
    if path := request.config.getoption("--chaos-result"):
        what = "faults injected into the canary itself in SGLang's own engine, in log mode"
        measured = {
            **facts("cpu", kind="sglang_chaos"),
            "what": what,
            "up to seed": number - 1,
            "after": took,
            **happened,
        }
        Path(path).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    assert happened["violations"] == 0
