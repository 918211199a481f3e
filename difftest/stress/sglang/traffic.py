"""Serves waves of requests by a scheduler of SGLang in this process, through its own event loop; see `sglang_cuda`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kv_canary.difftest.stress.gpu_cases import compiled_from_here, uncovered
from kv_canary.difftest.stress.sglang import drafts, standins
from kv_canary.difftest.stress.sglang.engine import build_scheduler, submit
from kv_canary.runtime.replays import CanaryGraph

NEW_TOKENS = 24
LENGTHS = (3, 15, 16, 17, 32, 40, 90, 200)
SHARED = 48
# Too few for what is cached and what runs, so that prefixes are evicted.
SLOTS = 640
# The decode step at which a fault is planted, and passes in the loop after which the wave's second half comes.
FAULT_AT, SECOND_HALF, ABORT_AFTER = 20, 4, 9
# Cycles of the device by which a stream is late: some milliseconds.
_LAG = 5_000_000


def serve(case: dict[str, Any], *, device: str, model: Path, graph_sizes: Sequence[int]) -> dict[str, Any]:
    """Serve a case's waves; return tokens by request, what happened and what the canary says of it, JSON-ready.

    Args:
        case: a `cuda.Case` as a dictionary.
        device: "cuda" or "cpu".
        model: folder of a checkpoint; the draft model's is `draft` beside it.
        graph_sizes: batch sizes that decode graphs are captured for.
    """
    if device != "cpu":
        standins.use()
        standins.patch()
    begin = time.perf_counter()
    arguments = _arguments(case, device, graph_sizes)
    if case["drafts"]:
        arguments |= drafts.arguments(str(model.parent / "draft"))
    scheduler = build_scheduler(model, **arguments)
    if case["host_tier"]:
        _lag(scheduler)
    if case["drafts"]:
        # Which attention backends decide: Triton's reads them on the device, PyTorch's on the host.
        scheduler.future_map.needs_cpu_seq_lens = case["drafts"] == "host"
    started, compiled = time.perf_counter() - begin, compiled_from_here()
    counts = _Counts()
    traffic = _Traffic(scheduler, waves=case["waves"])
    planted: dict[str, Any] | None = None
    waits = _Waits() if case["drafts"] and case["canary"] else None
    with _counting(scheduler, counts):
        if case["fault"]:
            fault = _Fault(scheduler, kind=case["fault"])
            _around_batches(scheduler, fault.before, fault.behind)
        scheduler.ingest_requests = traffic.ingest
        begin = time.perf_counter()
        scheduler.run_event_loop()
        seconds = time.perf_counter() - begin
        if case["fault"]:
            planted = fault.planted
    return {
        "prompts": {r.rid: list(r.origin_input_ids) for r in traffic.requests},
        "tokens": {r.rid: list(r.output_ids) for r in traffic.requests},
        "forwards": dict(counts.forwards),
        "replays": counts.replays,
        "decodes_replayed": counts.decodes_replayed,
        "padded": counts.padded,
        "chunked": counts.chunked,
        "evictions": counts.evictions,
        "prefix_hits": sum(r.cached_tokens > 0 for r in traffic.requests),
        "retracted": sum(r.retraction_count > 0 for r in traffic.requests),
        "aborted": traffic.aborted,
        "drafts": drafts.accepted(traffic.requests) if case["drafts"] else None,
        "waits": None if waits is None else {"before": waits.before, "behind": waits.behind},
        "start_seconds": round(started, 2),
        "seconds": round(seconds, 3),
        "planted": planted,
        "compiled": compiled,
        **(_canary() if case["canary"] else {}),
    }


def _arguments(case: dict[str, Any], device: str, graph_sizes: Sequence[int]) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "device": device,
        "dtype": case["dtype"],
        "attention_backend": case["attention"],
        "disable_overlap_schedule": not case["overlap"],
        "page_size": case["page"],
        "max_total_tokens": SLOTS,
        "max_running_requests": max(graph_sizes),
        "chunked_prefill_size": 64,
        "disable_cuda_graph": case["graphs"] == "none",
        "log_level": "info",
    }
    if case["host_tier"]:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 8.0,
            "hicache_mem_layout": "layer_first",
            "hicache_write_policy": "write_through",
            "hicache_io_backend": "kernel",
        }
    if case["graphs"] != "none":
        arguments["cuda_graph_bs_decode"] = list(graph_sizes)
        if case["graphs"] == "decode":
            arguments["cuda_graph_backend_prefill"] = "disabled"
    return arguments


def _lag(scheduler: Any) -> None:
    """Have the scheduler's stream be busy whenever pages are freed, and so be late to know which."""
    allocator = scheduler.token_to_kv_pool_allocator
    release = allocator._release_page_ids

    def late(*pages: Any) -> Any:
        torch.cuda._sleep(_LAG)
        return release(*pages)

    allocator._release_page_ids = late


