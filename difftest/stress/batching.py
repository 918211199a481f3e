"""A life of transformers' continuous batching with little room: prompts again, forks, cancellations."""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import transformers
from transformers import CompileConfig, GenerationConfig

from kv_canary.config import CanaryConfig
from kv_canary.demo.models import SLIDING_WINDOW, tiny_model
from kv_canary.demo.serving import PAGE_SIZE, SHAPES, VOCABULARY, batching_config
from kv_canary.difftest.stress.random_engine import draw_canary
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers import install

MODELS = tuple(SHAPES)
TIMEOUT_S = 120.0
# Lengths at which pages and windows are exactly full, one short of it and one past it.
LENGTHS = tuple(n + d for n in (PAGE_SIZE, 2 * PAGE_SIZE, SLIDING_WINDOW, 2 * SLIDING_WINDOW) for d in (-1, 0, 1))
# Blocks in which only a few requests of those lengths find room.
TIGHT = {"mistral": 8}
# What the engine puts between the name of a request and the number of its fork.
CHILD = "__child"


@dataclass(frozen=True, kw_only=True)
class BatchingLife:
    """One life to live.

    Args:
        model: one of MODELS.
        number: the seed of everything.
        forwards: how many at least.
        device: "cpu" or "cuda".
        backend: the canary's.
    """

    model: str
    number: int
    forwards: int
    device: str
    backend: str


@dataclass(kw_only=True)
class BatchingResult:
    """The result of a life; `relied_on` is counted beside the canary."""

    forwards: int
    relied_on: int
    summary: dict[str, Any]
    reports: list[str]
    canary: CanaryConfig
    happened: Counter[str] = field(default_factory=Counter)


@dataclass(kw_only=True)
class _Seen:
    """The prefix of each request in its last forward, and the cached positions that all forwards were to read."""

    prefixes: dict[str, int] = field(default_factory=dict)
    relied_on: int = 0


def live(life: BatchingLife) -> BatchingResult:
    """Live one life and return what the canary said of it.

    Raises:
        RuntimeError: the engine died or stopped answering.
    """
    transformers.logging.set_verbosity_error()
    rng = np.random.default_rng([life.number, MODELS.index(life.model)])
    model = model_of(life.model, life.device)
    config = draw_canary(rng, life.backend)
    samples = int(rng.choice([1, 1, 3]))
    canary = install(model, config=config)
    patches = Patches()
    happened: Counter[str] = Counter()
    generation = GenerationConfig(
        do_sample=samples > 1, num_return_sequences=samples, eos_token_id=-1, pad_token_id=0, max_new_tokens=24
    )
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching_config(**options(life.model, rng, happened))
    )
    try:
        manager.warmup()
        seen = _watch(canary, manager.batch_processor, patches, happened)
        manager.start()
        _waves(manager, rng, happened, seen, samples=samples, forwards=life.forwards)
    finally:
        manager.stop(block=True, timeout=TIMEOUT_S)
        patches.undo_all()
        canary.uninstall()
    canary.flush()
    summary = canary.summary()
    return BatchingResult(
        forwards=happened["forwards"],
        relied_on=seen.relied_on,
        summary=summary.as_dict(),
        reports=[r.sentence for r in canary.reports],
        canary=config,
        happened=happened,
    )


@functools.cache
def model_of(name: str, device: str) -> Any:
    """Return the tiny model of a name; the same one every time."""
    return tiny_model(name, device=device, **SHAPES[name])


def options(name: str, rng: np.random.Generator, happened: Counter[str]) -> dict[str, Any]:
    """Return the engine's options: little room or enough, padded inputs or not, either scheduler."""
    tight = bool(rng.random() < 0.6)
    options: dict[str, Any] = {
        "num_blocks": TIGHT.get(name, 10) if tight else int(rng.choice([24, 40])),
        "max_batch_tokens": int(rng.choice([32, 48, 64])),
        "scheduler_type": str(rng.choice(["fifo", "prefill_first"])),
    }
    if rng.random() < 0.3:
        # Makes the engine pad its inputs, without compiling anything.
        options["varlen_compile_config"] = CompileConfig(backend="eager", mode=None, fullgraph=False)
        happened["lives with padding"] += 1
    happened["lives with little room"] += tight
    return options


