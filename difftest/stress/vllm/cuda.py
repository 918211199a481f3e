"""Proves the vLLM adapter on a GPU: CUDA graphs and asynchronous scheduling, with a canary and without.

    python -P -m kv_canary.difftest.stress.vllm.cuda --json h200_vllm.json --out FOLDER [--only NAME ...]

A vLLM serves a tiny random model in this process's children, one for each case, by model runner V1 or V2: chunked
prefill, prefix hits, eviction, preemption, aborts. With a canary the tokens must be the same as without, it must find
nothing, fail nowhere and leave no cached position out, and graphs must really have been replayed, for batches smaller
than a graph's too. Then a bit of a cached key of the last layer is flipped for one forward, and two entries of a block
table change places for one: the canary must name the places, and nothing else. Behind the engine's start no kernel of
the canary's may be compiled. vLLM's compiled kernels need not be there: see `standins`. Ends with status 1 if anything
is not so.
"""

from __future__ import annotations

import argparse
import faulthandler
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
from kv_canary.difftest.stress.gpu_cases import (
    LONG,
    ROUNDING,
    SCHEDULE,
    below_the_likeliest,
    compared,
    fault_checks,
    like_transformers,
    write,
    writes_checks,
)
from kv_canary.difftest.stress.vllm.engine import RUNNERS, VOCABULARY, Runner
from kv_canary.reports.versions import installed

GRAPH_SIZES = [1, 2, 4, 8]
# Of what a failed case has said.
_LINES, _WIDTH = 25, 240
# Reports that a result keeps.
_REPORTS = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine in a process of its own.

    Args:
        runner: of the model.
        asynchronous: whether a step is prepared before the tokens of the step before it are known.
        graphs: "decode", "all" (prefill too) or "none".
        canary: whether it has one.
        fault: "" for none; "byte": a bit of a cached key; "table": two entries of a request's row; "write": a bit of a
            key that the very forward has written, of a byte that no record covers.
        writes: whether what the model hands over is held against what it has written, by the graph too.
        dtype: of weights and KV.
        waves: of requests.
        host: whether blocks go to host memory and back, by vLLM's OffloadingConnector.
        extra: whether the result may miss without making the whole a failure.
    """

    runner: Runner = "V1"
    asynchronous: bool = True
    graphs: str = "decode"
    canary: bool = True
    fault: str = ""
    writes: bool = False
    dtype: str = "bfloat16"
    waves: int = 3
    host: bool = False
    extra: bool = False

    @property
    def name(self) -> str:
        parts = [
            self.fault or ("canary" if self.canary else "plain"),
            self.runner,
            *([self.dtype] if self.dtype != "bfloat16" else []),
            "async" if self.asynchronous else "sync",
            f"graphs-{self.graphs}",
            *([f"waves{self.waves}"] if self.waves != 3 else []),
            *(["writes"] if self.writes else []),
            *(["host"] if self.host else []),
        ]
        return "_".join(parts)


def cases() -> list[Case]:
    """Return every case, each with a canary behind the same without; those that matter most first."""
    main = [Case(runner=runner) for runner in RUNNERS]
    planted = [replace(c, fault=fault) for c in main for fault in ("byte", "table")]
    held = [replace(c, writes=True) for c in main]
    planted += [replace(c, fault="write") for c in held]
    more = [*held, *(replace(c, asynchronous=False) for c in main)]
    extra = [replace(c, extra=True, graphs=graphs) for c in main for graphs in ("all", "none")]
    extra += [replace(c, extra=True, dtype="float32") for c in main]
    extra += [replace(c, extra=True, dtype="float32", host=True) for c in main]
    ordered = [*_pairs(main), *planted, *_pairs(more)]
    return [*ordered, *_pairs(extra)]


def _pairs(clean: Sequence[Case]) -> list[Case]:
    return [case for c in clean for case in (replace(c, canary=False), c)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case, print a line each, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the JSON goes")
    parser.add_argument("--out", type=Path, help="where each case's output and result go (default: a temporary folder)")
    parser.add_argument("--jobs", type=int, default=8, help="cases at a time")
    parser.add_argument("--budget", type=float, default=420, help="seconds after which no case is begun")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one case may take")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--commit", help="the commit measured, for the JSON (default: what git says)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.case:
        _serve_here(Case(**json.loads(arguments.case)), arguments.out, arguments.limit)
        return 0
    begin = time.perf_counter()
    out = arguments.out or Path(tempfile.mkdtemp(prefix="kv-canary-vllm-"))
    out.mkdir(parents=True, exist_ok=True)
    model = save_model(out / "model")
    # Before anything takes time: what it needs has to be there.
    measured = facts("cuda" if torch.cuda.is_available() else "cpu", commit=arguments.commit, kind="vllm_gpu")
    runner = _Runner(out=out, limit=arguments.limit, end=begin + arguments.budget)
    todo = [c for c in cases() if _chosen(c, arguments.only)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = dict(zip(todo, pool.map(runner.run, todo), strict=True))
    rows = [_judged(case, results, model) for case in todo if case.canary]
    for row in rows:
        print(_line(row), flush=True)
    ok = bool(rows) and all(row["ok"] or row["case"]["extra"] for row in rows)
    result = {
        **measured,
        "vllm": installed("vllm"),
        "kernels": "vLLM's Triton kernels for attention; PyTorch in place of its compiled ones",
        "seconds": round(time.perf_counter() - begin, 1),
        "ok": ok,
        "like_transformers": None,
        "clean": [row for row in rows if not row["case"]["fault"]],
        "faults": [row for row in rows if row["case"]["fault"]],
    }
    write(arguments.json, result)
    # Where a life differs from its like without a canary, this says which of them is right.
    full = {case.name: r for case, r in results.items() if case.dtype == "float32" and r["served"]}
    if full:
        result["like_transformers"] = {name: like_transformers(model, served) for name, served in full.items()}
        write(arguments.json, result)
    print("all as it should be" if ok else "NOT as it should be")
    return 0 if ok else 1


def save_model(folder: Path) -> Path:
    """Save the model that is served, unless it is there, and return its folder."""
    from kv_canary.demo.models import save_tiny_model

    # Wide enough apart that what is generated does not repeat itself.
    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    save_tiny_model(folder, spread=0.1, max_position_embeddings=2048, **shape)
    return folder


def _chosen(case: Case, texts: Sequence[str]) -> bool:
    """Whether a case's name contains one of `texts`, or that of the case that it is to be compared with."""
    return any(text in replace(case, canary=True).name for text in texts)


