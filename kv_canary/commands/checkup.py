"""The findings of `kv-canary doctor` about this machine and this environment."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from kv_canary.backends import interpreting
from kv_canary.commands.places import problems_of
from kv_canary.commands.probe import probe, probe_apart
from kv_canary.commands.trial import measure_cost
from kv_canary.config import CanaryConfig, other_parts
from kv_canary.engines.sglang import hooks, items
from kv_canary.engines.transformers_layouts import layout_class
from kv_canary.engines.vllm import hooks as vllm_hooks
from kv_canary.extras import install_command
from kv_canary.perturb import PerturbConfig
from kv_canary.reports.versions import installed, versions
from kv_canary.runtime.cost import CanaryCost
from kv_canary.settings import ENVIRONMENT, read_settings

ENGINES = ("transformers", "sglang", "vllm")

NOT_COVERED = (
    "what a kernel reads wrongly although the tables are right (an int32 overflow, index buffers that only it sees)",
    "scales of quantised KV",
    "the padding slot",
    "a model write that lands nowhere or in another slot, except through its victim",
    "recurrent state (mamba, linear attention)",
)


@dataclass(frozen=True, kw_only=True)
class BackendCheck:
    """Whether a backend works on a device; `detail` says why not."""

    name: str
    device: str
    works: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class EngineCheck:
    """An engine: its version (None: not installed), and whether an adapter supports it; `detail` says why not."""

    name: str
    version: str | None
    supported: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """All that was found out; see the fields' types.

    Args:
        versions: of Python and packages; None: not installed.
        devices: in words.
        backends: which work where.
        engines: which are there and supported.
        environment: the variables that are kv-canary's.
        config: as the environment gives it, JSON-ready; None where it is in error.
        cost: what a decode step of a canary costs here, without an engine; None: it could not be measured.
        covered, not_covered: what a canary so configured sees, and what none does.
        warnings: what is on and may surprise.
        problems: what was asked for and is missing or wrong.
    """

    versions: dict[str, str | None]
    devices: tuple[str, ...]
    backends: tuple[BackendCheck, ...]
    engines: tuple[EngineCheck, ...]
    environment: dict[str, str]
    config: dict[str, Any] | None
    cost: CanaryCost | None
    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the checkup as JSON-ready values."""
        return dataclasses.asdict(self)


def check_up(
    *, backend: str | None = None, engines: tuple[str, ...] = (), environ: Mapping[str, str] = os.environ
) -> Checkup:
    """Look at this machine.

    Args:
        backend: one that must work; None: the configured one.
        engines: those that must be installed and supported.
        environ: the environment that configures the canary.
    """
    config, perturb, errors = _configuration(environ)
    backends = _backends()
    found = tuple(_engine(name) for name in ENGINES)
    problems = [
        *errors,
        *_backend_problems(backend or (config.backend if config else None) or "auto", backends),
        *(f"engine {e.name}: {e.detail}" for e in found if e.name in engines and not e.supported),
        *(problems_of(config) if config and config.mode != "off" else ()),
    ]
    return Checkup(
        versions=versions(),
        devices=_devices(),
        backends=backends,
        engines=found,
        environment={name: text for name, text in sorted(environ.items()) if name.startswith(ENVIRONMENT)},
        config=None if config is None else _plain(config),
        cost=_cost(),
        covered=() if config is None else _covered(config),
        not_covered=NOT_COVERED,
        warnings=_warnings(config, perturb, engines),
        problems=tuple(problems),
    )


def _configuration(environ: Mapping[str, str]) -> tuple[CanaryConfig | None, PerturbConfig | None, list[str]]:
    """Return the configuration and the faults to inject, each None where it is in error, and every error."""
    others = other_parts()
    found: dict[str, Any] = {}
    errors: list[str] = []
    for part, cls in {"": CanaryConfig, **others}.items():
        settings: dict[str, Any] = {}
        before = len(errors)
        for name, text in environ.items():
            try:
                settings |= read_settings(cls, ENVIRONMENT + part, {name: text}, {}, others={} if part else others)
            except ValueError as error:
                errors.append(str(error))
        if len(errors) == before:
            try:
                found[part] = others[part].from_env(environ) if part else CanaryConfig(**settings)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
    return found.get(""), found.get("PERTURB_"), errors


def _backends() -> tuple[BackendCheck, ...]:
    """Try every backend on every kind of device that is here."""
    details = [("reference", "cpu", probe("reference", "cpu"))]
    if installed("triton") is None:
        missing = f"triton is not installed: {install_command('triton')}"
        details += [(name, "cpu (interpreter)", missing) for name in ("triton", "shadow")]
    else:
        details += [
            (name, "cpu (interpreter)", probe_apart(name, "cpu", interpret=True)) for name in ("triton", "shadow")
        ]
        if torch.cuda.is_available():
            details += [(name, "cuda", probe_apart(name, "cuda", interpret=False)) for name in ("triton", "shadow")]
    return tuple(
        BackendCheck(name=name, device=device, works=not detail, detail=detail) for name, device, detail in details
    )


