"""Prefill and decode in different SGLang schedulers: what crosses, what is found on the decode side, what is not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from kv_canary.difftest.stress.sglang import drafts

from . import engine
from .pd_roles import Outcome, Round, Scene, play

# What each fault of a transfer looks like on the decode side: reasons before the model, and behind it.
FOUND: dict[str, tuple[set[str], set[str]]] = {
    "dropped_page": ({"NEVER_WRITTEN"}, {"NEVER_WRITTEN"}),
    "page_of_another": ({"CHAIN", "POSITION", "TOKEN"}, {"CHAIN", "POSITION", "TOKEN"}),
    "page_at_a_wrong_place": ({"CHAIN", "POSITION", "TOKEN"}, {"CHAIN", "POSITION", "TOKEN"}),
    "last_layer_cut": (set(), {"K", "V"}),
    "v_missing": (set(), {"V"}),
    "start_cut": ({"NEVER_WRITTEN"}, set()),
    "end_cut": (set(), {"NEVER_WRITTEN"}),
}
# A bit of a byte that HEAD does not look at.
SEALED = ("k_bit", "v_bit")
WINDOWED = {"window_page_dropped": ({"NEVER_WRITTEN"}, {"NEVER_WRITTEN"})}

Results = dict[str, dict[str, list[Outcome]]]


def _scenes(llama: str, mellum: str, eagle: tuple[str, str]) -> dict[str, Scene]:
    numbers = random.Random(5)

    def some(count: int) -> list[int]:
        return [numbers.randrange(3, engine.VOCABULARY) for _ in range(count)]

    shared = some(70)
    # Prompts of several chunks, of less than a page, and with a prefix that the prefill side has cached.
    first = Round(prompts={"a": shared + some(37), "b": some(33), "c": some(150), "d": some(8)})
    second = Round(prompts={"e": shared + some(20), "f": some(90)})
    again = Round(prompts={"g": shared + some(25), "h": some(90)})
    faults = [Round(prompts={name: some(60)}, fault=name) for name in FOUND]
    longer = Round(prompts={name: some(60) for name in "ijklm"}, new_tokens=40)
    windowed = [Round(prompts={name: some(60)}, fault=name) for name in WINDOWED]
    given_up = Round(prompts={"n": some(150), "o": some(140)}, aborted=["n", "o"])
    alone = [Round(prompts={name: some(200)}) for name in "qr"]
    adapters = Round(prompts={"p": some(50)}, adapters=True)
    pages = {"page_size": 16}
    speculation = drafts.arguments(eagle[1])
    return {
        "pages": Scene(model=llama, rounds=[first, second, *faults, again, adapters], both=pages),
        "windows": Scene(
            model=mellum,
            rounds=[first, second, *windowed, again],
            both={"disable_overlap_schedule": False, "page_size": 8},
        ),
        "cached": Scene(
            model=llama,
            rounds=[first, second, again],
            both=pages,
            decode={"disaggregation_decode_enable_radix_cache": True},
        ),
        "retracted": Scene(
            model=llama, rounds=[longer, again], decode={"num_reserved_decode_tokens": 8}, retract_every=15
        ),
        "given up": Scene(model=llama, rounds=[given_up, first, second], both=pages),
        # Pages are soon another request's, on both sides, and what was in those of the prefill side comes with them.
        "tight": Scene(
            model=llama,
            rounds=[first, second, again, *alone],
            both=pages,
            prefill={"max_total_tokens": 320},
            prefill_environ={"KV_CANARY_TRACK_LIFETIME": "0"},
            decode={"max_total_tokens": 256, "num_reserved_decode_tokens": 8},
        ),
        "sealed": Scene(
            model=llama,
            rounds=[first, second, *(Round(prompts={name: some(60)}, fault=name) for name in SEALED), again],
            both=pages,
            environ={"KV_CANARY_SEALS": "layer", "KV_CANARY_READ_BYTES": "1"},
        ),
        "windows, sealed": Scene(
            model=mellum,
            rounds=[first, second, again],
            both={"disable_overlap_schedule": False, "page_size": 8},
            environ={"KV_CANARY_SEALS": "layer"},
        ),
        "prefill only": Scene(model=llama, rounds=[first, second], both=pages, guarded=["prefill"]),
        "decode only": Scene(model=llama, rounds=[first, second], both=pages, guarded=["decode"]),
        "speculative": Scene(
            model=eagle[0],
            rounds=[first, second, again],
            both={**pages, **speculation},
            environ={"SGLANG_ON_CPU": "pd,speculative"},
        ),
    }


SCENES = tuple(_scenes("", "", ("", "")))
# Those where both sides have a canary, and nothing keeps the records from crossing.
CROSSING = ("pages", "windows", "cached", "retracted", "given up", "tight", "speculative", "sealed", "windows, sealed")


@pytest.fixture(scope="module")
def scenes(llama: str, mellum: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    return _scenes(llama, mellum, drafts.save_models(tmp_path_factory.mktemp("eagle")))


@pytest.fixture(scope="module")
def results(scenes: dict[str, Scene]) -> Results:
    """What came of all scenes, which share their two processes."""
    return play(scenes)


def healthy(scene: Scene) -> list[int]:
    return [i for i, r in enumerate(scene.rounds) if not r.fault]


def prompt_tokens(scene: Scene, rounds: list[int]) -> int:
    return sum(len(p) for i in rounds for p in scene.rounds[i].prompts.values())


@pytest.mark.parametrize("name", SCENES)
def test_outputs_are_those_of_one_engine(scenes, results, name):
    scene = scenes[name]
    for i in healthy(scene):
        for request, prompt in scene.rounds[i].prompts.items():
            output = results[name]["decode"][i].outputs[request]
            wanted = 0 if request in scene.rounds[i].aborted else scene.rounds[i].new_tokens
            assert len(output) >= wanted, request
            assert engine.is_greedy(scene.model, prompt, output), request


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_reported_without_a_fault(scenes, results, name):
    scene = scenes[name]
    for side in scene.guarded:
        for i in range(len(scene.rounds)):
            outcome = results[name][side][i]
            assert not outcome.summary["off"]
            if side == "prefill" or not scene.rounds[i].fault:
                assert outcome.reports == []


@pytest.mark.parametrize("name", CROSSING)
def test_everything_that_came_is_verified(scenes, results, name):
    scene = scenes[name]
    last = results[name]["decode"][-1].summary
    assert last["watching"] == "complete"
    assert last["positions_verified"] == last["positions_relied_on"]
    # Each prompt is read by every forward but the first token's, which is the prefill side's.
    served = [i for i in range(len(scene.rounds)) if not scene.rounds[i].aborted]
    assert last["positions_verified"] >= 2 * prompt_tokens(scene, served)
    uncovered = prompt_tokens(scene, [i for i, r in enumerate(scene.rounds) if r.adapters])
    assert last["uncovered"] == uncovered


@pytest.mark.parametrize(
    ("name", "fault"), [("pages", fault) for fault in FOUND] + [("windows", fault) for fault in WINDOWED]
)
def test_a_fault_of_the_transfer_is_found_by_the_first_forward(scenes, results, name, fault):
    scene = scenes[name]
    [i] = [i for i, r in enumerate(scene.rounds) if r.fault == fault]
    outcome = results[name]["decode"][i]
    before, behind = {**FOUND, **WINDOWED}[fault]
    assert outcome.found("HEAD") == ({fault: before} if before else {})
    assert outcome.found("TAIL") == ({fault: behind} if behind else {})
    first_step = results[name]["decode"][i - 1].summary["steps"] + 1
    assert min(report["step"] for report in outcome.reports) == first_step
    if "TOKEN" in before:
        # What came has become the request's own.
        assert f"written by request {fault} " in outcome.reports[0]["sentence"]


@pytest.mark.parametrize("fault", SEALED)
def test_a_bit_of_any_byte_that_changes_on_the_way_is_found_where_it_arrives(scenes, results, fault):
    [i] = [i for i, r in enumerate(scenes["sealed"].rounds) if r.fault == fault]
    outcome = results["sealed"]["decode"][i]
    assert outcome.found("SWEEP") == {None: {f"SEAL_{fault[0].upper()}"}}
    assert outcome.found("HEAD") == outcome.found("TAIL") == {}
    # Before the first forward that reads it.
    first_step = results["sealed"]["decode"][i - 1].summary["steps"] + 1
    assert min(report["step"] for report in outcome.reports) <= first_step


@pytest.mark.parametrize("name", ["sealed", "windows, sealed"])
def test_all_that_arrives_is_held_against_the_seals_that_came_with_it(scenes, results, name):
    audits = results[name]["decode"][-1].summary["audits"]
    assert audits["unsealed"] == 0
    # Of a window only the last pages are sent.
    assert audits["admitted"] >= prompt_tokens(scenes[name], healthy(scenes[name])) // (1 if name == "sealed" else 2)


@pytest.mark.parametrize("name", ["sealed", "windows, sealed"])
def test_what_a_decode_server_frees_is_not_looked_at_once_a_transfer_may_fill_it(results, name):
    prefill, decode = (results[name][side][-1].summary["audits"] for side in ("prefill", "decode"))
    assert prefill["completed"] > 0
    assert decode["completed"] == 0


def test_requests_that_were_put_off_come_back_with_their_records(results):
    outcome = results["retracted"]["decode"][0]
    assert outcome.retracted > 0
    assert outcome.summary["uncovered"] == 0


def test_where_the_other_side_has_no_canary_kv_is_taken_as_it_comes(scenes, results):
    scene = scenes["decode only"]
    summary = results["decode only"]["decode"][-1].summary
    assert summary["uncovered"] == prompt_tokens(scene, healthy(scene))
    assert summary["positions_verified"] == summary["positions_relied_on"] > 0


def _lists_of(pool: Any, *, page_size: int, seals: bool = False) -> tuple[Any, Any]:
    """Return the lists of a pool with the records in them, and what the engine keeps of them."""
    from kv_canary.engines.patches import Patches
    from kv_canary.engines.sglang import pools, transfer_lists
    from kv_canary.transfer import buffers, is_of_the_canary

    patches = Patches()
    [group] = pools.attach(pool, name="", read_bytes=16)
    group.pool.keep_head_records()
    if seals:
        group.pool.keep_seals(by_layer=True, seed=1)
    entries = buffers(group.pool, page_size=page_size)
    mine = tuple(filter(is_of_the_canary, entries))
    patches.wrap(pool, "get_contiguous_buf_infos", transfer_lists._with(entries))
    lists = transfer_lists.Lists(layout="here", records=mine, groups=frozenset({group.name}))
    addresses, lengths, item_lens = pool.get_contiguous_buf_infos()
    args = SimpleNamespace(
        kv_data_ptrs=addresses,
        kv_data_lens=lengths,
        kv_item_lens=item_lens,
        state_data_ptrs=[],
        state_data_lens=[],
        state_item_lens=[],
        num_draft_entries=0,
        kv_layer_ids=[],
        page_size=page_size,
        engine_rank=0,
        prefill_start_layer=0,
        kv_head_num=2,
        total_kv_head_num=2,
        mla_compression_ratios=None,
    )
    return lists, args


class _Manager:
    """Something that has lists."""

    def __init__(self, args: Any) -> None:
        self.kv_args = args


class _Recorder:
    """A transfer engine that only remembers what it was asked for."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int]] = []

    def batch_transfer_sync(self, session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        self.copies += zip(sources, targets, lengths, strict=True)
        return 0


class _Now:
    """Runs what it is given at once."""

    def submit(self, function: Any, *args: Any) -> Any:
        import concurrent.futures

        future: Any = concurrent.futures.Future()
        future.set_result(function(*args))
        return future


def _pool(*, layers: int = 3, page_size: int = 4) -> Any:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=64,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=8,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )


def _sender(args: Any, peer: Any) -> Any:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    manager = object.__new__(MooncakeKVManager)
    vars(manager).update(
        kv_args=args,
        engine=_Recorder(),
        decode_kv_args_table={"peer": peer},
        attn_tp_size=1,
        pp_size=1,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        enable_custom_mem_pool=False,
        max_transfer_batch_indices=0,
    )
    return manager


@pytest.mark.parametrize("seals", [False, True], ids=["records", "records and seals"])
@pytest.mark.parametrize("how", ["alike", "no records", "more heads", "draft model"])
def test_every_copy_lands_in_the_entry_that_it_is_of(how, seals, monkeypatch):
    """SGLang's own arithmetic over lists with records in them, for peers of every kind."""
    import numpy as np
    from sglang.srt.disaggregation.mooncake import conn

    from kv_canary.engines.sglang import transfer_lists

    # What guards the manager stays for good, so it is put on here, and taken off behind the test.
    for name in ("send_kvcache", "send_kvcache_slice", "maybe_send_extra", "_validate_peer_state_layout"):
        monkeypatch.setattr(conn.MooncakeKVManager, name, getattr(conn.MooncakeKVManager, name))
    monkeypatch.setattr(conn, "get_memory", lambda: SimpleNamespace(enable_unified_memory=False))
    page = 4
    mine, args = _lists_of(_pool(page_size=page), page_size=page, seals=seals)
    theirs, their_args = _lists_of(_pool(page_size=page), page_size=page, seals=seals)
    ours = 2 if seals else 1
    bare = transfer_lists._without(theirs, _Manager(their_args)).kv_args
    there = their_args if how == "alike" else bare
    targets, item_lens = list(there.kv_data_ptrs), list(there.kv_item_lens)
    if how == "draft model":
        # One layer more: K and V as long as the target's. Nothing of it is sent.
        targets, item_lens = [*targets, 1 << 50, 2 << 50], [*item_lens, item_lens[0], item_lens[0]]
    heads = 2 if how == "more heads" else 1
    peer = SimpleNamespace(dst_kv_item_lens=item_lens, dst_state_item_lens=[], dst_attn_tp_size=heads)
    transfer_lists._leave_out_for_others(mine)
    manager = _sender(args, peer)
    pages, places = np.array([2, 5], dtype=np.int32), np.array([7, 3], dtype=np.int32)
    if how == "more heads":
        # The peer has one of two heads, so half of each token.
        manager.send_kvcache_slice("peer", pages, targets, places, 0, 2, item_lens[0] // 2, _Now())
    else:
        manager.send_kvcache("peer", pages, targets, places, _Now())
    copies = manager.engine.copies
    sent = {args.kv_data_ptrs.index(_entry_of(args, source)) for source, _, _ in copies}
    # HEAD's records, three layers of K and of V, TAIL's records; to a peer without records, what is between them.
    assert sent == set(range(6 + 2 * ours) if how == "alike" else range(ours, 6 + ours))
    for source, target, length in copies:
        entry = args.kv_data_ptrs.index(_entry_of(args, source))
        page_bytes = args.kv_item_lens[entry]
        row = (source - args.kv_data_ptrs[entry]) // page_bytes
        place = dict(zip(pages.tolist(), places.tolist(), strict=True))[row]
        there_entry = entry if how == "alike" else entry - ours
        there_bytes = item_lens[there_entry] // heads
        assert there_bytes * place <= target - targets[there_entry] < there_bytes * (place + 1)
        assert length <= there_bytes


def _entry_of(args: Any, address: int) -> int:
    [entry] = [
        start
        for start, length in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True)
        if start <= address < start + length
    ]
    return int(entry)


