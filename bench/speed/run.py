"""A run: each case is built, checked, timed, and checked again; what comes out is JSON-ready."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kv_canary.backends import select_backend
from kv_canary.bench.speed import ceilings, checking, peer
from kv_canary.bench.speed.cases import Case, quick
from kv_canary.bench.speed.checking import CheckFailed
from kv_canary.bench.speed.state import State, build, pool_bytes, random_bytes
from kv_canary.bench.speed.timing import Clock, Launch, Launchable, Time, launchable
from kv_canary.bench.speed.workload import SECTOR, Part, Work, work_of
from kv_canary.commands.facts import facts
from kv_canary.errors import must_be

MOST_MEMORY = 60_000_000_000
MOST_MEMORY_OF_A_CPU = 1 << 30
WARM_UP_S = 1.0
OURS, PEER = "ours", "peer"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a measurement.

    Args:
        device: "cpu" or "cuda".
        backend: whose ops; None: as the runtime chooses.
        peer: name of the peer to run beside, or None.
        graph: whether to time CUDA-graph replays, not launches one by one; a CPU has no graphs.
        rounds: turns of each thing.
        replays: launches in a turn, at most.
        shrink: whether to cut the shapes down for a CPU.
        memory: bytes of K and V of a pool, at most.
        commit: what is measured; None: what git says.
    """

    device: str
    backend: str | None = None
    peer: str | None = None
    graph: bool = True
    rounds: int = 7
    replays: int = 15
    shrink: bool = False
    memory: int = MOST_MEMORY
    commit: str | None = None


class _Counted:
    """A launch that counts how often it is made."""

    def __init__(self, launch: Launch) -> None:
        self._launch, self.times = launch, 0

    def __call__(self) -> None:
        self.times += 1
        self._launch()


@dataclass(frozen=True, kw_only=True, eq=False)
class Bench:
    """The parts of a measurement: the device, the backend whose ops are measured, and the peer."""

    settings: Settings
    clock: Clock
    backend: str
    peer: peer.Peer | None

    @property
    def device(self) -> torch.device:
        return self.clock.device


def prepare(settings: Settings) -> Bench:
    """Return what measures, so that whatever is missing is told before anything is measured.

    Raises:
        ValueError: the device, the backend or the peer cannot be used here.
    """
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(must_be("bench", "--device cuda", "on a machine with a CUDA GPU", "one without"))
    return Bench(
        settings=dataclasses.replace(settings, graph=settings.graph and device.type == "cuda"),
        clock=Clock(device, rounds=settings.rounds, replays=settings.replays),
        backend=select_backend(settings.backend, device),
        peer=peer.Peer(device) if settings.peer is not None else None,
    )