@dataclass(kw_only=True)
class _Runner:
    """Runs cases in processes of their own."""

    out: Path
    limit: float
    end: float

    def run(self, case: Case) -> dict[str, Any]:
        """Return what the case's process wrote, with `served`, and `error` if it is not so."""
        if time.perf_counter() > self.end:
            return {"served": False, "error": "not begun: the time is up"}
        written, said = self.out / f"{case.name}.json", self.out / f"{case.name}.log"
        written.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", __spec__.name, "--out", str(self.out), "--limit", str(self.limit)]
        command += ["--case", json.dumps(asdict(case))]
        begin = time.perf_counter()
        with said.open("w", encoding="utf-8") as log:
            try:
                done = subprocess.run(
                    command, env=_environment(case), stdout=log, stderr=log, timeout=self.limit, check=False
                )
                error = f"status {done.returncode}"
            except subprocess.TimeoutExpired:
                error = f"no end after {self.limit:.0f} s"
        took = round(time.perf_counter() - begin, 1)
        text = said.read_text(encoding="utf-8", errors="replace")
        if not written.exists():
            lines = end_of(text)
            print(_failed(case, error, lines), flush=True)
            return {"served": False, "error": error, "end_of_log": lines, "process_seconds": took}
        found: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        result = {"served": True, **found, "process_seconds": took}
        print(f"{case.name}: served in {took} s", flush=True)
        if failures := found.get("status", {}).get("failures"):
            result["log_of_failure"] = lines = failure_in(text)
            print(_failed(case, f"the canary has failed: {failures}", lines), flush=True)
        return result


