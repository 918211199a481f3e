"""The measurement: schedulers side by side on one device, one of which runs at a time, in turns whose order rotates."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.multiprocessing

from kv_canary.bench.serving import cores, sharing, worker
from kv_canary.bench.serving.modes import LEAST_ANSWER, MODELS, MODES, NONE, Shape

# Seconds that a scheduler may take to start, and to answer.
_START, _ANSWER = 300, 240
_HOST_STEPS, _TRACED_STEPS = 64, 28
# Cores that schedulers use; where there are no more than these, they run where they like.
_CORES = 4
# What CUDA graphs' sizes a service needs that has any number of requests.
_PARTS = 8
# Positions that a model has behind the last one of a request.
_SPARE_POSITIONS = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured.

    Args:
        models, modes: names of `MODELS` and `MODES`.
        decode, prefill: (requests, context) of each batch.
        churn: (requests, context, new tokens of each, decode steps); None: not measured.
        tiers: (requests, documents, context), and perhaps the most tokens of an answer, of each service whose documents
            are twice what its pool holds, the others in host memory (HiCache). Documents are of as many tokens in all
            of them. Where there is one, nothing else is measured.
        new: tokens that a request of `decode` generates.
        rounds: turns of everything that is timed, each time that schedulers are started.
        starts: how often all schedulers are started: where a process's memory lies changes what the engine's own
            kernels take by a percent, and stays as it is for as long as the process lives.
        seconds: after which no further round begins.
        device: "cuda" or "cpu", which checks the benchmark and measures nothing.
        frozen: see `Spec`.
        shared: whether schedulers map one copy of weights and KV.
        out: where logs go.
    """

    models: Sequence[str]
    modes: Sequence[str]
    decode: Sequence[tuple[int, int]]
    prefill: Sequence[tuple[int, int]]
    churn: tuple[int, int, int, int] | None
    tiers: Sequence[tuple[int, ...]]
    new: int
    rounds: int
    starts: int
    seconds: float
    device: str
    frozen: bool
    shared: bool
    out: Path


@dataclass(kw_only=True)
class Row:
    """One mode in one phase, against none in the same rounds.

    Args:
        model, phase, shape, mode: of what; a phase is "decode", "prefill", "churn" or "tiers".
        ratio, low, high: tokens per second against none of the same round: median, least and most.
        best: the fastest round of all against the fastest of none.
        n, starts: rounds in all, and how often the schedulers were started for them.
        tokens_per_s, step_ms: medians.
        hit: share of the prompts' tokens that were cached, where that is part of what is measured.
        longest_step_ms, gc_longest_ms: the worst of all rounds.
        host_us: what the canary takes of the scheduler's thread: of a decode step of requests that go on, of a
            prefill's forward, of a decode step of a churn with all that comes and ends between two of them.
        stream_us: what its launches take up of the forwards' stream, likewise; what else the host does meanwhile
            counts where the stream has nothing to do, and what runs beside the model, on another stream, does not.
        operations: device operations of a step that none has not, or has less of: count and microseconds.
        rounds: of each round in turn the start that it was in, its tokens per second, its step in milliseconds, its
            stride, and what the canary's own clock says that a step costs its host, in microseconds, as far as they are
            known.
        checks: what has to hold of the mode's results, and does not.
    """

    model: str
    phase: str
    shape: str
    mode: str
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    best: float = 1.0
    n: int = 0
    starts: int = 1
    tokens_per_s: float = 0.0
    hit: float | None = None
    step_ms: float | None = None
    longest_step_ms: float | None = None
    gc_longest_ms: float | None = None
    host_us: float | None = None
    stream_us: float | None = None
    operations: dict[str, dict[str, float]] = field(default_factory=dict)
    rounds: list[dict[str, float]] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)


