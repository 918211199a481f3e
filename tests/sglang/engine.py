"""A real SGLang Scheduler in this process, driven by SGLang's own event loops, with tiny random models.

A process may build one scheduler after another (half a second each, once SGLang is imported), one at a time:
`building` tears the last one down. What an Engine does in processes of its own is in engine_process.py.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kv_canary.difftest.stress.sglang import engine as sglang_engine

from . import ports

# SGLang reads it when it is imported.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

VOCABULARY = 1000
CONTEXT = 4096
# Logits that differ by no more do so by the order in which sums were taken.
TIED = 3e-5

# What every engine here is told; keyword arguments replace single ones.
ARGS: dict[str, Any] = {
    **{name: value for name, value in sglang_engine.ARGUMENTS.items() if name != "disable_overlap_schedule"},
    "log_level": "warning",
}

_rids = itertools.count(1)
# The scheduler that was built last.
_built: list[Any] = []


def greedy(model: str, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    """Return what transformers generates, greedily, for each prompt by itself."""
    import torch

    outputs = []
    for prompt in prompts:
        with torch.no_grad():
            ids = _transformers(model).generate(
                torch.tensor([list(prompt)]),
                attention_mask=torch.ones(1, len(prompt)),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def is_greedy(model: str, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether transformers, given the prompt, might generate `output` greedily; one forward.

    Of tokens whose logits differ by rounding alone, an engine may choose either.
    """
    import torch

    if not output:
        return True
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits = _transformers(model)(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(list(output))[:, None])[:, 0]
    return bool((logits.amax(-1) - chosen <= TIED).all())


def build_scheduler(model: str, **args: Any) -> Any:
    """Return a Scheduler of SGLang's in this process, after tearing down the one built before.

    Args:
        model: a folder of `save_tiny_model`.
        args: of SGLang's ServerArgs, on top of ARGS; without the overlapped schedule unless it is asked for.

    With the canary that KV_CANARY_MODE asks for, or none; with the stand-ins that SGLANG_ON_CPU asks for, or that any
    scheduler before this one asked for.
    """
    import sglang_on_cpu
    from sglang.srt.plugins import load_plugins

    mode = os.environ.get("KV_CANARY_MODE", "off")
    # Plugins are loaded once in a process. The canary hooks itself in then or never, so it always does.
    with overriding(KV_CANARY_MODE="raise" if mode == "off" else mode):
        load_plugins()
    sglang_on_cpu.plugin()
    _tear_down()
    scheduler = sglang_engine.start_scheduler(model, **{**ARGS, "nccl_port": ports.claim(), **args})
    _built.append(scheduler)
    # Nobody sends anything to this process: requests come from `submit`.
    scheduler.ingest_requests = lambda *args, **kwargs: []
    return scheduler


def _tear_down() -> None:
    """End the scheduler that was built last, with its sockets, groups and threads.

    They would live, and wake up now and then, for as long as the process: after a hundred schedulers they take more of
    a core than the tests do.
    """
    from sglang.srt.distributed.parallel_state import cleanup_dist_env_and_memory
    from sglang.srt.runtime_context import reset_context
    from sglang.srt.utils.watchdog import WatchdogRaw

    # Its thread never ends, and holds the scheduler.
    WatchdogRaw._watchdog_thread = lambda self: None
    if _built:
        _built.pop().ipc_channels.recv_from_rpc.context.destroy(linger=0)
    cleanup_dist_env_and_memory()
    reset_context()
    gc.collect()


def submit(scheduler: Any, prompt: Sequence[int], new_tokens: int, *, rid: str | None = None, **sampling: Any) -> Any:
    """Hand a request to the scheduler and return its Req, whose `output_ids` fill as the scheduler runs.

    Args:
        scheduler: of `build_scheduler`.
        prompt: token ids.
        new_tokens: to generate, whatever they are.
        rid: its name, else a serial number.
        sampling: further arguments of SGLang's SamplingParams, which are greedy.

    Raises:
        ValueError: the scheduler refused it.
    """
    rid = rid or f"request {next(_rids)}"
    message = sglang_engine.message(rid, prompt, new_tokens=new_tokens, sampling=sampling)
    scheduler.process_input_requests([message])
    found = [req for req in scheduler.waiting_queue if req.rid == rid]
    if not found:
        raise ValueError(f"the scheduler refused {rid} of {len(prompt)} tokens")
    return found[0]


def outputs(reqs: Sequence[Any]) -> list[list[int]]:
    """Return what requests have generated so far, as `greedy` does."""
    return [list(req.output_ids) for req in reqs]


def abort(scheduler: Any, rid: str = "") -> None:
    """Abort a request, or all of them."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.process_input_requests([AbortReq(rid=rid, abort_all=not rid)])


def step(scheduler: Any) -> bool:
    """Run one iteration of the loop without overlap, and return whether there was a batch.

    Raises:
        ValueError: the scheduler overlaps steps; iterations of that loop are `run_all`'s.
    """
    if scheduler.enable_overlap:
        raise ValueError("an overlapped schedule runs by run_all")
    _loop(scheduler, iter([False]))
    return scheduler.last_batch is not None


def run_all(
    scheduler: Any, before_step: Callable[[int], bool | None] | None = None, *, limit: int = 20_000
) -> Counter[str]:
    """Run the scheduler's own event loop until it has nothing left to do; return its forwards, counted by mode.

    Args:
        scheduler: of `build_scheduler`.
        before_step: called before every iteration, with its number; may submit and abort. While it returns True the
            loop goes on, though there be nothing to do.
        limit: of iterations.

    Raises:
        RuntimeError: the limit was reached.
    """
    modes: Counter[str] = Counter()
    run_batch = scheduler.run_batch

    def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
        modes[batch.forward_mode.name] += 1
        return run_batch(batch, *args, **kwargs)

    def go_on() -> Iterator[bool]:
        for iteration in range(limit):
            more = before_step(iteration) if before_step else False
            yield bool(more) or not scheduler.is_fully_idle() or scheduler.last_batch is not None
        raise RuntimeError(f"the scheduler is still busy after {limit} iterations")

    scheduler.run_batch = counted
    try:
        _loop(scheduler, go_on())
    finally:
        del scheduler.run_batch
    return modes


@contextmanager
def overriding(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _loop(scheduler: Any, go_on: Iterator[bool]) -> None:
    """Run the event loop; at the start of each iteration `go_on` says whether there is to be another one."""
    ingest = scheduler.ingest_requests

    def ask(*args: Any, **kwargs: Any) -> list[Any]:
        # The loop looks at it where an iteration begins, so the present one still runs.
        scheduler.gracefully_exit = not next(go_on, False)
        return []

    scheduler.gracefully_exit = False
    scheduler.ingest_requests = ask
    try:
        scheduler.run_event_loop()
    finally:
        scheduler.ingest_requests = ingest
        scheduler.gracefully_exit = False


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


_models: dict[str, Any] = {}


def _transformers(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if model not in _models:
        _models[model] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    return _models[model]
