"""transformers' continuous batching, run step by step, with a record of what its forwards use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kv_canary
from kv_canary.demo.models import tiny_model

from .life import Act, Life, Touch

PAGE = 16
VOCABULARY = 1000
VERSION = "transformers 5.23"


class RealEngine:
    """A tiny random Llama served on the CPU. Its loop is run by hand, so that a life is the same every time.

    Args:
        num_blocks: of the cache.
        host_gib: of the host tier; 0 for none.
    """

    def __init__(self, *, num_blocks: int = 32, host_gib: float = 0.0) -> None:
        self.life = Life()
        self.version = 1
        self.states: dict[str, Any] = {}
        transformers.logging.set_verbosity_error()
        self.model = tiny_model("llama", max_position_embeddings=512)
        self.canary = kv_canary.install(
            self.model,
            backend="reference",
            max_reports_per_step=1000,
            on_report=self.life.reports.append,
            identity=lambda state: f"weights {self.version}",
        )
        with mock.patch.object(torch, "empty", _unpinned(torch.empty)):
            self.manager = self.model.init_continuous_batching(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
                continuous_batching_config=_batching(num_blocks=num_blocks, cpu_offload_space=host_gib),
            )
            self.manager.warmup()
        self.processor = self.manager.batch_processor
        self.cache, self.layout = self.processor.cache, self.canary.layout
        [self.allocator] = self.cache.cache_allocators.values()
        self._run = self.processor.model_runner.compute_batch
        self.processor.model_runner.compute_batch = self._watched

    def acted(self, blocks: Sequence[int], requests: Sequence[str] | None = None) -> None:
        """Note that the bug has just spoiled these blocks; see `Act`."""
        [group] = self.layout.groups
        slots = self.layout.block_slots(group.pool, list(blocks)).tolist()
        self.life.acts.append(
            Act(
                step=self.canary.manager.step + 1,
                slots={group.name: frozenset(slots)},
                requests=None if requests is None else frozenset(requests),
            )
        )

    def come(self, name: str, prompt: Sequence[int], *, new_tokens: int) -> None:
        self.manager.add_request(list(prompt), request_id=name, max_new_tokens=new_tokens, eos_token_id=-1)

    def step(self, count: int = 1) -> None:
        """Run forwards, as the engine's own loop does."""
        for _ in range(count):
            if self.processor.prepare_next_batch():
                self.manager._generation_step()
                self.processor.update_batch()
                for name, state in self.states.items():
                    text = self.life.texts.setdefault(name, [])
                    new = state.generated_tokens[len(text) :]
                    text += [(self.canary.manager.step, int(token)) for token in new]

    def finish(self) -> None:
        """Run forwards until every request is done."""
        while self.processor.has_pending_requests() or not self.manager.input_queue.empty():
            self.step()

    def end_life(self) -> Life:
        """Return what was seen, everything that the canary has found included."""
        self.canary.flush()
        self.life.summary, self.life.incidents = self.canary.summary(), list(self.canary.incidents)
        self.canary.uninstall()
        return self.life

    def _watched(self, model: Any, batch_data: dict[str, Any]) -> Any:
        for future in self.processor.inputs_and_outputs.requests_in_batch:
            state, extend = future.state, future.query_length
            self.states[state.request_id] = state
            past = state.position_offset - extend
            for kind, indices in (
                ("read", self.allocator.get_read_indices(state.request_id, past, 0)),
                ("write", self.allocator.get_write_indices(state.request_id, past, extend)),
            ):
                for slot in self.layout.to_slots(0, torch.tensor(indices, dtype=torch.int64)).tolist():
                    self.life.touches.append(
                        Touch(
                            step=self.canary.manager.step + 1,
                            request=state.request_id,
                            group=self.layout.groups[0].name,
                            slot=slot,
                            kind=kind,
                        )
                    )
        return self._run(model, batch_data)


def prompt(seed: int, length: int) -> list[int]:
    """Return random tokens, the same ones for the same seed."""
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def live(life: Callable[[RealEngine], None], bug: Callable[[RealEngine], None] | None, **options: Any) -> Life:
    """Let an engine live, with a bug in it or without."""
    threads = torch.get_num_threads()
    # Sums over several threads may differ in their last bits.
    torch.set_num_threads(1)
    try:
        engine = RealEngine(**options)
        if bug is not None:
            bug(engine)
        life(engine)
        return engine.end_life()
    finally:
        torch.set_num_threads(threads)


def _batching(**options: Any) -> ContinuousBatchingConfig:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    plain = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 8,
        "max_blocks_per_request": 0,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "auto_switch_to_flash": False,
        "seed": 0,
    }
    return ContinuousBatchingConfig(**{n: v for n, v in {**plain, **options}.items() if n in known})


def _unpinned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    # A machine without a GPU cannot pin memory. What is in memory that nothing was written to may be anything, and the
    # report of a copy that came too early says what: here it is zero.
    return lambda *args, pin_memory=False, **options: empty(*args, **options).zero_()
