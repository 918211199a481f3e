"""SGLang's host tier (HiCache): records and seals go to host memory and back with the KV, and are watched there.

The engine's controller copies in two streams of its own, all layers at once to the host and layer by layer back. Host
slots are those of the host pool's allocator; what a copy is between stands in the controller's operation, before it
moves the numbers to wherever its kernels want them.

What a storage backend keeps and brings: see `storage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch

from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import storage
from kv_canary.engines.sglang.completion import Ended
from kv_canary.errors import must_be
from kv_canary.output import logger
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup
from kv_canary.specs.structures import KvSource
from kv_canary.tier import Backup, HostTier

# Host pools whose bytes the adapter knows, by name of their class.
_KNOWN = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")


def check(scheduler: Any) -> None:
    """See that the adapter can follow the scheduler's host tier, if it has one.

    Raises:
        ValueError: it cannot; the text names the setting.
    """
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    if controller is None:
        return

    def refuse(name: str, expected: str, got: str) -> ValueError:
        return ValueError(must_be("sglang adapter", name, f"{expected} with a host tier", got))

    args = scheduler.server_args
    if args.disaggregation_mode in ("prefill", "decode"):
        expected = "off (of a decode server disaggregation_decode_retraction_backup=cpu_tensor)"
        raise refuse("disaggregation_mode", expected, args.disaggregation_mode)
    if controller.host_memory_mode != "cache":
        raise refuse("the host memory's mode", "cache", str(controller.host_memory_mode))
    for entry in controller.mem_pool_host.entries:
        kind = type(entry.host_pool).__name__
        if kind not in _KNOWN or entry.host_pool.dcp_size != 1 or entry.packed_draft_device_pools:
            raise refuse(f"the host pool of {entry.name.value}", f"one of {', '.join(_KNOWN)}, unsplit", kind)


def has_storage(scheduler: Any) -> bool:
    """Whether the scheduler's host tier keeps pages in storage, where other processes find them."""
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    return bool(controller is not None and controller.enable_storage)


