"""The proof for a GPU, on the CPU, where SGLang has no graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from kv_canary.difftest.stress.sglang import cuda, traffic
from kv_canary.engines.sglang import chosen as tokens
from kv_canary.engines.sglang import session


def test_what_is_waited_for_is_counted_by_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: Any = tokens.Chosen(torch.tensor([5, 6]), None)
    chosen._copied = SimpleNamespace(query=lambda: False, synchronize=lambda: None)

    def forward(_: Any, launch: Callable[[], None], before: int, behind: int) -> None:
        for _ in range(before):
            chosen.of(0, 1)
        launch()
        for _ in range(behind):
            chosen.of(0, 1)

    monkeypatch.setattr(session.Session, "forward", forward)
    monkeypatch.setattr(tokens.Chosen, "wait", tokens.Chosen.wait)
    waits, run = traffic._Waits(), session.Session.forward
    run(None, lambda: None, 1, 2)
    assert (waits.before, waits.behind) == (1, 2)
    # Between two forwards nothing of the next one is launched.
    assert chosen.of(0, 1) == [5, 6]
    assert (waits.before, waits.behind) == (2, 2)
    chosen._copied = SimpleNamespace(query=lambda: True, synchronize=lambda: None)
    run(None, lambda: None, 3, 3)
    assert (waits.before, waits.behind) == (2, 2)


def test_a_wave_ends_though_one_of_its_requests_was_dropped_while_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scheduler:
        """Ends a request every fifth pass, and drops whoever's name begins like the one given, as SGLang does."""

        last_batch: Any = None
        gracefully_exit = False

        def __init__(self) -> None:
            self.requests: list[Any] = []
            self.waiting: list[Any] = []
            self.passes = 0

        def submit(self, name: str, prompt: list[int]) -> Any:
            # The second of a wave has run, and given way.
            output = [7] if name.endswith((" 1", " 01")) else []
            req = SimpleNamespace(rid=name, origin_input_ids=prompt, output_ids=output, ended=False)
            req.finished = lambda: req.ended
            self.requests.append(req)
            self.waiting.append(req)
            return req

        def abort_request(self, asked: Any) -> None:
            self.waiting = [r for r in self.waiting if not r.rid.startswith(asked.rid)]

        def turn(self) -> None:
            self.passes += 1
            others = [r for r in self.waiting if not r.output_ids]
            if self.passes % 5 == 0 and others:
                others[0].ended = True
                self.waiting.remove(others[0])

    scheduler = Scheduler()
    monkeypatch.setattr(traffic, "submit", lambda its, name, prompt, **_: its.submit(name, prompt))
    served = traffic._Traffic(scheduler, waves=3)
    while not scheduler.gracefully_exit and scheduler.passes < 400:
        served.ingest()
        scheduler.turn()
    assert scheduler.gracefully_exit
    assert served.aborted == 3
    assert len(served.requests) == 11 + 14 + 14
    # Those that were asked to go, and nobody beside them.
    assert [r.rid for r in scheduler.requests if not r.ended] == [f"wave {wave} request 01" for wave in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("lengths", ["host", "device"])
def test_a_byte_is_found_in_a_step_with_drafts(tmp_path: Path, lengths: str) -> None:
    written = tmp_path / "proof.json"
    name = f"byte_page1_overlap_graphs-none_drafts-{lengths}"
    assert cuda.main(["--device", "cpu", "--only", name, "--json", str(written), "--out", str(tmp_path)]) == 0
    proof = json.loads(written.read_text())
    assert (proof["ok"], proof["clean"]) == (True, [])
    [row] = proof["faults"]
    assert min(row["drafts"]) > 10
    assert [r["reasons"] for r in row["reports"]] == [["K"]]