def end_of(text: str) -> list[str]:
    """Return the last lines of a log, up to the last error in it if there is one."""
    lines = [line[:_WIDTH] for line in text.splitlines() if line.strip()]
    # Where one has hung, that is at the end.
    hangs = any(line.startswith("Timeout (") for line in lines)
    if not hangs and (errors := [i for i, line in enumerate(lines) if _is_error(line)]):
        lines = lines[: errors[-1] + 3]
    return lines[-_LINES:]


def failure_in(text: str) -> list[str]:
    """Return what a log says of the first failure that the canary's guard has contained."""
    lines = [line[:_WIDTH] for line in text.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if "kv-canary: " in line and " failed (" in line), len(lines))
    behind = lines[first + 1 :]
    end = next((i for i, line in enumerate(behind) if _is_error(line)), _LINES)
    # The line itself, and the end of the traceback.
    return lines[first : first + 1] + behind[: end + 1][-_LINES:]


def _is_error(line: str) -> bool:
    """Whether a line is the one of a traceback that says what was raised."""
    name = line.rpartition("] ")[2].partition(":")[0]
    return name.replace(".", "").replace("_", "").isalnum() and name.endswith(("Error", "Exception", "Exit"))


def _failed(case: Case, error: str, lines: Sequence[str]) -> str:
    return "\n".join((f"{case.name}: {error}", *(f"    {line}" for line in lines)))


def _environment(case: Case) -> dict[str, str]:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("KV_CANARY_")}
    environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if case.runner == "V2" else "0"
    environment |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    if case.canary:
        environment |= {
            "KV_CANARY_MODE": "log",
            "KV_CANARY_BACKEND": os.environ.get("KV_CANARY_BACKEND", "triton"),
            "KV_CANARY_STRIDE": "1",
            "KV_CANARY_CHECK_TOKENS": "1",
            "KV_CANARY_VERIFY_BYTES_AT_TAIL": "0" if case.fault else "1",
            # As many as are in two blocks, at HEAD and at TAIL.
            "KV_CANARY_MAX_REPORTS_PER_STEP": "128",
            "KV_CANARY_SEALS": "layer",
            **({"KV_CANARY_CHECK_WRITES": "1"} if case.writes else {}),
        }
    return environment


def _serve_here(case: Case, out: Path, limit: float) -> None:
    """Serve the case in this process, write its result, and end the process: the engine leaves threads behind."""
    # Where it hangs, before it is killed.
    faulthandler.dump_traceback_later(max(limit - 10, 1), exit=True)
    from kv_canary.difftest.stress.vllm import traffic

    status = 1
    try:
        result = traffic.serve(asdict(case), model=out / "model", graph_sizes=GRAPH_SIZES)
        (out / f"{case.name}.json").write_text(json.dumps(result), encoding="utf-8")
        print(json.dumps({key: value for key, value in result.items() if key not in LONG}))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _judged(case: Case, results: dict[Case, dict[str, Any]], model: Path) -> dict[str, Any]:
    """Say what a case has shown, of the model that is saved there."""
    watched = results[case]
    if not watched["served"]:
        return {"case": asdict(case), "name": case.name, "ok": False, "failed": ["served"], **watched}
    checks = _checks(case, watched) | (writes_checks(watched["status"]) if case.writes else {})
    found: dict[str, Any] = {}
    if case.fault:
        planted = watched["planted"]
        checks |= fault_checks(watched) | {"by a graph": planted is not None and planted["by_graph"]}
    else:
        plain = results[replace(case, canary=False)]
        found = {"compared": compared(watched, plain)}
        if case.host:
            found["compared"]["below the likeliest"] = below_the_likeliest(model, watched, plain)
            checks |= _host_checks(watched, plain, found["compared"])
        else:
            checks |= _clean_checks(watched, plain)
    return {
        "case": asdict(case),
        "name": case.name,
        "ok": all(checks.values()),
        "failed": [name for name, held in checks.items() if not held],
        **{key: value for key, value in watched.items() if key not in ("served", "reports", *LONG)},
        **found,
        "num_reports": len(watched["reports"]),
        "reports": watched["reports"][:_REPORTS],
    }


