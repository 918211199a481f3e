"""The quicker interpreter leaves Triton's language as it was, whatever becomes of a launch."""

from __future__ import annotations

from types import SimpleNamespace

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


@pytest.mark.parametrize("shape", [[4], [4, 2], [tl.constexpr(8)]], ids=str)
@pytest.mark.parametrize("element", [tl.int32, tl.uint64, tl.pointer_type(tl.int8)], ids=str)
def test_types_and_values_of_a_known_shape_are_like_the_first_ones(element: object, shape: object) -> None:
    sizes = [getattr(size, "value", size) for size in shape]
    first, second = (tl.block_type(element, shape) for _ in range(2))
    assert first == second
    assert second.name == str(second) == f"<{[str(size) for size in sizes]}, {element}>"
    assert (list(second.shape), second.element_ty, second.scalar) == (sizes, element, element)
    values = [tl.tensor(handle, second) for handle in (1, 2)]
    assert [value.handle for value in values] == [1, 2]
    for value in values:
        assert (value.type, value.dtype) == (second, element)
        assert [size.value for size in value.shape] == sizes
        assert value.numel.value == second.numel == torch.Size(sizes).numel()
    single = tl.tensor(3, element)
    assert (len(single.shape), single.numel.value, single.dtype) == (0, 1, element)


@pytest.mark.parametrize("shape", [[3], [4, 3], [4.0], [], [2**30]], ids=str)
def test_a_shape_that_cannot_be_is_refused_beside_known_ones(shape: list[object]) -> None:
    for known in ([1], [4], [4, 2]):
        tl.block_type(tl.int32, known)
    with pytest.raises((TypeError, ValueError)):
        tl.block_type(tl.int32, shape)


def test_numpys_types_are_those_of_the_elements() -> None:
    from triton.runtime import interpreter

    widths = {tl.int1: "bool", tl.int8: "int8", tl.uint32: "uint32", tl.int64: "int64", tl.bfloat16: "uint16"}
    for of, name in widths.items():
        for _ in range(2):
            assert interpreter._get_np_dtype(of).name == name
            assert interpreter._get_np_dtype(tl.block_type(of, [4])).name == name
            for pointer in (tl.pointer_type(of), tl.block_type(tl.pointer_type(of), [4])):
                assert interpreter._get_np_dtype(pointer).name == "uint64"


def test_what_is_equal_to_a_size_is_not_taken_for_it() -> None:
    # To Triton a bool is an integer.
    assert list(tl.block_type(tl.int32, [True]).shape) == [True]
    assert [type(size) for size in tl.block_type(tl.int32, [1]).shape] == [int]
    assert [type(size.value) for size in tl.tensor(None, tl.block_type(tl.int32, [1])).shape] == [int]


def test_an_overflow_is_looked_for_only_where_that_stops_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    from kv_canary.difftest.interpreter import _leave_out_overflows

    def asks(options: object) -> bool:
        builder = SimpleNamespace(options=options)
        _leave_out_overflows(builder)
        return bool(builder.options.sanitize_overflow)

    assert not asks(interpreter.InterpreterOptions())
    assert asks(interpreter.InterpreterOptions(debug=True))
    # Of a Triton whose options are of another kind.
    assert asks(SimpleNamespace(sanitize_overflow=True, debug=False))
    # That of all tests is without, and what overflows wraps around as ever.
    assert not interpreter.interpreter_builder.options.sanitize_overflow
    x = torch.tensor([2**31 - 1, 2**30, -5, 3], dtype=torch.int32)
    _double[(1,)](x, SIZE=4, FAILS=False)
    assert x.tolist() == [-2, -(2**31), -10, 6]
