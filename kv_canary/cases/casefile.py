"""A failure as ONE file: the call that showed it, what both sides left behind, and where it was seen.

The file holds plain values and tensors only and is loaded as such: opening a stranger's file runs none of their code,
and takes no more memory than the caller allows, whatever the file says. A file may name the Python code that registers
its op; who replays it runs that code only by naming it too (`imports.check_imports`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kv_canary import __version__
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.cases.container import read_container
from kv_canary.cases.packing import pack, packed_bytes, unpack
from kv_canary.errors import must_be, printable
from kv_canary.private_file import new_file
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, ScalarSpec, StructSpec, TensorSpec
from kv_canary.specs.structures import KvSource

SUFFIX = ".kvcase"
FORMAT = "kv-canary case 1"
# Bytes that the tensors of a case may take, unless the caller says otherwise.
MOST_BYTES = 1 << 30
# Files and modules that a case may name, and characters of a name.
MOST_IMPORTS = 64
MOST_NAME = 4096


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
        """The failure in a line that a terminal can take."""
        if not self.outcome:
            return "kept because it once mattered"
        found = Mismatch(Outcome[self.outcome], op=self.op, backend=self.backend, path=self.path, detail=self.detail)
        return printable(str(found))


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
    """Write a case file, whole or not at all: it may hold what users have written, and is its owner's alone."""
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
    with new_file(path) as unfinished:
        torch.save(content, unfinished)


def load(path: Path, *, most_bytes: int = MOST_BYTES) -> CaseFile:
    """Read a case file. The op must be registered: see `imports_of` for one from outside this package.

    Args:
        most_bytes: how many bytes its tensors may take, in the file and once they are laid out as they were.

    Raises:
        ValueError: it cannot be read, is no case file, its op is unknown, its values do not fit each other or the op,
            or it is too large, which is said before any of it is allocated.
    """
    with _naming(path, most_bytes):
        content = _content(path, most_bytes)
        spec = get_spec(content["op"])
        outputs = sum(len(tensor) for name in ("expected", "got") for tensor in content[name].values())
        taken = outputs + _argument_bytes(spec, content["arguments"])
        if taken > most_bytes:
            raise _TooLargeError(taken)
        arguments = spec.bind(decode(spec, content["arguments"]))
        fields = {f.name: content[f.name] for f in dataclasses.fields(CaseFile)}
        return CaseFile(**{**fields, "arguments": arguments, "imports": tuple(content["imports"])})


def imports_of(path: Path) -> tuple[str, ...]:
    """Return what the file says must be imported before it can be loaded: a stranger's words, to be asked about.

    Raises:
        ValueError: it is no case file.
    """
    with _naming(path, MOST_BYTES):
        return tuple(_content(path, None)["imports"])


