"""Tiny random models in transformers' continuous batching, prompts, and a count of what the engine really did."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import CompileConfig, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from kv_canary import BufferGroup
from kv_canary.demo.models import tiny_model

MODELS = ("llama", "mistral", "gemma3", "gptoss")
PAGE = 16
# As many as a page holds, so that every answer goes on into another page.
NEW_TOKENS = 16
TIMEOUT = 120.0

transformers.logging.set_verbosity_error()


def make_model(kind: str, **overrides: Any) -> Any:
    """Return a tiny model of 512 positions."""
    return tiny_model(kind, **{"max_position_embeddings": 512, **overrides})


def batching_config(**overrides: Any) -> ContinuousBatchingConfig:
    """Return the plainest configuration; managers change theirs, so each needs its own."""
    known = inspect.signature(ContinuousBatchingConfig).parameters
    options = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": 128,
        "max_batch_tokens": 48,
        "max_requests_per_batch": 16,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "max_blocks_per_request": 0,
        "seed": 0,
        **overrides,
    }
    if "auto_switch_to_flash" in known:
        options["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**options)


class _CompilesNothing(CompileConfig):
    """Options of `torch.compile` with which it gives back what it is given."""

    def to_dict(self) -> dict[str, Any]:
        return {"disable": True}


def padding_config() -> dict[str, Any]:
    """Return the option that makes the engine pad its inputs and warm up, without compiling anything."""
    return {"varlen_compile_config": _CompilesNothing()}


def generation_config(*, new_tokens: int = NEW_TOKENS, samples: int = 1) -> GenerationConfig:
    """Return greedy decoding, or `samples` sampled continuations a prompt; nothing ends before `new_tokens`."""
    return GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=samples > 1,
        num_return_sequences=samples,
        eos_token_id=-1,
        pad_token_id=0,
    )


def drop_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine allocate its host tier on a machine that cannot pin memory."""
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", unpinned)


class _Immediate:
    """A stream or an event of a device on which everything has happened as soon as it is launched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any) -> None:
        pass

    wait_event = wait_stream = synchronize = record_event


class _Torch:
    """PyTorch, with streams and events that need no GPU."""

    Event = _Immediate

    class _Cuda:
        Stream = Event = _Immediate

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def stream(stream: Any) -> Any:
            return nullcontext()

    cuda = _Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def allow_async_batching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine batch asynchronously on a CPU: the same order of things, each over as soon as it is begun."""
    for name in ("input_outputs", "model_runner", "offloading_manager", "continuous_api"):
        module = importlib.import_module(f"transformers.generation.continuous_batching.{name}")
        if hasattr(module, "stream_context"):
            monkeypatch.setattr(module, "stream_context", lambda stream: nullcontext())
        if hasattr(module, "create_device_stream"):
            monkeypatch.setattr(module, "create_device_stream", _Immediate)
        if name != "continuous_api":
            monkeypatch.setattr(module, "torch", _Torch())
        if name == "input_outputs":
            monkeypatch.setattr(module.ContinuousBatchingAsyncIOs, "_supported_device_types", ("cpu",), raising=False)


class Prompts:
    """Random token lists, the same ones for the same seed."""

    def __init__(self, seed: int = 1) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, length: int) -> list[int]:
        return torch.randint(3, 1000, (length,), generator=self._generator).tolist()

    def of_lengths(self, *lengths: int) -> list[list[int]]:
        return [self.random(n) for n in lengths]


