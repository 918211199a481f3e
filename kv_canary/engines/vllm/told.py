"""What only vLLM's scheduler knows of requests, sent to the workers with its own output.

It runs in another process than the workers, which get its output pickled: what is put beside the fields arrives there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kv_canary.output import logger

_ATTRIBUTE, _KEPT = "kv_canary_told", "_kv_canary_brought"
_failed: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Brought:
    """KV of one request that a connector brings from outside, into blocks that were handed out for it.

    Args:
        start, end: positions [start, end).
        blocks: of each of vLLM's groups, those of the request when they were handed out.
    """

    start: int
    end: int
    blocks: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a step's workers are told.

    Args:
        salts: of the prefix cache, of the requests that are new in the step and have one.
        here: what was brought for requests that are new or resumed in the step, before it began.
        now: what is brought for such requests while the step runs, before their attention reads it.
        coming: what is brought from this step on for requests that wait for it.
    """

    salts: Mapping[str, str] = field(default_factory=dict)
    here: Mapping[str, Brought] = field(default_factory=dict)
    now: Mapping[str, Brought] = field(default_factory=dict)
    coming: Mapping[str, Brought] = field(default_factory=dict)


class _Watched:
    """What a scheduler's connector was asked to bring.

    Args:
        connector: vLLM's, on the scheduler's side; two of its methods are followed.
    """

    def __init__(self, connector: Any) -> None:
        # Tokens that each request had here when the connector was asked for more; what it brings, first of all in this
        # step, then for those that wait for it.
        self._local: dict[str, int] = {}
        self._new: dict[str, Brought] = {}
        self._awaited: dict[str, Brought] = {}
        _before(connector, "get_num_new_matched_tokens", self._ask)
        _before(connector, "update_state_after_alloc", self._bring)

    def _ask(self, request: Any, num_computed_tokens: int, *_: Any, **__: Any) -> None:
        # What it waited for before did not come, or it was put off since.
        self._awaited.pop(request.request_id, None)
        self._local[request.request_id] = num_computed_tokens

    def _bring(self, request: Any, blocks: Any, num_external_tokens: int, *_: Any, **__: Any) -> None:
        start = self._local.pop(request.request_id, 0)
        if num_external_tokens > 0:
            self._new[request.request_id] = Brought(
                start=start, end=start + num_external_tokens, blocks=[list(ids) for ids in blocks.get_block_ids()]
            )

    def take(self, scheduler: Any, begun: Sequence[str]) -> dict[str, dict[str, Brought]]:
        """Return what workers are told of a step in which these requests begin or go on after a break."""
        new, self._new = self._new, {}
        now = {name: new.pop(name) for name in begun if name in new}
        here = {name: self._awaited.pop(name) for name in begun if name in self._awaited}
        # Those that were given up while they waited.
        self._awaited = {name: b for name, b in self._awaited.items() if name in scheduler.requests} | new
        self._local = {name: n for name, n in self._local.items() if name in scheduler.requests}
        return {"here": here, "now": now, "coming": new}


def follow(scheduler: Any, _: Any = None) -> None:
    """Follow the connector of a scheduler that has just been made, if it has one; nothing of it reaches the engine."""
    try:
        connector = getattr(scheduler, "connector", None)
        if connector is not None:
            setattr(scheduler, _KEPT, _Watched(connector))
    except Exception as error:
        _say_once("what a connector brings could not be followed", error)


def tell(scheduler: Any, output: Any) -> None:
    """Put what the workers of a step are told beside the fields of its output; nothing of it reaches the engine.

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
        brought: dict[str, dict[str, Brought]] = {}
        watched: _Watched | None = getattr(scheduler, _KEPT, None)
        if watched is not None:
            begun = [new.req_id for new in output.scheduled_new_reqs]
            brought = watched.take(scheduler, [*begun, *output.scheduled_cached_reqs.resumed_req_ids])
        if watched is None and getattr(scheduler, "connector", None) is not None:
            # It is not known what comes from outside: nobody is told anything.
            return
        setattr(output, _ATTRIBUTE, Told(salts=salts, **brought))
    except Exception as error:
        _say_once("what only the scheduler knows could not be sent to the workers", error)


def told(output: Any) -> Told | None:
    """Return what the scheduler tells of a step; None: it is not one that does."""
    found: Told | None = getattr(output, _ATTRIBUTE, None)
    return found


def _before(owner: Any, name: str, function: Callable[..., None]) -> None:
    """Let a function be called with a method's arguments before it; nothing of it reaches the engine."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            function(*args, **kwargs)
        except Exception as error:
            _say_once("what a connector brings could not be followed", error)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _say_once(what: str, error: Exception) -> None:
    kind = f"{what}: {type(error).__name__}"
    if kind not in _failed:
        _failed.add(kind)
        # A scheduler's process has no canary, whose configuration would say whether texts are left out.
        logger.failure("kv-canary: vllm adapter: %s", what, error=error, redacts=True)
