"""One scheduler in a process of its own, which does what it is told, one thing at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from kv_canary.bench.serving.clocks import Clock, Collections, DeviceOperations
from kv_canary.bench.serving.modes import LEAST_ANSWER
from kv_canary.bench.serving.sharing import Shared, use

# Decode steps before those that are measured.
WARM_UP = 16

# One pass of the scheduler's loop between two yields.
Script = Generator[None, None, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a scheduler is made of.

    Args:
        model: folder of its configuration.
        device: "cuda" or "cpu".
        environment: set before SGLang is imported.
        arguments: of SGLang's `ServerArgs`.
        vocabulary: of which prompts are made.
        log: where its output goes.
        frozen: whether Python's garbage collector leaves alone what is there after the warm-up, as SGLang's HTTP server
            has it; its offline engine has not.
        own_kv: whether its KV is its own where weights are shared.
        cores: on the first of which the scheduler's thread runs, and on the others all others; empty: where they like.
    """

    model: Path
    device: str
    environment: Mapping[str, str]
    arguments: Mapping[str, Any]
    vocabulary: int
    log: Path
    frozen: bool
    own_kv: bool = False
    cores: Sequence[int] = ()


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass of an engine's loop: when it was over, and the batch that it ran, None for none."""

    ns: int
    decodes: bool | None
    requests: int


def serve(spec: Spec, connection: Connection, shared: Shared | None) -> None:
    """Make a scheduler, say so, and do what comes through `connection` until "stop"; the entry of a process."""

    def work() -> None:
        worker = Worker(spec, connection, shared)
        connection.send({"ready": True, **worker.memory()})
        worker.run()

    in_process(work, connection, log=spec.log, environment=spec.environment)


def in_process(
    work: Callable[[], None], connection: Connection, *, log: Path, environment: Mapping[str, str]
) -> NoReturn:
    """Do the work of this process, tell what it raises, and end the process.

    Args:
        work: what is to be done.
        connection: where an error is sent.
        log: where the process's output goes.
        environment: set before.
    """
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    try:
        work()
    except BaseException:
        traceback.print_exc()
        connection.send({"error": traceback.format_exc()[-3000:]})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # An engine's threads would keep it.
        os._exit(0)


