"""A kernel whose sums come in another order: paged decode attention in fp16, held to PyTorch within a tolerance.

    kv-canary difftest run --import examples/fp16_attention.py --op paged_attention
    YOUR_KERNEL=wrong kv-canary difftest run --import examples/fp16_attention.py --op paged_attention

The second one does not mask what lies behind a request's last token in its last page.
"""

import math
import os

import torch
import triton
import triton.language as tl
from hypothesis import strategies as st

from kv_canary import register
from kv_canary.difftest.strategies import register_cases
from kv_canary.specs.interface import KernelSpec, TensorSpec
from kv_canary.specs.tolerance import Tolerance

CLOSE = Tolerance(atol=1e-3, rtol=2e-3)

SPEC = KernelSpec(
    name="paged_attention",
    doc="Attend from each request's newest token to its cached ones, one head; a request without any gets zeros.",
    arguments={
        "q": TensorSpec(dtype=torch.float16, shape=("bs", 16), doc="queries"),
        "k": TensorSpec(dtype=torch.float16, shape=("num_pages", 8, 16), doc="keys, by page and place in it"),
        "v": TensorSpec(dtype=torch.float16, shape=("num_pages", 8, 16), doc="values, likewise"),
        "block_table": TensorSpec(
            dtype=torch.int32,
            shape=("bs", "width"),
            index_of={"num_pages": None},
            doc="pages of each request, in order",
        ),
        "lengths": TensorSpec(dtype=torch.int32, shape=("bs",), doc="cached tokens of each"),
        "out": TensorSpec(dtype=torch.float16, shape=("bs", 16), role="out", tolerance=CLOSE, doc="what came of it"),
    },
)


@register(SPEC, backend="reference")
def attention_reference(*, q, k, v, block_table, lengths, out):
    out.zero_()
    for i, length in enumerate(lengths.tolist()):
        if length:
            pages = block_table[i].long()
            keys, values = (x[pages].flatten(0, 1)[:length].double() for x in (k, v))
            weights = torch.softmax(keys @ q[i].double() / math.sqrt(16), dim=0)
            out[i] = (weights @ values).to(out.dtype)


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, table_ptr, width, lengths_ptr, out_ptr, PAGE: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64)
    dim, place = tl.arange(0, D), tl.arange(0, PAGE)
    length = tl.minimum(tl.load(lengths_ptr + i), width * PAGE)
    q = tl.load(q_ptr + i * D + dim).to(tl.float32) * (1.4426950408889634 / 4.0)
    total, most, sums = tl.zeros([D], tl.float32), -float("inf"), 0.0
    for block in range((length + PAGE - 1) // PAGE):
        page = tl.load(table_ptr + i * width + block).to(tl.int64)
        at = (page * PAGE + place[:, None]) * D + dim[None, :]
        score = tl.sum(tl.load(k_ptr + at).to(tl.float32) * q[None, :], axis=1)
        if MASK:
            score = tl.where(block * PAGE + place < length, score, -float("inf"))
        highest = tl.maximum(most, tl.max(score, axis=0))
        weight, rescale = tl.exp2(score - highest), tl.exp2(most - highest)
        total = total * rescale + tl.sum(weight[:, None] * tl.load(v_ptr + at).to(tl.float32), axis=0)
        sums, most = sums * rescale + tl.sum(weight, axis=0), highest
    tl.store(out_ptr + i * D + dim, (total / tl.where(length > 0, sums, 1.0)).to(tl.float16))


@register(SPEC, backend="triton")
def attention_triton(*, q, k, v, block_table, lengths, out):
    if len(q):
        mask = os.environ.get("YOUR_KERNEL") != "wrong"
        _attend[(len(q),)](q, k, v, block_table, block_table.shape[1], lengths, out, PAGE=8, D=16, MASK=mask)


@register_cases("paged_attention")
@st.composite
def cases(draw):
    bs, width = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    pages = draw(st.permutations(range(bs * width + 1)))
    # Lengths around the ends of pages, and any others.
    lengths = [draw(st.sampled_from([0, 1, 7, 8, 9, 8 * width]) | st.integers(0, 8 * width)) for _ in range(bs)]
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    shapes = {"q": (bs, 16), "k": (bs * width + 1, 8, 16), "v": (bs * width + 1, 8, 16)}
    return {
        **{name: torch.randn(shape, generator=random).half() for name, shape in shapes.items()},
        "block_table": torch.tensor(pages[: bs * width], dtype=torch.int32).view(bs, width),
        "lengths": torch.tensor(lengths, dtype=torch.int32).clamp(max=8 * width),
        "out": torch.zeros(bs, 16, dtype=torch.float16),
    }
