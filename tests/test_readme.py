"""What the README and the page for engines of one's own show works as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kv_canary as kc

ROOT = Path(__file__).parents[1]
README, OWN_ENGINE = ROOT / "README.md", ROOT / "docs/own-engine.md"


def own_engine_blocks(word: str) -> list[str]:
    """The blocks of Python on the page for engines of one's own that hold a word."""
    return [b for b in re.findall(r"```python\n(.*?)```", OWN_ENGINE.read_text(), re.S) if word in b]


def run_own_pool(*, settings: str = 'mode="raise"') -> dict[str, Any]:
    (block,) = own_engine_blocks("KvPool")
    assert 'mode="raise"' in block
    names: dict[str, Any] = {}
    exec(block.replace('mode="raise"', settings), names)
    return names


def test_the_own_pool_example_is_silent_when_healthy() -> None:
    names = run_own_pool()
    assert names["canary"].summary().violations == 0
    assert names["canary"].summary().positions_verified == 20 + 21
    assert len(names["canary"].pools[0].records.nonzero()) > 0


def test_the_own_pool_example_finds_a_changed_byte_and_says_what_the_page_shows() -> None:
    names = run_own_pool()
    (breaking,) = own_engine_blocks("stray write")
    with pytest.raises(kc.CanaryViolationError) as caught:
        exec(breaking, names)
    assert [r.reasons for r in caught.value.reports] == [("K",)]
    (shown,) = re.findall(r"```\n(kv-canary: .*?)```", OWN_ENGINE.read_text(), re.S)
    assert str(caught.value).split() == shown.split()


def test_what_the_sample_of_the_own_pool_example_misses_is_found_by_seals() -> None:
    changed = "k[1, 7, 5] += 1"
    names = run_own_pool()
    exec(f"{changed}\nstep(22, 23)\ncanary.scrub()\ncanary.flush()", names)
    assert names["canary"].summary().violations == 0
    for look in ("canary.scrub()", "canary.complete('a', {'full': torch.arange(1, 24)})"):
        names = run_own_pool(settings='mode="raise", seals="layer"')
        with pytest.raises(kc.CanaryViolationError, match="SEAL_K"):
            exec(f"{changed}\nstep(22, 23)\n{look}\ncanary.flush()", names)


def test_the_commands_that_the_readme_names_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README.read_text(), re.M):
        assert f"\n{target}:" in makefile


def test_the_readme_installs_first_what_its_demo_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = re.findall(r"^    (\S.*?)(?:  +#.*)?$", README.read_text(), re.M)
    (install,) = (command for command in commands if command.startswith("pip install"))
    assert commands.index(install) < commands.index("kv-canary demo")
    (named,) = re.findall(r"pip install '\.\[(.*)\]'", install)
    brought = {re.split(r"[<>=\[]", need)[0] for extra in named.split(",") for need in extras[extra]}
    # The engine asks psutil how much memory the CPU has, and logs an error where it is not there.
    assert {"transformers", "psutil"} <= brought


def test_the_readme_is_short_and_shows_code_early() -> None:
    text = README.read_text()
    assert len(text.split()) < 1000
    first = next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith(("    ", "```")))
    assert first <= 20


def test_many_requests_are_served_by_one_composition() -> None:
    (block,) = own_engine_blocks("Composition")
    names = run_own_pool()
    exec(block, names)
    canary, table, text = names["canary"], names["table"], names["text"]

    class Member:
        def __init__(self, name: str, number: int, tokens: list[int]) -> None:
            self.name, self.row, self.number, self.tokens = name, number, number, tokens

    import numpy as np
    import torch

    members = [Member("a", 1, text), Member("b", 2, text[::-1])]
    composition = names["compose"](members)
    lengths = np.array([22, 0])
    for step in range(4):
        slots = torch.tensor([100 + 2 * step, 101 + 2 * step])
        table[1, lengths[0]], table[2, lengths[1]] = slots.tolist()
        ids = [member.tokens[at] for member, at in zip(members, lengths.tolist(), strict=True)]
        batch = kc.ForwardBatch(
            requests=names["requests"](composition, lengths),
            input_ids=torch.tensor(ids),
            positions=torch.from_numpy(lengths.copy()),
            out_slots={"full": slots},
            tables={"full": table},
        )
        with canary.forward().around(batch):
            names["k"][:, slots], names["v"][:, slots] = torch.randn(2, 4, 2, 64)
        lengths = lengths + 1
    canary.flush()
    assert canary.summary().positions_verified == 20 + 21 + sum((22 + step) + step for step in range(4))
    names["k"][:, 101, :] += 1
    batch = kc.ForwardBatch(
        requests=names["requests"](composition, lengths),
        input_ids=torch.tensor([text[26], text[::-1][4]]),
        positions=torch.tensor([26, 4]),
        out_slots={"full": torch.tensor([120, 121])},
        tables={"full": table},
    )
    with canary.forward().around(batch):
        pass
    with pytest.raises(kc.CanaryViolationError, match="request b reads position 0 in slot 101"):
        canary.flush()
