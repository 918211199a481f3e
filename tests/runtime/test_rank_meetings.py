"""Ranks that came apart meet again, in real processes: after pauses of all kinds, and not where one is gone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .rank_processes import LIVES, SIZE, TIMEOUT

PROGRAM = Path(__file__).with_name("rank_processes.py")
# Seconds after which processes count as hung; and within which one that has nothing left to do ends.
LIMIT, END = 540.0, 30.0
# Seconds that a step may take where nothing holds it up, on a busy machine.
BUSY = 20.0

Facts = list[dict[str, Any]]
PAUSES = ["sleeps", "first one stops", "one of three", "a group of the engine's"]
RAISING = ["sleeps, raise mode", "one of three, raise mode"]
KILLED = ["killed", "killed, raise mode"]


class Lives:
    """What became of all processes.

    Args:
        said: what the members of each life said; nothing where one was killed.
        codes: with what each process ended.
        seconds: how long each took to end after the last word.
    """

    def __init__(self, said: dict[str, Facts], codes: list[int], seconds: list[float], ends: Facts) -> None:
        self.said, self.codes, self.seconds, self.ends = said, codes, seconds, ends


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    logs = [(folder / f"{rank}.log").open("w") for rank in range(SIZE)]
    # With -P Python leaves this folder out of its path.
    processes = [
        subprocess.Popen([sys.executable, "-P", PROGRAM, str(rank), port, folder], stderr=logs[rank])
        for rank in range(SIZE)
    ]
    ended: dict[int, float] = {}
    deadline = time.monotonic() + LIMIT
    while len(ended) < SIZE and time.monotonic() < deadline:
        ended |= {r: time.time() for r, p in enumerate(processes) if r not in ended and p.poll() is not None}
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
    for log in logs:
        log.close()
    said = {name: [read(folder / f"{name}.{r}.json") for r in lived.members] for name, lived in LIVES.items()}
    ends = [read(folder / f"end.{rank}.json") for rank in range(SIZE)]
    tails = {r: (folder / f"{r}.log").read_text()[-2000:] for r in range(SIZE)}
    assert len(ended) == SIZE, f"processes {set(range(SIZE)) - set(ended)} hung; {json.dumps(said)}; {tails}"
    seconds = [ended[rank] - end.get("at", ended[rank]) for rank, end in enumerate(ends)]
    return Lives(said, [process.returncode for process in processes], seconds, ends)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.mark.parametrize("name", ["healthy", "healthy, raise mode"])
def test_healthy_ranks_never_part(lives: Lives, name: str) -> None:
    for facts in lives.said[name]:
        assert "error" not in facts, facts["error"]
        assert (facts["met"], facts["alone"], facts["sought"], facts["meetings"]) == (0, False, False, 0)
        assert (facts["parted"], facts["status"], facts["differences"]) == ([], "healthy", [])
        assert facts["compared"] > 50


@pytest.mark.parametrize("name", [*PAUSES, *RAISING])
def test_ranks_meet_again_after_a_pause_and_say_so_once(lives: Lives, name: str) -> None:
    for facts in lives.said[name]:
        assert "error" not in facts, facts["error"]
        assert facts["all_met"], facts
        assert (facts["met"], facts["alone"], facts["status"]) == (1, False, "healthy")
        assert [len(facts[lines]) for lines in ("parted", "together", "for good")] == [1, 1, 0]
        assert "until all ranks have met again" in facts["parted"][0]
        # Nobody found a thing while they were apart, and nothing was made up where they met.
        assert facts["before"]["differences"] == []
        assert facts["before"]["reasons"] == []
        assert facts["before"]["raised"] == []
    # All of them go on together with the same step.
    (step,) = {line.split("from step ")[1].split(" ")[0] for f in lives.said[name] for line in f["together"]}
    assert int(step) > 10


@pytest.mark.parametrize("name", [*PAUSES, *RAISING])
def test_what_differs_after_the_meeting_is_told_by_all_ranks(lives: Lives, name: str) -> None:
    size = len(LIVES[name].members)
    other = list(range(size)) if size == 2 else [size - 1]
    groups = ["full", "window"]
    for rank, facts in enumerate(lives.said[name]):
        assert facts["differences"] == [["a", ["VIOLATIONS"], [0], groups], ["a", ["TAIL"], other, groups]]
        assert facts["reasons"] == ([] if rank else ["K"])


@pytest.mark.parametrize("name", RAISING)
def test_after_the_meeting_all_ranks_raise_together_again(lives: Lives, name: str) -> None:
    first = lives.said[name][0]
    assert len(first["raised_before"]) == 2
    assert first["verdicts"] == [[[0, 1]], []]
    assert "TAIL" in first["raised"][1]
    for facts in lives.said[name]:
        assert (facts["raised_before"], facts["raised"]) == (first["raised_before"], first["raised"])


def test_ranks_meet_again_after_each_of_several_pauses(lives: Lives) -> None:
    first = lives.said["again"][0]
    assert first["verdicts"] == [[[1, 1]]]
    for facts in lives.said["again"]:
        assert facts["all_met"], facts
        assert (facts["met"], len(facts["parted"]), len(facts["together"])) == (3, 3, 3)
        assert (facts["status"], facts["raised_before"]) == ("healthy", first["raised_before"])


def test_what_a_rank_finds_alone_is_logged_and_not_raised_later(lives: Lives) -> None:
    first, second = lives.said["found alone"]
    assert (first["was_alone"], second["was_alone"]) == (True, True)
    assert (first["reasons"], second["reasons"]) == (["K"], [])
    for facts in (first, second):
        assert (facts["all_met"], facts["raised"], facts["status"]) == (True, [], "healthy")


def test_ranks_that_were_before_different_steps_meet_again(lives: Lives) -> None:
    for facts in lives.said["other steps"]:
        assert facts["all_met"], facts
        assert [d[:3] for d in facts["differences"]] == [["a", ["VIOLATIONS"], [1]]]
        assert (facts["status"], facts["met"]) == ("healthy", 1)


def test_ranks_whose_steps_have_other_numbers_are_not_told_to_differ(lives: Lives) -> None:
    for facts in lives.said["other numbers"]:
        assert facts["all_met"], facts
        assert (facts["differences"], facts["status"], facts["met"]) == ([], "healthy", 1)
        assert "steps were between them, so they are compared only where" in facts["together"][0]


def test_ranks_that_would_wait_for_each_other_try_it_a_few_times(lives: Lives) -> None:
    for facts in lives.said["other numbers, raise mode"]:
        assert facts["over"], facts
        assert (facts["met"], facts["status"], facts["differences"]) == (0, "degraded", [])
        assert [len(facts[lines]) for lines in ("parted", "together", "for good")] == [1, 0, 1]
        # Longer than the timeout no step waits; the rest is for a busy machine.
        assert facts["worst"] < TIMEOUT + BUSY


def test_a_rank_whose_manager_comes_late_is_met(lives: Lives) -> None:
    for facts in lives.said["late"]:
        assert facts["all_met"], facts
        assert (facts["status"], facts["differences"], len(facts["together"])) == ("healthy", [], 1)


def test_a_rank_that_comes_late_and_is_configured_differently_is_refused_for_good(lives: Lives) -> None:
    for facts in lives.said["late, configured differently"]:
        assert (facts["refused"], facts["status"], facts["met"]) == (True, "degraded", 0)
        (line,) = facts["for good"]
        assert "digest_every must be the same on all ranks, got 1, 2" in line


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_is_told_of_once_and_holds_nobody_up(lives: Lives, name: str) -> None:
    *survivors, dead = lives.said[name]
    assert dead == {}
    for facts in survivors:
        assert "error" not in facts, facts["error"]
        assert (facts["alone"], facts["met"], facts["status"]) == (True, 0, "degraded")
        assert [len(facts[lines]) for lines in ("parted", "together", "for good")] == [1, 0, 0]
        # They wait at the first meeting, without a try.
        assert facts["meetings"] == 1
        # A death is seen before the timeout.
        assert facts["worst"] < BUSY
        assert facts["flush"] < BUSY
        assert facts["raised"] == []


def test_a_rank_goes_on_alone_where_the_store_died(lives: Lives) -> None:
    dead, survivor = lives.said["server killed"]
    assert dead == {}
    assert "error" not in survivor, survivor["error"]
    assert (survivor["alone"], survivor["met"], len(survivor["parted"])) == (True, 0, 1)
    assert survivor["worst"] < BUSY


def test_processes_end_at_once_though_they_look_for_others(lives: Lives) -> None:
    # The first one, and the last ones of two lives, were killed.
    assert lives.codes == [-signal.SIGKILL, 0, -signal.SIGKILL, -signal.SIGKILL]
    assert lives.ends[1]["destroyed"] < END
    assert lives.seconds[1] < END
