"""vLLM's KV in host memory (`OffloadingConnector`): records and seals go there and back with it, and are watched there.

The connector's scheduler says which blocks are copied to which chunks of host memory, a chunk being one or more blocks
of one group, and back; its worker copies them in streams of its own, and says later that it has. Records of a load come
back as the step behind that begins, whether or not the request that has waited for it is still there: what was loaded
may be found in the prefix cache from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch

from kv_canary.engines.patches import Patches
from kv_canary.engines.vllm.blocks import slots_of
from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.errors import must_be
from kv_canary.host_seals import ChunkSource
from kv_canary.output import logger
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import KvPool
from kv_canary.specs.structures import KvSource
from kv_canary.tier import Backup, Fetched, HostTier

_CONNECTOR, _MULTI = "OffloadingConnector", "MultiConnector"
# What `Offload.queue` reads of stores that wait.
_METADATA, _TOLD, _QUEUED = "OffloadingConnectorMetadata", ("store_jobs", "jobs_to_flush"), "_unsubmitted_store_jobs"
_SPEC, _TIERED = "CPUOffloadingSpec", "TieringOffloadingSpec"


def find(worker: Any) -> Any:
    """Return the worker's side of the connector whose host memory can be followed; None where there is none.

    Not where the host has one copy for several workers, another layout than the device's, or further tiers behind it:
    what lies there may be of others then. Beside other connectors it is followed; what those bring is not.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if worker.vllm_config.kv_transfer_config is None or not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    several = connector.sub_connectors if _MULTI in _names(connector) else [connector]
    offloading = [each for each in several if _CONNECTOR in _names(each)]
    if not offloading:
        return None
    if len(offloading) > 1:
        expected = "one of the connectors at most (what several bring is taken in as it comes, and counted)"
        logger.warning("kv-canary: %s", must_be("vllm adapter", _CONNECTOR, expected, str(len(offloading))))
        return None
    side = offloading[0].connector_worker
    names, config = _names(side.spec), side.spec.config
    is_plain = _SPEC in names and _TIERED not in names
    # Before a store is submitted, its blocks may be others' already.
    missing = [f"{type(side).__name__}.{_QUEUED}"] if not hasattr(side, _QUEUED) else []
    missing += [f"{_METADATA}.{name}" for name in _TOLD if name not in _told_by_metadata()]
    if missing:
        expected = "as in vLLM 0.32 (without it what a connector brings is taken in as it comes, and counted)"
        logger.warning("kv-canary: %s", must_be("vllm adapter", ", ".join(missing), expected, "none"))
        return None
    if is_plain and not side.spec.replicated_layout and not config.canonical_layout and side.worker is not None:
        return side
    logger.warning(
        "kv-canary: vllm adapter: what %s brings is taken in as it comes, and counted: its host memory is not one copy "
        "of this worker's blocks",
        type(side.spec).__name__,
    )
    return None


