"""Where K and V of a slot are looked for, in every layout that vLLM itself makes views of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.kv_cache_layout import KVCacheLayout

from kv_canary.engines.vllm import pools
from kv_canary.specs.structures import KvSource

BLOCKS, LAYERS = 6, 3


def views_of(spec: Any, layout: KVCacheLayout, kernel_block: int | None = None) -> dict[str, torch.Tensor]:
    """Return the views that vLLM makes of a buffer for three layers."""
    strides = interface.compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    names = [f"layer {i}" for i in range(LAYERS)]
    raw = torch.zeros(spec.page_size_bytes * BLOCKS * LAYERS, dtype=torch.int8)
    tensor = interface.KVCacheTensor(size=raw.numel(), layers=names, layer_stride=strides[0], block_stride=strides[1])
    made = interface.create_kv_cache_views(raw, spec, BLOCKS, layout, tensor, kernel_block)
    return dict(zip(names, made, strict=True))


def bytes_at(source: KvSource, number: int, slot: int) -> torch.Tensor:
    """Return the bytes of a slot in one of the layers of a source."""
    row = source.layers[number][slot // source.page_size].view(torch.uint8)
    start = source.offset_bytes + slot % source.page_size * source.token_stride_bytes
    return row[start : start + source.bytes_per_token]


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("kernel_block", [None, 8])
def test_k_and_v_of_every_head_are_told_apart(layout: KVCacheLayout, kernel_block: int | None) -> None:
    spec = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    try:
        views = views_of(spec, layout, kernel_block)
    except ValueError:
        assert kernel_block is not None
        pytest.skip("vLLM splits no blocks in this layout")
    found = pools._halves(views, spec, read_bytes=16)
    assert found.v is not None
    assert len(found.names) == LAYERS * 2
    tokens = 16 if kernel_block is None else kernel_block
    slot, number = 2 * 16 + 11, 2 * 2 + 1
    view = views["layer 2"]
    view[slot // tokens, 1, slot % tokens, :8] = 1.0
    view[slot // tokens, 1, slot % tokens, 8:] = 2.0
    expected = {"k": torch.full((8,), 1.0), "v": torch.full((8,), 2.0)}
    for half, source in (("k", found.k), ("v", found.v)):
        assert torch.equal(bytes_at(source, number, slot).view(torch.bfloat16).float(), expected[half])
        written = {(n, s) for n in range(LAYERS * 2) for s in range(BLOCKS * 16) if bool(bytes_at(source, n, s).any())}
        assert written == {(number, slot)}


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_a_latent_row_is_one_half(layout: KVCacheLayout) -> None:
    spec = interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    found = pools._halves(views_of(spec, layout), spec, read_bytes=16)
    assert found.v is None
    assert found.k.bytes_per_token == 576 * 2


def test_content_that_is_not_k_and_v_side_by_side_is_one_half() -> None:
    plain = interface.FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.uint8)
    packed = interface.FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.uint8, state_content_bytes=24
    )
    assert pools._halves(views_of(plain, KVCacheLayout.LBNHC), plain, read_bytes=16).v is not None
    whole = pools._halves(views_of(packed, KVCacheLayout.LBNHC), packed, read_bytes=16)
    assert whole.v is None
    assert whole.k.bytes_per_token == 24


def test_the_cpus_own_order_is_found_and_another_is_refused() -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    spec = interface.FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    views = views_of(spec, KVCacheLayout.LBHNC)
    found = pools._transposed(views, spec)
    assert found.v is not None
    key = torch.arange(1, 65, dtype=torch.float32).view(1, 2, 32)
    cache = views["layer 1"].view(BLOCKS, 2, 64, 32)
    halves = cache.chunk(2, dim=2)
    slot = 3 * 32 + 7
    ops.cpu_attn_reshape_and_cache(key, -key, *halves, torch.tensor([slot]), "vec")
    for sign, source in ((1, found.k), (-1, found.v)):
        numbers = [float(bytes_at(source, 64 + i, slot).view(torch.float32)) for i in range(64)]
        assert numbers == [sign * (i + 1) for i in range(64)]
        assert not any(bool(bytes_at(source, 64 + i, s).any()) for i in range(64) for s in range(192) if s != slot)
    other = interface.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"float32 in blocks of 32 tokens on a CPU, got .* in blocks of 64"):
        pools._transposed(views_of(other, KVCacheLayout.LBHNC), other)


def test_groups_that_overlay_memory_share_a_pool_and_what_is_no_attention_is_left_out() -> None:
    full = interface.FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    window = interface.SlidingWindowSpec(
        block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32, sliding_window=64
    )
    cache = torch.zeros(BLOCKS, 1, 32, 64)
    layers = {name: SimpleNamespace(kv_cache=cache) for name in ("a", "b")}
    layers["draft"] = SimpleNamespace(kv_cache=torch.zeros(BLOCKS, 1, 32, 64))
    layers["shared"] = SimpleNamespace(kv_cache=cache, kv_sharing_target_layer_name="a")

    class MambaSpec:
        block_size = 32

    groups = [
        SimpleNamespace(kv_cache_spec=full, layer_names=["a", "shared", "draft"]),
        SimpleNamespace(kv_cache_spec=window, layer_names=["b"]),
        SimpleNamespace(kv_cache_spec=MambaSpec(), layer_names=["c"]),
    ]
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=BLOCKS))
    compiled = SimpleNamespace(static_forward_context=layers)
    worker = SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(compilation_config=compiled))
    found, uncovered = pools.attach(worker, read_bytes=16, drafts=frozenset({"draft"}))
    assert [(g.group.name, g.layers, g.group.window, g.is_draft) for g in found] == [
        ("full 0", ("a",), 0, False),
        ("swa 1", ("b",), 63, False),
        ("draft full 0", ("draft",), 0, True),
    ]
    assert found[0].group.pool is found[1].group.pool is not found[2].group.pool
    assert found[0].group.pool.num_slots == BLOCKS * 32
    # Block 0 is vLLM's null block.
    assert {g.group.pool.first_slot for g in found} == {32}
    assert uncovered == ["group 2 (MambaSpec)"]
    groups[:2] = []
    with pytest.raises(ValueError, match=r"with attention over slots of one token each, got group 0 \(MambaSpec\)"):
        pools.attach(worker, read_bytes=16, drafts=frozenset())


def worker_of(*groups: tuple[Any, dict[str, Any]]) -> Any:
    """Return a worker with groups of vLLM's: a specification, and its layers by name."""
    found = [SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers)) for spec, layers in groups]
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=found, num_blocks=BLOCKS))
    compiled = SimpleNamespace(static_forward_context={k: v for _, layers in groups for k, v in layers.items()})
    return SimpleNamespace(model_runner=runner, vllm_config=SimpleNamespace(compilation_config=compiled))


