"""Does corruption between prefill and decode come to light? Two processes, real messages, one fault at a time.

Prefill runs chunked forwards and sends every buffer's pages in list order; decode lands them and goes on. On a CPU the
messages go through gloo, with `--device cuda` through NCCL, from one GPU to another. Every run that should be silent
must be, and every fault must be found; the figures go to the JSON.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from kv_canary.commands.facts import facts
from kv_canary.difftest.options import commit_option, device_option, json_option
from kv_canary.difftest.simulator.transfer import FULL, PAGE, READ_BYTES, SWA, Copy, PlacedRequest, TransferEngine
from kv_canary.difftest.stress.transfer_faults import (
    BLAMED,
    FAULTS,
    SILENT,
    damage_before,
    damage_on_the_way,
    in_the_old_layout,
    overwrite,
)
from kv_canary.transfer import Landing, compare_geometry, geometry_word, land

PREFILL, DECODE = range(2)
SIDES = ("prefill", "decode")
CHUNK = 7
# A message that does not come within this many seconds never will.
PATIENCE = 120

# (name, text, length) of the requests that are prefilled together; the same text is the same prompt, as far as it goes.
Wave = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of both sides, from empty pools.

    Args:
        fault: what happens to the request `target`, one of `FAULTS`; None: nothing.
        pool: in which pool.
        other_geometry: whether the decode side holds half the bytes of every token, as under tensor parallelism.
        waves: the traffic.
        new_tokens: what each request generates on the decode side.
        rest: decode forwards after each wave.
    """

    fault: str | None = None
    pool: str = FULL
    other_geometry: bool = False
    waves: tuple[Wave, ...]
    new_tokens: int
    rest: int

    @property
    def name(self) -> str:
        words = ["healthy"] if self.fault is None else [self.fault, self.pool]
        return " ".join(words + ["other geometry"] * self.other_geometry)


# Before the wave that counts, one whose pages are used again by then. `ahead` decodes while `target` is on its way.
_FAULTY: tuple[Wave, ...] = (
    (("warm", 1, 28),),
    (("ahead", 4, 14), ("target", 5, 18), ("other", 6, 18), ("behind", 7, 8)),
)
# Lengths around multiples of the page; then others over their pages; then the first texts again.
_FIRST: Wave = tuple((f"first {n}", n, n) for n in (3, 4, 5, 7, 8, 9))
_SECOND: Wave = tuple((f"second {n}", 100 + n, n) for n in (11, 12, 13, 15, 16, 17, 33))
_AGAIN: Wave = tuple((f"again {n}", n, n) for n in (3, 4, 5, 7, 8, 9))
_LONGER: Wave = tuple((f"longer {n}", n % 10, n) for n in (23, 24, 25))


def _faulty(fault: str, pool: str, *, other_geometry: bool = False) -> Run:
    """Return the run of a fault; the wave before it is over by then, and the target reaches another page."""
    new = PAGE - 1
    return Run(fault=fault, pool=pool, waves=_FAULTY, new_tokens=new, rest=new, other_geometry=other_geometry)


# A changed byte is not seen where fingerprints are taken on arrival; what is lost is.
RUNS = (
    # More than two pages are decoded, and the next wave comes while some of the last still do.
    Run(waves=(_FIRST, _SECOND, _AGAIN, _LONGER), new_tokens=2 * PAGE + 2, rest=4),
    Run(waves=(_FIRST, _SECOND), new_tokens=2 * PAGE + 2, rest=4, other_geometry=True),
    *(_faulty(fault, pool) for fault in FAULTS for pool in (FULL, SWA)),
    *(
        _faulty(fault, pool, other_geometry=True)
        for fault, pool in (("a K byte changed", FULL), ("a page lost", FULL), ("the end cut off", SWA))
    ),
)


def must_be_silent(run: Run) -> bool:
    """Return whether nothing is to be reported in a run."""
    return run.fault is None or (run.other_geometry and run.fault in SILENT)


def is_as_it_should_be(run: Run, result: dict[str, Any]) -> bool:
    """Return whether a run's fault came to light: on the decode side, in its pool, and for whom it hit, alone."""
    if any(result[side]["summary"]["watching"] != "complete" for side in SIDES) or result["prefill"]["reports"]:
        return False
    blamed = {(r["request"], r["tag"].split("_")[1]) for r in result["decode"]["reports"]}
    if must_be_silent(run):
        return not blamed
    return blamed == {(name, run.pool.upper()) for name in BLAMED.get(run.fault or "", {"target"})}


def measure(runs: Sequence[Run], *, device: str = "cpu", backend: str | None = None, timeout: float = 600) -> Any:
    """Return, per run, what each side found, as JSON-ready values.

    Args:
        runs: what to run, in turn.
        device: "cpu", or "cuda" for two GPUs.
        backend: of the canary's ops; None: Triton on GPUs, else the reference.
        timeout: seconds that all of it may take.

    Raises:
        RuntimeError: a side failed or did not end in time; neither runs on.
    """
    chosen = backend or ("triton" if device == "cuda" else "reference")
    with tempfile.TemporaryDirectory() as folder:
        pair(_side, folder, tuple(runs), device, chosen, timeout=timeout)
        sides = [json.loads((Path(folder) / f"{side}.json").read_text()) for side in SIDES]
    return [{"run": run.name, **dict(zip(SIDES, found, strict=True))} for run, *found in zip(runs, *sides, strict=True)]


