"""Rows are lent, owners are kept."""

from __future__ import annotations

import pytest

from kv_canary.constants import OWNER_MASK
from kv_canary.runtime import rows as rows_module
from kv_canary.runtime.rows import RowTable


def test_every_request_gets_a_row_of_its_own_and_keeps_it() -> None:
    table = RowTable(5)
    given = {name: table.row(name) for name in "abcd"}
    assert sorted(given.values()) == [1, 2, 3, 4]
    assert {name: table.row(name) for name in "dcba"} == given


def test_the_request_longest_unseen_loses_its_row() -> None:
    table = RowTable(4)
    a, b, c = (table.row(name) for name in "abc")
    table.row("a")
    assert table.row("d") == b
    assert table.row("e") == c
    assert table.row("a") == a
    # b comes back, and takes the row of d, which is now the longest unseen.
    assert table.row("b") == b


def test_a_row_is_never_taken_from_a_request_of_the_same_step() -> None:
    table = RowTable(4)
    a, b, c = (table.row(name) for name in "abc")
    assert table.row("d", keep={"a", "b", "d"}) == c
    assert (table.row("a"), table.row("b")) == (a, b)


def test_more_requests_in_a_step_than_rows_are_refused() -> None:
    table = RowTable(3)
    table.row("a")
    table.row("b")
    with pytest.raises(RuntimeError, match="requests of one step must be at most 2"):
        table.row("c", keep={"a", "b", "c"})


@pytest.mark.parametrize("num_rows", [-1, 0, 1])
def test_a_table_without_a_usable_row_is_refused(num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"num_rows must be at least 2, got {num_rows}"):
        RowTable(num_rows)


def test_an_owner_outlives_its_row_and_ends_with_release() -> None:
    table = RowTable(2)
    table.row("a")
    owner = table.owner("a")
    # b takes the only row.
    table.row("b")
    assert table.owner("a") == owner != table.owner("b")
    table.release("a")
    assert table.owner("a") != owner
    assert table.name(owner) == "a"


def test_a_released_row_is_free_again() -> None:
    table = RowTable(2)
    row = table.row("a")
    table.release("a")
    table.release("never seen")
    assert table.row("b", keep={"a", "b"}) == row


def test_releasing_all_frees_every_row_and_owner() -> None:
    table = RowTable(4)
    owners = {name: table.owner(name) for name in "abc"}
    for name in "ab":
        table.row(name)
    table.release_all()
    assert sorted(table.row(name, keep=set("xyz")) for name in "xyz") == [1, 2, 3]
    assert not set(owners.values()) & {table.owner(name) for name in "abc"}


def test_an_owner_number_is_never_0_even_after_all_are_used() -> None:
    table = RowTable(2)
    table._numbers._last = OWNER_MASK - 1
    owners = [table.owner(name) for name in "abc"]
    # They count on; those whose low bits, which is all that records hold, are 0 are left out.
    assert owners == [OWNER_MASK, OWNER_MASK + 2, OWNER_MASK + 3]
    assert table.name(OWNER_MASK + 2) == table.name(1) == "b"


def test_an_owner_that_outlives_all_others_shares_its_number_with_none() -> None:
    table = RowTable(2)
    old = table.owner("old")
    other = table.owner("other")
    table.release("other")
    table._numbers._last = OWNER_MASK
    assert [table.owner(name) & OWNER_MASK for name in ("new", "newer")] == [other, other + 1]
    assert table.name(old) == "old"
    table.release("old")
    table._numbers._last = 2 * (OWNER_MASK + 1)
    assert table.owner("newest") & OWNER_MASK == old
    assert table.name(old) == "newest"


def test_names_of_the_latest_owners_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "REMEMBERED_OWNERS", 3)
    table = RowTable(2)
    owners = [table.owner(name) for name in "abcd"]
    assert [table.name(o) for o in owners] == [None, "b", "c", "d"]
    assert table.name(99) is None