def _checks(case: Case, watched: dict[str, Any]) -> dict[str, bool]:
    """Return what has to hold in every case."""
    summary, graphs = watched["status"], case.graphs != "none"
    return {
        "runner": summary["runner"] == case.runner,
        "asynchronous": watched["asynchronous"] == case.asynchronous,
        "attention in Triton": watched["attention"] == ["TritonAttentionImpl"],
        "nothing failed": not summary["failures"],
        "nobody left out": not summary["left_out"] and not summary["not_covered"],
        "every forward": summary["steps"] >= watched["forwards"] > 0,
        "graphs replayed": (watched["replays"] > 0) == graphs,
        "every decode by a graph": not graphs or watched["replays"] >= watched["decodes"] > 0,
        "batches padded": watched["padded"] > 0,
        "on": not summary["off"],
        "nothing compiled while it serves": not watched["compiled"],
    }


def _clean_checks(watched: dict[str, Any], plain: dict[str, Any]) -> dict[str, bool]:
    summary = watched["status"]
    return {
        "plain served": plain["served"],
        "same tokens": plain.get("tokens") == watched["tokens"],
        "same schedule": all(plain.get(key) == watched[key] for key in SCHEDULE),
        "no violations": summary["violations"] == 0 and not watched["reports"],
        "every position": summary["positions_verified"] == summary["positions_relied_on"] > 0,
        "healthy": summary["watching"] == "complete",
        "as many replays": watched["replays"] == plain.get("replays"),
        "chunks": watched["chunked"] > 0,
        "prefix hits": watched["prefix_hits"] > 0,
        "evictions": watched["evictions"] > 0,
        "preemptions": watched["preempted"] > 0,
        "aborts": len(watched["given_up"]) > 0,
    }


def _host_checks(watched: dict[str, Any], plain: dict[str, Any], both: dict[str, Any]) -> dict[str, bool]:
    """Return what has to hold where copies take their time, so that no two lives are scheduled alike.

    Args:
        watched: the life with a canary.
        plain: the one without.
        both: `compared` of the two, and `below_the_likeliest`.
    """
    summary = watched["status"]
    tiers = list(summary["host_tiers"].values())
    return {
        "plain served": plain["served"],
        "most requests compared": 2 * both["requests"] > len(watched["tokens"]),
        "same tokens, but for rounding": all(below <= ROUNDING for below in both["below the likeliest"]),
        # What is given up is cut short, and nothing else.
        "as many tokens": both["cut short"] <= len({*watched["given_up"], *plain.get("given_up", ())}),
        "all the same where scheduled alike": not both["scheduled alike"] or plain.get("tokens") == watched["tokens"],
        "no violations": summary["violations"] == 0 and not watched["reports"],
        "every position": summary["positions_verified"] == summary["positions_relied_on"] > 0,
        "healthy": summary["watching"] == "complete",
        "to the host": bool(tiers) and all(tier["backed_up"] for tier in tiers),
        "back from the host": bool(tiers) and all(tier["loaded"] for tier in tiers),
        "with seals": not any(tier["unsealed"] for tier in tiers),
    }


def _line(row: dict[str, Any]) -> str:
    keys = ("forwards", "decodes", "replays", "padded", "prefix_hits", "evictions", "preempted", "process_seconds")
    counts = {key: row[key] for key in keys if key in row}
    verdict = "ok" if row["ok"] else f"NOT OK: {', '.join(row['failed'])}"
    found = f", {row['num_reports']} reports" if row.get("num_reports") else ""
    return f"{row['name']}: {verdict} {counts}{found} {row.get('error', '')}"


if __name__ == "__main__":
    sys.exit(main())