class Scheduler:
    """One worker, as the measurement sees it."""

    def __init__(self, mode: str, spec: worker.Spec, shared: sharing.Shared | None) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.mode, self._log = mode, spec.log
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=worker.serve, args=(spec, theirs, shared), daemon=True)
        self._process.start()
        theirs.close()

    def answer(self, seconds: float) -> dict[str, Any]:
        """Return what the worker says; RuntimeError where it says nothing in time, or that it has failed."""
        try:
            if not self._connection.poll(seconds):
                raise RuntimeError(f"{self.mode}: no answer in {seconds:.0f} s, see {self._log}")
            found: dict[str, Any] = self._connection.recv()
        except EOFError as error:
            raise RuntimeError(f"{self.mode}: its process has ended, see {self._log}") from error
        if "error" in found:
            raise RuntimeError(f"{self.mode}: {found['error']}")
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        """Let the worker do something and return what comes of it."""
        self._connection.send(command)
        return self.answer(_ANSWER)

    def stop(self) -> None:
        """End the worker."""
        with contextlib.suppress(OSError):
            self._connection.send({"do": "stop"})
        self._process.join(10)
        self._process.kill()


class _Start(NamedTuple):
    """What came of a batch while schedulers ran that were started together, by mode.

    Attributes:
        found: of the rounds that are timed.
        more: of those that are looked into.
        same: what must be the same in all modes, of what `found` has not got.
    """

    found: Mapping[str, list[dict[str, Any]]]
    more: Mapping[str, dict[str, Any]]
    same: Mapping[str, dict[str, Any]]


