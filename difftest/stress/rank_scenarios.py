"""What ranks go through together, and what they have to say then."""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import kv_canary as kc
from kv_canary.difftest.simulator.requests import Request
from kv_canary.difftest.stress.rank_engine import Facts, Place, RankEngine


def healthy(place: Place, *, steps: int) -> Facts:
    """Requests one of which goes on from another's prefix: the ranks agree all along."""
    engine = RankEngine(place, digest_every=5)
    a = engine.add("a", 400)
    engine.extend((a, 32))
    b = engine.add("b", begins_as(a, 32, 400))
    engine.load(b, a, 32)
    for _ in range(steps - 1):
        engine.extend((a, 1), (b, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def costs(place: Place) -> Facts:
    """Measure what exchanges add to the canary's time on the host: the same steps without any, and with one in each."""
    found: dict[str, float] = {}
    configs: dict[str, dict[str, Any]] = {
        "alone": {},
        "digests of every step": {"digest_every": 1},
        "raise mode": {"mode": "raise"},
        "raise mode, digests of every step": {"mode": "raise", "digest_every": 1},
    }
    for ranks, (name, config) in zip([place.ranks, *place.spare], configs.items(), strict=True):
        engine = RankEngine(dataclasses.replace(place, ranks=ranks), **config)
        a, b = engine.add("a", 400), engine.add("b", 400)
        engine.extend((a, 32), (b, 32))
        for _ in range(30):
            engine.extend((a, 1), (b, 1))
        found[name] = round(statistics.median(engine.seconds[-20:]) * 1e6)
    return {"host_us": found}


def not_loaded(place: Place) -> Facts:
    """A prefix is loaded back from elsewhere on rank 0 only."""
    return _loaded(place, arrives=place.rank == 0)


def other_kv(place: Place) -> Facts:
    """A prefix is loaded back, and rank 1 gets another request's."""
    return _loaded(place, source="b" if place.rank == 1 else "a")


def begins_as(request: Request, shared: int, length: int) -> list[int]:
    """Return so many tokens, the first `shared` of which are another request's."""
    return [*request.tokens[:shared], *range(50_000, 50_000 + length - shared)]


def _loaded(place: Place, *, source: str = "a", arrives: bool = True) -> Facts:
    engine = RankEngine(place, digest_every=1)
    a, b = engine.add("a", 64), engine.add("b", 64)
    engine.extend((a, 32), (b, 32))
    c = engine.add("c", begins_as(a, 32, 64))
    engine.load(c, engine.requests[source], 32, arrives=arrives)
    for _ in range(8):
        engine.extend((c, 1), (b, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def prefix_len(place: Place) -> Facts:
    """A prefix hit is shorter on rank 1, which computes the rest anew."""
    engine = RankEngine(place, digest_every=1)
    a, b = engine.add("a", 64), engine.add("b", 64)
    engine.extend((a, 32), (b, 32))
    c = engine.add("c", begins_as(a, 32, 64))
    hit = 16 if place.rank == 1 else 32
    engine.load(c, a, hit)
    engine.extend((c, 33 - hit), (b, 1))
    for _ in range(8):
        engine.extend((c, 1), (b, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def tokens(place: Place) -> Facts:
    """Rank 1 was given another prompt for a request of the same name."""
    engine = RankEngine(place, digest_every=2)
    a, b = engine.add("a", 64), engine.add("b", 64)
    a.tokens[3] += place.rank == 1
    engine.extend((a, 32), (b, 32))
    for _ in range(8):
        engine.extend((a, 1), (b, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def requests(place: Place) -> Facts:
    """Rank 1 runs a step with a request less."""
    engine = RankEngine(place, digest_every=1)
    a, b = engine.add("a", 64), engine.add("b", 64)
    engine.extend((a, 32), (b, 32))
    if place.rank == 1:
        engine.extend((a, 1))
    else:
        engine.extend((a, 1), (b, 1))
    for _ in range(8):
        engine.extend((a, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def damage_logged(place: Place) -> Facts:
    """In log mode, a byte flips on rank 1: the other learns that it has violations."""
    engine = RankEngine(place, digest_every=1)
    a = engine.add("a", 64)
    engine.extend((a, 32))
    if place.rank == 1:
        engine.damage(a, 20)
    engine.extend((a, 1))
    if place.rank == 1:
        engine.damage(a, 20)
    for _ in range(8):
        engine.extend((a, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def damage_raised(place: Place) -> Facts:
    """In raise mode, a byte flips on rank 1: both raise before the same step, and go on together afterwards."""
    engine = RankEngine(place, mode="raise", digest_every=place.ranks.size)
    a = engine.add("a", 64)
    engine.extend((a, 32))
    for step in range(20):
        if place.rank == 1 and step in (5, 6):
            engine.damage(a, 20)
        engine.extend((a, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def difference_raised(place: Place) -> Facts:
    """In raise mode, a prefix is loaded on rank 0 only: both raise, for what rank 1 finds and for the difference."""
    engine = RankEngine(place, mode="raise", digest_every=1)
    a = engine.add("a", 64)
    engine.extend((a, 32))
    c = engine.add("c", begins_as(a, 32, 64))
    engine.load(c, a, 32, arrives=place.rank == 0)
    engine.extend((c, 1))
    for _ in range(10):
        engine.extend((a, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts()


def flush_alone(place: Place) -> Facts:
    """In raise mode, rank 1 finds something and flushes alone: nothing is raised there, but soon after by both."""
    engine = RankEngine(place, mode="raise", digest_every=2)
    a = engine.add("a", 64)
    engine.extend((a, 32))
    if place.rank == 1:
        engine.damage(a, 20)
    engine.extend((a, 1))
    if place.rank == 1:
        engine.damage(a, 20)
        engine.manager.flush()
    alone = len(engine.raised)
    for _ in range(4):
        engine.extend((a, 1))
    # And what the last step finds is raised by all where all flush.
    if place.rank == 1:
        engine.damage(a, 20)
    engine.extend((a, 1))
    try:
        engine.manager.flush(all_ranks=True)
    except kc.RankViolationError as error:
        engine.raised.append(error)
    return engine.facts() | {"raised_alone": alone}


def failing(place: Place, *, mode: str, retry: bool) -> Facts:
    """A forward fails on rank 1 only; all go on with other requests, or rank 1 tries again and is a step ahead."""
    engine = RankEngine(place, mode=mode, digest_every=2)
    a, b = engine.add("a", 200), engine.add("b", 200)
    engine.extend((a, 32), (b, 32))
    for _ in range(5):
        engine.extend((a, 1), (b, 1))
    fails = place.rank == 1
    engine.together = retry
    if fails:
        engine.extend((a, 1), fails=True)
    if retry or not fails:
        engine.extend((a, 1))
    engine.together = True
    rest = a if retry else b
    for _ in range(30):
        engine.extend((rest, 1))
    engine.manager.flush()
    return engine.facts()


def silent(place: Place, *, mode: str) -> Facts:
    """The last rank stops without a word, and comes back once the others have given it up."""
    return _leaving(place, mode=mode, leave=lambda: time.sleep(1.5 * place.ranks.timeout))


def killed(place: Place, *, mode: str) -> Facts:
    """The last rank is killed."""
    return _leaving(place, mode=mode, leave=lambda: os.kill(os.getpid(), signal.SIGKILL))


def _leaving(place: Place, *, mode: str, leave: Callable[[], None]) -> Facts:
    engine = RankEngine(place, mode=mode, digest_every=2)
    a = engine.add("a", 400)
    engine.extend((a, 32))
    for _ in range(10):
        engine.extend((a, 1))
    engine.together = False
    last = place.ranks.size - 1
    if place.rank == last:
        leave()
    began = time.monotonic()
    if place.rank == 0:
        # What is found alone is logged, and raised by nobody.
        engine.damage(a, 20)
    timeout = place.ranks.timeout
    while time.monotonic() - began < 2 * timeout and engine.manager.summary().watching != "partial":
        engine.extend((a, 1))
        time.sleep(timeout / 50)
    for _ in range(3):
        engine.extend((a, 1))
    engine.manager.flush(all_ranks=True)
    return engine.facts() | {"seconds": round(time.monotonic() - began, 1)}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What ranks go through together, and what they have to say then.

    Args:
        run: what one rank does.
        judge: says of what the ranks said, in their order, whether that is right; of a killed rank there is nothing.
        size: how many ranks.
        managers: how many canaries each of them makes, one after the other.
        kills: whether the last rank dies.
    """

    run: Callable[[Place], Facts]
    judge: Callable[[list[Facts]], bool]
    size: int = 2
    managers: int = 1
    kills: bool = False


def _told(results: Sequence[Facts], *differences: tuple[str | None, str, list[int]]) -> bool:
    """Return whether every rank told of exactly these differences: request, what, which ranks."""
    expected = [[name, [what], ranks, ["full", "window"]] for name, what, ranks in differences]
    return all(r["differences"] == expected and r["watching"] == "complete" and r["compared"] for r in results)


def _clean(results: Sequence[Facts]) -> bool:
    return _told(results) and not any(r["reasons"] or r["raised"] for r in results)


def _raised(results: Sequence[Facts], *verdicts: list[int]) -> bool:
    """Return whether all ranks raised before the same steps, and were told of the same findings."""
    same = all(r["raised_before"] == results[0]["raised_before"] for r in results)
    told = all([v for error in r["verdicts"] for v in error] == list(verdicts) for r in results)
    return same and told and bool(results[0]["raised_before"])


def _named(results: Sequence[Facts], difference: str) -> bool:
    """Return whether what all ranks raised last was this difference."""
    return all(difference in r["raised"][-1] for r in results)


def _degraded(results: Sequence[Facts]) -> bool:
    first = results[0]
    # The damage, which the scrub comes to as well where seals are on.
    found = "K" in first["reasons"] and {*first["reasons"]} <= {"K", "SEAL_K"}
    return first["watching"] == "partial" and found and not any(r["raised"] for r in results)


SCENARIOS: Mapping[str, Scenario] = {
    "healthy": Scenario(
        run=partial(healthy, steps=200), judge=lambda r: _clean(r) and all(f["compared"] == 40 for f in r)
    ),
    "healthy of three": Scenario(run=partial(healthy, steps=50), judge=_clean, size=3),
    "not loaded": Scenario(
        run=not_loaded,
        judge=lambda r: _told(r, ("c", "NOT_LOADED", [1]), ("c", "VIOLATIONS", [1])) and not r[0]["reasons"],
    ),
    "other KV": Scenario(
        run=other_kv,
        judge=lambda r: _told(r, ("c", "OTHER_KV", [1]), ("c", "VIOLATIONS", [1])) and not r[0]["reasons"],
    ),
    "prefix length": Scenario(run=prefix_len, judge=lambda r: _told(r, ("c", "PREFIX_LEN", [0, 1]))),
    "prefix length of three": Scenario(run=prefix_len, judge=lambda r: _told(r, ("c", "PREFIX_LEN", [1])), size=3),
    "tokens": Scenario(run=tokens, judge=lambda r: _told(r, ("a", "TAIL", [0, 1]))),
    "tokens of three": Scenario(run=tokens, judge=lambda r: _told(r, ("a", "TAIL", [1])), size=3),
    "requests": Scenario(
        run=requests,
        # The rank that does not have it does not know its name either.
        judge=lambda r: _told(r[:1], ("b", "REQUESTS", [0, 1])) and _told(r[1:], (None, "REQUESTS", [0, 1])),
    ),
    "damage, logged": Scenario(run=damage_logged, judge=lambda r: _told(r, ("a", "VIOLATIONS", [1]))),
    "damage, raised": Scenario(run=damage_raised, judge=lambda r: _raised(r, [1, 1])),
    "difference, raised": Scenario(
        run=difference_raised, judge=lambda r: _raised(r, [1, 80]) and _named(r, "NOT_LOADED")
    ),
    "flush alone": Scenario(
        run=flush_alone, judge=lambda r: _raised(r, [1, 1], [1, 1]) and not any(f["raised_alone"] for f in r)
    ),
    "given up": Scenario(run=partial(failing, mode="log", retry=False), judge=_clean),
    "retried": Scenario(run=partial(failing, mode="log", retry=True), judge=_clean),
    "given up, raise mode": Scenario(run=partial(failing, mode="raise", retry=False), judge=_clean),
    "retried, raise mode": Scenario(run=partial(failing, mode="raise", retry=True), judge=_clean),
    "silent": Scenario(run=partial(silent, mode="log"), judge=_degraded),
    "silent, raise mode": Scenario(run=partial(silent, mode="raise"), judge=_degraded),
    "costs": Scenario(run=costs, judge=lambda r: all(f["host_us"] for f in r), managers=4),
    "killed": Scenario(run=partial(killed, mode="log"), judge=lambda r: _degraded(r[:-1]), kills=True),
    "killed, raise mode": Scenario(run=partial(killed, mode="raise"), judge=lambda r: _degraded(r[:-1]), kills=True),
}


def judge(name: str, results: Sequence[Facts]) -> bool:
    """Return whether the ranks said what they have to say in this scenario."""
    alive = results[:-1] if SCENARIOS[name].kills else results
    return not any("error" in r or not r for r in alive) and SCENARIOS[name].judge(list(results))
