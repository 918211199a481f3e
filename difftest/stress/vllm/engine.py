"""A real vLLM in this process: a tiny model, requests handed in directly, one step at a time, on a CPU.

Importing this module imports no engine. Engines come one after the other; each is closed before the next is made.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from kv_canary.difftest.interpreter import quicken
from kv_canary.settings import ENVIRONMENT

Runner = Literal["V1", "V2"]

RUNNERS: tuple[Runner, ...] = ("V1", "V2")
# A process of one thread, so that it can be forked: vLLM's kernels for CPUs and torch's keep theirs otherwise, and wait
# for each other's on two cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0)))}

VOCABULARY = 1000
BLOCK = 32
LONGEST = 512
# Blocks of a pool that six requests fill.
TIGHT = 27
# The head size that vLLM's kernels for CPUs take. Each number of a token's K is a source of its own there: few heads.
_SHAPE = {
    "head_dim": 32,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "mistral": {"sliding_window": 64},
    "gemma3": {"sliding_window": 64, "query_pre_attn_scalar": 32},
}
ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": LONGEST,
    "kv_cache_memory_bytes": 8 << 20,
    "num_gpu_blocks_override": TIGHT,
    "enforce_eager": True,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "seed": 0,
    "disable_log_stats": True,
}


def save_model(folder: Path | str, kind: str = "llama", **overrides: Any) -> str:
    """Save a tiny model that vLLM's kernels for CPUs serve, unless one is there, and return the folder.

    Args:
        folder: made if need be.
        kind: "llama", "mistral" (windows) or "gemma3" (three groups over one memory).
        overrides: fields of the configuration that differ.
    """
    from kv_canary.demo.models import save_tiny_model

    return save_tiny_model(folder, kind, **{**_SHAPE, **_KINDS[kind], **overrides})


def drafts_of(method: Literal["draft_model", "eagle"], model: str) -> dict[str, Any]:
    """Return vLLM's settings for a drafter of one layer with random weights, saved beside the model that it drafts for.

    Args:
        method: vLLM's name of it.
        model: folder of the model.
    """
    folder = save_model(f"{model}-small", num_hidden_layers=1)
    if method == "eagle":
        folder = _save_eagle(Path(f"{model}-eagle"), Path(folder))
    return {"method": method, "model": folder, "num_speculative_tokens": 3}


def _save_eagle(folder: Path, model: Path) -> str:
    """Save an EAGLE head made of a model of one layer: its layer, behind a layer that brings two inputs together."""
    if not folder.exists():
        import torch
        from safetensors.torch import load_file, save_file

        folder.mkdir()
        config = json.loads((model / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name.removeprefix("model."): t for name, t in load_file(model / "model.safetensors").items()}
        # Its input comes as it is.
        kept = {n: t for n, t in tensors.items() if n.startswith("layers.") and "input_layernorm" not in n}
        width = config["hidden_size"]
        both = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(1)) / width**0.5
        save_file({**kept, "fc.weight": both}, folder / "model.safetensors")
    return str(folder)


class Engine:
    """A vLLM in this process.

    Args:
        model: folder of a checkpoint.
        runner: of the model: "V1", or "V2" in Triton's interpreter.
        canary: settings of kv-canary, without their prefix; None: no canary.
        asynchronous: whether a step is prepared before the tokens of the step before it are known.
        embeds: whether requests are answered with an embedding each, and no tokens; the model needs a tokenizer.
        arguments: of vLLM's `LLM`; they come before `ARGUMENTS`.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: Runner = "V1",
        canary: Mapping[str, str] | None = None,
        asynchronous: bool = False,
        embeds: bool = False,
        **arguments: Any,
    ) -> None:
        settings = {f"{ENVIRONMENT}{name.upper()}": value for name, value in (canary or {}).items()}
        if canary is not None:
            settings = {f"{ENVIRONMENT}MODE": "log", **settings}
        settings |= {"VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0"}
        if embeds:
            arguments = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False, **arguments}
        prepare()
        if runner == "V2":
            quicken()
        with _environment(settings), _asynchronous() if asynchronous else contextlib.nullcontext():
            from vllm import LLM

            from kv_canary.engines.vllm.plugin import plugin

            # vLLM loads its plugins once a process, whatever the environment asks for later.
            plugin()
            self.llm: Any = LLM(model, **{**ARGUMENTS, **arguments})
        self.outputs: dict[str, list[Any]] = {}
        self.steps, self._embeds = 0, embeds
        self.has_canary = canary is not None

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def worker(self) -> Any:
        """vLLM's worker."""
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker

    @property
    def session(self) -> Any:
        """The canary of the worker.

        Raises:
            RuntimeError: it has none.
        """
        from kv_canary.engines.vllm.session import sessions

        found = [s for s in sessions() if s.worker is self.worker]
        if not found:
            raise RuntimeError("kv-canary: stress: an engine must have a canary, got one without")
        return found[0]

    @property
    def unfinished(self) -> int:
        """Requests that are waiting or running."""
        count: int = self.llm.llm_engine.get_num_unfinished_requests()
        return count

    def submit(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        new_tokens: int = 0,
        lora: Any = None,
        picture: Any = None,
        **sampling: Any,
    ) -> None:
        """Queue a request that decodes greedily, end-of-text or not, or that is embedded.

        Args:
            name: of the request, the first part of vLLM's own.
            prompt: token ids.
            new_tokens: to generate.
            lora: vLLM's `LoRARequest`.
            picture: that the model is shown.
            sampling: further arguments of vLLM's `SamplingParams`, and `cache_salt`.
        """
        from vllm import PoolingParams, SamplingParams

        text: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if picture is not None:
            text["multi_modal_data"] = {"image": picture}
        if (salt := sampling.pop("cache_salt", None)) is not None:
            text["cache_salt"] = salt
        greedy = {"temperature": 0, "max_tokens": new_tokens, "detokenize": False, "ignore_eos": True}
        params = PoolingParams(task="embed") if self._embeds else SamplingParams(**{**greedy, **sampling})
        self.llm.llm_engine.add_request(name, text, params, lora_request=lora)

    def abort(self, name: str) -> None:
        """Have a request end where it is."""
        self.llm.llm_engine.abort_request([name])

    def step(self) -> None:
        """Run one step, and keep what it has generated in `outputs`."""
        for output in self.llm.llm_engine.step():
            answer = output.outputs.data.tolist() if self._embeds else list(output.outputs[0].token_ids)
            self.outputs[output.request_id] = answer
        self.steps += 1

    def run(self, until: Callable[[], bool] = lambda: False, *, most: int = 2000) -> None:
        """Step until `until` holds, or there is nothing left to do.

        Raises:
            RuntimeError: that took more steps than `most`.
        """
        for _ in range(most):
            if until() or not self.unfinished:
                return
            self.step()
        raise RuntimeError(f"kv-canary: stress: requests must end in {most} steps, got {self.unfinished} left")

    def close(self) -> None:
        """Shut the engine down, and let go of it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(kw_only=True)
class Traffic:
    """Random requests that share prefixes, some of which are given up.

    Args:
        seed: of what comes, and when.
        requests: that are kept in the engine.
        documents: how long the prefixes are that requests share.
        new_tokens: the fewest and the most that a request generates.
        aborts: share of the steps in which one is given up.
        sampling: returns further arguments of a request's `submit`.
    """

    seed: int
    requests: int = 8
    documents: Sequence[int] = (40, 70, 130)
    new_tokens: tuple[int, int] = (5, 90)
    aborts: float = 0.04
    sampling: Callable[[random.Random], Mapping[str, Any]] = field(default=lambda _: {})

    def serve(self, engine: Engine, steps: int, *, see: Callable[[int], None] = lambda step: None) -> None:
        """Serve so many steps, and what is left of the requests then; `see` is called behind each of the first."""
        rng = random.Random(self.seed)
        texts = [[rng.randrange(3, VOCABULARY) for _ in range(max(self.documents))] for _ in range(4)]
        started = 0
        for step in range(steps):
            while engine.unfinished < self.requests and rng.random() < 0.7:
                shared = texts[rng.randrange(4)][: rng.choice(self.documents)]
                own = [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 40))]
                most = rng.randrange(*self.new_tokens)
                engine.submit(f"r{started}", shared + own, new_tokens=most, **self.sampling(rng))
                started += 1
            if started > 3 and rng.random() < self.aborts:
                engine.abort(f"r{rng.randrange(max(0, started - 6), started)}")
            engine.step()
            see(step)
        engine.run()


def prepare() -> None:
    """Set what vLLM reads of the environment when it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Let kv-canary's and vLLM's variables be these and no others inside the block."""
    before = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
    for name in before:
        del os.environ[name]
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def _asynchronous() -> Iterator[None]:
    # Of the environment that these tests run in.
    from vllm_on_cpu import asynchronous

    undo = asynchronous.apply()
    try:
        yield
    finally:
        undo()
