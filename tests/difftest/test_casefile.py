"""Case files: one file holds a failure, and opening it runs nobody's code."""

from __future__ import annotations

import dataclasses
import io
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.cases import casefile
from kv_canary.cases.casefile import case_file, imports_of, load, save
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.cases.container import MOST_DIMENSIONS, _record, _shareable
from kv_canary.difftest.strategies.large import large_cases
from kv_canary.shadow import _registered_by
from kv_canary.specs import get_spec


def verify_call() -> dict[str, Any]:
    raw = torch.arange(200, dtype=torch.uint8)
    layers = tuple(raw.as_strided((5, 20), (24, 1), start) for start in (3, 11))
    source = kc.KvSource(layers=layers, page_size=2, bytes_per_token=9, read_bytes=4, offset_bytes=1, slot_bias=1)
    return {
        "verify_plan": kc.VerifyPlan.allocate(verify_cap=3),
        "endpoint": kc.Endpoint(tag=4, records=torch.arange(96).view(8, 12)[:, :4], k_source=source),
        "step": torch.tensor([7]),
        "track_lifetime": True,
        "violations": kc.ViolationLog.allocate(ring_cap=2),
        "counters": torch.zeros(6, 2, dtype=torch.int64),
    }


def test_holds_the_call_the_outputs_and_where_it_was_seen(tmp_path: Path) -> None:
    expected = {"counters": torch.zeros(96, dtype=torch.uint8)}
    got = {"counters": torch.ones(96, dtype=torch.uint8)}
    mismatch = Mismatch(
        Outcome.BYTES_DIFFER, op="verify", backend="triton", path="counters", detail="why", expected=expected, got=got
    )
    path = tmp_path / "new" / "folder" / "a.kvcase"
    save(case_file(get_spec("verify"), verify_call(), mismatch, facts={"seed": 5}, imports=("x.py",)), path)
    file = load(path)
    assert imports_of(path) == file.imports == ("x.py",)
    assert file.says == str(mismatch)
    assert file.facts["seed"] == 5
    assert {"torch", "triton", "python", "kv_canary"} <= set(file.facts)
    assert torch.equal(file.expected["counters"], expected["counters"])
    assert torch.equal(file.got["counters"], got["counters"])
    source, was = file.arguments["endpoint"].k_source, verify_call()["endpoint"].k_source
    for name in ("page_size", "bytes_per_token", "token_stride_bytes", "read_bytes", "offset_bytes", "slot_bias"):
        assert getattr(source, name) == getattr(was, name), name
    for layer, other in zip(source.layers, was.layers, strict=True):
        assert torch.equal(layer, other)
        assert layer.stride() == other.stride()
    assert file.arguments["endpoint"].records.stride() == (12, 1)
    assert file.arguments["track_lifetime"] is True
    assert file.arguments["anchors"] is None
    # Nothing half-written is left beside it.
    assert list(path.parent.iterdir()) == [path]


class Mischief:
    def __reduce__(self) -> Any:
        return print, ("mischief",)


@pytest.mark.parametrize("content", ["pickle", "torch", "text", "other"])
def test_refuses_what_is_no_case_file(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.kvcase"
    if content == "pickle":
        path.write_bytes(pickle.dumps(Mischief()))
    elif content == "torch":
        torch.save({"format": "kv-canary case 1", "op": Mischief()}, path)
    elif content == "text":
        path.write_text("hello")
    else:
        torch.save({"format": "something else"}, path)
    with pytest.raises(ValueError, match=r"case file: .*b\.kvcase must be"):
        load(path)
    assert "mischief" not in capsys.readouterr().out


def test_refuses_an_op_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "c.kvcase"
    save(case_file(get_spec("verify"), verify_call()), path)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "op": "no_such_op"}, path)
    with pytest.raises(ValueError, match="no_such_op"):
        load(path)


def call() -> dict[str, Any]:
    return next(iter(large_cases("scatter_token_ids", torch.device("cpu"))))


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same numbers, 8 bytes further from what is aligned."""
    longer = torch.zeros(len(tensor) + 2, dtype=tensor.dtype)
    start = 1 if (longer.data_ptr() - tensor.data_ptr()) % 16 == 0 else 0
    moved = longer[start : start + len(tensor)]
    moved.copy_(tensor)
    assert (moved.data_ptr() - tensor.data_ptr()) % 16 == 8
    return moved


def changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return another number, at the same alignment."""
    tensor[0] += 1
    return tensor


def narrower(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as twice as many numbers."""
    return tensor.view(torch.int32)


@pytest.mark.parametrize("change", [elsewhere, changed, narrower], ids=lambda f: f.__name__)
def test_what_comes_back_otherwise_is_said(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    spec, decode = get_spec("scatter_token_ids"), casefile.decode
    casefile.check_round_trip(spec, call())

    def otherwise(*args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded = decode(*args, **kwargs)
        return {**loaded, "flat": change(loaded["flat"])}

    monkeypatch.setattr(casefile, "decode", otherwise)
    with pytest.raises(Mismatch) as caught:
        casefile.check_round_trip(spec, call())
    assert caught.value.path == "flat"


def archive(content: bytes, *, compression: int = zipfile.ZIP_STORED) -> zipfile.ZipFile:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as made:
        made.writestr("record", content)
    return zipfile.ZipFile(file)


def test_a_record_is_as_large_as_it_may_be_and_no_larger() -> None:
    assert bytes(_record(archive(b"12345678"), "record", most=8)) == b"12345678"
    with pytest.raises(ValueError, match="record has 8 bytes, where 7 are left"):
        _record(archive(b"12345678"), "record", most=7)


def test_a_record_that_is_compressed_to_its_own_size_is_compressed() -> None:
    content = next(
        text
        for length in range(1, 200)
        for text in (bytes(range(length)) + b"a" * 9, b"ab" * length)
        if len(zlib.compress(text)) - 6 == len(text)
    )
    found = archive(content, compression=zipfile.ZIP_DEFLATED)
    assert found.getinfo("record").file_size == found.getinfo("record").compress_size
    with pytest.raises(ValueError, match="record is compressed"):
        _record(found, "record", most=1 << 10)


def test_only_a_few_numbers_may_stand_in_several_places() -> None:
    assert _shareable(tuple(range(MOST_DIMENSIONS))) == tuple(range(MOST_DIMENSIONS))
    for value in (tuple(range(MOST_DIMENSIONS + 1)), (1, True), ([],), [1], {}):
        with pytest.raises(ValueError, match="one value stands in several places"):
            _shareable(value)


def test_what_registers_an_op_is_a_module_of_a_package_or_a_file() -> None:
    def one() -> None: ...
    def other() -> None: ...

    one.__module__, other.__module__ = "their.package", "dataclasses"
    assert _registered_by("their_op", one, other, one) == ("their.package", dataclasses.__file__)
    assert _registered_by("retire", one) == ()
