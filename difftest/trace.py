"""The search for the program that wrote a byte: a launch in Triton's interpreter, watched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kv_canary.backends import implementation, interpreting
from kv_canary.difftest.memory import guarded
from kv_canary.specs.interface import KernelSpec

Element = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Write:
    """One write to a watched element: the kernel, its program's grid index, and what kind of write."""

    kernel: str
    program: tuple[int, ...]
    kind: str

    def __str__(self) -> str:
        index = ", ".join(map(str, self.program))
        return f"{self.kernel}[{index}] ({self.kind})"


def writes_to(spec: KernelSpec, bound: Mapping[str, Any], elements: Sequence[Element]) -> dict[Element, list[Write]]:
    """Run the Triton implementation in the interpreter and return who wrote each element, in the order of the writes.

    Args:
        bound: a complete call, on the CPU.
        elements: (path of a tensor, byte from the tensor's first on), each the first byte of an element.

    Raises:
        RuntimeError: Triton's interpreter is not what kernels run in here.
    """
    if not interpreting():
        raise RuntimeError("kv-canary: trace: kernels must run in Triton's interpreter: TRITON_INTERPRET=1")
    copies, spans = guarded(spec, bound, device="cpu", fill=2)
    placed = {leaf.path: leaf.tensor for leaf in spec.leaves(copies)}
    sizes = {span.leaf.path: span.leaf.tensor.element_size() for span in spans}
    watched = {(path, byte): (placed[path].data_ptr() + byte, sizes[path]) for path, byte in elements if path in placed}
    found: dict[Element, list[Write]] = {element: [] for element in elements}
    with _watching(watched, found):
        # What was written before an exception is still worth telling.
        try:
            implementation(spec.name, "triton")(**copies)
        except Exception as error:
            if not any(found.values()):
                raise RuntimeError(f"kv-canary: trace: the launch raised {type(error).__name__}: {error}") from error
    return found


@contextmanager
def _watching(watched: Mapping[Element, tuple[int, int]], found: dict[Element, list[Write]]) -> Iterator[None]:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    running: list[str] = []

    def note(pointers: Any, mask: Any, kind: str) -> None:
        addresses = np.atleast_1d(pointers.data)
        keep = np.broadcast_to(np.atleast_1d(mask.data), addresses.shape).astype(bool)
        addresses = addresses[keep].astype(np.uint64)
        for element, (address, size) in watched.items():
            if bool(((addresses >= address) & (addresses < address + size)).any()):
                grid = tuple(int(i) for i in builder.grid_idx)
                used = max((i + 1 for i, n in enumerate(builder.grid_dim) if n > 1), default=1)
                found[element].append(Write(kernel=running[-1] if running else "?", program=grid[:used], kind=kind))

    store, rmw = builder.create_masked_store, builder.create_atomic_rmw
    call = interpreter.GridExecutor.__call__

    def watched_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, "store")
        return store(ptrs, value, mask, *rest)

    def watched_rmw(op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        note(ptr, mask, "atomic")
        return rmw(op, ptr, val, mask, *rest)

    def named_call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        running.append(self.fn.__name__)
        try:
            return call(self, *arguments, **keywords)
        finally:
            running.pop()

    builder.create_masked_store, builder.create_atomic_rmw = watched_store, watched_rmw
    interpreter.GridExecutor.__call__ = named_call
    try:
        yield
    finally:
        del builder.create_masked_store, builder.create_atomic_rmw
        interpreter.GridExecutor.__call__ = call
