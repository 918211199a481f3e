"""A forward that repeats the one before: the same requests, each grown by one token, in the same launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kv_canary.runtime.batch import ForwardBatch, ModelInputs, WatchedForward, num_read
from kv_canary.runtime.composition import BatchRequests
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.launches import ForwardInputs
from kv_canary.runtime.replays import Launch
from kv_canary.runtime.steps import Steps
from kv_canary.runtime.tails import Advance


class Repetition:
    """What stays the same from one decode step to the next, so that a step costs the host little more than its lengths.

    Valid until anything else is begun, posted or allocated for the forward; who makes it sees to that.

    Args:
        context, steps: of the canary.
        forward: whose step it repeats.
        inputs: of the forward, as they were posted last.
        requests: of the forward that is repeated.
        batch: likewise.
        given: what the model reads, in place.
        rooms: verify entries that each group has room for.
        advance: what brings rows up to their prefixes, at HEAD.
        head, tail: the launches.
    """

    def __init__(
        self,
        context: CanaryContext,
        steps: Steps,
        forward: WatchedForward,
        inputs: ForwardInputs,
        *,
        requests: BatchRequests,
        batch: ForwardBatch,
        given: ModelInputs,
        rooms: Mapping[str, int],
        advance: Advance,
        head: Launch,
        tail: Launch,
    ) -> None:
        self.batch, self.given, self.advance, self.head, self.tail = batch, given, advance, head, tail
        self._steps, self._forward, self._inputs = steps, forward, inputs
        self._state, self._token_pool = context.state, context.state.token_pool
        self._composition, self._extend = requests.composition, requests.extend
        self._longest = int(requests.prefix.max(initial=0))
        self._width = self._longest if self._token_pool is None else self._token_pool.shape[1]
        self._full = [rooms[g.name] for g in forward.groups if not g.window]
        self._windowed = [(g, rooms[g.name]) for g in forward.groups if g.window]

    def begin(self, requests: BatchRequests) -> bool:
        """Begin the step, and send the lengths; return False, with nothing done, where this is no repetition.

        Raises:
            CanaryViolationError: in raise mode, for what the step before found; nothing else is done then.
        """
        state, newest = self._state, requests.newest_of_all
        if (
            newest is None
            or requests.composition is not self._composition
            or requests.extend is not self._extend
            or requests.pending is not None
            or state.token_pool is not self._token_pool
        ):
            return False
        self._longest += 1
        if self._token_pool is not None and self._longest > self._width:
            return False
        starts = state.one_behind(requests)
        if starts is None:
            return False
        relied_on = requests.num_cached * len(self._full)
        if self._full and requests.num_cached > min(self._full):
            return False
        for group, room in self._windowed:
            read = num_read(requests, group)
            if read > room:
                return False
            relied_on += read
        if not self._steps.repeat(self._forward, requests, relied_on=relied_on):
            return False
        try:
            state.went_on(requests)
            strides = self._steps.budget.strides(self._forward.name, requests, step=state.number)
            self._inputs.post_again(requests, strides=strides, newest=newest, starts=starts, step=state.number)
            if self._steps.shows_forwards:
                self.batch = dataclasses.replace(self.batch, requests=requests)
        except BaseException:
            state.forget(requests.rows)
            self._steps.abort_forward(self._forward)
            raise
        return True
