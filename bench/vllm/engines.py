"""Engines of vLLM side by side on one device, one of which runs at a time: `bench.serving`'s measurement of them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch.multiprocessing

from kv_canary.bench.serving import run
from kv_canary.bench.serving.modes import MODES, Shape
from kv_canary.bench.vllm.worker import Spec, serve

BLOCK = 16
# Seconds that an engine may take to start.
_START = 300


class Engines(run.Measurement):
    """All modes of one model, served by vLLM.

    Args:
        runner: vLLM's model runner, "V1" or "V2".
        told: who is told what, as `Measurement` has it.
    """

    def __init__(self, model: str, settings: run.Settings, *, runner: str, **told: Any) -> None:
        super().__init__(model, settings, **told)
        self._runner = runner

    def _start(self) -> None:
        settings, shape = self._settings, self._shape
        if settings.device == "cpu":
            # vLLM's attention for CPUs takes no heads of 16 numbers.
            shape = dataclasses.replace(shape, heads=2, kv_heads=1)
        batches = [*settings.decode, *settings.prefill, *([settings.churn[:2]] if settings.churn else [])]
        new = max(settings.new, settings.churn[2] if settings.churn else 0)
        running = max(requests for requests, _ in batches)
        tokens = max(requests * (context + new + BLOCK) for requests, context in batches)
        folder = settings.out / f"model-{self._model}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
        arguments = {
            "load_format": "dummy",
            "dtype": shape.dtype,
            "skip_tokenizer_init": True,
            "max_model_len": max(context for _, context in batches) + new + BLOCK,
            "max_num_seqs": running,
            "enable_prefix_caching": True,
            "seed": 0,
            "disable_log_stats": True,
            **_of_device(settings, shape, tokens=tokens, running=running),
        }
        for mode in self._left:
            spec = Spec(
                model=folder,
                device=settings.device,
                environment={
                    "VLLM_USE_V2_MODEL_RUNNER": "1" if self._runner == "V2" else "0",
                    "VLLM_LOGGING_LEVEL": "ERROR",
                    "TORCHDYNAMO_DISABLE": "1",
                    "HF_HUB_OFFLINE": "1",
                    "KV_CANARY_MODE": "off",
                    **MODES[mode].environment,
                },
                arguments=arguments,
                vocabulary=shape.vocabulary,
                log=settings.out / f"{self._model}-{mode}.log",
                frozen=settings.frozen,
                cores=self._cores,
            )
            # One after the other: vLLM looks at what memory is free when it starts.
            engine = self._schedulers[mode] = _Engine(mode, spec)
            self._try(mode, lambda e=engine: e.answer(_START))  # type: ignore[misc]
        self._say(f"{self._model}: {', '.join(self._schedulers)} have started")


class _Engine(run.Scheduler):
    """One worker of vLLM's, as the measurement sees it."""

    def __init__(self, mode: str, spec: Spec) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.mode, self._log = mode, spec.log
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(spec, theirs), daemon=True)
        self._process.start()
        theirs.close()


def _of_device(settings: run.Settings, shape: Shape, *, tokens: int, running: int) -> dict[str, Any]:
    """Return vLLM's arguments for a GPU, or those with which a CPU checks the benchmark."""
    blocks = tokens // BLOCK + 2 * running + 8
    if settings.device == "cpu":
        return {
            "block_size": 32,
            "num_gpu_blocks_override": blocks,
            "kv_cache_memory_bytes": 64 << 20,
            "max_num_batched_tokens": 96,
        }
    from kv_canary.difftest.stress.vllm import standins

    sizes = {requests for requests, _ in settings.decode} | {2**i for i in range(running.bit_length())} | {running}
    return {
        **standins.ARGUMENTS,
        "compilation_config": {
            **standins.ARGUMENTS["compilation_config"],
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(sizes),
            # What is compiled when it first runs must have run before it is captured.
            "cudagraph_num_of_warmups": 1,
        },
        "async_scheduling": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": blocks,
        "kv_cache_memory_bytes": (blocks + 1) * BLOCK * shape.kv_bytes_per_token,
        # Others have the device, too.
        "gpu_memory_utilization": 0.05,
        "max_num_batched_tokens": 8192,
    }
