"""The differential check: one launch on the reference and on Triton, and every byte of the outcome compared."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from kv_canary.backends import implementation
from kv_canary.constants import VIOLATION_WORDS
from kv_canary.difftest.memory import Span, guarded
from kv_canary.specs.interface import KernelSpec, StructSpec


class Outcome(StrEnum):
    """What can be wrong with a backend, in the order in which it is looked for."""

    GUARD_TOUCHED = "a guard zone around a tensor was written"
    INPUT_CHANGED = "an input was written"
    BYTES_DIFFER = "an output differs from the reference's"
    NOT_REPEATABLE = "the same launch gave another result the second time"
    GRAPH_DIFFERS = "a captured CUDA graph of the launch replays to another result"


class Mismatch(Exception):  # noqa: N818 - it is what the check is for, not an error of the check
    """A backend failed the differential check.

    Args:
        outcome: what was wrong.
        op: name of the op.
        backend: which backend was wrong.
        path: the tensor, as `argument.field`.
        detail: where, and both values.
    """

    def __init__(self, outcome: Outcome, *, op: str, backend: str, path: str, detail: str) -> None:
        super().__init__(f"{op} on {backend}: {path}: {outcome}{': ' + detail if detail else ''}")
        self.outcome, self.op, self.backend, self.path, self.detail = outcome, op, backend, path, detail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one launch left behind: the bytes of every output and in/out tensor, by path."""

    outputs: Mapping[str, torch.Tensor]


def check_case(spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str = "cpu") -> None:
    """Run one case on both backends, Triton on `device`, twice each, and compare every byte.

    On a GPU the launch is captured in a CUDA graph as well, and replayed, and the reference runs there too.

    Args:
        spec: the op.
        arguments: a complete or partial call, on the CPU; it is not changed.

    Raises:
        Mismatch: naming what was wrong, where, and both values.
    """
    bound = spec.bind(arguments)
    reference = _launch(spec, bound, backend="reference", device="cpu", fill=1)
    triton = _launch(spec, bound, backend="triton", device=device, fill=2)
    _compare(spec, bound, reference, triton, backend="triton", outcome=Outcome.BYTES_DIFFER)
    for backend, first, where in (("reference", reference, torch.device("cpu")), ("triton", triton, device)):
        again = _launch(spec, bound, backend=backend, device=where, fill=3)
        _compare(spec, bound, first, again, backend=backend, outcome=Outcome.NOT_REPEATABLE)
    if torch.device(device).type == "cuda":
        replayed = _launch(spec, bound, backend="triton", device=device, fill=4, in_graph=True)
        _compare(spec, bound, triton, replayed, backend="triton", outcome=Outcome.GRAPH_DIFFERS)
        on_device = _launch(spec, bound, backend="reference", device=device, fill=5)
        _compare(spec, bound, reference, on_device, backend="reference", outcome=Outcome.BYTES_DIFFER)


def _launch(
    spec: KernelSpec,
    bound: Mapping[str, Any],
    *,
    backend: str,
    device: torch.device | str,
    fill: int,
    in_graph: bool = False,
) -> Result:
    copies, spans = guarded(spec, bound, device=device, fill=fill)
    launch = implementation(spec.name, backend)
    if in_graph:
        # Whatever is compiled on a first launch was compiled by the eager ones before.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(**copies)
        graph.replay()
    else:
        launch(**copies)
    for span in spans:
        if not span.guards_intact():
            raise Mismatch(Outcome.GUARD_TOUCHED, op=spec.name, backend=backend, path=span.leaf.path, detail="")
        if span.leaf.role == "in" and not torch.equal(span.data, span.data_before):
            detail = _first_difference(span, span.data_before, span.data)
            raise Mismatch(Outcome.INPUT_CHANGED, op=spec.name, backend=backend, path=span.leaf.path, detail=detail)
    return Result(outputs={s.leaf.path: s.data for s in spans if s.leaf.role in ("out", "inout")})


def _compare(
    spec: KernelSpec,
    bound: Mapping[str, Any],
    expected: Result,
    got: Result,
    *,
    backend: str,
    outcome: Outcome,
) -> None:
    logs = {n: s for n, s in spec.arguments.items() if isinstance(s, StructSpec) and s.compare == "violations"}
    rings = {f"{name}.ring" for name in logs}
    for path, data in expected.outputs.items():
        if path not in rings and not torch.equal(data, got.outputs[path]):
            span = next(leaf for leaf in spec.leaves(bound) if leaf.path == path)
            raise Mismatch(
                outcome,
                op=spec.name,
                backend=backend,
                path=path,
                detail=_difference(span.tensor, data, got.outputs[path]),
            )
    for name in logs:
        detail = _compare_rings(spec, bound, name, expected, got)
        if detail:
            raise Mismatch(outcome, op=spec.name, backend=backend, path=f"{name}.ring", detail=detail)


def _compare_rings(spec: KernelSpec, bound: Mapping[str, Any], name: str, expected: Result, got: Result) -> str:
    """Compare two violation rings as multisets, since the order of atomics is free; return what differs, or ""."""
    ring = bound[name].ring
    capacity = ring.shape[0]
    first = min(max(int(bound[name].count), 0), capacity)
    count = int(expected.outputs[f"{name}.count"].view(torch.int64))
    rows, rows_got = (_rows(result.outputs[f"{name}.ring"]) for result in (expected, got))
    last = min(max(count, first), capacity)
    if rows[:first] != rows_got[:first] or rows[last:] != rows_got[last:]:
        return "rows outside [count before, count after) were touched"
    new = Counter(map(tuple, rows_got[first:last]))
    if count <= capacity:
        wanted = Counter(map(tuple, rows[first:last]))
        if new == wanted:
            return ""
        missing, extra = list((wanted - new).elements()), list((new - wanted).elements())
        return f"reference has {missing[:1]}, got {extra[:1]}"
    # Overflowed: which rows made it is free, but each must be one of those that the reference finds.
    room = torch.zeros(count, VIOLATION_WORDS, dtype=torch.int64)
    roomy = {**bound, name: dataclasses.replace(bound[name], ring=room)}
    whole = _rows(_launch(spec, roomy, backend="reference", device="cpu", fill=1).outputs[f"{name}.ring"])[first:]
    extra = list((new - Counter(map(tuple, whole))).elements())
    return f"overflowed, and {extra[0]} is none of the reference's rows" if extra else ""


def _rows(data: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = data.view(torch.int64).view(-1, VIOLATION_WORDS).tolist()
    return rows


def _first_difference(span: Span, expected: torch.Tensor, got: torch.Tensor) -> str:
    return _difference(span.leaf.tensor, expected, got)


def _difference(like: torch.Tensor, expected: torch.Tensor, got: torch.Tensor) -> str:
    """Say where the first differing element is, and both values."""
    item = like.element_size()
    index = int((expected != got).nonzero()[0]) // item
    values = [t[index * item : (index + 1) * item].clone().view(like.dtype).tolist()[0] for t in (expected, got)]
    where = f"[{index}]"
    if like.dim() == 2 and like.stride(0):
        where = f"[{index // like.stride(0)}, {index % like.stride(0)}]"
    return f"first at {where}: expected {values[0]}, got {values[1]}"
