"""When ranks exchange what, and what becomes of it: reports of differences, and a verdict that all of them share."""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kv_canary.errors import must_be
from kv_canary.ranks.compare import RankDifference, RankReport, compare
from kv_canary.ranks.digest import Digest, Gatherer
from kv_canary.ranks.group import Exchange, RankGroup
from kv_canary.ranks.verdict import RankVerdict, RankViolationError

if TYPE_CHECKING:
    from kv_canary.accounts import StepRecord
    from kv_canary.forward import ForwardBatch, SingleForwardManager
    from kv_canary.manager import CanaryManager
    from kv_canary.reports import CanaryViolationError

logger = logging.getLogger("kv_canary")

# Steps from a digest to its exchange: its copy to the host is over by then, however far the host runs ahead.
LAG = 4
# Of what ranks send each other.
_VERSION = 1
# Exchanges under way before a rank waits for the others.
MOST_UNDER_WAY = 16
# Seconds that `flush` waits at most for exchanges that are under way.
FLUSH_SECONDS = 5.0

# The words of an exchange: these, then the lines.
_NUMBER, _STATE, _DIGEST_STEP, _GIVEN_UP, _TOTAL, _TEXT = range(6)
_TEXT_WORDS = 64
_HEADER = _TEXT + _TEXT_WORDS
# What a rank says of a step: there is no digest of it, here it is, or a forward was given up.
_NONE, _COMPLETE, _GAVE_UP = range(3)


@dataclass(kw_only=True)
class _UnderWay:
    number: int
    exchange: Exchange
    names: dict[int, str]


