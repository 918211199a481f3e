"""Proves the transformers adapter on a GPU: CUDA graphs and asynchronous batching, with a canary and without.

    python -m kv_canary.difftest.stress.transformers_cuda --json transformers_cuda.json

Tiny random models are served by transformers' continuous batching, twice in each of its ways of running: the tokens
must be the same with a canary as without, the canary must find nothing and leave no cached position out, and graphs
must really have been replayed. So must tokens be that are sampled, by the device's own random generator, with the
canary as it is by default: it measures what it costs then, and captures graphs beside those that sample. Then one bit
of a cached key is flipped for one forward, through the engine's own tensors: the canary must name it, and nothing else.
Ends with status 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import inspect
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState

import kv_canary
from kv_canary.commands.facts import facts
from kv_canary.demo.models import tiny_model
from kv_canary.difftest.stress.processes import processes, run_tasks
from kv_canary.runtime.replays import CanaryGraph

PAGE, NEW_TOKENS, TIMEOUT = 16, 24, 120.0
LENGTHS = (3, 15, 16, 17, 32, 40, 90, 200)
# Whole-model blocks: too few for a wave, so that requests are evicted and begin again.
BLOCKS = 40
# The decode step in which the bit is flipped.
FLIPPED_STEP = 20
MODES: dict[str, dict[str, bool]] = {
    "eager": {"use_cuda_graph": False, "use_async_batching": False},
    "graphs": {"use_cuda_graph": True, "use_async_batching": False},
    "async": {"use_cuda_graph": False, "use_async_batching": True},
    "graphs and async": {"use_cuda_graph": True, "use_async_batching": True},
}
COUNTS = ("forwards", "replays", "prefix_hits", "soft_resets")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# By data type: those that are compared, and those that a bit is flipped in.
COMPARED = {"bf16": tuple(MODES), "fp32": ("eager", "graphs")}
SAMPLED = {"bf16": ("eager", "graphs"), "fp32": ()}
FLIPPED = {"bf16": ("eager", "graphs", "graphs and async"), "fp32": ()}
_SEED = 5


@dataclass(kw_only=True)
class Served:
    """The account of one run.

    Args:
        tokens: generated, by request.
        forwards: the warm-up's left out.
        replays: of CUDA graphs; captured: graphs that were made.
        prefix_hits: requests that found a prefix in the cache.
        soft_resets: running requests that were evicted and began again.
        seconds: from the first request to the last token, the warm-up left out.
        flipped: where a bit was flipped.
    """

    tokens: dict[str, list[int]] = field(default_factory=dict)
    forwards: int = 0
    replays: int = 0
    captured: int = 0
    prefix_hits: int = 0
    soft_resets: int = 0
    seconds: float = 0.0
    flipped: dict[str, Any] | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case, print a line each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, where the engine has no graphs and no async")
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="the commit measured, for the JSON (default: what git says)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, all on one device (default: 1)")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error("--jobs must be at least 1")
    device = torch.device(arguments.device)
    begin = time.perf_counter()
    known = tuple(MODES) if device.type == "cuda" else ("eager",)
    tasks = [
        _Task(what=what, kind=kind, dtype=dtype, mode=mode, device=str(device))
        for kind in ("llama", "gemma3")
        for dtype in DTYPES
        for mode in known
        for what, modes in (("compare", COMPARED), ("sample", SAMPLED), ("flip", FLIPPED))
        if mode in modes[dtype]
    ]
    rows, flips = list[dict[str, Any]](), list[dict[str, Any]]()

    def take(row: dict[str, Any]) -> bool:
        (flips if "planted" in row else rows).append(row)
        print(_line(row), flush=True)
        return False

    if arguments.jobs == 1:
        for task in tasks:
            take(_run(task))
    else:
        with processes(arguments.jobs) as pool:
            if run_tasks(_run, tasks, pool=pool, ahead=len(tasks), take=take):
                return 2
    ok = all(row["ok"] for row in [*rows, *flips])
    result = {
        **facts(device, commit=arguments.commit, kind="transformers"),
        "seconds": round(time.perf_counter() - begin, 1),
        "ok": ok,
        "clean": rows,
        "flips": flips,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("all as it should be" if ok else "NOT as it should be")
    return 0 if ok else 1


@dataclass(frozen=True, kw_only=True)
class _Task:
    """One case: what is done with which model, in which of the engine's ways of running."""

    what: str
    kind: str
    dtype: str
    mode: str
    device: str


