"""`kv-canary bench` measures what it says it does: shapes, bytes, checks, turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.bench.speed import checking, run, timing
from kv_canary.bench.speed.cases import CASES, Case, Request, choose, decode, quick
from kv_canary.bench.speed.ceilings import gather_ms
from kv_canary.bench.speed.checking import CheckFailed, check, expect_launches
from kv_canary.bench.speed.state import State, build, pool_bytes, random_bytes
from kv_canary.bench.speed.timing import Clock, launchable
from kv_canary.bench.speed.traces import trace_cases
from kv_canary.bench.speed.workload import Traffic, Work, work_of

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU")
BY_NAME = {case.name: case for case in CASES}
DECODE = quick(BY_NAME["decode 256x4096"])


def made(case: Case, *, backend: str = "reference") -> tuple[State, Work]:
    memory = random_bytes(pool_bytes(case, case.most_layers), CPU)
    state = build(case, memory, backend=backend)
    return state, work_of(state)


def settings(**options: Any) -> run.Settings:
    return run.Settings(
        **{"device": "cpu", "backend": "reference", "rounds": 2, "replays": 1, "shrink": True} | options
    )


@pytest.mark.parametrize("name", BY_NAME)
def test_every_case_passes_its_checks(name: str) -> None:
    case = quick(BY_NAME[name])
    state, work = made(case)
    check(state, work)
    assert work.whole.traffic.necessary > 0
    assert (work.entries is not None) == (case.does in ("step", "sweep"))


@needs_interpreter
@pytest.mark.parametrize(
    "name",
    ["decode 256x4096, pages of 16", "SWA 128", "write 8192x2KiB, all bytes", "scatter 256x4096"]
    + ["chain_tails 256x4096", "retire", "move", "sweep 1M slots"],
)
def test_kernels_pass_the_checks(name: str) -> None:
    check(*made(quick(BY_NAME[name]), backend="triton"))


def test_cases_have_the_shapes_that_they_are_named_after() -> None:
    assert len(BY_NAME) == len(CASES)
    shapes = {case.name: (len(case.requests), case.cached, case.new) for case in CASES}
    assert shapes["decode 256x10240"] == (256, 256 * 10240, 256)
    assert shapes["chunk 4096 after 16384"] == (1, 16384, 4096)
    assert shapes["prefill 4x2048"] == (4, 0, 8192)
    write = BY_NAME["write 8192x2KiB, all bytes"]
    assert (write.new, write.row_bytes, write.read_bytes) == (8192, 2048, 2048)
    assert BY_NAME["SWA 128"].window == 127
    assert BY_NAME["decode 256x4096, stride 8"].stride == 8


def test_cases_are_chosen_by_name_pattern_and_group() -> None:
    assert choose([], CASES) == list(CASES)
    assert [c.name for c in choose(["move", "prefill*", "prefill 1x8192"], CASES)] == [
        "move",
        "prefill 1x8192",
        "prefill 4x2048",
    ]
    assert {c.stride for c in choose(["stride"], CASES)} == {2, 4, 8, 16, 32}
    with pytest.raises(ValueError, match="'nope'"):
        choose(["nope"], CASES)


def test_a_state_holds_what_its_case_says() -> None:
    case = Case(name="x", requests=(Request(cached=9, new=2), Request(cached=0, new=5)), page=4, row_bytes=64)
    state, _ = made(case)
    held = [state.table[1, :11], state.table[2, :5]]
    slots = torch.cat(held)
    assert len(slots.unique()) == 16
    # Slots of a page are consecutive, and the page of the padding slot is nobody's.
    assert int(slots.min()) >= 4
    assert held[0][:4].tolist() == list(range(int(held[0][0]), int(held[0][0]) + 4))
    assert state.history.slots.tolist() == held[0][:9].tolist()
    assert state.batch.slots.tolist() == [*held[0][9:].tolist(), *held[1].tolist()]
    assert state.batch.positions.tolist() == [9, 10, 0, 1, 2, 3, 4]
    assert (state.records != 0).any(dim=1).nonzero().view(-1).tolist() == sorted(held[0][:9].tolist())
    assert state.free.numel() == state.num_slots - 4 - 16


def test_a_window_keeps_its_tokens_and_the_one_before() -> None:
    state, work = made(Case(name="x", requests=decode(2, 30), window=9, row_bytes=64))
    assert state.lut is not None
    mapped = state.lut[state.table[1].long()]
    assert (mapped > 0).tolist() == [False] * 20 + [True] * 11
    assert work.entries is not None
    assert work.entries.positions.tolist() == [*range(21, 30)] * 2


def test_requests_share_the_blocks_of_one_name() -> None:
    requests = (Request(cached=9, shared=(7, 8)), Request(cached=8, shared=(7, 9)))
    state, work = made(Case(name="x", requests=requests, block=4, row_bytes=64))
    first, second = state.table[1, :9], state.table[2, :8]
    assert first[:4].tolist() == second[:4].tolist()
    assert not set(first[4:].tolist()) & set(second[4:].tolist())
    assert state.history.tokens[:4].tolist() == state.history.tokens[9:13].tolist()
    assert work.entries is not None
    assert (len(work.entries), work.entries.unique) == (17, 13)
    check(state, work)


def test_bytes_are_those_of_the_definition() -> None:
    # 2 requests x 32 positions: a record, a table entry, 16 bytes of K and 16 of V each; a step of 2 new tokens.
    _, work = made(Case(name="x", requests=decode(2, 32), row_bytes=64))
    parts = {p.name: p.traffic for p in work.parts}
    assert parts["HEAD"] == Traffic(necessary=64 * (32 + 4 + 32), sectors=64 + 8 + 128 + 16)
    assert parts["TAIL"] == Traffic(necessary=64 * 32, sectors=64 + 16)
    # Inputs, tails, seeds; the old record, the new one, and the covered bytes.
    assert parts["write"] == Traffic(necessary=48 + 16 + 64 + 2 * (64 + 32), sectors=2 + 1 + 2 + 2 * 4)
    assert work.whole.traffic == parts["HEAD"] + parts["write"] + parts["TAIL"]


def test_a_shared_slot_is_one_sector_however_many_read_it() -> None:
    shared = Case(name="x", requests=(Request(cached=8, shared=(1, 2)),) * 3, block=4, row_bytes=64)
    _, work = made(shared)
    tail = next(p.traffic for p in work.parts if p.name == "TAIL")
    assert tail == Traffic(necessary=24 * 32, sectors=8 + 6)


def test_a_stride_reads_the_records_before_its_blocks_too() -> None:
    case = Case(name="x", requests=decode(1, 64), stride=2, row_bytes=64)
    _, work = made(case)
    assert work.entries is not None
    # Step 7: blocks 1 and 3, the last of which holds the last position.
    assert work.entries.positions.tolist() == [*range(16, 32), *range(48, 64)]
    assert work.entries.apart == 2


@pytest.mark.parametrize("name", ["decode 256x4096", "sweep 1M slots"])
def test_a_damaged_pool_is_refused(name: str) -> None:
    state, work = made(quick(BY_NAME[name]))
    state.records[state.history.slots[3], 0] ^= 1
    with pytest.raises(CheckFailed, match="a healthy pool gave"):
        check(state, work)


def test_a_result_that_is_not_the_references_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checking.implementation

    def other(op: str, backend: str) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            real(op, backend)(**arguments)
            if op == "write":
                arguments["endpoint"].records[1, 2] += 1

        return launch

    monkeypatch.setattr(checking, "implementation", other)
    with pytest.raises(CheckFailed, match=r"write: endpoint\.records is not the reference's"):
        check(*made(DECODE))


@pytest.mark.parametrize(("damage", "what"), [("_changed_byte", "byte of K"), ("_changed_chain", "chain")])
def test_a_verification_that_sees_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, damage: str, what: str) -> None:
    monkeypatch.setattr(checking, damage, lambda *_: nullcontext())
    with pytest.raises(CheckFailed, match=f"{what} changed"):
        check(*made(DECODE))


def test_the_checks_put_back_what_they_change() -> None:
    state, work = made(DECODE)
    before = [x.clone() for x in (*state.k_source.layers, *state.v_source.layers)]
    check(state, work)
    assert all(map(torch.equal, before, (*state.k_source.layers, *state.v_source.layers)))
    assert int(state.violations.count) == 0
    work.whole()
    assert int(state.violations.count) == 0


def test_launches_that_did_nothing_are_refused() -> None:
    state, work = made(DECODE)
    work.whole()
    with expect_launches(state, work, [("step", 2), ("TAIL", 1)]):
        for launch in (work.whole, work.whole, work.parts[2]):
            launch()
    with (
        pytest.raises(CheckFailed, match="counted"),
        expect_launches(state, work, [("step", 2)]),
    ):
        work.whole()


def test_things_are_timed_by_turns() -> None:
    order: list[str] = []
    clock = Clock(CPU, rounds=3, replays=2)
    times = clock.by_turns({name: lambda name=name: order.append(name) for name in ("ours", "peer")})
    assert order[4:] == ["ours", "ours", "peer", "peer"] * 3
    assert all(0 < t.p10_ms <= t.ms <= t.p90_ms for t in times.values())


def test_the_median_is_that_of_the_rounds() -> None:
    summary = timing._summary([[1.0, 1.0, 9.0], [2.0, 2.0, 2.0], [7.0, 7.0, 7.0]])
    assert summary.ms == 2.0
    assert (summary.p10_ms, summary.p90_ms) == pytest.approx((1.0, 7.4))


@needs_interpreter
def test_kernels_are_counted_in_the_interpreter() -> None:
    state, work = made(DECODE, backend="triton")
    head, tail = work.parts[0], work.parts[2]
    assert launchable(head, device=state.device, graph=False).launches == 2
    assert launchable(tail, device=state.device, graph=False).launches == 1


@needs_interpreter
def test_the_gather_reads_the_sectors_of_the_entries() -> None:
    case = DECODE
    memory = random_bytes(pool_bytes(case, case.most_layers), CPU)
    state = build(case, memory, backend="triton")
    entries = work_of(state).entries
    assert entries is not None
    for source in (state.k_source, state.v_source):
        from kv_canary.bench.speed.ceilings import _sectors

        for i, at in enumerate((_sectors(state, source.layers, entries, memory).long() * 32).tolist()):
            layer, start, _ = source.coverage(int(entries.positions[i]))
            covered = source.layers[layer][int(entries.slots[i]), start : start + 16]
            assert torch.equal(covered, memory[at + start % 32 : at + start % 32 + 16])
    assert gather_ms(Clock(CPU, rounds=1, replays=1), state, entries, memory) > 0


def test_a_run_says_all_that_it_measured() -> None:
    names = ["decode 8x512", "scatter 256x4096"]
    seen: list[str] = []
    result = run.run(
        choose(names, CASES), run.prepare(settings(commit="abc")), after_case=lambda name, _: seen.append(name)
    )
    assert seen == names
    assert json.loads(json.dumps(result)) == result
    assert (result["commit"], result["backend"], result["mode"]) == ("abc", "reference", "eager")
    assert not result["failed"] + result["skipped"]
    step, scatter = result["cases"]
    assert {"case", "ours_ms", "peer_ms", "ratio", "ours_p10_ms", "ours_p90_ms", "launches"} <= set(step)
    assert [p["part"] for p in step["parts"]] == ["HEAD", "write", "TAIL", "plan", "verify"]
    assert scatter["necessary_bytes"] == 12 * 33
    assert scatter["share_necessary"] == pytest.approx(
        scatter["necessary_bytes"] / scatter["ours_ms"] / (result["copy_tb_s"] * 1e9), rel=1e-2
    )


def test_a_case_that_fails_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checking.check

    def failing(state: State, work: Work) -> None:
        if state.case.name == "move":
            raise CheckFailed("move: broken")
        real(state, work)

    monkeypatch.setattr(checking, "check", failing)
    result = run.run(choose(["move", "retire"], CASES), run.prepare(settings()))
    assert result["failed"] == [{"case": "move", "why": "move: broken"}]
    assert [row["case"] for row in result["cases"]] == ["retire"]


def test_a_pool_that_does_not_fit_is_left_out_with_a_word() -> None:
    result = run.run(choose(["decode 8x512"], CASES), run.prepare(settings(memory=100)))
    assert result["cases"] == []
    assert result["skipped"][0]["case"] == "decode 8x512"


def test_fewer_layers_are_taken_where_memory_is_short() -> None:
    memory = random_bytes(pool_bytes(DECODE, 1), CPU)
    assert build(DECODE, memory, backend="reference").layers == 1
    with pytest.raises(ValueError, match="a layer"):
        build(DECODE, memory[:-8], backend="reference")


def test_the_ratio_is_the_peers_time_over_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    violations = torch.zeros(1, dtype=torch.int32)
    work = SimpleNamespace(launch=lambda: launched.append(1), compared="", violations=violations)
    stand_in = SimpleNamespace(facts=lambda: {"name": "x"}, work=lambda state: work)
    monkeypatch.setattr(run.peer, "Peer", lambda device: stand_in)
    (row,) = run.run(choose(["decode 8x512"], CASES), run.prepare(settings(peer="sglang")))["cases"]
    assert row["ratio"] == pytest.approx(row["peer_ms"] / row["ours_ms"], rel=1e-2)
    assert launched
    violations[0] = 1
    result = run.run(choose(["decode 8x512"], CASES), run.prepare(settings(peer="sglang")))
    assert "the peer reports 1 violations" in result["failed"][0]["why"]


def test_a_peer_that_breaks_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(state: State) -> None:
        raise RuntimeError("too many requests")

    monkeypatch.setattr(run.peer, "Peer", lambda device: SimpleNamespace(facts=lambda: {"name": "x"}, work=work))
    (row,) = run.run(choose(["decode 8x512"], CASES), run.prepare(settings(peer="sglang")))["cases"]
    assert (row["peer_ms"], row["peer_failed"]) == (None, "RuntimeError: too many requests")


def test_a_mooncake_trace_becomes_a_step(tmp_path: Path) -> None:
    rows = [(1100, 30, [1, 2, 3]), (600, 4, [1, 9]), (1500, 8, [1, 2, 7]), (700, 6, [5, 6])]
    lines = [json.dumps({"input_length": i, "output_length": o, "hash_ids": h}) for i, o, h in rows]
    (tmp_path / "some_trace.jsonl").write_text("\n".join(lines))
    (tmp_path / "README.md").write_text("not a trace")
    (case,) = trace_cases(tmp_path)
    assert (case.name, case.group, case.block) == ("trace some", "traces", 512)
    assert case.requests == (
        Request(cached=1115, shared=(1, 2)),
        Request(cached=602, shared=(1,)),
        # Arriving: two of its blocks are there; the other one has none.
        Request(cached=1024, new=1504 - 1024, shared=(1, 2)),
        Request(cached=0, new=703),
    )
    check(*made(quick(case)))


def test_an_azure_trace_becomes_a_step(tmp_path: Path) -> None:
    (tmp_path / "AzureLLMInferenceTrace_code.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"x,{n},10\n" for n in (100, 200, 300, 9000))
    )
    (case,) = trace_cases(tmp_path)
    assert case.name == "trace code"
    assert [(r.cached, r.new) for r in case.requests] == [(105, 1), (205, 1), (0, 305), (0, 2048)]


@pytest.mark.parametrize("text", ["a,b\n1,2\n3,4\n", "ContextTokens,GeneratedTokens\nx,y\n", ""])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="--traces must be"):
        trace_cases(tmp_path)
    with pytest.raises(ValueError, match="a folder"):
        trace_cases(tmp_path / "x.csv")


def test_misuse_is_told_before_anything_is_measured() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="CUDA GPU"):
            run.prepare(settings(device="cuda"))
    with pytest.raises(ValueError, match="backend"):
        run.prepare(settings(backend="nope"))


def test_an_endpoint_of_a_windowed_pool_has_a_windowed_tag() -> None:
    state, _ = made(quick(BY_NAME["SWA 128"]))
    assert state.endpoint(kc.Tag.TAIL_FULL, with_bytes=False).tag == kc.Tag.TAIL_SWA