def pair(target: Callable[..., None], *arguments: Any, timeout: float) -> None:
    """Run `target(rank, *arguments)` in two processes, and leave none behind.

    Raises:
        RuntimeError: one of them failed, in which case the other was ended, or they took too long.
    """
    end = time.monotonic() + timeout
    context = spawn(target, args=arguments, nprocs=2, join=False)
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                raise RuntimeError(f"kv-canary: bench pd: both processes must end in {timeout} s, got one running")
    except ProcessException as error:
        raise RuntimeError(f"kv-canary: bench pd: a process must end well, got {error}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _side(rank: int, folder: str, runs: Sequence[Run], device: str, backend: str) -> None:
    """Be one of the two processes."""
    torch.set_num_threads(1)
    # What is found is in the JSON.
    logging.getLogger("kv_canary").setLevel(logging.CRITICAL)
    where = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    dist.init_process_group(
        # Control messages are objects and go through gloo in any case.
        "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=PATIENCE),
    )
    found = []
    for run in runs:
        # Owners are counted apart, so that a stray record is not taken for a request of this side.
        engine = TransferEngine(
            device=where,
            backend=backend,
            seed=rank,
            first_owner=rank << 20,
            token_bytes=READ_BYTES if run.other_geometry and rank == DECODE else 2 * READ_BYTES,
        )
        more = (_prefill if rank == PREFILL else _decode)(engine, run)
        engine.manager.flush()
        found.append({**_findings(engine), **more})
    (Path(folder) / f"{SIDES[rank]}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _prefill(engine: TransferEngine, run: Run) -> dict[str, Any]:
    """Prefill every wave in chunks, then send each of its requests and free it."""
    slots = {}
    for wave in run.waves:
        requests = [engine.arrive(name, _text(text)[:length]) for name, text, length in wave]
        lengths = {r: len(r.tokens) for r in requests}
        while work := [(r, min(CHUNK, lengths[r] - r.cached)) for r in requests if r.cached < lengths[r]]:
            engine.extend(*work)
        for request, (_, text, length) in zip(requests, wave, strict=True):
            request.tokens.append(_text(text)[length])
        words = {name: geometry_word(pool) for name, pool in engine.pools.items()}
        _tell((words, [(r.name, r.tokens, r.cached) for r in requests]))
        destinations, token_bytes = _hear()
        messages = [engine.copies(r, d) for r, d in zip(requests, destinations, strict=True)]
        for i, request in enumerate(requests):
            if request.name == "target" and run.fault is not None:
                damage_before(engine, request, fault=run.fault, pool=run.pool)
                messages[i] = damage_on_the_way(
                    messages[i],
                    fault=run.fault,
                    pool=run.pool,
                    ahead=destinations[0],
                    other=requests[i + 1].places,
                )
        _tell(messages)
        for copy in itertools.chain.from_iterable(messages):
            dist.send(engine.read(copy, token_bytes), DECODE)
        for request in requests:
            slots[request.name] = _slots(engine, request)
            engine.free(request)
    return {"slots": slots}


def _decode(engine: TransferEngine, run: Run) -> dict[str, Any]:
    """Receive and land one request after the other, and decode all that have come, until each has had enough."""
    running: dict[PlacedRequest, int] = {}
    landed = {"received": 0, "cleared": 0, "uncovered": 0}
    slots, first_steps = {}, {}
    for _ in run.waves:
        words, headers = _hear()
        same = {name: compare_geometry(pool, words[name]) for name, pool in engine.pools.items()}
        requests = [engine.arrive(name, tokens) for name, tokens, _ in headers]
        for request, (_, _, length) in zip(requests, headers, strict=True):
            engine.expect(request, length)
        _tell(([r.places for r in requests], engine.token_bytes))
        for request, copies in zip(requests, _hear(), strict=True):
            slots[request.name] = _slots(engine, request)
            _receive(engine, copies, request, run)
            for name in engine.pools:
                landing = _land(engine, name, request, same_geometry=same[name])
                for key, count in dataclasses.asdict(landing).items():
                    landed[key] += count
            running[request] = run.new_tokens
            _decode_step(engine, running)
            first_steps[request.name] = engine.manager.step
        for _ in range(run.rest):
            _decode_step(engine, running)
    while running:
        _decode_step(engine, running)
    return {"landed": landed, "slots": slots, "first_steps": first_steps}


def _receive(engine: TransferEngine, copies: Sequence[Copy], request: PlacedRequest, run: Run) -> None:
    """Take in the messages of one request, and do what happens to the target on this side."""
    fault = run.fault if request.name == "target" else None
    for copy in copies:
        shape = (len(copy.src), engine.item_bytes(copy, engine.token_bytes))
        message = torch.empty(shape, dtype=torch.uint8, device=engine.device)
        dist.recv(message, PREFILL)
        if fault == "read in the old layout" and copy.pool == run.pool and engine.is_kv(copy):
            message = in_the_old_layout(message, token_bytes=engine.token_bytes)
        engine.store(copy, message)
    if fault == "overwritten before landing":
        overwrite(engine, request, pool=run.pool)


def _land(engine: TransferEngine, name: str, request: PlacedRequest, *, same_geometry: bool) -> Landing:
    pages = request.places[name]
    return land(
        engine.manager,
        engine.pools[name],
        slots=engine.slots(*pages.values()),
        length=request.cached - min(pages) * PAGE,
        owner=request.owner,
        same_geometry=same_geometry,
    )


def _decode_step(engine: TransferEngine, running: dict[PlacedRequest, int]) -> None:
    """Give every running request one more token; those that have had enough are freed."""
    if not running:
        return
    engine.extend(*((request, 1) for request in running))
    for request in list(running):
        request.tokens.append(_text(request.owner)[request.cached])
        running[request] -= 1
        if not running[request]:
            del running[request]
            engine.free(request)


def _findings(engine: TransferEngine) -> dict[str, Any]:
    """Return what a side has found, and how it is."""
    reports = [
        {
            "tag": r.tag,
            "reasons": list(r.reasons),
            "request": r.request_id,
            "position": r.position,
            "slot": r.slot,
            "step": r.step,
        }
        for r in engine.manager.reports
    ]
    return {"summary": engine.manager.summary().as_dict(), "reports": reports}


def _slots(engine: TransferEngine, request: PlacedRequest) -> dict[str, list[int]]:
    """Return the slot of each of a request's cached positions, by pool; 0 where it is not resident."""
    return {g.name: [engine.slot_of(g, request, p) for p in range(request.cached)] for g in engine.groups}


def _text(seed: int) -> list[int]:
    """Return the tokens of a text."""
    tokens: list[int] = np.random.default_rng(seed).integers(1, 1 << 17, 128).tolist()
    return tokens


def _tell(what: Any) -> None:
    """Send an object to the other process."""
    dist.send_object_list([what], 1 - dist.get_rank(), device=torch.device("cpu"))


def _hear() -> Any:
    """Return the object that the other process sent."""
    box: list[Any] = [None]
    dist.recv_object_list(box, 1 - dist.get_rank(), device=torch.device("cpu"))
    return box[0]


def describe(found: dict[str, Any]) -> str:
    """Return in a line what a side found: how many violations, of which requests, by tag and reasons."""
    kinds = sorted({(r["request"] or "nobody", r["tag"], "+".join(r["reasons"])) for r in found["reports"]})
    return "; ".join(f"{request} {tag} {reasons}" for request, tag, reasons in kinds) or "nothing"


@click.command()
@device_option("cuda: two GPUs.")
@click.option(
    "--backend",
    type=click.Choice(["reference", "triton"]),
    help="The canary's. [default: triton on cuda, else reference]",
)
@json_option()
@commit_option()
def main(device: str, backend: str | None, json_path: Path | None, commit: str | None) -> None:
    """Transfer requests between two processes, a prefill and a decode side, healthy and with faults.

    Nothing may be reported of a healthy transfer, and every fault must be found by the side that can see it.

    Exit codes: 0 as it should be, 1 a healthy run was loud or a fault silent, 2 misuse.

    \b
    Examples:
      kv-canary stress transfer
      kv-canary stress transfer --device cuda --json h200_pd.json
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        raise click.UsageError(f"--device cuda must be on a machine with two GPUs, got {torch.cuda.device_count()}")
    results = measure(RUNS, device=device, backend=backend)
    good = [is_as_it_should_be(run, result) for run, result in zip(RUNS, results, strict=True)]
    for result, ok in zip(results, good, strict=True):
        click.echo(f"{'ok   ' if ok else 'WRONG'} {result['run']:45} {describe(result['decode'])}")
    said = {
        **facts(device, commit=commit, kind="transfer"),
        "healthy_steps": {
            side: sum(r[side]["summary"]["steps"] for run, r in zip(RUNS, results, strict=True) if run.fault is None)
            for side in SIDES
        },
        "faults": sum(not must_be_silent(run) for run in RUNS),
        "faults_found": sum(ok and not must_be_silent(run) for run, ok in zip(RUNS, good, strict=True)),
        "wrong": [run.name for run, ok in zip(RUNS, good, strict=True) if not ok],
        "runs": [{"run": r["run"], **{side: _short(r[side]) for side in SIDES}} for r in results],
    }
    if json_path is not None:
        json_path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(good) else 1)


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """Return what a side found without the single reports."""
    return {"found": describe(found), "landed": found.get("landed"), "summary": found["summary"]}


if __name__ == "__main__":
    main()
