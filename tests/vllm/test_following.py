"""What a worker keeps of its requests and their blocks: own tokens, hits, hand-outs and what was left behind."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary.engines.vllm import requests as kept
from kv_canary.engines.vllm.blocks import Blocks
from kv_canary.engines.vllm.inputs import RunnerV2, StepInputs
from kv_canary.engines.vllm.pools import may_hash_parts
from kv_canary.engines.vllm.requests import Requests, identity_of, with_images
from kv_canary.engines.vllm.results import Once
from kv_canary.engines.vllm.session import Session
from kv_canary.runtime.batch import ModelInputs

SIZE = 4


def group(number: int = 0, *, window: int = 0) -> Any:
    return SimpleNamespace(
        number=number, block_size=SIZE, group=SimpleNamespace(name=f"g{number}", window=window), is_draft=False
    )


def blocks(*groups: Any, caches: bool = True, caches_parts: bool = False) -> Blocks:
    return Blocks(groups or (group(),), num_rows=8, max_len=40, num_blocks=32, caches=caches, caches_parts=caches_parts)


def int64s(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def newest(requests: Requests, names: list[str], *ends: int) -> list[int] | None:
    composition = requests.compose(names).composition
    found = requests.newest(composition.members, int64s(*ends))
    return None if found is None else found.tolist()


def text(requests: Requests, name: str) -> list[int]:
    member = requests.find(name)
    assert member is not None
    return list(requests.tokens(member, 0, 99))


def test_what_is_sampled_becomes_own_text_of_those_that_go_on() -> None:
    requests = Requests(num_rows=5, max_len=8)
    requests.start("a", [1, 2, 3], identity=7)
    b = requests.start("b", [4], identity=0)
    both = requests.compose(["a", "b"])
    assert requests.compose(["a", "b"]) is both
    assert both.which is None
    assert both.composition.identities.tolist() == [7, 0]
    requests.sampled(both, ["a", "b"], [[10, 11], []])
    # Nothing counts before it is taken in, which another thread does not do.
    assert newest(requests, ["a", "b"], 4, 1) is None
    requests.take()
    assert newest(requests, ["a", "b"], 5, 1) == [11, 4]
    # In another order, with one that nobody knows.
    requests.sampled(both, ["b", "stranger", "a"], [[5], [9], [12]])
    requests.take()
    assert text(requests, "a") == [1, 2, 3, 10, 11, 12]
    assert text(requests, "b") == [4, 5]
    # Its row is another's when the result comes.
    assert requests.end("b") is b
    requests.let_go(b)
    c = requests.start("c", [6], identity=0)
    assert c.row == both.rows[1]
    requests.sampled(both, ["a", "b"], [[13], [66]])
    requests.take()
    assert text(requests, "c") == [6]
    assert list(requests.tokens(b, 0, 9)) == [4, 5]
    assert requests.compose(["a", "c"]) is not both
    # No more than there is room for.
    requests.sampled(requests.compose(["a", "c"]), ["a", "c"], [[14, 15], [7]])
    requests.take()
    assert text(requests, "a")[5:] == [12, 13, 14]


def test_a_request_that_was_put_off_goes_on_with_its_text_or_with_what_the_scheduler_says() -> None:
    requests = Requests(num_rows=4, max_len=8)
    a = requests.start("a", [1, 2], identity=0)
    owner = a.owner
    late = requests.compose(["a"])
    assert requests.pause("a") is a
    assert requests.pause("nobody") is None
    row = a.row
    requests.let_go(a)
    assert requests.pause("a") is None
    assert text(requests, "a") == [1, 2]
    assert requests.resume("a", None).owner == owner
    assert text(requests, "a") == [1, 2]
    # In its old row: what it has sampled before it was put off is in the text already, or was thrown away.
    assert a.row == row
    requests.sampled(late, ["a"], [[9]])
    requests.take()
    assert text(requests, "a") == [1, 2]
    requests.let_go(a)
    requests.resume("a", [1, 2, 3])
    assert text(requests, "a") == [1, 2, 3]
    assert requests.name(a) == "a"
    assert requests.owner_of(a.row) == owner
    for name in ("b", "c"):
        requests.start(name, [1], identity=0)
    with pytest.raises(RuntimeError, match="at most 3, got more"):
        requests.start("d", [1], identity=0)


def test_images_of_a_request_that_was_put_off_are_still_told_apart() -> None:
    requests = Requests(num_rows=4, max_len=8)
    a = requests.start("a", [1, 77, 78, 2], identity=0, shown=3)
    for told in ([1, 9, 9, 2, 5], None):
        requests.pause("a")
        requests.let_go(a)
        requests.resume("a", told)
        assert text(requests, "a")[:4] == [1, 77, 78, 2]
        assert requests.shown[a.row] == 3
    # A row that is given on has none of it.
    requests.end("a")
    requests.let_go(a)
    assert requests.shown[requests.start("b", [1], identity=0).row] == 0


def test_a_request_whose_text_is_lost_is_left_out_until_the_scheduler_says_it_anew() -> None:
    requests = Requests(num_rows=5, max_len=8)
    a, _ = requests.start("a", [1, 2], identity=0), requests.start("b", [3], identity=0)
    before = requests.compose(["a", "b"])
    requests.lose(["a", "stranger"])
    composed = requests.compose(["a", "b", "stranger"])
    assert composed.names == ["b"]
    assert composed.which.tolist() == [1]
    assert composed.rows.tolist() == [a.row, before.rows[1], 0]
    # What comes late is nothing either.
    requests.sampled(before, ["a", "b"], [[8], [9]])
    requests.take()
    assert text(requests, "b") == [3, 9]
    assert text(requests, "a") == [1, 2]
    # Not while it is put off, and not by coming back with what it had.
    requests.pause("a")
    requests.let_go(a)
    requests.resume("a", None)
    assert requests.compose(["a"]).names == []
    requests.pause("a")
    requests.let_go(a)
    requests.resume("a", [1, 2, 8])
    assert requests.compose(["a"]).names == ["a"]
    requests.lose(["a"])
    requests.start("a", [1, 2, 8], identity=0)
    assert requests.compose(["a"]).which is None
    requests.forget()
    assert requests.find("a") is None
    assert requests.compose(["a", "b"]).names == []
    assert len({requests.start(name, [1], identity=0).row for name in "abcd"}) == 4


def test_what_kv_depends_on_is_of_the_request_and_not_of_the_caches_key() -> None:
    def new(lora: Any = None) -> Any:
        return SimpleNamespace(lora_request=lora)

    adapters = [
        SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=1)
        for name, path in (("one", "/a"), ("other", "/a"), ("one", "/b"))
    ]
    again = SimpleNamespace(lora_name="one", lora_path="/a", lora_int_id=2)
    assert identity_of(new(again), salt=None) == identity_of(new(adapters[0]), salt=None)
    words = [identity_of(new(), salt=None), *(identity_of(new(x), salt=None) for x in adapters)]
    words += [identity_of(new(), salt="a"), identity_of(new(), salt="b"), identity_of(new(adapters[0]), salt="a")]
    assert words[0] == 0
    assert len(set(words)) == len(words)


def test_images_of_other_content_are_other_tokens() -> None:
    def image(identifier: str, offset: int, length: int) -> Any:
        return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))

    text = [1, 2, 9, 9, 9, 3, 9, 9]
    assert with_images(text, None) == (text, 0)
    one, end = with_images(text, [image("cat", 2, 3), image("dog", 6, 4)])
    other, _ = with_images(text, [image("cow", 2, 3), image("dog", 6, 4)])
    assert end == 8
    assert [one[i] for i in (0, 1, 5)] == [1, 2, 3]
    assert [i for i in range(8) if one[i] != other[i]] == [2, 3, 4]
    assert len({*one[2:5], *one[6:]}) == 5
    assert all(1 << 30 <= one[i] < 1 << 31 for i in (2, 3, 4, 6, 7))
    assert text[2] == 9


def test_blocks_that_are_hit_are_not_handed_out() -> None:
    found = blocks()
    found.admit(1, [[3, 5, 6]], 8)
    assert found.take_fresh().tolist() == [6]
    found.append(1, [[7]])
    assert found.take_fresh().tolist() == [7]
    assert found.take_fresh().tolist() == []
    # Block 0 is nobody's.
    found.admit(2, [[0, 0, 9]], 0)
    assert found.take_fresh().tolist() == [9]


def test_a_block_that_is_handed_out_is_retired_in_every_pool_by_the_size_that_it_has_there() -> None:
    """vLLM gives the layers whose tokens are narrower more of these in a block, so that all blocks are as large."""
    retired: dict[str, list[int]] = {}
    session = SimpleNamespace(
        offload=None,
        groups=[],
        requests=None,
        _blocks=blocks(group(), group(1)),
        _sizes={"narrow": 2 * SIZE, "wide": SIZE},
        manager=SimpleNamespace(
            unverified=SimpleNamespace(is_clean=False),
            retire=lambda pool, slots: retired.setdefault(pool, []).extend(slots.tolist()),
        ),
    )
    session._blocks.admit(1, [[3], [5]], 0)
    Session._hand_out(session, ())
    assert retired == {
        "narrow": [*range(24, 32), *range(40, 48)],
        "wide": [*range(12, 16), *range(20, 24)],
    }
    Session._hand_out(session, ())
    assert len(retired["narrow"]) == 16


def test_a_block_in_which_nobody_has_recorded_anything_since_it_was_retired_is_not_retired_again() -> None:
    found = blocks(group(), group(1))
    found.admit(1, [[3, 4, 5], [13, 14, 15]], 0)
    # Nobody has ever had them.
    assert found.take_fresh(only_recorded=True).tolist() == []
    found.went(int64s(1), int64s(6))
    found.end(1)
    # One is full, and may have been hit until now; the others were retired when they were given back.
    found.admit(2, [[13, 14, 9], [3, 4, 5]], 0)
    assert found.handed_out
    assert found.take_fresh(only_recorded=True).tolist() == [13, 3]
    assert not found.handed_out
    # Somebody has them, or has had them when nobody could follow.
    found.append(4, [[14], []])
    assert found.take_fresh(only_recorded=True).tolist() == [14]
    found.copied_to(20)
    found.forget()
    found.append(4, [[20, 21], []])
    assert found.take_fresh(only_recorded=True).tolist() == [20, 21]


@pytest.mark.parametrize("seed", range(8))
def test_blocks_of_several_requests_are_taken_in_as_one_by_one(seed: int) -> None:
    """With blocks that several get, that others have, and of which some are none."""
    draw = random.Random(seed)
    one, other = (blocks(group(window=5), group(1), caches=False) for _ in range(2))
    for _ in range(60):
        rows = draw.sample(range(1, 8), draw.randrange(1, 6))
        if draw.random() < 0.3:
            for found in (one, other):
                found.end(rows[0])
        count = draw.choice([1, 1, 1, 2])
        more = [
            [[draw.randrange(0 if draw.random() < 0.1 else 1, 32) for _ in range(count)] for _ in "ab"] for _ in rows
        ]
        one.append_each(rows, more)
        for row, its in zip(rows, more, strict=True):
            other.append(row, its)
        for name in ("_tables", "_counts", "_holders"):
            assert all(map(np.array_equal, getattr(one, name), getattr(other, name))), name
        assert sorted(one._twice) == sorted(other._twice)
        assert sorted(one.take_fresh().tolist()) == sorted(other.take_fresh().tolist())
        assert np.array_equal(one._is_recorded, other._is_recorded)
        one._twice, other._twice = [], []


@pytest.mark.parametrize(("caches", "unreachable"), [(True, [20, 21, 22, 23]), (False, list(range(12, 24)))])
def test_of_a_request_that_has_ended_what_nobody_can_hit_is_unreachable(caches: bool, unreachable: list[int]) -> None:
    found = blocks(caches=caches)
    found.admit(1, [[3, 4, 5]], 0)
    found.ends[1] = 10
    freed = found.end(1)
    assert freed.slots[0].tolist() == list(range(12, 22))
    assert freed.unreachable[0].tolist() == unreachable
    assert found.end(1).slots[0].tolist() == []


@pytest.mark.parametrize(("length", "unreachable"), [(7, range(20, 24)), (8, range(20, 24)), (10, range(0))])
def test_where_parts_are_hashed_a_block_that_is_not_full_may_be_hit(length: int, unreachable: range) -> None:
    found = blocks(caches_parts=True)
    found.admit(1, [[3, 4, 5]], 0)
    found.ends[1] = length
    assert found.end(1).unreachable[0].tolist() == list(unreachable)


@pytest.mark.parametrize(
    ("sizes", "unit", "may"), [((16,), None, False), ((16, 16), None, False), ((16, 48), None, True), ((16,), 8, True)]
)
def test_parts_may_be_hashed_where_blocks_are_larger_than_what_is_hashed(
    sizes: tuple[int, ...], unit: int | None, may: bool
) -> None:
    groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups)),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(prefix_match_unit=unit)),
    )
    assert may_hash_parts(worker) == may


def test_of_a_window_only_what_it_reads_is_left() -> None:
    found = blocks(group(window=5), caches=False)
    found.admit(1, [[3, 4, 5]], 0)
    found.ends[1] = 12
    freed = found.end(1)
    assert freed.slots[0].tolist() == list(range(19, 24))
    # Whose is another's by now is not taken back from it.
    assert freed.unreachable[0].tolist() == list(range(16, 24))


def test_a_block_that_is_handed_out_twice_is_told_with_its_new_owner() -> None:
    found = blocks()
    found.admit(1, [[3, 4]], 0)
    found.admit(2, [[3, 6]], 4)
    assert found.take_handed_out_twice() == []
    found.append(2, [[4]])
    [(_, slots, row)] = found.take_handed_out_twice()
    assert (slots.tolist(), row) == ([16, 17, 18, 19], 2)
    # One that has ended has nothing left to lose.
    found.end(2)
    found.admit(5, [[6, 4]], 0)
    assert found.take_handed_out_twice() == []


def test_a_block_that_a_window_has_left_behind_may_be_handed_out() -> None:
    found = blocks(group(window=5), group(1))
    found.admit(1, [[3, 4, 5, 6], [13, 14, 15, 16]], 0)
    found.ends[1] = 14
    found.append(2, [[3], []])
    assert found.take_handed_out_twice() == []
    # In whatever group it was.
    found.append(2, [[13], []])
    found.append(2, [[], [6]])
    assert [(slots.tolist()[0], row) for _, slots, row in found.take_handed_out_twice()] == [(52, 2), (24, 2)]


def test_what_is_hit_in_the_step_that_writes_it_is_pending() -> None:
    found = blocks()
    found.begin_step()
    found.admit(1, [[3, 4, 5]], 0)
    # Another prompt's first two blocks, of which the first is written in this step.
    found.admit(2, [[3, 9, 6]], 8)
    rows, prefix, extend = int64s(1, 2), int64s(0, 8), int64s(6, 3)
    assert found.pending(rows, prefix, extend).tolist() == [0, 8]
    # Which is over with the step.
    found.ends[:3] = 0, 6, 11
    found.begin_step()
    assert found.pending(rows, int64s(6, 11), int64s(4, 1)) is None
    # A block that was begun before: what was there is there. Hit by one that is admitted, in the step that fills it.
    found.begin_step()
    found.admit(4, [[3, 4, 7]], 8)
    assert found.pending(int64s(1, 4), int64s(6, 8), int64s(2, 2)).tolist() == [0, 2]
    # Beside one that nobody knows, all of it.
    assert found.pending(int64s(0, 4), int64s(50, 8), int64s(1, 2)).tolist() == [0, 8]
    # And of one that is not in the step nothing is said.
    found.begin_step()
    found.admit(5, [[3, 4, 7]], 8)
    assert found.pending(int64s(1), int64s(6), int64s(2)) is None


def test_blocks_of_which_nothing_is_known_leave_nothing_behind() -> None:
    found = blocks()
    found.admit(1, [[3, 4]], 0)
    found.append(1, [[5]])
    found.ends[1] = 9
    found.forget()
    assert found.take_fresh().tolist() == []
    assert found.end(1).unreachable[0].tolist() == []
    found.admit(2, [[3]], 0)
    assert found.take_handed_out_twice() == []


def test_some_requests_of_a_step_and_their_tokens() -> None:
    whole = StepInputs(
        names=["a", "b", "c"],
        prefix=int64s(5, 0, 7),
        extend=int64s(1, 3, 2),
        # Behind what is of the step is what others have left.
        given=ModelInputs(
            input_ids=torch.arange(8, dtype=torch.int32),
            positions=torch.arange(8) + 10,
            out_slots={"g0": torch.arange(8) + 20},
            lengths=torch.tensor([6, 3, 9, 77], dtype=torch.int32),
            stays=True,
        ),
    )
    assert whole.input_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.lengths is not None
    assert whole.lengths.tolist() == [6, 3, 9]
    some = whole.only(int64s(0, 2))
    assert (some.names, some.prefix.tolist(), some.extend.tolist()) == (["a", "c"], [5, 7], [1, 2])
    assert some.input_ids.tolist() == [0, 4, 5]
    assert some.positions.tolist() == [10, 14, 15]
    assert some.out_slots(["g0"])["g0"].tolist() == [20, 24, 25]
    assert some.lengths is not None
    assert some.lengths.tolist() == [6, 9]
    others = whole.with_input_ids(torch.arange(6) + 50)
    assert others.input_ids.tolist() == [50, 51, 52, 53, 54, 55]
    # What is copied does not lie there at the next forward.
    assert (whole.given.stays, some.given.stays, others.given.stays) == (True, False, False)


def test_the_newest_tokens_of_a_list_that_goes_on_are_those_of_the_next_step() -> None:
    requests = Requests(num_rows=5, max_len=20)
    for name, prompt in (("a", [1, 2, 3]), ("b", [4])):
        requests.start(name, prompt, identity=0)
    both = requests.compose(["a", "b"])
    for step in range(4):
        requests.sampled(both, ["a", "b"], [[10 + step], [20 + step]])
    requests.take()
    rows, ends, found = both.composition.rows, int64s(4, 2), list[list[int] | None]()
    last = requests.newest_of(rows, ends)
    assert last is not None
    for _ in range(4):
        ends, before = ends + 1, ends
        newest = requests.newest_of(rows, ends, after=before)
        found.append(None if newest is None else newest.tolist())
    # The last step has not been sampled yet.
    assert [last.tolist(), *found] == [[10, 20], [11, 21], [12, 22], [13, 23], None]
    # Behind others than those that were asked for last.
    newest = requests.newest_of(rows, int64s(5, 3), after=int64s(4, 2))
    assert newest is not None
    assert newest.tolist() == [11, 21]


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_what_was_sampled_however_it_came(seed: int) -> None:
    """Against lists of tokens: the same requests step after step, and then others, and some with none or several."""
    draw, requests = random.Random(seed), Requests(num_rows=9, max_len=90)
    texts: dict[str, list[int]] = {}
    late: list[tuple[kept.Composed, list[list[int]]]] = []
    asked, of = int64s(), list[str]()
    for step in range(150):
        if (draw.random() < 0.1 and len(texts) < 6) or not texts:
            name = f"r{step}"
            texts[name] = [draw.randrange(1000) for _ in range(draw.randrange(1, 9))]
            requests.start(name, texts[name], identity=0)
        ended = [name for name in texts if draw.random() < 0.01 or len(texts[name]) > 80]
        for name in ended:
            member = requests.end(name)
            assert member is not None
            assert requests.tokens(member, 0, 99) == texts.pop(name)
            requests.let_go(member)
        if not texts:
            continue
        names = list(texts)
        composed = requests.compose(names)
        sampled = [[draw.randrange(1000)] for _ in names]
        if draw.random() < 0.15:
            sampled = [[draw.randrange(1000) for _ in range(draw.randrange(3))] for _ in names]
        requests.sampled(composed, names, sampled)
        late.append((composed, sampled))
        if draw.random() < 0.8:
            requests.take()
            for then, tokens in late:
                for name, new in zip(then.names, tokens, strict=True):
                    # What was sampled for one that has ended meanwhile is nobody's.
                    if name in texts:
                        texts[name] = (texts[name] + new)[:90]
            late.clear()
            rows = requests.compose(names).rows
            assert requests.known(rows).tolist() == [len(texts[name]) for name in names]
        back = draw.randrange(3)
        ends = np.array([len(texts[name]) - back for name in names], np.int64)
        for at in (ends, np.array([draw.randrange(1, len(texts[name]) + 1) for name in names], np.int64)):
            found = requests.newest_of(requests.compose(names).composition.rows, at)
            assert (found is None) == bool((at < 1).any())
            if found is not None:
                assert found.tolist() == [texts[n][end - 1] for n, end in zip(names, at.tolist(), strict=True)]
        # One token behind those that were asked for in the step before, which may be there or not yet.
        asked, before, goes_on = asked + 1, asked, of == names and draw.random() < 0.9
        if not goes_on:
            asked, of = ends, names
        rows = requests.compose(names).composition.rows
        found = requests.newest_of(rows, asked, after=before if goes_on else None)
        there = [texts[n][end - 1 : end] for n, end in zip(names, asked.tolist(), strict=True)]
        assert (found is None) == (min(map(len, there)) == 0 or bool((asked < 1).any()))
        if found is not None:
            assert found.tolist() == [token for (token,) in there]
        if draw.random() < 0.1:
            most = draw.randrange(1, 12)
            recent = requests.recent(rows, most)
            for n, own in enumerate(map(texts.__getitem__, names)):
                first = max(len(own) - most, 0)
                assert (recent.base[n], recent.first[n], recent.end[n]) == (first, first, len(own))
                assert recent.tokens[n, : len(own) - first].tolist() == own[first:]
        name = draw.choice(names)
        begin, end = sorted(draw.randrange(100) for _ in range(2))
        member = requests.find(name)
        assert member is not None
        assert requests.tokens(member, begin, end) == texts[name][begin:end]


@pytest.mark.parametrize("seed", range(6))
def test_a_list_of_requests_that_changes_is_what_it_would_be_made_anew(seed: int) -> None:
    """Requests come, end, are put off, change places and are lost; some nobody knows."""
    draw, requests = random.Random(seed), Requests(num_rows=9, max_len=40)
    names, last = list[str](), list[Any]()
    for step in range(300):
        if len(names) < 6 and draw.random() < 0.4:
            names.append(f"r{step % 11}x{step}")
            requests.start(names[-1], [1, 2, 3], identity=step, shown=0)
        if names and draw.random() < 0.3:
            # Another one takes its place, as in a batch that is kept dense.
            i = draw.randrange(len(names))
            member = requests.end(names[i])
            if member is not None and member.row:
                requests.let_go(member)
            names[i] = names[-1]
            names.pop()
        if names and draw.random() < 0.2:
            name = draw.choice(names)
            if (member := requests.pause(name)) is not None:
                requests.let_go(member)
                if draw.random() < 0.7:
                    requests.resume(name, [4, 5])
        if names and draw.random() < 0.1:
            requests.lose([draw.choice(names)])
        if draw.random() < 0.2:
            draw.shuffle(names)
        listed = [*names, *(["stranger"] if draw.random() < 0.1 else [])]
        composed = requests.compose(listed)
        found = [requests.find(name) for name in listed]
        rows = [0 if m is None else m.row for m in found]
        assert composed.rows.tolist() == rows
        known = [i for i, row in enumerate(rows) if row and requests._serials[row]]
        assert (composed.which is None) == (len(known) == len(rows))
        assert composed.which is None or composed.which.tolist() == known
        assert composed.names == [listed[i] for i in known]
        its = composed.composition
        assert list(its.members) == [found[i] for i in known]
        assert its.rows.tolist() == [rows[i] for i in known]
        assert its.owners.tolist() == [m.owner for m in its.members]
        assert its.identities.tolist() == [m.identity for m in its.members]
        # What was made before stays as it was.
        for rows_before, was in last[-3:]:
            assert rows_before.tolist() == was
        last.append((composed.rows, rows))


def test_a_batch_that_the_model_reads_elsewhere_is_read_there() -> None:
    ids, at, lens = torch.arange(8, dtype=torch.int32), torch.arange(8), torch.arange(8, dtype=torch.int32)
    buffers = SimpleNamespace(input_ids=ids, positions=at, seq_lens=lens)
    tables = SimpleNamespace(slot_mappings=torch.arange(8)[None])
    reader = RunnerV2(SimpleNamespace(input_buffers=buffers, block_tables=tables), [group()])
    batch = SimpleNamespace(num_reqs=2, num_tokens=2, req_ids=["a", "b"], num_computed_tokens_np=np.array([3, 4]))
    for mine in (False, True):
        batch.input_ids, batch.positions, batch.seq_lens = ids[:4], at[:4], lens[:4]
        if mine:
            batch.positions = at[:4] + 50
        found = reader.read(None, batch)
        assert found.given.stays != mine
        assert found.positions.tolist() == ([50, 51] if mine else [0, 1])


def test_a_result_is_asked_for_once_and_what_ends_a_process_goes_on() -> None:
    calls: list[int] = []

    def fail(error: BaseException) -> Any:
        calls.append(1)
        raise error

    once = Once(lambda: fail(ZeroDivisionError()))
    once.read()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            once()
    assert len(calls) == 1
    with pytest.raises(KeyboardInterrupt):
        Once(lambda: fail(KeyboardInterrupt())).read()
    answered = Once(lambda: len(calls))
    assert (answered(), answered()) == (2, 2)


def test_numbers_by_name() -> None:
    assert kept.by_name(["b", "a"], {"a": 1, "b": 2}).tolist() == [2, 1]
    assert torch.equal(torch.from_numpy(kept.by_name([], {})), torch.zeros(0, dtype=torch.int64))


def test_a_text_of_the_greatest_length_makes_nobody_slow_once_its_request_has_ended() -> None:
    requests = Requests(num_rows=8, max_len=64)
    requests.start("a", [1] * 10, identity=0)
    requests.start("long", [1] * 64, identity=0)
    requests.start("later", [1] * 10, identity=0)
    for name in ("long", "later"):
        member = requests.end(name)
        assert member is not None
        requests.let_go(member)
    # Another one's row lies above it among those that are free.
    fast = []
    for _ in range(4):
        requests.sampled(requests.compose(["a"]), ["a"], [[7]])
        fast.append(requests._decoded is not None)
        requests.take()
    assert fast[-1]
    assert requests.known(requests.compose(["a"]).rows).tolist() == [14]
