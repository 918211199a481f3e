"""One vLLM in a process of its own, which does what it is told, one thing at a time."""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kv_canary.bench.serving.clocks import Clock, Collections, DeviceOperations
from kv_canary.bench.serving.worker import WARM_UP, Pass, digest, in_process, status_of, told_by, window

# A step that has scheduled nothing.
_NOTHING = Pass(ns=0, decodes=None, requests=0)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What an engine is made of.

    Args:
        model: folder of its configuration.
        device: "cuda" or "cpu".
        environment: set before vLLM is imported.
        arguments: of vLLM's `LLM`.
        vocabulary: of which prompts are made.
        log: where its output goes.
        frozen: whether Python's garbage collector leaves alone what is there after the warm-up.
        cores: on which it runs; empty: where it likes.
    """

    model: Path
    device: str
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]
    vocabulary: int
    log: Path
    frozen: bool
    cores: Sequence[int] = ()


@dataclass(kw_only=True)
class _Served:
    """What a batch has come to.

    Args:
        passes: of the engine's loop; the first is before anything ran.
        tokens: of each request, by its number.
    """

    passes: list[Pass]
    tokens: dict[str, list[int]] = field(default_factory=dict)


def serve(spec: Spec, connection: Connection) -> None:
    """Make an engine, say so, and do what comes through `connection` until "stop"; the entry of a process."""

    def work() -> None:
        if spec.cores:
            os.sched_setaffinity(0, spec.cores)
        worker = Worker(spec)
        connection.send({"ready": True})
        while (command := connection.recv())["do"] != "stop":
            connection.send(getattr(worker, f"do_{command.pop('do')}")(**command))

    in_process(work, connection, log=spec.log, environment=spec.environment)


class Worker:
    """An engine and what is done with it.

    Args:
        spec: see `serve`.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec, self._count = spec, 0
        has_canary = spec.environment["KV_CANARY_MODE"] != "off"
        if spec.device == "cuda":
            from kv_canary.difftest.stress.vllm.traffic import GpuEngine

            self._engine: Any = GpuEngine(str(spec.model), has_canary=has_canary, arguments=dict(spec.arguments))
        else:
            from kv_canary.difftest.stress.vllm.engine import Engine

            settings = {
                name.removeprefix("KV_CANARY_").lower(): text
                for name, text in spec.environment.items()
                if name.startswith("KV_CANARY_")
            }
            self._engine = Engine(str(spec.model), canary=settings if has_canary else None, **spec.arguments)
        self._llm = self._engine.llm.llm_engine
        self._scheduled = _NOTHING
        self._watch_schedule()
        self._collections = Collections()

    def do_settle(self) -> dict[str, Any]:
        """Leave alone what is there by now, where that is asked for."""
        if self._spec.frozen:
            gc.collect()
            gc.freeze()
        return {}

    def do_prefill(
        self, *, requests: int, context: int, operations: bool = False, host: bool = False
    ) -> dict[str, Any]:
        """Prefill prompts that are not cached."""
        if not self._engine.scheduler.reset_prefix_cache():
            raise RuntimeError("kv-canary: bench: the prefix cache must be reset, got an engine that is not idle")
        seen = DeviceOperations() if operations else None
        clock = Clock(events=False) if host else None
        served = self._serve(requests, context, 1)
        seconds = (served.passes[-1].ns - served.passes[0].ns) / 1e9
        answer: dict[str, Any] = {"tokens_per_s": requests * context / seconds}
        forwards = sum(bool(step.requests) for step in served.passes)
        if seen is not None:
            answer["operations"] = seen.stop(forwards)
        if clock is not None:
            answer |= clock.stop(forwards)
        return answer

    def do_load(self, *, requests: int, context: int) -> dict[str, Any]:
        """Bring prompts into the prefix cache."""
        return self.do_prefill(requests=requests, context=context)

    def do_sums(self, *, requests: int, context: int) -> dict[str, Any]:
        """Sum up the bytes of the first and the last layer's KV, once prompts were served from the cache."""
        served = self._serve(requests, context, 6)
        caches = self._engine.worker.model_runner.kv_caches
        sums = [int(cache.reshape(-1).view(torch.uint8).sum(dtype=torch.int64)) for cache in (caches[0], caches[-1])]
        return {"kv_sums": sums, "tokens_sha": digest(served.tokens)}

    def do_decode(self, *, requests: int, context: int, new: int) -> dict[str, Any]:
        """Decode a batch whose prompts are cached."""
        served = self._serve(requests, context, new)
        pairs = window(served.passes, requests)
        took = [(b.ns - a.ns) / 1e6 for a, b in pairs]
        first, last = pairs[0][0].ns, pairs[-1][1].ns
        return {
            "tokens_per_s": requests * len(pairs) / ((last - first) / 1e9),
            "step_ms": statistics.median(took),
            "longest_step_ms": max(took),
            **self._collections.within(first, last),
            "tokens_sha": digest(served.tokens),
            **self._canary(),
        }

    def do_host(self, *, requests: int, context: int, new: int, events: bool) -> dict[str, Any]:
        """Decode with a clock around the canary's calls, in the steps that are measured."""
        return {} if events else self._decoding(requests, context, new, lambda: Clock(events=False))

    def do_operations(self, *, requests: int, context: int, new: int) -> dict[str, Any]:
        """Decode with a profiler of the device."""
        return {"operations": self._decoding(requests, context, new, DeviceOperations)}

    def do_churn(self, *, requests: int, context: int, new: int, steps: int, host: bool = False) -> dict[str, Any]:
        """Decode while requests end and others come: so many always run, each for `new` tokens, their ends spread."""
        numbers = {self._submit(requests, context, i, 1 + i * new // requests): i for i in range(requests)}
        clock: Clock | None = None
        seen: list[Pass] = []
        arrived = decoded = 0
        while decoded < steps + WARM_UP:
            if host and clock is None and decoded == WARM_UP:
                clock = Clock(events=False)
            seen.append(self._step())
            decoded += seen[-1].decodes is True
            for name in [name for name in numbers if name in self._engine.outputs]:
                del self._engine.outputs[name]
                i = numbers.pop(name)
                numbers[self._submit(requests, context, i, new)] = i
                arrived += 1
        decodes = [step for step in seen if step.decodes]
        first, last = decodes[WARM_UP - 1], decodes[-1]
        answer: dict[str, Any] = {
            "tokens_per_s": sum(step.requests for step in decodes[WARM_UP:]) / ((last.ns - first.ns) / 1e9),
            "step_ms": (last.ns - first.ns) / 1e6 / steps,
            "arrived": arrived,
            **self._collections.within(first.ns, last.ns),
            **self._canary(),
        }
        if clock is not None:
            answer |= clock.stop(steps)
        for name in numbers:
            self._engine.abort(name)
        while self._engine.unfinished:
            self._step()
        self._engine.outputs.clear()
        return answer

    def do_status(self) -> dict[str, Any]:
        """Say what a canary has found; wait for what it has not said yet."""
        return status_of(self._session())

    def _decoding(self, requests: int, context: int, new: int, make: Callable[[], Any]) -> dict[str, Any]:
        """Decode with an instrument from the end of the warm-up on, and return what it says of a step."""
        tools: list[Any] = []
        found: list[dict[str, Any]] = []

        def watch(decoded: int) -> None:
            if decoded == WARM_UP:
                tools.append(make())
            if decoded == new - 4:
                found.append(tools[0].stop(new - 4 - WARM_UP))

        self._serve(requests, context, new, each=watch)
        return found[0]

    def _serve(
        self, requests: int, context: int, new: int, each: Callable[[int], None] = lambda decoded: None
    ) -> _Served:
        """Serve requests to their end; `each` is called behind every decode step."""
        names = [self._submit(requests, context, number, new) for number in range(requests)]
        served, decoded = _Served(passes=[dataclasses.replace(_NOTHING, ns=time.perf_counter_ns())]), 0
        while self._engine.unfinished:
            served.passes.append(self._step())
            if served.passes[-1].decodes:
                decoded += 1
                each(decoded)
        # vLLM names requests anew; what they are called here is the same in every mode.
        served.tokens = {str(i): self._engine.outputs[name] for i, name in enumerate(names)}
        self._engine.outputs.clear()
        return served

    def _step(self) -> Pass:
        """Run one step of the engine."""
        self._scheduled = _NOTHING
        self._engine.step()
        return dataclasses.replace(self._scheduled, ns=time.perf_counter_ns())

    def _watch_schedule(self) -> None:
        """Keep of every step what vLLM's scheduler has scheduled."""
        schedule = self._engine.scheduler.schedule

        def watched(*args: Any, **keywords: Any) -> Any:
            output = schedule(*args, **keywords)
            tokens = output.num_scheduled_tokens
            decodes = bool(tokens) and not output.scheduled_new_reqs and set(tokens.values()) == {1}
            self._scheduled = Pass(ns=0, requests=len(tokens), decodes=decodes)
            return output

        self._engine.scheduler.schedule = watched

    def _submit(self, requests: int, context: int, number: int, new: int) -> str:
        self._count += 1
        generator = torch.Generator().manual_seed((requests * 100003 + context) * 1009 + number)
        prompt = torch.randint(3, self._spec.vocabulary, (context,), generator=generator).tolist()
        name = f"request-{self._count}"
        self._engine.submit(name, prompt, new_tokens=new)
        return name

    def _session(self) -> Any:
        if not self._engine.has_canary:
            return None
        return self._engine.session

    def _canary(self) -> dict[str, Any]:
        return told_by(self._session())