class RankWatch:
    """The ranks' side of one canary manager.

    Every rank makes the same calls of `all_gather`, of the same size, whatever it has found: one when the manager is
    made, then one at the beginning of each step of certain numbers. Which those are depends on the configuration alone,
    which has to be the same on all ranks; making the manager checks that.

    Args:
        manager: the canary of this rank, whose groups, limits and configuration are known.
        ranks: the group.

    Raises:
        ValueError: the ranks are configured differently.
    """

    def __init__(self, manager: CanaryManager, ranks: RankGroup) -> None:
        ranks.claim()
        self._manager, self._ranks = manager, ranks
        self._every = manager.config.digest_every
        self._agrees = manager.config.mode == "raise"
        self._gatherer = Gatherer(manager)
        # What every exchange brings: the header, and the lines of a digest where there may be one.
        self._shape = self._gatherer.shape if self._every else (0, 0, 0)
        self._digests: deque[Digest] = deque()
        self._under_way: deque[_UnderWay] = deque()
        # What this rank found since it told the others last; since all of them raised last; and what all know of.
        self._total, self._sentence = 0, ""
        self._errors: list[CanaryViolationError] = []
        self._verdicts: list[RankVerdict] = []
        self._differences: list[RankReport] = []
        self._given_up = 0
        # Whether the digest of the step under way could not be gathered.
        self._lost = False
        self._steps_match = True
        self._told: set[tuple[int, tuple[str, ...], tuple[int, ...]]] = set()
        # Digests in which this rank and others were compared, and whether that is over for good.
        self.compared, self.failed = 0, False
        self._meet()

    def note(self, error: CanaryViolationError) -> None:
        """Take in what this rank would have raised alone."""
        if self.failed:
            return
        self._total += error.total
        self._sentence = self._sentence or (error.reports[0].sentence if error.reports else str(error))
        self._errors.append(error)

    def see(self, forward: SingleForwardManager, batch: ForwardBatch) -> None:
        """Gather what this rank has of the requests of a forward that is over, where the step is to be compared."""
        if not self.failed and self._every and self._manager.step % self._every == 0:
            try:
                self._gatherer.see(forward, batch)
            except Exception:
                # Said to the others as well: they wait for what this rank sends.
                self._lost = True
                logger.exception("kv-canary: ranks: the digest of step %d was not gathered", self._manager.step)

    def end_step(self, step: StepRecord) -> None:
        """Send off the step's digest to the host."""
        self._given_up += step.broken
        if self.failed or not self._every or step.number % self._every:
            return
        digest = Digest(step=step.number, gave_up=step.broken)
        lost, self._lost = self._lost, False
        try:
            if not step.broken and not lost:
                digest = self._gatherer.digest(step.number)
        except Exception:
            logger.exception("kv-canary: ranks: the digest of step %d was not gathered", step.number)
        finally:
            self._gatherer.forget()
        digest.given_up = self._given_up
        self._digests.append(digest)

    def begin(self, number: int) -> None:
        """Take in what the other ranks have sent, and send what is due before step `number`.

        In log mode nothing is waited for; in raise mode, the exchange of the step before.

        Raises:
            RankViolationError: in raise mode, on all ranks alike, if any of them found something or ranks differ.
        """
        self._collect(wait=self._agrees)
        self._raise(before=number)
        due = number - LAG
        compares = self._every > 0 and due > 0 and due % self._every == 0
        if self._agrees or compares:
            self._send(number, digest_step=due if compares else 0)

    def flush(self, *, all_ranks: bool) -> None:
        """Take in what is under way; with `all_ranks`, which every rank has to ask for, also compare the last steps.

        Raises:
            RankViolationError: in raise mode with `all_ranks`, on all ranks alike.
        """
        if not all_ranks:
            if not self._agrees:
                self._collect(wait=True, seconds=min(FLUSH_SECONDS, self._ranks.timeout / 2))
            return
        self._collect(wait=True)
        last = self._manager.step
        steps = [s for s in range(max(1, last - LAG + 1), last + 1) if self._every and s % self._every == 0]
        for step in steps or [0]:
            self._send(last, digest_step=step)
            self._collect(wait=True)
        self._raise(before=last + 1)

    def _meet(self) -> None:
        """Check that all ranks are configured alike."""
        names = zlib.crc32("\0".join(g.name for g in self._manager.groups).encode())
        settings = {
            "the canary's version": _VERSION,
            "digest_every": self._every,
            "mode (1: raise)": int(self._agrees),
            "max_requests": self._gatherer.shape[1],
            "the groups (their number)": self._gatherer.shape[0],
            "the groups (crc32 of their names)": names,
        }
        try:
            words = torch.tensor(list(settings.values()), dtype=torch.int64)
            exchange = Exchange(self._ranks, words)
            over = exchange.wait(self._ranks.timeout)
        except Exception as error:
            self._fail(f"the first exchange failed ({error})")
            return
        if not over:
            self._fail(f"not all ranks have made their managers within {self._ranks.timeout:g} seconds")
            return
        for name, values in zip(settings, exchange.received().T.tolist(), strict=True):
            if len(set(values)) > 1:
                raise ValueError(must_be("CanaryManager", name, "the same on all ranks", ", ".join(map(str, values))))

    def _send(self, number: int, *, digest_step: int) -> None:
        """Begin an exchange: every rank does so at the same numbers, with the same count of words."""
        if self.failed:
            return
        words = torch.zeros(_HEADER + math.prod(self._shape), dtype=torch.int64)
        words[_NUMBER], words[_DIGEST_STEP], words[_TOTAL] = number, digest_step, self._total
        text = self._sentence.encode()[: 8 * _TEXT_WORDS]
        words[_TEXT:_HEADER].view(torch.uint8)[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        self._total, self._sentence = 0, ""
        while self._digests and self._digests[0].step < digest_step:
            self._digests.popleft()
        names: dict[int, str] = {}
        if self._digests and self._digests[0].step == digest_step:
            digest = self._digests.popleft()
            words[_GIVEN_UP], words[_STATE] = digest.given_up, _GAVE_UP
            if not digest.gave_up:
                try:
                    names = digest.pack(words[_HEADER:].view(self._shape))
                    words[_STATE] = _NONE if digest.lines is None else _COMPLETE
                except Exception:
                    words[_HEADER:], words[_STATE] = 0, _NONE
                    logger.exception("kv-canary: ranks: the digest of step %d was not packed", digest_step)
        try:
            exchange = Exchange(self._ranks, words)
        except Exception as error:
            self._fail(f"the exchange before step {number} could not begin ({error})")
            return
        self._under_way.append(_UnderWay(number=number, exchange=exchange, names=names))

    def _collect(self, *, wait: bool, seconds: float | None = None) -> None:
        """Take in the exchanges that are over; with `wait`, all, as far as they are over in so many seconds."""
        while self._under_way:
            first = self._under_way[0]
            left = first.exchange.began + self._ranks.timeout - time.monotonic()
            patience = max(0.0, left if seconds is None else min(left, seconds))
            try:
                must_wait = wait or len(self._under_way) > MOST_UNDER_WAY
                over = first.exchange.wait(patience) if must_wait else first.exchange.done()
                if over:
                    self._read(first)
            except Exception as error:
                self._fail(f"the exchange before step {first.number} failed ({error})")
                return
            if over:
                self._under_way.popleft()
                continue
            if time.monotonic() >= first.exchange.began + self._ranks.timeout:
                timeout = f"{self._ranks.timeout:g} seconds"
                self._fail(f"not all ranks took part in the exchange before step {first.number} within {timeout}")
            return

    def _read(self, under_way: _UnderWay) -> None:
        """Take in who found what, and the differences that are new, which are reported."""
        received = under_way.exchange.received()
        headers = received[:, :_HEADER].tolist()
        numbers = [header[_NUMBER] for header in headers]
        if len(set(numbers)) > 1:
            raise RuntimeError(f"the ranks are before the steps {', '.join(map(str, numbers))}")
        if self._agrees:
            self._verdicts += [
                RankVerdict(rank=rank, total=header[_TOTAL], sentence=_text(received[rank]))
                for rank, header in enumerate(headers)
                if header[_TOTAL]
            ]
        complete = [rank for rank, header in enumerate(headers) if header[_STATE] == _COMPLETE]
        given_up = [header[_GIVEN_UP] for header in headers if header[_STATE] != _NONE]
        if self._steps_match and len(set(given_up)) > 1:
            self._steps_match = False
            logger.warning(
                "kv-canary: ranks: some ranks gave up more forwards than others (by rank: %s), so that their steps may "
                "be apart: from now on they are compared only where they run the same requests from the same prefixes",
                ", ".join(map(str, given_up)),
            )
        if len(complete) < 2:
            return
        self.compared += 1
        reports = compare(
            {rank: received[rank, _HEADER:].view(self._shape) for rank in complete},
            step=headers[complete[0]][_DIGEST_STEP],
            groups=[g.name for g in self._manager.groups],
            names=under_way.names,
            steps_match=self._steps_match,
        )
        # What goes on from one digest to the next is told once.
        before, self._told = self._told, {(r.key, r.differences, r.ranks) for r in reports}
        new = [r for r in reports if (r.key, r.differences, r.ranks) not in before]
        most = self._manager.config.max_reports_per_step
        for report in new[:most]:
            self._manager.accounts.take_ranks(report)
        if len(new) > most:
            logger.error("kv-canary: ranks: %d more requests differ and are not written out", len(new) - most)
        if self._agrees:
            # Violations are raised by the verdict of the rank that found them.
            only = (RankDifference.VIOLATIONS.name,)
            self._differences += [r for r in new[:most] if r.differences != only]

    def _raise(self, *, before: int) -> None:
        if self._verdicts or self._differences:
            errors, verdicts, differences = self._errors, self._verdicts, self._differences
            self._errors, self._verdicts, self._differences = [], [], []
            raise RankViolationError(step=before, own=errors, verdicts=verdicts, differences=differences)

    def _fail(self, why: str) -> None:
        """Go on alone, and say so: nothing is exchanged any more, and nothing is raised."""
        self.failed = True
        self._under_way.clear()
        self._digests.clear()
        logger.error(
            "kv-canary: ranks: %s; rank %d goes on alone: ranks are no longer compared, what is found is logged and "
            "never raised, and the status is degraded",
            why,
            self._ranks.rank,
        )
        self._manager.accounts.degrade()


def _text(words: torch.Tensor) -> str:
    """Return the sentence in a header."""
    return bytes(words[_TEXT:_HEADER].view(torch.uint8).tolist()).rstrip(b"\0").decode(errors="ignore")
