"""A call taken apart and put together again: its numbers, sources and words, and its weight."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kv_canary.cases.packing import pack, unpack
from kv_canary.specs.interface import KernelSpec, ScalarSpec, StructSpec
from kv_canary.specs.structures import KvSource

Call = dict[str, Any]


def weigh(spec: KernelSpec, call: Mapping[str, Any]) -> tuple[int, int]:
    """Return a call's size, about the bits it takes to write down what is not zero, and the sum of its magnitudes."""
    size = magnitude = 0
    for leaf in spec.leaves(call):
        if leaf.role == "scratch":
            continue
        values = words(leaf.tensor)
        size += 1 + values.numel() + (not is_plain(leaf.tensor))
        if values.element_size() == 1:
            size += 8 * int(values.count_nonzero())
            magnitude += int(values.sum(dtype=torch.int64).abs())
        else:
            size += int(torch.frexp(values.double().abs()).exponent.sum())
            positive = torch.where(values < 0, ~values, values).to(torch.int64)
            magnitude += (int((positive >> 32).sum()) << 32) + int((positive & 0xFFFFFFFF).sum())
    for path, value in numbers(spec, call):
        declared = spec.arguments.get(path)
        if not (isinstance(declared, ScalarSpec) and value == declared.default):
            size += 1 + int(value).bit_length()
            magnitude += abs(int(value))
    return size, magnitude


def digest(spec: KernelSpec, call: Mapping[str, Any]) -> bytes:
    """The digest that tells one call from another."""
    whole = hashlib.blake2b(repr(list(numbers(spec, call))).encode(), digest_size=16)
    for leaf in spec.leaves(call):
        if leaf.role != "scratch":
            packed = pack(leaf.tensor)
            content, rows = packed.pop("content"), packed.pop("rows")
            whole.update(repr((leaf.path, packed, None if rows is None else rows.tolist())).encode())
            whole.update(content.numpy())
    return whole.digest()


def relaid(content: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `content` with the row stride and the alignment of `like`."""
    content = content.contiguous()
    packed = pack(content)
    if not like.is_contiguous():
        packed["stride"] = (like.stride(0), *content.stride()[1:])
    return unpack({**packed, "phase": like.data_ptr() % 16})


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether there is nothing particular about the layout: no gaps, an aligned address."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an integer tensor, flat, or the bytes of any other."""
    flat = tensor.contiguous().view(-1)
    whole = tensor.dtype in (torch.int16, torch.int32, torch.int64)
    return flat if whole else flat.view(torch.uint8)


def of_words(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor, laid out like `like`, whose words are `values`."""
    return relaid(values.view(like.dtype).view(like.shape), like)


def sources(spec: KernelSpec, call: Mapping[str, Any], *, optional: bool = False) -> Iterator[tuple[str, KvSource]]:
    """Yield every source with its path; with `optional` those only that may be None."""
    for name, declared in spec.arguments.items():
        if isinstance(declared, StructSpec):
            for field in dataclasses.fields(call[name]):
                value = getattr(call[name], field.name)
                if isinstance(value, KvSource) and (field.default is None or not optional):
                    yield f"{name}.{field.name}", value


def numbers(spec: KernelSpec, call: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield every int and bool that is no tensor, with its path."""
    holders: list[tuple[str, Any]] = []
    for name, declared in spec.arguments.items():
        if isinstance(declared, ScalarSpec):
            yield name, call[name]
        elif isinstance(declared, StructSpec):
            holders.append((name, call[name]))
    for path, holder in [*holders, *sources(spec, call)]:
        for field in dataclasses.fields(holder):
            value = getattr(holder, field.name)
            if field.init and isinstance(value, int):
                yield f"{path}.{field.name}", value


def replaced(call: Call, path: str, value: Any) -> Call:
    """Return `call` with the argument, field or field of a field at `path` replaced."""
    name, *fields = path.split(".")

    def inside(holder: Any, fields: list[str]) -> Any:
        if not fields:
            return value
        return dataclasses.replace(holder, **{fields[0]: inside(getattr(holder, fields[0]), fields[1:])})

    return {**call, name: inside(call[name], fields)}


def renumbered(values: torch.Tensor, kept: torch.Tensor, count: int) -> torch.Tensor:
    """Indices in range(count), as they are once only `kept` stay: 0 for those that go, as for padding."""
    new = torch.zeros(max(count, 1), dtype=values.dtype)
    new[kept] = torch.arange(len(kept), dtype=values.dtype)
    inside = (values >= 0) & (values < count)
    return torch.where(inside, new[torch.where(inside, values, 0).long()], values)


def with_layers(source: KvSource, kept: torch.Tensor) -> KvSource:
    """Keep some layers."""
    return dataclasses.replace(source, layers=tuple(source.layers[i] for i in kept.tolist()))


def with_rows(source: KvSource, kept: torch.Tensor) -> KvSource:
    """Keep some rows of every layer."""
    return dataclasses.replace(source, layers=tuple(relaid(x[kept], x) for x in source.layers))


def with_columns(source: KvSource, kept: torch.Tensor) -> KvSource:
    """Keep some bytes of every row; all of them, where rows are not flat bytes."""
    if any(x.dim() != 2 or x.element_size() != 1 for x in source.layers):
        return source
    return dataclasses.replace(source, layers=tuple(relaid(x[:, kept], x) for x in source.layers))
