"""Proves the SGLang adapter on a GPU: CUDA graphs and the overlapped scheduler, with a canary and without.

    python -m kv_canary.difftest.stress.sglang.cuda --json h200_sglang.json --out FOLDER

A real scheduler of SGLang serves a tiny random model in this process's children, one for each case, by its own event
loops: chunked prefill, prefix hits, eviction, retraction, aborts. With a canary the tokens must be the same as without,
it must find nothing and leave no cached position out, and graphs must really have been replayed, for batches smaller
than a graph's too. Then a bit of a cached key of the last layer is flipped for one forward, and two entries of
`req_to_token` change places for one: the canary must name the places, and nothing else. Behind the engine's start no
kernel of the canary's may be compiled. With chains of drafts the canary must not wait, in front of a launch, for what
the device has chosen. SGLang's compiled kernels need not be there: see `standins`. Ends with status 1 if anything is
not so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kv_canary.commands.facts import facts
from kv_canary.difftest.stress.gpu_cases import LONG, fault_checks, like_transformers, write, writes_checks
from kv_canary.difftest.stress.sglang import drafts
from kv_canary.reports.versions import installed

GRAPH_SIZES = [1, 2, 4, 8]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scheduler in a process of its own.

    Args:
        page: slots a page.
        overlap: whether the scheduler prepares a batch while the one before runs.
        graphs: "decode", "all" (prefill too) or "none".
        canary: whether it has one.
        fault: "" for none; "byte": a bit of a cached key; "table": two entries of a request's row; "write": a bit of a
            key that the very forward has written, of a byte that no record covers.
        writes: whether what the model hands over is held against what it has written, by the graph too.
        attention: SGLang's attention backend.
        dtype: of weights and KV; in float32 the engine has the fewest kernels of its own to choose from.
        own_kernels: whether SGLang may compile while it runs: its own kernels that store K and V, and parts of its
            Python; else PyTorch does the same.
        host_tier: whether what is evicted goes to host memory and comes back (HiCache), while the scheduler's stream is
            far behind whenever pages are freed, as under load.
        drafts: where the lengths of a step with drafts (EAGLE) are known: "" for no drafts; "host": on the host, too,
            which waits for them; "device": there alone, as attention backends have it that read no others.
        waves: of requests.
        extra: whether the result may miss without making the whole a failure.
    """

    page: int = 1
    overlap: bool = False
    graphs: str = "decode"
    canary: bool = True
    fault: str = ""
    writes: bool = False
    attention: str = "triton"
    dtype: str = "float32"
    own_kernels: bool = False
    host_tier: bool = False
    drafts: str = ""
    waves: int = 3
    extra: bool = False

    @property
    def model(self) -> str:
        """The folder of the model that is served, beside those of others."""
        return "target" if self.drafts else "model"

    @property
    def name(self) -> str:
        parts = [
            self.fault or ("canary" if self.canary else "plain"),
            f"page{self.page}",
            "overlap" if self.overlap else "normal",
            f"graphs-{self.graphs}",
            *([self.dtype] if self.dtype != "float32" else []),
            *(["writes"] if self.writes else []),
            *(["own-kernels"] if self.own_kernels else []),
            *(["host-tier"] if self.host_tier else []),
            *([f"drafts-{self.drafts}"] if self.drafts else []),
            *([f"waves{self.waves}"] if self.waves != 3 else []),
        ]
        return "_".join(parts)


