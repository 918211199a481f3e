"""The entry point that vLLM calls in each of its processes (group `vllm.general_plugins`)."""

from __future__ import annotations

import traceback
from typing import Any

from kv_canary.settings import is_asked_for


def plugin() -> None:
    """Hook the canary into the workers that this process may run, if KV_CANARY_MODE says so.

    Without it nothing is hooked. A canary that was asked for and is not there would look like a clean system, so what
    is wrong here ends the process.

    Raises:
        SystemExit: a setting is wrong, or this vLLM is not one that the adapter knows. The text says which.
    """
    if not is_asked_for():
        return
    try:
        from kv_canary.config import CanaryConfig
        from kv_canary.engines.vllm import hooks

        CanaryConfig.from_env()
        hooks.register(installs=_install, makes=_follow, schedules=_tell)
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"kv-canary: vllm adapter: it could not be loaded: {error}") from error


def _install(worker: Any) -> None:
    """Put a canary into a worker whose KV cache has just been made."""
    from kv_canary.engines.vllm.session import install

    install(worker)


def _follow(scheduler: Any, _: Any) -> None:
    """Follow what the connector of a scheduler brings from outside."""
    from kv_canary.engines.vllm.told import follow

    follow(scheduler)


def _tell(scheduler: Any, output: Any) -> None:
    """Send with a step what only the scheduler knows of its requests."""
    from kv_canary.engines.vllm.told import tell

    tell(scheduler, output)
