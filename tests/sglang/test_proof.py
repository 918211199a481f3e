"""The proof for a GPU, on the CPU, where SGLang has no graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from kv_canary.difftest.stress.sglang import cuda


@pytest.mark.long
@pytest.mark.parametrize("lengths", ["host", "device"])
def test_a_byte_is_found_in_a_step_with_drafts(tmp_path: Path, lengths: str) -> None:
    written = tmp_path / "proof.json"
    name = f"byte_page1_overlap_graphs-none_drafts-{lengths}"
    assert cuda.main(["--device", "cpu", "--only", name, "--json", str(written), "--out", str(tmp_path)]) == 0
    proof = json.loads(written.read_text())
    assert (proof["ok"], proof["clean"]) == (True, [])
    [row] = proof["faults"]
    assert min(row["drafts"]) > 10
    assert [r["reasons"] for r in row["reports"]] == [["K"]]
