"""The ranks that compare notes, and one exchange of words between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import torch

from kv_canary.errors import must_be

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup, ProcessGroupGloo

# The first and the longest pause between two looks at whether an exchange is over, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


class RankGroup:
    """The ranks that run the same forwards of the same requests, each on its share of the KV: tensor parallel ones.

    Args:
        group: a group of torch.distributed that carries tensors of the CPU, as Gloo does, also where the KV is on GPUs.
            It serves one canary manager of each rank and NOTHING else: a collective of the engine's between two of the
            canary's would be taken for one of them. Once the ranks came apart it is used no more: they meet again in
            a Gloo group of the canary's own, made through the same store.
        timeout: seconds that a rank waits for the others before it goes on alone. What is under way in the group is
            given up after the group's own timeout, which should be as long; `new` makes such a group.

    Raises:
        ValueError: the timeout is not positive, or the group carries tensors of GPUs only.
    """

    def __init__(self, group: ProcessGroup, *, timeout: float = 60.0) -> None:
        import torch.distributed as dist

        if not timeout > 0:
            raise ValueError(must_be("RankGroup", "timeout", "above 0 seconds", str(timeout)))
        backends = dist.get_backend_config(group)
        if "cpu:" not in backends:
            expected = (
                "one that carries CPU tensors, as gloo does (over NCCL a rank that died would hang the others; "
                "engines have a CPU group, and RankGroup.new makes one)"
            )
            raise ValueError(must_be("RankGroup", "group", expected, backends))
        self.group, self.timeout = group, timeout
        self._claimed = False
        # What carries exchanges since the ranks met again; and what did so before, until it is let go of.
        self._fresh: ProcessGroupGloo | None = None
        self._left: list[ProcessGroupGloo | None] = []

    @classmethod
    def new(cls, ranks: Sequence[int] | None = None, *, timeout: float = 60.0) -> Self | None:
        """Return a new Gloo group for the canary; None in a process that is not one of its ranks.

        EVERY process of the default group has to make this call, in the same order, as with `new_group`.

        Args:
            ranks: of the default group; None: all.
            timeout: see the class.
        """
        import torch.distributed as dist

        members = None if ranks is None else list(ranks)
        group = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout))
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        return cls(group, timeout=timeout)

    @property
    def rank(self) -> int:
        """Number of this rank within the group."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    def claim(self) -> None:
        """Take the group for one manager.

        Raises:
            RuntimeError: another one has it.
        """
        if self._claimed:
            raise RuntimeError("kv-canary: RankGroup: a group must serve one manager, got a second one")
        self._claimed = True

    def gather(self, words: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to gather every rank's int64 [n] `words`; return int64 [ranks, n] where they will be, and the work."""
        import torch.distributed as dist

        if self._fresh is not None:
            return gather(self._fresh, words, seconds=self.timeout)
        received = torch.empty(self.size, len(words), dtype=torch.int64)
        return received, dist.all_gather(list(received.unbind(0)), words, group=self.group, async_op=True)

    def store(self) -> Store:
        """Return the store through which the group was made, over a connection that nobody else uses.

        Raises:
            RuntimeError: the group has none, or it cannot be reached.
        """
        import torch.distributed as dist

        store: Any = self.group.get_group_store()
        return dist.PrefixStore("kv_canary", store.clone())  # type: ignore[attr-defined]

    def carry(self, fresh: ProcessGroupGloo) -> None:
        """Exchange through `fresh` from now on."""
        self._fresh = fresh

    def leave(self) -> None:
        """Exchange nothing more through the group that came apart; this waits for nothing."""
        # Never the last reference: letting go of a group waits for what is under way in it.
        self._left.append(self._fresh)
        self._fresh = None

    def forget_left(self) -> None:
        """Let go of the groups that were left, which waits for what is under way in them."""
        self._left.clear()


def gather(group: ProcessGroupGloo, words: torch.Tensor, *, seconds: float) -> tuple[torch.Tensor, Any]:
    """Begin to gather every rank's int64 [n] `words`; return int64 [ranks, n] where they will be, and the work.

    Args:
        group: of all ranks, unknown to torch.distributed.
        words: on the CPU.
        seconds: after which the work fails.
    """
    from torch._C._distributed_c10d import AllgatherOptions

    options = AllgatherOptions()
    options.timeout = timedelta(seconds=seconds)
    received = torch.empty(group.size(), len(words), dtype=torch.int64)
    backend: Any = group
    return received, backend.allgather([list(received.unbind(0))], [words], options)


class Exchange:
    """An all_gather of int64 words under way: every rank gives as many, and gets everybody's.

    Args:
        ranks: the group.
        words: int64 [n] on the CPU; n is the same in every exchange of every rank.
    """

    def __init__(self, ranks: RankGroup, words: torch.Tensor) -> None:
        self.began = time.monotonic()
        self._received, self._work = ranks.gather(words)

    def done(self) -> bool:
        """Return whether it is over.

        Raises:
            RuntimeError: it failed.
        """
        if not self._work.is_completed():
            return False
        # It is over: this only raises what it failed with.
        self._work.wait()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until it is over, so many seconds at most; return whether it is.

        Raises:
            RuntimeError: it failed.
        """
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while not self.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def received(self) -> torch.Tensor:
        """Return int64 [ranks, n] what each rank gave; to be asked for once it is over."""
        return self._received
