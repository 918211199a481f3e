"""Real shapes: one step of a server, cut from a recorded Mooncake or Azure trace."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

from kv_canary.bench.speed.cases import Case, Request
from kv_canary.errors import must_be

# Mooncake's traces name every block of this many tokens of a prompt by a hash of its content and all before it.
BLOCK_TOKENS = 512
MOST_REQUESTS = 256
MOST_TOKENS = 1 << 20
# Requests of the step that have just arrived and are being prefilled, and tokens of such a chunk.
ARRIVING = 2
CHUNK_TOKENS = 2048


def trace_cases(folder: Path) -> list[Case]:
    """Return a case for each trace in a folder, in the order of the files' names; other files are left alone.

    The step takes the trace's first requests in their order, as many as fit: each has its prompt and half of its answer
    in the cache and decodes, but for the last two, which have just arrived: what of their prompts other requests have
    cached is there, and a chunk of the rest is being prefilled.

    Raises:
        ValueError: a .jsonl or .csv file is no such trace, or holds too few requests.
    """
    if not folder.is_dir():
        raise ValueError(must_be("bench", "--traces", "a folder", str(folder)))
    return [_case(path) for path in sorted(folder.iterdir()) if path.suffix in (".jsonl", ".csv")]


def _case(path: Path) -> Case:
    requests: list[Request] = []
    seen: set[int] = set()
    total = 0
    for prompt, answer, blocks in _rows(path):
        cached = prompt + answer // 2
        if len(requests) == MOST_REQUESTS or (len(requests) > ARRIVING and total + cached > MOST_TOKENS):
            break
        requests.append(Request(cached=cached, shared=blocks[: prompt // BLOCK_TOKENS]))
        total += cached
    if len(requests) <= ARRIVING:
        raise ValueError(must_be("bench", "--traces", f"a trace of more than {ARRIVING} requests", str(path)))
    for request in requests[:-ARRIVING]:
        seen.update(request.shared)
    for i in range(len(requests) - ARRIVING, len(requests)):
        blocks = requests[i].shared
        hits = next((k for k, block in enumerate(blocks) if block not in seen), len(blocks))
        cached = hits * BLOCK_TOKENS
        new = max(1, min(requests[i].cached - cached, CHUNK_TOKENS))
        requests[i] = Request(cached=cached, new=new, shared=blocks[:hits])
    name = path.stem.removesuffix("_trace").replace("AzureLLMInferenceTrace_", "").replace("_", " ")
    return Case(name=f"trace {name}", requests=tuple(requests), group="traces", block=BLOCK_TOKENS)


def _rows(path: Path) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield prompt tokens, answer tokens and named blocks of each request."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                for line in file:
                    row = json.loads(line)
                    yield int(row["input_length"]), int(row["output_length"]), tuple(row.get("hash_ids", ()))
            else:
                for row in csv.DictReader(file):
                    yield int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()
    except (KeyError, TypeError, ValueError) as error:
        expected = "of Mooncake .jsonl and Azure .csv traces"
        raise ValueError(must_be("bench", "--traces", expected, f"{path}: {error!r}")) from error
