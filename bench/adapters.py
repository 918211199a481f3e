"""The host time that an adapter takes of an engine that decodes, in microseconds a step, on a CPU without a GPU.

A real engine and a tiny model. HEAD and TAIL do nothing but say that they were there, where a GPU would replay a graph:
what is timed is what the canary does between launches, and PyTorch's own calls on a CPU, where seals are off. So the
engines' adapters can be held against each other, and one version against another; what a GPU's host takes, only
`kv-canary bench engine` says.

Batches: "decode" is the same requests at every step; in "churn" one ends and another one comes every other step.
Run, in the environment of the engine: `python -P -m kv_canary.bench.adapters --engine vllm --json adapters_host.json`
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import statistics
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

# Of a prompt; tokens that a request decodes at least; steps before those that are timed, and timed ones.
PROMPT, LONGEST, WARM_UP, TIMED = 24, 500, 40, 120
# Seconds for one measurement.
PATIENCE = 900.0
KIND = "adapters_host"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Args:
        engine: whose adapter it is, with the version of its model runner.
        batch: "decode" or "churn".
        requests: that run at a time.
        host_us, p90_us: of a step, the median and what nine of ten steps stay below.
        repeated: share of the decode steps that repeated the one before.
    """

    engine: str
    batch: str
    requests: int
    host_us: float
    p90_us: float
    repeated: float


class Driver(ABC):
    """A real engine with a canary, one step at a time.

    Args:
        requests: that run at a time.
        folder: for the model.
    """

    name: str

    @abstractmethod
    def __init__(self, requests: int, folder: Path) -> None: ...

    @abstractmethod
    def submit(self, number: int, new_tokens: int) -> None:
        """Queue a request."""

    @abstractmethod
    def step(self) -> bool:
        """Run one step; return whether all of it was decoding."""

    @property
    def filled_ns(self) -> int:
        """Nanoseconds of what stands for the engine inside the canary's calls, so far."""
        return 0

    @abstractmethod
    def session(self) -> Any:
        """Return the canary's session."""

    def failures(self) -> dict[str, int]:
        """Return what has failed inside the canary, and what it has found."""
        manager = self.session().manager
        manager.flush()
        summary = manager.summary()
        found = {"violations": summary.violations, "skipped": summary.skipped, **manager.guard.failures}
        return {name: count for name, count in found.items() if count}

    @abstractmethod
    def close(self) -> None:
        """End the engine."""


