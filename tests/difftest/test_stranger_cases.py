"""Case files from strangers: none of their code runs unasked, and none takes more memory than it may."""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from kv_canary.cases.casefile import case_file, imports_of, load, save
from kv_canary.cases.container import read_container
from kv_canary.cases.imports import check_imports, replay_line
from kv_canary.cases.packing import MOST_ADDRESSES, pack, packed_bytes
from kv_canary.cli import main
from kv_canary.difftest import corpus
from kv_canary.difftest.replaying import minimize_case, replay_case
from kv_canary.specs import get_spec

# Leaves a file behind where it runs, whoever runs it, and registers nothing.
THEIR_CODE = """
from pathlib import Path
Path(__file__).with_name("it ran").touch()
"""


def retire_call(rows: int = 4) -> dict[str, Any]:
    call: dict[str, Any] = {"slots": torch.tensor([3]), "owner": torch.tensor([1]), "step": torch.tensor([2])}
    call["records"] = (torch.zeros(rows, 4, dtype=torch.int64),)
    return call


def retire_case(folder: Path, *imports: str) -> Path:
    """A case that does not fail, of an op of this package, which names code all the same."""
    path = folder / "theirs.kvcase"
    save(case_file(get_spec("retire"), retire_call(), imports=imports), path)
    return path


def changed(path: Path, **changes: Any) -> Path:
    """Write the file anew, with other fields."""
    torch.save({**torch.load(path, weights_only=True), **changes}, path)
    return path