def _told_by_metadata() -> set[str]:
    """Return the fields of what vLLM's scheduler tells its connector in a step."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

    return {field.name for field in fields(OffloadingConnectorMetadata)}


class Offload:
    """The tiers of a worker's pools in host memory.

    Args:
        side: what `find` gave.
        manager: the canary.
        groups: of the worker.
        patches: what is wrapped.
    """

    def __init__(self, side: Any, manager: CanaryManager, groups: Sequence[AttachedGroup], *, patches: Patches) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

        self._manager, self._side = manager, side
        self._per_chunk: int = side.spec.blocks_per_chunk
        # Of vLLM's groups, in the order of transfers.
        self._order: Sequence[int] = get_offloading_group_ids(side.kv_cache_config)
        self._sizes = {g.number: g.block_size for g in groups}
        chunks = side.spec.num_chunks
        self._tiers: dict[KvPool, HostTier] = {}
        # Slots of a block of each tier.
        self._size_of: dict[HostTier, int] = {}
        # By group: the tiers of its pools.
        self._of: dict[int, list[HostTier]] = {g.number: [] for g in groups}
        for group in groups:
            pool = group.group.pool
            if pool not in self._tiers:
                k, v = (_on_host(source, side.worker, self._per_chunk) for source in (pool.k_source, pool.v_source))
                slots = chunks * self._per_chunk * group.block_size
                self._tiers[pool] = HostTier(manager, group.group, num_slots=slots, k_source=k, v_source=v)
                if pool.seals is not None and not self._tiers[pool].looks:
                    logger.warning(
                        "kv-canary: vllm adapter: bytes of %s are looked at when they come back from the host, and not "
                        "while they are there, where they do not lie as on the device",
                        group.group.name,
                    )
                self._size_of[self._tiers[pool]] = group.block_size
            if self._tiers[pool] not in self._of[group.number]:
                self._of[group.number].append(self._tiers[pool])
        # Of each group's block on the device: the load that brings something there, None once its records are
        # back; until the request that it is for asks for it, or the block is handed out again.
        self._loaded: dict[int, dict[int, _Loaded | None]] = {g.number: {} for g in groups}
        # Loads under way, by job, and those that are over.
        self._loads: dict[int, list[_Loaded]] = {}
        self._arrived: list[_Loaded] = []
        self._backups: dict[int, list[tuple[HostTier, Backup]]] = {}
        for name, wrapper in (
            ("submit_store", self._store),
            ("submit_load", self._load),
            ("get_finished", self._finish),
        ):
            patches.wrap(side.worker, name, wrapper)
        for tier in self._tiers.values():
            tier.start()

    @property
    def tiers(self) -> Sequence[HostTier]:
        """The tiers."""
        return list(self._tiers.values())

    @property
    def facts(self) -> Mapping[str, Any]:
        """What each tier has done, by the name of its group; JSON-ready."""
        return {tier.group.name: asdict(tier.facts) for tier in self.tiers}

    def settle(self) -> None:
        """Take in what has arrived on the host."""
        for tier in self.tiers:
            tier.settle()

    def queue(self, scheduled: Any) -> None:
        """Read the records of stores that wait, before the blocks of their requests are taken in as others'.

        They are made as the step begins, or the next one, of what earlier steps have written. By then vLLM may have
        given the blocks to others in its tables: it has that step wait for the copy.

        Args:
            scheduled: vLLM's `SchedulerOutput` of the step that begins.
        """
        with self._followed("a backup to the host"):
            # Where something could not be followed, the records that stores would take along are nobody's.
            self._manager.unverified.settle_debts()
            for job, source, target in getattr(self._side, _QUEUED):
                self._back_up(job, source, target)
            sent = scheduled.kv_connector_metadata
            for told in getattr(sent, "metadata", (sent,)):
                if _METADATA not in _names(told):
                    continue
                for job, entry in told.store_jobs.items():
                    # The others wait for what this step writes.
                    if entry.req_id in scheduled.finished_req_ids or job in (told.jobs_to_flush or ()):
                        self._back_up(job, entry.src_spec, entry.dst_spec)

    def land(self) -> list[tuple[int, list[int]]]:
        """Give what has been loaded since the last call its records and seals, and hold it against these.

        On the stream of the forwards, before the first one that may read it, and behind what retires blocks that are
        handed out. Return the blocks, each with the number of vLLM's group.
        """
        arrived, self._arrived = self._arrived, []
        landed, tiers = list[tuple[int, list[int]]](), dict[HostTier, None]()
        for load in arrived:
            loaded, size = self._loaded[load.number], self._sizes[load.number]
            # Some may be others' by now.
            which = [n for n, block in enumerate(load.blocks) if loaded.get(block) is load]
            if not which:
                continue
            blocks = [load.blocks[n] for n in which]
            places, slots = (torch.from_numpy(slots_of(np.array(x, np.int64), size)) for x in (which, blocks))
            for tier, fetched in load.fetched.items():
                tier.put_back(fetched.only(places), slots)
                tiers[tier] = None
            loaded.update(dict.fromkeys(blocks, None))
            landed.append((load.number, blocks))
        for tier in tiers:
            tier.land()
        return landed

    def take(self, group: AttachedGroup, slots: torch.Tensor) -> torch.Tensor:
        """Return slots of a group that were brought for a request, 0 where they came from here, with their records.

        Args:
            group: the group.
            slots: int64 [n] on the CPU.
        """
        loaded, size = self._loaded[group.number], self._sizes[group.number]
        blocks, of_slot = np.unique(slots.numpy() // size, return_inverse=True)
        is_here = np.array([block in loaded and loaded[block] is None for block in blocks.tolist()], np.bool_)
        return torch.where(torch.from_numpy(is_here[of_slot]), 0, slots)

    def took(self, number: int, slots: torch.Tensor) -> None:
        """Take in that nobody asks for slots of a group of vLLM's any more."""
        self._drop(number, np.unique(slots.numpy() // self._sizes[number]).tolist())

    def hand_out(self, blocks: np.ndarray) -> None:
        """Take in that blocks were handed out: what was loaded there before is nobody's any more.

        Args:
            blocks: int64, of any group: all groups' are numbered together.
        """
        if any(self._loaded.values()):
            given = blocks.tolist()
            for number in self._loaded:
                self._drop(number, given)

    def _drop(self, number: int, blocks: Iterable[int]) -> None:
        loaded = self._loaded[number]
        for block in blocks:
            loaded.pop(block, None)

    def forget(self) -> None:
        """Take in that nobody can say what any slot of the host holds."""
        for tier in self.tiers:
            tier.forget()
        self._backups.clear()
        self._loads.clear()
        self._arrived.clear()
        for loaded in self._loaded.values():
            loaded.clear()

    def close(self) -> None:
        """End the threads of the tiers; the second call does nothing."""
        for tier in self.tiers:
            tier.close()

    def release(self) -> None:
        """Let go of host memory, which vLLM is about to give back; behind `close`."""
        for tier in self.tiers:
            tier.release()

    # What vLLM calls.

    def _store(self, original: Callable[..., Any], job: int, source: Any, target: Any, *more: Any) -> Any:
        with self._followed("a backup to the host"):
            if job not in self._backups:
                # Nobody can say what its blocks held when it was queued, since something could not be followed.
                self._free(target.block_ids)
                for number, _, there in self._pairs(source, target.block_ids):
                    for tier in self._of[number]:
                        tier.bring(tier.expect(torch.from_numpy(there)), None)
        return original(job, source, target, *more)

    def _load(self, original: Callable[..., Any], job: int, source: Any, target: Any, *more: Any) -> Any:
        with self._followed("a load from the host"):
            loads = self._loads[job] = list[_Loaded]()
            for number, here, there in self._pairs(target, source.block_ids):
                size, host = self._sizes[number], torch.from_numpy(there)
                # Now: once the bytes are here, vLLM may give the host's slots to others.
                fetched = {tier: tier.fetch(host) for tier in self._of[number]}
                load = _Loaded(number=number, blocks=(here[::size] // size).tolist(), fetched=fetched)
                self._loaded[number].update(dict.fromkeys(load.blocks, load))
                loads.append(load)
        return original(job, source, target, *more)

    def _finish(self, original: Callable[..., Any]) -> Any:
        results = original()
        with self._followed("a transfer to or from the host"):
            for result in results:
                for tier, backup in self._backups.pop(result.job_id, ()):
                    tier.backed_up(backup)
                loads = self._loads.pop(result.job_id, ())
                if result.success:
                    self._arrived += loads
                    continue
                for load in loads:
                    self._drop(load.number, load.blocks)
        return results

    def _back_up(self, job: int, source: Any, target: Any) -> None:
        if job not in self._backups:
            self._free(target.block_ids)
            self._backups[job] = [
                (tier, tier.backup(torch.from_numpy(here), torch.from_numpy(there)))
                for number, here, there in self._pairs(source, target.block_ids)
                for tier in self._of[number]
            ]

    def _free(self, chunks: np.ndarray) -> None:
        """Take in that chunks have been given to others: whichever group has one, its bytes are in memory of all."""
        parts = (chunks.astype(np.int64)[:, None] * self._per_chunk + np.arange(self._per_chunk)).ravel()
        for tier, size in self._size_of.items():
            tier.free(torch.from_numpy(slots_of(parts, size)))

    def _pairs(self, on_device: Any, chunks: np.ndarray) -> Iterator[_Pair]:
        """Yield what a transfer of groups that are followed is between."""
        first_block = first_chunk = 0
        for number, count, index in zip(self._order, on_device.group_sizes, on_device.block_indices, strict=True):
            skipped = index % self._per_chunk
            its = chunks[first_chunk : first_chunk - (-(count + skipped) // self._per_chunk)] if count else chunks[:0]
            blocks = on_device.block_ids[first_block : first_block + count].astype(np.int64)
            first_block, first_chunk = first_block + count, first_chunk + len(its)
            if number in self._sizes and count:
                size = self._sizes[number]
                parts = its.astype(np.int64)[:, None] * self._per_chunk + np.arange(self._per_chunk)
                there = parts.ravel()[skipped : skipped + count]
                yield _Pair(number, slots_of(blocks, size), slots_of(there, size))

    def _followed(self, what: str) -> _Followed:
        return _Followed(self, what)

    def failed(self, what: str, error: Exception) -> None:
        """Take in that something could not be followed."""
        self._manager.guard.failed(f"following {what}", error)
        self.forget()


class _Pair(NamedTuple):
    """Slots of a group, int64 [n]: the scheduler's number of it, those on the device, and those on the host."""

    number: int
    here: np.ndarray
    there: np.ndarray


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A load of blocks of a group, and what their slots had on the host as it was submitted, by tier."""

    number: int
    blocks: Sequence[int]
    fetched: Mapping[HostTier, Fetched]


class _Followed:
    """The context of a part that may fail where the engine must not: nothing on the host is relied on then."""

    def __init__(self, offload: Offload, what: str) -> None:
        self._offload, self._what = offload, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if isinstance(error, Exception):
            self._offload.failed(self._what, error)
            return True
        return False


def _on_host(source: KvSource | None, worker: Any, per_chunk: int) -> KvSource | None:
    """Return where a pool's bytes lie on the host; None where they do not lie there as on the device.

    Args:
        source: of the pool.
        worker: vLLM's, with the tensors that it copies between: of bytes, by block and by chunk.
        per_chunk: blocks of a chunk.
    """
    handler = getattr(worker, "_load_handler", None)
    if source is None or handler is None:
        return None
    rows = [_row_of(layer, handler.dst_tensors, handler.src_tensors, per_chunk) for layer in source.layers]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows) or len({(row.stride(), pages) for row, pages in known}) > 1:
        return None
    pages, first = known[0][1], source.layers[0]
    return ChunkSource(
        layers=tuple(row for row, _ in known),
        page_size=source.page_size * pages,
        bytes_per_token=source.bytes_per_token,
        read_bytes=source.read_bytes,
        offset_bytes=source.offset_bytes,
        token_stride_bytes=source.token_stride_bytes,
        slot_bias=1,
        pages=pages,
        page_stride_bytes=first.stride(0) * first.element_size(),
    )


def _row_of(
    layer: torch.Tensor, on_device: Sequence[torch.Tensor], on_host: Sequence[torch.Tensor], per_chunk: int
) -> tuple[torch.Tensor, int] | None:
    """Return where a layer's rows lie on the host; None where there are none that lie in a chunk as on the device.

    That is uint8 [chunks, bytes from the first byte of a chunk's first row to the last byte of its last], and how many
    rows of the layer a chunk has. Others lie between chunks: vLLM keeps all layers of a chunk side by side.
    """
    stride, width = (n * layer.element_size() for n in (layer.stride(0), layer.shape[1]))
    for here, there in zip(on_device, on_host, strict=True):
        page = here.shape[1]
        begin = layer.data_ptr() - here.data_ptr()
        # Rows of the layer to a block, where a kernel's blocks are parts of the scheduler's.
        parts, rest = divmod(page, stride)
        is_mine = layer.untyped_storage().data_ptr() == here.untyped_storage().data_ptr() and 0 <= begin < page
        if not is_mine:
            continue
        is_dense = here.stride(0) == page and there.stride(1) == 1 and not rest and parts
        if not is_dense or there.shape[1] != page * per_chunk:
            return None
        flat, rows = there.view(torch.uint8), parts * per_chunk
        size, strides = (there.shape[0], (rows - 1) * stride + width), (flat.stride(0), 1)
        return torch.as_strided(flat, size, strides, flat.storage_offset() + begin), rows
    return None


def _names(thing: Any) -> set[str]:
    return {cls.__name__ for cls in type(thing).__mro__}
