"""The canary of one engine: its groups, its state, its forwards, and what becomes of what they find."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kv_canary import ops
from kv_canary.backends import select_backend
from kv_canary.config import CanaryConfig
from kv_canary.constants import Reason, Status, Tag
from kv_canary.drain import Drain, StepFindings
from kv_canary.errors import must_be
from kv_canary.forward import ForwardRequest, SingleForwardManager
from kv_canary.pools import BufferGroup, KvPool
from kv_canary.reports import CanaryViolationError, Decoder, ViolationReport
from kv_canary.rows import RowTable
from kv_canary.specs.structures import Endpoint
from kv_canary.state import CanaryDeviceState

logger = logging.getLogger("kv_canary")

# Steps whose rows are remembered, so that a report can name the request.
REMEMBERED_STEPS = 64
# A token table this small is kept whatever the pool's size.
SMALL_TABLE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class CanaryLimits:
    """The engine's own limits, which size every buffer.

    Args:
        max_rows: rows of the engine's tables, row 0 (padding) included.
        max_requests: requests in one forward.
        max_tokens: new tokens in one forward.
        max_len: tokens of one request; only for judging whether a token table is affordable.
    """

    max_rows: int
    max_requests: int
    max_tokens: int
    max_len: int

    def __post_init__(self) -> None:
        for name, low in (("max_rows", 2), ("max_requests", 1), ("max_tokens", 1), ("max_len", 1)):
            if getattr(self, name) < low:
                raise ValueError(must_be("CanaryLimits", name, f"at least {low}", str(getattr(self, name))))


@dataclass(frozen=True, kw_only=True)
class CanarySummary:
    """What the canary has done so far, as of the last drained step.

    positions_verified counts the cached positions that were checked before a forward read them.
    """

    status: str
    steps: int
    positions_verified: int
    violations: int
    reasons: dict[str, int]
    launches: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as JSON-ready values."""
        return asdict(self)


