"""Items of many sequences are those that Python gives, whoever reads them."""

from __future__ import annotations

import shutil
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.engines.sglang import items

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
SMALL = st.integers(-(1 << 31), (1 << 31) - 1)
SEQUENCES = st.one_of(
    st.lists(NUMBERS, max_size=9).map(lambda numbers: array("q", numbers)),
    st.lists(SMALL, max_size=9).map(lambda numbers: array("i", numbers)),
    st.lists(NUMBERS, max_size=9),
    st.lists(NUMBERS, max_size=9).map(tuple),
    st.lists(NUMBERS, max_size=9).map(lambda numbers: np.array(numbers, np.int64)),
)
# Both ways, and the one that is taken.
WAYS = pytest.mark.parametrize("items_at", [items.items_at, items.items_in_python])


def places(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@WAYS
@given(st.lists(st.tuples(SEQUENCES, st.integers(-10, 10)), max_size=40))
def test_items_are_those_that_python_gives(
    items_at: Callable[..., np.ndarray | None], asked: list[tuple[Sequence[int], int]]
) -> None:
    found = items_at([sequence for sequence, _ in asked], places(*(place for _, place in asked)))
    if all(-len(sequence) <= place < len(sequence) for sequence, place in asked):
        assert found is not None
        assert found.dtype == np.int64
        assert found.tolist() == [sequence[place] for sequence, place in asked]
    else:
        assert found is None


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    compiler = sysconfig.get_config_var("CC").split()[0]
    assert items.IS_COMPILED or shutil.which(compiler) is None


def test_without_a_compiler_it_is_the_same_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "IS_COMPILED", False)
    monkeypatch.setattr(items, "take", None, raising=False)
    found = items.items_at([array("q", [5, 6])], places(1))
    assert found is not None
    assert found.tolist() == [6]


@WAYS
@pytest.mark.parametrize(
    ("sequence", "error"),
    [(None, TypeError), ([None], TypeError), (7, TypeError), ([1 << 63], OverflowError), ([-(1 << 80)], OverflowError)],
)
def test_what_holds_no_integers_is_refused(
    items_at: Callable[..., np.ndarray | None], sequence: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        items_at([array("q", [1]), sequence], places(0, 0))


def test_what_a_sequence_raises_is_raised() -> None:
    class Broken(Sequence[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, place: Any) -> Any:
            raise RuntimeError("broken")

    for items_at in (items.items_at, items.items_in_python):
        with pytest.raises(RuntimeError, match="broken"):
            items_at([Broken()], places(1))


def test_an_array_may_grow_once_it_was_read() -> None:
    text = array("q", range(4))
    for place in range(4, 400):
        assert items.items_at([text], places(place)) is None
        text.append(place)
        found = items.items_at([text], places(place))
        assert found is not None
        assert found.tolist() == [place]


@pytest.mark.skipif(not items.IS_COMPILED, reason="there is no compiler here")
def test_arguments_that_contradict_each_other_are_refused() -> None:
    text, found = array("q", [1, 2]), np.full(2, 9, np.int64)
    for sequences, at in (
        ([text], places(0, 1)),
        ((text, text), places(0, 1)),
        ([text] * 3, places(0, 1, 0)),
        ([text] * 2, np.zeros(2, np.int32)),
    ):
        with pytest.raises(ValueError, match="sequences must be a list, with an int64 place for each"):
            items.take(sequences, at, found)  # type: ignore[arg-type]
    assert found.tolist() == [9, 9]
    frozen = np.zeros(2, np.int64)
    frozen.setflags(write=False)
    with pytest.raises((TypeError, BufferError, ValueError)):
        items.take([text, text], places(0, 1), frozen)
    assert frozen.tolist() == [0, 0]


@pytest.mark.skipif(not items.IS_COMPILED, reason="there is no compiler here")
def test_a_sequence_whose_own_python_changes_the_list_does_no_harm() -> None:
    class Clears(Sequence[int]):
        def __len__(self) -> int:
            sequences.clear()
            return 1

        def __getitem__(self, place: Any) -> Any:
            return 5

    sequences: list[Any] = []
    sequences += [Clears(), array("q", [1])]
    with pytest.raises(IndexError):
        items.take(sequences, places(0, 0), np.zeros(2, np.int64))
