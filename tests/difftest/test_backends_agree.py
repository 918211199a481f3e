"""Every op, generated calls: the reference and Triton agree to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_canary.difftest.runner import check_case
from kv_canary.difftest.strategies import cases
from kv_canary.specs import all_specs, get_spec


@pytest.mark.parametrize("op", all_specs())
def test_backends_agree(op: str, device: torch.device) -> None:
    spec = get_spec(op)

    @given(case=cases(op))
    def agree(case: dict[str, Any]) -> None:
        check_case(spec, case, device=device)

    agree()


@given(data=st.data())
def test_every_op_has_a_strategy(data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(sorted(all_specs())))
    get_spec(op).bind(data.draw(cases(op)))
