"""Giant tensors: addresses past 2**31 elements are drawn, guarded, compared and carried without their gaps."""

from __future__ import annotations

import fcntl
import importlib
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.cases.casefile import case_file
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.cases.packing import GIANT_BYTES, is_giant, pack, sparse_storage, unpack
from kv_canary.difftest.console import call_table
from kv_canary.difftest.memory import GUARD_BYTES, guarded, room_for
from kv_canary.difftest.runner import check_case
from kv_canary.specs import get_spec
from kv_canary.specs.interface import KernelSpec, Leaf, TensorSpec

FAR = 1 << 31

TABLES = KernelSpec(
    name="tables_for_memory_tests",
    doc="Take a table of each role.",
    arguments={
        role: TensorSpec(dtype=torch.int64, shape=("n", "m"), role=role, row_strided=True)
        for role in ("in", "out", "inout")
    },
)


def apart(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """A copy of `tensor` whose rows lie `stride` elements apart, in sparse storage."""
    item = tensor.element_size()
    elements = (tensor.shape[0] - 1) * stride + tensor[0].numel()
    view = sparse_storage(elements * item).view(tensor.dtype).as_strided(tensor.shape, (stride, *tensor[0].stride()))
    view.copy_(tensor)
    return view


def table(stride: int = FAR) -> torch.Tensor:
    return apart(torch.arange(1, 16).view(5, 3), stride)


def flip(tensor: torch.Tensor, byte: int) -> None:
    """Flip a bit of the byte that lies `byte` bytes after the tensor's first."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    whole[tensor.data_ptr() - whole.data_ptr() + byte] ^= 1


def test_sparse_storage_is_zero_and_writable_from_end_to_end() -> None:
    storage = sparse_storage(1 << 40)
    assert (storage.dtype, storage.shape) == (torch.uint8, (1 << 40,))
    for index in (0, 1 << 39, (1 << 40) - 1):
        assert storage[index] == 0
        storage[index] = 7
        assert storage[index] == 7


def test_sparse_storage_may_be_empty() -> None:
    assert sparse_storage(0).shape == (0,)


def test_sparse_storage_of_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="sparse storage: num_bytes must be at least 0, got -1"):
        sparse_storage(-1)


def test_sparse_storage_past_the_address_space_is_refused() -> None:
    with pytest.raises(RuntimeError, match="sparse storage: platform must be able to reserve"):
        sparse_storage(1 << 62)


def test_sparse_storage_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.cases.packing._MAP_NORESERVE", 0)
    with pytest.raises(RuntimeError, match="sparse storage: platform must be one with MAP_NORESERVE"):
        sparse_storage(8)


@pytest.mark.parametrize(
    ("shape", "stride", "giant"),
    [
        ((2, 4), (GIANT_BYTES, 1), True),
        ((2, 4), (GIANT_BYTES - 4, 1), False),
        ((2, GIANT_BYTES), (GIANT_BYTES, 1), False),
        ((2, GIANT_BYTES), (GIANT_BYTES + 1, 1), True),
        ((2,), (GIANT_BYTES,), True),
        ((2, 2, 3), (GIANT_BYTES, 3, 1), True),
        ((2, 2, 3), (GIANT_BYTES, 4, 1), False),
        ((0, 4), (GIANT_BYTES, 1), False),
        ((1, 4), (GIANT_BYTES, 1), False),
        ((), (), False),
    ],
)
def test_giant_is_told_by_the_span_and_the_gaps(shape: tuple[int, ...], stride: tuple[int, ...], giant: bool) -> None:
    assert is_giant(torch.empty_strided(shape, stride, dtype=torch.uint8, device="meta")) is giant


def test_giant_copies_hold_the_rows_and_keep_the_layout(device: torch.device) -> None:
    # Two rows: on a GPU the whole span is allocated.
    given_ = {role: table(stride=1 << 24) for role in ("in", "out", "inout")}
    copies, spans = guarded(TABLES, given_, device=device, fill=1)
    _, again = guarded(TABLES, given_, device=device, fill=2)
    for role, span, other in zip(given_, spans, again, strict=True):
        assert copies[role].stride() == given_[role].stride()
        assert copies[role].data_ptr() % 16 == given_[role].data_ptr() % 16
        assert span.data.shape == (given_[role].numel() * 8,)
        assert torch.equal(span.data, span.data_before)
        assert span.guards_intact()
        # What a launch leaves untouched is alike in all of them, poisoned outputs too.
        assert torch.equal(span.data, other.data)
        assert torch.equal(copies[role].cpu(), given_[role]) is (role != "out")


def test_data_of_a_giant_copy_is_what_its_rows_hold_now(device: torch.device) -> None:
    copies, (span, *_) = guarded(
        TABLES, {role: table(stride=1 << 24) for role in ("in", "out", "inout")}, device=device, fill=1
    )
    copies["in"][4, 2] = -1
    before, after = (data.view(torch.int64).tolist() for data in (span.data_before, span.data))
    assert (before, after) == (list(range(1, 16)), [*range(1, 15), -1])
    assert span.guards_intact()


ROW_BYTES = 24


@pytest.mark.parametrize("row", [0, 1, 4])
@pytest.mark.parametrize("byte", [-GUARD_BYTES, -1, ROW_BYTES, ROW_BYTES + GUARD_BYTES - 1])
@pytest.mark.parametrize("role", ["in", "out", "inout"])
def test_a_byte_written_beside_any_row_is_found(role: str, row: int, byte: int) -> None:
    copies, spans = guarded(TABLES, {r: table() for r in ("in", "out", "inout")}, device="cpu", fill=1)
    flip(copies[role][row], byte)
    assert [span.leaf.path for span in spans if not span.guards_intact()] == [role]
    assert all(torch.equal(span.data, span.data_before) for span in spans)


@pytest.mark.parametrize("gap", [1, 40, 2 * GUARD_BYTES // 8 - 1, 2 * GUARD_BYTES // 8 + 1])
def test_a_narrow_gap_is_guarded_as_far_as_it_goes(gap: int) -> None:
    rows, width = 3, GIANT_BYTES // 16
    wide = apart(torch.zeros(rows, width, dtype=torch.int64), width + gap)
    assert is_giant(wide)
    small = torch.zeros(1, 1, dtype=torch.int64)
    copies, spans = guarded(TABLES, {"in": wide, "out": small, "inout": small}, device="cpu", fill=1)
    assert torch.equal(copies["in"], wide)
    for byte in (width * 8, (width + gap) * 8 - 1):
        flip(copies["in"][1], byte)
        assert not spans[0].guards_intact()
        flip(copies["in"][1], byte)
        assert spans[0].guards_intact()


def test_guards_differ_from_run_to_run() -> None:
    given_ = {role: table() for role in ("in", "out", "inout")}
    beside = []
    for fill in (1, 2):
        copies, _ = guarded(TABLES, given_, device="cpu", fill=fill)
        beside.append(copies["in"].as_strided((5, 2), (FAR, 1), copies["in"].storage_offset() + 3).clone())
    assert not torch.equal(*beside)


@pytest.mark.parametrize("fill", [1, 2])
@pytest.mark.parametrize("stride", [4, FAR])
def test_what_is_copied_from_beside_one_tensor_to_beside_another_is_found(fill: int, stride: int) -> None:
    copies, spans = guarded(TABLES, {r: table(stride=stride) for r in ("in", "out", "inout")}, device="cpu", fill=fill)
    behind = [copies[r].as_strided((1,), (1,), copies[r].storage_offset() + 4 * stride + 3) for r in ("in", "out")]
    behind[1].copy_(behind[0])
    assert [span.leaf.path for span in spans if not span.guards_intact()] == ["out"]


LAYOUTS = {
    "contiguous": torch.arange(12).view(3, 4),
    "scalar": torch.tensor(7),
    "strided": torch.arange(12).view(3, 4)[:, :2],
    "transposed": torch.arange(12).view(3, 4).t(),
    "empty": torch.empty_strided((0, 4), (9, 1), dtype=torch.int32),
    "empty rows": torch.zeros(3, 0),
    "unaligned bytes": torch.arange(40, dtype=torch.uint8)[5:].as_strided((3, 4), (9, 1)),
    "unaligned words": torch.arange(9, dtype=torch.int32)[1:],
    "bool": torch.tensor([True, False, True]),
    "half": torch.randn(4, 5).to(torch.bfloat16),
    "eight bits": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 8),
    "mostly zero": torch.zeros(100, 3).index_fill_(0, torch.tensor([4, 77]), -0.0),
    "mostly zero, strided": torch.eye(50, 60, dtype=torch.int16)[:, ::2],
    "all zero": torch.zeros(4, 3),
    "giant": table(),
    "giant, all zero": apart(torch.zeros(4, 3), FAR),
    "giant, unaligned": apart(torch.arange(2, 18, dtype=torch.uint8).view(4, 4), 2 * FAR + 1)[1:],
    "giant, three axes": apart(torch.randn(3, 2, 5), FAR),
    "giant, one axis": apart(torch.tensor([1, 0, 3]), FAR),
    "giant, mostly zero": apart(torch.zeros(999, 4, dtype=torch.int64).index_fill_(0, torch.tensor([998]), 3), FAR),
}


def content(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_pack_and_unpack_keep_content_and_layout(name: str) -> None:
    tensor = LAYOUTS[name]
    again = unpack(pickle.loads(pickle.dumps(pack(tensor))))
    assert (again.shape, again.stride(), again.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(content(again), content(tensor))
    if tensor.numel():
        assert again.data_ptr() % 16 == tensor.data_ptr() % 16


def test_gaps_are_not_packed() -> None:
    wide = torch.full((3, 5), 7)
    again = unpack(pack(wide[:, :2]))
    assert again.as_strided((2, 5), (5, 1)).tolist() == [[7, 7, 0, 0, 0], [7, 7, 0, 0, 0]]


@pytest.mark.parametrize("stride", [4, 1 << 24])
def test_zero_rows_are_not_packed(stride: int) -> None:
    many = 5000
    tensor = apart(torch.zeros(many, 4, dtype=torch.int64), stride)
    tensor[17], tensor[many - 1, 2] = 1, 5
    assert len(pickle.dumps(pack(tensor))) < 2000
    again = unpack(pack(tensor))
    assert again.nonzero().tolist() == [[17, 0], [17, 1], [17, 2], [17, 3], [many - 1, 2]]
    assert again[many - 1, 2] == 5


def test_packed_tensors_are_saved_without_their_storage_and_loaded_as_plain_values(tmp_path: Path) -> None:
    big = torch.arange(1 << 20)
    torch.save(pack(big[5:9]), tmp_path / "packed")
    assert (tmp_path / "packed").stat().st_size < 10_000
    assert unpack(torch.load(tmp_path / "packed", weights_only=True)).tolist() == [5, 6, 7, 8]


def past(rows: int, multiple: int = 1) -> int:
    """A row stride by which the last of `rows` rows lies past 2**31 elements, with a span that fits on a GPU."""
    return -(-(FAR + (1 << 20)) // (rows - 1) // multiple) * multiple


def spread(spec: KernelSpec, arguments: dict[str, Any], prefix: str, *, multiple: int) -> dict[str, Any]:
    """`arguments` with every tensor whose path begins with `prefix` laid out with giant strides."""

    def lay_out(leaf: Leaf) -> torch.Tensor:
        if not leaf.path.startswith(prefix):
            return leaf.tensor
        assume(len(leaf.tensor) > 1 and leaf.tensor.numel())
        return apart(leaf.tensor, past(len(leaf.tensor), multiple))

    return spec.map_tensors(spec.bind(arguments), lay_out)


@pytest.mark.parametrize(
    ("op", "prefix", "multiple"),
    [
        ("verify", "endpoint.records", 4),
        ("verify_prefixes", "endpoint.records", 4),
        ("verify_resolved", "endpoint.records", 4),
        ("write", "endpoint.records", 4),
        ("move", "records", 4),
        ("retire", "records", 4),
        ("plan", "req_to_token", 1),
        ("plan", "expected_tokens", 1),
        ("verify_prefixes", "req_to_token", 1),
        ("verify_prefixes", "expected_tokens", 1),
        ("verify_resolved", "expected_tokens", 1),
        ("scatter_token_ids", "pool", 1),
    ],
)
def test_backends_agree_on_giant_tables(op: str, prefix: str, multiple: int, device: torch.device) -> None:
    spec = get_spec(op)

    @settings(max_examples=3, database=None, suppress_health_check=list(HealthCheck))
    @given(arguments=importlib.import_module(f"kv_canary.difftest.strategies.{op}").cases())
    def check(arguments: dict[str, Any]) -> None:
        assume(arguments.get(prefix.split(".")[0]) is not None)
        giant = spread(spec, arguments, prefix, multiple=multiple)
        assert any(is_giant(leaf.tensor) for leaf in spec.leaves(giant))
        check_case(spec, giant, device=device)

    check()


def source(layers: int, *, page_size: int, bytes_per_token: int, rows: int, stride: int) -> kc.KvSource:
    """A source of random bytes with rows `stride` bytes apart."""
    each = torch.randint(0, 256, (rows, page_size * bytes_per_token), dtype=torch.uint8)
    return kc.KvSource(
        layers=tuple(apart(each + i, stride) for i in range(layers)),
        page_size=page_size,
        bytes_per_token=bytes_per_token,
    )


@pytest.mark.parametrize("bytes_per_token", [73, 128])
@pytest.mark.parametrize("op", ["verify", "write"])
def test_backends_agree_on_giant_sources(op: str, bytes_per_token: int, device: torch.device) -> None:
    spec, num_slots, page_size = get_spec(op), 33, 16
    stride = FAR + (bytes_per_token if bytes_per_token % 8 else 64)

    @settings(max_examples=3, database=None, suppress_health_check=list(HealthCheck))
    @given(seed=st.integers(0, 2**31), positions=st.permutations(range(num_slots - 1)))
    def check(seed: int, positions: list[int]) -> None:
        torch.manual_seed(seed)
        endpoint = kc.Endpoint(
            tag=0,
            records=torch.zeros(num_slots, 4, dtype=torch.int64),
            **{
                f"{half}_source": source(
                    2, page_size=page_size, bytes_per_token=bytes_per_token, rows=3, stride=stride + i * 128
                )
                for i, half in enumerate("kv")
            },
        )
        write = {
            "write_plan": kc.WritePlan(
                rows=torch.tensor([1]),
                owners=torch.tensor([3]),
                offsets=torch.tensor([0, len(positions)]),
                prefix_lens=torch.tensor([0]),
                seed_slots=torch.tensor([-1]),
                num_requests=torch.ones(1, dtype=torch.int32),
            ),
            "input_ids": torch.arange(len(positions)),
            "positions": torch.tensor(positions),
            "out_slots": torch.arange(1, num_slots),
            "endpoint": endpoint,
            "tails": torch.tensor([0, 9]),
            "step": torch.tensor([1]),
            "check_positions": torch.zeros(1, dtype=torch.int32),
            "violations": kc.ViolationLog.allocate(ring_cap=64),
            "counters": torch.zeros(6, 2, dtype=torch.int64),
        }
        if op == "write":
            check_case(spec, write, device=device)
            return
        kc.ops.write(**write)
        # One wrong byte in the furthest row: both must see it.
        endpoint.k_source.layers[0][2] ^= 1
        entries = len(positions)
        plan = kc.VerifyPlan(
            slots=torch.arange(1, num_slots),
            prev_slots=torch.full((entries,), -2),
            positions=torch.tensor(positions),
            tokens=torch.arange(entries),
            rows=torch.ones(entries, dtype=torch.int32),
            num_valid=torch.tensor([entries], dtype=torch.int32),
            num_requested=torch.tensor([entries]),
        )
        verify = {
            "verify_plan": plan,
            "endpoint": endpoint,
            "step": torch.tensor([2]),
            "violations": kc.ViolationLog.allocate(ring_cap=64),
            "counters": torch.zeros(6, 2, dtype=torch.int64),
        }
        check_case(spec, verify, device=device)
        kc.ops.verify(**verify, backend="reference")
        assert int(verify["violations"].count) == int(positions[num_slots - 2] % 2 == 0)

    check()


# Row r of the table goes to the sum of row r; ADDRESS is the type in which the row's place is computed.
GATHER = """
import sys

import torch
import triton
import triton.language as tl

import kv_canary as kc
from kv_canary.cases.packing import sparse_storage
from kv_canary.cases.comparison import Mismatch
from kv_canary.difftest.runner import check_case
from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="first_words_for_memory_tests",
    doc="Take the first word of every row.",
    arguments={
        "table": TensorSpec(dtype=torch.int64, shape=("n", 4), row_strided=True),
        "words": TensorSpec(dtype=torch.int64, shape=("n",), role="out"),
    },
)


