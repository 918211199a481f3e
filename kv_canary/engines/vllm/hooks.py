"""The methods of vLLM's that call the canary: three of classes, and what a worker must have."""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from kv_canary.errors import must_be
from kv_canary.reports.versions import installed

logger = logging.getLogger("kv_canary")

# The version that the adapter is tested with. Others are tried, so long as all that is hooked is there.
TESTED = "0.32.0"
# Called once a worker's KV cache is there and empty, before it warms up.
_INSTALLS = ("vllm.v1.worker.worker_base", "WorkerWrapperBase", "initialize_from_config")
# Called in the process of the scheduler, which knows of requests what workers are not told.
_MAKES = ("vllm.v1.core.sched.scheduler", "Scheduler", "__init__")
_SCHEDULES = ("vllm.v1.core.sched.scheduler", "Scheduler", "schedule")
# What is asked of a worker, by the object: its own methods, and what its runners have.
WORKER = ("compile_or_warm_up_model", "execute_model", "sample_tokens", "shutdown", "sleep", "wake_up")
RUNNERS = {
    False: ("_model_forward", "input_batch", "input_ids", "positions", "seq_lens", "kv_cache_config", "max_num_tokens"),
    True: ("kv_connector", "prepare_attn", "block_tables", "input_buffers", "kv_cache_config", "max_num_tokens"),
}


def register(
    *, installs: Callable[[Any], None], makes: Callable[[Any, Any], None], schedules: Callable[[Any, Any], None]
) -> None:
    """Hook the methods of the classes; the second call does nothing.

    Args:
        installs: called with every worker whose KV cache has just been made.
        makes: called with every scheduler that has just been made, and None.
        schedules: called with the scheduler and its output, behind every step that it makes.

    Raises:
        ValueError: vLLM is not installed, or has not all that is to be hooked.
    """
    version = vllm_version()
    check()
    if version.partition("+")[0] != TESTED:
        logger.warning("kv-canary: vllm %s: the adapter is tested with %s; all that it hooks is there", version, TESTED)
    _call_behind(_INSTALLS, lambda wrapper, _: installs(wrapper.worker))
    _call_behind(_MAKES, makes)
    _call_behind(_SCHEDULES, schedules)


def vllm_version() -> str:
    """Return the version of vLLM that is installed.

    Raises:
        ValueError: none is.
    """
    version = installed("vllm")
    if version is None:
        raise ValueError(must_be("vllm adapter", "vllm", f"installed ({TESTED})", "none"))
    return version


def check() -> None:
    """See that the methods of classes that are hooked are there.

    Raises:
        ValueError: one is not, which means that this version of vLLM is not one that the adapter knows.
    """
    missing = [".".join(target) for target in (_INSTALLS, _MAKES, _SCHEDULES) if not _is_there(target)]
    if missing:
        raise ValueError(_unknown(missing))


def check_worker(worker: Any, *, is_v2: bool) -> None:
    """See that a worker and its runner have all that is hooked and read.

    Raises:
        ValueError: something is missing; the text names it.
    """
    runner = worker.model_runner
    missing = [f"{type(worker).__name__}.{name}" for name in WORKER if not hasattr(worker, name)]
    missing += [f"{type(runner).__name__}.{name}" for name in RUNNERS[is_v2] if not hasattr(runner, name)]
    if missing:
        raise ValueError(_unknown(missing))


def _unknown(missing: list[str]) -> str:
    got = f"{vllm_version()} without {', '.join(missing)}"
    return must_be("vllm adapter", "vllm", f"a version that the adapter knows ({TESTED})", got)


def _is_there(target: tuple[str, str, str]) -> bool:
    try:
        return callable(vars(pkgutil.resolve_name("{}:{}".format(*target[:2]))).get(target[2]))
    except (ImportError, AttributeError):
        return False


def _call_behind(target: tuple[str, str, str], function: Callable[[Any, Any], None]) -> None:
    """Let a function be called with the object and the result behind a method of a class, once."""
    owner = pkgutil.resolve_name("{}:{}".format(*target[:2]))
    original = vars(owner)[target[2]]
    if getattr(original, "_is_of_the_canary", False):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        function(self, result)
        return result

    wrapped._is_of_the_canary = True  # type: ignore[attr-defined]
    setattr(owner, target[2], wrapped)
