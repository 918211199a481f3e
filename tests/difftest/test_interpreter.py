"""The quicker interpreter leaves Triton's language as it was, whatever becomes of a launch."""

from __future__ import annotations

import pytest
import torch

from kv_canary.backends import interpreting
from kv_canary.difftest.interpreter import quicken

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not interpreting(), reason="of Triton's interpreter")
tl = triton.language


@triton.jit
def _doubled(x):
    # Of the language by Triton's own name for it, too: this is one of its functions in Python.
    return x * tl.cdiv(4, 2)


@triton.jit
def _double(x_ptr, SIZE: tl.constexpr, FAILS: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(x_ptr + lane, _doubled(tl.load(x_ptr + lane)))
    if FAILS:
        tl.store(x_ptr + lane, nothing)  # noqa: F821


def language() -> list[object]:
    owners = (tl, tl.core, tl.tensor, tl.math, tl.dtype, tl.core.tensor_descriptor_base)
    return [dict(vars(owner)) for owner in owners]


def test_a_launch_leaves_the_language_as_it_was() -> None:
    before, x = language(), torch.arange(4)
    _double[(1,)](x, SIZE=4, FAILS=False)
    assert x.tolist() == [0, 2, 4, 6]
    assert language() == before
    with pytest.raises(triton.runtime.errors.InterpreterError, match="nothing"):
        _double[(1,)](x, SIZE=4, FAILS=True)
    assert x.tolist() == [0, 4, 8, 12]
    assert language() == before


def test_a_launch_within_another_one_ends_by_itself() -> None:
    from triton.runtime import interpreter

    before = language()
    outer, inner = interpreter._patch_lang(_double.fn), interpreter._patch_lang(_doubled.fn)
    inner.restore()
    during, x = language(), torch.arange(4)
    assert during != before
    _double[(1,)](x, SIZE=4, FAILS=False)
    assert x.tolist() == [0, 2, 4, 6]
    assert language() == during
    outer.restore()
    assert language() == before


def test_once_is_enough() -> None:
    from triton.runtime import interpreter

    there = interpreter._patch_lang, interpreter.InterpretedFunction.__call__
    quicken()
    assert (interpreter._patch_lang, interpreter.InterpretedFunction.__call__) == there