class VllmDriver(Driver):
    """vLLM with model runner V1."""

    name = "vllm V1"

    def __init__(self, requests: int, folder: Path) -> None:
        from kv_canary.difftest.stress.vllm import engine

        os.environ.update(engine.ONE_THREAD)
        self._engine = engine.Engine(
            engine.save_model(folder / "vllm", num_hidden_layers=1),
            canary={},
            max_num_seqs=requests,
            max_num_batched_tokens=2048,
            max_model_len=LONGEST + 2 * PROMPT,
            num_gpu_blocks_override=requests * (LONGEST // engine.BLOCK + 3) + 8,
            kv_cache_memory_bytes=1 << 30,
        )
        self._decodes = False
        schedule = self._engine.scheduler.schedule

        def seen(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self._decodes = 0 < output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
            self._decodes &= not output.scheduled_new_reqs
            return output

        self._engine.scheduler.schedule = seen

    def submit(self, number: int, new_tokens: int) -> None:
        self._engine.submit(f"r{number}", _prompt(number), new_tokens=new_tokens)

    def step(self) -> bool:
        self._engine.step()
        return self._decodes

    def session(self) -> Any:
        return self._engine.session

    def close(self) -> None:
        self._engine.close()


class SglangDriver(Driver):
    """SGLang without overlap, its decodes as where a graph is replayed."""

    name = "sglang"

    def __init__(self, requests: int, folder: Path) -> None:
        from kv_canary.demo.models import save_tiny_model
        from kv_canary.difftest.stress.sglang import engine, replayed
        from kv_canary.engines.sglang import graphs

        os.environ["KV_CANARY_MODE"] = "log"
        mock.patch.object(graphs, "Graphs", replayed.Graphs).start()
        self._steps = engine
        self._scheduler = engine.build_scheduler(
            Path(save_tiny_model(folder / "sglang", "llama", num_hidden_layers=1)),
            max_running_requests=requests,
            chunked_prefill_size=2048,
            max_total_tokens=requests * (LONGEST + 2 * PROMPT) + 64,
        )
        self._graphs: Any = self.session()._graphs

    def submit(self, number: int, new_tokens: int) -> None:
        self._steps.submit(self._scheduler, f"r{number}", _prompt(number), new_tokens=new_tokens)

    def step(self) -> bool:
        batch = self._steps.step(self._scheduler)
        return batch is not None and bool(batch.forward_mode.is_decode())

    @property
    def filled_ns(self) -> int:
        filled: int = self._graphs.ns
        return filled

    def session(self) -> Any:
        from kv_canary.engines.sglang import session

        return session.current()

    def close(self) -> None:
        self.session().close()


DRIVERS: dict[str, type[Driver]] = {"vllm": VllmDriver, "sglang": SglangDriver}


def measure(engine: str, batch: str, requests: int, folder: Path) -> dict[str, Any]:
    """Return what the adapter of an engine takes of a step; the only engine of this process.

    Raises:
        RuntimeError: the canary was not at work in every step.
    """
    from kv_canary.bench.serving.clocks import Clock
    from kv_canary.runtime.context import CanaryContext
    from kv_canary.runtime.forward import SingleForwardManager
    from kv_canary.runtime.replays import Replays

    repeated, repeat = [0], SingleForwardManager.repeat

    def counted(self: Any, *args: Any, **kwargs: Any) -> bool:
        repeats = repeat(self, *args, **kwargs)
        repeated[0] += repeats
        return repeats

    # The process is this measurement's alone.
    mock.patch.object(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch)).start()  # noqa: PT008
    mock.patch.object(SingleForwardManager, "_launch_head", _count_head).start()
    mock.patch.object(SingleForwardManager, "_launch_tail", _count_tail).start()
    mock.patch.object(SingleForwardManager, "repeat", counted).start()
    driver = DRIVERS[engine](requests, folder)
    churns = batch == "churn"
    spread = random.Random(0)
    for number in range(requests):
        # Of those that come one by one each lives as long as it takes until all others have come, too.
        driver.submit(number, spread.randrange(20, 2 * requests) if churns else LONGEST)
    count = requests
    # As an engine that serves has it, lest its own garbage be counted as the canary's.
    gc.collect()
    gc.freeze()
    clock, took, before, decodes, filled = Clock(events=False), list[float](), 0, 0, 0
    for number in range(10_000):
        at, calls, first, was = clock.ns, clock.calls, repeated[0], driver.filled_ns
        is_decode = driver.step()
        if churns and number % 2:
            driver.submit(count, 2 * requests)
            count += 1
        before += is_decode
        if not is_decode and not churns:
            continue
        if before > WARM_UP:
            if clock.calls == calls:
                raise RuntimeError("kv-canary: bench: the canary must be called at every step, got a step without")
            took.append((clock.ns - at - (driver.filled_ns - was)) / 1000)
            decodes += is_decode
            filled += is_decode and repeated[0] - first
        if len(took) == TIMED:
            break
    clock.stop(len(took))
    if failures := driver.failures():
        raise RuntimeError(f"kv-canary: bench: nothing must fail in the canary, got {failures}")
    driver.close()
    if len(took) < TIMED:
        raise RuntimeError(f"kv-canary: bench: {TIMED} steps must be timed, got {len(took)}")
    row = Row(
        engine=driver.name,
        batch=batch,
        requests=requests,
        host_us=round(statistics.median(took), 1),
        p90_us=round(statistics.quantiles(took, n=10)[-1], 1),
        repeated=round(filled / max(decodes, 1), 2),
    )
    return asdict(row)


def _count_head(forward: Any) -> None:
    """Stand for HEAD."""
    for group in forward.groups:
        forward.context.state.counters[group.head_tag, 0].add_(1)


def _count_tail(forward: Any) -> None:
    """Stand for TAIL, which is two launches of a group."""
    for group in forward.groups:
        forward.context.state.counters[group.tail_tag, 0].add_(2)


def _prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 900) for _ in range(PROMPT)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every batch in a process of its own, print a table, and add the rows to the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(DRIVERS), required=True, help="whose adapter")
    parser.add_argument("--requests", default="64,256", help="by commas")
    parser.add_argument("--json", type=Path, help="where the rows go; rows of other engines that it has stay")
    arguments = parser.parse_args(argv)
    os.environ.update({"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"})
    from rich.console import Console
    from rich.table import Table

    from kv_canary.commands.facts import facts
    from kv_canary.difftest.stress.processes import in_fork

    table = Table("adapter", "batch", "requests", "host us", "p90", "repeated", title="Host time of a step")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for batch in ("decode", "churn"):
            for requests in map(int, arguments.requests.split(",")):
                work = functools.partial(measure, arguments.engine, batch, requests, Path(name))
                row = in_fork(work, patience=PATIENCE)
                if "error" in row:
                    raise SystemExit(f"kv-canary: bench: {row['error']}")
                rows.append(row)
                told = (f"{row['host_us']:.0f}", f"{row['p90_us']:.0f}", f"{row['repeated']:.0%}")
                table.add_row(row["engine"], batch, str(requests), *told)
    Console(file=sys.stderr).print(table)
    if arguments.json:
        known = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.exists() else {"rows": []}
        kept = [row for row in known["rows"] if row["engine"].split()[0] != arguments.engine]
        result = {**facts("cpu", kind=KIND), "rows": kept + rows}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
