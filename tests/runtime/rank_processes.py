"""One rank of several, as a program of its own: it pauses, comes late or is killed, and says what became of it.

A program, because a process that is spawned imports what it runs, and tests cannot be imported by name.

python tests/runtime/rank_processes.py WORLD RANK PORT FOLDER: be one of the processes that go through one of WORLDS
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import kv_canary as kc
from kv_canary.difftest.stress.rank_engine import Place, RankEngine
from kv_canary.ranks import meeting

# Seconds that ranks wait for each other where one of them pauses, so that a busy machine parts them nowhere else; for
# which it pauses; and after which whatever they wait for counts as never to come.
TIMEOUT, PAUSE, LIMIT = 1.5, 3.0, 60.0


class Life:
    """What a rank goes through.

    Args:
        place: where it runs.
        lines: what it logs, as it comes.
    """

    def __init__(self, place: Place, lines: list[str]) -> None:
        self.place, self.lines, self.rank = place, lines, place.rank

    def engine(self, **config: Any) -> RankEngine:
        """Return an engine that has one request cached, as all ranks have it."""
        engine = RankEngine(self.place, **config)
        engine.add("a", 480)
        self.start(engine)
        return engine

    def start(self, engine: RankEngine) -> None:
        """Begin the request, in new slots."""
        engine.requests["a"].cached = 0
        engine.extend((engine.requests["a"], 32))

    def run(self, engine: RankEngine, steps: int) -> None:
        """Run so many steps, together with the other ranks, as tensor parallel ones do."""
        a = engine.requests["a"]
        for _ in range(steps):
            if a.cached == len(a.tokens):
                self.start(engine)
            engine.extend((a, 1))
            # As a model takes its time.
            time.sleep(0.02)

    def until(self, engine: RankEngine, holds: Callable[[], bool]) -> bool:
        """Run steps together with the other ranks until it holds for all of them; return whether it came to that."""
        began = time.monotonic()
        while True:
            # All ranks leave after the same step.
            words = torch.tensor([int(not holds()), int(time.monotonic() - began > LIMIT)])
            dist.all_reduce(words, dist.ReduceOp.MAX, group=self.place.model)
            if not words[0] or words[1]:
                return not words[0]
            self.run(engine, 1)

    def meet(self, engine: RankEngine, times: int = 1) -> bool:
        """Run steps until the ranks have met so often, and have compared 5 digests since; return whether they have."""
        watch = watch_of(engine)
        compared: list[int] = []

        def compares() -> bool:
            if watch.met == times and not compared:
                compared.append(watch.compared)
            return bool(compared) and watch.compared >= compared[0] + 5

        return self.until(engine, compares)

    def waits(self, seconds: float) -> None:
        """Let the canary's exchanges wait so long for the other ranks from now on."""
        self.place.ranks.timeout = seconds
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), self.place.ranks.group)

    def part(self, engine: RankEngine, *, who: int, how: Callable[[], None]) -> None:
        """Run some steps, and then one for which one rank comes later than the others wait."""
        self.run(engine, 10)
        self.waits(TIMEOUT)
        if self.rank == who:
            how()
        # The others have begun it, and wait in the model.
        self.run(engine, 1)
        watch = watch_of(engine)
        # What was begun before that does not wait for long either, wherever a rank got to.
        self.until(engine, lambda: watch.alone or watch._meeting._thread is not None)
        self.waits(LIMIT)

    @property
    def last(self) -> int:
        """The last rank."""
        return self.place.ranks.size - 1

    def pause(self, engine: RankEngine, *, who: int, how: Callable[[], None], times: int = 1) -> bool:
        """Run some steps, let one rank pause, and return whether the ranks meet again."""
        self.part(engine, who=who, how=how)
        return self.meet(engine, times)

    def damage(self, engine: RankEngine, *, rank: int) -> None:
        """Let a bit be flipped on one rank, in one step, and run some more."""
        for _ in range(2):
            if self.rank == rank:
                engine.damage(engine.requests["a"], 20)
            self.run(engine, 1)
        self.run(engine, 12)

    def facts(self, engine: RankEngine, **more: Any) -> dict[str, Any]:
        """Return what this rank has to say."""
        watch = watch_of(engine)
        said: dict[str, Any] = engine.facts()
        told = {
            "parted": "goes on alone",
            "together": "are together again",
            "for good": "stays alone for good",
        }
        said |= {name: [line for line in self.lines if text in line] for name, text in told.items()}
        said |= {"met": watch.met, "alone": watch.alone, "meetings": watch._meeting._number}
        return said | {"sought": watch._meeting._thread is not None, "worst": max(engine.seconds)} | more


