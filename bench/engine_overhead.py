"""The canary's cost in a real engine: transformers' continuous batching, a Llama of 8 billion parameters, a GPU.

    python -m kv_canary.bench.engine_overhead --out engine_overhead.json

For every shape three engines serve the same batch in turn, from KV pools of one size: without a canary, with every
cached position verified in every step, and with the canary as it comes, which chooses what it verifies by its budget.
All steps that are timed are decode steps of the whole batch, under CUDA graphs where there are any. A row says

- tokens per second of whole runs, in rounds whose order rotates: median, least and most;
- the canary's time on the device by CUDA events, all that it and its adapter launch included, as a share of the
  engine's step, of the forward alone, and of the floor: the time in which the device could at best read the weights and
  the batch's KV, by the copy bandwidth measured in the same run. The engine gathers KV before it attends to it, so its
  steps are long; no engine is so fast that the share is larger than that of the floor;
- the time that the canary takes of the thread that launches forwards;
- memory: of the records, and all that the engine allocates more than without.

Before that it is checked that a healthy engine gives no violation and that a flipped bit of the KV cache is found. Ends
with status 1 if a check fails: of these, or that all three gave the same tokens, that nothing was found, that every
position was verified.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kv_canary.bench.engine_served import Engine, Run, Shape, make_model
from kv_canary.bench.engine_times import ForwardTimes, Watch
from kv_canary.commands.facts import facts
from kv_canary.perturb import PerturbConfig, Perturber

# Settings of the canary by mode; None: there is none.
MODES: dict[str, dict[str, Any] | None] = {"without": None, "full": {"stride": 1}, "budget": {}}
# Runs before the first that counts: graphs are captured, kernels compiled, and the budget has seen enough steps.
WARM_UPS = 2
# Prompts whose prefill is timed forward by forward; the first of all is for warming up.
WATCHED_PROMPTS = 3
COPIED_BYTES = {"cuda": 1 << 32, "cpu": 1 << 22}


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure every shape, print a table, and write the JSON after each shape."""
    arguments = _parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers.logging.set_verbosity_error()
    started = time.perf_counter()
    model = make_model(device, tiny=arguments.tiny)
    shapes = [
        Shape(batch=batch, context=context, new_tokens=arguments.new_tokens, page=arguments.page, chunk=arguments.chunk)
        for batch, context in arguments.shapes
    ]
    bandwidth = copy_bandwidth(device)
    result: dict[str, Any] = {
        **facts(device, commit=arguments.commit, kind="engine"),
        "model": {"parameters": sum(p.numel() for p in model.parameters()), "dtype": str(model.dtype)},
        "copy_bytes_per_s": bandwidth,
        "check": check(model, page=arguments.page, chunk=arguments.chunk),
        "rows": [],
    }
    with Progress(console=Console(stderr=True), refresh_per_second=1) as progress:
        for i, shape in enumerate(shapes):
            # Each shape has its part of what is left.
            left = arguments.seconds - (time.perf_counter() - started)
            row = measure(
                model,
                shape,
                repeats=arguments.repeats,
                seconds=left / (len(shapes) - i),
                bandwidth=bandwidth,
                progress=progress,
            )
            result["rows"].append(row)
            result["seconds"] = round(time.perf_counter() - started, 1)
            result["ok"] = not result["check"]["failed"] and not any(row["failed"] for row in result["rows"])
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    _print(result)
    return 0 if result["ok"] else 1


