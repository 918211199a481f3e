"""The sources that each result in bench/results rests on, whether they have changed since, and the pages that quote it.

A result carries a digest of each part of the code that it rests on, as it was when the result was measured. Comments,
docstrings and blank lines do not count: they change no measurement.

`evidence_pages` has the pages that quote them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import io
import json
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench/results"
# The folders that install inside of kv_canary.
_INSIDE = ("bench", "difftest", "kernels", "reference")
# What of kv_canary/ runs only where KV goes to host memory or to another process.
_TIERS = ("tier.py", "host_seals.py", "transfer.py")
# That, what no engine runs, and the adapters, each of which runs in its own.
_APART = ("commands", "demo", "cli.py", "__main__.py", "engines", *_TIERS)

TIERS = tuple(f"kv_canary/{name}" for name in _TIERS)
RUNTIME = ("kv_canary", "kernels", "reference")
_PATCHES = "kv_canary/engines/patches.py"
SGLANG = (*RUNTIME, "kv_canary/engines/sglang", _PATCHES)
VLLM = (*RUNTIME, "kv_canary/engines/vllm", _PATCHES)
TRANSFORMERS = (
    *RUNTIME,
    *(
        f"kv_canary/engines/transformers{part}.py"
        for part in ("", "_base", "_layouts", "_requests", "_session", "_tables")
    ),
    _PATCHES,
)
OPS = ("kernels", "reference", "kv_canary/specs", "kv_canary/ops.py", "kv_canary/backends.py")
GENERATED = (*OPS, "difftest/strategies")
# What is timed on an engine and how; the options are in the rows.
SERVING = tuple(f"bench/serving/{part}.py" for part in ("clocks", "cores", "modes", "run", "sharing", "worker"))
# What makes a mutant, and judges it.
MUTATION = tuple(f"difftest/mutation/{part}.py" for part in ("edits", "mutants", "overlay", "pool"))

# GPUs that results are of: the name of such a result begins with one of them.
CARDS = ("h200", "h100")


def _on_cards(stem: str) -> tuple[str, ...]:
    return tuple(f"{card}_{stem}.json" for card in CARDS)


def on_card(stem: str) -> str:
    """Return the name of a GPU's result, by the card that it was measured on; each is kept of one."""
    return next((name for name in _on_cards(stem) if (RESULTS / name).exists()), _on_cards(stem)[0])


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A kind of result.

    Args:
        files: in bench/results.
        sources: files and folders that a result rests on, from the project's folder.
        command: makes it anew.
    """

    files: tuple[str, ...]
    sources: tuple[str, ...]
    command: str


KINDS = {
    "soak": Evidence(files=("soak.json",), sources=RUNTIME, command="make soak"),
    "detection": Evidence(
        files=("detection.json", *_on_cards("detection")),
        sources=RUNTIME,
        command="make soak; on a GPU: kv-canary stress detection --device cuda --json FILE",
    ),
    "seals": Evidence(
        files=("seals_detection.json",),
        sources=RUNTIME,
        command="kv-canary stress seals --runs 1000 --jobs 2 --json bench/results/seals_detection.json",
    ),
    "chaos": Evidence(files=("chaos.json",), sources=RUNTIME, command="make chaos MINUTES=60"),
    "sglang_chaos": Evidence(
        files=("sglang_chaos.json",),
        sources=SGLANG,
        command=".venv-sglang/bin/pytest -s tests/sglang/test_chaos.py --chaos-minutes 60 --chaos-result FILE",
    ),
    "fuzz": Evidence(
        files=(
            "cpu_fuzz.json",
            *(name for part in ("", "_ops", "_more", "_rest") for name in _on_cards(f"fuzz{part}")),
        ),
        sources=GENERATED,
        command=(
            "kv-canary difftest fuzz --minutes 30 --json FILE; on a GPU: kv-canary difftest run --device cuda "
            "--examples 300 --op OP ... --json FILE"
        ),
    ),
    "planted": Evidence(
        files=("planted.json",),
        sources=GENERATED,
        command="kv-canary difftest planted --json bench/results/planted.json",
    ),
    "mutants": Evidence(
        files=("mutants.json",),
        sources=(*GENERATED, "difftest/corpus", *MUTATION),
        command="kv-canary difftest mutants --part kernels --part reference --json bench/results/mutants.json",
    ),
    "runtime_mutants": Evidence(
        files=("runtime_mutants.json",),
        sources=(*RUNTIME, *TIERS, "kv_canary/engines", *MUTATION, "difftest/mutation/runtime.py"),
        command=(
            "kv-canary difftest mutants --part kv_canary --same F --json F, then with --survivors F for --same, "
            "where F is bench/results/runtime_mutants.json"
        ),
    ),
    "sanitize": Evidence(
        files=_on_cards("sanitize"),
        sources=("kernels", "kv_canary/specs"),
        command="kv-canary difftest sanitize --json FILE",
    ),
    "adapters_host": Evidence(
        files=("adapters_host.json",),
        sources=tuple(dict.fromkeys((*VLLM, *TRANSFORMERS, "kv_canary/engines/sglang", "bench/adapters.py"))),
        command="kv-canary bench adapters --engine ENGINE --json FILE, in the environment of each engine",
    ),
    "engine_cost": Evidence(
        files=tuple(
            name for part in ("", "_8b", "_writes", "_more", "_8b_more") for name in _on_cards(f"engine_cost{part}")
        ),
        sources=(*SGLANG, *SERVING),
        command="kv-canary bench engine --json FILE",
    ),
    "tiers_cost": Evidence(
        files=(*_on_cards("engine_cost_tiers"), *_on_cards("engine_cost_tiers_more")),
        sources=(*SGLANG, *TIERS, *SERVING),
        command="kv-canary bench engine --models 8b --tiers SERVICES --starts 3 --json FILE, where SERVICES are "
        "8x32x4096,8x32x4096x128 and, in another file, 4x18x10240,8x18x10240",
    ),
    "vllm_cost": Evidence(
        files=_on_cards("vllm_cost"),
        sources=(*VLLM, *SERVING, "bench/vllm"),
        command="kv-canary bench vllm --json FILE",
    ),
    "seal_cost": Evidence(
        files=_on_cards("seals"),
        sources=(*RUNTIME, "bench/seals.py"),
        command="kv-canary bench seals --json FILE",
    ),
    "demo": Evidence(files=_on_cards("demo"), sources=TRANSFORMERS, command="kv-canary demo --device cuda --json FILE"),
    "peer": Evidence(
        files=_on_cards("peer"),
        sources=("kernels", "kv_canary/specs", "kv_canary/runtime/launches.py"),
        command="kv-canary bench --peer sglang --json FILE",
    ),
    "engine": Evidence(
        files=_on_cards("engine"),
        sources=(*TRANSFORMERS, *(f"bench/engine_{part}.py" for part in ("overhead", "served", "times"))),
        command="python -P -m kv_canary.bench.engine_overhead --out FILE",
    ),
    "host": Evidence(files=_on_cards("host"), sources=RUNTIME, command="python -P -m kv_canary.bench.host --out FILE"),
    "overlap": Evidence(
        files=_on_cards("overlap"),
        sources=RUNTIME,
        command="kv-canary stress overlap --device cuda --json FILE",
    ),
    "transfer": Evidence(
        files=_on_cards("pd"), sources=(*RUNTIME, *TIERS), command="kv-canary stress transfer --device cuda --json FILE"
    ),
    "ranks": Evidence(
        files=_on_cards("ranks"),
        sources=RUNTIME,
        command="kv-canary stress ranks --device cuda --json FILE",
    ),
    "transformers": Evidence(
        files=_on_cards("transformers"),
        sources=TRANSFORMERS,
        command="python -P -m kv_canary.difftest.stress.transformers_cuda --json FILE",
    ),
    "sglang": Evidence(
        files=_on_cards("sglang"),
        sources=(*SGLANG, *TIERS),
        command="python -P -m kv_canary.difftest.stress.sglang.cuda --json FILE",
    ),
    "sglang_detection": Evidence(
        files=("sglang_detection.json",),
        sources=SGLANG,
        command="kv-canary stress sglang --json FILE",
    ),
    "sglang_bytes": Evidence(
        files=("sglang_bytes.json",),
        sources=SGLANG,
        command='kv-canary stress sglang --fault "one byte, anywhere" --seeds 50 --json FILE',
    ),
    "tiers": Evidence(
        files=("tiers_detection.json", *_on_cards("tiers")),
        sources=(*SGLANG, *TIERS),
        command="kv-canary stress sglang-tiers --json bench/results/tiers_detection.json; on a GPU: --device cuda",
    ),
    "vllm_tiers": Evidence(
        files=("vllm_tiers_detection.json",),
        sources=(*VLLM, *TIERS),
        command="kv-canary stress vllm-tiers --json bench/results/vllm_tiers_detection.json",
    ),
    "vllm_gpu": Evidence(
        files=_on_cards("vllm"),
        sources=(*VLLM, *TIERS),
        command="python -P -m kv_canary.difftest.stress.vllm.cuda --json FILE",
    ),
    "vllm_churn": Evidence(
        files=("vllm_churn.json",),
        sources=VLLM,
        command="kv-canary stress vllm-churn --json bench/results/vllm_churn.json",
    ),
    "vllm_detection": Evidence(
        files=("vllm_detection.json",),
        sources=VLLM,
        command="kv-canary stress vllm --json bench/results/vllm_detection.json --page docs/vllm-detection.md",
    ),
}


def digests(kind: str) -> dict[str, str]:
    """Return the digest of each source that a kind of result rests on, of the code that is here."""
    return {source: digest(read(source)) for source in KINDS[kind].sources}


def read(source: str) -> dict[str, bytes]:
    """Return the files of a source by path, as they are installed or in the checkout."""
    first, _, rest = source.partition("/")
    package = importlib.import_module(f"kv_canary.{first}" if first in _INSIDE else first)
    folder = Path(str(package.__file__)).resolve().parent
    top = folder / rest if rest else folder
    if top.is_file():
        return {source: top.read_bytes()}
    found = {}
    for path in top.rglob("*"):
        name = path.relative_to(top)
        apart = source == "kv_canary" and name.parts[0] in (*_INSIDE, *_APART)
        # What is compiled is of its source.
        made = "__pycache__" in name.parts or path.suffix == ".so"
        if path.is_file() and not (made or apart):
            found[f"{source}/{name.as_posix()}"] = path.read_bytes()
    return found


def digest(files: Mapping[str, bytes]) -> str:
    """Return 16 hexadecimal digits for the code in `files`, by path."""
    summed = hashlib.sha256()
    for name in sorted(files):
        content = code_of(files[name]) if name.endswith(".py") else files[name]
        summed.update(f"{name}\n{len(content)}\n".encode())
        summed.update(content)
    return summed.hexdigest()[:16]


@functools.cache
def code_of(source: bytes) -> bytes:
    """Return a Python source without comments, docstrings and blank lines; the same in every version of Python."""
    text = source.decode("utf-8")
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            number, column = token.start
            lines[number - 1] = lines[number - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                last = first.end_lineno or first.lineno
                lines[first.lineno - 1 : last] = [""] * (last + 1 - first.lineno)
    return "\n".join(line.rstrip() for line in lines if line.strip()).encode()


@dataclass(frozen=True, kw_only=True)
class Result:
    """A file of bench/results, and whether it is of this code.

    Args:
        kind: of KINDS.
        name: of the file.
        commit: that it was measured at, as it says; "" where it does not.
        changed: the sources that have changed since; all of them where it has no digests.
        older: the commits of what is of an older version, where that is not all of it.
    """

    kind: str
    name: str
    commit: str
    changed: tuple[str, ...]
    older: str = ""

    @property
    def note(self) -> str:
        """The note that a page puts beside figures from it; "" where they are of this code."""
        if self.older:
            return f"in part measured on an older version ({self.older})"
        return f"measured on an older version ({self.commit or 'unknown commit'})" if self.changed else ""


def load(name: str) -> Any:
    """Return the content of a result."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def results() -> Iterator[Result]:
    """Return every result that is there."""
    now: dict[str, str] = {}
    for kind, evidence in KINDS.items():
        for name in evidence.files:
            if not (RESULTS / name).exists():
                continue
            content = load(name)
            for source in evidence.sources:
                if source not in now:
                    now[source] = digest(read(source))
            # Rows, and cases, may have been measured at different times, and none is of a newer version than it says.
            rows = content if isinstance(content, list) else [content]
            rows = [*rows, *(case for row in rows if isinstance(cases := row.get("cases"), list) for case in cases)]
            told = [row for row in rows if "sources" in row] or rows[:1]
            differ = [[s for s in evidence.sources if (row.get("sources") or {}).get(s) != now[s]] for row in told]
            changed = tuple(s for s in evidence.sources if any(s in sources for sources in differ))
            older = [row for row, sources in zip(told, differ, strict=True) if sources]
            in_part = 0 < len(older) < len(told)
            yield Result(
                kind=kind,
                name=name,
                commit=_commits(told),
                changed=changed,
                older=(_commits(older) or "unknown commit") if in_part else "",
            )


def _commits(rows: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(filter(None, dict.fromkeys(str(row.get("commit") or "") for row in rows)))
