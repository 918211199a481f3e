"""Reads thousands of mutated case files or bundles in this process, and prints what came of them, as JSON.

    python mutate.py cases|bundles COUNT FOLDER

A process of its own, so that its largest resident size is that of reading them and of nothing else. What may be raised
is what the functions document; what else is raised is told with the number of the mutation, which is also its seed.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import random
import resource
import sys
import time
import traceback
import types
import typing
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

# Small, and between them of every kind of argument.
SMALL_CASES = ("retire-retire-unwritten", "move-retired-moves", "scatter_token_ids-row-end", "verify-ring-row-lost")
NUMBERS = (-1, 0, 1, 2, 255, 1 << 16, 2 * 10**8, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 10**30)
TEXTS = ("", "x", "\x1b[2J", "[/bold]", "[bold", "\ud800", "\u202e", "../ops.py", "os", "verify", "x" * 20_000, "1e999")


def any_value(rng: random.Random) -> Any:
    """A value of any kind, of which most are wrong anywhere."""
    number, text = rng.choice(NUMBERS), rng.choice(TEXTS)
    single: list[Any] = [None, True, False, number, number, float(number % 7), float("nan"), float("inf"), text]
    return rng.choice([*single, [], {}, [number], {"x": number}, [[[[[]]]]], {"fields": {}}, [text] * 3])


def any_plain(rng: random.Random) -> Any:
    """The same, and what only a case file can hold."""
    tensors: list[Any] = [
        torch.zeros(3),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.arange(8)[::2],
        torch.arange(rng.choice([0, 1, 2, 64])),
        torch.zeros(1, dtype=torch.uint8).expand(1 << 30),
        torch.zeros(rng.choice([0, 1, 24, 64]), dtype=torch.uint8),
        torch.zeros(1, device="meta"),
    ]
    others: list[Any] = [torch.float32, torch.int8, torch.complex128, torch.float8_e4m3fn, torch.quint8, torch.bool]
    shapes = [tuple(rng.choice(NUMBERS[:10]) for _ in range(rng.randrange(4))) for _ in range(4)]
    return rng.choice([any_value(rng), rng.choice(tensors), rng.choice(others), *shapes, torch.Size([2, 3])])


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in `value`, as its container and its key or index there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        found.append((value, key))
        places(value[key], found)
    return found


def restructured(value: Any, rng: random.Random, other: Callable[[random.Random], Any]) -> Any:
    """`value` with one to three of its parts changed, removed, renamed, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        all_places = places(value, [])
        if not all_places:
            return other(rng)
        holder, key = rng.choice(all_places)
        old = holder[key]
        act = rng.randrange(9)
        if act == 0:
            del holder[key]
        elif act == 1 and isinstance(holder, dict):
            holder[rng.choice([*TEXTS, "tensor", "fields", "rows"])] = holder.pop(key)
        elif act == 2 and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(old)] * rng.choice([1, 2, 300])
        elif act == 3:
            another, place = rng.choice(all_places)
            holder[key] = copy.deepcopy(another.get(place) if isinstance(another, dict) else old)
        elif act in (4, 5) and type(old) is int:
            holder[key] = rng.choice([old + 1, old - 1, -old, old * 1000, old << 40, old + rng.choice(NUMBERS)])
        elif act in (4, 5) and isinstance(old, tuple) and old:
            changed = [rng.choice([*NUMBERS, n]) if rng.random() < 0.5 else n for n in old]
            holder[key] = tuple(changed[: rng.choice([len(old), len(old), 1])])
        elif act == 6 and isinstance(old, str):
            holder[key] = rng.choice([old + "x", old[:-1], old * 3000, *TEXTS])
        else:
            holder[key] = other(rng)
    return value


def damaged(content: bytes, rng: random.Random) -> bytes:
    """`content` with some of its bytes changed, removed, inserted or doubled."""
    some = bytearray(content or b"\0")
    at = rng.randrange(len(some) + 1)
    end = min(len(some), at + rng.choice([1, 2, 8, 100]))
    act = rng.randrange(6)
    if act in (0, 1):
        for _ in range(rng.choice([1, 1, 2, 8])):
            some[rng.randrange(len(some))] ^= 1 << rng.randrange(8)
    elif act == 2:
        del some[at:]
    elif act == 3:
        del some[at:end]
    elif act == 4:
        some[at:at] = rng.choice([rng.randbytes(rng.choice([1, 4, 50])), bytes(some[at:end])])
    else:
        some[at:end] = b"\xff" * (end - at)
    return bytes(some)