class Worker:
    """A scheduler and what is done with it.

    Args:
        spec, connection, shared: see `serve`.
    """

    def __init__(self, spec: Spec, connection: Connection, shared: Shared | None) -> None:
        self._spec, self._connection = spec, connection
        # Tokens that each request was asked for, by its name.
        self._asked: dict[str, int] = {}
        self._prompts: dict[tuple[int, int], list[list[int]]] = {}
        # Rounds of `do_tiers` so far.
        self._turns = 0
        from kv_canary.difftest.stress.sglang import engine, standins

        self._engine = engine
        if spec.device == "cuda":
            standins.use(own_norms=True)
        from sglang.srt.plugins import load_plugins

        load_plugins()
        if spec.device == "cuda":
            from sglang.srt.mem_cache import kv_cache_configurator

            standins.patch()
            # Pools are as large as asked for, whatever else is on the card.
            kv_cache_configurator.KVCacheConfigurator._profile_available_bytes = lambda *_: 1 << 50
            if shared is not None:
                torch.cuda.init()
                use(shared, own_kv=spec.own_kv)
        self._scheduler = engine.start_scheduler(spec.model, **spec.arguments)
        channels = self._scheduler.ipc_channels
        for sender in (channels.send_to_tokenizer, channels.send_to_detokenizer):
            sender.socket = None
        self._collections = Collections()

    def memory(self) -> dict[str, float]:
        """Return what PyTorch has allocated on the device, in MB."""
        if self._spec.device == "cpu":
            return {}
        return {"allocated_mb": torch.cuda.memory_allocated() / 1e6, "reserved_mb": torch.cuda.memory_reserved() / 1e6}

    def run(self) -> None:
        """Run the scheduler's own loop, as long as there is something to do."""
        steps = self._obey()

        def ingest(*_: Any, **__: Any) -> list[Any]:
            # The loop looks at it where a pass begins.
            self._scheduler.gracefully_exit = next(steps, "over") == "over"
            return []

        self._scheduler.ingest_requests = ingest
        self._scheduler.run_event_loop()

    def _obey(self) -> Generator[None, None, None]:
        while (command := self._connection.recv())["do"] != "stop":
            # Threads that came since are pinned like the others.
            _pin(self._spec.cores)
            do = getattr(self, f"do_{command.pop('do')}")
            self._connection.send((yield from do(**command)))

    def do_settle(self) -> Script:
        """Leave alone what is there by now, where that is asked for."""
        if self._spec.frozen:
            gc.collect()
            gc.freeze()
        yield
        return {}

    def do_prefill(self, *, requests: int, context: int, operations: bool = False, host: bool = False) -> Script:
        """Prefill prompts that are not cached."""
        self._flush()
        seen = DeviceOperations() if operations else None
        clock = Clock(events=self._spec.device == "cuda") if host else None
        _, passes = yield from self._serve(requests, context, 1)
        answer: dict[str, Any] = {"tokens_per_s": requests * context / ((passes[-1].ns - passes[0].ns) / 1e9)}
        forwards = sum(p.decodes is False for p in passes)
        if seen is not None:
            answer["operations"] = seen.stop(forwards)
        if clock is not None:
            answer |= clock.stop(forwards)
        return answer

    def do_load(self, *, requests: int, context: int) -> Script:
        """Bring prompts into the prefix cache."""
        return (yield from self.do_prefill(requests=requests, context=context))

    def do_decode(self, *, requests: int, context: int, new: int) -> Script:
        """Decode a batch whose prompts are cached."""
        reqs, passes = yield from self._serve(requests, context, new)
        pairs = window(passes, requests)
        took = [(b.ns - a.ns) / 1e6 for a, b in pairs]
        seconds = (pairs[-1][1].ns - pairs[0][0].ns) / 1e9
        return {
            "tokens_per_s": requests * len(pairs) / seconds,
            "step_ms": statistics.median(took),
            "longest_step_ms": max(took),
            **self._collections.within(pairs[0][0].ns, pairs[-1][1].ns),
            "tokens_sha": digest([list(r.output_ids) for r in reqs]),
            **self.memory(),
            **self._canary(),
        }

    def do_churn(self, *, requests: int, context: int, new: int, steps: int, host: bool = False) -> Script:
        """Decode while requests end and others come: so many always run, each for `new` tokens, their ends spread."""
        running = dict(enumerate(self._submit(requests, context, [1 + i * new // requests for i in range(requests)])))
        clock: Clock | None = None
        passes: list[Pass] = []
        arrived = decoded = 0
        while decoded < steps + WARM_UP:
            if host and clock is None and decoded == WARM_UP:
                clock = Clock(events=False)
            yield
            passes.append(self._passed())
            decoded += passes[-1].decodes is True
            for i in [i for i, req in running.items() if req.finished()]:
                running[i] = self._submit(requests, context, new, only=i)[0]
                arrived += 1
        decodes = [p for p in passes if p.decodes]
        first, last = decodes[WARM_UP - 1], decodes[-1]
        answer: dict[str, Any] = {
            "tokens_per_s": sum(p.requests for p in decodes[WARM_UP:]) / ((last.ns - first.ns) / 1e9),
            "step_ms": (last.ns - first.ns) / 1e6 / steps,
            "arrived": arrived,
            **self._collections.within(first.ns, last.ns),
            **self._canary(),
        }
        if clock is not None:
            answer |= clock.stop(steps)
        from sglang.srt.managers.io_struct import AbortReq

        self._scheduler.process_input_requests([AbortReq(rid="", abort_all=True)])
        while self._scheduler.last_batch is not None or not self._scheduler.is_fully_idle():
            yield
        return answer

    def do_tiers(
        self, *, requests: int, documents: int, context: int, longest: int = LEAST_ANSWER, host: bool = False
    ) -> Script:
        """Serve every document once, so many at a time, in an order of the round's own, each with an end of its own.

        Four fifths of a prompt are the document's, so that they may be cached, on the device or behind it. Answers are
        of `LEAST_ANSWER` to `longest` tokens: where all are of one length, requests come and end together.
        """
        self._turns += 1
        generator = torch.Generator().manual_seed(self._turns)
        kept = context * 4 // 5
        waiting = [
            [*self._drawn(documents, kept)[number], *self._tokens(generator, context - kept)]
            for number in torch.randperm(documents, generator=generator).tolist()
        ]
        answers = torch.randint(LEAST_ANSWER, longest + 1, (documents,), generator=generator).tolist()
        clock = Clock(events=self._spec.device == "cuda") if host else None
        served: list[Any] = []
        running: list[Any] = []
        steps, began = 0, time.perf_counter_ns()
        while waiting or running:
            while waiting and len(running) < requests:
                running += self._hand_in([waiting.pop()], [answers[len(waiting)]])
            yield
            steps += self._scheduler.last_batch is not None
            served += [req for req in running if req.finished()]
            running = [req for req in running if not req.finished()]
        seconds = (time.perf_counter_ns() - began) / 1e9
        self._expect_answered(served)
        answer: dict[str, Any] = {
            "tokens_per_s": (documents * context + sum(answers)) / seconds,
            "hit": sum(req.cached_tokens for req in served) / (documents * context),
            "tokens_sha": digest(sorted(list(req.output_ids) for req in served)),
            **self._canary(),
        }
        if clock is not None:
            answer |= clock.stop(steps)
        while self._scheduler.last_batch is not None or not self._scheduler.is_fully_idle():
            yield
        return answer

    def do_host(self, *, requests: int, context: int, new: int, events: bool) -> Script:
        """Decode with a clock around the canary's calls, until requests end: what they take then is in `do_churn`."""
        clock: list[Clock] = []
        found: list[dict[str, Any]] = []

        def watch(decoded: int) -> None:
            if decoded == WARM_UP:
                clock.append(Clock(events=events))
            if decoded == new - 4:
                found.append(clock[0].stop(new - 4 - WARM_UP))

        yield from self._serve(requests, context, new, each=watch)
        return found[0]

    def do_operations(self, *, requests: int, context: int, new: int) -> Script:
        """Decode with a profiler of the device."""
        seen: list[DeviceOperations] = []
        found: list[dict[str, Any]] = []

        def watch(decoded: int) -> None:
            if decoded == WARM_UP:
                seen.append(DeviceOperations())
            if decoded == new - 4:
                found.append(seen[0].stop(new - 4 - WARM_UP))

        yield from self._serve(requests, context, new, each=watch)
        return {"operations": found[0]}

    def do_sums(self, *, requests: int, context: int) -> Script:
        """Sum up KV of the first and the last layer, of prompts that are cached."""
        reqs = self._submit(requests, context, 6)
        yield
        while not all(len(r.output_ids) > 2 for r in reqs):
            yield
        pool, table = self._scheduler.tp_worker.model_runner.token_to_kv_pool, self._scheduler.req_to_token_pool
        rows = torch.tensor([r.kv.req_pool_idx for r in reqs], device=table.req_to_token.device)
        slots = table.req_to_token[rows, :context].reshape(-1).long()
        sums = [
            float(layer[slots].double().abs().sum())
            for half in (pool.k_buffer, pool.v_buffer)
            for layer in half[:: max(len(half) - 1, 1)]
        ]
        while not (self._scheduler.last_batch is None and all(r.finished() for r in reqs)):
            yield
        return {"kv_sums": sums, "slots_sha": digest(slots.tolist())}

    def do_status(self) -> Script:
        """Say what a canary has found; wait for what it has not said yet."""
        yield
        return status_of(_session())

    def _serve(
        self, requests: int, context: int, new: int, each: Any = None
    ) -> Generator[None, None, tuple[list[Any], list[Pass]]]:
        """Serve requests to their end; return them and the passes, the first of which is before anything ran."""
        reqs = self._submit(requests, context, new)
        passes, decoded = [Pass(ns=time.perf_counter_ns(), decodes=None, requests=0)], 0
        while True:
            yield
            passes.append(self._passed())
            decoded += passes[-1].decodes is True
            if each is not None and passes[-1].decodes:
                each(decoded)
            if self._scheduler.last_batch is None and all(r.finished() for r in reqs):
                self._expect_answered(reqs)
                return reqs, passes

    def _passed(self) -> Pass:
        batch = self._scheduler.last_batch
        decodes = None if batch is None else bool(batch.forward_mode.is_decode())
        return Pass(ns=time.perf_counter_ns(), decodes=decodes, requests=0 if batch is None else len(batch.reqs))

    def _submit(self, requests: int, context: int, new: int | list[int], *, only: int | None = None) -> list[Any]:
        prompts = self._drawn(requests, context)
        numbers = range(requests) if only is None else [only]
        lengths = [new if isinstance(new, int) else new[number] for number in numbers]
        return self._hand_in([prompts[number] for number in numbers], lengths)

    def _drawn(self, requests: int, context: int) -> list[list[int]]:
        """Return prompts that are the same whenever they are asked for."""
        prompts = self._prompts.get((requests, context))
        if prompts is None:
            generator = torch.Generator().manual_seed(requests * 100003 + context)
            drawn = torch.randint(3, self._spec.vocabulary, (requests, context), generator=generator)
            prompts = self._prompts[requests, context] = drawn.tolist()
        return prompts

    def _tokens(self, generator: torch.Generator, count: int) -> list[int]:
        tokens: list[int] = torch.randint(3, self._spec.vocabulary, (count,), generator=generator).tolist()
        return tokens

    def _hand_in(self, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Any]:
        """Queue requests, each for so many new tokens."""
        messages = []
        for prompt, length in zip(prompts, lengths, strict=True):
            name = f"request {len(self._asked) + 1}"
            self._asked[name] = length
            messages.append(self._engine.message(name, array("q", prompt), new_tokens=length))
        before = len(self._scheduler.waiting_queue)
        self._scheduler.process_input_requests(messages)
        return list(self._scheduler.waiting_queue[before:])

    def _expect_answered(self, reqs: Sequence[Any]) -> None:
        """See that requests were answered as they were asked: one that is refused ends as well, and at once.

        Raises:
            RuntimeError: one was not.
        """
        for req in reqs:
            asked, answered, why = self._asked[req.rid], len(req.output_ids), req.finished_reason.to_json()
            if answered != asked or why["type"] != "length":
                expected = f"{req.rid} must be answered with {asked} tokens"
                raise RuntimeError(f"kv-canary: bench: {expected}, got {answered} ({why})")

    def _flush(self) -> None:
        if not self._scheduler.flush_cache(empty_cache=False):
            raise RuntimeError("kv-canary: bench: the prefix cache must be flushed, got a scheduler that is not idle")

    def _canary(self) -> dict[str, Any]:
        return told_by(_session())


def _pin(cores: Sequence[int]) -> None:
    """Let this thread run on the first core, and the process's others on the others: one core is not like the next."""
    if len(cores) > 1:
        for thread in map(int, os.listdir("/proc/self/task")):
            # It may have ended.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread, cores[:1] if thread == threading.get_native_id() else cores[1:])


def _session() -> Any:
    module = sys.modules.get("kv_canary.engines.sglang.session")
    return None if module is None else module._current  # type: ignore[attr-defined]


def told_by(session: Any) -> dict[str, Any]:
    """Return what the canary of an engine's session says of itself, JSON-ready; nothing where there is none."""
    if session is None:
        return {}
    summary = session.manager.summary()
    return {
        "guard_us": None if summary.cost is None else summary.cost.host_us,
        "stride": summary.stride,
        "relied_on": summary.positions_relied_on,
        "verified": summary.positions_verified,
        "violations": summary.violations,
        "writes": None if summary.writes is None else dataclasses.asdict(summary.writes),
    }


def status_of(session: Any) -> dict[str, Any]:
    """Return the same and what has failed, once what was launched is told."""
    if session is None:
        return {"failures": {}}
    session.manager.flush()
    return {**told_by(session), "failures": dict(session.manager.guard.failures)}


def window(passes: Sequence[Pass], requests: int) -> list[tuple[Pass, Pass]]:
    """Return each decode of the whole batch with the pass before it, less those of the warm-up and the last two."""
    whole = [(a, b) for a, b in itertools.pairwise(passes) if b.decodes and b.requests == requests]
    found = whole[WARM_UP:-2]
    if len(found) < 3:
        raise RuntimeError(f"kv-canary: bench: decode steps must be at least {WARM_UP + 5}, got {len(whole)}")
    return found


def digest(values: Any) -> str:
    """Return a hash of what JSON can hold."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