class Server:
    """A running manager of `model`."""

    def __init__(self, manager: Any, *, samples: int) -> None:
        self.manager = manager
        self.samples = samples
        self._waves = 0

    def add(self, prompts: Sequence[list[int]], *, new_tokens: int = NEW_TOKENS) -> list[str]:
        """Submit one wave of prompts and return their request ids."""
        ids = [f"w{self._waves}_{i}" for i in range(len(prompts))]
        self._waves += 1
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.manager.add_request(prompt, request_id=request_id, max_new_tokens=new_tokens, eos_token_id=-1)
        return ids

    def collect(self, count: int) -> dict[str, list[int]]:
        """Return the next `count` finished requests' tokens, by request id."""
        outputs: dict[str, list[int]] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(outputs) < count:
            output = self.manager.get_result(timeout=0.2)
            if output is not None and output.is_finished():
                assert not output.error, output.error
                outputs[output.request_id] = list(output.generated_tokens)
            elif output is None and not self.manager.is_running():
                raise AssertionError(f"the engine died: {self.manager.background_thread_status.fatal_error!r}")
            assert time.monotonic() < deadline, f"{len(outputs)} of {count} requests finished in {TIMEOUT} s"
        return outputs

    def run(self, prompts: Sequence[list[int]], *, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
        """Serve one wave to its end and return the tokens generated for each prompt."""
        ids = self.add(prompts, new_tokens=new_tokens)
        outputs = self.collect(len(prompts) * self.samples)
        return [outputs[request_id] for request_id in ids]


@contextmanager
def serve(model: Any, *, samples: int = 1, warm_up: bool = True, **options: Any) -> Iterator[Server]:
    """Start a manager of `model` with the `ContinuousBatchingConfig` options, and stop it afterwards."""
    manager = model.init_continuous_batching(
        generation_config=generation_config(samples=samples), continuous_batching_config=batching_config(**options)
    )
    if warm_up:
        manager.warmup()
    manager.start()
    try:
        yield Server(manager, samples=samples)
    finally:
        manager.stop(block=True, timeout=TIMEOUT)


@dataclass
class Happened:
    """What the engine did, counted in the engine's own classes, below the canary's wraps.

    prefixes holds the cached length of every request of every forward, the warm-up's left out.
    """

    forwards: int = 0
    warm_ups: int = 0
    padded: int = 0
    later_chunks: int = 0
    prefix_hits: int = 0
    soft_resets: int = 0
    forks: int = 0
    restores: int = 0
    cancelled_running: int = 0
    asynchronous: bool = False
    prefixes: list[int] = field(default_factory=list)

    def relied_on(self, groups: Sequence[BufferGroup]) -> int:
        """Return how many cached positions the forwards were about to read, over all groups."""
        return sum(min(p, g.window) if g.window else p for g in groups for p in self.prefixes)


def watch_engine(monkeypatch: pytest.MonkeyPatch) -> Happened:
    """Count what the engine does from here on."""
    happened = Happened()

    def spy(owner: type, name: str, see: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def spied(self: Any, *args: Any, **kwargs: Any) -> Any:
            if name in ("compute_batch", "restore_scheduled_requests"):
                # These change what they are given, so it is seen first.
                see(self, None, *args, **kwargs)
                return original(self, *args, **kwargs)
            result = original(self, *args, **kwargs)
            see(self, result, *args, **kwargs)
            return result

        monkeypatch.setattr(owner, name, spied)

    def forward(runner: Any, _: Any, model: Any, batch_data: dict[str, Any]) -> None:
        io = runner.inputs_and_outputs
        happened.asynchronous |= hasattr(io, "io_pairs")
        requests = (io.io_pairs[io.current_pair].host_io if hasattr(io, "io_pairs") else io).requests_in_batch
        if any(f.state.request_id.startswith("__warmup_") for f in requests):
            happened.warm_ups += 1
            return
        happened.forwards += 1
        extends = [f.query_length for f in requests]
        prefixes = [f.state.position_offset - f.query_length for f in requests]
        happened.prefixes += prefixes
        happened.padded += batch_data["input_ids"].shape[1] > sum(extends)
        happened.later_chunks += any(q > 1 and p > 0 for q, p in zip(extends, prefixes, strict=True))

    def hit(cache: Any, matched: int, *args: Any, **kwargs: Any) -> None:
        happened.prefix_hits += matched > 0

    def reset(state: Any, result: Any) -> None:
        happened.soft_resets += state.position_offset > 0

    def fork(state: Any, *args: Any) -> None:
        happened.forks += 1

    def restore(offloading: Any, _: Any, requests: Sequence[Any]) -> None:
        happened.restores += sum(f.state.is_cpu_offloaded for f in requests)

    def cancel(scheduler: Any, cancelled: Sequence[Any]) -> None:
        happened.cancelled_running += sum(state.position_offset > 0 for state in cancelled)

    spy(ModelRunner, "compute_batch", forward)
    spy(PagedAttentionCache, "search_prefix_match", hit)
    spy(RequestState, "create_equivalent_initial_request", reset)
    spy(RequestState, "fork", fork)
    spy(OffloadingManager, "restore_scheduled_requests", restore)
    spy(Scheduler, "clear_cancelled_requests", cancel)
    return happened