class CanaryManager:
    """The canary of one engine, or of one rank of it.

    Args:
        groups: the engine's attention groups and their pools.
        limits: the engine's limits.
        config: how to behave.
        rows: where rows and owners come from, for names in reports; None if the engine has its own.
        on_report: called with every report that is written out; what it raises is logged and goes no further.

    Raises:
        ValueError: groups are missing, share a name, or lie on several devices.
    """

    def __init__(
        self,
        groups: Sequence[BufferGroup],
        *,
        limits: CanaryLimits,
        config: CanaryConfig | None = None,
        rows: RowTable | None = None,
        on_report: Callable[[ViolationReport], None] | None = None,
    ) -> None:
        if not groups:
            raise ValueError(must_be("CanaryManager", "groups", "at least one group", "none"))
        names = [g.name for g in groups]
        if len(set(names)) != len(names):
            raise ValueError(must_be("CanaryManager", "groups", "of different names", str(names)))
        devices = {g.pool.records.device for g in groups}
        if len(devices) != 1:
            raise ValueError(must_be("CanaryManager", "groups", "on one device", str(sorted(map(str, devices)))))
        self.groups = tuple(groups)
        self.limits = limits
        self.config = config or CanaryConfig()
        self.device = devices.pop()
        self.backend = select_backend(self.config.backend, self.device)
        self.pools: tuple[KvPool, ...] = tuple(dict.fromkeys(g.pool for g in groups))
        self.state = CanaryDeviceState(
            max_rows=limits.max_rows,
            ring_capacity=self.config.ring_capacity,
            keep_tokens=self._keeps_tokens(),
            device=self.device,
        )
        self.reports: deque[ViolationReport] = deque(maxlen=1024)
        self._rows = rows
        self._on_report = on_report
        self._endpoints: dict[tuple[str, Tag, bool], Endpoint] = {}
        self._steps: deque[tuple[int, dict[int, str]]] = deque(maxlen=REMEMBERED_STEPS)
        self._decoder = Decoder(self.groups, name_of_row=self._name_of_row, name_of_owner=self._name_of_owner)
        self._drain = Drain(self.state, groups=len(self.groups))
        self._step = 0
        self._violations = 0
        self._reasons: Counter[str] = Counter()
        self._statuses: Counter[Status] = Counter()
        self._forwards: dict[str, SingleForwardManager] = {}

    def forward(self, name: str = "target") -> SingleForwardManager:
        """Return the manager of the forward called `name`; the same one every time."""
        if name not in self._forwards:
            self._forwards[name] = SingleForwardManager(self, name=name)
        return self._forwards[name]

    @property
    def step(self) -> int:
        """Number of the current or last step; the first is 1."""
        return self._step

    def endpoint(self, group: BufferGroup, tag: Tag, *, with_bytes: bool) -> Endpoint:
        """Return the launch site `tag` of `group`; the same one every time."""
        key = (group.name, tag, with_bytes)
        if key not in self._endpoints:
            self._endpoints[key] = group.endpoint(tag, with_bytes=with_bytes)
        return self._endpoints[key]

    def retire(self, pool: KvPool, slots: torch.Tensor, *, owner: int = 0) -> None:
        """Mark int64 `slots` of `pool` as freed: their content can be reached no more."""
        if self.config.track_lifetime and len(slots):
            ops.retire(
                slots=slots.to(self.device),
                owner=owner,
                step=self.state.step,
                records=(pool.records,),
                backend=self.backend,
            )

    def move(self, pool: KvPool, src: torch.Tensor, dst: torch.Tensor, *, owner: int) -> None:
        """Carry the records of int64 `src` to `dst`, because the KV was copied so."""
        if len(src):
            ops.move(
                src=src.to(self.device),
                dst=dst.to(self.device),
                owner=owner,
                step=self.state.step,
                records=(pool.records,),
                backend=self.backend,
            )

    def clear(self) -> None:
        """Forget every record, because the engine emptied its cache."""
        for pool in self.pools:
            pool.records.zero_()

    def begin_step(self, requests: Sequence[ForwardRequest]) -> None:
        """Report what earlier steps found, then start a new one; called by `SingleForwardManager.begin`."""
        self._handle(self._drain.poll())
        self.state.advance_tails(requests, backend=self.backend)
        self._step += 1
        self.state.step.fill_(self._step)
        self._steps.append((self._step, {r.row: r.request_id for r in requests}))

    def end_step(self, statuses: Sequence[tuple[BufferGroup, torch.Tensor]]) -> None:
        """Start the copy of the step's findings to the host; called by `SingleForwardManager.end`."""
        self._drain.push([status for _, status in statuses])

    def flush(self) -> None:
        """Wait for everything that was launched, and report it now; for the end of a run, not for the hot path.

        Raises:
            CanaryViolationError: in raise mode, if there was anything to report.
        """
        self._handle(self._drain.poll(wait=True))

    def summary(self) -> CanarySummary:
        """Return what the canary has done, as of the last drained step."""
        counters = self._drain.counters
        return CanarySummary(
            status=self._status(),
            steps=self._step,
            positions_verified=counters[Tag.HEAD_FULL][1] + counters[Tag.HEAD_SWA][1],
            violations=self._violations,
            reasons=dict(self._reasons),
            launches={tag.name: counters[tag][0] for tag in Tag if counters[tag][0]},
        )

    def _status(self) -> str:
        if not self._step:
            return "disabled"
        return "degraded" if self._statuses else "healthy"

    def _keeps_tokens(self) -> bool:
        if self.config.check_tokens is not None:
            return self.config.check_tokens
        table = 4 * self.limits.max_rows * self.limits.max_len
        pool = sum(p.kv_bytes for p in self.pools)
        return table <= max(SMALL_TABLE_BYTES, self.config.token_table_share * pool)

    def _handle(self, findings: StepFindings) -> None:
        """Count, log and hand on what was drained; all counters are up to date before anything can raise."""
        for index, bits in findings.statuses:
            self._statuses[Status(bits)] += 1
            names = " + ".join(b.name or str(b) for b in Status if b in Status(bits))
            logger.warning("kv-canary: group %s: the plan of a step was incomplete: %s", self.groups[index].name, names)
        if not findings.total:
            return
        self._violations += findings.total
        for words in findings.rows:
            self._reasons.update(r.name or str(r) for r in Reason if r in Reason(words[1]))
        chosen = _most_telling(findings.rows, self.config.max_reports_per_step)
        reports = [self._decoder.decode(words) for words in chosen]
        self.reports.extend(reports)
        for report in reports:
            logger.error("kv-canary: %s", report.sentence)
            self._call(report)
        if findings.total > len(reports):
            logger.error("kv-canary: %d more violations are not written out", findings.total - len(reports))
        if self.config.mode == "raise":
            raise CanaryViolationError(reports, findings.total)

    def _call(self, report: ViolationReport) -> None:
        if self._on_report is None:
            return
        try:
            self._on_report(report)
        except Exception:
            logger.exception("kv-canary: on_report raised; the canary goes on")

    def _name_of_row(self, step: int, row: int) -> str | None:
        return next((names.get(row) for s, names in reversed(self._steps) if s == step), None)

    def _name_of_owner(self, owner: int) -> str | None:
        return None if self._rows is None else self._rows.name(owner)


def _most_telling(rows: list[list[int]], count: int) -> list[list[int]]:
    """Return up to `count` violation rows: first one of every kind (tag, reasons, row), then the rest, in order."""
    first: dict[tuple[int, int, int], int] = {}
    for index, words in enumerate(rows):
        first.setdefault((words[0], words[1], words[3]), index)
    leading = list(first.values())
    rest = [i for i in range(len(rows)) if i not in set(leading)]
    return [rows[i] for i in sorted([*leading, *rest][:count])]
