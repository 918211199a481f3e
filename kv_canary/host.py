"""Host values on their way to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def send(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return int64 tensors on `device` of these numbers, by one copy that the host does not wait for.

    The pinned memory that it is made from is PyTorch's, which hands none on before the copies out of it are over.
    """
    total = sum(map(len, columns))
    host = torch.empty(total, dtype=torch.int64, pin_memory=device.type == "cuda")
    values = host.numpy()
    start = 0
    for column in columns:
        values[start : start + len(column)] = np.asarray(column, dtype=np.int64)
        start += len(column)
    parts: tuple[torch.Tensor, ...] = host.to(device, non_blocking=True).split([len(column) for column in columns])
    return parts


def fill(buffer: torch.Tensor, *columns: Sequence[int]) -> None:
    """Put numbers into the first elements of the rows of `buffer` [rows, n], zeros behind them, without waiting."""
    host = torch.zeros(buffer.shape, dtype=torch.int64, pin_memory=buffer.is_cuda)
    values = host.numpy()
    for row, column in zip(values, columns, strict=True):
        row[: len(column)] = column
    buffer.copy_(host, non_blocking=True)


def let_go(*tensors: torch.Tensor) -> None:
    """Let the memory of `tensors` be used for something else only once all that was launched up to here is over.

    For what is replaced by something larger: it may have been allocated on another stream than the one it is used on.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