def _run(task: _Task) -> dict[str, Any]:
    """Run a case in this process; return its row."""
    transformers.logging.set_verbosity_error()
    model = make_model(task.kind, DTYPES[task.dtype], torch.device(task.device))
    what = {"compare": compare, "sample": compare_sampled, "flip": plant}[task.what]
    return {"model": task.kind, "dtype": task.dtype, "mode": task.mode, **what(model, task.mode)}


def compare(model: Any, mode: str) -> dict[str, Any]:
    """Serve without a canary and with one, and return what differs or was found."""
    plain = serve(model, mode)
    canary = kv_canary.install(model, stride=1, check_tokens=True, verify_bytes_at_tail=True, sweep_every=8)
    watched = serve(model, mode)
    canary.flush()
    canary.uninstall()
    summary = canary.summary()
    graphs = MODES[mode]["use_cuda_graph"]
    checks = {
        "same tokens": plain.tokens == watched.tokens,
        "no violations": summary.violations == 0,
        "every forward": summary.steps == watched.forwards > 0,
        "every position": summary.positions_verified == summary.positions_relied_on > 0,
        "healthy": summary.watching == "complete",
        "graphs as asked": (watched.replays > 0 and watched.captured > 0) == graphs,
        "as many replays": watched.replays == plain.replays,
    }
    return _row(checks, canary, plain=plain, watched=watched)


def compare_sampled(model: Any, mode: str) -> dict[str, Any]:
    """Serve requests whose tokens are sampled, twice without a canary and once with one as it is by default."""
    plain, again = (serve(model, mode, samples=True) for _ in range(2))
    canary = kv_canary.install(model, check_tokens=True)
    watched = serve(model, mode, samples=True)
    canary.flush()
    canary.uninstall()
    summary = canary.summary()
    checks = {
        # Otherwise it could not be told who has changed what.
        "same tokens without, twice": plain.tokens == again.tokens,
        "same tokens": plain.tokens == watched.tokens,
        "no violations": summary.violations == 0,
        "every forward": summary.steps == watched.forwards > 0,
        "healthy": summary.watching == "complete",
    }
    return {"samples": True, **_row(checks, canary, plain=plain, watched=watched)}


def _row(checks: dict[str, bool], canary: Any, *, plain: Served, watched: Served) -> dict[str, Any]:
    """Return what is kept of a comparison."""
    return {
        "ok": all(checks.values()),
        "failed": [name for name, held in checks.items() if not held],
        "forwards": watched.forwards,
        "replays": watched.replays,
        "captured": watched.captured,
        "prefix_hits": watched.prefix_hits,
        "soft_resets": watched.soft_resets,
        "seconds_without": round(plain.seconds, 3),
        "seconds_with": round(watched.seconds, 3),
        "summary": canary.summary().as_dict(),
        "reports": [r.sentence for r in canary.reports[:4]],
    }


def plant(model: Any, mode: str) -> dict[str, Any]:
    """Serve with a canary, flip one bit for one forward, and return whether that was what it found."""
    canary: Any = kv_canary.install(model, stride=1)
    served = serve(model, mode, flip_for=canary)
    canary.flush()
    canary.uninstall()
    planted, reports = served.flipped, canary.reports
    seen = [{"step": r.step, "position": r.position, "request": r.request_id, "slot": r.slot} for r in reports]
    # Others may read the same slot in the same step.
    found = planted in seen and all(
        r.reasons == ("K",) and r.tag.startswith("HEAD") and {**s, "request": ""} == {**(planted or {}), "request": ""}
        for r, s in zip(reports, seen, strict=True)
    )
    return {
        "ok": found,
        "planted": planted,
        "replays": served.replays,
        "violations": canary.summary().violations,
        "reports": [r.sentence for r in reports[:4]],
    }


