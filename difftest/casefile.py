"""A failure as ONE file: the call that showed it, what both sides left behind, and where it was seen.

The file holds plain values and tensors only and is loaded as such: opening a stranger's file runs none of their code.
"""

from __future__ import annotations

import dataclasses
import io
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kv_canary import __version__
from kv_canary.difftest.memory import pack, unpack
from kv_canary.difftest.runner import Mismatch, Outcome
from kv_canary.errors import must_be
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, ScalarSpec, StructSpec
from kv_canary.specs.structures import KvSource

SUFFIX = ".kvcase"
FORMAT = "kv-canary case 1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseFile:
    """One saved call.

    Args:
        op: the op.
        arguments: the complete call, on the CPU.
        outcome: name of the `Outcome` it had, or "" for a call that is kept because it once mattered.
        backend, path, detail: as of the `Mismatch`.
        expected, got: the bytes of every output, by path, where they were known.
        facts: versions, device, seed and what else helps to see it again.
        imports: Python files or modules that register the op.
    """

    op: str
    arguments: Mapping[str, Any]
    outcome: str = ""
    backend: str = ""
    path: str = ""
    detail: str = ""
    expected: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    got: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    imports: tuple[str, ...] = ()

    @property
    def says(self) -> str:
        """The failure in a line."""
        if not self.outcome:
            return "kept because it once mattered"
        return str(
            Mismatch(Outcome[self.outcome], op=self.op, backend=self.backend, path=self.path, detail=self.detail)
        )


def case_file(
    spec: KernelSpec,
    arguments: Mapping[str, Any],
    mismatch: Mismatch | None = None,
    *,
    facts: Mapping[str, str | int | float] | None = None,
    imports: tuple[str, ...] = (),
) -> CaseFile:
    """Return the file of a call, and of how it failed."""
    failure: dict[str, Any] = {}
    if mismatch is not None:
        failure = {
            "outcome": mismatch.outcome.name,
            "backend": mismatch.backend,
            "path": mismatch.path,
            "detail": mismatch.detail,
            "expected": mismatch.expected,
            "got": mismatch.got,
        }
    return CaseFile(
        op=spec.name,
        arguments=spec.bind(arguments),
        facts={**versions(), **(facts or {})},
        imports=imports,
        **failure,
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {"kv_canary": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    try:
        import triton

        found["triton"] = str(triton.__version__)
    except ModuleNotFoundError:
        found["triton"] = "none"
    return found


def save(file: CaseFile, path: Path) -> None:
    """Write a case file, whole or not at all."""
    spec = get_spec(file.op)
    content = {
        "format": FORMAT,
        **{f.name: getattr(file, f.name) for f in dataclasses.fields(file)},
        "arguments": encode(spec, file.arguments),
        "expected": dict(file.expected),
        "got": dict(file.got),
        "facts": dict(file.facts),
        "imports": list(file.imports),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    torch.save(content, unfinished)
    unfinished.replace(path)


def load(path: Path) -> CaseFile:
    """Read a case file. The op must be registered: see `imports_of` for one from outside this package.

    Raises:
        ValueError: it is no case file, or its op is unknown.
    """
    content = _content(path)
    try:
        arguments = decode(get_spec(content["op"]), content["arguments"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"kv-canary: case file: {path} does not fit op {content['op']}: {error}") from error
    fields = {f.name: content[f.name] for f in dataclasses.fields(CaseFile) if f.name in content}
    return CaseFile(**{**fields, "arguments": arguments, "imports": tuple(content["imports"])})


def imports_of(path: Path) -> tuple[str, ...]:
    """Return what must be imported before the file can be loaded."""
    return tuple(_content(path)["imports"])


def encode(spec: KernelSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as plain values and tensors, without gaps and without what nobody reads."""
    return {name: _encode(value) for name, value in arguments.items() if name in spec.arguments}


def decode(spec: KernelSpec, encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `encode` was given, with the layouts they had."""
    arguments = {}
    for name, value in encoded.items():
        declared = spec.arguments[name]
        arguments[name] = _decode(value, declared.type if isinstance(declared, StructSpec) else None)
    return arguments


def check_round_trip(spec: KernelSpec, arguments: Mapping[str, Any]) -> None:
    """Check that a call, saved and loaded, is the same: values, layouts and alignments.

    Raises:
        Mismatch: it is another one.
    """
    bound = spec.bind(arguments)
    file = io.BytesIO()
    torch.save(encode(spec, bound), file)
    file.seek(0)
    loaded = decode(spec, torch.load(file, weights_only=True))
    theirs = {leaf.path: leaf.tensor for leaf in spec.leaves(loaded)}
    for leaf in spec.leaves(bound):
        mine, other = leaf.tensor, theirs.get(leaf.path)
        same = other is not None and _layout(mine) == _layout(other)
        if not same or other is None or not torch.equal(_content_bytes(mine), _content_bytes(other)):
            raise Mismatch(Outcome.FILE_DIFFERS, op=spec.name, backend="spec", path=leaf.path)
    for name, declared in spec.arguments.items():
        if isinstance(declared, ScalarSpec) and loaded[name] != bound[name]:
            raise Mismatch(Outcome.FILE_DIFFERS, op=spec.name, backend="spec", path=name)


def _content_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values: no value is unequal to itself, not even NaN."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    phase = tensor.data_ptr() % 16 if tensor.numel() else 0
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.numel() else (), phase


def _content(path: Path) -> dict[str, Any]:
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:
        raise ValueError(must_be("case file", str(path), f"a {SUFFIX} file", f"{type(error).__name__}")) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(must_be("case file", str(path), f"of format {FORMAT!r}", repr(found)))
    return content


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": pack(value)}
    if isinstance(value, tuple | list):
        return [_encode(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"fields": {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}}
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _decode(value: Any, structure: type | None) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each, None) for each in value)
    if isinstance(value, dict) and "tensor" in value:
        return unpack(value["tensor"])
    if isinstance(value, dict):
        # A structure inside a structure is a source.
        kind = structure if structure is not None else KvSource
        return kind(**{name: _decode(field, None) for name, field in value["fields"].items()})
    return value
