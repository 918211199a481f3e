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

_PREVIOUS = "    previous, _ = look_up(tables, table_row, position - 1, has_previous)\n"

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
        file="kernels/records.py",
        changes=(
            (
                "return records.ptr + slot * records.stride * _WORDS\n",
                "return records.ptr + (slot * records.stride * _WORDS).to(tl.int32)\n",
            ),
        ),
        shows="records are read and stored elsewhere, or a crash, where they lie further than 2**31 words away",
    ),
    PlantedBug(
        name="missing-range-check",
        kind="an index is used unchecked",
        file="kernels/batches.py",
        changes=(
            (
                "known = valid & (index >= 0) & (index < length) & (row > 0) & (row < tokens.num_rows)\n",
                "known = valid & (index >= 0) & (index < length) & (row > 0)\n",
            ),
        ),
        shows="plan, and what verifies without one, expect tokens that they read behind the token pool's last row",
    ),
    PlantedBug(
        name="exclusive-scan",
        kind="wrong order in a scan",
        file="kernels/write.py",
        changes=(("sums = tl.cumsum(terms, axis=0)\n", "sums = tl.cumsum(terms, axis=0) - terms\n"),),
        shows="write stores chains that leave out the token itself",
    ),
    PlantedBug(
        name="lut-twice",
        kind="a table is applied twice",
        file="kernels/batches.py",
        changes=(
            (
                _PREVIOUS,
                _PREVIOUS
                + "    if tables.lut is not None:\n"
                + "        known = has_previous & (previous >= 0) & (previous < tables.lut_len)\n"
                + "        previous = tl.where(known, tl.load(tables.lut + previous, mask=known), previous)\n",
            ),
        ),
        shows="plan and verify_prefixes give predecessors that are no slots of the sliding-window pool",
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
            ("    _check_seeds(write_plan, lengths.nonzero()[:, 0], endpoint, tails, step, violations)\n", ""),
            (
                "    records[slots.take(written)] = new.index_select(0, written)\n",
                "    records[slots.take(written)] = new.index_select(0, written)\n"
                "    _check_seeds(write_plan, lengths.nonzero()[:, 0], endpoint, tails, step, violations)\n",
            ),
        ),
        shows="write reports other PREFIX violations where a seed's slot is written by the same launch",
    ),
    PlantedBug(
        name="shifted-window",
        kind="a window of bytes shifted",
        file="kernels/sources.py",
        changes=(("window = divide(round_,", "window = divide(round_ + 1,"),),
        shows="write and verify fingerprint the bytes after the covered ones",
    ),
    PlantedBug(
        name="word-tail",
        kind="wrong tail of an 8-byte word",
        file="kernels/sources.py",
        changes=(("& (at < window_bytes[:, None])\n", "& (j[None, :] * 8 < window_bytes[:, None])\n"),),
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
        file="kernels/batches.py",
        changes=(("prefix + extend - 1 if tables.AFTER_WRITE", "prefix + extend if tables.AFTER_WRITE"),),
        shows="plan starts one position late where it plans for after the write",
    ),
    PlantedBug(
        name="tile-carry",
        kind="scratch read before it is written",
        file="kernels/write.py",
        changes=(("before = tile - 1 - back - block\n", "before = tile - back - block\n"),),
        shows="write stores wrong chains where a request goes on in another tile",
    ),
    PlantedBug(
        name="stale-neighbour",
        kind="a shortcut taken unasked",
        file="kernels/checking.py",
        changes=((" & (tl.gather(tl.where(readable, slot, 0), before, 0) == previous)", ""),),
        shows="whatever verifies follows the entry before, also where the predecessor is another slot",
    ),
    PlantedBug(
        name="request-gone",
        kind="an index that another launch left is used unchecked",
        file="kernels/verify_resolved.py",
        changes=(("known = live & (r >= 0) & (r < bs)\n", "known = live & (r >= 0)\n"),),
        shows="verify_resolved gives entries of requests that are gone the rows that stand behind the batch's",
    ),
    PlantedBug(
        name="second-tile",
        kind="wrong offset in a persistent loop",
        file="kernels/verify_prefixes.py",
        changes=(
            (
                "at = entry[:, None] * 2 +",
                "at = (entry - first + (pid - 1) * BLOCK)[:, None] * 2 +",
            ),
        ),
        shows="verify_prefixes keeps a program's second tile of entries in place of its first",
    ),
    PlantedBug(
        name="tail-anchor",
        kind="an optional input ignored",
        file="kernels/chain_tails.py",
        changes=(("            anchor = tl.load(anchors_ptr + row)\n", "            anchor = anchor + 0\n"),),
        shows="chain_tails starts every request from the plain anchor",
    ),
    PlantedBug(
        name="guessed-token",
        kind="a shortcut taken unasked",
        file="kernels/chain_tails.py",
        changes=(("(begin == r) & (end == r + 1)", "begin == r"),),
        shows="open_step takes the first token of a longer segment for all of its tokens",
    ),
)
