"""The requests of transformers' batches as compositions: one costs Python when the list changes, not at every step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import attrgetter, getitem, is_
from typing import Any

import numpy as np

from kv_canary.engines.transformers_base import WARMUP_PREFIX
from kv_canary.identity import Identity, word_of
from kv_canary.runtime.composition import BatchRequests, Composition, Int64s, one_each
from kv_canary.runtime.rows import RowTable

# What runs for each request of a step does so without Python.
_STATE, _EXTEND = attrgetter("state"), attrgetter("query_length")
_END, _NAME = attrgetter("position_offset"), attrgetter("request_id")
_PROMPT, _OUTPUT = attrgetter("initial_tokens"), attrgetter("generated_tokens")


class Requests:
    """What the canary asks of the engine's `RequestState`s."""

    def name(self, member: Any) -> str:
        """Return the engine's id of a request as text: the engine takes numbers too."""
        return str(member.request_id)

    def tokens(self, member: Any, start: int, end: int) -> Sequence[int]:
        """Return own tokens [start, end) of a request: its prompt, then what it has generated.

        The tokens of the forward that is about to run are among them, except that with asynchronous batching the host
        does not know yet what the forward before it has sampled: then the list is one shorter.
        """
        prompt: list[int] = member.initial_tokens
        if start >= len(prompt):
            return list(member.generated_tokens[start - len(prompt) : end - len(prompt)])
        return list(prompt[start:end]) + list(member.generated_tokens[: max(0, end - len(prompt))])

    def newest(self, members: Sequence[Any], ends: Int64s) -> Int64s | None:
        """Return the own token before each end; None where one of them has none, or it is not known yet."""
        at = ends - 1 - np.fromiter(map(len, map(_PROMPT, members)), np.int64, len(members))
        texts = list(map(_OUTPUT, members))
        if np.minimum.reduce(at, initial=0) < 0:
            for i in (at < 0).nonzero()[0].tolist():
                # From behind.
                texts[i] = _PROMPT(members[i])
        try:
            return np.fromiter(map(getitem, texts, at.tolist()), np.int64, len(members))
        except IndexError:
            return None

    def discarded(self, member: Any, length: int) -> bool:
        """Whether the engine has thrown a result away: it tells of none."""
        return False


class Composer:
    """Makes the composition of each batch, or finds that it is the last one's.

    Args:
        rows: gives requests their rows and owner numbers.
        identity: tells what a request's KV depends on besides its tokens; None: nothing.
    """

    def __init__(self, rows: RowTable, identity: Callable[[Any], Identity] | None) -> None:
        self._rows, self._identity = rows, identity
        self._identities: dict[Hashable, int] = {}
        self._source = Requests()
        self._last: Composition | None = None
        # The requests of the last forward, if it was a decode step.
        self._decoded: BatchRequests | None = None

    def requests_of(self, futures: Sequence[Any]) -> BatchRequests | None:
        """Return the requests of a forward in arrays, or None for a warm-up.

        Args:
            futures: the engine's `FutureRequestState`s, whose tokens of this forward are counted already.
        """
        composition = self._compose(list(map(_STATE, futures)))
        last, self._decoded = self._decoded, None
        if composition is None:
            return None
        count = len(futures)
        extend = np.fromiter(map(_EXTEND, futures), np.int64, count)
        prefix = np.fromiter(map(_END, composition.members), np.int64, count) - extend
        if not ((extend == 1).all() and (prefix > 0).all()):
            return BatchRequests(composition, prefix=prefix, extend=extend)
        newest = self._source.newest(composition.members, prefix)
        if newest is None or last is None or last.composition is not composition or (last.ends != prefix).any():
            requests = BatchRequests(composition, prefix=prefix, extend=one_each(count), newest=newest)
        else:
            requests = last.following(newest)
        self._decoded = requests
        return requests

    def forget(self, request_ids: Iterable[Hashable] | None = None) -> None:
        """Take in that the engine has let go of requests; None: of all of them."""
        self._last = self._decoded = None
        if request_ids is None:
            self._rows.release_all()
            self._identities.clear()
            return
        for request_id in request_ids:
            self._rows.release(request_id)
            self._identities.pop(request_id, None)

    def _compose(self, states: list[Any]) -> Composition | None:
        last = self._last
        if last is not None and len(states) == len(last) and all(map(is_, states, last.members)):
            return last
        names = [state.request_id for state in states]
        if any(str(name).startswith(WARMUP_PREFIX) for name in names):
            return None
        # Rows may be taken from those of the last one.
        self._last, keep = None, set(names)
        self._last = Composition(
            states,
            rows=np.array([self._rows.row(name, keep=keep) for name in names], np.int64),
            owners=np.array([self._rows.owner(name) for name in names], np.int64),
            identities=np.array([self._identity_of(state) for state in states], np.uint64),
            source=self._source,
        )
        return self._last

    def _identity_of(self, state: Any) -> int:
        if self._identity is None:
            return 0
        if state.request_id not in self._identities:
            self._identities[state.request_id] = word_of(self._identity(state))
        return self._identities[state.request_id]


class Written:
    """How many positions of each request forwards have written, by the engine's ids."""

    def __init__(self) -> None:
        self._ends: dict[Hashable, int] = {}
        # The last forward, whose requests are looked at one by one only where somebody asks or others come.
        self._last: BatchRequests | None = None
        self._places: dict[Hashable, int] = {}

    def note(self, requests: BatchRequests) -> None:
        """Take in that a forward has written its tokens."""
        if self._last is None or self._last.composition is not requests.composition:
            self._settle()
            self._places = {name: i for i, name in enumerate(map(_NAME, requests.composition.members))}
        self._last = requests

    def note_futures(self, futures: Iterable[Any]) -> None:
        """Take in that a forward of the engine's `FutureRequestState`s has written its tokens, or is about to."""
        self._settle()
        self._ends.update((f.state.request_id, f.state.position_offset) for f in futures)

    def of(self, request_id: Hashable) -> int:
        """Return how many positions of a request have been written."""
        place = self._places.get(request_id)
        if place is None or self._last is None:
            return self._ends.get(request_id, 0)
        return int(self._last.ends[place])

    def forget(self, request_id: Hashable) -> None:
        """Take in that the engine has let go of a request."""
        self._settle()
        self._ends.pop(request_id, None)

    def clear(self) -> None:
        """Take in that the engine has let go of all requests."""
        self._last, self._places = None, {}
        self._ends.clear()

    def _settle(self) -> None:
        if self._last is not None:
            self._ends.update(zip(self._places, self._last.ends.tolist(), strict=True))
        self._last, self._places = None, {}
