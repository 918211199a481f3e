"""The ops as a page of documentation, made from their specs."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import torch

from kv_canary.specs import all_specs
from kv_canary.specs.interface import (
    ArgumentSpec,
    KernelSpec,
    ScalarSpec,
    StructSpec,
    TensorSpec,
    TensorsSpec,
)

_HEADER = """# Ops

Made from the specs by `kv-canary ops --markdown`; do not edit. Call an op as `kv_canary.ops.<op>(..., backend=None)`,
by keyword. Arguments with a default may be left out; scratch is allocated for a caller who leaves it out.
"""


def ops_page() -> str:
    """Return the page of every op, as Markdown."""
    structures: dict[type, None] = {}
    parts = [_HEADER]
    for spec in all_specs().values():
        parts.append(op_section(spec))
        structures.update({a.type: None for a in spec.arguments.values() if isinstance(a, StructSpec)})
    parts.append("## Structures\n")
    parts += [_structure_section(t) for t in structures]
    return "\n".join(parts)


def op_section(spec: KernelSpec) -> str:
    """Return the section of one op, as Markdown."""
    lines = [f"## {spec.name}\n", inspect.cleandoc(spec.doc) + "\n"]
    lines += ["| argument | what | role | default | meaning |", "|---|---|---|---|---|"]
    for name, argument in spec.arguments.items():
        role = getattr(argument, "role", "in")
        if isinstance(argument, TensorsSpec):
            role = argument.each.role
        lines.append(f"| {name} | {_what(argument)} | {role} | {_default(argument)} | {argument.doc} |")
    return "\n".join(lines) + "\n"


def _structure_section(structure: type) -> str:
    lines = [f"### {structure.__name__}\n", (inspect.getdoc(structure) or "").split("\n\n")[0] + "\n"]
    lines += ["| field | what | meaning |", "|---|---|---|"]
    lines += list(_field_rows(structure))
    return "\n".join(lines) + "\n"


def _field_rows(structure: type) -> Iterator[str]:
    for field in dataclasses.fields(structure):
        spec = field.metadata.get("spec")
        if spec is not None:
            yield f"| {field.name} | {_what(spec)} | {spec.doc} |"
        elif field.init:
            yield f"| {field.name} | {str(field.type).replace('|', 'or')} | |"


def _what(argument: ArgumentSpec) -> str:
    if isinstance(argument, ScalarSpec):
        return argument.type.__name__
    if isinstance(argument, StructSpec):
        return argument.type.__name__
    if isinstance(argument, TensorsSpec):
        return f"tuple of {_what(argument.each)}"
    shape = ", ".join(_size(s) for s in argument.shape)
    within = "" if argument.tolerance is None else f", within {argument.tolerance}"
    return f"{_dtype(argument.dtype)}[{shape}]{within}"


def _size(size: object) -> str:
    return size.__name__ if callable(size) else str(size)  # type: ignore[attr-defined]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _default(argument: ArgumentSpec) -> str:
    if isinstance(argument, ScalarSpec):
        return "" if argument.default is inspect.Parameter.empty else repr(argument.default)
    if isinstance(argument, TensorSpec) and argument.role == "scratch":
        return "allocated"
    return "None" if isinstance(argument, TensorSpec) and argument.optional else ""
