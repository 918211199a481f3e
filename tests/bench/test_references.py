"""The references' benchmark checks what it times, and runs any checkout's package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kv_canary
from kv_canary.bench import references, references_before
from kv_canary.bench.references_peer import peer_version
from kv_canary.constants import ANCHOR, CHAIN_MULTIPLIER, MASK64, to_signed
from kv_canary.hashing import mix
from kv_canary.reference.hashing import identity, walk_chains

ROOT = Path(__file__).parents[2]
needs_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks git what the checkout is")


def test_chains_of_several_requests_are_those_of_the_formula() -> None:
    lengths, tokens = [3, 0, 1, 4, 0], [7, 300, 65537, 1, 1 << 31, 0, 2, 7]
    positions, before = [0, 1, 2, 90, 5, 6, 7, 8], [ANCHOR, 5, -1, 1 << 62, -(1 << 63)]
    identities = identity(torch.tensor(tokens), torch.tensor(positions))
    expected, j = [], 0
    for chain, length in zip(before, lengths, strict=True):
        for _ in range(length):
            chain = (chain * CHAIN_MULTIPLIER + mix(tokens[j] | positions[j] << 32)) & MASK64
            expected.append(to_signed(chain))
            j += 1
    assert walk_chains(torch.tensor(before), torch.tensor(lengths), identities).tolist() == expected


def test_a_quick_run_measures_every_op_of_every_case(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text('{"before_and_after": "is kept"}')
    assert references.main(["--quick", "--rounds", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["before_and_after"] == "is kept"
    assert result["device"].startswith("CPU")
    rows = result["entries"]["rows"]
    assert len(rows) == len(references.QUICK) * (1 + 3 * len(references.BYTES))
    assert all(row["ours_m_per_s"] > 0 for row in rows)
    assert all(("ratio" in row) == (peer_version() is not None) for row in rows)


def test_a_reference_that_finds_nothing_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reference.verify.report", lambda *_: None)
    with pytest.raises(RuntimeError, match="one changed record in verify must give 1 violations"):
        references.measure(references.QUICK[0], with_peer=False, rounds=1)


def test_a_reference_that_reports_a_healthy_pool_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_canary.reference.verify.next_chain", lambda previous, identities: previous)
    with pytest.raises(RuntimeError, match="a healthy pool must give 0 violations"):
        references.measure(references.QUICK[1], with_peer=False, rounds=1)


def test_an_arranged_checkout_is_imported_from_there(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for part in ("kv_canary", *references_before.PARTS):
        (checkout / part).mkdir(parents=True)
        (checkout / part / "__init__.py").write_text("")
    package = references_before.arrange(tmp_path / "package", checkout)
    code = "import kv_canary.reference; print(kv_canary.reference.__file__)"
    done = references_before._python(package, "-c", code)
    assert done.printed.strip() == str(package / "kv_canary" / "reference" / "__init__.py")
    assert done.cpu_seconds > 0
    with pytest.raises(RuntimeError, match="ended with 3"):
        references_before._python(package, "-c", "raise SystemExit(3)")


@needs_checkout
def test_an_engine_is_served_with_this_checkouts_references(tmp_path: Path) -> None:
    result = references_before.compare_checkouts([], fuzz_cases=1, fuzz_rounds=0, engine_rounds=1, quick=True)
    assert result["fuzz"] == []
    (row,) = result["engine"]
    assert row["commit"] == references_before.commit_of(ROOT)
    assert row["workload"] == "quick"
    assert row["with"] > 0
    assert [t.title for t in references_before.tables(result)] == ["an engine in debug mode, tokens a CPU second"]


def test_what_runs_on_any_checkout_uses_nothing_of_this_ones_benchmarks() -> None:
    script = ROOT / "bench" / "references_served.py"
    code = f"import runpy, sys; runpy.run_path({str(script)!r}); print([m for m in sys.modules if '.bench' in m])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert Path(str(kv_canary.__file__)).name == "__init__.py"