def run(
    cases: Sequence[Case], bench: Bench, *, after_case: Callable[[str, dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """Measure cases and return the result; a case whose check fails is listed there.

    Args:
        after_case: called with the name of each case once it is done, and the result so far.
    """
    settings, device, clock = bench.settings, bench.device, bench.clock
    cases = [quick(c) for c in cases] if settings.shrink else list(cases)
    torch.manual_seed(0)
    with _little_garbage():
        clock.warm_up(WARM_UP_S)
        limits = ceilings.measure(clock, with_kernels=bench.backend == "triton")
        result: dict[str, Any] = {
            **facts(device, commit=settings.commit, kind="peer"),
            "backend": bench.backend,
            "mode": "CUDA graph" if settings.graph else "eager",
            "shapes": "cut down" if settings.shrink else "whole",
            "rounds": settings.rounds,
            "copy_tb_s": _round(limits.copy_bytes_per_ms / 1e9),
            "empty_ms": _round(limits.empty_ms),
            "l2_bytes": _l2_bytes(device),
            "peer": bench.peer.facts() if bench.peer is not None else None,
            "cases": [],
            "skipped": [],
            "failed": [],
        }
        memory = random_bytes(_memory(cases, settings, device), device)
        for case in cases:
            try:
                if pool_bytes(case, 1) > len(memory):
                    result["skipped"].append({"case": case.name, "why": f"a layer takes {pool_bytes(case, 1)} bytes"})
                else:
                    result["cases"].append(_measure(case, memory, bench, limits))
            except CheckFailed as error:
                result["failed"].append({"case": case.name, "why": str(error)})
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if after_case is not None:
                after_case(case.name, result)
    return result


@contextmanager
def _little_garbage() -> Iterator[None]:
    """Every capture collects garbage, which is slow while it has all of torch to look through: leave that out."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _measure(case: Case, memory: torch.Tensor, bench: Bench, limits: ceilings.Ceilings) -> dict[str, Any]:
    settings, clock, backend = bench.settings, bench.clock, bench.backend
    state = build(case, memory, backend=backend)
    work = work_of(state)
    checking.check(state, work)
    beside, why = _beside(bench.peer, state)

    def prepared(launch: Launch) -> Launchable:
        return launchable(launch, device=state.device, graph=settings.graph)

    ours = {part.name: prepared(part) for part in (work.whole, *work.parts)}
    counted = {name: _Counted(thing.launch) for name, thing in ours.items()}
    one_by_one = _Counted(work.whole)
    # Ours and the peer's stand side by side in every round.
    things: dict[str, Launch] = {OURS: counted[work.whole.name]}
    theirs = prepared(beside.launch) if beside is not None else None
    if theirs is not None:
        things[PEER] = theirs.launch
    whole = dict(things)
    things |= {part.name: counted[part.name] for part in work.parts}
    made: list[tuple[str, int]] = []
    with checking.expect_launches(state, work, made):
        times = clock.by_turns(things)
        cold = clock.by_turns(whole, cold=True) if settings.graph else None
        eager_ms, host_ms = clock.from_host(one_by_one)
        made += [(name, c.times) for name, c in counted.items()] + [(work.whole.name, one_by_one.times)]
    if beside is not None:
        peer.expect_silence(state, beside)
    gathered = None
    if work.entries is not None and len(work.entries) and backend == "triton" and not case.whole_rows:
        gathered = ceilings.gather_ms(clock, state, work.entries, memory)

    row: dict[str, Any] = {
        "case": case.name,
        "group": case.group,
        **_shape(state, work),
        **_times("ours", times[OURS]),
        "peer_ms": None,
        "ratio": None,
        "peer_failed": why,
        "launches": ours[work.whole.name].launches,
        **_traffic(work.whole, times[OURS], limits),
        "in_l2": work.whole.traffic.sectors * SECTOR < _l2_bytes(state.device),
        "eager_ms": _round(eager_ms),
        "host_ms": _round(host_ms),
        "gather_ms": _round(gathered),
        "parts": [
            {
                "part": part.name,
                **_times("", times[part.name]),
                "launches": ours[part.name].launches,
                **_traffic(part, times[part.name], limits),
            }
            for part in work.parts
        ],
    }
    if cold is not None:
        row["ours_cold_ms"] = _round(cold[OURS].ms)
    if theirs is not None:
        row |= {**_times("peer", times[PEER]), "peer_launches": theirs.launches}
        row["ratio"] = _round(times[PEER].ms / times[OURS].ms)
        if cold is not None:
            row |= {"peer_cold_ms": _round(cold[PEER].ms), "ratio_cold": _round(cold[PEER].ms / cold[OURS].ms)}
    return row


def _beside(other: peer.Peer | None, state: State) -> tuple[peer.PeerWork | None, str | None]:
    """Return what the peer does for a case, if anything, or why it could not."""
    if other is None:
        return None, None
    try:
        return other.work(state), None
    except CheckFailed:
        raise
    except Exception as error:
        # Code that is not ours: what it cannot do must not end the run.
        return None, f"{type(error).__name__}: {error}"


def _shape(state: State, work: Work) -> dict[str, Any]:
    case = state.case
    return {
        "does": case.does,
        "requests": len(case.requests),
        "cached_tokens": case.cached,
        "new_tokens": case.new,
        "entries": work.whole.entries,
        "page": case.page,
        "window": case.window,
        "stride": case.stride,
        "row_bytes": case.row_bytes,
        "read_bytes": case.read_bytes,
        "layers": state.layers,
        "pool_slots": state.num_slots,
    }


def _times(whose: str, time: Time) -> dict[str, float | None]:
    prefix = f"{whose}_" if whose else ""
    return {f"{prefix}{name}": _round(value) for name, value in dataclasses.asdict(time).items()}


def _traffic(part: Part, time: Time, limits: ceilings.Ceilings) -> dict[str, Any]:
    """Bytes by definition, and by sectors; the shares of the copy bandwidth at which either was moved."""
    sectors = part.traffic.sectors * SECTOR
    return {
        "necessary_bytes": part.traffic.necessary,
        "sector_bytes": sectors,
        "share_necessary": _round(limits.share(part.traffic.necessary, time.ms)),
        "share_sectors": _round(limits.share(sectors, time.ms)),
    }


def _memory(cases: Sequence[Case], settings: Settings, device: torch.device) -> int:
    """Bytes for the K and V of the largest pool, within the limits."""
    wanted = max((pool_bytes(c, c.most_layers) for c in cases), default=0)
    if device.type != "cuda":
        return min(wanted, settings.memory, MOST_MEMORY_OF_A_CPU)
    free, _ = torch.cuda.mem_get_info(device)
    # The reference, which everything is held to, needs room of its own.
    return min(wanted, settings.memory, MOST_MEMORY, free * 6 // 10)


def _l2_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def _round(value: float | None) -> float | None:
    """Four significant digits: more were not measured."""
    return None if value is None else float(f"{value:.4g}")
