"""The records in SGLang's transfer lists: put there, agreed upon by both sides, and left out for a peer without them.

A list has an entry for every layer's K, then for every layer's V; HEAD's records (and seals, where there are any) come
before them and TAIL's behind, so that both halves stay equally long, and that a transfer cut short is seen whichever
end it lost. SGLang pairs entries of equal lists by position, each with its own page length, so that further entries
cross like layers.
With unequal lists it guesses: halves are taken for K and V, the first entry's page length for that of all, and what a
peer has more for a draft model's. Records must then not be in either list, or they would be written over KV. So the
decode side compares a word, which the prefill side publishes as its `kv_layout`. Where it differs, both sides leave
their records out.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress, takewhile
from typing import Any

from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import support
from kv_canary.identity import identity_word
from kv_canary.runtime.pools import BufferGroup
from kv_canary.transfer import TransferBuffer, buffers, geometry_word, is_of_the_canary

logger = logging.getLogger("kv_canary")

# An engine's pool, and the groups that the canary has of it.
Attached = tuple[Any, Sequence[BufferGroup]]

# Pools whose lists are the layers of one kind, and nothing else.
_KNOWN = ("MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool", "SWAKVPool")
_KV_LISTS = ("kv_data_ptrs", "kv_data_lens", "kv_item_lens")
_STATE_LISTS = ("state_data_ptrs", "state_data_lens", "state_item_lens")


@dataclass(frozen=True, kw_only=True, eq=False)
class Lists:
    """The entries that were put into the transfer lists of this process.

    Args:
        layout: what the lists look like, in a word that both sides have in common if theirs are alike.
        records: the entries that were added.
        groups: names of the groups that they are of.
    """

    layout: str
    records: tuple[TransferBuffer, ...]
    groups: frozenset[str]

    def agree(self, receiver: Any) -> bool:
        """Return whether the prefill side that a decode side's receiver is connected to has such lists, too."""
        return getattr(getattr(receiver, "prefill_info", None), "kv_layout", None) == self.layout


def why_not(scheduler: Any, attached: Sequence[Attached]) -> str:
    """Return why records cannot cross with the scheduler's transfers, in words; "" if they can."""
    from sglang.srt.environ import envs

    args = support.settled(scheduler.server_args)
    host_share = args.disaggregation_decode_host_receive_threshold
    if args.disaggregation_transfer_backend not in ("mooncake", "mooncake_tcp"):
        return f"the adapter knows the lists of mooncake, not of {args.disaggregation_transfer_backend}"
    for reason, is_so in (
        ("layers are split over pipeline stages", args.pp_size > 1),
        ("transfers go through a staging buffer", envs.SGLANG_DISAGG_STAGING_BUFFER.get()),
        ("the engine checks transfers by checksums of its own", args.disaggregation_enable_kv_checksum),
        ("KV is received in host memory", host_share is not None and host_share < 1),
        ("KV is sharded over ranks", getattr(args, "enable_kv_cache_sharding", False)),
        ("layers are sharded over ranks", any(getattr(p, "layer_shard_enabled", False) for p, _ in attached)),
        ("KV lies in memory of a special kind", any(_special_memory(p) for p, _ in attached)),
    ):
        if is_so:
            return reason
    for pool, groups in attached:
        methods = [_method(g) for g in groups]
        if type(pool).__name__ not in _KNOWN or len(set(methods)) < len(methods):
            return f"the adapter does not know the lists of {type(pool).__name__}"
    try:
        for _, groups in attached:
            for group in groups:
                buffers(group.pool, page_size=scheduler.page_size)
    except ValueError as error:
        return str(error)
    return ""


def splice(scheduler: Any, attached: Sequence[Attached], *, patches: Patches) -> Lists:
    """Put the records of every group into the transfer lists that its pool gives from now on.

    To be called before the engine asks for them. The word goes by everything in the lists, by what the fingerprints
    cover, and by how the engine splits heads and contexts.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    said: list[int] = [1, scheduler.page_size, parallel.attn_tp_size, parallel.pp_size]
    records: list[TransferBuffer] = []
    for pool, groups in attached:
        for group in groups:
            entries = buffers(group.pool, page_size=scheduler.page_size)
            records += filter(is_of_the_canary, entries)
            _, _, item_lens = getattr(pool, _method(group))()
            said += [group.token_offset, group.window, geometry_word(group.pool), len(item_lens), *item_lens]
            patches.wrap(pool, _method(group), _with(entries))
    lists = Lists(
        layout=f"kv-canary {identity_word(*said):016x}",
        records=tuple(records),
        groups=frozenset(group.name for _, groups in attached for group in groups),
    )
    if scheduler.server_args.disaggregation_mode == "prefill":
        from sglang.srt.disaggregation import prefill

        patches.wrap(prefill, "get_pd_kv_layout", lambda original, pool: original(pool) or lists.layout)
    _leave_out_for_others(lists)
    return lists


def _method(group: BufferGroup) -> str:
    """Return the method of an engine's pool that lists the memory of `group`."""
    return "get_contiguous_buf_infos" if group.lut is None else "get_state_buf_infos"


