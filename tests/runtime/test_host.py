"""What the host sends lies on the device as far as there is room for it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from kv_canary.runtime import host
from kv_canary.runtime.host import HostWords, copy_all, on_device


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


def test_words_come_to_the_host_and_go_from_there() -> None:
    words = HostWords(3, torch.device("cpu"))
    assert words.host.tolist() == [0, 0, 0]
    words.bring(torch.tensor([1, 2, 3]))
    assert words.host.tolist() == [1, 2, 3]
    there = words.send()
    words.host[0] = 7
    assert words.send() is there
    assert there.tolist() == [7, 2, 3]


def test_a_gpu_reads_and_writes_the_hosts_words_by_kernels() -> None:
    """A copy engine's copy would hold up what is launched behind it."""
    seen = torch.zeros(2, dtype=torch.int64)
    with mock.patch.object(host, "pinned", return_value=seen), mock.patch.object(torch, "as_tensor") as read:
        read.side_effect = lambda pinned, device: seen
        words = HostWords(2, torch.device("cuda", 1))
    (pinned,), named = read.call_args
    assert pinned.__cuda_array_interface__ == {
        "shape": (2,),
        "typestr": "<i8",
        "data": (seen.data_ptr(), False),
        "version": 3,
    }
    assert named == {"device": torch.device("cuda", 1)}
    with mock.patch.object(torch.Tensor, "copy_", side_effect=AssertionError("a copy engine's copy")):
        words.bring(torch.tensor([4, 5]))
        there = words.send()
    assert words.host.tolist() == there.tolist() == [4, 5]


@pytest.mark.parametrize("why", ["another address", RuntimeError, TypeError, ValueError])
def test_what_a_gpu_cannot_read_in_place_is_copied(why: Any) -> None:
    seen, copy = (torch.zeros(2, dtype=torch.int64) for _ in range(2))
    with mock.patch.object(host, "pinned", return_value=seen), mock.patch.object(torch, "as_tensor") as read:
        read.side_effect = [copy] if isinstance(why, str) else why("not here")
        words = HostWords(2, torch.device("cuda", 1))
    words.bring(torch.tensor([4, 5]))
    with mock.patch.object(torch, "zeros_like", return_value=torch.zeros(2, dtype=torch.int64)) as made:
        there = words.send()
        words.host[0] = 4
        assert words.send() is there is not seen
    made.assert_called_once_with(seen, device=torch.device("cuda", 1))
    assert words.host.tolist() == there.tolist() == [4, 5]
    assert copy.tolist() == [0, 0]