def rearchived(content: bytes, rng: random.Random) -> bytes:
    """A container with another record, of the right checksum: most often the pickle, which is what is interpreted."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as written:
        names = archive.namelist()
        pickle = next(n for n in names if n.endswith("data.pkl"))
        chosen = pickle if rng.random() < 0.6 else rng.choice(names)
        for name in names:
            record = archive.read(name)
            if name == chosen and rng.random() < 0.02:
                # A list in a list in a list, or many values at once.
                record = record[:2] + rng.choice([b"]" * 10_000 + b"a" * 9_999, b"(" * 10_000, b"N" * 10_000]) + b"."
            elif name == chosen:
                record = damaged(record, rng) if name == pickle or rng.random() < 0.3 else rng.randbytes(len(record))
            kind = rng.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED])
            written.writestr(zipfile.ZipInfo(name), record, compress_type=kind)
    return out.getvalue()


def relaid(content: Any, rng: random.Random) -> Any:
    """`content` with a tensor of another shape, of which it is consistent: few bytes that may stand for many."""
    content = copy.deepcopy(content)
    packed = rng.choice([holder[key] for holder, key in places(content, []) if key == "tensor"])
    item, inner = packed["dtype"].itemsize, packed["shape"][1:]
    width = item
    for extent in inner:
        width *= extent
    num_rows = rng.choice([0, 1, 2, 5, 1000, 1 << 20, 1 << 24, 10**8, 2 * 10**8, 1 << 32, 1 << 43])
    rows = sorted({rng.randrange(num_rows) for _ in range(rng.choice([0, 1, 3]))}) if num_rows else None
    packed["shape"] = (num_rows, *inner)
    if rng.random() < 0.3 and inner:
        packed["stride"] = (
            rng.choice([0, 1, inner[0], 4 * inner[0], 1 << 10, 1 << 31, 1 << 40]),
            *packed["stride"][1:],
        )
    packed["rows"] = None if rows is None or not width else torch.tensor(rows, dtype=torch.int64)
    packed["content"] = torch.zeros(len(rows or ()) * width, dtype=torch.uint8)
    if rng.random() < 0.3:
        packed["phase"] = rng.randrange(-1, 18)
    return content


def archived(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


class Cases:
    """Case files: loaded and shown as `replay` does before it runs them."""

    def __init__(self) -> None:
        from kv_canary.difftest.corpus import FOLDER

        self.originals = [(FOLDER / f"{name}.kvcase").read_bytes() for name in SMALL_CASES]
        self.contents = [torch.load(io.BytesIO(c), weights_only=True) for c in self.originals]

    def mutated(self, rng: random.Random) -> bytes:
        # The last one is the largest.
        which, how = rng.choice([0, 0, 1, 1, 2, 2, 3]), rng.random()
        if how < 0.15:
            return damaged(self.originals[which], rng)
        if how < 0.5:
            return rearchived(self.originals[which], rng)
        if how < 0.7:
            return archived(relaid(self.contents[which], rng))
        return archived(restructured(self.contents[which], rng, any_plain))

    def read(self, path: Path, console: Console) -> None:
        from kv_canary.cases.casefile import imports_of, load
        from kv_canary.cases.imports import check_imports
        from kv_canary.difftest.console import call_table

        if path.stat().st_size % 4 == 0:
            check_imports(imports_of(path), [])
        console.print(call_table(load(path)))


class Bundles:
    """Bundles: read, and shown as `kv-canary report` does in all its ways."""

    def __init__(self) -> None:
        from kv_canary.reports.bundle import FORMAT, VERSION, Bundle

        rng = random.Random(0)
        self.contents = [
            json.loads(json.dumps({**sample(Bundle, rng), "format": FORMAT, "version": VERSION})) for _ in range(3)
        ]

    def mutated(self, rng: random.Random) -> bytes:
        content, how = rng.choice(self.contents), rng.random()
        if how < 0.02:
            # Nested deeper than anybody reads.
            whole, depth = json.dumps(content), rng.choice([300, 900, 20_000])
            return whole.replace('"config": ', '"config": {"x": ' + "[" * depth + "]" * depth + '}, "y": ', 1).encode()
        if how < 0.3:
            return damaged(json.dumps(content).encode(), rng)
        return json.dumps(restructured(content, rng, any_value)).encode()

    def read(self, path: Path, console: Console) -> None:
        from kv_canary.reports.bundle import read_bundle
        from kv_canary.reports.picture import page
        from kv_canary.reports.text import show

        bundle = read_bundle(path)
        show(bundle, console)
        # As the command writes them: into a file, and to a terminal.
        page(bundle).encode()
        json.dumps(bundle.as_dict(), indent=2)


def sample(kind: Any, rng: random.Random) -> Any:
    """A value of the type `kind`, as JSON has it; dataclasses, and what their fields may be."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        some = next(a for a in arguments if a is not type(None))
        return sample(some, rng) if rng.random() < 0.8 else None
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return {f.name: sample(hints[f.name], rng) for f in dataclasses.fields(kind)}
    if origin is tuple:
        each = [arguments[0]] * rng.randrange(1, 4) if arguments[1:] == (...,) else arguments
        return [sample(a, rng) for a in each]
    if origin is dict:
        return {f"k{i}": sample(arguments[1], rng) for i in range(2)}
    if kind is Any:
        return rng.choice([1, "x", None])
    return {int: rng.randrange(40), bool: rng.random() < 0.5, str: rng.choice(TEXTS[:5]), float: 0.5}[kind]


def resident_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(what: str, count: int, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    kind: Cases | Bundles = Cases() if what == "cases" else Bundles()
    path, ended, slowest, unclean = folder / "mutated", Counter[str](), 0.0, []
    before = resident_mib()
    largest = 0
    for seed in range(count):
        content = kind.mutated(random.Random(seed))
        largest = max(largest, len(content))
        path.write_bytes(content)
        start = time.process_time()
        try:
            kind.read(path, Console(file=io.StringIO(), width=100))
            ended["read"] += 1
        except ValueError as error:
            # One of this project's own words, and not one that happens to be a ValueError.
            ended["refused"] += 1
            if type(error) is not ValueError or not str(error).startswith("kv-canary: "):
                unclean.append(f"{seed}: {type(error).__name__}: {error}"[:400])
        except Exception as error:
            ended[type(error).__name__] += 1
            unclean.append(f"{seed}: {''.join(traceback.format_exception(error)[-3:])}"[:1200])
        slowest = max(slowest, time.process_time() - start)
    return {
        "ended": dict(ended),
        "unclean": unclean[:8],
        "num_unclean": len(unclean),
        "slowest_s": round(slowest, 3),
        "grown_mib": round(resident_mib() - before, 1),
        "largest_file": largest,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
