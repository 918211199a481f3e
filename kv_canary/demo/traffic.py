"""The demo's traffic: conversations over real text, or the lengths of a recorded trace.

Text is taken byte by byte as tokens. By default it is the text that ships with Python itself.
"""

from __future__ import annotations

import csv
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kv_canary.errors import must_be

# Mooncake's traces name every block of this many tokens of a prompt by a hash of its content and all before it.
MOONCAKE_BLOCK_TOKENS = 512

_MODULES = ("argparse", "asyncio", "collections", "decimal", "difflib", "functools", "heapq", "pickle", "random", "re")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One user's turns: each turn's prompt is everything said before, and then its own tokens.

    Args:
        turns: the tokens that each turn adds.
        new_tokens: how many tokens to generate in each turn.
    """

    turns: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]


def python_text() -> str:
    """Return the text that comes with Python: pydoc's topics, then docstrings of the standard library."""
    import importlib
    from pydoc_data.topics import topics

    parts = list(topics.values())
    parts += [inspect.getdoc(importlib.import_module(name)) or "" for name in _MODULES]
    return "\n".join(parts)


def conversations(text: str, *, count: int, turns: int, new_tokens: int, longest: int) -> list[Conversation]:
    """Cut `text` into conversations that share a system prompt.

    Args:
        text: any text; it is taken again from its start where it is too short.
        count: conversations.
        turns: turns of each.
        new_tokens: tokens to generate per turn.
        longest: tokens of a first turn's own part, at most; they vary from a few up to it.
    """
    data = text.encode() or b"\n"
    system = tuple(_take(data, 0, 48))
    result = []
    at = 48
    for i in range(count):
        parts = []
        for turn in range(turns):
            # Lengths that vary from request to request, among them exact multiples of the page.
            length = (3, longest, 16, longest // 2, 32, 7, longest // 3 + 1)[(i + 3 * turn) % 7]
            parts.append((system if turn == 0 else ()) + tuple(_take(data, at, max(1, length))))
            at += 211
        result.append(Conversation(turns=tuple(parts), new_tokens=(new_tokens,) * turns))
    return result


def read_files(paths: Sequence[Path]) -> str:
    """Return the text of the user's own files, one after the other."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)


def trace_conversations(path: Path, text: str, *, count: int, scale: int, longest: int) -> list[Conversation]:
    """Replay the lengths, and the sharing of prefix blocks, of a recorded trace over `text`.

    Args:
        path: a Mooncake .jsonl (input_length, output_length, hash_ids) or an Azure .csv (ContextTokens,
            GeneratedTokens).
        text: where the tokens come from.
        count: requests to replay.
        scale: every length is divided by it.
        longest: tokens of a prompt, at most.

    Raises:
        ValueError: the file is neither, or holds no requests.
    """
    data = text.encode() or b"\n"
    result = []
    for i, (inputs, outputs, blocks) in enumerate(_rows(path)):
        if i == count:
            break
        prompt: list[int] = []
        length = max(1, min(inputs // scale, longest))
        for block in blocks:
            # A block's text is chosen by its name, so that equal names are equal tokens.
            prompt += _take(data, 1009 * block, MOONCAKE_BLOCK_TOKENS // scale)
        prompt = (prompt + _take(data, 101 * i, length))[:length]
        result.append(Conversation(turns=(tuple(prompt),), new_tokens=(max(1, min(outputs // scale, 32)),)))
    if not result:
        raise ValueError(must_be("demo", "--trace", "a trace with at least one request", str(path)))
    return result


def _rows(path: Path) -> Iterator[tuple[int, int, list[int]]]:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                for line in file:
                    row = json.loads(line)
                    yield row["input_length"], row["output_length"], row.get("hash_ids", [])
            else:
                for row in csv.DictReader(file):
                    yield int(row["ContextTokens"]), int(row["GeneratedTokens"]), []
    except (KeyError, json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            must_be("demo", "--trace", "a Mooncake .jsonl or an Azure .csv", f"{path}: {error!r}")
        ) from error


def _take(data: bytes, at: int, length: int) -> list[int]:
    at %= len(data)
    taken = data[at : at + length]
    while len(taken) < length:
        taken += data[: length - len(taken)]
    return list(taken)
