"""A kernel of your own, held to its reference: a paged gather, registered and fuzzed like the ops of kv-canary.

    kv-canary difftest run --import examples/your_own_kernel.py --op paged_gather
    YOUR_KERNEL=wrong kv-canary difftest run --import examples/your_own_kernel.py --op paged_gather

The second one fuzzes a version that forgets that a page table may name a page that is not there.
"""

import os

import numpy as np
import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from kv_canary import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, ScalarSpec, TensorSpec

SPEC = KernelSpec(
    name="paged_gather",
    doc="Gather a request's values, page by page; a page that is out of range gives -1.",
    arguments={
        "pool": TensorSpec(dtype=torch.int32, shape=("pool_len",), doc="values, page after page"),
        "pages": TensorSpec(dtype=torch.int64, shape=("num_pages",), doc="pages of the request, in order"),
        "page_size": ScalarSpec(type=int, minimum=1, doc="values in a page"),
        "out": TensorSpec(dtype=torch.int32, shape=("n",), role="out", doc="its first n values"),
    },
)


@register(SPEC, backend="reference")
def paged_gather_reference(*, pool: torch.Tensor, pages: torch.Tensor, page_size: int, out: torch.Tensor) -> None:
    for i in range(len(out)):
        page = int(pages[i // page_size]) if i // page_size < len(pages) else -1
        inside = 0 <= page < len(pool) // page_size
        out[i] = pool[page * page_size + i % page_size] if inside else -1


@triton.jit
def _gather(
    pool_ptr, pool_pages, pages_ptr, num_pages, page_size, out_ptr, n, CHECK: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + i // page_size, mask=(i < n) & (i // page_size < num_pages), other=-1)
    inside = (page >= 0) & (page < pool_pages) if CHECK else page >= 0
    value = tl.load(pool_ptr + page * page_size + i % page_size, mask=(i < n) & inside, other=-1)
    tl.store(out_ptr + i, value, mask=i < n)


@register(SPEC, backend="triton")
def paged_gather_triton(*, pool: torch.Tensor, pages: torch.Tensor, page_size: int, out: torch.Tensor) -> None:
    check, grid = os.environ.get("YOUR_KERNEL") != "wrong", (triton.cdiv(len(out), 64) or 1,)
    _gather[grid](pool, len(pool) // page_size, pages, len(pages), page_size, out, len(out), CHECK=check, BLOCK=64)


@register_cases("paged_gather")
@st.composite
def cases(draw):
    page_size, num_pages = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    pages = draw(st.lists(st.integers(-1, num_pages + 1), max_size=40))
    pool = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 1 << 20, num_pages * page_size, dtype=np.int32)
    n = draw(st.integers(0, len(pages) * page_size + 1))
    tensors = {"pool": torch.from_numpy(pool), "pages": torch.tensor(pages, dtype=torch.int64)}
    return {**tensors, "page_size": page_size, "out": torch.zeros(n, dtype=torch.int32)}
