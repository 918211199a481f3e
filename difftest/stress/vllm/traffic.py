"""Serves waves of requests by a vLLM in this process, on a GPU; see `cuda`."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kv_canary.difftest.stress.gpu_cases import compiled_from_here, uncovered
from kv_canary.difftest.stress.vllm import standins
from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine
from kv_canary.runtime.replays import CanaryGraph

NEW_TOKENS = 24
LENGTHS = (3, 15, 16, 17, 32, 40, 90, 200)
SHARED = 48
BLOCK = 16
LONGEST = 320
# Too few for what runs at once, so that requests are put off and what is cached is given away.
BLOCKS = 28
# Host memory for more than all that is served.
_HOST = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 64 << 20},
}
# The fewest decode steps before a fault, and steps after which the wave's second half comes, and one is given up.
FAULT_AT, SECOND_HALF, ABORT_AFTER = 20, 4, 9


def serve(case: dict[str, Any], *, model: Path, graph_sizes: list[int]) -> dict[str, Any]:
    """Serve a case's waves; return tokens by request, what happened and what the canary says of it, JSON-ready.

    Args:
        case: a `cuda.Case` as a dictionary.
        model: folder of a checkpoint.
        graph_sizes: batch sizes that graphs are captured for.
    """
    begin = time.perf_counter()
    engine = GpuEngine(str(model), has_canary=case["canary"], arguments=_arguments(case, graph_sizes))
    started, compiled = time.perf_counter() - begin, compiled_from_here()
    counts = _Counts(graph_sizes)
    fault = _Fault(engine, kind=case["fault"]) if case["fault"] else None
    traffic = _Traffic(engine, waves=case["waves"])
    begin = time.perf_counter()
    with counts.counting(engine):
        for _ in traffic.steps():
            before = counts.replays
            if fault is not None:
                fault.before(counts)
            engine.step()
            if fault is not None:
                fault.behind(replayed=counts.replays > before)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    return {
        "prompts": traffic.prompts,
        "tokens": {_own(name): tokens for name, tokens in engine.outputs.items()},
        "runner": type(engine.worker.model_runner).__module__,
        "asynchronous": bool(engine.worker.vllm_config.scheduler_config.async_scheduling),
        "cudagraph_mode": engine.worker.vllm_config.compilation_config.cudagraph_mode.name,
        "attention": sorted({type(i).__name__ for i in engine.attention}),
        **counts.as_dict(),
        "given_up": traffic.given_up,
        "start_seconds": round(started, 2),
        "seconds": round(seconds, 3),
        "planted": None if fault is None else fault.planted,
        "compiled": compiled,
        **(_canary(engine) if case["canary"] else {}),
    }


def _arguments(case: dict[str, Any], graph_sizes: list[int]) -> dict[str, Any]:
    compilation = dict(standins.ARGUMENTS["compilation_config"])
    if case["graphs"] != "none":
        mode = {"decode": "FULL_DECODE_ONLY", "all": "FULL"}[case["graphs"]]
        # What is compiled when it first runs must have run before it is captured; vLLM thinks of it for inductor alone.
        warmed = {"cudagraph_num_of_warmups": 1}
        compilation |= {"cudagraph_mode": mode, "cudagraph_capture_sizes": list(graph_sizes), **warmed}
    return {
        **standins.ARGUMENTS,
        "compilation_config": compilation,
        "enforce_eager": case["graphs"] == "none",
        "async_scheduling": case["asynchronous"],
        "dtype": case["dtype"],
        "skip_tokenizer_init": True,
        "block_size": BLOCK,
        "max_model_len": LONGEST,
        "kv_cache_memory_bytes": 64 << 20,
        "num_gpu_blocks_override": BLOCKS,
        # Others have the device, too.
        "gpu_memory_utilization": 0.05,
        "max_num_seqs": max(graph_sizes),
        "max_num_batched_tokens": 96,
        "enable_prefix_caching": True,
        "seed": 0,
        "disable_log_stats": True,
        **({"kv_transfer_config": _HOST} if case["host"] else {}),
    }


class GpuEngine(Engine):
    """A vLLM in this process, on a GPU, by stand-ins for what is compiled; the environment says the runner.

    Args:
        model: folder of a checkpoint.
        has_canary: whether the environment asks for one.
        arguments: of vLLM's `LLM`.
    """

    def __init__(self, model: str, *, has_canary: bool, arguments: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        standins.use()
        standins.patch()
        from vllm import LLM

        from kv_canary.engines.vllm.plugin import plugin

        # vLLM finds it only where kv-canary is installed, and not merely on the path.
        plugin()
        self.llm: Any = LLM(model, **arguments)
        self.outputs: dict[str, list[Any]] = {}
        self.steps, self._embeds = 0, False
        self.has_canary = has_canary

    @property
    def attention(self) -> list[Any]:
        """What computes the attention of each layer."""
        layers = self.worker.vllm_config.compilation_config.static_forward_context.values()
        return [layer.impl for layer in layers if hasattr(layer, "impl")]


class _Traffic:
    """Hands in a wave when the one before has ended."""

    def __init__(self, engine: Engine, *, waves: int) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.given_up: list[str] = []
        self._engine, self._waves = engine, waves
        self._texts = random.Random(1)

    def steps(self) -> Iterator[None]:
        """Yield before each step that is to be made."""
        engine, shared = self._engine, self._text(SHARED)
        before: list[list[int]] = []
        for wave in range(self._waves):
            fresh = [self._text(n) for n in LENGTHS]
            prompts = [shared, shared[:-BLOCK], shared + self._text(5), *before, *fresh]
            half = len(prompts) // 2
            mine = self._submit(wave, prompts[:half], 0)
            for _ in range(SECOND_HALF):
                yield
            mine += self._submit(wave, prompts[half:], half)
            for _ in range(ABORT_AFTER):
                yield
            running = [_own(r.request_id) for r in engine.scheduler.running if r.num_output_tokens]
            if running:
                engine.abort(running[-1])
                self.given_up.append(running[-1])
            while engine.unfinished:
                yield
            outputs = {_own(name): tokens for name, tokens in engine.outputs.items()}
            before = [self.prompts[name] + outputs[name] for name in mine if name in outputs][3:6]

    def _submit(self, wave: int, prompts: list[list[int]], first: int) -> list[str]:
        names = [f"wave {wave} request {first + i}" for i in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            # As much as its memory allows.
            self.prompts[name] = prompt[: LONGEST - NEW_TOKENS]
            self._engine.submit(name, self.prompts[name], new_tokens=NEW_TOKENS)
        return names

    def _text(self, length: int) -> list[int]:
        return [self._texts.randrange(3, VOCABULARY) for _ in range(length)]


class _Counts:
    """What happens, by what the scheduler says and by the graphs that are replayed.

    Args:
        sizes: of batches that there are graphs for.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.replays = self.decodes = 0
        self._forwards = self._ones = self._padded = self._chunked = self._prefix_hits = self._preempted = 0
        self._evictions = 0
        self._schedule = hashlib.sha256()
        self._sizes = sizes
        # Tokens that each request has to be computed before it decodes.
        self._to_fill: dict[str, int] = {}

    def as_dict(self) -> dict[str, Any]:
        """Return them by name, and the digest of how many tokens each step was given of which requests."""
        return {
            "schedule": self._schedule.hexdigest()[:16],
            "forwards": self._forwards,
            "decodes": self.decodes,
            "one_token_each": self._ones,
            "replays": self.replays,
            "padded": self._padded,
            "chunked": self._chunked,
            "prefix_hits": self._prefix_hits,
            "evictions": self._evictions,
            "preempted": self._preempted,
        }

    @contextmanager
    def counting(self, engine: Engine) -> Iterator[None]:
        """Count inside the block."""
        graphs: Any = torch.cuda.CUDAGraph
        scheduler, replay = engine.scheduler, graphs.replay
        pool = scheduler.kv_cache_manager.block_pool
        schedule, evict = scheduler.schedule, pool._maybe_evict_cached_block

        def scheduled(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._take(scheduler, output)
            return output

        def evicted(*args: Any, **kwargs: Any) -> Any:
            found = evict(*args, **kwargs)
            self._evictions += bool(found)
            return found

        def replayed(graph: Any) -> Any:
            self.replays += not isinstance(graph, CanaryGraph)
            return replay(graph)

        scheduler.schedule, pool._maybe_evict_cached_block, graphs.replay = scheduled, evicted, replayed
        try:
            yield
        finally:
            graphs.replay = replay
            del scheduler.schedule, pool._maybe_evict_cached_block

    def _take(self, scheduler: Any, output: Any) -> None:
        self._preempted += len(output.preempted_req_ids or ())
        cached = output.scheduled_cached_reqs
        for new in output.scheduled_new_reqs:
            self._prefix_hits += new.req_id not in self._to_fill and new.num_computed_tokens > 0
        for name in (*(new.req_id for new in output.scheduled_new_reqs), *cached.resumed_req_ids):
            self._to_fill[name] = scheduler.requests[name].num_tokens
        if not (tokens := output.num_scheduled_tokens):
            return
        self._forwards += 1
        self._schedule.update(repr([(_own(name), n) for name, n in tokens.items()]).encode())
        computed = {name: scheduler.requests[name].num_computed_tokens for name in tokens}
        self._chunked += any(computed[name] < self._to_fill[name] for name in tokens)
        ones = all(n == 1 for n in tokens.values())
        decodes = ones and all(computed[name] > self._to_fill[name] for name in tokens)
        self._ones += ones
        self.decodes += decodes
        self._padded += decodes and len(tokens) not in self._sizes


class _Fault:
    """Changes something before one decode step and changes it back behind it.

    Args:
        engine: which is to step.
        kind: "byte", "table" or "write".
    """

    def __init__(self, engine: Engine, *, kind: str) -> None:
        self.planted: dict[str, Any] | None = None
        self._engine, self._kind = engine, kind
        self._undo: Callable[[], None] | None = None

    def before(self, counts: _Counts) -> None:
        """Called before a step."""
        scheduler = self._engine.scheduler
        if self.planted is not None or counts.decodes < FAULT_AT or scheduler.waiting:
            return
        # The first comes first: it is not put off. It has to go on for a while.
        running = [r for r in scheduler.running if r.num_output_tokens]
        long = [r for r in running if r.num_tokens > 4 * BLOCK and r.num_output_tokens < NEW_TOKENS - 6]
        if len(running) < len(scheduler.running) or not long:
            return
        # What was prepared may still be on its way.
        torch.cuda.synchronize()
        plant = {"byte": self._flip, "table": self._swap, "write": self._miswrite}[self._kind]
        self._undo = plant(long[0])

    def behind(self, *, replayed: bool) -> None:
        """Called behind a step.

        Args:
            replayed: whether it was one of a graph.
        """
        if self._undo is not None and self.planted is not None:
            torch.cuda.synchronize()
            self._undo()
            torch.cuda.synchronize()
            self._undo = None
            self.planted |= {"step": self._engine.session.manager.step, "by_graph": replayed}

    def _flip(self, victim: Any) -> Callable[[], None]:
        group = self._engine.session.groups[0]
        source = group.group.pool.k_source
        last = len(source.layers) - 1
        # Positions take turns in which layer and bytes of theirs are covered.
        position, byte = next(
            (p, byte)
            for p in range(victim.num_prompt_tokens - 1)
            for layer, byte, _ in [source.coverage(p)]
            if layer == last
        )
        slot = self._blocks(victim)[position // BLOCK] * BLOCK + position % BLOCK
        key = source.layers[last].view(torch.uint8)[slot // source.page_size]
        place = source.offset_bytes + slot % source.page_size * source.token_stride_bytes + byte
        key[place] ^= 1

        def undo() -> None:
            key[place] ^= 1

        self.planted = {
            "request": _own(victim.request_id),
            "places": [[position, slot]],
            "touched": [position],
            "reasons": ["K"],
            "layer": group.group.pool.layer_names[last],
            "byte": byte,
        }
        return undo

    def _miswrite(self, victim: Any) -> Callable[[], None]:
        """Have a bit of what the forward writes be another one, before anybody looks there."""
        session = self._engine.session
        group, after = session.groups[0], session.after

        def miswritten() -> None:
            i = session._composed.names.index(victim.request_id)
            position, slot = int(session._last.prefix[i]), int(session._given.out_slots[group.group.name][i])
            source = group.group.pool.k_source
            layer, byte = uncovered(source, position)
            key = source.layers[layer].view(torch.uint8)[slot // source.page_size]
            place = source.offset_bytes + slot % source.page_size * source.token_stride_bytes + byte
            keys.append((key, place))
            key[place] ^= 1
            self.planted = {
                "request": _own(victim.request_id),
                "where": "TAIL",
                "places": [[position, slot]],
                "touched": [position],
                "reasons": ["SEAL_K"],
                "layer": group.group.pool.layer_names[layer],
                "byte": byte,
            }
            after()

        def undo() -> None:
            del session.after
            with torch.inference_mode():
                for key, place in keys:
                    key[place] ^= 1

        keys: list[tuple[torch.Tensor, int]] = []
        session.after = miswritten
        return undo

    def _swap(self, victim: Any) -> Callable[[], None]:
        row = self._row(victim.request_id)
        blocks = self._blocks(victim)
        # The last one is where the next token goes.
        a, b = 0, victim.num_prompt_tokens // BLOCK - 1
        held = row[a].item(), row[b].item()
        if held != (blocks[a], blocks[b]):
            raise RuntimeError(f"kv-canary: stress: a table must hold {blocks[a], blocks[b]}, got {held}")
        row[a], row[b] = held[1], held[0]

        def undo() -> None:
            row[a], row[b] = held

        touched = sorted({n * BLOCK + i for n in (a, b) for i in range(BLOCK + 1)})
        self.planted = {
            "request": _own(victim.request_id),
            "places": [[a * BLOCK, held[1] * BLOCK], [b * BLOCK, held[0] * BLOCK]],
            "touched": touched,
            "reasons": ["POSITION", "TOKEN", "CHAIN"],
        }
        return undo

    def _blocks(self, victim: Any) -> list[int]:
        return list(self._engine.scheduler.kv_cache_manager.get_block_ids(victim.request_id)[0])

    def _row(self, name: str) -> torch.Tensor:
        """Return a request's row of block ids, from which what the kernels get is copied."""
        runner = self._engine.worker.model_runner
        if self._engine.worker.use_v2_model_runner:
            found: torch.Tensor = runner.block_tables.block_tables[0].gpu[runner.req_states.req_id_to_index[name]]
            return found
        batch = runner.input_batch
        table: torch.Tensor = batch.block_table[0].block_table.cpu[batch.req_id_to_index[name]]
        return table


def _canary(engine: Engine) -> dict[str, Any]:
    """Return what the engine's canary says, JSON-ready."""
    session = engine.session
    session.manager.flush()
    reports = [
        {
            "step": r.step,
            "tag": r.tag,
            "reasons": list(r.reasons),
            "request": _own(r.request_id or ""),
            "position": r.position,
            "slot": r.slot,
            "sentence": r.sentence,
        }
        for r in session.manager.reports
    ]
    incidents = [incident.sentence for incident in session.manager.incidents]
    return {"status": session.status(), "reports": reports, "incidents": incidents}


def _own(name: str) -> str:
    """Return a request's name without what vLLM puts behind it."""
    return name.rpartition("-")[0] or name
