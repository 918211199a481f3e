"""A Llama in transformers' continuous batching whose decode steps can be run again and again, to be timed.

Prompts are put into the engine's prefix cache once. From then on every run of a batch begins with all of its cached
tokens in place and has nothing but decode steps of the whole batch: as many as tokens are asked for.
"""

from __future__ import annotations

import gc
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kv_canary
from kv_canary.engines.patches import Patches

TIMEOUT = 120.0

# The dimensions of Llama 3.1 8B, and of something that a CPU runs.
_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch of requests with so many cached tokens each, which decode so many new ones.

    Args:
        batch, context, new_tokens: of a run; all at least 1.
        page: tokens of a KV block of the engine; it divides the context.
        chunk: tokens of a forward at most.
    """

    batch: int
    context: int
    new_tokens: int
    page: int
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.context}"

    @property
    def blocks(self) -> int:
        """Blocks of the KV pool: room for what is cached, for a run, and for the block that a run leaves behind."""
        growing = -(-(self.new_tokens + 1) // self.page) + 1
        return max(self.batch * (self.context // self.page + 2 * growing), -(-2 * self.chunk // self.page))

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Return random prompts, the same every time: whole blocks, and the token that a run begins with."""
        generator = torch.Generator().manual_seed(1)
        size = (self.batch, self.context + 1)
        prompts: list[list[int]] = torch.randint(3, vocabulary, size, generator=generator).tolist()
        return prompts


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the whole batch.

    Args:
        tokens: generated, by prompt.
        seconds: from the first request's admission to the last token's delivery.
        starts: when each forward was launched, in seconds of `time.perf_counter`.
    """

    tokens: list[list[int]]
    seconds: float
    starts: list[float]

    @property
    def steps(self) -> list[float]:
        """Seconds from one forward to the next; the first step, which admits the requests, is left out."""
        return [b - a for a, b in zip(self.starts[1:], self.starts[2:], strict=False)]


class Engine:
    """A manager of a model with a KV pool of its own, guarded or not; close it to get the memory back.

    Args:
        model: what `make_model` gave.
        shape: the batch that it is made for.
        settings: of the canary, fields of `CanaryConfig`; None: there is none.
    """

    def __init__(self, model: Any, shape: Shape, *, settings: Mapping[str, Any] | None) -> None:
        self.shape, self._patches = shape, Patches()
        self._starts: list[float] = []
        self._served = 0
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=_batching_config(shape, graphs=model.device.type == "cuda"),
        )
        self.canary: Any = None if settings is None else kv_canary.install(self._manager, **settings)
        self._manager.warmup()
        self.processor: Any = self._manager.batch_processor
        self._open, self._waiting = threading.Event(), threading.Event()
        self._open.set()
        self._patches.wrap(self.processor, "prepare_next_batch", self._prepare)
        self._patches.wrap(self.processor.model_runner, "compute_batch", self._compute)
        self._manager.start()

    @property
    def uses_graphs(self) -> bool:
        """Whether the engine captures and replays its forwards."""
        return bool(self.processor.model_runner.use_cuda_graph_varlen)

    def prefill(self, prompts: Sequence[list[int]]) -> float:
        """Put prompts into the prefix cache, one after the other; return the seconds that it took."""
        begin = time.perf_counter()
        for prompt in prompts:
            # A forward that ends a request leaves nothing to the cache, so the prompt's last must not be one.
            self._collect([self._add(prompt, new_tokens=2)])
        return time.perf_counter() - begin

    def decode(self, prompts: Sequence[list[int]]) -> Run:
        """Run a batch whose prompts are in the prefix cache."""
        # The batch must be taken in as one, or forwards would differ from run to run.
        self._waiting.clear()
        self._open.clear()
        if not self._waiting.wait(TIMEOUT):
            raise RuntimeError("kv-canary: bench: the engine's loop must come round, got nothing")
        self._starts.clear()
        try:
            names = [self._add(prompt, new_tokens=self.shape.new_tokens) for prompt in prompts]
        finally:
            begin = time.perf_counter()
            self._open.set()
        outputs = self._collect(names)
        seconds = time.perf_counter() - begin
        return Run(tokens=[outputs[name] for name in names], seconds=seconds, starts=list(self._starts))

    def close(self) -> None:
        """Stop the engine, take the canary out and let go of the memory; what the canary counted can still be read."""
        self._open.set()
        self._patches.undo_all()
        self._manager.stop(block=True, timeout=TIMEOUT)
        if self.canary is not None:
            self.canary.flush()
            self.canary.uninstall()
        self._manager = self.processor = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _prepare(self, original: Callable[[], Any]) -> Any:
        if not self._open.is_set():
            self._waiting.set()
            self._open.wait(TIMEOUT)
        return original()

    def _compute(self, original: Callable[..., Any], *args: Any) -> Any:
        self._starts.append(time.perf_counter())
        return original(*args)

    def _add(self, prompt: list[int], *, new_tokens: int) -> str:
        name = f"request {self._served}"
        self._served += 1
        self._manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens, eos_token_id=-1)
        return name

    def _collect(self, names: Sequence[str]) -> dict[str, list[int]]:
        outputs: dict[str, list[int]] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(outputs) < len(names):
            output = self._manager.get_result(timeout=0.2)
            if output is not None and output.is_finished():
                if output.error:
                    raise RuntimeError(f"kv-canary: bench: {output.request_id} must be served, got {output.error}")
                outputs[output.request_id] = list(output.generated_tokens)
            elif output is None and (not self._manager.is_running() or time.monotonic() > deadline):
                raise RuntimeError(f"kv-canary: bench: {len(names)} requests must be served, got {len(outputs)}")
        return outputs


def make_model(device: torch.device, *, tiny: bool) -> Any:
    """Return a Llama of random weights in bfloat16, made on the device: of 8 billion parameters, or tiny."""
    config = transformers.LlamaConfig(**(_TINY if tiny else _LLAMA_8B))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    return model.eval()


def _batching_config(shape: Shape, *, graphs: bool) -> ContinuousBatchingConfig:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    settings: dict[str, Any] = {
        "page_size" if "page_size" in known else "block_size": shape.page,
        # Pools are of one size, with a canary and without, whatever memory is free.
        "num_blocks": shape.blocks,
        "max_batch_tokens": shape.chunk,
        "max_memory_percent": 0.97,
        "max_requests_per_batch": shape.batch,
        "max_blocks_per_request": 0,
        # Else the engine gives up what is cached once its pool is nearly full.
        "safety_margin": 0.0,
        "use_cuda_graph": graphs,
        # With SDPA's mask, asynchronous batching would copy all of it to the device in every step.
        "use_async_batching": False,
        "seed": 0,
    }
    if "auto_switch_to_flash" in known:
        settings["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**settings)
