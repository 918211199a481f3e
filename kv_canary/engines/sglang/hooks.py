"""The methods of SGLang's that call the canary, hooked through its own registry."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kv_canary.errors import must_be

logger = logging.getLogger("kv_canary")

# The version that the adapter is tested with. Others are tried, so long as all that is hooked is there.
TESTED = "0.5.23"


@dataclass(frozen=True, kw_only=True)
class Hook:
    """One method of SGLang's.

    Args:
        target: its dotted path.
        kind: "before", "after" or "around", as SGLang calls them.
        name: of the function that is called there, as `register` is given it.
    """

    target: str
    kind: str
    name: str


HOOKS = (
    # Pools, allocators and the prefix cache exist; buffers are about to be registered for transfers.
    Hook(target="sglang.srt.managers.scheduler.Scheduler.init_disaggregation", kind="before", name="install"),
    Hook(
        target="sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", kind="after", name="note_requests"
    ),
    Hook(target="sglang.srt.model_executor.model_runner.ModelRunner.forward", kind="around", name="forward"),
    Hook(target="sglang.srt.managers.scheduler.Scheduler.on_idle", kind="before", name="idle"),
    Hook(
        target="sglang.srt.managers.scheduler.Scheduler.get_internal_state", kind="after", name="add_to_internal_state"
    ),
    Hook(
        target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".flush_cache_after_weight_update",
        kind="before",
        name="weights_changed",
    ),
    # Takes the pools' memory away first, and empties the cache then.
    Hook(
        target="sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".release_memory_occupation",
        kind="before",
        name="memory_goes",
    ),
)

_calls: dict[str, int] = {}


def register(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Register every hook with SGLang, which applies them as soon as all plugins have run.

    Args:
        functions: what each hook calls, by the hook's name.

    Raises:
        ValueError: SGLang is not installed, or has not all that is to be hooked.
    """
    version = sglang_version()
    check()
    if version != TESTED:
        logger.warning(
            "kv-canary: sglang %s: the adapter is tested with %s; all that it hooks is there", version, TESTED
        )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in HOOKS:
        if hook.target not in _calls:
            _calls[hook.target] = 0
            HookRegistry.register(hook.target, _counted(hook, functions[hook.name]), HookType(hook.kind))


def sglang_version() -> str:
    """Return the version of SGLang that is installed.

    Raises:
        ValueError: none is.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(must_be("sglang adapter", "sglang", f"installed ({TESTED})", "none")) from error


def check() -> None:
    """See that everything that is hooked is there.

    Raises:
        ValueError: something is not, which means that this version of SGLang is not one that the adapter knows.
    """
    missing = [hook.target for hook in HOOKS if not _is_there(hook.target)]
    if missing:
        got = f"{sglang_version()} without {', '.join(missing)}"
        raise ValueError(must_be("sglang adapter", "sglang", f"a version that the adapter knows ({TESTED})", got))


def live() -> dict[str, int]:
    """Return how often each hook that SGLang applied has been called in this process, by its target."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return {target: calls for target, calls in _calls.items() if target in HookRegistry._patched}


def expect_live() -> None:
    """See that SGLang has applied every hook; it logs those that it cannot apply, and goes on.

    Raises:
        ValueError: it has not.
    """
    dead = [hook.target for hook in HOOKS if hook.target not in live()]
    if dead:
        raise ValueError(must_be("sglang adapter", "hooks", "applied by SGLang", f"not so: {', '.join(dead)}"))


def _is_there(target: str) -> bool:
    try:
        return callable(pkgutil.resolve_name(target))
    except (ImportError, AttributeError):
        return False


def _counted(hook: Hook, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[hook.target] += 1
        return function(*args, **kwargs)

    return counted
