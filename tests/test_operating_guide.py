"""What the guides tell operators to set exists."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kv_canary.config import CanaryConfig
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
