"""Triton's launches under NVIDIA's compute-sanitizer: out-of-bounds, uninitialised reads, races in shared memory.

The guard zones of the differential check see writes beside a tensor; the sanitizer also sees reads, and on the device.
A child process runs the launches. There every tensor is an allocation of its own, of exactly the bytes that it spans,
and outputs and scratch are left uninitialised, so that whatever reads or writes one byte too far, or reads before it
writes, is told with the kernel and the line.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kv_canary.backends import implementation
from kv_canary.cases.casefile import decode, encode
from kv_canary.errors import must_be
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, Leaf

TOOLS = ("memcheck", "initcheck", "racecheck")
ERROR_CODE = 86

# A tool keeps what it knows of memory on the device as well: initcheck about as much again.
MOST_OF_FREE = 0.4

_COUNTS = re.compile(r"^kv-canary-launches (\S+) (\d+) (\d+)$", re.MULTILINE)
_TOO_LARGE = re.compile(r"^kv-canary-too-large \S+ \d+$", re.MULTILINE)
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SanitizerResult:
    """The account of one tool: calls and kernel launches by op, errors, and the tool's own words if there were any.

    `too_large` counts the calls that were left out because their tensors span more memory than is free. `ended` says
    what the child said last where it ended before its calls did, for no error that the tool counts: the calls after
    that were not made.
    """

    tool: str
    calls: Mapping[str, int]
    launches: Mapping[str, int]
    too_large: int
    errors: int
    ended: str
    seconds: float
    output: str

    @property
    def clean(self) -> bool:
        """Whether the tool saw no error, and the child made its calls."""
        return not self.errors and not self.ended

    def as_dict(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "calls": dict(self.calls),
            "launches": dict(self.launches),
            "total_launches": sum(self.launches.values()),
            "too_large": self.too_large,
            "errors": self.errors,
            "ended": self.ended,
            "seconds": round(self.seconds, 1),
            "output": self.output,
        }


def find_sanitizer() -> str:
    """Return the path of compute-sanitizer.

    Raises:
        ValueError: there is none.
    """
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if found is None:
        raise ValueError(must_be("difftest", "compute-sanitizer", "on PATH (it comes with CUDA)", "none"))
    return found


def sanitize(
    tool: str, cases: Mapping[str, Sequence[Mapping[str, Any]]], *, seconds: float, plant: str | None = None
) -> SanitizerResult:
    """Run the calls, over and over the ops, under one of `TOOLS` until they or the `seconds` are over.

    Args:
        cases: calls by op, complete or partial, on the CPU.
        plant: name of a planted bug to run with, to see that the tool sees it.

    Raises:
        ValueError: there is no compute-sanitizer, or the tool is unknown.
        RuntimeError: the child did not get as far as its first launch.
    """
    if tool not in TOOLS:
        raise ValueError(must_be("difftest", "tool", f"one of {', '.join(TOOLS)}", repr(tool)))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kv-canary-sanitize-") as folder:
        file = Path(folder) / "cases.pt"
        encoded = [
            {"op": op, "arguments": encode(get_spec(op), get_spec(op).bind(case))} for op, case in in_turn(cases)
        ]
        torch.save(encoded, file)
        child = "import sys; from kv_canary.difftest.sanitize import serve; serve(*sys.argv[1:])"
        command = [
            find_sanitizer(),
            "--tool",
            tool,
            "--error-exitcode",
            str(ERROR_CODE),
            "--print-limit",
            "20",
            sys.executable,
            "-c",
            child,
            str(file),
            str(seconds),
            plant or "",
        ]
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    counts = {op: (int(calls), int(launches)) for op, calls, launches in _COUNTS.findall(done.stdout)}
    if not counts:
        raise RuntimeError(f"kv-canary: difftest: no launch under {tool}: {(done.stdout + done.stderr)[-2000:]}")
    found = _ERRORS.search(done.stdout + done.stderr)
    errors = int(next(n for n in found.groups() if n is not None)) if found else int(done.returncode == ERROR_CODE)
    told = "\n".join(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("="))
    return SanitizerResult(
        tool=tool,
        calls={op: c for op, (c, _) in counts.items()},
        launches={op: n for op, (_, n) in counts.items()},
        too_large=len(_TOO_LARGE.findall(done.stdout)),
        errors=errors,
        ended=_ended(done) if done.returncode not in (0, ERROR_CODE) else "",
        seconds=time.monotonic() - began,
        output=told[:4000] if errors else "",
    )


def _ended(done: subprocess.CompletedProcess[str]) -> str:
    """What a child that failed said last, without what the tool says."""
    said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("=")]
    return f"exit code {done.returncode}: {said[-1].strip() if said else 'nothing said'}"


def in_turn(cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The first call of every op, then the second of every op, and so on."""
    longest = max((len(c) for c in cases.values()), default=0)
    return [(op, calls[i]) for i in range(longest) for op, calls in cases.items() if i < len(calls)]


def serve(file: str, seconds: str, plant: str) -> None:
    """The child: launch the calls saved in `file` until `seconds` are over, and print how many there were."""
    if plant:
        from kv_canary.difftest.mutation.planted import plant as plant_bug

        plant_bug(plant)
    launches: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    now = ""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def counted(self: Any, *arguments: Any, **keywords: Any) -> Any:
        launches[now] += 1
        return run(self, *arguments, **keywords)

    JITFunction.run = counted
    end = time.monotonic() + float(seconds)
    for entry in torch.load(file, weights_only=True):
        if time.monotonic() > end:
            break
        now = entry["op"]
        spec = get_spec(now)
        arguments = decode(spec, entry["arguments"])
        # Memory that some calls span is tens of GB: what an earlier one had is to be free, cycles of objects or not.
        gc.collect()
        needed = span_bytes(spec, arguments)
        if needed > MOST_OF_FREE * torch.cuda.mem_get_info()[0]:
            print(f"kv-canary-too-large {now} {needed}", flush=True)
            continue
        implementation(now, "triton")(**_on_device(spec, arguments))
        torch.cuda.synchronize()
        calls[now] += 1
        # At once: a launch that the tool stops ends the process.
        print(f"kv-canary-launches {now} {calls[now]} {launches[now]}", flush=True)


def span_bytes(spec: KernelSpec, arguments: Mapping[str, Any]) -> int:
    """Return the bytes that the tensors of a call span, each in an allocation of its own."""
    spans = []

    def add(leaf: Leaf) -> torch.Tensor:
        spans.append(_elements(leaf.tensor) * leaf.tensor.element_size())
        return leaf.tensor

    spec.map_tensors(arguments, add)
    return sum(spans)


def _elements(tensor: torch.Tensor) -> int:
    """The elements from a tensor's first to its last, whether or not they are its own."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _on_device(spec: KernelSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The call on the GPU, each tensor in an allocation of exactly its span; what is not read is not initialised."""

    def place(leaf: Leaf) -> torch.Tensor:
        tensor = leaf.tensor
        item = tensor.element_size()
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        # Allocations begin at multiples of 256 bytes: the phase is the tensor's own.
        phase = tensor.data_ptr() % 16 // item
        flat = torch.empty(phase + _elements(tensor), dtype=tensor.dtype, device="cuda")
        placed = flat.as_strided(tensor.shape, tensor.stride(), phase)
        if leaf.role in ("in", "inout"):
            placed.copy_(tensor)
        return placed

    return spec.map_tensors(arguments, place)
