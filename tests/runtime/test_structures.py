"""What the structures of a call refuse, and what they take for granted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kv_canary as kc


@pytest.mark.parametrize(
    ("layers", "error"), [((), ValueError), ((torch.zeros(4, 8, dtype=torch.uint8), None), TypeError)], ids=str
)
def test_layers_are_tensors_all_of_them_and_at_least_one(layers: tuple[object, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="layers must be"):
        kc.KvSource(layers=layers, page_size=1, bytes_per_token=8)  # type: ignore[arg-type]


def test_tokens_lie_side_by_side_unless_it_is_said_otherwise() -> None:
    layers = (torch.zeros(4, 16, dtype=torch.uint8),)
    assert kc.KvSource(layers=layers, page_size=2, bytes_per_token=8).token_stride_bytes == 8
    with pytest.raises(ValueError, match="token_stride_bytes must be at least 0, got -1"):
        kc.KvSource(layers=layers, page_size=2, bytes_per_token=8, token_stride_bytes=-1)


@pytest.mark.parametrize("name", ["no_such", "_op", "__path__"])
def test_an_op_that_is_not_there_is_an_attribute_that_is_not_there(name: str) -> None:
    from kv_canary import ops

    with pytest.raises(AttributeError, match=rf"op must be one of .*, got '{name}'"):
        getattr(ops, name)


@pytest.mark.parametrize(("name", "kind"), [("tag", "a Tag"), ("group", "an int")])
@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_an_endpoints_numbers_are_numbers(name: str, kind: str, value: Any) -> None:
    """True is an int to Python, and a mistake here."""
    given = {"tag": kc.Tag.HEAD_FULL, "records": torch.zeros(4, 4, dtype=torch.int64), name: value}
    with pytest.raises(TypeError, match=f"{name} must be {kind}, got {type(value).__name__}"):
        kc.Endpoint(**given)