def watch_of(engine: RankEngine) -> kc.ranks.RankWatch:
    watch = engine.manager.ranks
    if watch is None:
        raise RuntimeError("the engine has no ranks")
    return watch


def sleep() -> None:
    """Pause the thread of the steps, as an update of weights does."""
    time.sleep(PAUSE)


def stop() -> None:
    """Pause the whole process."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def healthy(life: Life, *, mode: str) -> dict[str, Any]:
    """Nothing happens."""
    engine = life.engine(mode=mode, digest_every=1)
    life.run(engine, 60)
    return life.facts(engine)


def pauses(life: Life, *, mode: str, how: Callable[[], None], first: bool = False) -> dict[str, Any]:
    """A rank pauses; afterwards a bit flips on rank 0, and then the last one is given another prompt."""
    engine = life.engine(mode=mode, digest_every=1)
    met = life.pause(engine, who=0 if first else life.last, how=how)
    before = life.facts(engine)
    life.damage(engine, rank=0)
    if life.rank == life.last:
        engine.requests["a"].tokens[3] += 1
    life.start(engine)
    life.run(engine, 12)
    return life.facts(engine, all_met=met, before=before)


def pauses_again(life: Life) -> dict[str, Any]:
    """The last rank pauses several times, and then a bit flips there."""
    engine = life.engine(mode="raise", digest_every=2)
    met = [life.pause(engine, who=life.last, how=sleep, times=times) for times in (1, 2, 3)]
    life.damage(engine, rank=life.last)
    return life.facts(engine, all_met=all(met))


def alone_meanwhile(life: Life) -> dict[str, Any]:
    """In raise mode, the last rank pauses, and the first one finds something as it is alone."""
    engine = life.engine(mode="raise", digest_every=1)
    watch = watch_of(engine)
    # They do not meet before the bit has flipped.
    watch._meeting._in_vain = 4
    life.part(engine, who=life.last, how=sleep)
    life.run(engine, 1)
    was_alone = watch.alone
    if life.rank == 0:
        engine.damage(engine.requests["a"], 20)
    life.run(engine, 1)
    if life.rank == 0:
        engine.damage(engine.requests["a"], 20)
    return life.facts(engine, was_alone=was_alone, all_met=life.meet(engine))


def other_numbers(life: Life, *, mode: str) -> dict[str, Any]:
    """The first rank runs some steps alone, so that the same steps have other numbers on it from then on."""
    engine = life.engine(mode=mode, digest_every=1)
    watch = watch_of(engine)
    life.run(engine, 10)
    if mode == "raise":
        life.waits(TIMEOUT)
    if life.rank == 0:
        engine.together = False
        b = engine.add("b", 64)
        for _ in range(12):
            engine.extend((b, 1))
        engine.together = True
    if not watch.alone:
        watch._part("they are to meet again")
    if mode == "log":
        return life.facts(engine, all_met=life.meet(engine))
    # So that it does not take long until they have tried it as often as they may.
    meeting._FIRST_DELAY, meeting._MARGIN_SECONDS = 0.1, 0.0
    over = life.until(engine, lambda: watch._meeting._over is not None)
    meeting._FIRST_DELAY, meeting._MARGIN_SECONDS = 0.5, 0.5
    return life.facts(engine, over=over)


def other_steps(life: Life) -> dict[str, Any]:
    """Rank 1 makes an exchange more than the other, so that they are found to be before different steps."""
    engine = life.engine(digest_every=1)
    life.run(engine, 10)
    if life.rank == 1:
        engine.manager.flush(all_ranks=True)
    life.run(engine, 1)
    met = life.meet(engine)
    life.damage(engine, rank=1)
    return life.facts(engine, all_met=met)


def killed(life: Life, *, mode: str) -> dict[str, Any]:
    """The last rank is killed, and the others go on, long enough to look for it many times."""
    engine = life.engine(mode=mode, digest_every=1)
    life.run(engine, 10)
    engine.together = False
    if life.rank == life.last:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() - began < 4:
        life.run(engine, 1)
    began = time.monotonic()
    engine.manager.flush()
    engine.manager.flush(all_ranks=True)
    return life.facts(engine, flush=time.monotonic() - began)


def server_killed(life: Life) -> dict[str, Any]:
    """The first rank is killed, and with it the store through which all groups were made."""
    engine = life.engine(digest_every=1)
    life.run(engine, 10)
    engine.together = False
    if life.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    while time.monotonic() - began < 4:
        life.run(engine, 1)
    return life.facts(engine)


def late(life: Life, *, every: int) -> dict[str, Any]:
    """The last rank makes its manager late, with a `digest_every` that may be another."""
    last = life.rank == life.last
    if last:
        sleep()
    engine = RankEngine(life.place, digest_every=every if last else 1)
    engine.add("a", 480)
    life.start(engine)
    life.waits(LIMIT)
    if every == 1:
        return life.facts(engine, all_met=life.meet(engine))
    refused = life.until(engine, lambda: any("stays alone for good" in line for line in life.lines))
    return life.facts(engine, refused=refused)


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What some processes go through.

    Args:
        run: what each of them does.
        members: the processes, by number.
        own_group: whether the canary is given a group that the engine has made.
        timeout: seconds that they wait for each other.
    """

    run: Callable[[Life], dict[str, Any]]
    members: Sequence[int] = (0, 1)
    own_group: bool = False
    timeout: float = LIMIT


