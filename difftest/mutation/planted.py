"""Planted bugs: mistakes that people make in such kernels, put in on purpose, to see what finding them looks like.

Each is a change of source text, loaded beside the real sources; nothing on disk changes, and only this process is
affected.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kv_canary.difftest.mutation.overlay import overlaid, read_source
from kv_canary.errors import must_be


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """A bug that can be planted.

    Args:
        name: what it is called on the command line.
        kind: the mistake, in a few words.
        file: the source that it is in.
        changes: (old text, new text), each old one found exactly once in the source.
        shows: what the differential check reports.
    """

    name: str
    kind: str
    file: str
    changes: tuple[tuple[str, str], ...]
    shows: str


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug for the `with` block.

    Raises:
        ValueError: there is no such bug, or the source no longer reads as it expects.
    """
    bug = find_planted(name)
    with overlaid(bug.file, planted_source(bug, read_source(bug.file))):
        yield


def plant(name: str) -> None:
    """Plant a bug for the rest of this process.

    Raises:
        ValueError: as `planted`.
    """
    _for_good.enter_context(planted(name))


def find_planted(name: str) -> PlantedBug:
    """Return the bug called `name`.

    Raises:
        ValueError: there is none.
    """
    for bug in PLANTED_BUGS:
        if bug.name == name:
            return bug
    raise ValueError(must_be("difftest", "plant", f"one of {', '.join(b.name for b in PLANTED_BUGS)}", repr(name)))


def planted_source(bug: PlantedBug, source: str) -> str:
    """Return `source` with the bug in it.

    Raises:
        ValueError: a text that it replaces is not found exactly once.
    """
    for old, new in bug.changes:
        if source.count(old) != 1:
            expected = f"found once in {bug.file}"
            raise ValueError(
                must_be("difftest", f"text of planted bug {bug.name}", expected, f"{source.count(old)}: {old}")
            )
        source = source.replace(old, new)
    return source


_for_good = ExitStack()

_SUMS = "chain_terms(ident, lane, live, TILE_BITS)"
_PREVIOUS = (
    "        previous, _ = _look_up(req_to_token_ptr, row_stride, row, position - 1, has_previous, lut_ptr, lut_len)\n"
)

PLANTED_BUGS = (
    PlantedBug(
        name="tile-edge",
        kind="wrong mask at a tile edge",
        file="kernels/plan.py",
        changes=(("        valid = entry < n\n", "        valid = (entry < n) & (entry + 1 < first + BLOCK)\n"),),
        shows="plan leaves the last entry of every full tile of 256 as it was",
    ),
    PlantedBug(
        name="int32-address",
        kind="an address overflows int32",
        file="kernels/write.py",
        changes=(
            (
                "record_ptr = records_ptr + slot * record_stride\n",
                "record_ptr = records_ptr + (slot * record_stride).to(tl.int32)\n",
            ),
        ),
        shows="write stores records elsewhere, or crashes, where rows lie further than 2**31 elements from the first",
    ),
    PlantedBug(
        name="missing-range-check",
        kind="an index is used unchecked",
        file="kernels/plan.py",
        changes=(
            (
                "known = valid & (index >= 0) & (index < length) & (row < token_rows)\n",
                "known = valid & (index >= 0) & (index < length)\n",
            ),
        ),
        shows="plan expects tokens that it read behind the token pool's last row",
    ),
    PlantedBug(
        name="exclusive-scan",
        kind="wrong order in a scan",
        file="kernels/write.py",
        changes=((f"carry + tl.cumsum({_SUMS}, axis=0)\n", f"carry + tl.cumsum({_SUMS}, axis=0) - {_SUMS}\n"),),
        shows="write stores chains that leave out the token itself",
    ),
    PlantedBug(
        name="lut-twice",
        kind="a table is applied twice",
        file="kernels/plan.py",
        changes=(
            (
                _PREVIOUS,
                _PREVIOUS
                + "        if lut_ptr is not None:\n"
                + "            known = has_previous & (previous >= 0) & (previous < lut_len)\n"
                + "            previous = tl.where(known, tl.load(lut_ptr + previous, mask=known), previous)\n",
            ),
        ),
        shows="plan gives predecessors that are no slots of the sliding-window pool",
    ),
    PlantedBug(
        name="owner-mask",
        kind="a number compared with its low bits",
        file="kernels/write.py",
        changes=(("!= (owner & _OWNER_MASK)\n", "!= owner\n"),),
        shows="write reports OVERWRITE of a request's own records once its serial number passes 2**24",
    ),
    PlantedBug(
        name="ring-row-lost",
        kind="off by one at a capacity",
        file="kernels/reporting.py",
        changes=(("(index < ring_cap)", "(index < ring_cap - 1)"),),
        shows="verify or write leaves the last row of a violation ring that fills up as it was",
    ),
    PlantedBug(
        name="seed-after-store",
        kind="read after write",
        file="reference/write.py",
        changes=(
            ("    _check_seeds(write_plan, request.unique(), endpoint, tails, step, violations)\n", ""),
            (
                "    records[slots[stored]] = new[stored]\n",
                "    records[slots[stored]] = new[stored]\n"
                "    _check_seeds(write_plan, request.unique(), endpoint, tails, step, violations)\n",
            ),
        ),
        shows="write reports other PREFIX violations where a seed's slot is written by the same launch",
    ),
    PlantedBug(
        name="shifted-window",
        kind="a window of bytes shifted",
        file="kernels/hashing.py",
        changes=(
            (
                "window_start = (position // num_layers) % num_windows * read_bytes\n",
                "window_start = (position // num_layers + 1) % num_windows * read_bytes\n",
            ),
        ),
        shows="write and verify fingerprint the bytes after the covered ones",
    ),
    PlantedBug(
        name="word-tail",
        kind="wrong tail of an 8-byte word",
        file="kernels/hashing.py",
        changes=(("& (at < window_bytes[:, None])\n", "& (in_window < window_bytes[:, None])\n"),),
        shows="write and verify fingerprint bytes past the window where its length is no multiple of 8",
    ),
    PlantedBug(
        name="retired-moves",
        kind="a state not looked at",
        file="kernels/move.py",
        changes=(
            (
                "alive = ((ident | chain | kv | writer) != 0) & (writer >= 0)\n",
                "alive = (ident | chain | kv | writer) != 0\n",
            ),
        ),
        shows="move brings the records of freed slots back to life",
    ),
    PlantedBug(
        name="ring-window",
        kind="off by one in a length",
        file="kernels/plan.py",
        changes=(("prefix + extend - 1 if AFTER_WRITE", "prefix + extend if AFTER_WRITE"),),
        shows="plan starts one position late where it plans for after the write",
    ),
    PlantedBug(
        name="tile-carry",
        kind="scratch read before it is written",
        file="kernels/write.py",
        changes=(("for before in range(carried, tile):\n", "for before in range(carried, tile + 1):\n"),),
        shows="write stores wrong chains in the last tile of every request",
    ),
    PlantedBug(
        name="tail-anchor",
        kind="an optional input ignored",
        file="kernels/chain_tails.py",
        changes=(("            anchor = tl.load(anchors_ptr + row)\n", "            anchor = anchor + 0\n"),),
        shows="chain_tails starts every request from the plain anchor",
    ),
)
