"""The differential check: one call on the reference and on Triton, and the whole outcome compared."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from kv_canary.backends import implementation
from kv_canary.cases.comparison import Bytes, Mismatch, Outcome, differing, first_difference
from kv_canary.difftest.memory import guarded, room_for
from kv_canary.specs.interface import KernelSpec


def check_case(
    spec: KernelSpec, arguments: Mapping[str, Any], *, device: torch.device | str = "cpu", again: bool = True
) -> None:
    """Run one call on both backends, Triton on `device`, twice each, and compare every byte, or as the spec says.

    On a GPU the launch is captured in a CUDA graph as well, and replayed, and the reference runs there too.

    Args:
        spec: the op.
        arguments: a complete or partial call, on the CPU; it is not changed.
        again: whether each is run a second time, which must give the same.

    Raises:
        Mismatch: naming what was wrong, where, and both values.
    """
    bound = spec.bind(arguments)
    with room_for(spec, bound, device=device):
        _check(spec, bound, device, again=again, keeps_scratch=gives_scratch(spec, arguments))


def gives_scratch(spec: KernelSpec, arguments: Mapping[str, Any]) -> bool:
    """Whether a call says what some of its scratch holds before."""
    return any(arguments.get(name) is not None for name in spec.scratch)


def launch(
    spec: KernelSpec,
    bound: Mapping[str, Any],
    *,
    backend: str,
    device: torch.device | str,
    fill: int,
    in_graph: bool = False,
    keeps_scratch: bool = False,
) -> dict[str, torch.Tensor]:
    """Run a complete call on guarded copies; return the bytes of every output and in/out tensor, by path.

    Raises:
        Mismatch: it raised, wrote beside a tensor, or wrote an input.
    """
    copies, spans = guarded(spec, bound, device=device, fill=fill, keeps_scratch=keeps_scratch)
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


def _check(
    spec: KernelSpec, bound: Mapping[str, Any], device: torch.device | str, *, again: bool, keeps_scratch: bool
) -> None:
    reference = launch(spec, bound, backend="reference", device="cpu", fill=1)
    triton = launch(spec, bound, backend="triton", device=device, fill=2)
    _compare(spec, bound, reference, triton, backend="triton", outcome=Outcome.BYTES_DIFFER)
    if keeps_scratch:
        kept = launch(spec, bound, backend="triton", device=device, fill=2, keeps_scratch=True)
        _compare(spec, bound, reference, kept, backend="triton", outcome=Outcome.BYTES_DIFFER)
    if again:
        for backend, first, where in (("reference", reference, torch.device("cpu")), ("triton", triton, device)):
            second = launch(spec, bound, backend=backend, device=where, fill=3)
            _compare(spec, bound, first, second, backend=backend, outcome=Outcome.NOT_REPEATABLE)
    if torch.device(device).type == "cuda":
        replayed = launch(spec, bound, backend="triton", device=device, fill=4, in_graph=True)
        _compare(spec, bound, triton, replayed, backend="triton", outcome=Outcome.GRAPH_DIFFERS)
        on_device = launch(spec, bound, backend="reference", device=device, fill=5)
        _compare(spec, bound, reference, on_device, backend="reference", outcome=Outcome.BYTES_DIFFER)


def _compare(
    spec: KernelSpec, bound: Mapping[str, Any], expected: Bytes, got: Bytes, *, backend: str, outcome: Outcome
) -> None:
    def on_reference(call: Mapping[str, Any]) -> Bytes:
        return launch(spec, call, backend="reference", device="cpu", fill=1)

    repeated = outcome in (Outcome.NOT_REPEATABLE, Outcome.GRAPH_DIFFERS)
    found = differing(spec, bound, expected, got, relaunch=on_reference, repeated=repeated)
    if found is not None:
        path, detail = found
        raise Mismatch(outcome, op=spec.name, backend=backend, path=path, detail=detail, expected=expected, got=got)
