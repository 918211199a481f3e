"""The exchanges between ranks, and what becomes of them: reports of differences, and a verdict that all share."""

from __future__ import annotations

import time
import weakref
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from kv_canary.errors import said_by
from kv_canary.output import logger
from kv_canary.ranks import message
from kv_canary.ranks.compare import RankDifference, RankReport, compare
from kv_canary.ranks.digest import Digest, Gatherer
from kv_canary.ranks.group import Exchange, RankGroup
from kv_canary.ranks.meeting import Agreement, Meeting, check_same
from kv_canary.ranks.verdict import RankVerdict, RankViolationError
from kv_canary.redact import Redactor
from kv_canary.reports import CanaryViolationError
from kv_canary.runtime.batch import ForwardBatch, WatchedForward
from kv_canary.runtime.context import CanaryContext
from kv_canary.runtime.history import StepRecord

# Steps from a digest to its exchange: its copy to the host is over by then, however far the host runs ahead.
LAG = 4
# Of what ranks send each other.
_VERSION = 2
# Exchanges under way before a rank waits for the others.
MOST_UNDER_WAY = 16
# Seconds that `flush` waits at most for exchanges that are under way.
FLUSH_SECONDS = 5.0
# Exchanges that ranks make where they go on together, whatever is due: before so many steps after the first one.
_TRIAL_STEPS = (0, 4, 8, 16, 32)
# Seconds that a step waits at most where ranks that were parted go on together, so that what is tried in vain costs no
# more than they cost when they parted: so many, or this share of the timeout where that is more.
_TRIAL_SECONDS, _TRIAL_SHARE = 1.0, 1 / 4


@dataclass(kw_only=True)
class _UnderWay:
    number: int
    exchange: Exchange
    names: dict[int, str]


class RankAccounts(Protocol):
    """What is told of differences between ranks."""

    redactor: Redactor | None

    def take_ranks(self, report: RankReport) -> None:
        """Take in a difference between ranks."""

    def degrade(self) -> None:
        """Take in that the ranks are not compared from here on."""

    def restore(self) -> None:
        """Take in that the ranks are compared again."""