class HostTiers:
    """The tiers of a scheduler's pools, which follow its controller.

    Args:
        scheduler: whose prefix cache has a controller that `check` has seen.
        manager: its canary.
        attached: the pools of the target and of draft models, with their groups.
        patches: what is wrapped.
        ended: the requests that have ended and have not been looked at.
        complete_ended: looks at what they rested on, on the stream of the caller.
        retire_freed: does so too, and retires the slots that were freed up to now, likewise.
        following: gives the context, by what is done, of a part of the canary that may fail where the engine must not;
            where it did, no slot's record may be relied on.
        updates: returns how often the weights have changed.

    Attributes:
        is_loading: whether KV is on its way back that a forward has not read yet, or not been seen to.
    """

    def __init__(
        self,
        scheduler: Any,
        manager: CanaryManager,
        attached: Sequence[tuple[Any, Sequence[BufferGroup]]],
        *,
        patches: Patches,
        ended: Ended,
        complete_ended: Callable[[], None],
        retire_freed: Callable[[], None],
        following: Callable[[str], AbstractContextManager[Any]],
        updates: Callable[[], int],
    ) -> None:
        self._following, self._device = following, manager.device
        self._ended, self._complete_ended, self._retire_freed = ended, complete_ended, retire_freed
        on_gpu = manager.device.type == "cuda"
        self._beside = torch.cuda.Stream(manager.device) if on_gpu else None
        # Behind all that the scheduler's stream has been given.
        self._scheduled = torch.Event(manager.device) if on_gpu else None
        self._unverified = manager.unverified
        self._controller = controller = scheduler.tree_cache.cache_controller
        # What the controller is about to copy.
        self._operation: Any = None
        self._tiers: list[HostTier] = []
        # The controller's pools, with the tiers of each.
        self._entries: list[tuple[Any, Sequence[HostTier]]] = []
        self.is_loading = False
        patches.wrap(controller, "_move_write_operation", self._note_write)
        patches.wrap(controller, "_move_op_indices", self._note)
        patches.wrap(controller, "start_loading", self._start_loading)
        patches.wrap(controller, "write_storage", self._write_storage)
        patches.wrap(controller.l2_transfer_engine, "submit_host_to_device", self._load)
        patches.wrap(scheduler.tree_cache, "flush_pending_backups", self._results_processed)
        by_pool: dict[str, Sequence[HostTier]] = {}
        for entry in controller.mem_pool_host.entries:
            tiers = [tier for pool, groups in attached for tier in _tiers_of(entry, manager, pool, groups)]
            by_pool[entry.name.value] = tiers
            self._watch(entry, tiers, patches)
            if entry.is_primary_index_anchor:
                primary = entry.name.value
        self._storage = storage.StoredPages(
            controller,
            by_pool,
            primary=primary,
            has_adapters=bool(scheduler.server_args.enable_lora),
            manager=manager,
            patches=patches,
            updates=updates,
        )
        for tier in self._tiers:
            tier.start()

    @property
    def facts(self) -> Mapping[str, Any]:
        """What each tier has done, by the name of its group, and what storage has; JSON-ready."""
        return {**{tier.group.name: asdict(tier.facts) for tier in self._tiers}, **self._storage.facts}

    def forget(self) -> None:
        """Take in that nobody can say what any slot of the host holds."""
        for tier in self._tiers:
            tier.forget()

    @property
    def tiers(self) -> Sequence[HostTier]:
        """The tiers."""
        return self._tiers

    def settle(self) -> None:
        """Take in what has arrived on the host."""
        self._doubt_failed()
        for tier in self._tiers:
            if not tier.is_quiet:
                with self._following("the host tier"):
                    tier.settle()

    def look_beside(self) -> None:
        """Note where the stream of the forwards is, which the caller's is, before a forward is launched.

        The next `before_forward` comes behind that, and looks while it runs.
        """
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._device))

    def before_forward(self, *, is_beside: bool = False) -> None:
        """Give what has come back its records, on the stream of the forwards, behind what retires freed slots.

        The stream waits for the bytes.

        Args:
            is_beside: whether a forward is under way that `look_beside` was called before: freed slots are retired, and
                what has come back is looked at, while that runs, on a stream of its own, which the stream of the
                forwards waits for.
        """
        self.settle()
        self.is_loading = False
        beside = self._beside if is_beside else None
        with nullcontext() if beside is None else torch.cuda.stream(beside):
            if is_beside:
                # Some of these have been loaded to: they are no longer freed once they have records.
                self._retire_freed()
            for tier in self._tiers:
                if not tier.is_quiet:
                    with self._following("the host tier"):
                        tier.land()
        if beside is not None:
            torch.cuda.current_stream(self._device).wait_stream(beside)

    def close(self) -> None:
        """End the threads of the tiers; the second call does nothing."""
        for tier in self._tiers:
            tier.close()

    def _watch(self, entry: Any, tiers: Sequence[HostTier], patches: Patches) -> None:
        """Follow the copies, and the slots, of one of the controller's pools."""
        pool = entry.host_pool
        self._tiers += tiers
        self._entries.append((entry, tiers))

        def backup(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            backups: list[Backup] = []
            with self._following("a backup to the host"):
                device, host = self._slots(entry)
                backups += (tier.backup(device, host) for tier in tiers)
            result = original(*args, **kwargs)
            with self._following("a backup to the host"):
                for tier, its in zip(tiers, backups, strict=False):
                    tier.backed_up(its)
            return result

        def free(original: Callable[..., Any], indices: torch.Tensor) -> Any:
            # Before: whoever is given them may write there at once.
            with self._following("what is freed on the host"):
                for tier in tiers:
                    tier.free(indices)
            return original(indices)

        def clear(original: Callable[..., Any]) -> Any:
            result = original()
            with self._following("an emptied host tier"):
                for tier in tiers:
                    tier.clear()
            return result

        patches.wrap(pool, "backup_from_device_all_layer_physical", backup)
        patches.wrap(pool, "free", free)
        patches.wrap(pool, "clear", clear)

    def _start_loading(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around the beginning of a load, which may write to slots that ended requests rested on."""
        if self._controller.load_queue and self._ended:
            with self._following("a load from the host"), self._on_forwards_stream():
                self._complete_ended()
        return original(*args, **kwargs)

    def _load(self, original: Callable[..., Any], transfers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """Called around the launch of a load, of all layers and pools; each layer is there when the model wants it."""
        loads: list[HostTier] = []
        with self._following("a load from the host"):
            self._doubt_failed()
            for entry, tiers in self._entries:
                if any(transfer.host_pool is entry.host_pool for transfer in transfers):
                    device, host = self._slots(entry)
                    for tier in tiers:
                        tier.load(host, device)
                        loads.append(tier)
            self.is_loading = True
        result = original(transfers, *args, **kwargs)
        with self._following("a load from the host"):
            for tier in loads:
                tier.loaded(result.finish_event)
        return result

    def _results_processed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around what the scheduler does last with the results of a batch.

        What ended with it is looked at while the scheduler makes up its mind: a load of the next batch waits for that.
        """
        result = original(*args, **kwargs)
        if self._ended:
            with self._following("requests that have ended"), self._on_forwards_stream():
                self._complete_ended()
        return result

    def _write_storage(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Called around the queueing of pages for storage: their backup is over, and a thread asks for its records."""
        self.settle()
        return original(*args, **kwargs)

    def _on_forwards_stream(self) -> AbstractContextManager[Any]:
        """Launch where forwards run: a load waits for all that is launched there.

        What is read there is computed on the scheduler's stream, and may not be known there yet.
        """
        stream = self._controller.load_fence_stream
        if stream is None or self._scheduled is None:
            return nullcontext()
        # wait_stream() makes an event each time, of a kind that takes longer.
        self._scheduled.record()
        self._scheduled.wait(stream)
        return torch.cuda.stream(stream)

    def _doubt_failed(self) -> None:
        """Rely on nothing that lies on the host where following storage has failed, on a thread of its own."""
        if self._storage.take_failed():
            self.forget()

    def _note(self, original: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        self._operation = operation
        return original(operation, *args, **kwargs)

    def _note_write(self, original: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        """Called around the beginning of a backup, which waits for all that is launched where forwards run."""
        if not self._unverified.is_clean:
            with self._following("a backup to the host"), self._on_forwards_stream():
                # Where something could not be followed, the records that it would take along are nobody's.
                self._unverified.settle_debts()
        return self._note(original, operation, *args, **kwargs)

    def _slots(self, entry: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots that the copy under way is between, on the device and on the host."""
        operation = self._operation
        if entry.is_primary_index_anchor:
            return operation.device_indices, operation.host_indices
        [transfer] = [t for t in operation.pool_transfers or [] if t.name == entry.name]
        return transfer.device_indices, transfer.host_indices


def _tiers_of(entry: Any, manager: CanaryManager, device_pool: Any, groups: Sequence[BufferGroup]) -> list[HostTier]:
    """Return the tiers of the groups of a pool whose bytes one of the controller's pools has."""
    windowed = getattr(device_pool, "swa_kv_pool", None)
    full = (device_pool, getattr(device_pool, "full_kv_pool", device_pool))
    found = []
    for group in groups:
        if not any(entry.device_pool is its for its in (full if group.lut is None else (windowed,))):
            continue
        k, v = _sources(entry.host_pool, group)
        found.append(HostTier(manager, group, num_slots=entry.host_pool.size, k_source=k, v_source=v))
        if k is None and v is None:
            logger.warning(
                "kv-canary: sglang adapter: bytes of %s are looked at when they come back from the host, and not while "
                "they are there, in the layout %s",
                group.name,
                entry.host_pool.layout,
            )
    return found


def _sources(host_pool: Any, group: BufferGroup) -> tuple[KvSource | None, KvSource | None]:
    """Return the bytes on the host of a group's K and V; None where they do not lie in rows of a token."""
    halves: list[KvSource | None] = []
    refs = ("k_data_refs", "v_data_refs") if hasattr(host_pool, "k_data_refs") else ("data_refs", "")
    for name, there in zip(refs, (group.pool.k_source, group.pool.v_source), strict=True):
        layers = list(getattr(host_pool, name, None) or [])
        page = host_pool.page_size if host_pool.layout == "page_first_direct" else 1
        is_known = host_pool.layout in ("layer_first", "page_first", "page_first_direct")
        if there is None or not is_known or len(layers) < len(there.layers):
            halves.append(None)
            continue
        rows = layers[: len(there.layers)]
        if rows[0][0].numel() * rows[0].element_size() != page * there.bytes_per_token:
            halves.append(None)
            continue
        source = KvSource(
            layers=tuple(layer.view(torch.uint8) for layer in rows),
            page_size=page,
            bytes_per_token=there.bytes_per_token,
            read_bytes=there.read_bytes,
            slot_bias=1,
        )
        halves.append(source)
    return halves[0], halves[1]