def _watch(canary: Any, processor: Any, patches: Patches, happened: Counter[str]) -> _Seen:
    """Count what the engine does, from here on."""
    seen = _Seen()
    windows = [g.window for g in canary.manager.groups]

    def compute(original: Any, model: Any, batch_data: dict[str, Any]) -> Any:
        happened["forwards"] += 1
        for future in processor.inputs_and_outputs.requests_in_batch:
            name, extend = future.state.request_id, future.query_length
            # The engine has already counted this forward's tokens.
            prefix = future.state.position_offset - extend
            seen.relied_on += sum(min(prefix, w) if w else prefix for w in windows)
            happened["tokens"] += extend
            happened["later chunks"] += extend > 1 and prefix > 0
            for size, what in ((PAGE_SIZE, "prefixes at a page's end"), (SLIDING_WINDOW, "prefixes at a window's end")):
                happened[what] += prefix > 0 and prefix % size == 0
            if name not in seen.prefixes and prefix:
                happened["forks" if CHILD in name else "prefix hits"] += 1
            happened["soft resets"] += prefix < seen.prefixes.get(name, 0)
            seen.prefixes[name] = prefix
        return original(model, batch_data)

    patches.wrap(processor.model_runner, "compute_batch", compute)
    return seen


def _waves(
    manager: Any, rng: np.random.Generator, happened: Counter[str], seen: _Seen, *, samples: int, forwards: int
) -> None:
    """Serve wave after wave: some prompts, others, and the first again; some of them cancelled on the way."""
    stems = [_tokens(rng, 2 * PAGE_SIZE) for _ in range(2)]
    wave = 0
    while happened["forwards"] < forwards:
        first, second = (_prompts(rng, stems) for _ in range(2))
        for prompts in (first, second, first):
            doomed = []
            if samples == 1 and rng.random() < 0.5:
                doomed = _ask(manager, f"doomed{wave}", [_tokens(rng, 20), _tokens(rng, 33)], [40, 40])
            lengths = rng.choice([1, 8, 16, 24], len(prompts)).tolist()
            asked = _ask(manager, f"wave{wave}", prompts, lengths)
            wave += 1
            happened["requests"] += len(asked) + len(doomed)
            _collect(manager, asked, until=1)
            for request_id in doomed:
                happened["cancelled while running"] += request_id in seen.prefixes
                manager.cancel_request(request_id)
            _collect(manager, asked, until=samples * len(asked) - 1)


def waves(rng: np.random.Generator, *, count: int) -> list[list[list[int]]]:
    """Return prompts in waves, some of which share their beginnings."""
    stems = [_tokens(rng, 2 * PAGE_SIZE) for _ in range(2)]
    return [_prompts(rng, stems) for _ in range(count)]


def _prompts(rng: np.random.Generator, stems: list[list[int]]) -> list[list[int]]:
    """Return prompts of telling lengths, half of which begin with the same text as others."""
    prompts = []
    for length in rng.choice(LENGTHS, int(rng.integers(3, 9))).tolist():
        stem = stems[int(rng.integers(2))] if rng.random() < 0.5 else []
        prompts.append((stem + _tokens(rng, length))[:length])
    return prompts


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(t) for t in rng.integers(3, VOCABULARY, count)]


def _ask(manager: Any, name: str, prompts: list[list[int]], new_tokens: list[int]) -> list[str]:
    ids = [f"{name}.{i}" for i in range(len(prompts))]
    for request_id, prompt, count in zip(ids, prompts, new_tokens, strict=True):
        manager.add_request(prompt, request_id=request_id, max_new_tokens=count, eos_token_id=-1)
    return ids


def _collect(manager: Any, asked: list[str], *, until: int) -> None:
    """Wait for `until` answers to what was asked; children of a fork are named after their parents."""
    deadline = time.monotonic() + TIMEOUT_S
    count = 0
    while count < until:
        output = manager.get_result(timeout=0.2)
        if output is None:
            if not manager.is_running() or time.monotonic() > deadline:
                error = getattr(manager.background_thread_status, "fatal_error", None)
                raise RuntimeError(f"kv-canary: bench: the engine stopped answering: {error!r}")
        elif output.is_finished() and output.request_id.split(CHILD)[0] in asked:
            if output.error:
                raise RuntimeError(f"kv-canary: bench: request {output.request_id} failed: {output.error}")
            count += 1
