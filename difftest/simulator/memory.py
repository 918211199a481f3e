"""The memory that one implementation of the ops keeps beside an engine."""

from __future__ import annotations

import torch

from kv_canary.constants import RECORD_WORDS, Tag
from kv_canary.difftest.simulator.config import EngineConfig, GroupConfig
from kv_canary.difftest.simulator.groups import rows_apart
from kv_canary.specs.structures import Endpoint, ResolvedSlots, VerifyPlan, ViolationLog, WritePlan


class GroupMemory:
    """One group's records, and its plans or what stands for them."""

    def __init__(self, group: GroupConfig, config: EngineConfig) -> None:
        swa = group.kind in ("lut", "ring")
        self.records = tuple(
            rows_apart(group.num_slots, RECORD_WORDS, RECORD_WORDS * config.gap, torch.int64)
            for _ in range(1 + config.two_records)
        )
        # Records that HEAD has to itself carry no fingerprints.
        self.head = Endpoint(
            tag=Tag.HEAD_SWA if swa else Tag.HEAD_FULL,
            records=self.records[0],
            k_source=None if config.two_records else group.k_source,
            v_source=None if config.two_records else group.v_source,
        )
        self.tail = Endpoint(
            tag=Tag.TAIL_SWA if swa else Tag.TAIL_FULL,
            records=self.records[-1],
            k_source=group.k_source,
            v_source=group.v_source,
        )
        # The second of each is of what is resident after the step.
        self.verify_plans = tuple(VerifyPlan.allocate(verify_cap=config.verify_cap) for _ in range(2))
        self.resolved = ResolvedSlots.allocate(entry_cap=config.verify_cap)
        self.write_plans = tuple(WritePlan.allocate(write_cap=config.max_rows + 8) for _ in range(2))


class Memory:
    """The state that one implementation's calls read and write; tables, KV bytes and lengths are the engine's."""

    def __init__(self, config: EngineConfig) -> None:
        self.groups = {g.kind: GroupMemory(g, config) for g in config.groups}
        self.tails = torch.zeros(config.max_rows, dtype=torch.int64)
        self.token_pool = rows_apart(config.max_rows, config.max_len + 1, config.gap, torch.int32)
        self.violations = ViolationLog.allocate(ring_cap=config.ring_cap)
        self.counters = torch.zeros(len(Tag), 2, dtype=torch.int64)
        self.status = torch.zeros(1, dtype=torch.int32)

    def clear(self) -> None:
        """Forget every record and violation, as when an engine flushes its cache."""
        for group in self.groups.values():
            for records in group.records:
                records.zero_()
        self.violations.ring.zero_()
        self.violations.count.zero_()
