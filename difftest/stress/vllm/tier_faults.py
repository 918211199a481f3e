"""The ways in which copies between vLLM's device and host memory go wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kv_canary.difftest.stress import causes, tier_lives

# Makes a copy wrong: given the worker, the blocks on the device, the places on the host, whether the copy is already
# made, and where choices come from; returns whether the copy is left out.
Mistake = Callable[[Any, Any, Any, bool, random.Random], bool]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which a tier goes wrong.

    Args:
        name, doc: what it is called, and what goes wrong.
        right, half: see `causes`.
        of: which copy: to the host ("store") or back; or none, but what lies there.
        do: makes it wrong; None for what lies there.
        leaves_one: whether it happens on all ranks but one.
    """

    name: str
    doc: str
    right: Sequence[str] = causes.CAME_WRONG
    half: Sequence[str] = ()
    of: Literal["store", "load", "host"] = "load"
    do: Mistake | None = None
    leaves_one: bool = False


def _random(rows: Any, places: Any, rng: random.Random) -> None:
    import torch

    at = int(rng.choice(list(places)))
    rows[at] = torch.randint(-128, 127, rows[at].shape, dtype=rows.dtype)


def _too_early(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        _random(worker.rows("host", rng.randrange(len(worker.device))), places, rng)
    return False


def _written_before(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if not is_made:
        _random(worker.rows("device", rng.randrange(len(worker.device))), blocks, rng)
    return False


def _left_out(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    return True


def _one_layer_skipped(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    skipped = rng.randrange(len(worker.device))
    for tensor in range(len(worker.device)):
        if tensor != skipped:
            worker.rows("device", tensor)[blocks] = worker.rows("host", tensor)[places]
    return True


def _one_base_for_two(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    """Two layers' tensors have one address on the host: vllm#57661's form."""
    first, second = rng.sample(range(len(worker.device)), 2)
    if is_made:
        worker.rows("device", second)[blocks] = worker.rows("host", first)[places]
    return False


def _k_into_v(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        tensor = rng.randrange(len(worker.device))
        device, host = worker.rows("device", tensor), worker.rows("host", tensor)
        half = device.shape[1] // 2
        for block, place in zip(blocks, places, strict=True):
            device[block, half:] = host[place, :half]
    return False


def _order(blocks: Any, places: Any, others: Any, worker: Any) -> bool:
    for tensor in range(len(worker.device)):
        worker.rows("device", tensor)[blocks] = worker.rows("host", tensor)[others]
    return True


def _swapped(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        return False
    others = places.copy()
    a, b = rng.sample(range(len(places)), 2)
    others[[a, b]] = others[[b, a]]
    return _order(blocks, places, others, worker)


def _half_as_long(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    """Numbers of kernels' blocks for the scheduler's: vllm#28677's form."""
    return False if is_made else _order(blocks, places, places // 2, worker)


def _reused_meanwhile(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if not is_made:
        _random(worker.rows("host", rng.randrange(len(worker.device))), places, rng)
    return False


FAULTS = (
    Fault(name="backed up too early", doc="a store copies a block before it is written", of="store", do=_too_early),
    Fault(
        name="device slots reused during the backup",
        doc="others write to a block while it is copied to the host",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        of="store",
        do=_written_before,
    ),
    Fault(name="backup dropped", doc="a store is acknowledged and never made", of="store", do=_left_out),
    Fault(
        name="one bit on the host",
        doc="a random bit of host memory flips",
        right=causes.CHANGED,
        half=causes.CAME_WRONG,
        of="host",
    ),
    Fault(name="load dropped", doc="a load is acknowledged and never made: vllm#52234's form", do=_left_out),
    Fault(name="one layer skipped", doc="a load leaves a layer out", do=_one_layer_skipped),
    Fault(name="one address for two layers", doc="a load brings one layer's KV to another too", do=_one_base_for_two),
    Fault(name="K into V", doc="a load puts K where V belongs", do=_k_into_v),
    Fault(name="two blocks swapped", doc="a load takes two blocks in each other's place", do=_swapped),
    Fault(name="blocks of half the length", doc="a load counts blocks as half as long as they are", do=_half_as_long),
    Fault(
        name="host slots reused during the load",
        doc="others write to the host's slots while they are loaded",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        do=_reused_meanwhile,
    ),
    Fault(
        name="one rank loads alone",
        doc="a load is made on one rank, and acknowledged and never made on the others",
        do=_left_out,
        leaves_one=True,
    ),
)
HEALTHY = Fault(name=tier_lives.HEALTHY, doc="nothing goes wrong")


def mistake(name: str) -> Mistake:
    """Return what a fault does to a copy."""
    return next(fault.do for fault in FAULTS if fault.name == name and fault.do is not None)
