"""What the host sends lies on the device as far as there is room for it."""

from __future__ import annotations

import pytest
import torch

from kv_canary.runtime.host import copy_all


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
