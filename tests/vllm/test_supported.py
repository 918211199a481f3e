"""What the adapter does not serve is refused by name, before anything is hooked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kv_canary.engines.vllm import hooks, support


def config(**changed: Any) -> Any:
    """Return a configuration that is served, but for what is changed: `part__name`."""
    parts = {
        "parallel": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "model": {"enable_prompt_embeds": False, "is_encoder_decoder": False},
        "scheduler": {"async_scheduling": False},
        "cache": {},
    }
    whole: dict[str, Any] = {"kv_transfer_config": None, "speculative_config": None}
    for name, value in changed.items():
        part, _, field = name.partition("__")
        (parts[part] if field else whole)[field or name] = value
    return SimpleNamespace(**whole, **{f"{part}_config": SimpleNamespace(**fields) for part, fields in parts.items()})


def worker(**changed: Any) -> Any:
    from vllm.v1.worker.gpu_worker import Worker

    found = Worker.__new__(Worker)
    found.vllm_config = config(**changed)
    return found


INSIDE = {"connectors": [{"kv_connector": "NixlConnector"}, {"kv_connector": "HiSparseConnector"}]}


def test_what_is_served_is_served() -> None:
    connector = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config=None)
    support.check(worker(kv_transfer_config=connector))
    support.check(worker())
    support.check(worker(scheduler__async_scheduling=True))
    support.check(worker(scheduler__async_scheduling=True, speculative_config=object()))
    support.check(worker(speculative_config=object()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="HiSparseConnector", kv_connector_extra_config={})},
            "kv_connector must be another one .*, got HiSparseConnector",
        ),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=INSIDE)},
            "kv_connector must be another one .*, got HiSparseConnector",
        ),
        ({"ec_transfer_config": object()}, "ec_transfer_config must be off"),
        ({"diffusion_config": object()}, "diffusion_config must be off"),
        ({"parallel__pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1 .*, got 2"),
        ({"parallel__decode_context_parallel_size": 4}, "decode_context_parallel_size must be 1 .*, got 4"),
        ({"parallel__prefill_context_parallel_size": 2}, "prefill_context_parallel_size must be 1"),
        ({"parallel__enable_dbo": True}, r"enable_dbo must be off \(forwards are split in two\)"),
        ({"model__enable_prompt_embeds": True}, "enable_prompt_embeds must be off"),
        ({"model__is_encoder_decoder": True}, "without a cross-attention cache, got an encoder-decoder"),
        ({"cache__kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill must be off"),
        (
            {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
            "enable_adaptive_verification must be off",
        ),
    ],
)
def test_what_is_not_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        support.check(worker(**changed))


def test_a_worker_of_another_kind_is_refused_by_its_class() -> None:
    with pytest.raises(ValueError, match=r"gpu_worker.Worker, got types.SimpleNamespace"):
        support.check(SimpleNamespace(vllm_config=config()))


@pytest.mark.parametrize("is_v2", [False, True])
def test_a_runner_without_what_is_read_is_refused_by_name(is_v2: bool) -> None:
    methods = dict.fromkeys(hooks.WORKER)
    runner = SimpleNamespace(**dict.fromkeys(hooks.RUNNERS[is_v2]))
    hooks.check_worker(SimpleNamespace(**methods, model_runner=runner), is_v2=is_v2)
    gone = hooks.RUNNERS[is_v2][1]
    delattr(runner, gone)
    del methods["sleep"]
    with pytest.raises(ValueError, match=rf"without SimpleNamespace.sleep, SimpleNamespace.{gone}"):
        hooks.check_worker(SimpleNamespace(**methods, model_runner=runner), is_v2=is_v2)


@pytest.mark.parametrize(("size", "rank", "is_output"), [(1, 0, True), (2, 0, True), (2, 1, False), (2, 2, True)])
def test_the_engine_asks_the_first_rank_of_each_group_for_results(size: int, rank: int, is_output: bool) -> None:
    found = worker(parallel__tensor_parallel_size=size)
    found.rank = rank
    assert support.is_output_rank(found) == is_output


@pytest.mark.parametrize(("engine", "rank", "number"), [(0, 1, 1), (1, 0, 2), (3, 1, 7)])
def test_every_rank_of_every_data_parallel_engine_has_a_number_of_its_own(engine: int, rank: int, number: int) -> None:
    found = worker(parallel__world_size=2, parallel__data_parallel_index=engine)
    found.rank = rank
    assert support.number_of(found) == number


@pytest.mark.parametrize(
    ("is_v2", "several", "left_out"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_draft_that_writes_positions_again_is_not_followed(is_v2: bool, several: bool, left_out: bool) -> None:
    config = SimpleNamespace(use_multi_module_mtp=lambda: several)
    found = support.unfollowed_layers(worker(speculative_config=config), frozenset({"a"}), is_v2=is_v2)
    assert set(found) == ({"a"} if left_out else set())
    assert support.unfollowed_layers(worker(), frozenset({"a"}), is_v2=is_v2) == {}


def test_layers_of_a_draft_model_are_those_that_its_proposer_names() -> None:
    v1 = SimpleNamespace(drafter=SimpleNamespace(_draft_attn_layer_names={"a"}))
    v2 = SimpleNamespace(speculator=SimpleNamespace(draft_attn_layer_names={"b"}))
    assert support.draft_layers(v1, is_v2=False) == {"a"}
    assert support.draft_layers(v2, is_v2=True) == {"b"}
    assert support.draft_layers(SimpleNamespace(drafter=object()), is_v2=False) == frozenset()
    assert support.draft_layers(SimpleNamespace(), is_v2=True) == frozenset()