def difftest(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["difftest", *map(str, arguments)])


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that somebody sent, and the current one: a case, and beside it the code that it names."""
    (tmp_path / "ops.py").write_text(THEIR_CODE)
    (tmp_path / "other.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", [("replay",), ("minimize",), ("corpus", "add")])
@pytest.mark.parametrize(("named", "given"), [("ops.py", ()), ("ops.py", ("--import", "other.py")), ("ops", ())])
def test_a_file_runs_no_code_that_its_user_did_not_name(
    theirs: Path, command: tuple[str, ...], named: str, given: tuple[str, ...]
) -> None:
    file = retire_case(theirs, named)
    done = difftest(*command, file, *given)
    assert done.exit_code == 2, done.output
    assert f"wants {named}: pass --import {named} to run its code" in done.stderr
    assert not (theirs / "it ran").exists()


@pytest.mark.parametrize(
    ("named", "given"), [("ops.py", "ops.py"), ("ops.py", "./sub/../ops.py"), ("{}/ops.py", "ops.py"), ("ops", "ops")]
)
def test_code_that_its_user_names_too_runs(theirs: Path, named: str, given: str) -> None:
    (theirs / "sub").mkdir()
    file = retire_case(theirs, named.format(theirs))
    done = difftest("replay", file, "--import", given)
    assert done.exit_code == 0, done.output
    assert (theirs / "it ran").exists()


def test_what_is_called_from_python_runs_no_code_either(theirs: Path) -> None:
    case = load(retire_case(theirs, "ops.py"))
    for run in (replay_case, minimize_case):
        with pytest.raises(ValueError, match=r"wants ops\.py: pass --import ops\.py"):
            run(case)
    assert not (theirs / "it ran").exists()
    assert replay_case(case, imports=["ops.py"]).mismatch is None
    assert (theirs / "it ran").exists()


def test_every_name_must_be_given_and_is_shown_as_text() -> None:
    check_imports(["a.py", "b"], ["b", "a.py", "c"])
    with pytest.raises(ValueError, match=r"wants b: pass --import b "):
        check_imports(["a.py", "b"], ["a.py"])
    # A module is no file, and a file no module.
    with pytest.raises(ValueError, match=r"wants b\.py"):
        check_imports(["b.py"], ["b"])
    with pytest.raises(ValueError, match="wants 'x") as caught:
        check_imports(["x.py; rm -rf ~\x1b[2J.py", "\0.py"], ["x.py"])
    assert "--import 'x.py; rm -rf ~\\x1b[2J.py'" in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_printed_line_says_what_to_import() -> None:
    line = replay_line(Path("a b.kvcase"), imports=["ops.py", "my.ops"], device="cuda", plant="p", max_gib=2.5)
    told = "--import ops.py --import my.ops --device cuda --max-gib 2.5 --plant p"
    assert line == f"kv-canary difftest replay 'a b.kvcase' {told}"
    assert replay_line(Path("x")) == "kv-canary difftest replay x"


def packed_records(path: Path, **changes: Any) -> dict[str, Any]:
    """The arguments of the file, with its records packed otherwise."""
    arguments = torch.load(path, weights_only=True)["arguments"]
    arguments["records"][0]["tensor"].update(changes)
    return {"arguments": arguments}


def sparse_records(path: Path, rows: int) -> Path:
    """A file of few bytes whose records have so many rows, all of them zero but for one."""
    words = {"shape": (rows, 4), "rows": torch.tensor([rows - 1]), "content": torch.ones(32, dtype=torch.uint8)}
    return changed(path, **packed_records(path, **words))


def test_a_small_file_for_a_large_tensor_is_refused_before_it_is_made(tmp_path: Path) -> None:
    path = sparse_records(retire_case(tmp_path), 10**8)
    assert path.stat().st_size < 6000
    with pytest.raises(ValueError, match=r"must be of tensors of at most 1 GiB \(see --max-gib\), got 2\.981 GiB"):
        load(path)
    done = difftest("replay", path)
    assert done.exit_code == 2
    assert "got 2.981 GiB" in done.stderr
    # Whoever asks for it gets it.
    assert load(path, most_bytes=3 << 30).arguments["records"][0].shape == (10**8, 4)


def test_the_limit_is_of_all_tensors_together_and_can_be_set(tmp_path: Path) -> None:
    path = sparse_records(retire_case(tmp_path), 1 << 16)
    assert difftest("replay", path).exit_code == 0
    assert difftest("replay", path, "--max-gib", "0.0021").exit_code == 0
    refused = difftest("replay", path, "--max-gib", "0.00195")
    assert refused.exit_code == 2
    assert "at most" in refused.stderr
    arguments = torch.load(path, weights_only=True)["arguments"]
    arguments["records"] *= 2
    torch.save({**torch.load(path, weights_only=True), "arguments": arguments}, path)
    assert difftest("minimize", path, "--max-gib", "0.0021").exit_code == 2
    assert difftest("corpus", "add", path, "--max-gib", "0.0021").exit_code == 2


def test_a_giant_tensor_counts_by_what_it_touches(tmp_path: Path) -> None:
    # 20 GiB of addresses, and two pages.
    stride = 5 << 29
    words = {"shape": (2, 4), "stride": (stride, 1), "rows": None, "content": torch.ones(64, dtype=torch.uint8)}
    path = retire_case(tmp_path)
    changed(path, **packed_records(path, **words))
    (records,) = load(path).arguments["records"]
    assert records.stride() == (stride, 1)
    assert records.sum() == 8 * int.from_bytes(bytes([1] * 8), "little")


def test_scratch_that_a_file_lacks_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "move.kvcase"
    moved: dict[str, Any] = {"src": torch.tensor([1]), "dst": torch.tensor([2]), "owner": 1, "step": torch.tensor([2])}
    moved["records"] = (torch.zeros(4, 4, dtype=torch.int64),)
    save(case_file(get_spec("move"), moved), path)
    arguments = torch.load(path, weights_only=True)["arguments"]
    del arguments["staged"]
    changed(path, arguments=arguments)
    assert load(path).arguments["staged"].shape == (1, 4)
    needed = 8 + 8 + 8 + 4 * 32
    assert load(path, most_bytes=needed + 32)
    with pytest.raises(ValueError, match="at most"):
        load(path, most_bytes=needed + 31)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"shape": (4,)}, "1 dimensions has 2 strides"),
        ({"shape": (4, -4)}, "numbers from 0"),
        ({"shape": (4, 4.0)}, "numbers from 0"),
        ({"shape": [4, 4]}, "at most 16 numbers"),
        ({"shape": (4, 10**30)}, "numbers from 0"),
        ({"shape": (5, 4)}, "has 160 bytes of content, not 0"),
        ({"stride": (1, 1)}, "elements in one place"),
        ({"stride": (0, 1)}, "elements in one place"),
        ({"stride": (1 << 43, 1)}, "spans"),
        ({"dtype": "torch.int64"}, "dtype"),
        ({"phase": 16}, "from 0 to 15"),
        ({"phase": True}, "from 0 to 15"),
        ({"rows": torch.tensor([4]), "content": torch.zeros(32, dtype=torch.uint8)}, "rise, from 0 to 3"),
        ({"rows": torch.tensor([-1]), "content": torch.zeros(32, dtype=torch.uint8)}, "rise, from 0 to 3"),
        ({"rows": torch.tensor([2, 2]), "content": torch.zeros(64, dtype=torch.uint8)}, "rise, from 0 to 3"),
        ({"rows": torch.tensor([1]), "content": torch.zeros(31, dtype=torch.uint8)}, "32 bytes of content, not 31"),
        ({"content": torch.zeros(16, dtype=torch.int64)}, "content of a tensor is of bytes"),
        ({"extra": 1}, "a tensor is packed as"),
    ],
)
def test_a_tensor_that_does_not_fit_itself_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    path = retire_case(tmp_path)
    # All of it is zero, so it is packed as no rows at all.
    whole = {"rows": None, "content": torch.zeros(0, dtype=torch.uint8)} if "shape" in changes else {}
    changed(path, **packed_records(path, **{**whole, **changes}))
    with pytest.raises(ValueError, match=rf"case file: .*theirs\.kvcase must be a whole \.kvcase file, .*{says}"):
        load(path)
    assert difftest("replay", path).exit_code == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "NO_SUCH"},
        {"outcome": (0,)},
        {"op": 5},
        {"op": "no_such"},
        {"arguments": []},
        {"arguments": {"slots": 3}},
        {"arguments": {"no_such": 3}},
        {"expected": {"x": 1}},
        {"got": {"x": torch.zeros(2, dtype=torch.int64)}},
        {"facts": {"x": [1]}},
        {"imports": "os"},
        {"imports": [b"os"]},
        {"imports": [""]},
        {"imports": ["os"] * 65},
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = changed(retire_case(tmp_path), **changes)
    with pytest.raises(ValueError, match=r"^kv-canary: case file: .*theirs\.kvcase must be a whole \.kvcase file"):
        load(path)


def test_what_a_file_says_is_printed_as_text(tmp_path: Path) -> None:
    path = changed(retire_case(tmp_path), outcome="RAISED", backend="[/x]", detail="\x1b[2J[/bold]")
    assert "\x1b" not in load(path).says
    done = difftest("replay", path)
    assert done.exit_code == 0, done.output
    assert "\\x1b[2J[/bold]" in " ".join(done.output.split())


def container(program: bytes) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("case/data.pkl", program)
    file.seek(0)
    return file


def storage(kind: bytes, name: bytes) -> bytes:
    """Return a program that asks for a storage of one element."""
    return b"\x80\x02(X\x07\x00\x00\x00storage" + kind + name + b"X\x03\x00\x00\x00cpuK\x01tQ."


GREEDY = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (GREEDY, "no name of a case file"),
        (b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.", "no name of a case file"),
        (pickle.dumps({"x": 1}, protocol=4), "protocol 2"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00xh\x00s.", "several places"),
        (b"\x80\x02}((tK\x01u.", "strings for keys"),
        (b"\x80\x02ccollections\nOrderedDict\nK\x05\x85R.", "calls nothing"),
        (b"\x80\x02K\x01K\x02.", "one value"),
        (b"\x80\x02(K\x01.", "one value"),
        (b"\x80\x02]K\x01b.", "BUILD"),
        (storage(b"ctorch._utils\n_rebuild_tensor_v2\n", b"X\x01\x00\x00\x000"), "a storage is of bytes"),
        (storage(b"K\x07", b"X\x01\x00\x00\x000"), "a storage is of bytes"),
        (storage(b"ctorch\nLongStorage\n", b"K\x00"), "a number for its name"),
        (storage(b"ctorch\nLongStorage\n", b"X\x01\x00\x00\x00x"), "a number for its name"),
    ],
)
def test_a_pickle_is_read_and_not_run(program: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_container(container(program), most_bytes=1 << 20)


def test_an_error_without_a_word_is_told_too(tmp_path: Path) -> None:
    path = retire_case(tmp_path)
    with (
        mock.patch("kv_canary.cases.casefile.read_container", side_effect=RuntimeError),
        pytest.raises(ValueError, match=r"one that is not: RuntimeError: nothing"),
    ):
        load(path)


def test_a_tensor_may_span_all_addresses_there_are_and_no_more() -> None:
    stride = MOST_ADDRESSES // 8 - 1
    packed = pack(torch.tensor([5, 6])) | {"stride": (stride,)}
    assert packed_bytes(packed) < 1 << 20
    with pytest.raises(ValueError, match="spans"):
        packed_bytes(packed | {"stride": (stride + 1,)})


def test_a_pickle_cannot_ask_for_memory() -> None:
    # What PyTorch's own reader of plain values would make of it: a thousand bytes here, any number in the file.
    small = GREEDY.replace(b"\x00\x00\x00\x00\x10", b"\xe8\x03\x00\x00\x00")
    out = io.BytesIO()
    torch.save([1], out)
    whole = io.BytesIO()
    with zipfile.ZipFile(out) as archive, zipfile.ZipFile(whole, "w") as written:
        for name in archive.namelist():
            written.writestr(name, small if name.endswith("data.pkl") else archive.read(name))
    assert torch.load(io.BytesIO(whole.getvalue()), weights_only=True) == bytearray(1000)
    with pytest.raises(ValueError, match="no name of a case file"):
        read_container(whole, most_bytes=1 << 20)


def test_a_record_that_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.kvcase"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("case/data.pkl", b"\x80\x02" + b"N" * (100 << 20) + b".")
    assert path.stat().st_size < 200_000
    with pytest.raises(ValueError, match=r"must be a whole \.kvcase file, .*is compressed"):
        load(path)


def test_a_container_is_read_as_torch_reads_it() -> None:
    shared = torch.arange(50)
    content = {
        "numbers": [0, 255, 256, 70_000, -1, -(1 << 40), 1 << 70, 0.5, True, False, None],
        "texts": ["", "x", "\ud800", "é" * 300, "x"],
        "shapes": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "kinds": [torch.int32, torch.bfloat16, torch.float8_e4m3fn],
        "tensors": {"part": shared[5:9], "whole": shared, "none": shared[:0]},
    }
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    read = read_container(file, most_bytes=1 << 20)
    tensors = read.pop("tensors")
    for name, tensor in content.pop("tensors").items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert read == content
    file.seek(0)
    with pytest.raises(ValueError, match="has 400 bytes, where 399 are left"):
        read_container(file, most_bytes=399)


def test_every_case_of_the_corpus_is_read() -> None:
    for path in corpus.entries():
        assert imports_of(path) == ()
        with path.open("rb") as file:
            assert read_container(file, most_bytes=1 << 20, tensors=False)["op"] == load(path).op
        assert re.match(r"^\w+ on triton: ", load(path).says)
