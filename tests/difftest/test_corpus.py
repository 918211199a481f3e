"""The committed corpus: calls that failed once never fail again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kv_canary.cases.casefile import case_file, load, save
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest import corpus
from kv_canary.difftest.runner import check_case
from kv_canary.difftest.simulator import ENGINE_OPS
from kv_canary.specs import get_spec

ENTRIES = corpus.entries()


@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_no_longer_fails(path: Path, device: torch.device) -> None:
    file = load(path)
    check_case(get_spec(file.op), file.arguments, device=device)


def test_knows_a_failure_of_every_op_of_engines() -> None:
    assert {load(path).op for path in ENTRIES} >= set(ENGINE_OPS)
    assert all(load(path).outcome for path in ENTRIES)


def test_add_keeps_the_call_and_how_it_failed(tmp_path: Path) -> None:
    spec = get_spec("retire")
    call = {"slots": torch.tensor([3]), "owner": torch.tensor([1]), "step": torch.tensor([2])}
    call["records"] = (torch.ones(4, 4, dtype=torch.int64),)
    output = {"records[0]": torch.ones(128, dtype=torch.uint8)}
    mismatch = Mismatch(
        Outcome.BYTES_DIFFER, op="retire", backend="triton", path="records[0]", detail="x", expected=output, got=output
    )
    found = tmp_path / "found.kvcase"
    save(case_file(spec, call, mismatch), found)
    folder = tmp_path / "corpus"
    added = corpus.add(found, folder=folder, name="retired-wrongly")
    assert corpus.entries(folder) == [added] == [folder / "retired-wrongly.kvcase"]
    kept = load(added)
    assert kept.says == load(found).says
    assert torch.equal(kept.arguments["slots"], call["slots"])
    assert not kept.expected
    assert not kept.got
    with pytest.raises(ValueError, match="name must be new"):
        corpus.add(found, folder=folder, name="retired-wrongly")