def _backend_problems(wanted: str, checks: tuple[BackendCheck, ...]) -> list[str]:
    """Say why the backend that was asked for does not work where a canary would run."""
    on_gpu = torch.cuda.is_available()
    if wanted == "auto":
        wanted = "triton" if on_gpu else "reference"
    if wanted == "reference":
        device = "cpu"
    elif on_gpu:
        device = "cuda"
    elif interpreting():
        device = "cpu (interpreter)"
    else:
        return [f"backend {wanted}: it needs a GPU, or TRITON_INTERPRET=1 to run in Triton's interpreter"]
    failed = [c for c in checks if (c.name, c.device) == (wanted, device) and not c.works]
    if not failed and not any((c.name, c.device) == (wanted, device) for c in checks):
        return [f"backend {wanted} on {device}: triton is not installed: {install_command('triton')}"]
    return [f"backend {c.name} on {c.device}: {c.detail}" for c in failed]


def _engine(name: str) -> EngineCheck:
    version = installed(name)
    if version is None:
        return EngineCheck(name=name, version=None, supported=False, detail="not installed")
    try:
        detail = _ADAPTERS[name](version)
    except ValueError as error:
        return EngineCheck(name=name, version=version, supported=False, detail=str(error))
    return EngineCheck(name=name, version=version, supported=True, detail=detail)


def _transformers(version: str) -> str:
    layout_class(version)
    return ""


def _sglang(version: str) -> str:
    """See whether SGLang finds the plugin, and the plugin all that it hooks; return how to turn it on."""
    if not any(e.value.startswith("kv_canary.") for e in entry_points(group="sglang.srt.plugins")):
        raise ValueError("SGLang does not find the plugin: install kv-canary itself, not only its folder")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and "kv-canary" not in (name.strip() for name in allowed.split(",")):
        raise ValueError(f"SGLANG_PLUGINS={allowed} leaves the plugin kv-canary out")
    if version != hooks.TESTED:
        hooks.check()
    how = "turned on by KV_CANARY_MODE=log or raise, in the environment of the server"
    return how if items.IS_COMPILED else f"{how}; built without a C compiler: a step takes the host longer"


def _vllm(version: str) -> str:
    """See whether vLLM finds the plugin, and the plugin all that it hooks; return how to turn it on."""
    if not any(e.value.startswith("kv_canary.") for e in entry_points(group="vllm.general_plugins")):
        raise ValueError("vLLM does not find the plugin: install kv-canary itself, not only its folder")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kv-canary" not in (name.strip() for name in allowed.split(",")):
        raise ValueError(f"VLLM_PLUGINS={allowed} leaves the plugin kv-canary out")
    if version.partition("+")[0] != vllm_hooks.TESTED:
        vllm_hooks.check()
    return "turned on by KV_CANARY_MODE=log or raise, in the environment of the server"


# Per engine: says more of a supported version, or raises ValueError.
_ADAPTERS: dict[str, Callable[[str], str]] = {"transformers": _transformers, "sglang": _sglang, "vllm": _vllm}


def _devices() -> tuple[str, ...]:
    names = [f"cpu: {platform.machine()}, {os.cpu_count()} cores"]
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        names.append(f"cuda:{i}: {facts.name}, {facts.total_memory >> 30} GiB, sm_{facts.major}{facts.minor}")
    return tuple(names)


def _covered(config: CanaryConfig) -> tuple[str, ...]:
    """Say what a canary so configured verifies."""
    if config.mode == "off":
        return ("nothing: the canary is off (mode)",)
    turn = (
        f"every {config.stride} steps"
        if config.stride
        else f"every 1 to {config.max_stride} steps, on a CPU every step"
    )
    seals = {
        None: "sealed on a GPU, at admission, at a request's end and by the scrub; by sample on a CPU",
        "layer": "sealed by layer, at admission, at a request's end and by the scrub",
        "model": "sealed, all layers together, at admission, at a request's end and by the scrub",
        "off": "off: of damage to one layer the sample shows what falls into it",
    }[config.seals]
    table = "by its size" if config.check_tokens is None else _on(config.check_tokens)
    return (
        f"cached positions of running requests: all on admission, then {turn}",
        f"K and V bytes: {config.read_bytes} of each token's K and of its V, which ones goes by the position",
        f"every byte of K and V: {seals} (seals)",
        f"bytes again after the forward: {_on(config.verify_bytes_at_tail)} (verify_bytes_at_tail)",
        f"what the model hands over to be written: {_on(config.check_writes)} (check_writes)",
        f"reads of freed slots, two owners of a slot: {_on(config.track_lifetime)} (track_lifetime)",
        f"idle cached slots: {f'every {config.sweep_every} steps' if config.sweep_every else 'off'} (sweep_every)",
        f"freed slots until reuse: {_on(config.quarantine)} (quarantine)",
        f"tokens by a table: {table} (check_tokens)",
    )


def _warnings(config: CanaryConfig | None, perturb: PerturbConfig | None, engines: tuple[str, ...]) -> tuple[str, ...]:
    warnings = []
    if config is not None and config.mode == "off":
        warnings.append(f"the canary is off: the environment says so ({ENVIRONMENT}MODE)")
    several = [n for n in ("sglang", "vllm") if n in engines or installed(n) is not None]
    if config is not None and config.metrics_port and several:
        warnings.append(
            f"in {' and '.join(several)} every rank is served on a port of its own, {config.metrics_port} plus its "
            "number: those of the ranks after the first were not tried"
        )
    if perturb is not None:
        warnings.append(f"faults are injected on purpose: {perturb.mode} (KV_CANARY_PERTURB_...)")
    return tuple(warnings)


def _cost() -> CanaryCost | None:
    try:
        return measure_cost()
    except Exception:
        # What does not work here is told by the backends' own trials.
        return None


def _on(switch: bool) -> str:
    return "on" if switch else "off"


def _plain(config: CanaryConfig) -> dict[str, Any]:
    values = config.shown()
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
