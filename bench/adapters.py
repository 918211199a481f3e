"""`kv-canary bench adapters`: the host time that an adapter takes of an engine that decodes, on a CPU without a GPU.

A real engine and a tiny model. HEAD, TAIL and what marks freed slots do nothing but one small operation, where a GPU
would replay a graph: what is timed is what the canary does between launches, and PyTorch's own calls on a CPU, where
seals are off. So the engines' adapters can be held against each other, and one version against another; what a GPU's
host takes, only `kv-canary bench engine` says.

Batches: "decode" is the same requests at every step; in "churn" one ends and another one comes every other step; in
"drafts", with SGLang and vLLM, the same requests are decoded with drafts, which go by unwatched: a step is the target's
forward and what a draft model writes behind it.

Caches: with a tiny model a step is short, so that the canary finds the CPU's caches as it has left them, more so beside
one engine than beside another. A large one leaves nothing there. So every batch is measured a second time, with more
memory read before each of the canary's calls than caches hold.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import os
import random
import statistics
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click

from kv_canary.commands.paths import OUT_FILE

# Of a prompt; tokens that a request decodes at least; steps before those that are timed, and timed ones.
PROMPT, LONGEST, WARM_UP, TIMED = 24, 500, 40, 120
# Bytes that are more than a CPU's caches hold.
EVICTING = 256 << 20
BATCHES = ("decode", "churn", "drafts")
# Seconds for one measurement.
PATIENCE = 900.0
KIND = "adapters_host"
# What of a row says what was measured.
WHAT = ("engine", "batch", "requests", "caches")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Args:
        engine: whose adapter it is, with the version of its model runner.
        batch: "decode", "churn" or "drafts".
        requests: that run at a time.
        caches: "warm", as the engine has left them, or "cold".
        host_us, p90_us, mean_us: of a step, the median, what nine of ten steps stay below, and the mean.
        tokens: that a step yields, on average; fewer where an engine begins requests in steps of their own, so that
            times of a token are to be compared there, not of a step.
        repeated: share of the decode steps that repeated the one before.
    """

    engine: str
    batch: str
    requests: int
    caches: str
    host_us: float
    p90_us: float
    mean_us: float
    tokens: float
    repeated: float


