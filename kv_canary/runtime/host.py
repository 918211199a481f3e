"""Numbers on their way between the host and the device, without waiting for it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Numbers = Sequence[int] | npt.NDArray[np.int64]
# Ways to cut its buffer that a mailbox remembers.
_MOST_CUTS = 256


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


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`; where it is on the host, by a copy that the host does not wait for.

    From memory that is not pinned, a copy to a GPU begins only once all that was launched before it is over, and the
    host waits for that.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as kernels are compiled for: itself, or a copy where it begins between two units of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 or not tensor.is_contiguous() else tensor


def padded_to_units(slots: torch.Tensor) -> torch.Tensor:
    """Return int64 slots with zeros behind them, so that there are a multiple of 16: kernels are compiled for those."""
    padded = slots.new_zeros(-(-len(slots) // 16) * 16)
    padded[: len(slots)] = slots
    return padded


def front(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` of a tensor; the tensor itself where that is all of it, which costs nothing."""
    return tensor if tensor.shape[0] == count else tensor.narrow(0, 0, count)


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
        # By the lengths of views, which come again and again; and how the buffer was cut last.
        self._cuts: dict[tuple[int, ...], _Cut] = {}
        self._cut_last: _Cut | None = None

    def post(self, *columns: Numbers, widths: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return int64 views of the buffer that hold these numbers once what is launched now runs.

        Args:
            columns: one sequence a view.
            widths: of each view, its column's length or more; there are zeros behind the numbers. None: the lengths.
        """
        lengths = tuple(map(len, columns)) if widths is None else tuple(widths)
        cut = self._cuts.get(lengths) or self._cut(lengths)
        sheet = self._free(cut.total)
        values = sheet.values
        for column, (start, end) in zip(columns, cut.places, strict=True):
            last = start + len(column)
            values[start:last] = column
            if last < end:
                values[last:end] = 0
        cut.whole.copy_(sheet.host[: cut.total], non_blocking=True)
        if sheet.sent is not None:
            sheet.sent.record()
        self._sheets.append(sheet)
        self._cut_last = cut
        return cut.views

    @property
    def last(self) -> tuple[torch.Tensor, Sequence[int]]:
        """What was posted last: the tensor that all of it lies in, and the first word of each view.

        Raises:
            RuntimeError: nothing was posted yet.
        """
        if self._cut_last is None:
            raise RuntimeError("kv-canary: Mailbox: something must have been posted before, got nothing")
        return self._cut_last.whole, [start for start, _ in self._cut_last.places]

    def _cut(self, lengths: tuple[int, ...]) -> _Cut:
        """Return how the buffer, which grows where it has to, is cut into views of these lengths."""
        # Every view begins on 16 bytes, whatever the lengths: kernels are compiled for that.
        starts = list(itertools.accumulate((length + length % 2 for length in lengths), initial=0))
        total = starts.pop()
        if total > len(self.buffer):
            let_go(self.buffer)
            self.buffer = torch.zeros(max(total, 2 * len(self.buffer)), dtype=torch.int64, device=self.buffer.device)
            self._cuts.clear()
        places = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        cut = _Cut(total, places, self.buffer[:total], [self.buffer[start:end] for start, end in places])
        if len(self._cuts) >= _MOST_CUTS:
            self._cuts.clear()
        self._cuts[lengths] = cut
        return cut

    def _free(self, words: int) -> _Sheet:
        """Return pinned memory of so many words that no copy reads any more."""
        while self._sheets and len(self._sheets[0].values) < words:
            # PyTorch keeps it until the copies out of it are over.
            self._sheets.popleft()
        if self._sheets and (self._sheets[0].sent is None or self._sheets[0].sent.query()):
            return self._sheets.popleft()
        return _Sheet(len(self.buffer), self.buffer.device)


class _Cut(NamedTuple):
    """A way to cut a buffer: words in all, first and last of each view, the words, and the views."""

    total: int
    places: Sequence[tuple[int, int]]
    whole: torch.Tensor
    views: list[torch.Tensor]


@torch.inference_mode(False)
def pinned(words: int, device: torch.device) -> torch.Tensor:
    """Return int64 [words] on the host, zeroed, which copies to and from `device` need not wait for.

    In whatever mode the engine is, it can be written to in any other.
    """
    return torch.zeros(words, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")


class HostWords:
    """Words on the host that the device reads and writes.

    On a GPU by kernels, to and from pinned memory: what is launched behind a copy by a copy engine begins 10 us late.

    Args:
        words: how many.
        device: that they go to and come from.

    Attributes:
        host: int64 [words], zeros until something is there.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.host = pinned(words, device)
        # As the device sees them; None: it does not.
        self._mapped = _mapped(self.host, device) if device.type == "cuda" else self.host
        self._device, self._copy = device, self._mapped

    def send(self) -> torch.Tensor:
        """Return the words where the device reads them, always in one place, by a copy where it cannot on the host.

        They must stay as they are until what reads them has run.
        """
        if self._copy is None:
            self._copy = torch.zeros_like(self.host, device=self._device)
        if self._mapped is None:
            self._copy.copy_(self.host, non_blocking=True)
        return self._copy

    def bring(self, there: torch.Tensor) -> None:
        """Copy int64 `there` [words] to the host, without waiting for it."""
        if self._mapped is None:
            self.host.copy_(there, non_blocking=True)
        else:
            torch.add(there, 0, out=self._mapped)


class _Pinned:
    """Pinned int64 [words], as PyTorch reads what lies where a GPU can reach it."""

    def __init__(self, host: torch.Tensor) -> None:
        # Kept for as long as anybody has what was made of this.
        self._host = host
        self.__cuda_array_interface__ = {
            "shape": tuple(host.shape),
            "typestr": "<i8",
            "data": (host.data_ptr(), False),
            "version": 3,
        }


@torch.inference_mode(False)
def _mapped(host: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """Return pinned memory as a GPU sees it; None where PyTorch takes none, or the GPU has another address for it."""
    try:
        found = torch.as_tensor(_Pinned(host), device=device)
    except (RuntimeError, TypeError, ValueError):
        return None
    return found if found.data_ptr() == host.data_ptr() else None


class _Sheet:
    """Pinned memory, and the event behind the last copy out of it."""

    def __init__(self, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = pinned(words, device)
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


def copy_front(buffer: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into the front of `buffer` as far as it fits, without waiting for the device."""
    n = min(tensor.shape[0], buffer.shape[0])
    front(buffer, n).copy_(front(tensor, n), non_blocking=True)


def copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second of each pair into the front of the first, by one launch where both are on a GPU."""
    buffers, tensors = list[torch.Tensor](), list[torch.Tensor]()
    for buffer, tensor in pairs:
        if tensor.device != buffer.device or not tensor.is_cuda:
            copy_front(buffer, tensor)
            continue
        n = min(buffer.shape[0], tensor.shape[0])
        buffers.append(front(buffer, n))
        tensors.append(front(tensor, n))
    if buffers:
        torch._foreach_copy_(buffers, tensors)
