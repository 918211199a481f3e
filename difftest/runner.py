"""The differential check: one call on the reference and on Triton, and every byte of the outcome compared."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from kv_canary.backends import implementation
from kv_canary.difftest.memory import guarded, room_for
from kv_canary.specs.interface import KernelSpec, StructSpec
from kv_canary.specs.violation_row import VIOLATION_WORDS

Bytes = Mapping[str, torch.Tensor]


class Outcome(StrEnum):
    """What can be wrong with a backend, in the order in which it is looked for."""

    CRASHED = "the process that ran the call died"
    HUNG = "the call did not return in time"
    RAISED = "the call raised an exception"
    GUARD_TOUCHED = "a guard zone around a tensor was written"
    INPUT_CHANGED = "an input was written"
    BYTES_DIFFER = "an output differs from the reference's"
    NOT_REPEATABLE = "the same launch gave another result the second time"
    GRAPH_DIFFERS = "a captured CUDA graph of the launch replays to another result"
    MISUSE_ACCEPTED = "a call that should be refused was not, or not clearly"
    FILE_DIFFERS = "a call that was saved and loaded is another one"


class Mismatch(Exception):  # noqa: N818 - it is what the check is for, not an error of the check
    """A backend failed the differential check.

    Args:
        outcome: what was wrong.
        op: name of the op.
        backend: which backend was wrong.
        path: the tensor, as `argument.field`; "" where no single one is at fault.
        detail: where, and both values.
        expected: the bytes of every output as they should be, by path, where they are known.
        got: the bytes of every output as that backend left them.
    """

    def __init__(
        self,
        outcome: Outcome,
        *,
        op: str,
        backend: str,
        path: str = "",
        detail: str = "",
        expected: Bytes | None = None,
        got: Bytes | None = None,
    ) -> None:
        where = f"{path}: " if path else ""
        super().__init__(f"{op} on {backend}: {where}{outcome}{': ' + detail if detail else ''}")
        self.outcome, self.op, self.backend, self.path, self.detail = outcome, op, backend, path, detail
        self.expected, self.got = dict(expected or {}), dict(got or {})

    @property
    def signature(self) -> tuple[str, str, str, str]:
        """What tells one failure from another: op, backend, outcome and tensor."""
        return self.op, self.backend, self.outcome.name, self.path


def check_case(spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str = "cpu") -> None:
    """Run one call on both backends, Triton on `device`, twice each, and compare every byte.

    On a GPU the launch is captured in a CUDA graph as well, and replayed, and the reference runs there too.

    Args:
        spec: the op.
        arguments: a complete or partial call, on the CPU; it is not changed.

    Raises:
        Mismatch: naming what was wrong, where, and both values.
    """
    bound = spec.bind(arguments)
    with room_for(spec, bound, device=device):
        _check(spec, bound, device)


def launch(
    spec: KernelSpec,
    bound: Mapping[str, Any],
    *,
    backend: str,
    device: torch.device | str,
    fill: int,
    in_graph: bool = False,
) -> dict[str, torch.Tensor]:
    """Run a complete call on guarded copies; return the bytes of every output and in/out tensor, by path.

    Raises:
        Mismatch: it raised, wrote beside a tensor, or wrote an input.
    """
    copies, spans = guarded(spec, bound, device=device, fill=fill)
    function = implementation(spec.name, backend)
    try:
        if in_graph:
            # Whatever is compiled on a first launch was compiled by the eager ones before.
            graph = torch.cuda.CUDAGraph()
            with warnings.catch_warnings():
                # An op that is given nothing to do may launch nothing.
                warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
                with torch.cuda.graph(graph):
                    function(**copies)
            graph.replay()
        else:
            function(**copies)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        detail = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise Mismatch(Outcome.RAISED, op=spec.name, backend=backend, detail=detail) from error
    got = {s.leaf.path: s.data for s in spans if s.leaf.role in ("out", "inout")}
    for span in spans:
        path = span.leaf.path
        if not span.guards_intact():
            raise Mismatch(Outcome.GUARD_TOUCHED, op=spec.name, backend=backend, path=path, got=got)
        if span.leaf.role == "in" and not torch.equal(span.data, span.data_before):
            detail = first_difference(span.leaf.tensor, span.data_before, span.data)
            raise Mismatch(Outcome.INPUT_CHANGED, op=spec.name, backend=backend, path=path, detail=detail, got=got)
    return got


def violation_logs(spec: KernelSpec) -> list[str]:
    """Return the arguments of an op that are violation logs, in which the order of rows is free."""
    return [n for n, s in spec.arguments.items() if isinstance(s, StructSpec) and s.compare == "violations"]


def differing(
    spec: KernelSpec, bound: Mapping[str, Any], expected: Bytes, got: Bytes, *, overflowed: bool = True
) -> tuple[str, str] | None:
    """Return the first output whose bytes differ, as (path, detail), or None.

    Args:
        bound: the call, as it was before the launch.
        overflowed: whether to compare the rows of a ring that overflowed, which takes another launch of the reference.
    """
    logs = violation_logs(spec)
    rings = {f"{name}.ring" for name in logs}
    for path, data in expected.items():
        if path not in rings and not torch.equal(data, got[path]):
            leaf = next(leaf for leaf in spec.leaves(bound) if leaf.path == path)
            return path, first_difference(leaf.tensor, data, got[path])
    for name in logs:
        detail = _compare_rings(spec, bound, name, expected, got, overflowed=overflowed)
        if detail:
            return f"{name}.ring", detail
    return None


def _check(spec: KernelSpec, bound: Mapping[str, Any], device: torch.device | str) -> None:
    reference = launch(spec, bound, backend="reference", device="cpu", fill=1)
    triton = launch(spec, bound, backend="triton", device=device, fill=2)
    _compare(spec, bound, reference, triton, backend="triton", outcome=Outcome.BYTES_DIFFER)
    for backend, first, where in (("reference", reference, torch.device("cpu")), ("triton", triton, device)):
        again = launch(spec, bound, backend=backend, device=where, fill=3)
        _compare(spec, bound, first, again, backend=backend, outcome=Outcome.NOT_REPEATABLE)
    if torch.device(device).type == "cuda":
        replayed = launch(spec, bound, backend="triton", device=device, fill=4, in_graph=True)
        _compare(spec, bound, triton, replayed, backend="triton", outcome=Outcome.GRAPH_DIFFERS)
        on_device = launch(spec, bound, backend="reference", device=device, fill=5)
        _compare(spec, bound, reference, on_device, backend="reference", outcome=Outcome.BYTES_DIFFER)


def _compare(
    spec: KernelSpec, bound: Mapping[str, Any], expected: Bytes, got: Bytes, *, backend: str, outcome: Outcome
) -> None:
    found = differing(spec, bound, expected, got)
    if found is not None:
        path, detail = found
        raise Mismatch(outcome, op=spec.name, backend=backend, path=path, detail=detail, expected=expected, got=got)


def _compare_rings(
    spec: KernelSpec, bound: Mapping[str, Any], name: str, expected: Bytes, got: Bytes, *, overflowed: bool
) -> str:
    """Compare two violation rings as multisets, since the order of atomics is free; return what differs, or ""."""
    ring = bound[name].ring
    capacity = ring.shape[0]
    first = min(max(int(bound[name].count), 0), capacity)
    count = int(expected[f"{name}.count"].view(torch.int64))
    rows, rows_got = (_rows(result[f"{name}.ring"]) for result in (expected, got))
    last = min(max(count, first), capacity)
    if rows[:first] != rows_got[:first] or rows[last:] != rows_got[last:]:
        return "rows outside [count before, count after) were touched"
    new = Counter(map(tuple, rows_got[first:last]))
    if count <= capacity and int(bound[name].count) >= 0:
        wanted = Counter(map(tuple, rows[first:last]))
        if new == wanted:
            return ""
        missing, extra = list((wanted - new).elements()), list((new - wanted).elements())
        return f"reference has {missing[:1]}, got {extra[:1]}"
    if not overflowed:
        return ""
    # Overflowed, or counted from below 0: which rows made it is free, but each must be one that the reference finds.
    found = count - int(bound[name].count)
    ring = torch.zeros(found, VIOLATION_WORDS, dtype=torch.int64)
    roomy = {**bound, name: dataclasses.replace(bound[name], ring=ring, count=torch.zeros(1, dtype=torch.int64))}
    whole = _rows(launch(spec, roomy, backend="reference", device="cpu", fill=1)[f"{name}.ring"])
    extra = list((new - Counter(map(tuple, whole))).elements())
    return f"not all rows have room, and {extra[0]} is none of the reference's rows" if extra else ""


def _rows(data: torch.Tensor) -> list[list[int]]:
    rows: list[list[int]] = data.view(torch.int64).view(-1, VIOLATION_WORDS).tolist()
    return rows


def first_difference(like: torch.Tensor, expected: torch.Tensor, got: torch.Tensor) -> str:
    """Say where the first differing element of two byte strings, laid out as `like`, is, and both values."""
    item = like.element_size()
    index = int((expected != got).nonzero()[0]) // item
    values = [t[index * item : (index + 1) * item].clone().view(like.dtype).tolist()[0] for t in (expected, got)]
    where = f"[{index}]"
    if like.dim() == 2 and like.shape[1]:
        # The bytes are those of the span, gaps included, or of the packed rows where the gaps are too large to keep.
        packed = len(expected) == like.numel() * item
        width = like.shape[1] if packed else like.stride(0)
        where = f"[{index // width}, {index % width}]"
    return f"first at {where}: expected {values[0]}, got {values[1]}"
