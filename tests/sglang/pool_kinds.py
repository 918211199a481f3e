"""SGLang's kinds of pools: how each is made, how a model writes through it, and where the bytes of a token then lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.kvcache import dsv4_main_kv_store
from sglang.srt.mem_cache import deepseek_v4_memory_pool as deepseek_v4
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from triton.runtime.interpreter import InterpretedFunction

from .pool_engine import MAX_ROWS, SIZE, Kind, Write


def common(page: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    return {"size": SIZE, "page_size": page, "dtype": dtype, "device": "cpu", "enable_memory_saver": False}


def row(buffers: Callable[[Any], list[torch.Tensor]]) -> Callable[[Any, int, int], torch.Tensor]:
    """Return where the bytes of a token lie in buffers that have a row for it."""
    return lambda pool, layer, slot: buffers(pool)[layer].view(torch.uint8)[slot].view(-1)


def write_kv(heads: int, k_dim: int, v_dim: int, dtype: torch.dtype = torch.float32) -> Write:
    def write(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
        k, v = (torch.randn(len(loc), heads, dim, dtype=torch.float32).to(dtype) for dim in (k_dim, v_dim))
        where = loc if swa_loc is None else memory_pool.KVWriteLoc(loc, swa_loc=swa_loc)
        pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), where, k, v)

    return write


def write_latent(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
    dim = pool.kv_cache_dim
    pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), loc, torch.randn(len(loc), 1, dim), None)


def write_mxfp8(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
    # The pool's own way to write is a CUDA kernel.
    scales = []
    for buffer, scale in ((pool.k_buffer, pool.k_scale_buffer), (pool.v_buffer, pool.v_scale_buffer)):
        data = torch.randint(0, 120, (len(loc), *buffer[0].shape[1:]), dtype=torch.uint8)
        buffer[layer_id].view(torch.uint8)[loc] = data
        scales.append(torch.randint(1, 250, (len(loc), *scale[0].shape[1:]), dtype=torch.uint8))
    for buffer, data in zip((pool.k_scale_buffer, pool.v_scale_buffer), scales, strict=True):
        buffer[layer_id].view(torch.uint8)[loc] = data


def mha(page: int, **options: Any) -> Any:
    sizes = {"head_num": 2, "head_dim": 32, "layer_num": 3, **options}
    dtype = sizes.pop("dtype", torch.bfloat16)
    return memory_pool.MHATokenToKVPool(**common(page, dtype), **sizes)


def hnd(page: int) -> Any:
    before = os.environ.get("SGLANG_USE_HND_KVCACHE")
    os.environ["SGLANG_USE_HND_KVCACHE"] = "1"
    try:
        return mha(page)
    finally:
        del os.environ["SGLANG_USE_HND_KVCACHE"]
        if before is not None:
            os.environ["SGLANG_USE_HND_KVCACHE"] = before


def head_cell(half: str) -> Callable[[Any, int, int], torch.Tensor]:
    """Layers are counted by head: layer 0, head 0; layer 0, head 1; layer 1, head 0..."""

    def cell(pool: Any, layer: int, slot: int) -> torch.Tensor:
        buffer = getattr(pool, f"{half.lower()}_buffer")[layer // 2].view(torch.uint8)
        return buffer[slot // pool.page_size, layer % 2, slot % pool.page_size]

    return cell


def swa(page: int) -> Any:
    return SWAKVPool(
        **common(page, torch.float32),
        size_swa=SIZE // 2,
        head_num=1,
        head_dim=16,
        swa_attention_layer_ids=[0, 2, 3],
        full_attention_layer_ids=[1, 4],
    )


def hybrid_linear(page: int) -> Any:
    options = common(page)
    del options["enable_memory_saver"]
    return memory_pool.HybridLinearKVPool(
        **options, head_num=2, head_dim=32, full_attention_layer_ids=[3, 7, 11], mamba_pool=None
    )


def minimax(page: int) -> Any:
    options = common(page)
    return memory_pool.MiniMaxSparseKVPool(
        **options,
        head_num=2,
        head_dim=32,
        idx_head_dim=16,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2],
        disable_value_sparse_layer_ids=[1, 2],
        start_layer=0,
        end_layer=3,
    )


def mla(page: int) -> Any:
    return memory_pool.MLATokenToKVPool(**common(page), kv_lora_rank=48, qk_rope_head_dim=16, layer_num=3)


def mla_fp4(page: int) -> Any:
    return memory_pool.MLATokenToKVPoolFP4(**common(page), kv_lora_rank=48, qk_rope_head_dim=16, layer_num=3)


def dsa(page: int) -> Any:
    options = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "layer_num": 3, "index_head_dim": 128, "kv_cache_dim": 64}
    return memory_pool.DSATokenToKVPool(**common(page), **options)


def mha_fp4(page: int) -> Any:
    return memory_pool.MHATokenToKVPoolFP4(**common(page), head_num=2, head_dim=32, layer_num=3)


def mxfp8(page: int) -> Any:
    return memory_pool.MHATokenToKVPoolMXFP8(**common(page), head_num=2, head_dim=32, layer_num=3)


def v4_single(page: int, layout: str = "v4") -> Any:
    return deepseek_v4.DeepSeekV4SingleKVPool(
        SIZE, page, torch.float8_e4m3fn, 448, 64, 3, "cpu", False, kv_layout=layout
    )


def v4_uniform(page: int) -> Any:
    return deepseek_v4.DeepSeekV4UniformFP8KVPool(SIZE, page, torch.float8_e4m3fn, 448, 64, 3, "cpu", False)


def v4(page: int, **options: Any) -> Any:
    """Return DeepSeek-V4's pool: ratios 0, 4 and 128; the engine's configuration is stood in for while it is made."""
    kernel = SimpleNamespace(dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False)
    execution = SimpleNamespace(kernel=kernel, features=SimpleNamespace(enable_encoder_swa_bounded_replay=False))
    before = {name: getattr(deepseek_v4, name) for name in ("get_exec", "get_spec")}
    deepseek_v4.get_exec = lambda: execution
    deepseek_v4.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
    sizes = {"swa_size": SIZE, "c4_size": SIZE // 4, "c128_size": SIZE // 128, "full_size": SIZE}
    try:
        return deepseek_v4.DeepSeekV4TokenToKVPool(
            **{
                **sizes,
                "max_num_reqs": MAX_ROWS - 1,
                "c4_state_pool_size": 64,
                "c128_state_pool_size": 64,
                "page_size": page,
                "swa_page_size": page,
                "dtype": torch.float8_e4m3fn,
                "c4_state_dtype": torch.float32,
                "c128_state_dtype": torch.float32,
                "qk_nope_head_dim": 448,
                "qk_rope_head_dim": 64,
                "indexer_head_dim": 128,
                "layer_num": 3,
                "device": "cpu",
                "enable_memory_saver": False,
                "compression_ratios": [0, 4, 128],
                **options,
            }
        )
    finally:
        for name, value in before.items():
            setattr(deepseek_v4, name, value)


def v4_pack(count: int) -> Any:
    return deepseek_v4.NopeFp8RopeBf16Pack(
        torch.randn(count, 448).to(torch.float8_e4m3fn),
        torch.randn(count, 64).bfloat16(),
        torch.randint(1, 255, (count, 7), dtype=torch.uint8),
    )


@contextmanager
def interpreted() -> Iterator[None]:
    """Let the Triton kernel that writes DeepSeek-V4's rows run on the CPU, whatever the process was started for."""
    kernel = dsv4_main_kv_store._set_k_and_s_triton_kernel
    dsv4_main_kv_store._set_k_and_s_triton_kernel = InterpretedFunction(kernel.fn)
    try:
        yield
    finally:
        dsv4_main_kv_store._set_k_and_s_triton_kernel = kernel


