"""Host values on their way to the device, without waiting for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[int] | npt.NDArray[np.int64]
# Sets of views that a mailbox remembers.
_MOST_VIEWS = 256


def send(device: torch.device, *columns: Numbers) -> tuple[torch.Tensor, ...]:
    """Return int64 tensors on `device` of these numbers, by one copy that the host does not wait for.

    The pinned memory that it is made from is PyTorch's, which hands none on before the copies out of it are over.
    What is sent at every step goes by a `Mailbox` instead.
    """
    total = sum(map(len, columns))
    host = torch.empty(total, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    values = host.numpy()
    start = 0
    for column in columns:
        values[start : start + len(column)] = np.asarray(column, dtype=np.int64)
        start += len(column)
    parts: tuple[torch.Tensor, ...] = host.to(device, non_blocking=True).split([len(column) for column in columns])
    return parts


class Mailbox:
    """Numbers on their way to one buffer on the device, which the next ones overwrite.

    Nothing is allocated once the buffer is long enough, and as many copies were under way as there ever are. All that
    reads the buffer, and the next `post`, must be on one stream.

    Args:
        device: where the buffer is.
        words: that it has room for at once; more make it grow, to another address.
    """

    def __init__(self, device: torch.device, *, words: int) -> None:
        self.buffer = torch.zeros(words, dtype=torch.int64, device=device)
        # Pinned, with the event behind the last copy out of each, oldest first.
        self._sheets: deque[_Sheet] = deque()
        # Views of the buffer, by their lengths: those of a batch come again and again.
        self._views: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def post(self, *columns: Numbers, widths: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return int64 views of the buffer that hold these numbers once what is launched now runs.

        Args:
            columns: one sequence a view.
            widths: of each view, its column's length or more; there are zeros behind the numbers. None: the lengths.
        """
        lengths = tuple(map(len, columns)) if widths is None else tuple(widths)
        # Every view begins on 16 bytes, whatever the lengths: kernels are compiled for that.
        total = sum(lengths) + sum(length % 2 for length in lengths)
        if total > len(self.buffer):
            let_go(self.buffer)
            self.buffer = torch.zeros(max(total, 2 * len(self.buffer)), dtype=torch.int64, device=self.buffer.device)
            self._views.clear()
        sheet, start = self._free(total), 0
        for column, length in zip(columns, lengths, strict=True):
            end = start + len(column)
            sheet.values[start:end] = column
            if end < start + length:
                sheet.values[end : start + length] = 0
            start += length + length % 2
        self.buffer[:total].copy_(sheet.host[:total], non_blocking=True)
        if sheet.sent is not None:
            sheet.sent.record()
        self._sheets.append(sheet)
        return self._cut(lengths)

    def _cut(self, lengths: tuple[int, ...]) -> list[torch.Tensor]:
        """Return views of the buffer of these lengths."""
        views = self._views.get(lengths)
        if views is None:
            starts = itertools.accumulate((length + length % 2 for length in lengths), initial=0)
            views = [self.buffer[start : start + length] for start, length in zip(starts, lengths, strict=False)]
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            self._views[lengths] = views
        return views

    def _free(self, words: int) -> _Sheet:
        """Return pinned memory of so many words that no copy reads any more."""
        while self._sheets and len(self._sheets[0].values) < words:
            # PyTorch keeps it until the copies out of it are over.
            self._sheets.popleft()
        if self._sheets and (self._sheets[0].sent is None or self._sheets[0].sent.query()):
            return self._sheets.popleft()
        return _Sheet(len(self.buffer), self.buffer.device)


class _Sheet:
    """Pinned memory, and the event behind the last copy out of it."""

    def __init__(self, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.values = self.host.numpy()
        # Not torch.cuda.Event, whose record() takes seven times as long.
        self.sent = torch.Event(device) if on_gpu else None


def let_go(*tensors: torch.Tensor) -> None:
    """Let the memory of `tensors` be used for something else only once all that was launched up to here is over.

    For what is replaced by something larger: it may have been allocated on another stream than the one it is used on.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
