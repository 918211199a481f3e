"""Calls that must be refused, made from a right one and the op's spec: every argument, in every way the spec knows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kv_canary.cases.casefile import content_bytes
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.ops import Op
from kv_canary.specs.interface import ArgumentSpec, KernelSpec, ScalarSpec, StructSpec, TensorSpec, TensorsSpec

_OTHER_DTYPE = {torch.int64: torch.int32}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misuse:
    """A call that must be refused with `error`, in a message that names `argument`."""

    what: str
    argument: str
    arguments: Mapping[str, Any]
    error: type[Exception]


def check_misuse(spec: KernelSpec, arguments: Mapping[str, Any]) -> None:
    """Make every misuse of a right call; each must be refused, clearly, and leave every output as it was.

    Raises:
        Mismatch: one was accepted, refused with another exception or without naming the argument, or wrote something.
    """
    bound = spec.bind(arguments)
    op = Op(spec)
    for misuse in misuses(spec, bound):
        before = {leaf.path: leaf.tensor.clone() for leaf in spec.leaves(bound) if leaf.role in ("out", "inout")}
        problem = _problem(op, misuse)
        if not problem:
            after = {leaf.path: leaf.tensor for leaf in spec.leaves(bound)}
            written = [p for p, t in before.items() if not torch.equal(content_bytes(after[p]), content_bytes(t))]
            problem = f"it wrote {written[0]} all the same" if written else ""
        if problem:
            raise Mismatch(
                Outcome.MISUSE_ACCEPTED,
                op=spec.name,
                backend="spec",
                path=misuse.argument,
                detail=f"{misuse.what}: {problem}",
            )


def misuses(spec: KernelSpec, bound: Mapping[str, Any]) -> Iterator[Misuse]:
    """Yield the misuses of a complete call."""
    name = next(iter(spec.arguments))
    yield Misuse(
        what="an unknown argument", argument="no_such", arguments={**bound, "no_such": bound[name]}, error=TypeError
    )
    sized = _sized_elsewhere(spec, bound)
    for name, declared in spec.arguments.items():
        for what, value, error, path in _wrong_values(name, declared, bound[name], sized):
            yield Misuse(what=what, argument=path, arguments={**bound, name: value}, error=error)
        if isinstance(declared, TensorSpec) and declared.with_ is not None and bound[name] is not None:
            yield Misuse(
                what=f"without {declared.with_}",
                argument=declared.with_,
                arguments={**bound, declared.with_: None},
                error=ValueError,
            )
        if _required(declared):
            rest = {other: value for other, value in bound.items() if other != name}
            yield Misuse(what="left out", argument=name, arguments=rest, error=TypeError)


def _problem(op: Op, misuse: Misuse) -> str:
    try:
        op(backend="reference", **misuse.arguments)
    except misuse.error as error:
        named = op.spec.name in str(error) and misuse.argument.split(".")[-1] in str(error)
        return "" if named else f"the message names not both op and argument: {error}"
    except Exception as error:
        return f"{type(error).__name__} instead of {misuse.error.__name__}: {error}"
    return "it was accepted"


Wrong = tuple[str, Any, type[Exception], str]


def _wrong_values(name: str, declared: ArgumentSpec, value: Any, sized: set[str]) -> Iterator[Wrong]:
    if isinstance(declared, ScalarSpec):
        yield "a string", "1", TypeError, name
        if declared.type is int:
            yield "a bool", True, TypeError, name
            yield "more than 64 bits", 1 << 63, ValueError, name
            if declared.minimum is not None:
                yield "below the minimum", declared.minimum - 1, ValueError, name
    elif isinstance(declared, TensorSpec):
        yield "a list", [1], TypeError, name
        if value is not None:
            yield from _wrong_tensors(name, declared, value, sized)
    elif isinstance(declared, TensorsSpec):
        yield "a tensor", value[0], TypeError, name
        yield "an empty tuple", (), ValueError, name
        for what, wrong, error, path in _wrong_tensors(f"{name}[0]", declared.each, value[0], sized):
            yield what, (wrong, *value[1:]), error, path
    else:
        yield "a dict", {}, TypeError, name
        for field in dataclasses.fields(declared.type):
            if "spec" in field.metadata:
                path, tensor = f"{name}.{field.name}", getattr(value, field.name)
                for what, wrong, error, _ in _wrong_tensors(path, field.metadata["spec"], tensor, sized):
                    yield what, dataclasses.replace(value, **{field.name: wrong}), error, path


def _wrong_tensors(path: str, declared: TensorSpec, tensor: torch.Tensor, sized: set[str]) -> Iterator[Wrong]:
    yield "another dtype", tensor.to(_OTHER_DTYPE.get(tensor.dtype, torch.int64)), TypeError, path
    yield "one dimension more", tensor[..., None], ValueError, path
    if path in sized:
        longer = torch.zeros((tensor.shape[0] + 1, *tensor.shape[1:]), dtype=tensor.dtype)
        yield "one element more", longer, ValueError, path
    if not declared.row_strided and tensor.numel() > 1 and tensor.shape[-1] > 1:
        spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
        yield "not contiguous", spread, ValueError, path


def _sized_elsewhere(spec: KernelSpec, bound: Mapping[str, Any]) -> set[str]:
    """Paths of tensors whose first extent another tensor of the call has as well, or is a number."""
    users: dict[str, list[str]] = {}
    fixed = set()
    for leaf in spec.leaves(bound):
        if leaf.spec is None or leaf.role == "scratch" or not leaf.spec.shape:
            continue
        size = leaf.spec.shape[0]
        if isinstance(size, int):
            fixed.add(leaf.path)
        elif isinstance(size, str):
            users.setdefault(size.split("+")[0], []).append(leaf.path)
    # The first to use a symbol sets it, so a wrong one there is blamed on another argument.
    return fixed | {path for paths in users.values() for path in paths[1:]}


def _required(declared: ArgumentSpec) -> bool:
    if isinstance(declared, TensorSpec):
        return not declared.optional and declared.role != "scratch"
    return isinstance(declared, StructSpec | TensorsSpec) or declared.default is ScalarSpec(type=int).default
