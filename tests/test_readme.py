"""What the README and the page for engines of one's own show works as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kv_canary as kc

ROOT = Path(__file__).parents[1]
README, OWN_ENGINE = ROOT / "README.md", ROOT / "docs/own-engine.md"


def run_own_pool() -> dict[str, Any]:
    block = next(b for b in re.findall(r"```python\n(.*?)```", OWN_ENGINE.read_text(), re.S) if "KvPool" in b)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


def test_the_own_pool_example_is_silent_when_healthy() -> None:
    names = run_own_pool()
    assert names["canary"].summary().violations == 0
    assert names["canary"].summary().positions_verified == 20 + 21
    assert len(names["canary"].pools[0].records.nonzero()) > 0


def test_the_own_pool_example_finds_a_changed_byte() -> None:
    names = run_own_pool()
    canary, text, table = names["canary"], names["text"], names["table"]
    # Position 6 is covered in layer 6 % 4 = 2, window 6 // 4 = 1: bytes 16 to 32, numbers 4 to 8 of slot 7.
    names["k"][2, 7, 5] += 1
    table[1, 22] = 23
    request = kc.ForwardRequest(
        request_id="a", row=1, owner=1, prefix_len=22, extend_len=1, tokens=lambda i, j: text[i:j]
    )
    import torch

    batch = kc.ForwardBatch(
        requests=[request],
        input_ids=torch.tensor(text[22:23]),
        positions=torch.tensor([22]),
        out_slots={"full": torch.tensor([23])},
        tables={"full": table},
    )
    with canary.forward().around(batch):
        pass
    with pytest.raises(kc.CanaryViolationError, match="request a reads position 6 in slot 7") as caught:
        canary.flush()
    assert [r.reasons for r in caught.value.reports] == [("K",)]


def test_the_commands_that_the_readme_names_exist() -> None:
    makefile = (README.parent / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README.read_text(), re.M):
        assert f"\n{target}:" in makefile


def test_the_readme_is_short_and_shows_code_early() -> None:
    text = README.read_text()
    assert len(text.split()) < 1000
    first = next(n for n, line in enumerate(text.splitlines(), 1) if line.startswith(("    ", "```")))
    assert first <= 20


def test_many_requests_are_served_by_one_composition() -> None:
    [block] = [b for b in re.findall(r"```python\n(.*?)```", OWN_ENGINE.read_text(), re.S) if "Composition" in b]
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
