"""The configurations of SGLang that the adapter can serve, and what it reads off them."""

from __future__ import annotations

from typing import Any

from kv_canary.config import CanaryConfig
from kv_canary.errors import must_be
from kv_canary.ranks import RankGroup

# Settings that change how KV is written or found in ways that the adapter does not follow, and how.
_UNSERVED = {
    "enable_pdmux": "prefills are split by layers",
    "enable_hisparse": "KV moves between tiers inside a forward",
    "enable_unified_memory": "slots are moved between pools",
    "enable_lmcache": "KV is loaded from outside",
    "enable_encoder_swa_bounded_replay": "forwards write again what is cached",
    "disaggregation_decode_enable_offload_kvcache": "KV is kept outside",
    "enable_pd_role_switch": "prefill and decode change places",
}


def settled(server_args: Any) -> Any:
    """Return SGLang's arguments as it has settled them: it leaves those that were given as they were."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def check(scheduler: Any) -> None:
    """See that the adapter serves what the scheduler is configured for.

    Raises:
        ValueError: it does not; the text names the setting.
    """
    args = settled(scheduler.server_args)
    for name, reason in _UNSERVED.items():
        if getattr(args, name, False):
            raise ValueError(must_be("sglang adapter", name, f"off ({reason})", "on"))
    for name in ("dcp_size", "attn_cp_size"):
        if (getattr(args, name, None) or 1) > 1:
            raise ValueError(
                must_be("sglang adapter", name, "1 (contexts are split over ranks)", str(getattr(args, name)))
            )
    if getattr(scheduler, "dllm_config", None) is not None:
        raise ValueError(must_be("sglang adapter", "model", "autoregressive", "a diffusion model"))
    if scheduler.model_config.is_encoder_decoder:
        raise ValueError(must_be("sglang adapter", "model", "without a cross-attention cache", "an encoder-decoder"))


def most_tokens(scheduler: Any) -> int:
    """Return how many new tokens one forward of the scheduler can have at most."""
    args = settled(scheduler.server_args)
    context, chunk = scheduler.model_config.context_len, args.chunked_prefill_size or 0
    # The last prompt of a batch may be whole, however little room is left; a mixed batch decodes as well.
    prefill = chunk + scheduler.page_size if chunk > 0 else scheduler.max_prefill_tokens + context
    decode = scheduler.max_running_requests * max(1, getattr(args, "speculative_num_draft_tokens", None) or 1)
    return int(min(prefill, scheduler.max_total_num_tokens) + decode)


def rank(scheduler: Any) -> int:
    """Return the number of this scheduler process among those that share its settings, 0 for the first."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    processes = parallel.pp_rank * parallel.tp_size + parallel.tp_rank
    return int(processes + (parallel.dp_rank or 0) * parallel.tp_size * parallel.pp_size)


def ranks(scheduler: Any, config: CanaryConfig) -> RankGroup | None:
    """Return the tensor-parallel ranks, where they have something to agree on; every process makes this call.

    Raises:
        ValueError: the ranks run different requests, so that none may raise for the others.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1 or (config.mode != "raise" and not config.digest_every):
        return None
    if parallel.attn_dp_enabled:
        raise ValueError(
            must_be("sglang adapter", "KV_CANARY_MODE", "log with data-parallel attention, and no digests", config.mode)
        )
    mine = None
    for stage in range(parallel.pp_size):
        group = RankGroup.new([stage * parallel.tp_size + i for i in range(parallel.tp_size)])
        mine = group or mine
    return mine