class RankWatch:
    """The ranks' side of one canary manager.

    Every rank makes the same calls of `all_gather`, of the same size, whatever it has found: one when the manager is
    made, then one at the beginning of each step of certain numbers. Which those are depends on the configuration alone,
    which has to be the same on all ranks; making the manager checks that.

    If an exchange fails or takes too long, the ranks are apart: this one goes on alone, and exchanges nothing, while a
    `Meeting` looks for the others. It brings a step from which on all exchange again, on trial: they are together once
    all of them have said that the first exchange was over for them.

    Args:
        context: of the canary of this rank.
        ranks: the group.
        accounts: told of what differs.

    Raises:
        ValueError: the ranks are configured differently.
    """

    def __init__(self, context: CanaryContext, ranks: RankGroup, *, accounts: RankAccounts) -> None:
        ranks.claim()
        self._context, self._ranks, self._accounts = context, ranks, accounts
        self._every = context.config.digest_every
        self._agrees, self._redacts = context.config.mode == "raise", context.config.redact
        self._gatherer = Gatherer(context)
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
        # Digests in which this rank and others were compared; and how often ranks that were apart came together again.
        self.compared = self.met = 0
        # Whether nothing is exchanged; and how ranks that were apart try to go on together, until they are.
        self.alone = False
        self._trial: Agreement | None = None
        # The step from which on they do so, and the number of the last exchange since then that is over.
        self._met_before = self._seen = 0
        # The step that is being begun, or was begun last; and the first one that this rank was alone with.
        self._number = self._alone_from = 0
        self._settings = {
            "the canary's version": _VERSION,
            "digest_every": self._every,
            "mode (1: raise)": int(self._agrees),
            "max_requests": self._gatherer.shape[1],
            "the groups (their number)": self._gatherer.shape[0],
            "the groups (crc32 of their names)": zlib.crc32("\0".join(g.name for g in context.groups).encode()),
        }
        self._meeting = Meeting(ranks, self._settings, waits=self._agrees, redacts=self._redacts)
        # At the end of the process too.
        weakref.finalize(self, self._meeting.end)
        self._meet()

    def note(self, error: CanaryViolationError) -> None:
        """Take in what this rank would have raised alone."""
        if self.alone:
            return
        self._total += error.total
        self._sentence = self._sentence or (error.reports[0].sentence if error.reports else str(error))
        self._errors.append(error)

    def see(self, forward: WatchedForward, batch: ForwardBatch) -> None:
        """Gather what this rank has of the requests of a forward that is over, where the step is to be compared."""
        if not self.alone and self._every and self._context.step % self._every == 0:
            try:
                self._gatherer.see(forward, batch)
            except Exception as error:
                # Said to the others as well: they wait for what this rank sends.
                self._lost = True
                self._say_not_gathered(self._context.step, error)

    def end_step(self, step: StepRecord) -> None:
        """Send off the step's digest to the host."""
        self._given_up += step.broken
        if self.alone or not self._every or step.number % self._every:
            return
        digest = Digest(step=step.number, gave_up=step.broken)
        lost, self._lost = self._lost, False
        try:
            if not step.broken and not lost:
                digest = self._gatherer.digest(step.number)
        except Exception as error:
            self._say_not_gathered(step.number, error)
        finally:
            self._gatherer.forget()
        digest.given_up = self._given_up
        self._digests.append(digest)

    def _say_not_gathered(self, step: int, error: Exception) -> None:
        logger.failure(
            "kv-canary: ranks: the digest of step %d was not gathered", step, error=error, redacts=self._redacts
        )

    def begin(self, number: int) -> None:
        """Take in what the other ranks have sent, and send what is due before step `number`.

        In log mode nothing is waited for; in raise mode, the exchange of the step before. Ranks that were apart may go
        on together from this step on.

        Raises:
            RankViolationError: in raise mode, on all ranks alike, if any of them found something or ranks differ.
        """
        self._number = number
        if self.alone:
            self._go_on_together()
        self._collect(wait=self._agrees)
        self._raise(before=number)
        due = number - LAG
        compares = self._every > 0 and due > 0 and due % self._every == 0
        tries = self._met_before > 0 and number - self._met_before in _TRIAL_STEPS
        if self._agrees or compares or tries:
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
        last = self._context.step
        steps = [s for s in range(max(1, last - LAG + 1), last + 1) if self._every and s % self._every == 0]
        for step in steps or [0]:
            self._send(last, digest_step=step)
            self._collect(wait=True)
        self._raise(before=last + 1)

    def _meet(self) -> None:
        """Check that all ranks are configured alike."""
        try:
            words = torch.tensor(list(self._settings.values()), dtype=torch.int64)
            exchange = Exchange(self._ranks, words)
            over = exchange.wait(self._ranks.timeout)
        except Exception as error:
            self._part(f"the first exchange failed ({said_by(error, redacts=self._redacts)})")
            return
        if not over:
            self._part(f"not all ranks have made their managers within {self._ranks.timeout:g} seconds")
            return
        check_same(self._settings, exchange.received().tolist())

    def _send(self, number: int, *, digest_step: int) -> None:
        """Begin an exchange: every rank does so at the same numbers, with the same count of words."""
        if self.alone:
            return
        while self._digests and self._digests[0].step < digest_step:
            self._digests.popleft()
        there = self._digests and self._digests[0].step == digest_step
        words, names = message.pack(
            self._shape,
            number=number,
            seen=self._seen,
            total=self._total,
            sentence=self._sentence,
            digest_step=digest_step,
            digest=self._digests.popleft() if there else None,
            redacts=self._redacts,
        )
        self._total, self._sentence = 0, ""
        try:
            exchange = Exchange(self._ranks, words)
        except Exception as error:
            self._part(f"the exchange before step {number} could not begin ({said_by(error, redacts=self._redacts)})")
            return
        self._under_way.append(_UnderWay(number=number, exchange=exchange, names=names))

    def _collect(self, *, wait: bool, seconds: float | None = None) -> None:
        """Take in the exchanges that are over; with `wait`, all, as far as they are over in so many seconds."""
        while self._under_way:
            first = self._under_way[0]
            timeout, crowded = self._timeout(), len(self._under_way) > MOST_UNDER_WAY
            left = first.exchange.began + timeout - time.monotonic()
            patience = max(0.0, left if seconds is None else min(left, seconds))
            try:
                # What is only tried must not hold up a step in log mode.
                must_wait = wait or (crowded and self._trial is None)
                over = first.exchange.wait(patience) if must_wait else first.exchange.done()
                if over:
                    self._read(first)
            except Exception as error:
                self._part(f"the exchange before step {first.number} failed ({said_by(error, redacts=self._redacts)})")
                return
            if over:
                self._under_way.popleft()
                continue
            if time.monotonic() >= first.exchange.began + timeout or (crowded and not must_wait):
                within = f"{timeout:g} seconds"
                self._part(f"not all ranks took part in the exchange before step {first.number} within {within}")
            return

    def _timeout(self) -> float:
        """Return how many seconds an exchange may take."""
        timeout = self._ranks.timeout
        if self._trial is None or not self._agrees:
            return timeout
        return min(timeout, max(_TRIAL_SECONDS, timeout * _TRIAL_SHARE))

    def _read(self, under_way: _UnderWay) -> None:
        """Take in who found what, and the differences that are new, which are reported."""
        received = under_way.exchange.received()
        headers = message.headers(received)
        numbers = [header.number for header in headers]
        if len(set(numbers)) > 1:
            raise RuntimeError(f"the ranks are before the steps {', '.join(map(str, numbers))}")
        self._seen = under_way.number
        if self._trial is not None and all(header.seen >= self._trial.step for header in headers):
            self._come_together(self._trial)
        if self._agrees:
            self._verdicts += [
                RankVerdict(rank=rank, total=header.total, sentence=header.sentence)
                for rank, header in enumerate(headers)
                if header.total
            ]
        complete = [rank for rank, header in enumerate(headers) if header.state == message.State.COMPLETE]
        given_up = [header.given_up for header in headers if header.state != message.State.NONE]
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
            {rank: message.lines(received[rank], self._shape) for rank in complete},
            step=headers[complete[0]].digest_step,
            groups=[g.name for g in self._context.groups],
            names=under_way.names,
            redactor=self._accounts.redactor,
            steps_match=self._steps_match,
        )
        # What goes on from one digest to the next is told once.
        before, self._told = self._told, {(r.key, r.differences, r.ranks) for r in reports}
        new = [r for r in reports if (r.key, r.differences, r.ranks) not in before]
        most = self._context.config.max_reports_per_step
        for report in new[:most]:
            self._accounts.take_ranks(report)
        if len(new) > most:
            logger.error("kv-canary: ranks: %d more requests differ and are not written out", len(new) - most)
        if self._agrees:
            # Violations are raised by the verdict of the rank that found them.
            only = (RankDifference.VIOLATIONS.name,)
            self._differences += [r for r in new[:most] if r.differences != only]

    def _raise(self, *, before: int) -> None:
        # While they try to go on together, nobody knows whether all would raise.
        if self._trial is None and (self._verdicts or self._differences):
            errors, verdicts, differences = self._errors, self._verdicts, self._differences
            self._errors, self._verdicts, self._differences = [], [], []
            raise RankViolationError(step=before, own=errors, verdicts=verdicts, differences=differences)

    def _part(self, why: str) -> None:
        """Go on alone, and look for the other ranks; a trial that failed is not worth a line."""
        tried, self._trial, self.alone = self._trial is not None, None, True
        self._under_way.clear()
        self._digests.clear()
        self._meeting.seek(self._number)
        if tried:
            self._errors, self._verdicts, self._differences = [], [], []
            logger.debug("kv-canary: ranks: they could not go on together: %s", why)
            return
        self._alone_from = self._number
        logger.error(
            "kv-canary: ranks: %s; rank %d goes on alone until all ranks have met again: until then ranks are not "
            "compared, what is found is logged and not raised, and the status is degraded",
            why,
            self._ranks.rank,
        )
        self._accounts.degrade()

    def _go_on_together(self) -> None:
        """Exchange again, beginning with this step, if that is what all ranks have agreed on."""
        self._trial = self._meeting.take(self._number)
        if self._trial is None:
            return
        self.alone, self._met_before, self._seen = False, self._number, 0
        # What was found meanwhile has been logged, and is not raised any more.
        self._total, self._sentence = 0, ""
        self._errors, self._verdicts, self._differences = [], [], []
        self._told = set()
        self._lost = False
        self._gatherer.forget()
        if not self._trial.in_step:
            self._steps_match = False

    def _come_together(self, trial: Agreement) -> None:
        """Take in that ranks which were apart exchange again."""
        self._trial = None
        self.met += 1
        self._meeting.together()
        self._accounts.restore()
        and_raise, apart = ", and raise together," if self._agrees else "", ""
        if not trial.in_step:
            apart = (
                f"; {trial.spread} steps were between them, so they are compared only where they run the same requests "
                "from the same prefixes"
            )
        logger.warning(
            "kv-canary: ranks: rank %d and the others are together again from step %d on, after %d steps alone: they "
            "are compared%s as before%s",
            self._ranks.rank,
            trial.step,
            trial.step - self._alone_from,
            and_raise,
            apart,
        )