def check(model: Any, *, page: int, chunk: int) -> dict[str, Any]:
    """Serve a small batch, flip one sampled bit of its KV cache, and return whether that was found and nothing else."""
    shape = Shape(batch=4, context=4 * page, new_tokens=8, page=page, chunk=chunk)
    prompts = shape.prompts(model.config.vocab_size)
    engine = Engine(model, shape, settings=MODES["full"])
    try:
        engine.prefill(prompts)
        engine.decode(prompts)
        manager = engine.canary.manager
        engine.canary.flush()
        healthy = engine.canary.summary()
        fault = PerturbConfig(mode="real_kv_used", warm_up=manager.step + shape.new_tokens // 2, covered_only=True)
        manager.perturber = Perturber(fault, manager.groups)
        engine.decode(prompts)
        engine.canary.flush()
        injections, reports = manager.perturber.injections, engine.canary.reports
    finally:
        engine.close()
    held = {
        "a healthy engine has no violation": healthy.watching == "complete" and not healthy.violations,
        "every position is verified": healthy.positions_verified == healthy.positions_relied_on > 0,
        "one bit was flipped": len(injections) == 1,
        "it was found at once": any(r.step == i.step and r.slot in i.slots for r in reports for i in injections),
        "nothing else was found": all(r.slot in i.slots for r in reports for i in injections),
    }
    return {
        "failed": [name for name, value in held.items() if not value],
        "flipped": [i.where for i in injections],
        "reports": [r.sentence for r in reports[:4]],
    }


def measure(
    model: Any, shape: Shape, *, repeats: int, seconds: float, bandwidth: float, progress: Progress
) -> dict[str, Any]:
    """Return the row of one shape.

    Args:
        repeats: rounds, in each of which every mode runs once.
        seconds: no round begins later than that from now on, except the first.
        bandwidth: bytes a second that the device copies.
    """
    deadline = time.perf_counter() + seconds
    prompts = shape.prompts(model.config.vocab_size)
    bar = progress.add_task(shape.name, total=len(MODES) * (1 + WARM_UPS + repeats + 2))
    engines: dict[str, Engine] = {}
    allocated: dict[str, int] = {}
    prefill: dict[str, dict[str, Any]] = {}
    runs: dict[str, list[Run]] = {mode: [] for mode in MODES}
    device_times: dict[str, list[ForwardTimes]] = {}
    host_times: dict[str, list[ForwardTimes]] = {}
    try:
        for mode, settings in MODES.items():
            before = _allocated()
            engines[mode] = engine = Engine(model, shape, settings=settings)
            prefill[mode] = _prefill(engine, prompts)
            for _ in range(WARM_UPS):
                engine.decode(prompts)
            allocated[mode] = _allocated() - before
            progress.advance(bar, 1 + WARM_UPS)
        names = list(MODES)
        for i in range(repeats):
            if i and time.perf_counter() > deadline:
                break
            for mode in names[i % len(names) :] + names[: i % len(names)]:
                runs[mode].append(engines[mode].decode(prompts))
                progress.advance(bar)
        for mode, engine in engines.items():
            for times, events in ((host_times, False), (device_times, True)):
                with Watch(engine, events=events) as watch:
                    engine.decode(prompts)
                # The first one admits the requests.
                times[mode] = watch.forwards[1:]
                progress.advance(bar)
        failed = _failed(engines, runs, shape)
        memory = {mode: _memory(e, allocated[mode] - allocated["without"]) for mode, e in engines.items() if e.canary}
        chosen = {mode: _chosen(e) for mode, e in engines.items() if e.canary}
    finally:
        for engine in engines.values():
            engine.close()
        progress.remove_task(bar)
    step_ms = _spread(1e3 * s for run in runs["without"] for s in run.steps)
    forward_ms = _medians(device_times["without"])["forward"]
    floor = _floor(model, shape, bandwidth)
    row: dict[str, Any] = {
        "shape": shape.name,
        "batch": shape.batch,
        "context": shape.context,
        "new_tokens": shape.new_tokens,
        "page": shape.page,
        "repeats": len(runs["without"]),
        "failed": failed,
        "step_ms": step_ms["median"],
        "forward_ms": forward_ms,
        "floor": floor,
        "modes": {},
    }
    for mode in MODES:
        rates = [shape.batch * shape.new_tokens / run.seconds for run in runs[mode]]
        facts_of_mode: dict[str, Any] = {
            "tokens_per_s": _spread(rates),
            "step_ms": _spread(1e3 * s for run in runs[mode] for s in run.steps),
            "prefill": prefill[mode],
        }
        if engines[mode].canary is not None:
            without = [shape.batch * shape.new_tokens / run.seconds for run in runs["without"]]
            parts = _medians(device_times[mode])
            host = [f.parts() for f in host_times[mode]]
            facts_of_mode |= {
                "ratio": _spread(a / b for a, b in zip(rates, without, strict=True)),
                "canary_ms": parts["canary"],
                "parts_ms": {name: ms for name, ms in parts.items() if name not in ("canary", "forward")},
                "share_of_step": parts["canary"] / step_ms["median"],
                "share_of_forward": parts["canary"] / forward_ms,
                "share_of_floor": parts["canary"] / floor["ms"],
                "held": sum(f.held for f in device_times[mode]) / len(device_times[mode]),
                "host_us": {name: _spread(1e3 * p[name] for p in host) for name in host[0] if name != "forward"},
                "host_share_of_step": statistics.median(p["canary"] for p in host) / step_ms["median"],
                "memory": memory[mode],
                **chosen[mode],
                "summary": engines[mode].canary.summary().as_dict(),
            }
        row["modes"][mode] = facts_of_mode
    return row


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes a second, read and written together, at which the device copies large tensors by a kernel."""
    source = torch.rand(COPIED_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.mul(source, 1.0, out=target)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            torch.mul(source, 1.0, out=target)
            times.append(time.perf_counter() - start)
    # The first ones warm up.
    seconds: float = statistics.median(times[2:])
    return 2 * source.nbytes / seconds


def _prefill(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Put every prompt into the prefix cache; return the medians of its forwards, and tokens per second."""
    engine.prefill(prompts[:1])
    watched, rest = prompts[1 : 1 + WATCHED_PROMPTS], prompts[1 + WATCHED_PROMPTS :]
    with Watch(engine, events=True) as watch:
        engine.prefill(watched)
    seconds = engine.prefill(rest)
    forwards = [f for f in watch.forwards if not f.decode]
    return {
        "forwards": len(forwards),
        "parts_ms": _medians(forwards) if forwards else {},
        "tokens_per_s": sum(map(len, rest)) / seconds if rest else None,
    }


def _failed(engines: Mapping[str, Engine], runs: Mapping[str, Sequence[Run]], shape: Shape) -> list[str]:
    """Return what is not as it must be, in words."""
    held = {}
    expected = runs["without"][0].tokens
    for mode, engine in engines.items():
        held[f"{mode}: the same tokens"] = all(run.tokens == expected for run in runs[mode])
        held[f"{mode}: nothing but decode steps"] = all(len(run.starts) == shape.new_tokens for run in runs[mode])
        held[f"{mode}: CUDA graphs on a GPU"] = engine.uses_graphs == torch.cuda.is_available()
        if engine.canary is None:
            continue
        engine.canary.flush()
        summary = engine.canary.summary()
        relied_on, verified = summary.positions_relied_on, summary.positions_verified
        held[f"{mode}: no violation"] = summary.violations == 0
        held[f"{mode}: healthy"] = summary.watching == "complete"
        if mode == "full":
            held[f"{mode}: every position was verified"] = verified == relied_on > 0
        else:
            held[f"{mode}: positions were verified"] = 0 < verified <= relied_on
    return [name for name, value in held.items() if not value]


def _memory(engine: Engine, allocated: int) -> dict[str, Any]:
    """Return what the canary takes: its records, by their layout; and all of it, where the allocator says (a GPU's)."""
    pools = engine.canary.manager.pools
    kv = sum(pool.kv_bytes for pool in pools)
    slots = sum(pool.num_slots for pool in pools)
    records = sum(buffer.nbytes for pool in pools for buffer in pool.buffers)
    return {
        "slots": slots,
        "kv_bytes_per_slot": kv / slots,
        "record_bytes_per_slot": records / slots,
        "records_share_of_pool": records / kv,
        **({"allocated_bytes": allocated, "allocated_share_of_pool": allocated / kv} if allocated else {}),
    }


def _chosen(engine: Engine) -> dict[str, Any]:
    """Return the stride, and what it was chosen by."""
    budget = engine.canary.manager.budget
    cost = None if budget.cost is None else {"fixed_us": budget.cost.fixed * 1e6, "entry_ns": budget.cost.entry * 1e9}
    return {"stride": budget.stride, "cost": cost}


def _floor(model: Any, shape: Shape, bandwidth: float) -> dict[str, float]:
    """Return the least time of a decode step: every weight and the batch's KV read once, at the copy bandwidth."""
    config = model.config
    # Of the embedding a row a token is read; the output's matrix is its own.
    embedding = model.get_input_embeddings().weight.nbytes
    weights = sum(p.nbytes for p in model.parameters()) - embedding
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    kv = shape.batch * shape.context * per_token
    return {"weight_bytes": weights, "kv_bytes": kv, "ms": 1e3 * (weights + kv) / bandwidth}


def _medians(forwards: Sequence[ForwardTimes]) -> dict[str, float]:
    """Return the median of each part, in milliseconds."""
    parts = [f.parts() for f in forwards]
    return {name: statistics.median(p[name] for p in parts) for name in parts[0]}


def _spread(values: Any) -> dict[str, float]:
    """Return the median, the least, the most and the 90th percentile."""
    values = sorted(values)
    return {
        "median": statistics.median(values),
        "min": values[0],
        "max": values[-1],
        "p90": values[round(0.9 * (len(values) - 1))],
    }


def _allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _print(result: Mapping[str, Any]) -> None:
    lines: dict[str, Callable[[dict[str, Any], dict[str, Any]], str]] = {
        "stride": lambda _, m: str(m["stride"]),
        "step without, ms": lambda row, _: f"{row['step_ms']:.3f}",
        "forward alone, ms": lambda row, _: f"{row['forward_ms']:.3f}",
        "floor, ms": lambda row, _: f"{row['floor']['ms']:.3f}",
        "HEAD, ms": lambda _, m: f"{m['parts_ms']['head']:.4f}",
        "TAIL, ms": lambda _, m: f"{m['parts_ms']['tail']:.4f}",
        "begin, end and adapter, ms": lambda _, m: f"{sum(m['parts_ms'][n] for n in ('begin', 'end', 'adapter')):.4f}",
        "canary, ms": lambda _, m: f"{m['canary_ms']:.4f}",
        "of the step": lambda _, m: f"{m['share_of_step']:.2%}",
        "of the forward": lambda _, m: f"{m['share_of_forward']:.2%}",
        "of the floor": lambda _, m: f"{m['share_of_floor']:.2%}",
        "host, us": lambda _, m: f"{m['host_us']['canary']['median']:.0f}",
        "host, of the step": lambda _, m: f"{m['host_share_of_step']:.2%}",
        "tokens/s": lambda _, m: f"{m['tokens_per_s']['median']:.1f}",
        "of tokens/s without": lambda _, m: f"{m['ratio']['median']:.4f}",
        "least to most": lambda _, m: f"{m['ratio']['min']:.4f} to {m['ratio']['max']:.4f}",
        "records, of the pool": lambda _, m: f"{m['memory']['records_share_of_pool']:.3%}",
        "all memory, of the pool": lambda _, m: f"{m['memory'].get('allocated_share_of_pool', math.nan):.3%}",
    }
    cases = [
        (row, mode, facts_of_mode)
        for row in result["rows"]
        for mode, facts_of_mode in row["modes"].items()
        if "ratio" in facts_of_mode
    ]
    table = Table(title=f"{result['device']}: what the canary costs in decode steps")
    table.add_column("")
    for row, mode, _ in cases:
        table.add_column(f"{row['shape']}\n{mode}", justify="right")
    for name, show in lines.items():
        table.add_row(name, *(show(row, facts_of_mode) for row, _, facts_of_mode in cases))
    # Wide enough for all columns, wherever it goes.
    console = Console(width=32 + 19 * len(cases))
    console.print(table)
    for failed in (result["check"]["failed"], *(row["failed"] for row in result["rows"])):
        for name in failed:
            console.print(f"NOT as it must be: {name}")


def _shapes(text: str) -> list[tuple[int, int]]:
    """Parse `64x2048,8x16384`."""
    try:
        shapes = [(int(batch), int(context)) for batch, context in (part.split("x") for part in text.split(","))]
    except ValueError:
        shapes = []
    if not shapes or any(batch < 1 or context < 1 for batch, context in shapes):
        raise argparse.ArgumentTypeError(f"must be BATCHxCONTEXT, separated by commas, got {text}")
    return shapes


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_shapes, help="BATCHxCONTEXT, by commas (64x2048,128x256,8x16384; tiny: 4x64)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--new-tokens", type=int, default=16, help="decode steps of a run (default: 16)")
    parser.add_argument("--page", type=int, default=16, help="tokens of a KV block (default: 16)")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a forward at most (default: 2048)")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin no further round after that (default: 300)")
    parser.add_argument("--tiny", action="store_true", help="a model that a CPU runs")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--commit", help="the commit measured, for the JSON (default: what git says)")
    arguments = parser.parse_args(argv)
    if arguments.shapes is None:
        arguments.shapes = [(4, 64)] if arguments.tiny else [(64, 2048), (128, 256), (8, 16384)]
    if arguments.repeats < 1 or arguments.new_tokens < 4:
        parser.error("--repeats must be at least 1 and --new-tokens at least 4")
    if arguments.page < 4 or any(context % arguments.page for _, context in arguments.shapes):
        parser.error("--page must be at least 4 and divide every context")
    if arguments.chunk < max(batch for batch, _ in arguments.shapes):
        parser.error("--chunk must be at least every batch")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
