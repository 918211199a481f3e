"""Triton's kernels compiled for a GPU that need not be there: what fails to compile, and what each kernel takes.

Triton's interpreter runs what its compiler may refuse. Here the kernels of generated calls go through the compiler and
NVIDIA's assembler, which come with Triton, and nothing is launched.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kv_canary.backends import compiling_for, implementation, interpreting
from kv_canary.difftest.autotuned import untimed
from kv_canary.difftest.search import draw_cases
from kv_canary.difftest.strategies.large import large_cases
from kv_canary.errors import must_be
from kv_canary.specs.interface import KernelSpec

# Threads of a warp.
_WARP = 32
_USED = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    Args:
        op, name: whose, and the function's.
        constants: the numbers and flags that it is compiled for, by name.
        registers: of a thread.
        spilled: bytes of a thread's stack, which is where registers go that there are too few of.
        shared: bytes of shared memory of a program.
        threads: of a program.
        seconds: that it took to compile, or to take from Triton's cache.
    """

    op: str
    name: str
    constants: Mapping[str, Any]
    registers: int
    spilled: int
    shared: int
    threads: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refusal:
    """A call whose kernel does not compile: which kernel of which op, and what the compiler says."""

    op: str
    name: str
    says: str

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def prepare() -> None:
    """Check that kernels can be compiled in this process.

    Raises:
        ValueError: they would be interpreted, or the compiler for NVIDIA's GPUs is not there.
    """
    if interpreting():
        raise ValueError(must_be("difftest", "TRITON_INTERPRET", "unset, as nothing is interpreted here", "1"))
    from triton.backends import backends

    if "nvidia" not in backends:
        raise ValueError(must_be("difftest", "triton", "one that compiles for NVIDIA's GPUs", "another"))


def calls_of(op: str, *, examples: int, seed: int, capability: tuple[int, int]) -> Sequence[Mapping[str, Any]]:
    """Return calls of an op: those at the bounds of loops as they are on that GPU, and `examples` that are drawn."""
    with compiling_for(capability):
        large = list(large_cases(op, torch.device("cpu")))
    return large + (draw_cases(op, examples=examples, seed=seed) if examples else [])


def compile_calls(
    spec: KernelSpec, calls: Sequence[Mapping[str, Any]], *, capability: tuple[int, int]
) -> Iterator[Kernel | Refusal]:
    """Compile what `calls` of an op would launch on a GPU; each kernel is yielded once, with its first call.

    Args:
        calls: on the CPU.
        capability: the GPU's, as (9, 0).
    """
    with compiler(capability, op=spec.name) as found:
        launch = implementation(spec.name, "triton")
        for call in calls:
            bound = spec.bind(call)
            if not spec.has_one_outcome(bound):
                continue
            with suppress(_RefusedError):
                launch(**bound)
            yield from found
            found.clear()


class _RefusedError(Exception):
    """A kernel did not compile, which has been noted; the rest of its call's cannot be told."""


@contextmanager
def compiler(capability: tuple[int, int], *, op: str = "") -> Iterator[list[Kernel | Refusal]]:
    """Let launches of Triton's kernels inside the block compile them and do nothing else; the list gets every new one.

    Args:
        capability: the GPU's, as (9, 0).
        op: whose launches these are, for the list.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    target = GPUTarget("cuda", capability[0] * 10 + capability[1], _WARP)
    found: list[Kernel | Refusal] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        began = time.perf_counter()
        name = kernel.fn.__name__
        try:
            compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            says = f"{type(error).__name__}: {error}"
            if says not in seen:
                seen.add(says)
                found.append(Refusal(op=op, name=name, says=says))
            raise _RefusedError from error
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            seconds = time.perf_counter() - began
            registers, spilled = _resources(compiled.asm["cubin"])
            found.append(
                Kernel(
                    op=op,
                    name=name,
                    constants={k: v for k, v in kwargs.items() if isinstance(v, int) and k.isupper()},
                    registers=registers,
                    spilled=spilled,
                    shared=compiled.metadata.shared,
                    threads=compiled.metadata.num_warps * _WARP,
                    seconds=seconds,
                )
            )
        return compiled

    before = driver._active
    driver.set_active(_Driver(target))
    JITFunction.run = compile_only
    try:
        with compiling_for(capability), untimed():
            yield found
    finally:
        JITFunction.run = run
        driver._active = before


class _Driver:
    """What Triton's compiler asks of a GPU's driver."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        del device
        return 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as NVIDIA's own tool tells them."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = _USED.findall(said)[-1]
    return int(registers), int(stack)
