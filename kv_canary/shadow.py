"""The shadow backend: Triton serves, and every n-th launch of an op is re-run by the reference on a copy.

What a launch writes is copied before it runs; the reference then works on the copies, on the same device, and every
byte is compared. A difference is logged, counted and saved as a case file that `kv-canary difftest replay` runs again.
Launches that a CUDA graph captures cannot be compared, nor can its replays: both are counted as not compared.

A compared launch allocates, waits for the device and runs the slow reference: it belongs to testing in production, at a
rate that the operator chooses, not to every step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kv_canary.cases.casefile import SUFFIX, case_file, save
from kv_canary.cases.comparison import Mismatch, Outcome, differing
from kv_canary.cases.imports import replay_line
from kv_canary.cases.packing import sparse_storage
from kv_canary.output import logger
from kv_canary.shadow_settings import ShadowSettings
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, Leaf

Implementation = Callable[..., None]

# Tensors above this are saved as the rows that the call names, not whole.
WHOLE_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowConfig(ShadowSettings):
    """The settings of the shadow backend in this process: those that the environment may give, and a callback.

    Args:
        on_difference: called with the failure and its file (None past `most_files`); what it raises is logged.
    """

    on_difference: Callable[[Mismatch, Path | None], None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShadowSummary:
    """The counts of the shadow backend in this process: launches by op, how many were compared, what differed."""

    launches: Mapping[str, int]
    compared: Mapping[str, int]
    not_comparable: Mapping[str, int]
    differences: Mapping[str, int]
    files: tuple[Path, ...]


class _Shadow:
    """The process's shadow: its configuration and its counts."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reset(None)

    def reset(self, config: ShadowConfig | None) -> None:
        with self.lock:
            self._config = config
            self.launches: Counter[str] = Counter()
            self.compared: Counter[str] = Counter()
            self.not_comparable: Counter[str] = Counter()
            self.differences: Counter[str] = Counter()
            self.files: list[Path] = []

    @property
    def config(self) -> ShadowConfig:
        if self._config is None:
            self._config = ShadowConfig.from_env()
        return self._config

    def due(self, op: str) -> bool:
        """Count a launch; say whether it is one to compare."""
        with self.lock:
            number = self.launches[op]
            self.launches[op] += 1
            if number % self.config.every:
                return False
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                self.not_comparable[op] += 1
                return False
            self.compared[op] += 1
            return True


_shadow = _Shadow()


def configure(config: ShadowConfig | None = None) -> None:
    """Set how the shadow backend works from here on, with fresh counts; None: as the environment says."""
    _shadow.reset(config)


def summary() -> ShadowSummary:
    """Return what the shadow backend has done since it was configured."""
    with _shadow.lock:
        return ShadowSummary(
            launches=dict(_shadow.launches),
            compared=dict(_shadow.compared),
            not_comparable=dict(_shadow.not_comparable),
            differences=dict(_shadow.differences),
            files=tuple(_shadow.files),
        )


def shadowed(op: str, *, serve: Implementation, check: Implementation) -> Implementation:
    """Return the shadow backend's implementation of an op: `serve`, compared with `check` every now and then."""
    spec, imports = get_spec(op), _registered_by(op, serve, check)

    def launch(**arguments: Any) -> None:
        if not _shadow.due(op):
            serve(**arguments)
            return
        before = spec.map_tensors(arguments, _copy_written)
        serve(**arguments)
        # A fault of the check is never the engine's problem.
        try:
            _compare(spec, before, arguments, check, imports)
        except Exception as error:
            # A launch is of no canary in particular: one of them may redact.
            logger.failure("kv-canary: shadow: %s could not be compared", op, error=error, redacts=True)

    return launch


def _copy_written(leaf: Leaf) -> torch.Tensor:
    """A copy of what the launch may write, without gaps between rows; what it only reads is shared."""
    return leaf.tensor if leaf.role == "in" else leaf.tensor.clone(memory_format=torch.contiguous_format)


