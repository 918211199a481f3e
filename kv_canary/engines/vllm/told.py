"""What only vLLM's scheduler knows of requests, sent to the workers with its own output.

It runs in another process than the workers, which get its output pickled: what is put beside the fields arrives there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kv_canary.output import logger

_ATTRIBUTE = "kv_canary_salts"
_failed: set[str] = set()


def tell(scheduler: Any, output: Any) -> None:
    """Put the cache salts of the requests that are new in a step beside its fields; nothing of it reaches the engine.

    Args:
        scheduler: vLLM's.
        output: its `SchedulerOutput`.
    """
    try:
        salts = {}
        for new in output.scheduled_new_reqs:
            request = scheduler.requests.get(new.req_id)
            if salt := getattr(request, "cache_salt", None):
                salts[new.req_id] = salt
        setattr(output, _ATTRIBUTE, salts)
    except Exception as error:
        kind = type(error).__name__
        if kind not in _failed:
            _failed.add(kind)
            logger.exception("kv-canary: vllm adapter: cache salts could not be sent to the workers")


def salts(output: Any) -> Mapping[str, str] | None:
    """Return the salts of the requests that are new in a step; None: its scheduler is not one that tells them."""
    found: Mapping[str, str] | None = getattr(output, _ATTRIBUTE, None)
    return found
