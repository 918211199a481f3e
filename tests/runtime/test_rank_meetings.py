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

from .rank_processes import LIVES, TIMEOUT, WORLDS, size

# Real processes, with real pauses. The same rules, in one process: test_rank_agreement.py, test_rank_watch.py.
pytestmark = pytest.mark.long

PROGRAM = Path(__file__).with_name("rank_processes.py")
# Seconds after which processes count as hung; and within which one that has nothing left to do ends.
LIMIT, END = 540.0, 30.0
# Seconds that a step may take where nothing holds it up, on a busy machine.
BUSY = 20.0

Facts = list[dict[str, Any]]
PAUSES = ["sleeps", "first one stops", "one of three", "a group of the engine's"]
RAISING = ["sleeps, raise mode", "one of three, raise mode"]
KILLED = ["killed", "killed, raise mode"]


Process = tuple[int, int]


class Lives:
    """What became of all processes, each of which is a rank of a world.

    Args:
        said: what the members of each life said; nothing where one was killed.
        codes: with what each process ended.
        seconds: how long each took to end after the last word.
        ends: what each said last.
    """

    def __init__(
        self,
        said: dict[str, Facts],
        codes: dict[Process, int],
        seconds: dict[Process, float],
        ends: dict[Process, dict[str, Any]],
    ) -> None:
        self.said, self.codes, self.seconds, self.ends = said, codes, seconds, ends


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Lives:
    folder = tmp_path_factory.mktemp("ranks")
    logs: dict[Process, Path] = {}
    processes: dict[Process, subprocess.Popen[bytes]] = {}
    for world in range(len(WORLDS)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for rank in range(size(world)):
            logs[world, rank] = folder / f"{world}.{rank}.log"
            with logs[world, rank].open("w") as log:
                # With -P Python leaves this folder out of its path.
                command = [sys.executable, "-P", PROGRAM, str(world), str(rank), port, folder]
                processes[world, rank] = subprocess.Popen(command, stderr=log)
    ended: dict[Process, float] = {}
    deadline = time.monotonic() + LIMIT
    while len(ended) < len(processes) and time.monotonic() < deadline:
        ended |= {k: time.time() for k, p in processes.items() if k not in ended and p.poll() is not None}
        time.sleep(0.05)
    for process in processes.values():
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.wait()
    said = {name: [read(folder / f"{name}.{r}.json") for r in lived.members] for name, lived in LIVES.items()}
    ends = {(world, rank): read(folder / f"end.{world}.{rank}.json") for world, rank in processes}
    tails = {str(k): log.read_text()[-2000:] for k, log in logs.items()}
    assert len(ended) == len(processes), f"{set(processes) - set(ended)} hung; {json.dumps(said)}; {tails}"
    seconds = {k: at - ends[k].get("at", at) for k, at in ended.items()}
    return Lives(said, {k: process.returncode for k, process in processes.items()}, seconds, ends)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@pytest.mark.parametrize("name", ["healthy", "healthy, raise mode"])
def test_healthy_ranks_never_part(lives: Lives, name: str) -> None:
    for facts in lives.said[name]:
        assert "error" not in facts, facts["error"]
        assert (facts["met"], facts["alone"], facts["sought"], facts["meetings"]) == (0, False, False, 0)
        assert (facts["parted"], facts["watching"], facts["differences"]) == ([], "complete", [])
        assert facts["compared"] > 50


@pytest.mark.parametrize("name", [*PAUSES, *RAISING])
def test_ranks_meet_again_after_a_pause_and_say_so_once(lives: Lives, name: str) -> None:
    for facts in lives.said[name]:
        assert "error" not in facts, facts["error"]
        assert facts["all_met"], facts
        assert (facts["met"], facts["alone"], facts["watching"]) == (1, False, "complete")
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
        assert (facts["watching"], facts["raised_before"]) == ("complete", first["raised_before"])


def test_what_a_rank_finds_alone_is_logged_and_not_raised_later(lives: Lives) -> None:
    first, second = lives.said["found alone"]
    assert (first["was_alone"], second["was_alone"]) == (True, True)
    assert (first["reasons"], second["reasons"]) == (["K"], [])
    for facts in (first, second):
        assert (facts["all_met"], facts["raised"], facts["watching"]) == (True, [], "complete")


def test_ranks_that_were_before_different_steps_meet_again(lives: Lives) -> None:
    for facts in lives.said["other steps"]:
        assert facts["all_met"], facts
        assert [d[:3] for d in facts["differences"]] == [["a", ["VIOLATIONS"], [1]]]
        assert (facts["watching"], facts["met"]) == ("complete", 1)


def test_ranks_whose_steps_have_other_numbers_are_not_told_to_differ(lives: Lives) -> None:
    for facts in lives.said["other numbers"]:
        assert facts["all_met"], facts
        assert (facts["differences"], facts["watching"], facts["met"]) == ([], "complete", 1)
        assert "steps were between them, so they are compared only where" in facts["together"][0]


def test_ranks_that_would_wait_for_each_other_try_it_a_few_times(lives: Lives) -> None:
    for facts in lives.said["other numbers, raise mode"]:
        assert facts["over"], facts
        assert (facts["met"], facts["watching"], facts["differences"]) == (0, "partial", [])
        assert [len(facts[lines]) for lines in ("parted", "together", "for good")] == [1, 0, 1]
        # Longer than the timeout no step waits; the rest is for a busy machine.
        assert facts["worst"] < TIMEOUT + BUSY


def test_a_rank_whose_manager_comes_late_is_met(lives: Lives) -> None:
    for facts in lives.said["late"]:
        assert facts["all_met"], facts
        assert (facts["watching"], facts["differences"], len(facts["together"])) == ("complete", [], 1)


def test_a_rank_that_comes_late_and_is_configured_differently_is_refused_for_good(lives: Lives) -> None:
    for facts in lives.said["late, configured differently"]:
        assert (facts["refused"], facts["watching"], facts["met"]) == (True, "partial", 0)
        (line,) = facts["for good"]
        assert "digest_every must be the same on all ranks, got 1, 2" in line


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_is_told_of_once_and_holds_nobody_up(lives: Lives, name: str) -> None:
    *survivors, dead = lives.said[name]
    assert dead == {}
    for facts in survivors:
        assert "error" not in facts, facts["error"]
        assert (facts["alone"], facts["met"], facts["watching"]) == (True, 0, "partial")
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
    # Where processes were killed, the first one was, and the last ones of two lives.
    assert list(lives.codes.values()) == [0, 0, 0, 0, -signal.SIGKILL, 0, -signal.SIGKILL, -signal.SIGKILL]
    for process, code in lives.codes.items():
        if not code:
            assert lives.ends[process]["destroyed"] < END
            assert lives.seconds[process] < END
