"""The parts of a canary that all others work with: its groups, limits and settings, and what it keeps on the device."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

import torch

from kv_canary.backends import select_backend
from kv_canary.config import CanaryConfig, Seals
from kv_canary.constants import Tag
from kv_canary.errors import must_be
from kv_canary.runtime.arrivals import Arrivals
from kv_canary.runtime.capacities import CanaryLaunchCapacities, CanaryLimits
from kv_canary.runtime.device_state import CanaryDeviceState
from kv_canary.runtime.frees import Frees
from kv_canary.runtime.guard import Guard
from kv_canary.runtime.oracle import TokenOracle
from kv_canary.runtime.pools import BufferGroup, KvPool
from kv_canary.runtime.replays import Beside, Replays, capture_graph
from kv_canary.specs.structures import Endpoint

# Of seals that cross to another process.
_CROSSING_SEED = 0x6B76_5345_414C
# A token table this small is kept whatever the pool's size.
SMALL_TABLE_BYTES = 16 << 20


class CanaryContext:
    """The groups of one canary, its limits and settings, its backend, its guard, and its state on the device.

    Args:
        groups: the engine's attention groups and their pools.
        limits: the engine's limits.
        config: how to behave.

    Raises:
        ValueError: groups are missing, share a name, or lie on several devices.
    """

    def __init__(self, groups: Sequence[BufferGroup], *, limits: CanaryLimits, config: CanaryConfig) -> None:
        if not groups:
            raise ValueError(must_be("CanaryManager", "groups", "at least one group", "none"))
        names = [g.name for g in groups]
        if len(set(names)) != len(names):
            raise ValueError(must_be("CanaryManager", "groups", "of different names", str(names)))
        devices = {g.pool.records.device for g in groups}
        if len(devices) != 1:
            raise ValueError(must_be("CanaryManager", "groups", "on one device", str(sorted(map(str, devices)))))
        self.groups = tuple(groups)
        # Where violations may be found, by the number that their rows have of it: the groups, and tiers of their pools.
        self.places: list[BufferGroup] = [*groups]
        self.arrivals, self.frees = Arrivals(), Frees()
        self.pools: tuple[KvPool, ...] = tuple(dict.fromkeys(g.pool for g in groups))
        self.limits, self.config = limits, config
        self.guard = Guard(contains=config.mode != "raise", redacts=config.redact)
        self.device = devices.pop()
        self.backend = select_backend(config.backend, self.device)
        if config.records == "head_and_tail":
            for pool in self.pools:
                pool.keep_head_records()
        if self.seals != "off":
            # Nobody outside can make bytes that fit a seal: the seed is of this process alone. Where KV is handed from
            # one process to another, it is the same everywhere.
            crosses = config.records == "head_and_tail" if config.shared_seals is None else config.shared_seals
            seed = _CROSSING_SEED if crosses else secrets.randbits(63)
            for pool in self.pools:
                pool.keep_seals(by_layer=self.seals == "layer", seed=seed)
        self.state = CanaryDeviceState(
            replays=self.new_replays(),
            max_rows=limits.max_rows,
            ring_capacity=config.ring_capacity,
            keep_tokens=self._keeps_tokens(),
            offsets=[g.token_offset for g in groups],
            device=self.device,
        )
        self.oracle = TokenOracle(max_rows=limits.max_rows, device=self.device)
        self._endpoints: dict[tuple[str, Tag, bool], Endpoint] = {}
        self._slot_marks = {
            pool: torch.zeros(len(pool.records), dtype=torch.int64, device=self.device) for pool in self.pools
        }

    @property
    def seals(self) -> Seals:
        """Which seals are kept."""
        config = self.config
        if self.is_off:
            return "off"
        if config.seals is None:
            on_gpu = self.device.type == "cuda" and config.track_lifetime
            return "layer" if on_gpu or config.check_writes else "off"
        return config.seals

    @property
    def is_off(self) -> bool:
        """Whether the configuration turns the canary off: nothing is verified, recorded or said."""
        return self.config.mode == "off"

    @property
    def step(self) -> int:
        """Number of the current or last step; the first is 1."""
        return self.state.number

    @property
    def memory(self) -> dict[str, int]:
        """Bytes on the device, by what they are: records, seals, tokens, scratch; and K and V, of the engine."""
        tokens = self.state.token_pool
        return {
            "kv": sum(pool.kv_bytes for pool in self.pools),
            "records": sum(records.nbytes for pool in self.pools for records in pool.buffers),
            "seals": sum(pool.seals.words.nbytes for pool in self.pools if pool.seals is not None),
            "tokens": 0 if tokens is None else tokens.nbytes,
            "scratch": sum(marks.nbytes for marks in self._slot_marks.values()),
        }

    def slot_marks(self, pool: KvPool) -> torch.Tensor:
        """Return the scratch of a pool's writes, int64 [num_slots]; the same one every time."""
        return self._slot_marks[pool]

    def capacities(self, group: BufferGroup) -> CanaryLaunchCapacities:
        """Return the sizes that launches of `group` are made for."""
        return CanaryLaunchCapacities.from_args(
            limits=self.limits, window=group.window, verify_capacity=self.config.verify_capacity
        )

    def endpoint(self, group: BufferGroup, tag: Tag, *, with_bytes: bool) -> Endpoint:
        """Return the launch site `tag` of `group`; the same one every time."""
        key = (group.name, tag, with_bytes)
        if key not in self._endpoints:
            endpoint = group.endpoint(tag, with_bytes=with_bytes)
            self._endpoints[key] = dataclasses.replace(endpoint, group=1 + self.groups.index(group))
        return self._endpoints[key]

    def new_replays(self) -> Replays:
        """Return what runs launches: on a GPU, with Triton, by graphs where they come again, unless that is off."""
        return Replays(capture_graph if self._has_own_graphs else None, failed=self.capture_failed)

    def new_beside(self) -> Beside | None:
        """Return a stream to launch on beside the forwards'; None where launches do not come from graphs."""
        return Beside(self.device) if self._has_own_graphs else None

    @property
    def _has_own_graphs(self) -> bool:
        return self.config.own_graphs and self.device.type == "cuda" and self.backend == "triton"

    def capture_failed(self, error: Exception) -> None:
        """Count that launches could not be captured, which go on as they are; nothing is unverified by that."""
        self.guard.failed("capturing a graph", error, own=False)

    def _keeps_tokens(self) -> bool:
        if self.config.check_tokens is not None:
            return self.config.check_tokens
        table = 4 * self.limits.max_rows * self.limits.max_len
        pool = sum(p.kv_bytes for p in self.pools)
        return table <= max(SMALL_TABLE_BYTES, self.config.token_table_share * pool)
