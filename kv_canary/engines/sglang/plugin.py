"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`)."""

from __future__ import annotations

import sys
import traceback

from kv_canary.settings import is_asked_for


def plugin() -> None:
    """Hook the canary into the schedulers that this process may run, if KV_CANARY_MODE says so.

    Without it nothing is hooked. SGLang logs what a plugin raises and goes on without it; a canary that was asked for
    and is not there would look like a clean system, so what is wrong here ends the process.

    Raises:
        SystemExit: a setting is wrong, or this SGLang is not one that the adapter knows. The text says which.
    """
    if not is_asked_for() or _detokenizes():
        return
    try:
        from kv_canary.config import CanaryConfig
        from kv_canary.engines.sglang import hooks

        CanaryConfig.from_env()
        # Before the session is imported, which needs what is looked for here.
        hooks.check()
        from kv_canary.engines.sglang.session import HOOKED

        hooks.register(HOOKED)
    except (TypeError, ValueError) as error:
        raise SystemExit(str(error)) from error
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(f"kv-canary: sglang adapter: it could not be loaded: {error}") from error


def _detokenizes() -> bool:
    """Whether this process is SGLang's detokenizer, which never runs a scheduler: hooks would make it import one."""
    return (
        "sglang.srt.managers.detokenizer_manager" in sys.modules and "sglang.srt.managers.scheduler" not in sys.modules
    )