LIVES = {
    "healthy": Lived(run=lambda life: healthy(life, mode="log")),
    "healthy, raise mode": Lived(run=lambda life: healthy(life, mode="raise"), members=(0, 1, 2)),
    "sleeps": Lived(run=lambda life: pauses(life, mode="log", how=sleep)),
    "sleeps, raise mode": Lived(run=lambda life: pauses(life, mode="raise", how=sleep)),
    "first one stops": Lived(run=lambda life: pauses(life, mode="log", how=stop, first=True)),
    "one of three": Lived(run=lambda life: pauses(life, mode="log", how=sleep), members=(0, 1, 2)),
    "one of three, raise mode": Lived(run=lambda life: pauses(life, mode="raise", how=stop), members=(0, 1, 2)),
    "a group of the engine's": Lived(run=lambda life: pauses(life, mode="log", how=sleep), own_group=True),
    "again": Lived(run=pauses_again),
    "found alone": Lived(run=alone_meanwhile),
    "other numbers": Lived(run=lambda life: other_numbers(life, mode="log")),
    "other numbers, raise mode": Lived(run=lambda life: other_numbers(life, mode="raise")),
    "other steps": Lived(run=other_steps),
    "late": Lived(run=lambda life: late(life, every=1), timeout=TIMEOUT),
    "late, configured differently": Lived(run=lambda life: late(life, every=2), timeout=TIMEOUT),
    "killed": Lived(run=lambda life: killed(life, mode="log"), members=(0, 1, 3)),
    "killed, raise mode": Lived(run=lambda life: killed(life, mode="raise"), members=(0, 1, 2)),
    "server killed": Lived(run=server_killed),
}
# What the same processes go through, one after the other. Lives in which one of them is killed come last.
_KILLED = ("killed", "killed, raise mode", "server killed")
_LONG = ("again", "found alone", "other numbers, raise mode")
_OF_THREE = ("healthy, raise mode", "one of three", "one of three, raise mode")
WORLDS: list[Sequence[str]] = [
    [name for name in LIVES if name not in (*_KILLED, *_LONG, *_OF_THREE)],
    _LONG,
    (*_OF_THREE, *_KILLED),
]


def size(world: int) -> int:
    """Return how many processes a world has."""
    return 1 + max(max(LIVES[name].members) for name in WORLDS[world])


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(world: int, rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    logger = logging.getLogger("kv_canary")
    logger.propagate = False
    limit = timedelta(seconds=10 * LIMIT)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size(world), timeout=limit)
    # Groups are made by all processes together, so before any of them can be lost.
    groups: dict[str, tuple[kc.RankGroup | None, Any]] = {}
    for name in WORLDS[world]:
        lived = LIVES[name]
        members = list(lived.members)
        ranks: kc.RankGroup | None
        if lived.own_group:
            group: Any = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=lived.timeout))
            ranks = kc.RankGroup(group, timeout=lived.timeout) if rank in members else None
        else:
            ranks = kc.RankGroup.new(members, timeout=lived.timeout)
        groups[name] = (ranks, dist.new_group(members, backend="gloo", timeout=limit))
    for name, (ranks, model) in groups.items():
        if ranks is None:
            continue
        handler = _Lines()
        logger.handlers = [handler]
        # They come from different lives.
        dist.barrier(model)
        began = time.monotonic()
        try:
            facts = LIVES[name].run(Life(Place(ranks=ranks, model=model, device=torch.device("cpu")), handler.lines))
        except Exception:
            facts = {"error": traceback.format_exc()}
        facts["seconds"] = time.monotonic() - began
        (folder / f"{name}.{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    began = time.monotonic()
    # Some are alone, as at the end of an engine.
    dist.destroy_process_group()
    (folder / f"end.{world}.{rank}.json").write_text(
        json.dumps({"destroyed": time.monotonic() - began, "at": time.time()})
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