def write_v4(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
    with interpreted():
        if swa_loc is None:
            pool.set_key_buffer(layer_id, loc, v4_pack(len(loc)))
        else:
            pool.set_swa_key_buffer(layer_id, swa_loc, v4_pack(len(loc)))


def write_v4_uniform(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
    pool.set_key_buffer_fused(layer_id, loc, torch.randn(len(loc), 512).bfloat16())


def write_v41(pool: Any, layer_id: int, loc: torch.Tensor, swa_loc: torch.Tensor | None) -> None:
    """Stand in for the CUDA kernels that alone write the V4.1 layouts: bytes at the places that the layout names."""
    low = pool.kv_pools[1]
    for part, slots, layer in ((pool.swa_kv_pool, swa_loc, layer_id), (low, loc, 0 if layer_id == 0 else None)):
        if layer is not None:
            for slot in slots.tolist():
                for cell in v4_cells(part, layer, slot):
                    cell.copy_(torch.randint(0, 256, cell.shape, dtype=torch.uint8))


def v4_cells(part: Any, layer: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where a token's data and its scales lie, in a part of DeepSeek-V4's pool."""
    page, token = part.kv_buffer[layer][slot // part.page_size], slot % part.page_size
    data_stride, scale_base, scale_stride = part.kv_layout.row_addressing(part.page_size)
    data, scale = part.kv_layout.data_bytes, part.kv_layout.scale_bytes
    first = scale_base + token * scale_stride
    return page[token * data_stride :][:data], page[first : first + scale]


def v4_cell(index: int, part: Callable[[Any], Any] = lambda pool: pool) -> Callable[[Any, int, int], torch.Tensor]:
    return lambda pool, layer, slot: v4_cells(part(pool), layer, slot)[index]


def v4_whole(part: Callable[[Any], Any]) -> Callable[[Any, int, int], torch.Tensor]:
    def cell(pool: Any, layer: int, slot: int) -> torch.Tensor:
        sub = part(pool)
        width = sub.kv_layout.bytes_per_token
        return sub.kv_buffer[layer][slot // sub.page_size][slot % sub.page_size * width :][:width]

    return cell


KV = {("full", "K"): row(lambda p: p.k_buffer), ("full", "V"): row(lambda p: p.v_buffer)}
SCALES = {
    ("full scales", "K"): row(lambda p: p.k_scale_buffer),
    ("full scales", "V"): row(lambda p: p.v_scale_buffer),
}
LATENT = {("full", "K"): row(lambda p: p.kv_buffer)}

KINDS = {
    "mha": Kind(make=mha, write=write_kv(2, 32, 32), layer_ids=(0, 1, 2), cells=KV),
    "mha_wide_k": Kind(
        make=lambda page: mha(page, v_head_dim=8, start_layer=4),
        write=write_kv(2, 32, 8),
        layer_ids=(4, 5, 6),
        cells=KV,
    ),
    "mha_fp8": Kind(
        make=lambda page: mha(page, dtype=torch.float8_e4m3fn), write=write_kv(2, 32, 32), layer_ids=(0, 1, 2), cells=KV
    ),
    "mha_hnd": Kind(
        make=hnd,
        write=write_kv(2, 32, 32),
        layer_ids=(0, 1, 2),
        cells={("full", half): head_cell(half) for half in "KV"},
    ),
    "mha_fp4": Kind(make=mha_fp4, write=write_kv(2, 32, 32), layer_ids=(0, 1, 2), cells=KV | SCALES),
    "mha_mxfp8": Kind(make=mxfp8, write=write_mxfp8, layer_ids=(0, 1, 2), cells=KV | SCALES),
    "mla": Kind(make=mla, write=write_latent, layer_ids=(0, 1, 2), cells=LATENT),
    "mla_fp4": Kind(
        make=mla_fp4,
        write=write_latent,
        layer_ids=(0, 1, 2),
        cells=LATENT | {("full scales", "K"): row(lambda p: p.kv_scale_buffer)},
    ),
    "dsa": Kind(make=dsa, write=write_latent, layer_ids=(0, 1, 2), cells=LATENT, pages=(64,)),
    "swa": Kind(
        make=swa,
        write=write_kv(1, 16, 16),
        layer_ids=(0, 1, 2, 3, 4),
        cells={
            ("full", "K"): row(lambda p: p.full_kv_pool.k_buffer),
            ("full", "V"): row(lambda p: p.full_kv_pool.v_buffer),
            ("swa", "K"): row(lambda p: p.swa_kv_pool.k_buffer),
            ("swa", "V"): row(lambda p: p.swa_kv_pool.v_buffer),
        },
    ),
    "hybrid_linear": Kind(
        make=hybrid_linear,
        write=write_kv(2, 32, 32, torch.bfloat16),
        layer_ids=(3, 7, 11),
        cells={
            ("full", "K"): row(lambda p: p.full_kv_pool.k_buffer),
            ("full", "V"): row(lambda p: p.full_kv_pool.v_buffer),
        },
    ),
    "minimax": Kind(
        make=minimax,
        write=write_kv(2, 32, 32, torch.bfloat16),
        layer_ids=(0, 1, 2),
        cells={
            ("full", "K"): row(lambda p: p.main_pool.k_buffer),
            ("full", "V"): row(lambda p: p.main_pool.v_buffer),
        },
    ),
    "v4_single": Kind(
        make=v4_single,
        write=write_v4,
        layer_ids=(0, 1, 2),
        cells={("full", "K"): v4_cell(0), ("full scales", "K"): v4_cell(1)},
        pages=(1, 16, 64),
    ),
    "v4_uniform": Kind(
        make=v4_uniform,
        write=write_v4_uniform,
        layer_ids=(0, 1, 2),
        cells={("full", "K"): lambda p, layer, slot: p.kv_buffer[layer].view(torch.uint8).view(-1)[slot * 512 :][:512]},
    ),
    "v4": Kind(
        make=v4,
        write=write_v4,
        layer_ids=(0, 1, 2),
        cells={
            ("swa", "K"): v4_cell(0, lambda p: p.swa_kv_pool),
            ("swa scales", "K"): v4_cell(1, lambda p: p.swa_kv_pool),
        },
        pages=(128,),
    ),
    "v41": Kind(
        make=lambda page: v4(page, kv_layout="v41", compression_ratios=[1, 2, 0], kv_source_layers=[0, 1]),
        write=write_v41,
        layer_ids=(0, 1, 2),
        cells={
            ("full", "K"): v4_cell(0, lambda p: p.kv_pools[1]),
            ("full scales", "K"): v4_cell(1, lambda p: p.kv_pools[1]),
            ("swa", "K"): v4_cell(0, lambda p: p.swa_kv_pool),
            ("swa scales", "K"): v4_cell(1, lambda p: p.swa_kv_pool),
        },
        pages=(128,),
    ),
    "v41_new": Kind(
        make=lambda page: v4(page, kv_layout="v41_new", compression_ratios=[1, 2, 0], kv_source_layers=[0, 1]),
        write=write_v41,
        layer_ids=(0, 1, 2),
        cells={
            ("full", "K"): v4_whole(lambda p: p.kv_pools[1]),
            ("swa", "K"): v4_whole(lambda p: p.swa_kv_pool),
        },
        pages=(128,),
    ),
}

CASES = [(name, page) for name, kind in KINDS.items() for page in kind.pages]