class _Traffic:
    """Stands in the place of the scheduler's receiver: hands in a wave when the one before has ended, then stops it."""

    def __init__(self, scheduler: Any, *, waves: int) -> None:
        self.requests: list[Any] = []
        self.aborted = 0
        self._scheduler = scheduler
        self._steps = self._script(waves)

    def ingest(self, *_: Any, **__: Any) -> list[Any]:
        """Called once a pass of the loop."""
        if next(self._steps, True):
            self._scheduler.gracefully_exit = True
        return []

    def _script(self, waves: int) -> Iterator[bool]:
        from sglang.srt.managers.io_struct import AbortReq

        generator = torch.Generator().manual_seed(1)
        shared = _tokens(generator, SHARED)
        before: list[list[int]] = []
        for wave in range(waves):
            fresh = [_tokens(generator, n) for n in LENGTHS]
            prompts = [shared, shared[:-16], shared + _tokens(generator, 5), *before, *fresh]
            half = len(prompts) // 2
            mine = self._submit(wave, prompts[:half], 0)
            for _ in range(SECOND_HALF):
                yield False
            mine += self._submit(wave, prompts[half:], half)
            for _ in range(ABORT_AFTER):
                yield False
            cut = next((r for r in mine if not r.finished() and r.output_ids), None)
            if cut is not None:
                self._scheduler.abort_request(AbortReq(rid=cut.rid))
                self.aborted += 1
            # One that had given way just then, and waits, is dropped without a word.
            left = [r for r in mine if r is not cut]
            while self._scheduler.last_batch is not None or not all(r.finished() for r in left):
                yield False
            # One more, so that the loop is idle once.
            yield False
            before = [list(r.origin_input_ids) + list(r.output_ids) for r in mine[3:6]]

    def _submit(self, wave: int, prompts: list[list[int]], first: int) -> list[Any]:
        # SGLang's abort takes every request whose name begins like the one given.
        made = [
            submit(self._scheduler, f"wave {wave} request {first + i:02}", p, new_tokens=NEW_TOKENS)
            for i, p in enumerate(prompts)
        ]
        self.requests += made
        return made


class _Counts:
    def __init__(self) -> None:
        self.forwards: Counter[str] = Counter()
        self.replays = 0
        self.decodes_replayed = 0
        self.padded = 0
        self.chunked = 0
        self.evictions = 0


@contextmanager
def _counting(scheduler: Any, counts: _Counts) -> Iterator[None]:
    """Count batches, and below them graph replays, in SGLang's own objects."""
    batch_now: Any = None
    graphs: Any = torch.cuda.CUDAGraph
    replay = graphs.replay
    cache, evict = scheduler.tree_cache, getattr(scheduler.tree_cache, "evict_for_alloc", None)

    def began(batch: Any) -> None:
        nonlocal batch_now
        batch_now = batch
        counts.forwards[batch.forward_mode.name] += 1
        counts.chunked += batch.forward_mode.is_extend() and scheduler.chunked_req is not None

    def replayed(graph: Any) -> Any:
        counts.replays += not isinstance(graph, CanaryGraph)
        return replay(graph)

    def evicted(*args: Any, **kwargs: Any) -> Any:
        counts.evictions += 1
        return evict(*args, **kwargs) if evict is not None else None

    _around_batches(scheduler, began, lambda _: None)
    _watch_decode_graphs(scheduler, counts, lambda: batch_now)
    graphs.replay = replayed
    if evict is not None:
        cache.evict_for_alloc = evicted
    try:
        yield
    finally:
        graphs.replay = replay
        if evict is not None:
            del cache.evict_for_alloc


