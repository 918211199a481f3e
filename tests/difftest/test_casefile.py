"""Case files: one file holds a failure, and opening it runs nobody's code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import kv_canary as kc
from kv_canary.cases.casefile import case_file, imports_of, load, save
from kv_canary.cases.comparison import Mismatch, Outcome
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
