"""The picture of a decoded difference in the documentation: it shows what `replay` prints of the shrunk call today."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/your_own_kernel.py"
KEPT = ROOT / "docs/img/your-own-kernel.svg"
NAME = "paged_gather-triton-bytes_differ-out.kvcase"
# The call that a run of the wrong example ends up with: one value, and a page behind the only one.
SHRUNK = f"""
from pathlib import Path

import torch

from kv_canary.cases.casefile import case_file, save
from kv_canary.cases.comparison import Mismatch
from kv_canary.difftest.runner import check_case
from kv_canary.difftest.worker import import_all
from kv_canary.specs import get_spec

import_all([{str(EXAMPLE)!r}])
spec = get_spec("paged_gather")
call = {{"pool": torch.zeros(1, dtype=torch.int32), "pages": torch.ones(1, dtype=torch.int64)}}
call |= {{"page_size": 1, "out": torch.zeros(1, dtype=torch.int32)}}
try:
    check_case(spec, call, device="cpu")
except Mismatch as found:
    save(case_file(spec, call, found), Path({NAME!r}))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, on a terminal as wide as the picture, with the wrong version of the example."""
    whole = {**os.environ, "TRITON_INTERPRET": "1", "YOUR_KERNEL": "wrong", "COLUMNS": "72"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=whole, timeout=120, check=False)


def words(picture: Path) -> list[str]:
    return [
        html.unescape(text).replace("\xa0", " ") for text in re.findall(r"<text[^>]*>(.*?)</text>", picture.read_text())
    ]


def test_the_picture_of_the_example_is_what_replay_draws_of_the_shrunk_call(tmp_path: Path) -> None:
    made = run(tmp_path, sys.executable, "-P", "-c", SHRUNK)
    assert made.returncode == 0, made.stderr
    program = str(Path(sys.executable).parent / "kv-canary")
    drawn = tmp_path / "drawn.svg"
    done = run(tmp_path, program, "difftest", "replay", NAME, "--import", str(EXAMPLE), "--svg", str(drawn))
    assert done.returncode == 1, done.stdout + done.stderr
    assert words(drawn) == words(KEPT), f"copy {drawn} to {KEPT}"
    # It is said once how it fails, and nothing is fetched to show it.
    assert done.stdout.count("an output differs") == 1
    assert re.findall(r"https?:(?!//www\.w3\.org/2000/svg)|url\((?!#)|@import", KEPT.read_text()) == []
