"""Which of SGLang's pools are served, how their groups are called, and what is refused with which words."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.runtime_context import get_parallel

import kv_canary as kc
from kv_canary.engines.sglang import pools
from kv_canary.engines.sglang.pools import Wanted, attach, register_pool

from .pool_engine import WHOLE, WINDOW, make_allocator, one_rank
from .pool_kinds import KINDS, mha, swa, v4

# What stores a token's bytes, or finds them, as no slot checker over the pool's own buffers can follow.
REFUSED = [
    "memory_pool.NoOpMHATokenToKVPool",
    "memory_pool.PageMajorMHATokenToKVPool",
    "unified_memory_pool.UnifiedMHATokenToKVPool",
    "unified_memory_pool.UnifiedMLATokenToKVPool",
    "unified_memory_pool.UnifiedSWAKVPool",
    "unified_draft_pool.UnifiedDraftKVPool",
    "unified_draft_pool.UnifiedDraftSWAKVPool",
    "page_interleave_pool.PageInterleaveMHATokenToKVPool",
    "page_interleave_pool.PageInterleaveMLATokenToKVPool",
    "page_interleave_pool.PageInterleaveDSATokenToKVPool",
    "hisparse_memory_pool.HiSparseMHAMainPool",
    "hisparse_memory_pool.HiSparseDSATokenToKVPool",
    "dsa_cache_layer_split.LayerSplitDSATokenToKVPool",
    "minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4KVPool",
    "minimax_m3_nvfp4_pool.MiniMaxM3Nvfp4MainKVPool",
    "deepseek_v4_memory_pool.HiSparseC4DevicePool",
    "deepseek_v4_memory_pool.DeepSeekV4IndexerPool",
]


class Unknown:
    pass


class Plain(memory_pool.MHATokenToKVPool):
    """Adds to its base, and changes nothing."""

    def set_colour(self, colour: str) -> None:
        self.colour = colour


class Elsewhere(memory_pool.MHATokenToKVPool):
    """Puts every token one slot further."""

    def set_kv_buffer(self, layer: Any, loc_info: Any, *args: Any, **kwargs: Any) -> None:
        super().set_kv_buffer(layer, loc_info + 1, *args, **kwargs)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_attachers", dict(pools._attachers))


def make(cls: type, page: int = 1) -> Any:
    return cls(64, page, torch.float32, 2, 8, 2, "cpu", False)


def groups_of(pool: Any, name: str = "", **options: Any) -> tuple[kc.BufferGroup, ...]:
    with one_rank():
        return attach(pool, **{"name": name, "read_bytes": WHOLE, "window": WINDOW, **options})


@pytest.mark.parametrize(
    ("kind", "page", "expected"),
    [
        ("mha", 1, {"full": "layer 0|layer 1|layer 2"}),
        ("mha_wide_k", 16, {"full": "layer 4|layer 5|layer 6"}),
        (
            "mha_hnd",
            16,
            {"full": "|".join(f"layer {i}, head {h}" for i in range(3) for h in range(2))},
        ),
        ("hybrid_linear", 1, {"full": "layer 3|layer 7|layer 11"}),
        ("swa", 16, {"full": "layer 1|layer 4", "swa": "layer 0|layer 2|layer 3"}),
        ("mla_fp4", 1, {"full": "layer 0|layer 1|layer 2", "full scales": "layer 0|layer 1|layer 2"}),
        ("v4", 128, {"full": "", "swa": "layer 0|layer 1|layer 2", "swa scales": "layer 0|layer 1|layer 2"}),
        (
            "v41",
            128,
            {
                "full": "layer 0",
                "full scales": "layer 0",
                "swa": "layer 0|layer 1|layer 2",
                "swa scales": "layer 0|layer 1|layer 2",
            },
        ),
    ],
)
def test_groups_and_layers_are_named_as_the_model_counts_them(kind: str, page: int, expected: dict[str, str]) -> None:
    with one_rank():
        pool = KINDS[kind].make(page)
        make_allocator(pool, page)
    groups = groups_of(pool)
    assert {g.name: "|".join(g.pool.layer_names) for g in groups} == expected
    for group in groups:
        windowed = group.name.startswith("swa")
        assert (group.window, group.lut is not None) == ((WINDOW, True) if windowed else (0, False))


def test_a_draft_s_groups_bear_its_name_and_are_shifted() -> None:
    pool = swa(16)
    make_allocator(pool, 16)
    groups = groups_of(pool, "draft", token_offset=1)
    assert [(g.name, g.pool.name, g.token_offset) for g in groups] == [
        ("draft", "draft", 1),
        ("draft swa", "draft swa", 1),
    ]


def test_a_fingerprint_covers_what_was_asked_for_and_no_more_than_there_is() -> None:
    pool = mha(1, v_head_dim=2)
    [group] = groups_of(pool, read_bytes=16)
    assert (group.pool.k_source.read_bytes, group.pool.v_source.read_bytes) == (16, 8)


def test_sources_are_the_pool_s_own_memory() -> None:
    pool = mha(16)
    [group] = groups_of(pool)
    assert [x.data_ptr() for x in group.pool.k_source.layers] == [x.data_ptr() for x in pool.k_buffer]
    assert [x.data_ptr() for x in group.pool.v_source.layers] == [x.data_ptr() for x in pool.v_buffer]


def test_layers_are_never_waited_for() -> None:
    pool = mha(1)
    pool.layer_transfer_counter = SimpleNamespace(wait_until=lambda _: pytest.fail("waited"))
    assert groups_of(pool)


def test_a_pool_of_sliding_layers_only_has_no_full_group() -> None:
    pool = memory_pool_swa(full=[], window=[0, 1])
    make_allocator(pool, 1)
    assert [g.name for g in groups_of(pool)] == ["swa"]


def test_a_pool_of_full_layers_only_needs_no_window() -> None:
    pool = memory_pool_swa(full=[0, 1], window=[])
    assert [g.name for g in groups_of(pool, window=0)] == ["full"]


def test_a_window_that_is_no_pool_of_slots_has_no_group() -> None:
    with one_rank():
        pool = v4(128)
        make_allocator(pool, 128)
        pool.swa_req_ring_size = 128
    assert [g.name for g in groups_of(pool)] == ["full"]


@pytest.mark.parametrize("name", REFUSED)
def test_pools_that_place_tokens_otherwise_are_refused_by_name(name: str) -> None:
    module, _, cls_name = f"sglang.srt.mem_cache.{name}".rpartition(".")
    cls = getattr(importlib.import_module(module), cls_name)
    with pytest.raises(ValueError, match=rf"register_pool was told of, got {module}\.{cls_name}\b"):
        groups_of(object.__new__(cls))


def test_an_unknown_class_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=rf"register_pool was told of, got {__name__}\.Unknown$"):
        groups_of(Unknown())


def test_a_subclass_that_overrides_a_write_is_not_served_like_its_base() -> None:
    assert [g.name for g in groups_of(make(Plain))] == ["full"]
    with pytest.raises(ValueError, match=r"Elsewhere, which overrides set_kv_buffer of MHATokenToKVPool"):
        groups_of(make(Elsewhere))


@pytest.mark.parametrize("how", ["call", "decorator", "dotted"])
def test_a_registered_class_is_served_by_its_function(how: str) -> None:
    def shifted(pool: Any, want: Wanted) -> tuple[kc.BufferGroup, ...]:
        rows = [buffer[1:] for buffer in pool.k_buffer]
        k = want.token_rows(rows, 64)
        return (want.group(num_slots=64, k=k, v=None, layers=["a", "b"], device="cpu"),)

    if how == "call":
        register_pool(Elsewhere, shifted)
    elif how == "decorator":
        assert register_pool(Elsewhere)(shifted) is shifted
    else:
        register_pool(f"{__name__}.Elsewhere", shifted)
    pool = make(Elsewhere)
    [group] = groups_of(pool)
    assert group.pool.k_source.layers[0].data_ptr() == pool.k_buffer[0][1].data_ptr()
    assert groups_of(make(Plain))[0].pool.v_source is not None


def test_a_window_needs_its_length_and_its_table() -> None:
    pool = swa(1)
    with pytest.raises(ValueError, match="full_to_swa_index_mapping must be registered, got None"):
        groups_of(pool)
    make_allocator(pool, 1)
    with pytest.raises(ValueError, match="window must be at least 1 for sliding-window layers, got 0"):
        groups_of(pool, window=0)


def test_rows_spread_over_ranks_are_refused() -> None:
    with one_rank():
        pool = KINDS["mla"].make(1)
    with (
        get_parallel().override(dcp_enabled=True, attn_dcp_size=2, attn_dcp_rank=0),
        pytest.raises(ValueError, match=r"decode context parallel size must be 1: .*, got 2"),
    ):
        attach(pool, name="", read_bytes=16)


def test_a_layout_that_scatters_a_token_s_bytes_is_refused() -> None:
    pool = mha(16)
    pool.kv_cache_layout = "vectorized_5d"
    with pytest.raises(ValueError, match="kv_cache_layout must be 'nhd' or 'hnd', got 'vectorized_5d'"):
        groups_of(pool)


def test_buffers_shorter_than_the_pool_says_are_refused() -> None:
    pool = mha(1)
    pool.v_buffer[1] = pool.v_buffer[1][:100]
    with pytest.raises(
        ValueError, match="v_buffer must be one row for each of 513 slots, in every layer, got 100 rows"
    ):
        groups_of(pool)


def test_memory_behind_the_final_size_is_never_looked_at() -> None:
    pool = mha(16)
    pool._post_capture_owner = SimpleNamespace(_final_num_tokens=None)
    with pytest.raises(ValueError, match="size must be final, behind graph capture, got not yet"):
        groups_of(pool)
    pool._post_capture_owner._final_num_tokens = pool.size = 160
    [group] = groups_of(pool)
    assert (group.pool.num_slots, group.pool.k_source.num_rows, group.pool.v_source.num_rows) == (176, 176, 176)
    # The first page is padding.
    assert group.pool.first_slot == 16


def test_scales_that_are_no_rows_of_a_slot_have_no_group() -> None:
    # With pages of 128 their kernel keeps them interleaved for itself.
    with one_rank():
        pools = {page: KINDS["mha_mxfp8"].make(page) for page in (16, 128)}
    assert {page: [g.name for g in groups_of(pool)] for page, pool in pools.items()} == {
        16: ["full", "full scales"],
        128: ["full"],
    }


def memory_pool_swa(*, full: list[int], window: list[int]) -> Any:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return SWAKVPool(
        size=64,
        size_swa=32,
        page_size=1,
        dtype=torch.float32,
        head_num=1,
        head_dim=16,
        swa_attention_layer_ids=window,
        full_attention_layer_ids=full,
        device="cpu",
    )