def cases(*, graphs: str) -> list[Case]:
    """Return every case, each with a canary behind the same without; `graphs` as the device has them."""
    clean = [Case(page=page, overlap=overlap, graphs=graphs) for page in (1, 16) for overlap in (False, True)]
    if graphs != "none":
        clean.append(Case(overlap=True, graphs="none"))
    planted = [replace(c, fault=fault) for c in clean if c.page == 1 or c.overlap for fault in ("byte", "table")]
    clean.append(Case(page=16, overlap=True, graphs=graphs, writes=True))
    planted.append(replace(clean[-1], fault="write"))
    # SGLang compiles what builds and judges chains of drafts while it runs.
    drafted = [Case(overlap=True, graphs=graphs, own_kernels=graphs != "none", drafts=d) for d in ("host", "device")]
    clean += drafted
    planted += [replace(case, fault=fault) for case in drafted for fault in ("byte", "table")]
    extra = []
    if graphs != "none":
        overlapped = Case(page=16, overlap=True)
        extra = [replace(overlapped, dtype="bfloat16"), replace(overlapped, graphs="all")]
        extra.append(replace(overlapped, own_kernels=True))
        # Its copies are compiled while it runs.
        clean.append(replace(overlapped, own_kernels=True, host_tier=True))
    pairs = [*clean, *(replace(c, extra=True) for c in extra)]
    ordered = [case for c in pairs if not c.extra for case in (replace(c, canary=False), c)]
    return [*ordered, *planted, *(case for c in pairs if c.extra for case in (replace(c, canary=False), c))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case, print a line each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu, where the engine has no graphs")
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    parser.add_argument("--out", type=Path, help="where each case's output and result go (default: a temporary folder)")
    parser.add_argument("--jobs", type=int, default=4, help="cases at a time")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which no case is begun")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one case may take")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--commit", help="the commit measured, for the JSON (default: what git says)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        _serve_here(Case(**json.loads(arguments.case)), arguments.device, arguments.out)
        return 0
    begin = time.perf_counter()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="kv-canary-sglang-"))
    out.mkdir(parents=True, exist_ok=True)
    model = out / "model"
    from kv_canary.demo.models import save_tiny_model

    # Wide enough apart that what is generated does not repeat itself.
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "head_dim": 64,
    }
    save_tiny_model(model, spread=0.1, max_position_embeddings=2048, **shape)
    drafts.save_models(out, added=0.001, spread=0.1, max_position_embeddings=2048, **shape)
    runner = _Runner(device=arguments.device, out=out, limit=arguments.limit, end=begin + arguments.budget)
    todo = [c for c in cases(graphs="none" if arguments.device == "cpu" else "decode") if _chosen(c, arguments.only)]
    if arguments.device == "cpu":
        todo = [replace(c, attention="torch_native") for c in todo]
    smoke = replace(todo[0], waves=1, canary=True, fault="")
    first = runner.run(smoke)
    print(
        f"{smoke.name}: {'served' if first['served'] else 'FAILED: on with torch_native, without graphs'}", flush=True
    )
    if not first["served"]:
        # Without graphs cases become alike.
        todo = list(dict.fromkeys(replace(c, attention="torch_native", graphs="none") for c in todo if not c.extra))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = dict(zip(todo, pool.map(runner.run, todo), strict=True))
    rows = [_judged(case, results) for case in todo if case.canary]
    for row in rows:
        print(_line(row), flush=True)
    ok = first["served"] and bool(rows) and all(row["ok"] or row["case"]["extra"] for row in rows)
    result = {
        **facts(torch.device(arguments.device), commit=arguments.commit, kind="sglang"),
        "sglang": installed("sglang"),
        "kernels": "SGLang's Triton kernels for attention; PyTorch in place of its compiled ones",
        "seconds": round(time.perf_counter() - begin, 1),
        "ok": ok,
        "smoke": {key: value for key, value in first.items() if key not in LONG},
        "like_transformers": None,
        "clean": [row for row in rows if not row["case"]["fault"]],
        "faults": [row for row in rows if row["case"]["fault"]],
    }
    write(arguments.json, result)
    if first["served"]:
        result["like_transformers"] = like_transformers(out / smoke.model, first)
        write(arguments.json, result)
    print("all as it should be" if ok else "NOT as it should be")
    return 0 if ok else 1


def _chosen(case: Case, text: str) -> bool:
    """Whether a case's name contains `text`, or that of the case that it is to be compared with."""
    return text in replace(case, canary=True).name


@dataclass(kw_only=True)
class _Runner:
    """Runs cases in processes of their own."""

    device: str
    out: Path
    limit: float
    end: float

    def run(self, case: Case) -> dict[str, Any]:
        """Return what the case's process wrote, with `served`, and `error` if it is not so."""
        if time.perf_counter() > self.end:
            return {"served": False, "error": "not begun: the time is up"}
        written = self.out / f"{case.name}.json"
        written.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", __spec__.name, "--device", self.device, "--out", str(self.out)]
        command += ["--case", json.dumps(asdict(case))]
        begin = time.perf_counter()
        with (self.out / f"{case.name}.log").open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    command,
                    env=_environment(case, self.device),
                    stdout=log,
                    stderr=log,
                    timeout=self.limit,
                    check=False,
                )
                error = f"status {done.returncode}"
            except subprocess.TimeoutExpired:
                error = f"no end after {self.limit:.0f} s"
        took = round(time.perf_counter() - begin, 1)
        if not written.exists():
            log_text = (self.out / f"{case.name}.log").read_text(encoding="utf-8", errors="replace")
            return {"served": False, "error": error, "end_of_log": log_text[-1500:], "process_seconds": took}
        result: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        return {"served": True, **result, "process_seconds": took}


