"""The configurations of vLLM that the adapter can serve, and what it reads off them."""

from __future__ import annotations

from typing import Any

from kv_canary.config import CanaryConfig
from kv_canary.errors import must_be
from kv_canary.ranks import RankGroup

# Sizes of groups of ranks that share out what the adapter takes to be in one place, and how.
_ONE = {
    "pipeline_parallel_size": "what is sampled is known on the last stage only",
    "decode_context_parallel_size": "contexts are split over ranks",
    "prefill_context_parallel_size": "contexts are split over ranks",
}

# Connectors that do something else than to bring and to take blocks.
_CONNECTORS = {
    "HiSparseConnector": "tokens change places while they are read",
    "ExampleHiddenStatesConnector": "what it keeps is no KV",
}


def check(worker: Any) -> None:
    """See that the adapter serves what a worker is configured for.

    Raises:
        ValueError: it does not; the text names the setting.
    """
    config = worker.vllm_config
    _check_kind(worker)
    for name, reason in _ONE.items():
        if (size := getattr(config.parallel_config, name, 1) or 1) > 1:
            raise ValueError(must_be("vllm adapter", name, f"1 ({reason})", str(size)))
    unserved = {
        "ec_transfer_config": (getattr(config, "ec_transfer_config", None), "encoders run in another process"),
        "enable_dbo": (getattr(config.parallel_config, "enable_dbo", False), "forwards are split in two"),
        "enable_prompt_embeds": (config.model_config.enable_prompt_embeds, "prompts have no tokens"),
        "kv_sharing_fast_prefill": (
            getattr(config.cache_config, "kv_sharing_fast_prefill", False),
            "layers leave tokens out",
        ),
        "diffusion_config": (getattr(config, "diffusion_config", None), "tokens are written again and again"),
    }
    for name, (value, reason) in unserved.items():
        if value:
            raise ValueError(must_be("vllm adapter", name, f"off ({reason})", "on"))
    if named := [name for name in _connectors(config.kv_transfer_config) if name in _CONNECTORS]:
        raise ValueError(must_be("vllm adapter", "kv_connector", f"another one ({_CONNECTORS[named[0]]})", named[0]))
    if getattr(config.speculative_config, "enable_adaptive_verification", False):
        expected = "off (how many drafts of each request are verified is known on the device alone)"
        raise ValueError(must_be("vllm adapter", "enable_adaptive_verification", expected, "on"))
    if config.model_config.is_encoder_decoder:
        raise ValueError(must_be("vllm adapter", "model", "without a cross-attention cache", "an encoder-decoder"))


def _connectors(config: Any) -> list[str]:
    """Return the names of the connectors that are configured, those inside of another one included."""
    if config is None:
        return []
    inner = (config.kv_connector_extra_config or {}).get("connectors") or ()
    return [str(config.kv_connector), *(str(each.get("kv_connector")) for each in inner)]


def has_connector(worker: Any) -> bool:
    """Whether KV comes from outside of the engine, or goes there."""
    return worker.vllm_config.kv_transfer_config is not None


def _check_kind(worker: Any) -> None:
    known = [cls for cls in type(worker).__mro__ if cls.__module__ == "vllm.v1.worker.gpu_worker"]
    if not known:
        got = f"{type(worker).__module__}.{type(worker).__qualname__}"
        raise ValueError(must_be("vllm adapter", "worker", "derived from vllm.v1.worker.gpu_worker.Worker", got))


def is_v2(worker: Any) -> bool:
    """Whether a worker has model runner V2."""
    return bool(worker.use_v2_model_runner)


def has_graphs(worker: Any) -> bool:
    """Return whether the model of a worker may run from CUDA graphs."""
    mode = worker.vllm_config.compilation_config.cudagraph_mode
    return getattr(mode, "name", "NONE") != "NONE"


def is_async(worker: Any) -> bool:
    """Whether a step is prepared before the tokens of the step before it are known."""
    return bool(worker.vllm_config.scheduler_config.async_scheduling)


def is_output_rank(worker: Any) -> bool:
    """Whether it is this rank whose results the engine asks for."""
    return int(worker.rank) % int(worker.vllm_config.parallel_config.tensor_parallel_size) == 0


def ranks(worker: Any, config: CanaryConfig) -> RankGroup | None:
    """Return the tensor-parallel ranks, where they have something to agree on; every process makes this call."""
    size = worker.vllm_config.parallel_config.tensor_parallel_size
    if size == 1 or (config.mode != "raise" and not config.digest_every):
        return None
    import torch.distributed as dist

    mine = None
    for first in range(0, dist.get_world_size(), size):
        group = RankGroup.new([first + i for i in range(size)])
        mine = group or mine
    return mine


def draft_layers(runner: Any, *, is_v2: bool) -> frozenset[str]:
    """Return the names of the layers that a draft model writes, behind the forward of the target."""
    found = drafter(runner, is_v2=is_v2)
    return frozenset(getattr(found, "draft_attn_layer_names" if is_v2 else "_draft_attn_layer_names", None) or ())


def unfollowed_layers(worker: Any, drafts: frozenset[str], *, is_v2: bool) -> dict[str, str]:
    """Return the names of layers that cannot be followed, each with the reason."""
    config = worker.vllm_config.speculative_config
    if not is_v2 or config is None or not getattr(config, "use_multi_module_mtp", bool)():
        return {}
    return dict.fromkeys(drafts, "MTP of several modules, which writes positions again that others rely on")


def number_of(worker: Any) -> int:
    """Return a worker's number among those of all data-parallel engines."""
    parallel = worker.vllm_config.parallel_config
    return int(getattr(parallel, "data_parallel_index", 0)) * int(parallel.world_size) + int(worker.rank)


def drafter(runner: Any, *, is_v2: bool) -> Any:
    """Return what proposes the tokens of a draft model; None where there is none."""
    return getattr(runner, "speculator" if is_v2 else "drafter", None)
