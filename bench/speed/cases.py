"""The measured cases by name, and their shapes cut down for a CPU."""

from __future__ import annotations

import dataclasses
import fnmatch
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kv_canary.errors import must_be

# What a case does: a whole step around a forward, or the one op that it is named after.
Does = Literal["step", "write", "scatter", "chain_tails", "retire", "move", "sweep"]

ROW_BYTES = 2048
WINDOW_BYTES = 16
QUICK_ROW_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request of a batch.

    Args:
        cached: tokens it has in the cache.
        new: tokens this forward writes for it.
        shared: names of its first blocks of `Case.block` tokens, for those that other requests may have too.
    """

    cached: int
    new: int = 1
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case to measure.

    Args:
        name: as results name it.
        requests: of the batch.
        does: what is launched.
        group: which section of the list it stands in.
        page: consecutive slots that are handed out together.
        window: cached positions a query may read, in a sliding-window pool behind a LUT; 0: all, no LUT.
        stride: every so many blocks of positions are verified.
        row_bytes: bytes of K, and of V, of a token in one layer.
        whole_rows: whether fingerprints cover whole rows, not 16 bytes.
        pool_times: slots of the pool over those that the requests hold.
        most_layers: layers that fingerprints rotate over, where memory allows.
        block: tokens of a shared block.
    """

    name: str
    requests: tuple[Request, ...]
    does: Does = "step"
    group: str = "cases"
    page: int = 1
    window: int = 0
    stride: int = 1
    row_bytes: int = ROW_BYTES
    whole_rows: bool = False
    pool_times: int = 1
    most_layers: int = 8
    block: int = 512

    @property
    def read_bytes(self) -> int:
        """Bytes that a fingerprint of K, or of V, covers of a token."""
        return self.row_bytes if self.whole_rows else min(WINDOW_BYTES, self.row_bytes)

    @property
    def cached(self) -> int:
        """Cached tokens of all requests."""
        return sum(r.cached for r in self.requests)

    @property
    def new(self) -> int:
        """Tokens that all requests write."""
        return sum(r.new for r in self.requests)


def decode(requests: int, cached: int) -> tuple[Request, ...]:
    """Return requests of a decode batch."""
    return (Request(cached=cached),) * requests


def _mixed() -> tuple[Request, ...]:
    """Ragged decodes, and two requests that are being prefilled."""
    lengths = random.Random(0)
    decodes = [Request(cached=lengths.randrange(64, 16384)) for _ in range(126)]
    return (*decodes, Request(cached=0, new=2048), Request(cached=8192, new=2048))


_SLOTS = decode(256, 4096)

MAIN = (
    Case(name="decode 8x512", requests=decode(8, 512)),
    Case(name="decode 256x4096", requests=_SLOTS),
    Case(name="decode 256x4096, pages of 16", requests=_SLOTS, page=16),
    Case(name="decode 256x10240", requests=decode(256, 10240)),
    Case(name="decode 1024x1024", requests=decode(1024, 1024)),
    Case(name="decode 2048x256", requests=decode(2048, 256)),
    Case(name="prefill 1x8192", requests=(Request(cached=0, new=8192),)),
    Case(name="prefill 4x2048", requests=(Request(cached=0, new=2048),) * 4),
    Case(name="chunk 4096 after 16384", requests=(Request(cached=16384, new=4096),)),
    Case(name="mixed", requests=_mixed()),
    Case(name="SWA 128", requests=decode(256, 10240), window=127),
    Case(name="SWA 4096", requests=decode(256, 10240), window=4095),
    Case(name="decode 256x4096, whole rows", requests=_SLOTS, whole_rows=True),
    Case(name="write 8192x2KiB, all bytes", requests=(Request(cached=0, new=8192),), does="write", whole_rows=True),
    Case(name="scatter 256x4096", requests=(Request(cached=0, new=4096),) * 256, does="scatter"),
    Case(name="chain_tails 256x4096", requests=(Request(cached=0, new=4096),) * 256, does="chain_tails"),
    Case(name="retire", requests=decode(16, 4096), does="retire", pool_times=16),
    Case(name="move", requests=decode(16, 4096), does="move", pool_times=16),
    Case(name="sweep 1M slots", requests=_SLOTS, does="sweep"),
)
TOKENS = tuple(
    Case(name=f"decode {n}x4096", requests=decode(n, 4096), group="cached tokens") for n in (1, 4, 16, 32, 64, 128, 640)
)
CAPACITY = tuple(
    Case(
        name=f"decode 256x4096, 1 layer, pool of {times}M slots",
        requests=_SLOTS,
        group="pool capacity",
        pool_times=times,
        most_layers=1,
    )
    for times in (1, 2, 4, 8)
)
STRIDE = tuple(
    Case(name=f"decode 256x4096, stride {n}", requests=_SLOTS, group="stride", stride=n) for n in (2, 4, 8, 16, 32)
)
CASES = (*MAIN, *TOKENS, *CAPACITY, *STRIDE)


def choose(patterns: Sequence[str], cases: Iterable[Case]) -> list[Case]:
    """Return the cases that a name, a pattern (`decode*`) or a group names; all where nothing is named.

    Raises:
        ValueError: a pattern fits none.
    """
    known = list(cases)
    if not patterns:
        return known
    chosen: list[Case] = []
    for pattern in patterns:
        found = [c for c in known if pattern == c.group or fnmatch.fnmatchcase(c.name, pattern)]
        if not found:
            raise ValueError(must_be("bench", "case", "a name, a pattern or a group of `bench --list`", repr(pattern)))
        chosen += [c for c in found if c not in chosen]
    return chosen


def quick(case: Case) -> Case:
    """Return a case of the same name and kind that a CPU, and Triton's interpreter, does in a moment."""
    kept = [*case.requests[:2], case.requests[-1]][: len(case.requests)]
    block = 4 if any(r.shared for r in kept) else case.block
    requests = []
    for i, request in enumerate(kept):
        cached = min(request.cached, 24 + 5 * i)
        requests.append(Request(cached=cached, new=min(request.new, 11), shared=request.shared[: cached // block]))
    return dataclasses.replace(
        case,
        requests=tuple(requests),
        page=min(case.page, 4),
        window=min(case.window, 9),
        row_bytes=QUICK_ROW_BYTES,
        most_layers=min(case.most_layers, 2),
        block=block,
    )