def encode(spec: KernelSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as plain values and tensors, without gaps and without what nobody reads."""
    return {name: _encode(value) for name, value in arguments.items() if name in spec.arguments}


def decode(
    spec: KernelSpec, encoded: Mapping[str, Any], *, tensor: Callable[[Any], torch.Tensor] = unpack
) -> dict[str, Any]:
    """Return the arguments that `encode` was given, with the layouts they had.

    Args:
        tensor: what makes a tensor of a packed one.
    """
    arguments = {}
    for name, value in encoded.items():
        declared = spec.arguments[name]
        arguments[name] = _decode(value, declared.type if isinstance(declared, StructSpec) else None, tensor)
    return arguments


def check_round_trip(spec: KernelSpec, arguments: Mapping[str, Any]) -> None:
    """Check that a call, saved and loaded, is the same: values, layouts and alignments.

    Raises:
        Mismatch: it is another one.
    """
    bound = spec.bind(arguments)
    file = io.BytesIO()
    torch.save(encode(spec, bound), file)
    read = read_container(file, most_bytes=len(file.getbuffer()))
    _argument_bytes(spec, read)
    loaded = decode(spec, read)
    theirs = {leaf.path: leaf.tensor for leaf in spec.leaves(loaded)}
    for leaf in spec.leaves(bound):
        mine, other = leaf.tensor, theirs.get(leaf.path)
        same = other is not None and _layout(mine) == _layout(other)
        if not same or other is None or not torch.equal(content_bytes(mine), content_bytes(other)):
            raise Mismatch(Outcome.FILE_DIFFERS, op=spec.name, backend="spec", path=leaf.path)
    for name, declared in spec.arguments.items():
        if isinstance(declared, ScalarSpec) and loaded[name] != bound[name]:
            raise Mismatch(Outcome.FILE_DIFFERS, op=spec.name, backend="spec", path=name)


def content_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the values: no value is unequal to itself, not even NaN."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    phase = tensor.data_ptr() % 16 if tensor.numel() else 0
    return tensor.dtype, tensor.shape, tensor.stride() if tensor.numel() else (), phase


class _TooLargeError(Exception):
    """A case takes more bytes than it may."""

    def __init__(self, taken: int) -> None:
        super().__init__(taken)
        self.taken = taken


@contextlib.contextmanager
def _naming(path: Path, most_bytes: int) -> Iterator[None]:
    """Turn whatever goes wrong with a file into a ValueError that names it: this is the one place that does."""
    try:
        yield
    except _TooLargeError as error:
        expected = f"of tensors of at most {_gib(most_bytes)} (see --max-gib)"
        raise ValueError(must_be("case file", str(path), expected, _gib(error.taken))) from error
    except Exception as error:
        said = printable(str(error))[:400] or "nothing"
        got = said if isinstance(error, ValueError) else f"{type(error).__name__}: {said}"
        raise ValueError(
            must_be("case file", str(path), f"a whole {SUFFIX} file", f"one that is not: {got}")
        ) from error


def _gib(num_bytes: int) -> str:
    # Up to the next thousandth, so that what is asked for is enough.
    return f"{math.ceil(num_bytes / (1 << 30) * 1000) / 1000:g} GiB"


def _content(path: Path, most_bytes: int | None) -> dict[str, Any]:
    """Return what a file holds, every field of it, of the right kind; without tensors where `most_bytes` is None."""
    if not path.is_file():
        raise ValueError("there is no such file")
    with path.open("rb") as file:
        content = read_container(file, most_bytes=most_bytes or MOST_BYTES, tensors=most_bytes is not None)
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"its format is {FORMAT!r}, not {repr(found)[:80] if isinstance(found, str) else 'another'}")
    content = {**{name: kind() for name, kind in _FIELDS.items()}, **content}
    for name, kind in _FIELDS.items():
        if type(content[name]) is not kind:
            raise ValueError(f"{name} is a {kind.__name__}")
    for name in ("op", "backend", "path"):
        if len(content[name]) > MOST_NAME:
            raise ValueError(f"{name} has at most {MOST_NAME} characters")
    if content["outcome"] and content["outcome"] not in Outcome.__members__:
        raise ValueError(f"outcome is one of {', '.join(Outcome.__members__)}")
    names = content["imports"]
    if len(names) > MOST_IMPORTS or not all(type(name) is str and 0 < len(name) <= MOST_NAME for name in names):
        raise ValueError(f"imports are at most {MOST_IMPORTS} names")
    if not all(type(value) in (str, int, float, bool) for value in content["facts"].values()):
        raise ValueError("facts are strings and numbers")
    for name in ("expected", "got"):
        for each in content[name].values() if most_bytes is not None else ():
            if not isinstance(each, torch.Tensor) or each.dtype != torch.uint8:
                raise ValueError(f"{name} is of the bytes of outputs")
    return content


# Every field of a file but its format, and its kind.
_FIELDS: dict[str, type] = {
    **dict.fromkeys(("op", "outcome", "backend", "path", "detail"), str),
    **dict.fromkeys(("arguments", "expected", "got", "facts"), dict),
    "imports": list,
}


def _argument_bytes(spec: KernelSpec, encoded: Mapping[str, Any]) -> int:
    """Return the bytes that a call takes once it is laid out: its own tensors, and the scratch that it lacks.

    Raises:
        ValueError: a packed tensor does not fit itself.
    """
    taken = sum(packed_bytes(packed) for packed in _packed(list(encoded.values())))
    lacking = [
        name
        for name, declared in spec.arguments.items()
        if isinstance(declared, TensorSpec) and declared.role == "scratch" and encoded.get(name) is None
    ]
    if lacking:
        # Scratch that the op did not have when the file was written: its size follows from those of the others, in
        # tensors that have shapes and no storage. Checks may read values, of which there are none.
        shapes = decode(spec, encoded, tensor=_shape)
        bound = dataclasses.replace(spec, checks=()).bind(shapes)
        taken += sum(bound[name].nbytes for name in lacking)
    return taken


def _packed(value: Any) -> Iterator[Any]:
    """Yield every packed tensor in an encoded value."""
    if isinstance(value, list):
        for each in value:
            yield from _packed(each)
    elif isinstance(value, dict) and "tensor" in value:
        yield value["tensor"]
    elif isinstance(value, dict):
        yield from _packed(list(value["fields"].values()))


def _shape(packed: Mapping[str, Any]) -> torch.Tensor:
    return torch.empty_strided(packed["shape"], packed["stride"], dtype=packed["dtype"], device="meta")


def _encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": pack(value)}
    if isinstance(value, tuple | list):
        return [_encode(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"fields": {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}}
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _decode(value: Any, structure: type | None, tensor: Callable[[Any], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(each, None, tensor) for each in value)
    if isinstance(value, dict) and "tensor" in value:
        return tensor(value["tensor"])
    if isinstance(value, dict):
        # A structure inside a structure is a source.
        kind = structure if structure is not None else KvSource
        return kind(**{name: _decode(field, None, tensor) for name, field in value["fields"].items()})
    return value
