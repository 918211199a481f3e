"""A new op is four files and nothing else: in a copy of the package that has them, the whole machinery takes it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kv_canary

# What an author writes. `clear` zeroes the records of named slots.
FILES = {
    "specs": '''
"""clear: zero the records of named slots."""

import torch

from kv_canary.specs.arguments import RECORD_BUFFERS, STATUS
from kv_canary.specs.interface import SLOT, KernelSpec, TensorSpec

SPEC = KernelSpec(
    name="clear",
    doc="""Zero the records of named slots.

    Slots out of range and slot 0 are skipped; `status` gets ROW_RANGE where one is out of range.
    """,
    arguments={
        "slots": TensorSpec(dtype=torch.int64, shape=("n",), index_of=SLOT, doc="slots to clear"),
        "records": RECORD_BUFFERS,
        "status": STATUS,
    },
)
''',
    "reference": '''
"""clear: the reference."""

import torch

from kv_canary.constants import Status


def clear(*, slots: torch.Tensor, records: tuple[torch.Tensor, ...], status: torch.Tensor) -> None:
    """Zero the records of named slots; see specs/clear.py."""
    outside = (slots < 0) | (slots >= len(records[0]))
    status[0] = Status.ROW_RANGE if bool(outside.any()) else 0
    for buffer in records:
        buffer[slots[~outside & (slots != 0)]] = 0
''',
    "kernels": '''
"""clear: the Triton kernel."""

import torch
import triton
import triton.language as tl

from kv_canary.constants import Status
from kv_canary.kernels.records import record_address, records_of

_ROW_RANGE = tl.constexpr(int(Status.ROW_RANGE))


@triton.jit
def _clear(slots_ptr, n, records, status_ptr, BLOCK: tl.constexpr):
    outside = tl.full([BLOCK], 0, tl.int32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        # i < n
        slot = tl.load(slots_ptr + i, mask=i < n, other=0)
        inside = (slot >= 0) & (slot < records.num_slots)
        outside |= tl.where(inside, 0, 1)
        for word in tl.static_range(4):
            # 0 < slot < num_slots
            tl.store(record_address(records, slot) + word, tl.zeros_like(slot), mask=inside & (slot != 0))
    tl.store(status_ptr, tl.where(tl.max(outside) > 0, _ROW_RANGE, 0))


def clear(*, slots: torch.Tensor, records: tuple[torch.Tensor, ...], status: torch.Tensor) -> None:
    """Zero the records of named slots; see specs/clear.py."""
    for buffer in records:
        _clear[(1,)](slots, slots.shape[0], records_of(buffer), status, BLOCK=8)
''',
    "difftest/strategies": '''
"""Cases of clear."""

import torch
from hypothesis import strategies as st


@st.composite
def cases(draw):
    """Draw one call of clear."""
    num_slots = draw(st.integers(1, 30))
    slots = draw(st.lists(st.integers(0, num_slots - 1), max_size=20))
    slots += draw(st.sampled_from([[], [], [-1], [num_slots], [1 << 40]]))
    slots = draw(st.permutations(slots))
    words = torch.arange(num_slots * 4, dtype=torch.int64).view(num_slots, 4) + draw(st.integers(1, 1 << 40))
    others = [words.flip(0).contiguous()] if draw(st.booleans()) else []
    status = torch.zeros(1, dtype=torch.int32)
    return {"slots": torch.tensor(slots, dtype=torch.int64), "records": (words, *others), "status": status}
''',
}
CALL = """
import torch
from kv_canary import ops
for backend in ("reference", "triton"):
    records, status = torch.ones(4, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    ops.clear(slots=torch.tensor([2, 0, 9]), records=(records,), status=status, backend=backend)
    print(records.sum(dim=1).tolist(), int(status))
try:
    ops.clear(slots=torch.tensor([2.0]), records=(records,), status=status)
except TypeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package whose files are links to those here, and the four files."""
    root = tmp_path_factory.mktemp("package")
    parts = ("bench", "difftest", "kernels", "reference")
    ignored = shutil.ignore_patterns("__pycache__", *parts)
    shutil.copytree(Path(kv_canary.__file__).parent, root / "kv_canary", copy_function=os.symlink, ignore=ignored)
    for part in parts:
        (source,) = importlib.import_module(f"kv_canary.{part}").__path__
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, root / "kv_canary" / part, copy_function=os.symlink, ignore=ignored)
    for folder, text in FILES.items():
        (root / "kv_canary" / folder / "clear.py").write_text(text.lstrip("\n"), encoding="utf-8")
    return root


def run(package: Path, *arguments: str, exit_code: int = 0) -> str:
    """Run Python with `arguments` on the package; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "COLUMNS": "160", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout + done.stderr
    return done.stdout


def kv_canary_difftest(package: Path, *arguments: str, exit_code: int = 0) -> str:
    return run(package, "-m", "kv_canary", "difftest", *arguments, exit_code=exit_code)


def test_it_can_be_called_and_wrong_calls_are_refused(package: Path) -> None:
    assert run(package, "-c", CALL).splitlines() == [
        "[4, 4, 0, 4] 2",
        "[4, 4, 0, 4] 2",
        "kv-canary: clear: slots must be of dtype torch.int64, got torch.float32",
    ]


def test_it_stands_on_the_page_of_ops(package: Path) -> None:
    assert "\n## clear\n" in run(package, "-m", "kv_canary", "ops", "--markdown")


@pytest.mark.long
def test_it_is_run_and_fuzzed(package: Path) -> None:
    facts = package / "facts.json"
    kv_canary_difftest(package, "run", "--op", "clear", "--examples", "30", "--jobs", "1", "--json", str(facts))
    assert json.loads(facts.read_text())["targets"]["clear"]["cases"] == 30
    kv_canary_difftest(package, "fuzz", "--op", "clear", "--minutes", "0.2", "--jobs", "1", "--coverage")


@pytest.mark.long
def test_its_mutants_are_killed(package: Path) -> None:
    files = ("--file", "kernels/clear.py", "--file", "reference/clear.py")
    out = package / "mutants.json"
    kv_canary_difftest(package, "mutants", *files, "--examples", "40", "--jobs", "1", "--json", str(out))
    facts = json.loads(out.read_text())
    assert facts["killed"] == facts["total"] > 10


@pytest.mark.long
def test_what_is_wrong_with_it_is_found_shrunk_and_explained(package: Path) -> None:
    kernel = package / "kv_canary/kernels/clear.py"
    right = kernel.read_text(encoding="utf-8")
    # The last slot stays as it is.
    wrong = right.replace("mask=inside & (slot != 0)", "mask=inside & (slot != 0) & (slot + 1 < records.num_slots)")
    assert wrong != right
    kernel.write_text(wrong, encoding="utf-8")
    try:
        options = ("--examples", "60", "--jobs", "1", "--findings", str(package / "findings"), "--shrink", "5")
        kv_canary_difftest(package, "run", "--op", "clear", *options, exit_code=1)
        (found,) = (package / "findings").glob("*.kvcase")
        said = kv_canary_difftest(package, "replay", str(found), exit_code=1)
        # One slot, in the smallest pool that has one that can be cleared.
        assert re.search(r"slots .* int64\[1\]", said), said
        assert "record of slot 1, " in said, said
        case = package / "smaller.kvcase"
        kv_canary_difftest(package, "minimize", str(found), "--output", str(case), exit_code=1)
    finally:
        kernel.write_text(right, encoding="utf-8")
    kv_canary_difftest(package, "replay", str(found))
