"""A tiny, randomly initialised model served by transformers' continuous batching, with the canary installed."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kv_canary.config import CanaryConfig
from kv_canary.demo.traffic import Conversation
from kv_canary.engines.patches import Patches
from kv_canary.engines.transformers import TransformersCanary, install
from kv_canary.reports import ViolationReport

PAGE_SIZE = 16
VOCABULARY = 256
RESULT_TIMEOUT_S = 60.0
# What differs of the tiny models that are served here.
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": VOCABULARY, "num_hidden_layers": 4},
    **{name: {"vocab_size": VOCABULARY} for name in ("mistral", "gemma3", "gptoss")},
}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The record of one run of the engine."""

    requests: int
    forwards: int
    positions_verified: int
    violations: int
    reports: list[ViolationReport]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Callbacks of a run between the engine's own actions; each is called in the engine's loop.

    Args:
        started: called with (canary) once the engine has its cache, before its first forward.
        before_tables: called with (canary, processor, requests) before a batch's index tensors are made; returns
            what to undo once they are.
        before_forward: called with (canary, processor, batch_data) before the canary verifies.
        done: whether the run may stop early.
    """

    started: Callable[[TransformersCanary], None]
    before_tables: Callable[[TransformersCanary, Any, Sequence[Any]], Callable[[], None] | None]
    before_forward: Callable[[TransformersCanary, Any, dict[str, Any]], None]
    done: Callable[[TransformersCanary], bool]


def serve(
    model: Any,
    conversations: Sequence[Conversation],
    *,
    config: CanaryConfig,
    hooks: Hooks | None = None,
    on_finished: Callable[[int], None] | None = None,
) -> Served:
    """Serve every conversation, turn after turn, and return what happened.

    Args:
        model: a `models.tiny_model`.
        conversations: each next turn is sent when the one before is answered.
        config: the canary's.
        hooks: what to do to the engine on the way.
        on_finished: called with the number of turns answered so far.

    Raises:
        RuntimeError: the engine died.
    """
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    canary = install(model, config=config)
    patches = Patches()
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching_config())
    try:
        manager.warmup()
        if hooks is not None:
            _watch(canary, manager.batch_processor, hooks, patches)
        manager.start()
        answered = _converse(manager, conversations, lambda: hooks is not None and hooks.done(canary), on_finished)
    finally:
        manager.stop(block=True)
        patches.undo_all()
        canary.uninstall()
    canary.flush()
    summary = canary.summary()
    return Served(
        requests=answered,
        forwards=summary.steps,
        positions_verified=summary.positions_verified,
        violations=summary.violations,
        reports=canary.reports,
    )


def _converse(
    manager: Any,
    conversations: Sequence[Conversation],
    done: Callable[[], bool],
    on_finished: Callable[[int], None] | None,
) -> int:
    said: dict[str, tuple[int, int, list[int]]] = {}

    def ask(conversation: int, turn: int, before: list[int]) -> None:
        prompt = before + list(conversations[conversation].turns[turn])
        name = f"user{conversation}.turn{turn}"
        said[name] = (conversation, turn, prompt)
        new_tokens = conversations[conversation].new_tokens[turn]
        manager.add_request(prompt, request_id=name, max_new_tokens=new_tokens, eos_token_id=-1)

    for i in range(len(conversations)):
        ask(i, 0, [])
    answered, total = 0, sum(len(c.turns) for c in conversations)
    waited = 0.0
    while answered < total and not done():
        output = manager.get_result(timeout=0.2)
        if output is None:
            waited += 0.2
            if not manager.is_running() or waited > RESULT_TIMEOUT_S:
                error = getattr(manager.background_thread_status, "fatal_error", None)
                raise RuntimeError(f"kv-canary: demo: the engine stopped answering: {error!r}")
            continue
        waited = 0.0
        if output.error:
            raise RuntimeError(f"kv-canary: demo: request {output.request_id} failed: {output.error}")
        if output.is_finished():
            answered += 1
            conversation, turn, prompt = said[output.request_id]
            if turn + 1 < len(conversations[conversation].turns):
                ask(conversation, turn + 1, prompt + list(output.generated_tokens))
            if on_finished is not None:
                on_finished(answered)
    return answered


def _watch(canary: TransformersCanary, processor: Any, hooks: Hooks, patches: Patches) -> None:
    hooks.started(canary)

    def prepare(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        undo = hooks.before_tables(canary, processor, args[0] if args else kwargs["requests_in_batch"])
        try:
            return original(*args, **kwargs)
        finally:
            if undo is not None:
                undo()

    def compute(original: Callable[..., Any], model: Any, batch_data: dict[str, Any]) -> Any:
        hooks.before_forward(canary, processor, batch_data)
        return original(model, batch_data)

    patches.wrap(processor.inputs_and_outputs, "prepare_batch_tensors", prepare)
    patches.wrap(processor.model_runner, "compute_batch", compute)


def batching_config(**overrides: Any) -> ContinuousBatchingConfig:
    """Return the plainest configuration; managers change theirs, so each needs its own."""
    names = inspect.signature(ContinuousBatchingConfig).parameters
    options: dict[str, Any] = {
        "page_size" if "page_size" in names else "block_size": PAGE_SIZE,
        "num_blocks": 128,
        "max_batch_tokens": 64,
        "max_requests_per_batch": 16,
        "max_blocks_per_request": 0,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "seed": 0,
        **overrides,
    }
    if "auto_switch_to_flash" in names:
        options["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**options)
