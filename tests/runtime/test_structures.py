"""What the structures that ops take are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kv_canary.constants import Tag
from kv_canary.specs.structures import Endpoint


@pytest.mark.parametrize(("name", "kind"), [("tag", "a Tag"), ("group", "an int")])
@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_an_endpoints_numbers_are_numbers(name: str, kind: str, value: Any) -> None:
    """True is an int to Python, and a mistake here."""
    given = {"tag": Tag.HEAD_FULL, "records": torch.zeros(4, 4, dtype=torch.int64), name: value}
    with pytest.raises(TypeError, match=f"{name} must be {kind}, got {type(value).__name__}"):
        Endpoint(**given)