def _watch_decode_graphs(scheduler: Any, counts: _Counts, batch_now: Callable[[], Any]) -> None:
    """Count decode batches that a graph served, and those that were smaller than their graph."""
    runner = scheduler.tp_worker.model_runner
    backend = getattr(getattr(runner, "decode_cuda_graph_runner", None), "backend", None)
    if backend is None:
        return
    replay = backend.replay

    def replayed(shape_key: Any, *args: Any, **kwargs: Any) -> Any:
        counts.decodes_replayed += 1
        counts.padded += shape_key.size > batch_now().batch_size()
        return replay(shape_key, *args, **kwargs)

    backend.replay = replayed


def _around_batches(scheduler: Any, before: Callable[[Any], None], behind: Callable[[Any], None]) -> None:
    run = scheduler.run_batch

    def around(batch: Any, *args: Any, **kwargs: Any) -> Any:
        before(batch)
        result = run(batch, *args, **kwargs)
        behind(batch)
        return result

    scheduler.run_batch = around


class _Waits:
    """Counts how often the canary waits for tokens that the device has chosen from drafts, from its making on.

    Attributes:
        before, behind: times before a forward is launched, or between two of them, and behind its launch.
    """

    def __init__(self) -> None:
        from kv_canary.engines.sglang import chosen, session

        self.before = self.behind = 0
        self._is_launched = False
        forwards: Any = session.Session
        tokens: Any = chosen.Chosen
        forward, wait = forwards.forward, tokens.wait

        def watched(its: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def launched(*args: Any, **kwargs: Any) -> Any:
                try:
                    return original(*args, **kwargs)
                finally:
                    self._is_launched = True

            try:
                return forward(its, launched, *args, **kwargs)
            finally:
                self._is_launched = False

        def waited(its: Any) -> None:
            if its._copied is not None and not its._copied.query():
                self.before += not self._is_launched
                self.behind += self._is_launched
            wait(its)

        forwards.forward, tokens.wait = watched, waited


class _Fault:
    """Changes something before one decode step and changes it back behind it, on the stream of the forwards.

    Args:
        scheduler: which is to run.
        kind: "byte", "table" or "write".
    """

    def __init__(self, scheduler: Any, *, kind: str) -> None:
        self.planted: dict[str, Any] | None = None
        self._scheduler, self._kind = scheduler, kind
        self._decodes = 0
        self._undo: Callable[[], None] | None = None

    def before(self, batch: Any) -> None:
        """Called before a batch is run."""
        self._decodes += batch.forward_mode.is_decode()
        if self.planted is not None or self._decodes < FAULT_AT or not batch.forward_mode.is_decode():
            return
        victim = max(batch.reqs, key=lambda r: r.kv.kv_committed_len)
        plant = {"byte": self._flip, "table": self._swap, "write": self._miswrite}[self._kind]
        with self._on_stream():
            self._undo = plant(victim)

    def behind(self, batch: Any) -> None:
        """Called when a batch was launched."""
        if self._undo is not None:
            from kv_canary.engines.sglang.session import current

            with self._on_stream():
                self._undo()
            self._undo = None
            if self.planted is not None:
                self.planted["step"] = current().manager.step

    def _flip(self, victim: Any) -> Callable[[], None]:
        from kv_canary.engines.sglang.session import current

        pool: Any = current().manager.groups[0].pool
        last = len(self._keys()) - 1
        # Positions take turns in which layer and bytes of theirs are covered.
        position, byte = next(
            (p, byte)
            for p in range(victim.kv.kv_committed_len - 2)
            for layer, byte, _ in [pool.k_source.coverage(p)]
            if layer == last
        )
        slot = int(self._row(victim)[position])
        key = self._keys()[last][slot].view(torch.uint8).view(-1)
        key[byte] ^= 1

        def undo() -> None:
            key[byte] ^= 1

        self.planted = {
            "request": victim.rid,
            "places": [[position, slot]],
            "touched": [position],
            "reasons": ["K"],
            "layer": last,
            "byte": byte,
        }
        return undo

    def _miswrite(self, victim: Any) -> Callable[[], None]:
        """Have a bit of what the forward writes be another one, before anybody looks there."""
        from kv_canary.engines.sglang.session import current

        session: Any = current()
        after = session._after

        def miswritten(watched: Any, runner: Any, forward_batch: Any, result: Any) -> None:
            i = forward_batch.req_pool_indices.tolist().index(victim.kv.req_pool_idx)
            slot, position = (int(x[i]) for x in (forward_batch.out_cache_loc, forward_batch.positions))
            layer, byte = uncovered(session.manager.groups[0].pool.k_source, position)
            keys.append((self._keys()[layer][slot].view(torch.uint8).view(-1), byte))
            keys[0][0][byte] ^= 1
            self.planted = {
                "request": victim.rid,
                "where": "TAIL",
                "places": [[position, slot]],
                "touched": [position],
                "reasons": ["SEAL_K"],
                "layer": layer,
                "byte": byte,
            }
            after(watched, runner, forward_batch, result)

        def undo() -> None:
            del session._after
            with torch.inference_mode():
                for key, byte in keys:
                    key[byte] ^= 1

        keys: list[tuple[torch.Tensor, int]] = []
        session._after = miswritten
        return undo

    def _swap(self, victim: Any) -> Callable[[], None]:
        row = self._row(victim)
        a, b = 5, victim.kv.kv_committed_len // 2
        held = row[[a, b]].clone()
        row[a], row[b] = held[1], held[0]

        def undo() -> None:
            row[a], row[b] = held[0], held[1]

        self.planted = {
            "request": victim.rid,
            "places": [[a, int(held[1])], [b, int(held[0])]],
            "touched": [a, a + 1, b, b + 1],
            "reasons": ["POSITION", "TOKEN", "CHAIN"],
        }
        return undo

    def _row(self, victim: Any) -> torch.Tensor:
        table: torch.Tensor = self._scheduler.req_to_token_pool.req_to_token
        return table[victim.kv.req_pool_idx]

    def _keys(self) -> list[torch.Tensor]:
        keys: list[torch.Tensor] = self._scheduler.tp_worker.model_runner.token_to_kv_pool.k_buffer
        return keys

    def _on_stream(self) -> Any:
        scheduler = self._scheduler
        if scheduler.device == "cpu":
            return scheduler.device_module.StreamContext(scheduler.schedule_stream)
        # What the scheduler has prepared may still be on its way.
        torch.cuda.synchronize()
        return torch.cuda.stream(scheduler.forward_stream)


def _canary() -> dict[str, Any]:
    """Return what the canary of this process says, JSON-ready."""
    from kv_canary.engines.sglang.session import current

    session = current()
    session.manager.flush()
    reports = [
        {
            "step": r.step,
            "tag": r.tag,
            "reasons": list(r.reasons),
            "request": r.request_id,
            "position": r.position,
            "slot": r.slot,
            "sentence": r.sentence,
        }
        for r in session.manager.reports
    ]
    return {"status": session.status(), "reports": reports[:16]}


def _tokens(generator: torch.Generator, n: int) -> list[int]:
    tokens: list[int] = torch.randint(3, 1000, (n,), generator=generator).tolist()
    return tokens