@triton.jit
def gather(table_ptr, stride, words_ptr, ADDRESS: tl.constexpr):
    row = tl.program_id(0)
    place = row.to(ADDRESS) * stride.to(ADDRESS)
    tl.store(words_ptr + row, tl.load(table_ptr + place))


@kc.register(SPEC, backend="reference")
def reference(*, table, words):
    words.copy_(table[:, 0])


@kc.register(SPEC, backend="triton")
def kernel(*, table, words):
    address = {"int32": tl.int32, "int64": tl.int64}[sys.argv[1]]
    gather[(len(words),)](table, table.stride(0), words, ADDRESS=address)


stride = (1 << 31) + 64
table = sparse_storage((stride + 4) * 8).view(torch.int64).as_strided((2, 4), (stride, 1))
table.copy_(torch.arange(1, 9).view(2, 4))
try:
    check_case(SPEC, {"table": table, "words": torch.zeros(2, dtype=torch.int64)}, device=sys.argv[2])
except Mismatch as mismatch:
    print(mismatch)
    sys.exit(3)
"""


@pytest.mark.parametrize("address", ["int64", "int32"])
def test_an_address_computed_in_32_bits_is_caught(address: str, tmp_path: Path, device: torch.device) -> None:
    script = tmp_path / "gather.py"
    script.write_text(GATHER)
    done = subprocess.run(
        [sys.executable, str(script), address, str(device)],
        env=dict(os.environ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    if address == "int64":
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        # Such an address lies outside every allocation, or in somebody else's: a crash, or a wrong word.
        crashed = done.returncode < 0 or "illegal memory access" in done.stderr
        assert crashed or done.returncode == 3, done.stdout + done.stderr


@pytest.mark.parametrize(("stride", "device", "waits"), [(FAR, "cuda", True), (FAR, "cpu", False), (4, "cuda", False)])
def test_giant_calls_take_turns_on_a_gpu(
    stride: int, device: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    emptied: list[bool] = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(held()))

    def held() -> bool:
        """Whether another process would have to wait."""
        for path in tmp_path.glob("*/*.lock"):
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return True
        return False

    call = {role: table(stride) for role in ("in", "out", "inout")}

    def fail() -> None:
        with room_for(TABLES, call, device=device):
            assert held() == waits
            raise RuntimeError("the kernel failed")

    with pytest.raises(RuntimeError, match="kernel"):
        fail()
    assert not held()
    assert len(list(tmp_path.glob("*/*.lock"))) == waits
    # Memory is given back before the next one's turn.
    assert emptied == [True] * waits


def test_rows_far_apart_are_shown_as_such() -> None:
    call = {"slots": torch.tensor([3]), "owner": torch.tensor([1]), "step": torch.tensor([2])}
    call["records"] = (apart(torch.zeros(5, 4, dtype=torch.int64), FAR), torch.zeros(5, 4, dtype=torch.int64))
    mismatch = Mismatch(Outcome.CRASHED, op="retire", backend="triton")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(call_table(case_file(get_spec("retire"), call, mismatch)))
    shown = console.export_text()
    assert f"int64[5, 4], a row every {FAR} " in shown
    assert shown.count("a row every") == 1


def test_scratch_that_a_call_gives_is_kept_in_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What scratch holds before must not matter: a call may say what it holds that could."""
    from kv_canary.difftest import runner
    from kv_canary.difftest.strategies.large import large_cases

    held: list[Any] = []
    write = runner.implementation("write", "triton")

    def seen(**arguments: Any) -> None:
        held.append(arguments["slot_marks"].clone())
        write(**arguments)

    monkeypatch.setattr(
        runner, "implementation", lambda op, backend: seen if backend == "triton" else implementation(op, backend)
    )
    spec = get_spec("write")
    cases = list(large_cases("write", torch.device("cpu")))
    given = next(case for case in cases if "slot_marks" in case)
    for case, runs in ((given, 3), ({**given, "slot_marks": None}, 2)):
        held.clear()
        check_case(spec, case)
        assert len(held) == runs
        kept = [torch.equal(marks, given["slot_marks"]) for marks in held]
        assert sum(kept) == runs - 2, case["step"]