class Driver(ABC):
    """A real engine with a canary, one step at a time.

    Args:
        requests: that run at a time.
        folder: for the model.

    Attributes:
        tokens: that the last step has yielded.
        longest: tokens that a request may decode.
        steps_for_one: steps of other engines for one of this, where one takes seconds.
    """

    name: str
    tokens: int = 0
    longest: int = LONGEST
    steps_for_one: int = 1

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
        model = engine.save_model(folder / "vllm", num_hidden_layers=1)
        more = self._arguments(model)
        self._engine = engine.Engine(
            model,
            canary={},
            max_num_seqs=requests,
            max_num_batched_tokens=2048,
            max_model_len=self.longest + 2 * PROMPT,
            num_gpu_blocks_override=requests * (self.longest // engine.BLOCK + 3) + 8,
            kv_cache_memory_bytes=1 << 30,
            **more,
        )
        self._decodes = False
        schedule = self._engine.scheduler.schedule

        def seen(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            self._decodes = 0 < output.total_num_scheduled_tokens - drafts == len(output.num_scheduled_tokens)
            self._decodes &= not output.scheduled_new_reqs
            self.tokens = len(output.num_scheduled_tokens)
            return output

        self._engine.scheduler.schedule = seen

    def _arguments(self, model: str) -> dict[str, Any]:
        """Return what else the engine is given for a model."""
        return {}

    def submit(self, number: int, new_tokens: int) -> None:
        self._engine.submit(f"r{number}", _prompt(number), new_tokens=new_tokens)

    def step(self) -> bool:
        self._engine.step()
        return self._decodes

    def session(self) -> Any:
        return self._engine.session

    def close(self) -> None:
        self._engine.close()


class VllmDraftsDriver(VllmDriver):
    """vLLM with model runner V1 and a draft model, whose drafts are mostly right."""

    longest = 4 * LONGEST
    # Its kernels for drafts run in Triton's interpreter.
    steps_for_one = 5

    def _arguments(self, model: str) -> dict[str, Any]:
        from kv_canary.difftest.stress.vllm import engine

        return {"speculative_config": engine.drafts_of("draft_model", model)}

    def step(self) -> bool:
        before, outputs = sum(map(len, self._engine.outputs.values())), self._engine.outputs
        decodes = super().step()
        self.tokens = sum(map(len, outputs.values())) - before
        return decodes


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
            max_total_tokens=requests * (self.longest + 2 * PROMPT) + 64,
        )
        self._graphs: Any = self.session()._graphs

    def submit(self, number: int, new_tokens: int) -> None:
        self._steps.submit(self._scheduler, f"r{number}", _prompt(number), new_tokens=new_tokens)

    def step(self) -> bool:
        batch = self._steps.step(self._scheduler)
        self.tokens = 0 if batch is None else batch.batch_size()
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


class SglangDraftsDriver(SglangDriver):
    """SGLang with EAGLE, its drafts as where a graph makes them; once texts repeat themselves, many are right."""

    longest = 4 * LONGEST

    def __init__(self, requests: int, folder: Path) -> None:
        from kv_canary.difftest.stress.sglang import drafts, engine
        from kv_canary.engines.sglang import session, speculative

        os.environ |= {"KV_CANARY_MODE": "log", "SGLANG_ON_CPU": "speculative"}
        forward = session.Session.forward

        def watched(its: Any, original: Any, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            if speculative.is_draft(batch):
                return original(runner, batch, *args, **kwargs)
            return forward(its, original, runner, batch, *args, **kwargs)

        mock.patch.object(session.Session, "forward", watched).start()
        target, draft = drafts.save_models(folder)
        self._steps = engine
        self._scheduler = engine.build_scheduler(
            Path(target),
            max_running_requests=requests,
            chunked_prefill_size=2048,
            max_total_tokens=requests * (self.longest + 2 * PROMPT) + 64,
            **drafts.arguments(draft),
        )

    def step(self) -> bool:
        reqs = list(self._scheduler.running_batch.reqs)
        before = sum(len(req.output_ids) for req in reqs)
        decodes = super().step()
        self.tokens = sum(len(req.output_ids) for req in reqs) - before
        return decodes

    @property
    def filled_ns(self) -> int:
        return 0


class TransformersDriver(Driver):
    """transformers' continuous batching, one batch at a time."""

    def __init__(self, requests: int, folder: Path) -> None:
        import torch
        import transformers

        from kv_canary.config import CanaryConfig
        from kv_canary.demo.models import tiny_model
        from kv_canary.demo.serving import PAGE_SIZE, batching_config
        from kv_canary.engines.transformers import install

        torch.set_num_threads(1)
        self.name = f"transformers {transformers.__version__}"
        self._model = tiny_model("llama", num_hidden_layers=1)
        self._manager = self._model.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=batching_config(
                num_blocks=requests * ((LONGEST + PROMPT) // PAGE_SIZE + 3),
                max_batch_tokens=2048,
                max_requests_per_batch=requests,
            ),
        )
        self._canary = install(self._manager, config=CanaryConfig())
        self._manager.warmup()
        self._processor: Any = self._manager.batch_processor

    def submit(self, number: int, new_tokens: int) -> None:
        self._manager.add_request(_prompt(number), request_id=f"r{number}", max_new_tokens=new_tokens, eos_token_id=-1)

    def step(self) -> bool:
        import torch

        processor, self.tokens = self._processor, 0
        with torch.no_grad():
            if not processor.prepare_next_batch():
                return False
            futures = processor.inputs_and_outputs.requests_in_batch
            self.tokens, decodes = len(futures), all(future.query_length == 1 for future in futures)
            processor._generation_step(self._model)
            processor.update_batch()
        return decodes

    def session(self) -> Any:
        return self._canary._newest()

    def failures(self) -> dict[str, int]:
        return super().failures() | dict(self._canary.guard.failures)

    def close(self) -> None:
        self._canary.uninstall()


def _counts(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"must be numbers by commas, got {text!r}") from None


DRIVERS: dict[str, type[Driver]] = {"vllm": VllmDriver, "sglang": SglangDriver, "transformers": TransformersDriver}
DRAFTS: dict[str, type[Driver]] = {"vllm": VllmDraftsDriver, "sglang": SglangDraftsDriver}


def measure(engine: str, batch: str, requests: int, folder: Path, *, caches: str = "warm") -> dict[str, Any]:
    """Return what the adapter of an engine takes of a step; the only engine of this process.

    Args:
        engine, batch, requests, caches: see `Row`.
        folder: for the model.

    Raises:
        RuntimeError: the canary was not at work in every step.
    """
    from kv_canary import ops
    from kv_canary.bench.serving import clocks
    from kv_canary.runtime.context import CanaryContext
    from kv_canary.runtime.forward import SingleForwardManager
    from kv_canary.runtime.replays import Replays
    from kv_canary.runtime.retirement import Retirement

    repeated, repeat = [0], SingleForwardManager.repeat

    def counted(self: Any, *args: Any, **kwargs: Any) -> bool:
        repeats = repeat(self, *args, **kwargs)
        repeated[0] += repeats
        return repeats

    # The process is this measurement's alone.
    mock.patch.object(CanaryContext, "new_replays", lambda _: Replays(lambda launch: launch)).start()  # noqa: PT008
    mock.patch.object(SingleForwardManager, "_launch_head", _count_head).start()
    mock.patch.object(SingleForwardManager, "_opened_head", lambda forward, *_: lambda: _count_head(forward)).start()
    mock.patch.object(SingleForwardManager, "_launch_tail", _count_tail).start()
    mock.patch.object(Retirement, "_launch", _mark_nothing).start()
    for op in ("chain_tails", "scatter_token_ids"):
        mock.patch.object(ops, op, _bring_up_nothing).start()
    mock.patch.object(SingleForwardManager, "repeat", counted).start()
    driver = (DRAFTS if batch == "drafts" else DRIVERS)[engine](requests, folder)
    churns, warm_up, timed = batch == "churn", WARM_UP // driver.steps_for_one, TIMED // driver.steps_for_one
    spread = random.Random(0)
    for number in range(requests):
        # Of those that come one by one each lives as long as it takes until all others have come, too.
        driver.submit(number, spread.randrange(20, 2 * requests) if churns else driver.longest)
    count = requests
    # As an engine that serves has it, lest its own garbage be counted as the canary's.
    gc.collect()
    gc.freeze()
    clock = _cold(clocks.Clock)(events=False) if caches == "cold" else clocks.Clock(events=False)
    took, before, decodes, filled, tokens = list[float](), 0, 0, 0, 0
    for number in range(10_000):
        at, calls, first, was = clock.ns, clock.calls, repeated[0], driver.filled_ns
        is_decode = driver.step()
        if churns and number % 2:
            driver.submit(count, 2 * requests)
            count += 1
        before += is_decode
        if not is_decode and not churns:
            continue
        if before > warm_up:
            if clock.calls == calls:
                raise RuntimeError("kv-canary: bench: the canary must be called at every step, got a step without")
            took.append((clock.ns - at - (driver.filled_ns - was)) / 1000)
            tokens += driver.tokens
            decodes += is_decode
            filled += is_decode and repeated[0] - first
        if len(took) == timed:
            break
    clock.stop(len(took))
    if failures := driver.failures():
        raise RuntimeError(f"kv-canary: bench: nothing must fail in the canary, got {failures}")
    driver.close()
    if len(took) < timed:
        raise RuntimeError(f"kv-canary: bench: {timed} steps must be timed, got {len(took)}")
    row = Row(
        engine=driver.name,
        batch=batch,
        requests=requests,
        caches=caches,
        host_us=round(statistics.median(took), 1),
        p90_us=round(statistics.quantiles(took, n=10)[-1], 1),
        mean_us=round(statistics.mean(took), 1),
        tokens=round(tokens / len(took), 1),
        repeated=round(filled / max(decodes, 1), 2),
    )
    return asdict(row)


def _cold(clock: type[Any]) -> type[Any]:
    """Return a clock of a kind before whose calls a CPU's caches hold nothing of them."""
    import numpy as np

    memory = np.zeros(EVICTING // 8, np.int64)

    class Cold(clock):  # type: ignore[misc]
        def _timed(self, original: Callable[..., Any], *, events: bool) -> Callable[..., Any]:
            timed = super()._timed(original, events=events)

            @functools.wraps(original)
            def evicted(*args: Any, **kwargs: Any) -> Any:
                np.add(memory, 1, out=memory)
                return timed(*args, **kwargs)

            return evicted  # type: ignore[no-any-return]

    return Cold


def _count_head(forward: Any) -> None:
    """Stand for HEAD."""
    for group in forward.groups:
        forward.context.state.counters[group.head_tag, 0].add_(1)


def _count_tail(forward: Any) -> None:
    """Stand for TAIL, which is two launches of a group."""
    for group in forward.groups:
        forward.context.state.counters[group.tail_tag, 0].add_(2)


def _bring_up_nothing(*, status: Any, **_: Any) -> None:
    """Stand for what brings up rows before HEAD."""
    status.add_(0)


def _mark_nothing(retirement: Any, *_: Any) -> None:
    """Stand for the launch that marks freed slots."""
    retirement._context.state.step.add_(0)


def _prompt(number: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(3, 900) for _ in range(PROMPT)]


@click.command()
@click.option("--engine", type=click.Choice(sorted(DRIVERS)), required=True, help="Whose adapter.")
@click.option(
    "--requests", default="64,256", show_default=True, callback=_counts, help="That run at a time, by commas."
)
@click.option(
    "--batch",
    "chosen",
    type=click.Choice(BATCHES),
    multiple=True,
    help="This alone, and others that are given so; without any: all that there are.",
)
@click.option(
    "--json",
    "json_path",
    type=OUT_FILE,
    help="Add the rows here; those of other engines that it has stay.",
)
def adapters(engine: str, requests: tuple[int, ...], chosen: tuple[str, ...], json_path: Path | None) -> None:
    """Time what an adapter takes of the engine's thread in a step, on a CPU, with launches that do nothing.

    A real engine serves a tiny model in a process of its own for each batch: decode is the same requests at every step;
    in churn one ends and another one comes every other step; with SGLang and vLLM also with a draft model. What a GPU's
    host takes, only `kv-canary bench engine` says: here one adapter is held against another, and a version against the
    one before.

    \b
    host us     microseconds of a step, the median
    p90         what nine of ten steps stay below
    us a token  those of a step on average, by the tokens that it yields:
                engines that begin requests in steps of their own have
                more steps
    caches      as a tiny model leaves the CPU's, or cold, as a large one does
    repeated    share of the decode steps that only sent new numbers

    \b
    Examples, each in the environment of its engine, with nothing else running:
      kv-canary bench adapters --engine sglang --json adapters_host.json
      kv-canary bench adapters --engine vllm --requests 256 \\
        --json adapters_host.json
    """
    if importlib.util.find_spec(engine) is None:
        raise click.UsageError(f"{engine} is not installed here")
    if importlib.util.find_spec("kv_canary.difftest.stress") is None:
        raise click.UsageError("adapters needs a checkout of kv-canary: an installed package does not hold its engines")
    if "drafts" in chosen and engine not in DRAFTS:
        raise click.UsageError(f"drafts are timed with {' and '.join(sorted(DRAFTS))}, not with {engine}")
    os.environ.update({"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"})
    from rich.console import Console
    from rich.table import Table

    from kv_canary.commands.facts import facts
    from kv_canary.difftest.stress.processes import in_fork

    columns = ("adapter", "batch", "requests", "caches", "host us", "p90", "us a token", "repeated")
    table = Table(*columns, title="Host time of a step")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        batches = chosen or (BATCHES if engine in DRAFTS else BATCHES[:2])
        for batch, count, caches in itertools.product(batches, requests, ("warm", "cold")):
            click.echo(f"{engine}: {batch}, {count} requests, {caches} caches", err=True)
            lived = functools.partial(measure, engine, batch, count, Path(name), caches=caches)
            row = in_fork(lived, patience=PATIENCE)
            if "error" in row:
                raise click.ClickException(f"bench: {row['error']}")
            rows.append(row)
            token = row["mean_us"] / row["tokens"]
            told = (f"{row['host_us']:.0f}", f"{row['p90_us']:.0f}", f"{token:.2f}", f"{row['repeated']:.0%}")
            table.add_row(row["engine"], batch, str(count), caches, *told)
            if json_path is not None:
                _keep(json_path, rows, facts("cpu", kind=KIND))
    Console().print(table)


def _keep(path: Path, rows: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
    """Write rows into a file, beside those of other measurements that are of the same code."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rows": []}
    measured = {tuple(row[name] for name in WHAT) for row in rows}
    is_same = known.get("sources") == shared["sources"]
    kept = [row for row in known["rows"] if is_same and tuple(row[name] for name in WHAT) not in measured]
    path.write_text(json.dumps({**shared, "rows": [*kept, *rows]}, indent=2) + "\n", encoding="utf-8")
