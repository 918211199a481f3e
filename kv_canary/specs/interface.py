"""The shared spec interface: one declaration per op, from which everything generic about the op is derived.

A `KernelSpec` says what an op takes and writes. From it come validation, allocation of outputs and scratch, and
what difftest needs to poison, guard, copy and compare. Both backends of an op implement the same signature.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag
from typing import Any, Literal, TypeGuard

import torch

from kv_canary.errors import must_be
from kv_canary.specs.tolerance import Tolerance

Role = Literal["in", "out", "inout", "scratch"]

Sizes = Mapping[str, int]

# An extent: a number, a symbol ("bs"), a symbol plus a number ("bs+1"), or a function of the symbols known so far.
Size = str | int | Callable[[Sizes], int]

_REQUIRED = inspect.Parameter.empty
_SYMBOL = re.compile(r"([a-z_][a-z_0-9]*)(?:\+(\d+))?$")


# What values are indices of: slots of the pool, and rows of whatever has one for each request.
SLOT: Mapping[str, int | None] = {"num_slots": None}
ROW: Mapping[str, int | None] = dict.fromkeys(("num_rows", "token_rows", "num_anchors"))


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """A tensor argument.

    Args:
        dtype: its dtype.
        shape: its extents; symbols must agree across the arguments of one call.
        role: "in" is read, "out" is written without being read, "inout" is both, "scratch" may hold anything before
            and after, and is allocated for a caller who leaves it out.
        optional: may be None.
        with_: name of an argument that must be given exactly when this one is.
        row_strided: rows may lie further apart than their length; the innermost stride is 1 all the same.
        row_multiple: what the row stride must be a multiple of.
        index_of: sizes that its values are indices along, by symbol: those of one column, or of all where that is None.
            What is looked up in a LUT first is an index along "lut_len" where the call has one, else along "num_slots".
        lines, columns: names of its rows and of its columns, for people.
        flags: what the bits of its values mean.
        tolerance: of an output, how far it may lie from the reference's; None: not by a bit.
        doc: meaning, in a line.

    Raises:
        ValueError: a tolerance of what is no output.
    """

    dtype: torch.dtype
    shape: tuple[Size, ...]
    role: Role = "in"
    optional: bool = False
    with_: str | None = None
    row_strided: bool = False
    row_multiple: int = 1
    index_of: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    lines: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    flags: type[IntFlag] | None = None
    tolerance: Tolerance | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if self.tolerance is not None and self.role not in ("out", "inout"):
            raise ValueError(
                must_be("TensorSpec", "tolerance", "of an out or inout tensor", f"one of role {self.role}")
            )


@dataclass(frozen=True, kw_only=True)
class TensorsSpec:
    """A non-empty tuple of tensors, each as `each` says."""

    each: TensorSpec
    doc: str = ""


@dataclass(frozen=True, kw_only=True)
class StructSpec:
    """A structure argument: a dataclass whose tensor fields carry their own `TensorSpec`.

    Args:
        type: the dataclass.
        role: the role of its tensor fields here.
        compare: "bytes", or "violations" where the order of rows is free (a `ViolationLog`).
        doc: meaning, in a line.
    """

    type: type
    role: Role = "in"
    compare: Literal["bytes", "violations"] = "bytes"
    doc: str = ""


@dataclass(frozen=True, kw_only=True)
class ScalarSpec:
    """A plain int or bool, known on the host when the op is launched."""

    type: type[int]
    default: Any = _REQUIRED
    minimum: int | None = None
    doc: str = ""


ArgumentSpec = TensorSpec | TensorsSpec | StructSpec | ScalarSpec


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One tensor inside the arguments of a call. KV bytes have a `source`, their `KvSource`, and no `spec`."""

    path: str
    tensor: torch.Tensor
    role: Role
    spec: TensorSpec | None
    source: Any = None


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """The declaration of one op.

    Args:
        name: the op's name: its file name in `specs/`, `reference/`, `kernels/` and `difftest/strategies/`.
        doc: what the op does; the first sentence is the contract.
        arguments: every argument by name, in order.
        checks: further checks of `(arguments, sizes)`, which raise.
        has_one_outcome: whether a bound call has one outcome only, or its result depends on who of two writers comes
            last. Strategies draw none that has more, and shrinking makes none.
    """

    name: str
    doc: str
    arguments: Mapping[str, ArgumentSpec]
    checks: tuple[Callable[[Mapping[str, Any], Sizes], None], ...] = ()
    has_one_outcome: Callable[[Mapping[str, Any]], bool] = lambda arguments: True

    def bind(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete arguments of a call: validated, defaults filled in, missing scratch allocated.

        Raises:
            TypeError: an argument is missing, unknown, or of a wrong type or dtype.
            ValueError: a rank, size, stride, device or value is wrong.
        """
        for name in given:
            if name not in self.arguments:
                raise TypeError(
                    f"kv-canary: {self.name}: unknown argument {name}; it takes {', '.join(self.arguments)}"
                )
        binding = _Binding(self.name)
        bound: dict[str, Any] = {}
        for name, spec in self.arguments.items():
            bound[name] = binding.check(name, spec, given.get(name, _REQUIRED))
        for name, spec in self.arguments.items():
            if isinstance(spec, TensorSpec):
                if spec.with_ is not None and (bound[name] is None) != (bound[spec.with_] is None):
                    missing, present = (name, spec.with_) if bound[name] is None else (spec.with_, name)
                    raise ValueError(must_be(self.name, missing, f"given together with {present}", "None"))
                if spec.role == "scratch" and bound[name] is None:
                    bound[name] = allocate_tensor(spec, binding.sizes, binding.device or "cpu")
        for check in self.checks:
            check(bound, binding.sizes)
        return bound

    @property
    def scratch(self) -> list[str]:
        """The arguments that may hold anything before a call, and that a call need not have."""
        return [n for n, spec in self.arguments.items() if isinstance(spec, TensorSpec) and spec.role == "scratch"]

    def leaves(self, arguments: Mapping[str, Any]) -> Iterator[Leaf]:
        """Yield every tensor in `arguments`, with its path, role and spec."""
        for name, spec in self.arguments.items():
            yield from _leaves(name, spec, arguments[name])

    def map_tensors(self, arguments: Mapping[str, Any], fn: Callable[[Leaf], torch.Tensor]) -> dict[str, Any]:
        """Return `arguments` with every tensor replaced by `fn(leaf)`; the structures around them are rebuilt."""
        return {name: _map(name, spec, arguments[name], fn) for name, spec in self.arguments.items()}

    def signature(self) -> inspect.Signature:
        """Return the keyword-only signature of the op."""
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(spec))
            for name, spec in self.arguments.items()
        ]
        return inspect.Signature(
            [*parameters, inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default=None)]
        )


def are_distinct(indices: torch.Tensor, size: int) -> bool:
    """Whether no index in (0, size) occurs twice in `indices`; 0 is padding."""
    inside = indices[(indices > 0) & (indices < size)]
    return len(inside.unique()) == len(inside)


def allocate_tensor(spec: TensorSpec, sizes: Sizes, device: torch.device | str) -> torch.Tensor:
    """Return a zeroed tensor of `spec`'s dtype, with the shape its symbols have in `sizes`."""
    return torch.zeros([_extent(size, sizes) for size in spec.shape], dtype=spec.dtype, device=device)


class _Binding:
    """One call's validation: the sizes and the device that the arguments seen so far agree on."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.device: torch.device | None = None
        self._size_from: dict[str, str] = {}
        self._device_from = ""

    def check(self, name: str, spec: ArgumentSpec, value: Any) -> Any:
        if value is _REQUIRED:
            value = _default(spec)
            if value is _REQUIRED:
                raise TypeError(f"kv-canary: {self.op}: missing argument {name} ({spec.doc})")
        if isinstance(spec, ScalarSpec):
            return self._check_scalar(name, spec, value)
        if isinstance(spec, TensorSpec):
            if value is None and _default(spec) is None:
                return None
            return self._check_tensor(name, spec, value)
        if isinstance(spec, TensorsSpec):
            if not isinstance(value, tuple | list):
                raise TypeError(must_be(self.op, name, "a tuple of tensors", type(value).__name__))
            if not value:
                raise ValueError(must_be(self.op, name, "at least one tensor", "an empty tuple"))
            return tuple(self._check_tensor(f"{name}[{i}]", spec.each, each) for i, each in enumerate(value))
        if not isinstance(value, spec.type):
            raise TypeError(must_be(self.op, name, f"a {spec.type.__name__}", type(value).__name__))
        for field, inner in _struct_fields(value):
            path = f"{name}.{field.name}"
            if "spec" in field.metadata:
                self._check_tensor(path, field.metadata["spec"], inner)
            elif _is_source(inner):
                self._check_device(path, inner.layers[0].device)
        return value

    def _check_scalar(self, name: str, spec: ScalarSpec, value: Any) -> Any:
        if not isinstance(value, spec.type) or (spec.type is int and isinstance(value, bool)):
            expected = "an int" if spec.type is int else "True or False"
            raise TypeError(must_be(self.op, name, expected, f"{value!r} ({type(value).__name__})"))
        if spec.minimum is not None and value < spec.minimum:
            raise ValueError(must_be(self.op, name, f"at least {spec.minimum}", str(value)))
        if spec.type is int and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(must_be(self.op, name, "a signed 64-bit integer", str(value)))
        return value

    def _check_tensor(self, name: str, spec: TensorSpec, value: Any) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(must_be(self.op, name, "a tensor", type(value).__name__))
        if value.dtype != spec.dtype:
            raise TypeError(must_be(self.op, name, f"of dtype {spec.dtype}", str(value.dtype)))
        if value.dim() != len(spec.shape):
            raise ValueError(must_be(self.op, name, f"of shape {self._shape_text(spec)}", str(list(value.shape))))
        for size, extent in zip(spec.shape, value.shape, strict=True):
            self._check_extent(name, spec, size, extent, value)
        self._check_strides(name, spec, value)
        self._check_device(name, value.device)
        return value

    def _check_extent(self, name: str, spec: TensorSpec, size: Size, extent: int, value: torch.Tensor) -> None:
        if isinstance(size, str):
            symbol, plus = _parse(size)
            if symbol not in self.sizes and extent >= plus:
                self.sizes[symbol] = extent - plus
                self._size_from[symbol] = name
                return
            needed = self.sizes[symbol] + plus if symbol in self.sizes else plus
        else:
            needed = _extent(size, self.sizes)
        # Scratch may be larger than needed, so that one allocation serves every batch.
        if extent < needed or (extent > needed and spec.role != "scratch"):
            raise ValueError(must_be(self.op, name, f"of shape {self._shape_text(spec)}", str(list(value.shape))))

    def _check_strides(self, name: str, spec: TensorSpec, value: torch.Tensor) -> None:
        if not spec.row_strided:
            if not value.is_contiguous():
                raise ValueError(must_be(self.op, name, "contiguous", f"strides {value.stride()}"))
            return
        if value.numel() == 0:
            return
        stride, width = value.stride(0), value.shape[1]
        if value.stride(1) != 1 and width > 1:
            raise ValueError(must_be(self.op, name, "contiguous inside a row", f"strides {value.stride()}"))
        if value.shape[0] > 1 and (stride < width or stride % spec.row_multiple):
            multiple = f" and a multiple of {spec.row_multiple}" if spec.row_multiple > 1 else ""
            raise ValueError(must_be(self.op, name, f"of a row stride at least {width}{multiple}", str(stride)))

    def _check_device(self, name: str, device: torch.device) -> None:
        if self.device is None:
            self.device, self._device_from = device, name
        elif device != self.device:
            raise ValueError(must_be(self.op, name, f"on {self.device}, like {self._device_from}", str(device)))

    def _shape_text(self, spec: TensorSpec) -> str:
        parts = []
        for size in spec.shape:
            if isinstance(size, str):
                symbol, plus = _parse(size)
                known = symbol in self.sizes
                parts.append(
                    f"{size}={self.sizes[symbol] + plus} ({symbol} of {self._size_from[symbol]})" if known else size
                )
            else:
                parts.append(str(_extent(size, self.sizes)))
        return f"[{', '.join(parts)}]"


def _default(spec: ArgumentSpec) -> Any:
    if isinstance(spec, ScalarSpec):
        return spec.default
    if isinstance(spec, TensorSpec) and (spec.optional or spec.role == "scratch"):
        return None
    return _REQUIRED


@functools.cache
def _parse(size: str) -> tuple[str, int]:
    match = _SYMBOL.match(size)
    if match is None:
        raise ValueError(f"kv-canary: TensorSpec: shape must be of symbols like 'bs' or 'bs+1', got {size!r}")
    return match[1], int(match[2] or 0)


def _extent(size: Size, sizes: Sizes) -> int:
    if isinstance(size, int):
        return size
    if callable(size):
        return size(sizes)
    symbol, plus = _parse(size)
    return sizes[symbol] + plus


def _is_source(value: Any) -> TypeGuard[Any]:
    """Whether `value` is a `KvSource`; told by its address table, because structures import this module."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "layers")


def _struct_fields(value: Any) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    for field in _fields_of(value.__class__):
        yield field, getattr(value, field.name)


@functools.cache
def _fields_of(structure: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(structure)


def _leaves(name: str, spec: ArgumentSpec, value: Any) -> Iterator[Leaf]:
    if value is None or isinstance(spec, ScalarSpec):
        return
    if isinstance(spec, TensorSpec):
        yield Leaf(path=name, tensor=value, role=spec.role, spec=spec)
    elif isinstance(spec, TensorsSpec):
        for i, tensor in enumerate(value):
            yield Leaf(path=f"{name}[{i}]", tensor=tensor, role=spec.each.role, spec=spec.each)
    else:
        for field, inner in _struct_fields(value):
            path = f"{name}.{field.name}"
            if "spec" in field.metadata:
                yield Leaf(path=path, tensor=inner, role=spec.role, spec=field.metadata["spec"])
            elif _is_source(inner):
                for i, layer in enumerate(inner.layers):
                    yield Leaf(path=f"{path}.layers[{i}]", tensor=layer, role="in", spec=None, source=inner)


def _map(name: str, spec: ArgumentSpec, value: Any, fn: Callable[[Leaf], torch.Tensor]) -> Any:
    replaced = {leaf.path: fn(leaf) for leaf in _leaves(name, spec, value)}
    if not replaced:
        return value
    if isinstance(spec, TensorSpec):
        return replaced[name]
    if isinstance(spec, TensorsSpec):
        return tuple(replaced.values())
    changes: dict[str, Any] = {}
    for field, inner in _struct_fields(value):
        path = f"{name}.{field.name}"
        if path in replaced:
            changes[field.name] = replaced[path]
        elif _is_source(inner):
            layers = tuple(replaced[f"{path}.layers[{i}]"] for i in range(len(inner.layers)))
            changes[field.name] = dataclasses.replace(inner, layers=layers)
    return dataclasses.replace(value, **changes)
