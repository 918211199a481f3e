"""Tokens a second of a tiny model in transformers' continuous batching on the CPU, without a canary and with it.

Run by `kv_canary.bench.references_before`, as a script, with any checkout's `kv_canary`: it uses nothing of this one.
The last line that it prints is JSON. Times are CPU time of the process, on one thread.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kv_canary

PAGE = 16
# Of serving without a canary and with it; the medians count.
TURNS = 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Prompts of one length, which all generate as many tokens; a forward takes `chunk` tokens at most."""

    name: str
    prompts: int
    length: int
    new_tokens: int
    chunk: int


WORKLOADS = (
    Workload(name="decode: 64 prompts of 32, 32 new tokens", prompts=64, length=32, new_tokens=32, chunk=512),
    Workload(name="prefill: 4 prompts of 2048, 2 new tokens", prompts=4, length=2048, new_tokens=2, chunk=2048),
    Workload(name="both: 8 prompts of 512, 32 new tokens", prompts=8, length=512, new_tokens=32, chunk=512),
)
QUICK = (Workload(name="quick", prompts=2, length=20, new_tokens=3, chunk=32),)


def main() -> None:
    """Serve every workload without a canary and with it, and print tokens a second of both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    workloads = QUICK if parser.parse_args().quick else WORKLOADS
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = make_model()
    # The first run of all warms up.
    serve(model, workloads[-1], guarded=True)
    rates: dict[str, dict[str, float]] = {}
    for workload in workloads:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(TURNS):
            # Whoever comes second finds a warmer process.
            for guarded in (False, True) if turn % 2 == 0 else (True, False):
                seconds[guarded].append(serve(model, workload, guarded=guarded))
        without, guarded_seconds = statistics.median(seconds[False]), statistics.median(seconds[True])
        tokens = workload.prompts * (workload.length + workload.new_tokens)
        rates[workload.name] = {
            "without": round(tokens / without, 1),
            "with": round(tokens / guarded_seconds, 1),
            "overhead": round(guarded_seconds / without - 1, 4),
        }
    print(json.dumps(rates))


def serve(model: Any, workload: Workload, *, guarded: bool) -> float:
    """Return the seconds that a workload takes, with a canary that checks everything by the references, or without."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, 1000, (workload.prompts, workload.length), generator=generator).tolist()
    canary: Any = kv_canary.install(model, backend="reference", stride=1) if guarded else None
    begin = time.process_time()
    outputs = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=workload.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=_batching_config(workload),
        progress_bar=False,
    )
    seconds = time.process_time() - begin
    if any(o.error or len(o.generated_tokens) != workload.new_tokens for o in outputs.values()):
        raise RuntimeError("kv-canary: bench: every prompt must be served")
    if canary is not None:
        summary = canary.summary()
        canary.uninstall()
        if summary.violations or not summary.positions_verified == summary.positions_relied_on > 0:
            raise RuntimeError(f"kv-canary: bench: a healthy engine must be verified and found clean, got {summary}")
    return seconds


def make_model() -> Any:
    """Return a tiny Llama of random weights."""
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def _batching_config(workload: Workload) -> ContinuousBatchingConfig:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    pages = workload.prompts * (-(-(workload.length + workload.new_tokens) // PAGE) + 1)
    settings: dict[str, Any] = {
        "page_size" if "page_size" in known else "block_size": PAGE,
        "num_blocks": pages,
        "max_batch_tokens": workload.chunk,
        "max_requests_per_batch": workload.prompts,
        "max_blocks_per_request": 0,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "seed": 0,
    }
    if "auto_switch_to_flash" in known:
        settings["auto_switch_to_flash"] = False
    return ContinuousBatchingConfig(**settings)


if __name__ == "__main__":
    main()