def _with(entries: Sequence[TransferBuffer]) -> Callable[..., Any]:
    """Return what puts the canary's own of these entries around those that an engine lists."""
    before = list(takewhile(is_of_the_canary, entries))
    behind = list(filter(is_of_the_canary, entries))[len(before) :]

    def listed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[int]]:
        addresses, lengths, item_lens = original(*args, **kwargs)
        return (
            [*(e.address for e in before), *addresses, *(e.address for e in behind)],
            [*(e.num_bytes for e in before), *lengths, *(e.num_bytes for e in behind)],
            [*(e.item_bytes for e in before), *item_lens, *(e.item_bytes for e in behind)],
        )

    return listed


def _special_memory(pool: Any) -> bool:
    return pool.maybe_get_custom_mem_pool() is not None


def _leave_out_for_others(lists: Lists) -> None:
    """Make the transfer manager treat peers whose lists are not like ours as if we had no records.

    For as long as the process lives, canary or not: the manager has registered the lists by then, and keeps them.
    """
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    guards = Patches()

    def register(original: Callable[..., Any], receiver: Any) -> Any:
        manager, bare = receiver.kv_mgr, _without(lists, receiver.kv_mgr)
        if bare is manager or lists.agree(receiver):
            return original(receiver)
        if receiver.prefill_info is not None:
            logger.warning(
                "kv-canary: the prefill server at %s sends no records that hold here (layout %s, here %s): KV is taken "
                "as it arrives, and what befalls it on the way is not covered",
                receiver.bootstrap_addr,
                receiver.prefill_info.kv_layout,
                lists.layout,
            )
        receiver.kv_mgr = bare
        try:
            return original(receiver)
        finally:
            receiver.kv_mgr = manager

    def send(original: Callable[..., Any], manager: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
        if not _alike(manager, _peer(manager, first)):
            manager = _without(lists, manager)
        return original(manager, first, *args, **kwargs)

    def send_others(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
        return original(_without(lists, manager), *args, **kwargs)

    def expect_others(original: Callable[..., Any], manager: Any, page_lens: list[int | None], size: int) -> Any:
        keep = _kept(lists, manager.kv_args.kv_data_ptrs)
        if len(page_lens) == len(keep):
            page_lens = list(compress(page_lens, keep))
        return original(_without(lists, manager), page_lens, size)

    guards.wrap(CommonKVReceiver, "_register_kv_args", register)
    for name in ("send_kvcache", "maybe_send_extra", "_validate_peer_state_layout"):
        guards.wrap(MooncakeKVManager, name, send)
    # Heads or contexts are split anew on the way: such a peer has never lists like ours.
    for name in ("send_kvcache_slice", "send_kvcache_dcp"):
        guards.wrap(MooncakeKVManager, name, send_others)
    guards.wrap(MooncakeKVManager, "prepare_dcp_token_item_lens", expect_others)


def _peer(manager: Any, first: Any) -> Any:
    """Return what a peer has registered, from the first argument of what is sent to it."""
    if hasattr(first, "dst_kv_item_lens"):
        return first
    session = first if isinstance(first, str) else first.mooncake_session_id
    return manager.decode_kv_args_table.get(session)


def _alike(manager: Any, peer: Any) -> bool:
    if peer is None:
        return False
    args = manager.kv_args
    theirs = (list(peer.dst_kv_item_lens), [list(x) for x in peer.dst_state_item_lens], peer.dst_attn_tp_size)
    return theirs == (list(args.kv_item_lens), [list(x) for x in args.state_item_lens], manager.attn_tp_size)


def _without(lists: Lists, manager: Any) -> Any:
    """Return the manager as it would be without records; what it knows and holds is shared with the real one.

    That is the manager itself if it has none of them.
    """
    args = copy.copy(manager.kv_args)
    keep = _kept(lists, args.kv_data_ptrs)
    if all(keep):
        return manager
    for name in _KV_LISTS:
        setattr(args, name, list(compress(getattr(args, name), keep)))
    if args.num_draft_entries:
        args.num_draft_entries = sum(keep[-args.num_draft_entries :])
    keeps = [_kept(lists, addresses) for addresses in args.state_data_ptrs]
    for name in _STATE_LISTS:
        setattr(args, name, [list(compress(part, k)) for part, k in zip(getattr(args, name), keeps, strict=True)])
    bare = object.__new__(type(manager))
    vars(bare).update(vars(manager), kv_args=args)
    return bare


def _kept(lists: Lists, addresses: Sequence[int]) -> list[bool]:
    ours = {record.address for record in lists.records}
    return [address not in ours for address in addresses]