def _environment(case: Case, device: str) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("KV_CANARY_")}
    environment["SGLANG_USE_CPU_ENGINE"] = "1" if device == "cpu" else "0"
    environment["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    # Running requests give way every so many forwards, as if there were no room.
    environment |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "23"}
    if case.drafts and device == "cpu":
        environment["SGLANG_ON_CPU"] = "speculative"
    if not case.own_kernels:
        environment |= {"SGLANG_CRASH_ON_JIT_COMPILE": "1", "TORCHDYNAMO_DISABLE": "1"}
        environment["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    if case.canary:
        environment |= {
            "KV_CANARY_MODE": "log" if case.fault else "raise",
            "KV_CANARY_BACKEND": "reference" if device == "cpu" else "triton",
            "KV_CANARY_STRIDE": "1",
            "KV_CANARY_CHECK_TOKENS": "1",
            "KV_CANARY_VERIFY_BYTES_AT_TAIL": "0" if case.fault else "1",
            "KV_CANARY_SWEEP_EVERY": "0" if case.fault else "8",
            **({"KV_CANARY_CHECK_WRITES": "1", "KV_CANARY_SEALS": "layer"} if case.writes else {}),
        }
    return environment


def _serve_here(case: Case, device: str, out: Path) -> None:
    """Serve the case in this process, write its result, and end the process: the engine leaves threads behind."""
    from kv_canary.difftest.stress.sglang import traffic

    status = 1
    try:
        result = traffic.serve(asdict(case), device=device, model=out / case.model, graph_sizes=GRAPH_SIZES)
        (out / f"{case.name}.json").write_text(json.dumps(result), encoding="utf-8")
        print(json.dumps({key: value for key, value in result.items() if key not in LONG}))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _judged(case: Case, results: dict[Case, dict[str, Any]]) -> dict[str, Any]:
    """Say what a case has shown."""
    watched = results[case]
    if not watched["served"]:
        row = {"case": asdict(case), "name": case.name, "ok": False, "failed": ["served"], **watched}
        # Whether it is the canary that an engine does not start with.
        return row if case.fault else {**row, "plain_served": results[replace(case, canary=False)]["served"]}
    if case.fault:
        status = watched["status"]
        checks = fault_checks(watched) | {"healthy": status["watching"] == "complete" and not status["off"]}
    else:
        checks = _clean_checks(case, watched, results[replace(case, canary=False)])
    checks["nothing compiled while it serves"] = not watched["compiled"]
    if case.drafts:
        checks["no wait before a launch"] = not watched["waits"]["before"]
    if case.writes:
        checks |= writes_checks(watched["status"])
    return {
        "case": asdict(case),
        "name": case.name,
        "ok": all(checks.values()),
        "failed": [name for name, held in checks.items() if not held],
        **{key: value for key, value in watched.items() if key not in ("served", *LONG)},
    }


def _clean_checks(case: Case, watched: dict[str, Any], plain: dict[str, Any]) -> dict[str, bool]:
    summary, graphs = watched["status"], case.graphs != "none"
    if case.host_tier:
        # When a copy is over says what is evicted and which requests go together.
        came = sum(tier["loaded"] for tier in summary["host_tiers"].values())
        return {
            "plain served": plain["served"],
            "same tokens": plain.get("tokens") == watched["tokens"],
            "no violations": summary["violations"] == 0 and not watched["reports"],
            "every forward": summary["steps"] == sum(watched["forwards"].values()) > 0,
            "every position": summary["positions_verified"] == summary["positions_relied_on"] > 0,
            "healthy": summary["watching"] == "complete" and not summary["off"],
            "came back from the host": came > 0,
            "evictions": watched["evictions"] > 0,
        }
    return {
        "plain served": plain["served"],
        "same tokens": plain.get("tokens") == watched["tokens"],
        "same schedule": plain.get("forwards") == watched["forwards"],
        "no violations": summary["violations"] == 0 and not watched["reports"],
        "every forward": summary["steps"] == sum(watched["forwards"].values()) > 0,
        "every position": summary["positions_verified"] == summary["positions_relied_on"] > 0,
        "healthy": summary["watching"] == "complete" and not summary["off"],
        "graphs replayed": (watched["replays"] > 0) == graphs,
        "every decode by a graph": not graphs or watched["decodes_replayed"] == watched["forwards"].get("DECODE", 0),
        "batches padded": (watched["padded"] > 0) == graphs,
        "as many replays": watched["replays"] == plain.get("replays"),
        "chunks": watched["chunked"] > 0,
        "prefix hits": watched["prefix_hits"] > 0,
        "evictions": watched["evictions"] > 0,
        "retractions": watched["retracted"] > 0,
        "aborts": watched["aborted"] > 0,
        **({"drafts right and wrong": min(watched["drafts"]) > 10} if case.drafts else {}),
    }


def _line(row: dict[str, Any]) -> str:
    counts = {
        key: row[key]
        for key in ("forwards", "replays", "padded", "prefix_hits", "evictions", "retracted")
        if key in row
    }
    verdict = "ok" if row["ok"] else f"NOT OK: {', '.join(row['failed'])}"
    found = f", {len(row['reports'])} reports" if row.get("reports") else ""
    return f"{row['name']}: {verdict} {counts}{found} {row.get('error', '')}"


if __name__ == "__main__":
    sys.exit(main())
