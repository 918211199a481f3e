"""What the guides tell operators to set exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

import kv_canary as kc
from kv_canary.config import CanaryConfig
from kv_canary.constants import Reason
from kv_canary.perturb import MODES, PerturbConfig
from kv_canary.perturb_settings import PREFIX
from kv_canary.runtime.summary import Watching
from kv_canary.settings import ENVIRONMENT

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "operating.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Read by other parts: the backend switch, and differential testing in production.
OTHERS = re.compile(r"KV_CANARY_(BACKEND|SHADOW_\w+)")


def settings() -> set[str]:
    own = {ENVIRONMENT + f.name.upper() for f in dataclasses.fields(CanaryConfig)}
    return own | {PREFIX + f.name.upper() for f in dataclasses.fields(PerturbConfig)}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_variable_that_a_page_names_is_a_setting(page: Path) -> None:
    named = set(re.findall(r"(?<![A-Z_])KV_CANARY_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_*<])", page.read_text()))
    assert {name for name in named if not OTHERS.fullmatch(name)} <= settings()


def test_the_table_of_ways_to_run_names_settings() -> None:
    table = GUIDE.read_text().split("## Three ways to run it")[1].split("```")[0]
    named = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert len(named) > 8
    assert named <= {f.name for f in dataclasses.fields(CanaryConfig)}


def test_every_fault_and_every_status_is_in_the_guide() -> None:
    text = GUIDE.read_text()
    assert all(f"| `{mode}` |" in text for mode in MODES)
    statuses = list(Watching)
    assert all(f"| `{status}` |" in text for status in statuses)


def test_the_example_of_memory_is_what_a_pool_of_that_model_takes() -> None:
    """32 layers, 8 KV heads of 128, bf16; of fewer slots, because all of it grows with them."""
    text = " ".join(GUIDE.read_text().split())
    slots, example = 64, 1 << 20
    layers = torch.zeros(32, slots, 8 * 128 * 2, dtype=torch.uint8)
    source = kc.KvSource(layers=tuple(layers), page_size=1, bytes_per_token=8 * 128 * 2)
    limits = kc.CanaryLimits(max_rows=2, max_requests=2, max_tokens=8, max_len=64)
    takes = {}
    for seals in ("layer", "model"):
        pool = kc.KvPool(name="kv", num_slots=slots, k_source=source, v_source=source, device="cpu")
        group = kc.BufferGroup(name="full", pool=pool)
        manager = kc.CanaryManager([group], limits=limits, config=kc.CanaryConfig(seals=seals, backend="reference"))
        takes[seals] = {name: size * example // slots for name, size in manager.summary().memory.items()}
    assert f"{takes['layer']['kv'] >> 30} GiB of K and V" in text
    assert f"{takes['layer']['records'] >> 20} MiB of records" in text
    assert f"{takes['layer']['scratch'] >> 20} MiB of scratch" in text
    assert f'{takes["layer"]["seals"] >> 20} MiB (`seals="layer"`' in text
    assert f'{takes["model"]["seals"] >> 20} MiB (`"model"`)' in text


def test_the_glossary_has_every_reason() -> None:
    _, _, table = (ROOT / "docs/glossary.md").read_text().partition("## Reasons")
    told = [name for row in re.findall(r"^\| ([A-Z_, ]+) \|", table, re.M) for name in row.split(", ")]
    assert sorted(told) == sorted(str(reason.name) for reason in Reason)