def on_device(view: torch.Tensor) -> Any:
    """Return a layer that holds memory as it lies on a GPU: a CPU's kernels have an order of their own."""
    return SimpleNamespace(kv_cache=torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device="meta"))


def test_latent_rows_are_found_where_vllm_binds_them() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    spec = interface.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    layers = {}
    for name, view in views_of(spec, KVCacheLayout.LBNHC).items():
        layers[name] = layer = object.__new__(MLAAttention)
        torch.nn.Module.__init__(layer)
        layer._vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False))
        layer.bind_kv_cache(on_device(view).kv_cache)
        assert layer.kv_cache.dim() == 3
    [found], uncovered = pools.attach(worker_of((spec, layers)), read_bytes=16, drafts=frozenset())
    assert (found.layers, uncovered) == (tuple(layers), [])
    source = found.group.pool.k_source
    assert source is not None
    assert found.group.pool.v_source is None
    assert (len(source.layers), source.bytes_per_token, source.page_size) == (LAYERS, 576 * 2, 16)


def test_layers_of_one_group_that_differ_in_shape_are_pools_of_their_own() -> None:
    few, many = (
        interface.FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
        for heads in (2, 4)
    )
    specs = {"a": few, "b": many, "c": few, "draft": few}
    layers = {name: on_device(views_of(spec, KVCacheLayout.LBNHC)["layer 0"]) for name, spec in specs.items()}
    worker = worker_of((interface.UniformTypeKVCacheSpecs.from_specs(specs), layers))
    found, uncovered = pools.attach(worker, read_bytes=16, drafts=frozenset({"draft"}))
    assert uncovered == []
    assert [(g.number, g.group.name, g.layers) for g in found] == [
        (0, "full 0", ("a", "c")),
        (0, "full 0.1", ("b",)),
        (0, "draft full 0", ("draft",)),
    ]
    assert len({g.group.pool for g in found}) == 3
    assert [g.group.name for g in pools.first_of_each(found[:2])] == ["full 0"]


def test_what_keeps_several_tokens_in_a_slot_and_what_cannot_be_followed_is_named() -> None:
    packed, full = (
        interface.MLAAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, tokens_per_state=tokens
        )
        for tokens in (4, 1)
    )
    layers = {name: on_device(views_of(full, KVCacheLayout.LBNHC)["layer 0"]) for name in ("a", "b", "draft")}
    worker = worker_of((packed, {"a": layers["a"]}), (full, {"b": layers["b"], "draft": layers["draft"]}))
    drafts = frozenset({"draft"})
    found, uncovered = pools.attach(worker, read_bytes=16, drafts=drafts, unfollowed={"draft": "writes again"})
    assert [g.layers for g in found] == [("b",)]
    assert uncovered == ["group 0 (MLAAttentionSpec, 4 tokens in a slot)", "draft of group 1 (writes again)"]


def test_a_model_with_sinks_is_refused_by_name() -> None:
    spec = interface.SinkFullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sink_len=16
    )
    with pytest.raises(ValueError, match=r"without static sinks .*, got SinkFullAttentionSpec"):
        pools.attach(worker_of((spec, {"a": SimpleNamespace()})), read_bytes=16, drafts=frozenset())


def test_the_sizes_of_types() -> None:
    assert [pools._size_of(t) for t in (torch.uint8, torch.bfloat16, torch.float32)] == [1, 2, 4]
