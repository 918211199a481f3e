"""What the host sends lies on the device as far as there is room for it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kv_canary.runtime.host import copy_all, on_device


class OnGpu(torch.Tensor):
    """A tensor that says of itself that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("kind", [torch.Tensor, OnGpu])
def test_every_pair_is_copied_as_far_as_it_fits(kind: type[torch.Tensor]) -> None:
    buffers = [torch.zeros(n, dtype=torch.int64) for n in (3, 2, 4, 2)]
    tensors = [torch.tensor(values) for values in ([1, 2], [3, 4, 5], [6, 7, 8, 9], [])]
    copy_all(
        [(buffer.as_subclass(kind), tensor.as_subclass(kind)) for buffer, tensor in zip(buffers, tensors, strict=True)]
    )
    assert [buffer.tolist() for buffer in buffers] == [[1, 2, 0], [3, 4], [6, 7, 8, 9], [0, 0]]


def test_nobody_waits_for_what_comes_from_the_host() -> None:
    """A copy to a GPU out of memory that is not pinned would wait for all that was launched before it."""
    slots = mock.Mock(device=torch.device("cpu"))
    there = on_device(slots, torch.device("cuda"))
    assert there is slots.pin_memory.return_value.to.return_value
    slots.pin_memory.return_value.to.assert_called_once_with(torch.device("cuda"), non_blocking=True)
    slots.to.assert_not_called()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_not_on_its_way_to_a_gpu_is_not_pinned(device: str) -> None:
    tensor = torch.tensor([1, 2])
    with mock.patch.object(torch.Tensor, "pin_memory", side_effect=AssertionError):
        assert on_device(tensor, torch.device(device)).device.type == device