def test_records_are_taken_out_of_a_list_with_a_draft_model_in_it():
    from kv_canary.engines.sglang import transfer_lists

    lists, args = _lists_of(_pool(), page_size=4)
    draft_lists, draft = _lists_of(_pool(layers=1), page_size=4)
    both = transfer_lists.Lists(
        layout="here", records=lists.records + draft_lists.records, groups=frozenset({"full", "draft"})
    )
    target_entries, draft_entries = len(args.kv_data_ptrs) - 2, len(draft.kv_data_ptrs) - 2
    for name in ("kv_data_ptrs", "kv_data_lens", "kv_item_lens"):
        setattr(args, name, getattr(args, name) + getattr(draft, name))
    args.num_draft_entries = len(draft.kv_data_ptrs)
    manager = _Manager(args)
    bare = transfer_lists._without(both, manager).kv_args
    assert bare.num_draft_entries == draft_entries == 2
    assert len(bare.kv_data_ptrs) == len(bare.kv_item_lens) == target_entries + draft_entries
    assert not {r.address for r in both.records} & set(bare.kv_data_ptrs)
    assert args.num_draft_entries == 4
    # There is nothing left to take out.
    bare_manager = _Manager(bare)
    assert transfer_lists._without(both, bare_manager) is bare_manager


@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("disaggregation_transfer_backend", "mori", "mori"),
        ("pp_size", 2, "pipeline"),
        ("disaggregation_enable_kv_checksum", True, "checksums"),
        ("disaggregation_decode_host_receive_threshold", 0.0, "host memory"),
    ],
)
def test_where_records_cannot_cross_it_is_said_why(setting, value, part):
    from kv_canary.engines.sglang import pools, transfer_lists

    args = SimpleNamespace(
        disaggregation_transfer_backend="mooncake",
        pp_size=1,
        disaggregation_enable_kv_checksum=False,
        disaggregation_decode_host_receive_threshold=1.0,
    )
    pool = _pool()
    groups = pools.attach(pool, name="", read_bytes=16)
    for group in groups:
        group.pool.keep_head_records()
    scheduler = SimpleNamespace(server_args=args, page_size=4)
    assert transfer_lists.why_not(scheduler, [(pool, groups)]) == ""
    setattr(args, setting, value)
    assert part in transfer_lists.why_not(scheduler, [(pool, groups)])
