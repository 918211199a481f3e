"""Prefill and decode in different SGLang servers: records cross with the KV, and become the receiver's own.

See docs/transfer.md for what a landing does, and `transfer_lists` for how the records get there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from kv_canary.constants import RETIRED_BIT, WRITER_WORD
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import batches, transfer_lists
from kv_canary.engines.sglang.identities import depends_on_nothing
from kv_canary.engines.sglang.transfer_lists import Attached, Lists
from kv_canary.runtime.manager import CanaryManager
from kv_canary.runtime.pools import BufferGroup
from kv_canary.transfer import land

logger = logging.getLogger("kv_canary")

_NOT_RETIRED = (1 << RETIRED_BIT) - 1


def needs_both_records(server_args: Any) -> bool:
    """Return whether the canary is to keep HEAD's and TAIL's records apart, because they are sent or received."""
    return server_args.disaggregation_mode in ("prefill", "decode")


def watch(
    scheduler: Any,
    manager: CanaryManager,
    attached: Sequence[Attached],
    *,
    patches: Patches,
    owner_of: Callable[[Any], int],
    identity_of: Callable[[Any], int],
    retire_freed: Callable[[], None],
    following: Callable[[str], AbstractContextManager[Any]],
) -> None:
    """Let records cross with the KV that the scheduler sends or receives, and land what it receives.

    Does nothing where prefill and decode are not apart. To be called before `Scheduler.init_disaggregation`.

    Args:
        scheduler: SGLang's.
        manager: its canary, with `records="head_and_tail"`.
        attached: the target model's pool with its groups, then a draft model's, if there is one.
        patches: what is wrapped.
        owner_of: gives a request its serial number.
        identity_of: gives the word of what its KV depends on.
        retire_freed: retires the slots that were freed up to now, on the stream of the caller, which is behind every
            forward that was prepared.
        following: see `Lifetime`.
    """
    if not needs_both_records(scheduler.server_args):
        return
    # Of several draft pools SGLang sends the first.
    sent = attached[:2]
    reason = transfer_lists.why_not(scheduler, sent)
    lists = None if reason else transfer_lists.splice(scheduler, sent, patches=patches)
    if reason:
        logger.warning(
            "kv-canary: sglang adapter: records do not cross with the KV, because %s: KV is taken as it arrives, and "
            "what befalls it on the way is not covered",
            reason,
        )
    if scheduler.server_args.disaggregation_mode == "decode":
        arrivals = Arrivals(
            scheduler,
            manager,
            lists=lists,
            owner_of=owner_of,
            identity_of=identity_of,
            retire_freed=retire_freed,
            following=following,
        )
        arrivals.watch(patches)


class Arrivals:
    """Lands every request of a decode server once its KV is there, and before anything reads it.

    Args:
        lists: what crosses; None: no records do.
        scheduler, manager, owner_of, identity_of, retire_freed, following: see `watch`.
    """

    def __init__(
        self,
        scheduler: Any,
        manager: CanaryManager,
        *,
        lists: Lists | None,
        owner_of: Callable[[Any], int],
        identity_of: Callable[[Any], int],
        retire_freed: Callable[[], None],
        following: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self._scheduler, self._manager, self._lists = scheduler, manager, lists
        self._owner_of, self._identity_of = owner_of, identity_of
        self._retire_freed, self._following = retire_freed, following
        # Of requests whose KV is there and that have not run: whether their records came with it.
        self._arrived: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def watch(self, patches: Patches) -> None:
        """Wrap what tells that a request's KV is there, and what makes requests part of a batch."""
        from sglang.srt.disaggregation.decode import DecodeTransferQueue

        patches.wrap(DecodeTransferQueue, "_commit_transfer_to_req", self._note)
        patches.wrap(self._scheduler, "_get_new_prebuilt_batch", self._land_batch)

    def _note(self, original: Callable[..., Any], queue: Any, decode_req: Any) -> Any:
        came = False
        with self._following("what arrives"):
            # The receiver is gone afterwards.
            came = self._lists is not None and self._lists.agree(decode_req.kv_receiver)
        result = original(queue, decode_req)
        with self._following("what arrives"):
            self._arrived[decode_req.req] = came
        return result

    def _land_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        if batch is not None:
            # Here the engine has waited for its forwards, and has not yet put anything into its prefix cache.
            with self._following("what has arrived"):
                self._land_all(list(batch.reqs))
        return batch

    def _land_all(self, reqs: list[Any]) -> None:
        self._retire_freed()
        for req in reqs:
            came = self._arrived.pop(req, None)
            start, end = 0 if came is None else int(req.kv.cache_protected_len), int(req.kv.kv_committed_len)
            if start >= end:
                continue
            row = self._scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
            slots = row[start:end].to(torch.int64)
            for group in self._manager.groups:
                if came is None and group.token_offset == 0 and self._brings_back_records():
                    continue
                mine = slots if group.lut is None else group.lut[slots]
                # Adapters have other names on each server, and images other stand-ins.
                if came and self._lists is not None and group.name in self._lists.groups and depends_on_nothing(req):
                    self._land(req, group, mine, start=start, end=end)
                else:
                    self._take(req, group, mine, start=start, end=end)

    def _land(self, req: Any, group: BufferGroup, slots: torch.Tensor, *, start: int, end: int) -> None:
        """Take over records that came with the KV."""
        manager, owner = self._manager, self._owner_of(req)
        page = self._scheduler.page_size
        # Of a window only the last pages are sent; SGLang's own window, which has one position more than is read.
        first = start if group.lut is None else max(start, end - self._scheduler.sliding_window_size) // page * page
        first = max(first, start)
        arrived = slots[first - start :]
        behind = arrived[-1] + torch.arange(1, -end % page + 1, device=arrived.device)
        for records in group.pool.buffers:
            # A retirement of what these slots held before may have been under way when the new records came in.
            records[arrived, WRITER_WORD] &= _NOT_RETIRED
        if first > start:
            land(manager, group.pool, slots=slots[: first - start], length=0, owner=owner)
        land(manager, group.pool, slots=torch.cat([arrived, behind]), length=len(arrived), owner=owner)

    def _take(self, req: Any, group: BufferGroup, slots: torch.Tensor, *, start: int, end: int) -> None:
        """Make records of KV that came without: of the request's own tokens, and of the bytes that lie there now."""
        behind = slots[-1] + torch.arange(1, -end % self._scheduler.page_size + 1, device=slots.device)
        land(self._manager, group.pool, slots=torch.cat([slots, behind]), length=0, owner=self._owner_of(req))
        self._manager.adopt(
            group.name,
            slots,
            batches.own_tokens(req)(0, end + group.token_offset),
            start=start,
            owner=self._owner_of(req),
            identity=self._identity_of(req),
        )

    def _brings_back_records(self) -> bool:
        """Whether the KV of a request that was put off has come back from the host with its records."""
        from sglang.srt.runtime_context import get_disagg

        return bool(get_disagg().disaggregation_decode_retraction_backup == "cpu_tensor")
