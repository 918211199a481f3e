"""A real SGLang scheduler in this process: a tiny model, requests handed in directly, one step at a time, on a CPU.

Importing this module imports no engine. One scheduler a process: SGLang keeps its settings in module globals.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAYERS = 3
VOCABULARY = 1000
# Of the tiny model's K, and of its V: 2 heads of 16 elements of 4 bytes.
BYTES_PER_TOKEN = 128

ARGUMENTS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "chunked_prefill_size": 64,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "random_seed": 0,
    "log_level": "error",
    # Its thread would end a process in which nobody steps the scheduler for long.
    "watchdog_timeout": 1e9,
}


def build_scheduler(model: Path, **arguments: Any) -> Any:
    """Return a scheduler that serves the model at `model`; outputs stay with the requests, and are sent nowhere.

    Args:
        model: folder of a checkpoint.
        arguments: of SGLang's `ServerArgs`; they come before `ARGUMENTS`.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    scheduler = start_scheduler(model, **arguments)
    for sender in (scheduler.ipc_channels.send_to_tokenizer, scheduler.ipc_channels.send_to_detokenizer):
        sender.socket = None
    return scheduler


def start_scheduler(model: Path | str, **arguments: Any) -> Any:
    """Return a scheduler as SGLang's own processes start one, its plugins loaded before.

    Args:
        model: folder of a checkpoint.
        arguments: of SGLang's `ServerArgs`; they come before `ARGUMENTS`.
    """
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import PortArgs, ServerArgs

    server = ServerArgs(**{"model_path": str(model), **ARGUMENTS, **arguments})
    server.resolve_once()
    _set_envs_and_config(server)
    ports = PortArgs.init_new(server)
    rank = spawn_world_rank(server, tp_rank=0, pp_rank=0)
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    return Scheduler(server, ports)


def submit(scheduler: Any, request_id: str, prompt: Sequence[int], *, new_tokens: int, **fields: Any) -> Any:
    """Queue a request that decodes greedily, end-of-text or not; return SGLang's `Req`, which fills as steps run.

    fields: see `message`.
    """
    scheduler.process_input_requests([message(request_id, prompt, new_tokens=new_tokens, **fields)])
    return scheduler.waiting_queue[-1]


def message(
    request_id: str, prompt: Sequence[int], *, new_tokens: int, sampling: Mapping[str, Any] | None = None, **fields: Any
) -> Any:
    """Return what SGLang's tokenizer process would send a scheduler for a request that decodes greedily.

    Args:
        request_id: SGLang's `rid`.
        prompt: token ids.
        new_tokens: to generate, end-of-text or not.
        sampling: further arguments of SGLang's `SamplingParams`.
        fields: further fields of the message.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True, **(sampling or {})})
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request_id,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
        **fields,
    )


def step(scheduler: Any) -> Any:
    """Run one batch, as SGLang's own loop without overlap does; return it, or None when there is nothing to do."""
    plan = scheduler.get_next_batch_to_run(running_batch=scheduler.running_batch, last_batch=scheduler.last_batch)
    scheduler.running_batch = plan.running_batch
    batch = plan.batch_to_run
    if batch:
        scheduler.process_batch_result(batch, scheduler.run_batch(batch))
    scheduler.last_batch = batch
    return batch


def row_of(request: Any) -> int:
    """Return the line of `req_to_token` that a running request owns."""
    row: int = request.kv.req_pool_idx
    return row


def cached_length(request: Any) -> int:
    """Return how many positions of a running request hold KV."""
    length: int = request.kv.kv_committed_len
    return length