def _compare(
    spec: KernelSpec,
    before: Mapping[str, Any],
    served: Mapping[str, Any],
    check: Implementation,
    imports: tuple[str, ...],
) -> None:
    copies = spec.map_tensors(before, _copy_written)
    check(**copies)
    expected, got = (
        {leaf.path: _bytes(leaf.tensor) for leaf in spec.leaves(call) if leaf.role in ("out", "inout")}
        for call in (copies, served)
    )
    on_host = spec.map_tensors(before, lambda leaf: leaf.tensor if leaf.role == "in" else leaf.tensor.cpu())
    # The reference's rows past a full ring are not kept anywhere, so an overflowed ring is compared by its count.
    found = differing(spec, on_host, expected, got)
    if found is None:
        return
    path, detail = found
    mismatch = Mismatch(
        Outcome.BYTES_DIFFER, op=spec.name, backend="triton", path=path, detail=detail, expected=expected, got=got
    )
    with _shadow.lock:
        _shadow.differences[spec.name] += 1
        number = sum(_shadow.differences.values())
    file = _save(spec, before, served, mismatch, number, imports) if number <= _shadow.config.most_files else None
    told = "not saved: enough files are"
    if file is not None:
        told = f"replay it with: {replay_line(file, imports=imports)}"
    logger.error("kv-canary: shadow: %s; %s", mismatch, told)
    if _shadow.config.on_difference is not None:
        _shadow.config.on_difference(mismatch, file)


def _save(
    spec: KernelSpec,
    before: Mapping[str, Any],
    served: Mapping[str, Any],
    mismatch: Mismatch,
    number: int,
    imports: tuple[str, ...],
) -> Path:
    named = _named_rows(spec, before)
    layouts = {leaf.path: leaf.tensor.stride() for leaf in spec.leaves(served)}
    call = spec.map_tensors(before, lambda leaf: _to_host(leaf, named, layouts[leaf.path]))
    launch = _shadow.launches[spec.name]
    path = _shadow.config.folder / f"{spec.name}-{os.getpid()}-{number}{SUFFIX}"
    facts: dict[str, str | int | float] = {"seen": "shadow backend", "launch": launch}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    save(case_file(spec, call, mismatch, facts=facts, imports=imports), path)
    with _shadow.lock:
        _shadow.files.append(path)
    return path


def _registered_by(op: str, *implementations: Implementation) -> tuple[str, ...]:
    """Return the files or modules that register an op from outside this package, as `--import` takes them."""
    if importlib.util.find_spec(f"kv_canary.specs.{op}") is not None:
        return ()
    names: dict[str, None] = {}
    for implementation in implementations:
        name = implementation.__module__
        # A script, or what was imported by its path, has no name for another process; a part of a package has.
        names[name if "." in name else str(getattr(sys.modules.get(name), "__file__", name))] = None
    return tuple(names)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).cpu().reshape(-1).view(torch.uint8)


def _named_rows(spec: KernelSpec, call: Mapping[str, Any]) -> torch.Tensor:
    """Every number in the call's integer inputs: the rows and slots that it can name are among them."""
    values = [
        leaf.tensor.reshape(-1).to(torch.int64).unique().cpu()
        for leaf in spec.leaves(call)
        if leaf.spec is not None and leaf.tensor.numel() * leaf.tensor.element_size() <= WHOLE_BYTES
        if not leaf.tensor.dtype.is_floating_point
    ]
    return torch.cat(values).unique() if values else torch.zeros(0, dtype=torch.int64)


def _to_host(leaf: Leaf, named: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy on the CPU with the layout that was served; of a large tensor only the rows that the call names."""
    tensor = leaf.tensor
    item = tensor.element_size()
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, stride, strict=True)) if tensor.numel() else 0
    if tensor.dim() < 2 or span * item <= WHOLE_BYTES:
        host = torch.zeros(span, dtype=tensor.dtype).as_strided(tensor.shape, stride)
        return host.copy_(tensor)
    rows = named
    if leaf.source is not None:
        rows = torch.div(named - leaf.source.slot_bias, leaf.source.page_size, rounding_mode="floor").unique()
    rows = rows[(rows >= 0) & (rows < tensor.shape[0])]
    host = sparse_storage(span * item).view(tensor.dtype).as_strided(tensor.shape, stride)
    host[rows] = tensor[rows.to(tensor.device)].cpu()
    return host