class Measurement:
    """All modes of one model.

    Args:
        model: its name.
        settings: what is measured.
        say: shows a line to whoever waits.
        keep: is given the rows of what has been measured by then, whenever there are more.
    """

    def __init__(
        self,
        model: str,
        settings: Settings,
        *,
        say: Callable[[str], None],
        keep: Callable[[Sequence[Row]], None] = lambda rows: None,
    ) -> None:
        self._model, self._settings, self._say, self._keep_rows = model, settings, say, keep
        self._shape = MODELS[model]
        # When no round begins any more, of any batch, and of the one that is measured.
        self._end = self._until = time.monotonic() + settings.seconds
        self._schedulers: dict[str, Scheduler] = {}
        # By phase and shape of each batch.
        self._batches: dict[tuple[str, str], list[_Start]] = {}
        # What no healthy engine's canary says, by mode.
        self._wrong: dict[str, list[str]] = {}
        # Which all of them use, so that a slow one slows them all: one of them runs at a time.
        self._cores: tuple[int, ...] = ()
        self.failed: dict[str, str] = {}
        self.rows: list[Row] = []

    def run(self) -> None:
        """Measure everything; what a mode fails at is in `failed`, and the others go on.

        Raises:
            NoneLeftError: other measurements have all cores.
        """
        with cores.taken(_CORES) as self._cores:
            self._run()

    def _run(self) -> None:
        settings = self._settings
        batches = [*settings.prefill, *settings.decode, *filter(None, (settings.churn,)), *settings.tiers]
        left: list[Any] = batches * settings.starts
        for number in range(settings.starts):
            if number and time.monotonic() > self._end:
                break
            self._run_once(left)
        self.rows = self._rows()
        self._tell([row for row in self.rows if row.starts > 1])

    def _rows(self) -> list[Row]:
        """Return the rows of what has been measured."""
        rows = [row for batch, starts in self._batches.items() for row in self._rows_of(*batch, starts)]
        for row in rows:
            row.checks += self._wrong.get(row.mode, [])
        return rows

    def _run_once(self, left: list[Any]) -> None:
        """Start the schedulers, measure every batch, and end them; of `left` those go that are measured."""
        settings = self._settings
        try:
            self._start()
            self._rounds("settle", rounds=1)
            for requests, context in settings.prefill:
                self._share(left)
                at = {"requests": requests, "context": context}
                self._rounds("prefill", rounds=1, **at)
                found = self._rounds("prefill", **at)
                more = [self._rounds("prefill", rounds=1, host=True, **at)]
                if settings.device == "cuda":
                    more.append(self._rounds("prefill", rounds=1, operations=True, **at))
                self._keep("prefill", f"{requests}x{context}", found, _merged(more))
            for requests, context in settings.decode:
                self._share(left)
                at = {"requests": requests, "context": context}
                self._rounds("load", rounds=1, **at)
                sums = self._rounds("sums", rounds=1, **at)
                self._rounds("decode", rounds=1, new=settings.new, **at)
                found = self._rounds("decode", new=settings.new, **at)
                few = {**at, "new": worker.WARM_UP + _HOST_STEPS}
                more = [self._rounds("host", rounds=1, events=False, **few)]
                if settings.device == "cuda":
                    more.append(self._rounds("host", rounds=1, events=True, **few))
                    few["new"] = worker.WARM_UP + _TRACED_STEPS
                    more.append(self._rounds("operations", rounds=1, **few))
                self._keep("decode", f"{requests}x{context}", found, _merged(more), same=_merged([sums]))
            if settings.churn is not None:
                self._share(left)
                requests, context, new, steps = settings.churn
                at = {"requests": requests, "context": context, "new": new}
                self._rounds("load", rounds=1, requests=requests, context=context)
                self._rounds("churn", rounds=1, steps=steps // 2, **at)
                found = self._rounds("churn", steps=steps, **at)
                more = [self._rounds("churn", rounds=1, steps=steps // 2, host=True, **at)]
                self._keep("churn", "x".join(map(str, settings.churn)), found, _merged(more))
            for service in settings.tiers:
                self._share(left)
                at = dict(zip(("requests", "documents", "context", "longest"), service, strict=False))
                # Once for what is compiled, and once for what is cached.
                self._rounds("tiers", rounds=2, **at)
                found = self._rounds("tiers", **at)
                more = [self._rounds("tiers", rounds=1, host=True, **at)]
                self._keep("tiers", "x".join(map(str, service)), found, _merged(more))
            self._check(self._rounds("status", rounds=1))
        finally:
            for scheduler in self._schedulers.values():
                scheduler.stop()
            self._schedulers.clear()

    @property
    def _left(self) -> list[str]:
        """The modes that have not failed."""
        return [mode for mode in self._settings.modes if mode not in self.failed]

    def _share(self, left: list[Any]) -> None:
        """Give the next batch its part of the time that is left, and take it from those that are to come."""
        now = time.monotonic()
        self._until = now + max(0.0, self._end - now) / len(left)
        left.pop()

    def _start(self) -> None:
        settings, shape = self._settings, self._shape
        batches = [*settings.decode, *settings.prefill, *([settings.churn[:2]] if settings.churn else [])]
        new = max(settings.new, settings.churn[2] if settings.churn else 0)
        slots = max((n * (context + new + 8) for n, context in batches), default=0) + 4096
        running = max((n for n, _ in batches), default=1)
        sizes = {n for n, _ in settings.decode}
        more: dict[str, Any] = {}
        if settings.tiers:
            running, (_, documents, context, *_) = max(service[0] for service in settings.tiers), settings.tiers[0]
            slots, sizes = documents * context // 2, {max(1, running * part // _PARTS) for part in range(1, _PARTS + 1)}
            more = _hicache(settings.device)
        if settings.churn is not None:
            sizes |= {max(1, settings.churn[0] * part // _PARTS) for part in range(1, _PARTS + 1)}
        # The engine captures graphs of some size in any case.
        sizes = sizes or {running}
        folder = settings.out / f"model-{self._model}"
        folder.mkdir(parents=True, exist_ok=True)
        longest = [context + new for _, context in batches]
        longest += [context + (answer[0] if answer else LEAST_ANSWER) for _, _, context, *answer in settings.tiers]
        config = shape.config(positions=max(longest, default=0) + _SPARE_POSITIONS)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        shared = None
        if settings.shared and not more and settings.device == "cuda":
            sharing.let_go()
            shared = sharing.allocate(shape, slots=slots, lock=settings.out / "lock")
        for mode in self._left:
            spec = worker.Spec(
                model=folder,
                device=settings.device,
                environment={
                    **_environment(settings.device, mode),
                    **({"SGLANG_ON_CPU": "hicache"} if more and settings.device == "cpu" else {}),
                    **MODES[mode].environment,
                },
                arguments={
                    **_arguments(shape, settings.device, slots=slots, running=running, sizes=sorted(sizes)),
                    **more,
                    **MODES[mode].arguments,
                },
                vocabulary=shape.vocabulary,
                log=settings.out / f"{self._model}-{mode}.log",
                frozen=settings.frozen,
                own_kv=MODES[mode].own_kv,
                cores=self._cores,
            )
            self._schedulers[mode] = Scheduler(mode, spec, shared)
        for mode, scheduler in list(self._schedulers.items()):
            self._try(mode, lambda s=scheduler: s.answer(_START))  # type: ignore[misc]
        self._say(f"{self._model}: {', '.join(self._schedulers)} have started")

    def _rounds(self, do: str, *, rounds: int | None = None, **command: Any) -> dict[str, list[dict[str, Any]]]:
        """Let every scheduler do the same in turn, so many times; return what comes of it, by mode."""
        found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in self._schedulers}
        for number in range(rounds or self._settings.rounds):
            if number and time.monotonic() > self._until:
                break
            modes = list(self._schedulers)
            first = number % max(len(modes), 1)
            for mode in modes[first:] + modes[:first]:
                answer = self._try(mode, lambda s=self._schedulers[mode]: s.ask(do=do, **command))  # type: ignore[misc]
                if answer is not None:
                    found[mode].append(answer)
        return {mode: answers for mode, answers in found.items() if mode in self._schedulers}

    def _try(self, mode: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return call()
        except RuntimeError as error:
            self.failed[mode] = str(error)
            self._say(f"{self._model} {mode}: FAILED: {str(error).splitlines()[-1]}")
            self._schedulers.pop(mode).stop()
            return None

    def _keep(
        self,
        phase: str,
        shape: str,
        found: Mapping[str, list[dict[str, Any]]],
        more: Mapping[str, dict[str, Any]],
        same: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Keep what came of a batch, and tell it."""
        start = _Start(found, more, same or {})
        self._batches.setdefault((phase, shape), []).append(start)
        self._tell(self._rows_of(phase, shape, [start]))
        self._keep_rows(self._rows())

    def _rows_of(self, phase: str, shape: str, starts: Sequence[_Start]) -> list[Row]:
        """Return a row for each mode, of what came of a batch."""
        rows = []
        for mode in self._settings.modes:
            turns = [(n, answer) for n, start in enumerate(starts) for answer in start.found.get(mode, ())]
            answers = [answer for _, answer in turns]
            if not answers:
                continue
            row = Row(model=self._model, phase=phase, shape=shape, mode=mode, n=len(answers), starts=len(starts))
            rates, plain = ([a["tokens_per_s"] for s in starts for a in s.found.get(m, ())] for m in (mode, NONE))
            row.tokens_per_s = statistics.median(rates)
            row.rounds = [
                {"start": number}
                | {
                    name: round(a[name], 3)
                    for name in ("tokens_per_s", "step_ms", "guard_us", "stride")
                    if a.get(name) is not None
                }
                for number, a in turns
            ]
            ratios = [
                mine["tokens_per_s"] / other["tokens_per_s"]
                for start in starts
                for mine, other in zip(start.found.get(mode, ()), start.found.get(NONE, ()), strict=False)
            ]
            if ratios:
                row.ratio, row.low, row.high = statistics.median(ratios), min(ratios), max(ratios)
                row.best = max(rates) / max(plain)
            row.hit = answers[0].get("hit")
            if "step_ms" in answers[0]:
                row.step_ms = statistics.median(a["step_ms"] for a in answers)
                row.gc_longest_ms = max(a["gc_longest_ms"] for a in answers)
                row.longest_step_ms = max(
                    (a["longest_step_ms"] for a in answers if "longest_step_ms" in a), default=None
                )
            row.host_us, row.stream_us = (
                _median(start.more.get(mode, {}).get(name) for start in starts) for name in ("host_us", "stream_us")
            )
            row.operations = _more_than(*(starts[0].more.get(m, {}).get("operations", {}) for m in (mode, NONE)))
            row.checks = [check for start in starts for check in _differences(start, mode)]
            rows.append(row)
        return rows

    def _tell(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._say(
                f"{self._model} {row.phase} {row.shape} {row.mode}: {row.tokens_per_s:,.0f} tokens/s, ratio "
                f"{row.ratio:.4f} [{row.low:.4f}, {row.high:.4f}], best {row.best:.4f}, n={row.n}"
                + ("" if row.host_us is None else f", host {row.host_us:,.0f} us")
                + (f"; {'; '.join(row.checks)}" if row.checks else "")
            )

    def _check(self, found: Mapping[str, list[dict[str, Any]]]) -> None:
        """See that a healthy engine was found to be that, whole."""
        for mode, answers in found.items():
            wrong = self._wrong.setdefault(mode, [])
            status = answers[0] if answers else {}
            if status.get("violations"):
                wrong.append(f"{status['violations']} violations")
            writes = status.get("writes")
            if writes is not None and (writes["unknown"] or not writes["slots"]):
                wrong.append(f"writes: {writes}")
            if status.get("failures"):
                wrong.append(f"failures: {status['failures']}")


def measure(
    settings: Settings,
    *,
    say: Callable[[str], None],
    keep: Callable[[Sequence[Row]], None] = lambda rows: None,
    make: Callable[..., Measurement] = Measurement,
) -> tuple[list[Row], dict[str, dict[str, str]]]:
    """Measure every model; return the rows, and by model what has failed.

    Args:
        settings: what is measured.
        say, keep: see `Measurement`; `keep` gets those of the models before, too.
        make: makes the measurement of a model.
    """
    rows: list[Row] = []
    failed: dict[str, dict[str, str]] = {}
    settings.out.mkdir(parents=True, exist_ok=True)
    for model in settings.models:
        before = list(rows)
        measurement = make(model, settings, say=say, keep=lambda found, before=before: keep([*before, *found]))
        measurement.run()
        rows += measurement.rows
        failed[model] = measurement.failed
    return rows, failed


def new_folder() -> Path:
    """Return a new folder for logs."""
    return Path(tempfile.mkdtemp(prefix="kv-canary-bench-"))


def _environment(device: str, mode: str) -> dict[str, str]:
    found = {
        "SGLANG_USE_CPU_ENGINE": "1" if device == "cpu" else "0",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        # The other one is compiled for one version of torch.
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "TOKENIZERS_PARALLELISM": "false",
        "KV_CANARY_MODE": "off",
    }
    if device == "cpu" and mode.startswith("sgl"):
        # SGLang's canary has kernels alone.
        found |= {"TRITON_INTERPRET": "1", "SGLANG_ON_CPU": "builtin_canary"}
    return found


def _arguments(shape: Shape, device: str, *, slots: int, running: int, sizes: list[int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "load_format": "dummy",
        "device": device,
        "dtype": shape.dtype,
        "max_total_tokens": slots,
        "max_running_requests": running,
        "disable_overlap_schedule": False,
        "log_level": "warning",
    }
    if device == "cpu":
        return {**found, "chunked_prefill_size": 64}
    return {
        **found,
        "attention_backend": "triton",
        "mem_fraction_static": 0.9,
        "disable_cuda_graph": False,
        "cuda_graph_bs_decode": sizes,
        "cuda_graph_backend_prefill": "disabled",
        "chunked_prefill_size": 8192,
    }


def _hicache(device: str) -> dict[str, Any]:
    """Return SGLang's arguments for host memory behind the pool, with room for all that is served."""
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 4.0,
        "hicache_write_policy": "write_through",
        "hicache_mem_layout": "layer_first",
        "hicache_io_backend": "direct" if device == "cpu" else "kernel",
        "page_size": 16,
    }


def _merged(found: Sequence[Mapping[str, list[dict[str, Any]]]]) -> dict[str, dict[str, Any]]:
    """Return the first answer of each mode, of several questions together; the first of a name counts."""
    merged: dict[str, dict[str, Any]] = {}
    for answers in found:
        for mode, each in answers.items():
            if each:
                merged[mode] = {**each[0], **merged.get(mode, {})}
    return merged


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _differences(start: _Start, mode: str) -> list[str]:
    """Return in what a mode's results differ from those of none."""
    found = []
    for name in ("kv_sums", "slots_sha", "tokens_sha"):
        mine, plain = (
            [x[name] for x in (start.same.get(m, {}), *start.found.get(m, ())) if name in x] for m in (mode, NONE)
        )
        if mine and plain and mine[0] != plain[0]:
            found.append(f"{name} differ from those of {NONE}")
    return found


def _more_than(
    mine: Mapping[str, Mapping[str, float]], plain: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return of each operation what there is more of than without a canary, from a tenth of one a step on."""
    found = {}
    for name, each in mine.items():
        other = plain.get(name, {"count": 0.0, "us": 0.0})
        count = each["count"] - other["count"]
        if count > 0.1:
            found[name] = {"count": round(count, 2), "us": round(max(each["us"] - other["us"], 0.0), 2)}
    return found