def serve(model: Any, mode: str, *, flip_for: Any = None, samples: bool = False) -> Served:
    """Serve three waves of requests and return what happened; a wave is submitted as one, so that runs are alike."""
    served = Served()
    torch.manual_seed(_SEED)
    with _counting(served):
        manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=NEW_TOKENS, do_sample=samples, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=_batching_config(MODES[mode]),
        )
        manager.warmup()
        processor = manager.batch_processor
        gate = _Gate(processor)
        if flip_for is not None:
            _flip_once(processor, flip_for, served)
        manager.start()
        try:
            generator = torch.Generator().manual_seed(1)
            prompts: list[list[int]] = []
            shared = _tokens(generator, 3 * PAGE)
            begin = time.perf_counter()
            for wave in range(3):
                fresh = [_tokens(generator, n) for n in LENGTHS]
                again = [shared, shared[:-PAGE], shared + _tokens(generator, 5), *prompts[:3]]
                prompts = [*again, *fresh]
                gate.shut()
                names = [f"wave {wave} request {i}" for i in range(len(prompts))]
                for name, prompt in zip(names, prompts, strict=True):
                    manager.add_request(prompt, request_id=name, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
                gate.open()
                served.tokens |= _collect(manager, len(names))
                prompts = [prompt + served.tokens[name] for name, prompt in zip(names, prompts, strict=True)]
            served.seconds = time.perf_counter() - begin
        finally:
            gate.open()
            manager.stop(block=True, timeout=TIMEOUT)
    return served


def make_model(kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a tiny model of random weights: all attention full, or most of it sliding."""
    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 2048}
    if kind == "llama":
        shape |= {"num_hidden_layers": 4}
    else:
        shape |= {"sliding_window": 40, "query_pre_attn_scalar": 64, "head_dim": 256}
    return tiny_model(kind, device=device, dtype=dtype, spread=0.1, **shape)


class _Gate:
    """Holds the engine's loop before it takes requests in."""

    def __init__(self, processor: Any) -> None:
        self._open, self._waiting = threading.Event(), threading.Event()
        self._open.set()
        prepare = processor.prepare_next_batch

        def held() -> Any:
            if not self._open.is_set():
                self._waiting.set()
                self._open.wait(TIMEOUT)
            return prepare()

        processor.prepare_next_batch = held

    def shut(self) -> None:
        self._waiting.clear()
        self._open.clear()
        if not self._waiting.wait(TIMEOUT):
            raise RuntimeError("kv-canary: bench: the engine's loop must come round, got nothing")

    def open(self) -> None:
        self._open.set()


@contextmanager
def _counting(served: Served) -> Iterator[None]:
    """Count forwards, graphs, replays and prefix hits in the engine's own classes, below the canary's wraps.

    Caches begin with zeros: 5.17 warms graphs up by a forward that reads KV which nobody has written, and what it
    samples by then may be no number, which ends the process.
    """

    def made(cache: Any, *args: Any) -> None:
        for tensor in (*getattr(cache, "key_cache", ()), *getattr(cache, "value_cache", ())):
            tensor.zero_()

    def forward(runner: Any, result: Any, *args: Any) -> None:
        requests = _prepared(runner.inputs_and_outputs).requests_in_batch
        served.forwards += not any(f.state.request_id.startswith("__warmup_") for f in requests)

    def captured(*args: Any) -> None:
        served.captured += 1

    def replayed(graph: Any, *args: Any) -> None:
        served.replays += not isinstance(graph, CanaryGraph)

    def matched(cache: Any, length: int, *args: Any) -> None:
        served.prefix_hits += length > 0

    def reset(state: Any, *args: Any) -> None:
        served.soft_resets += state.position_offset > 0

    spies: list[tuple[type, str, Callable[..., None]]] = [
        (ModelRunner, "compute_batch", forward),
        (ModelRunner, "_capture_graph", captured),
        (PagedAttentionCache, "__init__", made),
        (PagedAttentionCache, "search_prefix_match", matched),
        (RequestState, "create_equivalent_initial_request", reset),
        (torch.cuda.CUDAGraph, "replay", replayed),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in spies]
    for (owner, name, see), (_, _, original) in zip(spies, originals, strict=True):
        setattr(owner, name, _spied(original, see))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _spied(original: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    def spied(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        see(self, result, *args, *kwargs.values())
        return result

    return spied


def _flip_once(processor: Any, canary: Any, served: Served) -> None:
    """Flip one covered bit of a cached key before one decode step, and flip it back behind that step."""
    runner, run, steps = processor.model_runner, processor.model_runner.compute_batch, 0

    def flipping(model: Any, batch_data: dict[str, Any]) -> Any:
        nonlocal steps
        io = processor.inputs_and_outputs
        requests = _prepared(io).requests_in_batch
        steps += all(f.query_length == 1 for f in requests)
        if steps != FLIPPED_STEP or served.flipped is not None or batch_data["read_index"][0].numel() == 0:
            return run(model, batch_data)
        if io.compute_stream is not None:
            # What the engine has prepared may still be on its way.
            torch.cuda.synchronize()
        group, state = canary.manager.groups[0], requests[0].state
        past = state.position_offset - 1
        # The engine's read index begins with the oldest position that the first request reads.
        position = past - (min(past, group.window) if group.window else past)
        on_stream = nullcontext() if io.compute_stream is None else torch.cuda.stream(io.compute_stream)
        with on_stream:
            layer, byte, _ = group.pool.k_source.coverage(position)
            index = int(batch_data["read_index"][0][0])
            slot = int(canary.layout.to_slots(0, torch.tensor([index]))[0])
            key = _keys(processor.cache, layer)[index].view(torch.uint8).view(-1)
            key[byte] ^= 1
        result = run(model, batch_data)
        with on_stream:
            key[byte] ^= 1
        served.flipped = {
            "step": canary.manager.step,
            "position": position,
            "request": state.request_id,
            "slot": slot,
        }
        return result

    runner.compute_batch = flipping


def _keys(cache: Any, layer: int) -> torch.Tensor:
    """Return the engine's keys of the first group's `layer`-th layer, as its indices count them."""
    if hasattr(cache, "cache_allocators"):
        allocator = next(iter(cache.cache_allocators.values()))
        keys: torch.Tensor = allocator._kv_token_views[allocator.layer_indices[layer]][0]
        return keys
    (keys,) = cache.key_cache[layer : layer + 1]
    return keys


def _prepared(io: Any) -> Any:
    return io.io_pairs[io.current_pair].host_io if hasattr(io, "io_pairs") else io


def _collect(manager: Any, count: int) -> dict[str, list[int]]:
    """Return the next `count` finished requests' tokens, by request."""
    outputs: dict[str, list[int]] = {}
    deadline = time.monotonic() + TIMEOUT
    while len(outputs) < count:
        output = manager.get_result(timeout=0.2)
        if output is not None and output.is_finished():
            if output.error:
                raise RuntimeError(f"kv-canary: bench: {output.request_id} must be served, got {output.error}")
            outputs[output.request_id] = list(output.generated_tokens)
        elif output is None and (not manager.is_running() or time.monotonic() > deadline):
            raise RuntimeError(f"kv-canary: bench: {count} requests must be served, got {len(outputs)}")
    return outputs


def _batching_config(options: dict[str, bool]) -> ContinuousBatchingConfig:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    settings: dict[str, Any] = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": BLOCKS,
        "max_batch_tokens": 128,
        "max_requests_per_batch": 16,
        "max_blocks_per_request": 0,
        "seed": 0,
        **options,
    }
    if "auto_switch_to_flash" in known:
        settings["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**settings)


def _tokens(generator: torch.Generator, count: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 1000, (count,), generator=generator).tolist()
    return tokens


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['dtype']} {row['mode']}{' sampled' * row.get('samples', False)}"
    if "planted" in row:
        return f"{name:28} flip {'found' if row['ok'] else 'NOT FOUND'}: {row['planted']}"
    counts = ", ".join(f"{row[name]} {name.replace('_', ' ')}" for name in COUNTS)
    verdict = "clean" if row["ok"] else f"NOT CLEAN ({', '.join(row['failed'])})"
    return f"{name:28} {verdict}: {counts}, {row['seconds_without']} s without, {row['seconds_with']} s with"


if __name__ == "__main__":
    raise SystemExit(main())
