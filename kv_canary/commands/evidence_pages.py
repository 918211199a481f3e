"""Pages with blocks between markers, made from bench/results and from the code; they say what is of an older version.

    <!-- kv-canary evidence BLOCK [KIND ...]: begin -->
    ... what stands here is made anew ...
    <!-- kv-canary evidence: end -->

`kv-canary evidence` lists the results, fresh or stale, and checks the pages.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from kv_canary.commands.evidence import KINDS, RESULTS, ROOT, Result, load, on_card, results
from kv_canary.perturb_settings import BYTE_MODES

if TYPE_CHECKING:
    from rich.console import Console

_BLOCK = re.compile(
    r"(<!-- kv-canary evidence (?P<block>[a-z_-]+)(?P<kinds>(?: [a-z_0-9]+)*): begin -->\n)"
    r".*?"
    r"(<!-- kv-canary evidence: end -->)",
    re.DOTALL,
)
Results = dict[str, Result]
# Canaries, as `kv-canary bench engine` calls them.
_CANARIES = {
    "ours": "kv-canary",
    "ours_sampled": "kv-canary, without seals",
    "ours_writes": "kv-canary, writes too",
    "ours_full": "kv-canary, everything",
    "sgl": "SGLang's own",
    "sgl_all": "SGLang's own, all",
}


def pages() -> list[Path]:
    """Return the pages that may quote results."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled_in(text: str, found: Results) -> str:
    """Return a page with its blocks as they should be.

    Raises:
        KeyError: a block, or a kind of result, is not known.
    """

    def fill(match: re.Match[str]) -> str:
        kinds = match["kinds"].split()
        content = BLOCKS[match["block"]](found, kinds)
        return f"{match[1]}\n{content}\n\n{match[4]}"

    return _BLOCK.sub(fill, text)


def fill(text: str) -> str:
    """Return a page with its blocks made from the results that are there."""
    return filled_in(text, {result.name: result for result in results()})


def told(text: str) -> set[str]:
    """Return the kinds of result that some block of a page tells of."""
    return {kind for match in _BLOCK.finditer(text) for kind in _kinds(match["block"], match["kinds"].split())}


def untold(text: str) -> set[str]:
    """Return the results that a page names outside of its blocks and has no block of."""
    outside, known = _BLOCK.sub("", text), told(text)
    return {
        name
        for kind, kind_of in KINDS.items()
        for name in kind_of.files
        if kind not in known and re.search(rf"(?<![\w-]){re.escape(name)}", outside)
    }


def missing(text: str, found: Results) -> set[str]:
    """Return the files of `bench/results` that a page names and that are not there."""
    named = set(re.findall(r"bench/results/(\w+\.json)", _BLOCK.sub("", text)))
    return named - set(found)


def _kinds(block: str, kinds: Sequence[str]) -> Sequence[str]:
    vllm = ["vllm_churn", "vllm_detection"]
    of_block = {"cost": ["engine_cost", "vllm_cost", "engine", "peer"], "vllm": vllm, "all": list(KINDS)}
    return of_block.get(block, [block] if block in KINDS and not kinds else kinds)


def _source(found: Results, *names: str) -> str:
    """Return one line: from which files, of which device and commit, and whether that is older than the code."""
    parts = []
    for name in names:
        result, content = found[name], load(name)
        facts = content[0] if isinstance(content, list) else content
        of = result.note or f"of this code ({result.commit})"
        parts.append(f"`{name}`, {facts.get('device', 'unknown device')}, {of}")
    return f"<sub>{'; '.join(parts)}.</sub>"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _status(found: Results, kinds: Sequence[str]) -> str:
    names = [name for kind in kinds for name in KINDS[kind].files if name in found]
    if any(found[name].changed for name in names):
        said = "Figures on this page that come from these files are of an older version where that is said: "
    else:
        said = "Figures on this page come from these files: "
    return said + _source(found, *names)


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _cost(found: Results, _: Sequence[str]) -> str:
    measured, _names = _served(found, "engine_cost", "tiers_cost")
    # What was measured in several runs is several rows.
    ratios = {(*_batch(r), r["file"], r["mode"]): r for r in measured}
    ranked = sorted((key for key in ratios if key[-1] == "ours"), key=lambda key: float(ratios[key]["ratio"]))
    rows = []
    # Turns may be as fast as those without by chance: the best row is that whose slowest turn is the best.
    best = max(ranked, key=lambda key: (ratios[key]["n"] > 1, float(ratios[key]["low"])))
    for what, key in (("best", best), ("worst", ranked[0])):
        run, model, phase, shape, _file, _mode = key
        theirs = ratios.get((*key[:-1], "sgl"))
        rows.append(
            [
                f"SGLang, {model.upper()}, {phase} {shape}, {run}: throughput, with/without ({what}, "
                f"n={ratios[key]['n']})",
                _ratio(ratios[key]),
                "-" if theirs is None else _ratio(theirs),
            ]
        )
    # Of prefills, whose steps are long, it says less.
    hosts = [key for key in ranked if key[2] != "prefill"]
    key = max(hosts, key=lambda key: float(ratios[key]["host_us"]))
    theirs = ratios.get((*key[:-1], "sgl"))
    rows.append(
        [
            f"SGLang, {key[1].upper()}, {key[2]} {key[3]}, {key[0]}: the host's time of a step, us (worst)",
            f"{ratios[key]['host_us']:,.0f}",
            "-" if theirs is None else f"{theirs['host_us']:,.0f}",
        ]
    )
    files = [ratios[k]["file"] for k in (best, ranked[0], key)]
    in_vllm, _names = _served(found, "vllm_cost")
    for row in sorted((r for r in in_vllm if r["mode"] == "ours"), key=lambda r: float(r["ratio"]))[:1]:
        run, model, phase, shape = _batch(row)
        files.append(row["file"])
        what = f"vLLM, {model.upper()}, {phase} {shape}, {run}: throughput, with/without (worst, n={row['n']})"
        rows.append([what, _ratio(row), "-"])
    batches = [(row["shape"], row["modes"]["budget"]["ratio"]) for row in load(on_card("engine"))["rows"]]
    shape, ratio = min(batches, key=lambda batch: float(batch[1]["median"]))
    rows.append(
        [
            f"transformers, 8B, decode {shape}, {_card(on_card('engine'))}: throughput, with/without (worst)",
            f"{ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}]",
            "-",
        ]
    )
    steps = [c for c in load(on_card("peer"))["cases"] if c["group"] == "cases" and c["does"] == "step" and c["ratio"]]
    for what, case in (("best", max(steps, key=_speed)), ("worst", min(steps, key=_speed))):
        rows.append(
            [
                f"kernels of a step, {case['case']}, {_card(on_card('peer'))}: ms ({what})",
                f"{case['ours_ms']:.3g}",
                f"{case['peer_ms']:.3g}",
            ]
        )
    return "\n\n".join(
        [
            _table(["on a GPU", "kv-canary", "SGLang's own canary"], rows),
            _source(found, *dict.fromkeys(files), on_card("engine"), on_card("peer")),
        ]
    )


def _served(found: Results, *kinds: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return every row of a benchmark of an engine, each with its `run`: the GPU, and the files that they are in."""
    names = [name for kind in kinds for name in KINDS[kind].files if name in found]
    rows = []
    for name in names:
        found_rows = load(name)
        # The card in the name is that of every row, a test says.
        run = _card(name) + (", cut short" if found_rows[0].get("unfinished") else "")
        rows += [{"run": run, "file": name, **row} for row in found_rows]
    return rows, names


def _card(name: str) -> str:
    """Return the GPU that a result is of, from its name."""
    return name.partition("_")[0].upper()


def _batch(row: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return what a row of `kv-canary bench engine` is of: the run, where a file has several, and the batch."""
    return row.get("run", ""), row["model"], row["phase"], row["shape"]


def _speed(case: dict[str, Any]) -> float:
    return float(case["ratio"])


def _throughput(found: Results, _: Sequence[str]) -> str:
    what = (
        "SGLang's own scheduler with a canary and without, by turns on one GPU: overlap, radix cache, CUDA graphs, "
        "page 1, Triton attention. The median ratio [least, most]; n pairs of turns."
    )
    engine = load(on_card("engine"))["rows"]
    own = [
        [row["shape"], f"{row['floor']['ms']:.3g}", f"{row['step_ms']:.4g}"]
        + [
            f"{row['modes'][mode]['tokens_per_s']['median'] / row['modes']['without']['tokens_per_s']['median']:.3g}"
            for mode in row["modes"]
            if mode != "without"
        ]
        + [row["repeats"]]
        for row in engine
    ]
    head = ["requests x context", "a perfect engine's step, ms", "a step, ms"]
    head += [*(f"throughput, {mode} / without" for mode in engine[0]["modes"] if mode != "without"), "n"]
    return "\n\n".join(
        [
            what,
            _engine_cost(found, ()),
            "transformers' continuous batching, a model of the shape of Llama 8B, CUDA graphs:",
            _table(head, own),
            _source(found, on_card("engine")),
        ]
    )


def _host(found: Results, _: Sequence[str]) -> str:
    rows = [
        [f"{row['requests']} x {row['prefix']}", "graphs of the canary's own" if row["graphs"] else "one by one"]
        + [f"{row['us'][part]:.0f}" for part in ("begin", "head", "tail", "end", "forward")]
        + [f"{row['p90_us']:.0f}"]
        for row in load(on_card("host"))["rows"]
    ]
    head = ["requests x cached", "launches", "begin", "HEAD", "TAIL", "end", "all, us", "p90"]
    return f"{_table(head, rows)}\n\n{_source(found, on_card('host'))}"


def _engine(found: Results, _: Sequence[str]) -> str:
    rows = []
    for row in load(on_card("engine"))["rows"]:
        for name, mode in row["modes"].items():
            if name != "without":
                ratio, host = mode["ratio"], mode["host_us"]
                rows.append(
                    [
                        row["shape"],
                        name,
                        f"{row['step_ms']:.4g}",
                        f"{mode['canary_ms']:.3g}",
                        f"{mode['parts_ms']['head'] + mode['parts_ms']['tail']:.3g}",
                        f"{100 * mode['share_of_step']:.2g} %",
                        f"{100 * mode['share_of_floor']:.2g} %",
                        f"{host['canary']['median'] / 1000:.2g}",
                        f"{host['adapter']['median'] / 1000:.2g}",
                        f"{ratio['median']:.3f} [{ratio['min']:.3f}, {ratio['max']:.3f}]",
                    ]
                )
    head = ["requests x context", "canary", "step without, ms", "on the device, ms", "of it HEAD and TAIL"]
    head += ["share of the step", "of the floor", "on the host, ms", "of it the adapter", "throughput / without"]
    return f"{_table(head, rows)}\n\n{_source(found, on_card('engine'))}"


def _kernel(name: str) -> str:
    """Return a kernel's name without its types and places."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name.partition("<")[0].partition("(")[0].strip()


def _engine_cost(found: Results, _: Sequence[str]) -> str:
    return _engine_rows(*_served(found, "engine_cost", "tiers_cost"), found)


def _vllm_cost(found: Results, _: Sequence[str]) -> str:
    return _engine_rows(*_served(found, "vllm_cost"), found)


def _engine_rows(results: Sequence[dict[str, Any]], names: Sequence[str], found: Results) -> str:
    """Return a row for each canary and batch of `kv-canary bench engine` or `bench vllm`."""
    rows, operations = [], []
    # What was measured in several runs has several steps without.
    plain = {(row["file"], *_batch(row)): row["step_ms"] for row in results if row["mode"] == "none"}
    for row in results:
        if row["mode"] not in _CANARIES:
            continue
        done, without = row.get("operations") or {}, plain.get((row["file"], *_batch(row)))
        rows.append(
            [
                f"{row['model']} {row['phase']} {row['shape']}",
                row["run"],
                "" if without is None else f"{without:.3g}",
                _CANARIES[row["mode"]],
                _ratio(row),
                f"{row['best']:.3f}",
                "" if row["host_us"] is None else f"{row['host_us']:,.0f}",
                "" if row["stream_us"] is None else f"{row['stream_us']:.0f}",
                f"{sum(o['count'] for o in done.values()):.0f}" if done else "",
                row["n"],
            ]
        )
        if row["mode"] == "ours" and done:
            listed = ", ".join(f"`{_kernel(name)}` {o['us']:.1f}" for name, o in done.items())
            operations.append(f"{row['model']} {row['shape']}: {listed}.")
    head = [
        "batch",
        "on",
        "a step without, ms",
        "canary",
        "throughput / without",
        "best / best",
        "host, us a step",
        "stream, us",
        "operations",
        "n",
    ]
    listed = "\n\nThe device operations of a step that are kv-canary's, in microseconds: " + " ".join(operations)
    return f"{_table(head, rows)}{listed if operations else ''}\n\n{_source(found, *names)}"


def _seal_cost(found: Results, _: Sequence[str]) -> str:
    """Return a row for each launch of `kv-canary bench seals`, and what a scrub and a verdict take."""
    results = load(on_card("seals"))
    rows = [
        [
            row["model"].upper(),
            f"`{row['op']}`",
            row["slots"],
            f"{row['tokens']:,}",
            f"{1e3 * row['ms']:,.1f}",
            f"{row['gb_s']:,.0f}",
            f"{100 * row['of_copy']:.0f} %",
        ]
        for row in results
    ]
    more = [
        f"{name.removeprefix('scrub_100_gb_').removesuffix('_s').upper()}: {seconds:.1f} s"
        for name, seconds in results[0]["moments"].items()
        if name.startswith("scrub_100_gb_")
    ]
    pools = [row["gb_s"] * row["ms"] / 1e3 for row in results if (row["op"], row["slots"]) == ("verify_seals", "range")]
    text = (
        f"A pool of 100 GB gone round with `scrub_share=0.005`, by the time of the whole range: {', '.join(more)}. The "
        f"pools were of {' and '.join(f'{size:.0f}' for size in pools)} GB."
    )
    head = ["KV of", "op", "slots", "tokens", "us", "GB/s", "of a copy"]
    return f"{_table(head, rows)}\n\n{text}\n\n{_source(found, on_card('seals'))}"


def _soak(found: Results, _: Sequence[str]) -> str:
    soak = load("soak.json")
    happened = [soak[part]["happened"] for part in ("model_engines", "transformers")]
    text = (
        f"Healthy engines, {soak['lives']} of them drawn at random, in tight pools with retractions, aborts, forks and "
        f"drafts: {soak['engine_steps']:,} steps of model engines and {soak['forwards']:,} forwards of transformers, "
        f"{soak['false_alarms']} false alarms; {happened[0]['slots freed']:,} slots were freed and "
        f"{happened[0]['retracted']:,} requests retracted in the model engines."
    )
    if soak.get("before"):
        runs = [f"torch {run['versions']['torch']}" for run in (*soak["before"], soak)]
        text += f" It is of {len(runs)} runs, one continued by the next: {', '.join(runs)}."
    wrong = [sentence for part in ("model_engines", "transformers") for sentence in soak[part]["wrong"]]
    if wrong:
        text += f" Otherwise judged wrong: {'; '.join(wrong)}."
    return f"{text}\n\n{_source(found, 'soak.json')}"


def _detection(found: Results, _: Sequence[str]) -> str:
    rows, names = [], [name for name in KINDS["detection"].files if name in found]
    measured = [row for name in names for row in load(name)]
    for row in measured:
        # Rows of before there were seals have sampled bytes only.
        flipped = "sampled" if row.get("covered_only", True) else "any"
        rows.append(
            [
                row["device"],
                row["mode"],
                row["group"],
                row["stride"],
                flipped if row["mode"] in BYTE_MODES else "",
                f"{row['found']} of {row['runs']}",
                row.get("found_by_seals", 0),
                row["blamed_wrongly"],
                row["median_steps_late"],
                row["most_steps_late"],
                *("-" if n is None else n for n in map(row.get, ("median_steps_to_seals", "most_steps_to_seals"))),
            ]
        )
    text = (
        "One fault an engine. *Bytes*: a bit was flipped in one that the position's sample covers (see "
        "[what is sampled](what-is-compared.md)), or in any byte of any layer. What is not sampled is found by a scrub "
        "of the seals alone, which comes after every fifth action of the engine; what was freed or written anew by "
        "then is not found. *Steps late* are counted from the first in which the fault could be seen, *to seals* from "
        "the damage to the scrub that found it."
    )
    if not any("found_by_seals" in row for row in measured):
        text += " In these rows all bytes that were flipped are sampled, and nothing was sealed."
    head = ["device", "fault", "group", "stride", "bytes", "found", "by seals", "wrongly blamed"]
    head += ["median steps late", "most", "median steps to seals", "most to seals"]
    return f"{text}\n\n{_table(head, rows)}\n\n{_source(found, *names)}"


def _seals(found: Results, _: Sequence[str]) -> str:
    rows = [
        [
            row["case"],
            row["layers"],
            f"{row['found']} of {row['runs']}",
            row["blamed_wrongly"],
            row["late_steps_median"],
            row["late_steps_max"],
            ", ".join(f"{name} {count}" for name, count in row["by"].items()),
        ]
        for row in load("seals_detection.json")
    ]
    text = (
        "Bytes that were changed once they were sealed, one fault at a time, in a model engine whose requests share "
        "prefixes, end and are put off; nothing goes round the pool by itself. What no request relied on was found "
        "by going through the pool 24 actions later. Faults whose slots were freed or written anew before anybody "
        "relied on them are left out."
    )
    head = ["changed", "layers", "found", "wrongly blamed", "median steps late", "most", "by"]
    return f"{text}\n\n{_table(head, rows)}\n\n{_source(found, 'seals_detection.json')}"


def _chaos(found: Results, _: Sequence[str]) -> str:
    own, sglang = load("chaos.json"), load("sglang_chaos.json")
    rows = [
        [
            "model engines and transformers",
            own["minutes"],
            own["lives"],
            f"{own['injected']:,}",
            len(own["lost"]),
            own["false_alarms"],
            f"{own['found']} of {own['found'] + own['missed']}",
        ],
        [
            "SGLang",
            sglang["after"].split()[0],
            sglang["lives"],
            f"{sglang['injected']:,}",
            sglang.get("lost", 0),
            sglang["violations"],
            f"{sglang['planted faults found']} of {sglang['planted faults found']}",
        ],
    ]
    head = [
        "engine",
        "minutes",
        "lives",
        "failures injected",
        "requests lost",
        "false alarms",
        "faults found afterwards",
    ]
    text = "The canary's own launches, copies, allocations, files, threads and callbacks fail at random, in log mode."
    return f"{text}\n\n{_table(head, rows)}\n\n{_source(found, 'chaos.json', 'sglang_chaos.json')}"


def _difftest(found: Results, _: Sequence[str]) -> str:
    rows, fuzzed = [], [name for name in KINDS["fuzz"].files if name in found]
    for name in fuzzed:
        run = load(name)
        targets = ", ".join(f"{target} {of['cases']:,}" for target, of in run["targets"].items())
        pairs = f"{run['coverage']['covered_pairs']:,} of {run['coverage']['feasible_pairs']:,}"
        rows.append([run["device"], f"{run['seconds'] / 60:.0f}", f"{run['cases']:,}", pairs, targets])
    fuzz = _table(["device", "minutes", "cases", "pairs of features met", "cases by target"], rows)
    planted = load("planted.json")["planted"]
    campaigns = [second for bug in planted for second in bug["found_after_s"]]
    seconds = [second for second in campaigns if second is not None]
    missed = [f"{bug['kind']} ({bug['name']})" for bug in planted if None in bug["found_after_s"]]
    mutants = load("mutants.json")
    lines = [
        f"Planted bugs: {len(planted)}, found by {len(seconds)} of {len(campaigns)} campaigns, after "
        f"{median(seconds):.3g} s in the median, {max(seconds):.3g} s at worst where found. Not found by every "
        f"campaign: {', '.join(missed) or 'none'}.",
        f"Mutants of kernels and references: {mutants['total']:,}; killed {mutants['killed']:,}, argued equivalent "
        f"{mutants['equivalent']}, survived {mutants['survived']}.",
    ]
    note = "Nothing was found by these runs."
    return "\n\n".join([note, fuzz, _source(found, *fuzzed), *lines, _source(found, "planted.json", "mutants.json")])


# By the key that a result has of its engine's version.
_BATCHES = {
    "decode": "the same requests",
    "churn": "one ends and another comes every other step",
    "drafts": "the same requests, with drafts",
}
_ENGINES = {"sglang": "SGLang", "vllm": "vLLM", "transformers": "transformers"}


def _planted(found: Results, _: Sequence[str]) -> str:
    rows = [
        [
            bug["kind"],
            ", ".join("not found" if second is None else f"{second:.1f}" for second in bug["found_after_s"]),
            "" if bug["median_s"] is None else f"{bug['median_s']:.1f}",
        ]
        for bug in load("planted.json")["planted"]
    ]
    return f"{_table(['planted', 'found after, s', 'median'], rows)}\n\n{_source(found, 'planted.json')}"


def _engines(found: Results, _: Sequence[str]) -> str:
    overlap = load(on_card("overlap"))
    rows = [
        [
            f"overlapped scheduler, {life['engine']}",
            f"{life['steps']:,} steps",
            life["false_alarms"],
            f"{life['wrong_tokens']} wrong tokens",
        ]
        for life in overlap["lives"]
    ]
    for name in (on_card("sglang"), on_card("vllm"), on_card("transformers")):
        run = load(name)
        clean, faults, versions = run["clean"], run.get("faults", run.get("flips")), run.get("versions", {})
        rows.append(
            [
                next(
                    f"{engine} {has[key]}" for key, engine in _ENGINES.items() for has in (run, versions) if key in has
                ),
                f"{len(clean)} healthy lives, {sum(c['ok'] for c in clean)} right",
                # A life that was not served to its end has none to tell of.
                sum(c.get("status", c.get("summary", {})).get("violations", 0) for c in clean),
                f"{sum(f['ok'] for f in faults)} of {len(faults)} planted faults found",
            ]
        )
    transfer = load(on_card("pd"))
    rows.append(
        [
            "transfers between two GPUs",
            f"{transfer['faults']} damaged",
            len(transfer["wrong"]),
            f"{transfer['faults_found']} found",
        ]
    )
    names = (on_card("overlap"), on_card("sglang"), on_card("vllm"), on_card("transformers"), on_card("pd"))
    return f"{_table(['engine', 'ran', 'false alarms', 'and'], rows)}\n\n{_source(found, *names)}"


def _vllm(found: Results, _: Sequence[str]) -> str:
    churn, rows = load("vllm_churn.json"), load("vllm_detection.json")
    faulty = [row for row in rows if not row["is_healthy"]]
    worst = min(faulty, key=lambda row: row["found"] / row["runs"])
    head = ["", "runs", "found", "false alarms or something else blamed"]
    table = [
        [
            f"healthy lives over random settings, {churn['lives']}",
            f"{churn['steps']:,} steps, {churn['positions_verified']:,} positions",
            "",
            churn["false_alarms"],
        ],
        [
            f"{len({row['fault'] for row in faulty})} faults, both model runners",
            sum(row["runs"] for row in faulty),
            sum(row["found"] for row in faulty),
            sum(row["blamed_wrongly"] for row in rows),
        ],
        [f"worst of them: {worst['fault']}, {worst['runner']}", worst["runs"], worst["found"], worst["blamed_wrongly"]],
    ]
    return f"{_table(head, table)}\n\n{_source(found, 'vllm_churn.json', 'vllm_detection.json')}"


def _tiers(found: Results, _: Sequence[str]) -> str:
    head = ["fault", "engine", "settings", "lives", "found", "by", "steps late at most", "blamed wrongly"]
    head += ["causes right, half, wrong", "wrong text"]
    files = [name for kind in ("tiers", "vllm_tiers") for name in KINDS[kind].files if name in found]
    by_fault: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in (row for file in files for row in load(file)):
        engine, _, setting = row["engine"].partition(", ")
        engine += ", on a GPU" if setting.startswith("GPU, ") else ""
        by_fault.setdefault((row["fault"], engine), []).append(row)
    table = []
    for (fault, engine), rows in by_fault.items():
        looks = Counter[str]()
        for row in rows:
            looks.update(row["where"])
        by = ", ".join(f"{look} {count}" for look, count in looks.most_common())
        runs, seen, blamed, wrong = (
            sum(row[name] for row in rows) for name in ("runs", "found", "blamed_wrongly", "wrong_text")
        )
        late = max(row["late_steps_max"] for row in rows) if seen else ""
        causes = ", ".join(str(sum(row["causes"][grade] for row in rows)) for grade in ("right", "half", "wrong"))
        table.append([fault, engine, len(rows), runs, seen, by, late, blamed, causes if seen else "", wrong])
    settings = {row["engine"] for rows in by_fault.values() for row in rows}
    told = f"Settings: {'; '.join(sorted(settings))}."
    return f"{_table(head, table)}\n\n{told}\n\n{_source(found, *files)}"


def _causes(found: Results, kinds: Sequence[str]) -> str:
    """Return how right the causes are that campaigns were told, a row for each."""
    rows, names = [], [name for kind in kinds for name in KINDS[kind].files if name in found]
    for name in names:
        grades = Counter[str]()
        for row in load(name):
            grades.update(row.get("causes", {}))
            grades.update(value for key, value in row.items() if key.endswith("_cause_is") and value)
        rows.append([f"`{name}`", *(grades[grade] for grade in ("right", "half", "wrong"))])
    return f"{_table(['campaign', 'right', 'half', 'wrong'], rows)}\n\n{_source(found, *names)}"


def _adapters_host(found: Results, _: Sequence[str]) -> str:
    rows = [
        [
            row["engine"],
            _BATCHES[row["batch"]],
            row["requests"],
            row["caches"],
            f"{row['host_us']:.0f}",
            f"{row['p90_us']:.0f}",
            f"{row['mean_us']:.0f}",
            f"{row['tokens']:.0f}",
            f"{row['mean_us'] / row['tokens']:.2f}",
            f"{row['repeated']:.0%}",
        ]
        for row in load("adapters_host.json")["rows"]
    ]
    head = [
        *("adapter", "batch", "requests", "caches", "median, us", "p90, us", "mean, us"),
        *("tokens a step", "us a token", "decodes that repeat the one before"),
    ]
    return f"{_table(head, rows)}\n\n{_source(found, 'adapters_host.json')}"


def _all(found: Results, _: Sequence[str]) -> str:
    rows = [[f"`{r.name}`", r.note or "of this code", r.commit, f"`{KINDS[r.kind].command}`"] for r in found.values()]
    return _table(["result", "is", "measured at", "made anew by"], rows)


def _modules(_: Results, folders: Sequence[str]) -> str:
    rows = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        if path.name != "__init__.py":
            rows.append([f"`{path.relative_to(ROOT)}`", " ".join(first.split()).replace("|", "\\|")])
    return _table(["module", "what it is"], rows)


# What stands in a block, by the name in its first marker; given the results by name, and the kinds after the name.
BLOCKS: dict[str, Callable[[Results, Sequence[str]], str]] = {
    "status": _status,
    "cost": _cost,
    "throughput": _throughput,
    "host": _host,
    "engine": _engine,
    "engine_cost": _engine_cost,
    "vllm_cost": _vllm_cost,
    "seal_cost": _seal_cost,
    "soak": _soak,
    "detection": _detection,
    "seals": _seals,
    "chaos": _chaos,
    "difftest": _difftest,
    "planted": _planted,
    "engines": _engines,
    "vllm": _vllm,
    "tiers": _tiers,
    "causes": _causes,
    "adapters_host": _adapters_host,
    "all": _all,
    "modules": _modules,
}


def problems(found: Results) -> Iterator[str]:
    """Return what is wrong with the pages, a sentence each."""
    for path in pages():
        name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
        if filled_in(text, found) != text:
            yield f"{name} is not as the results are: run kv-canary evidence --write"
        for result in sorted(untold(text)):
            yield f"{name} quotes {result}, and no block of it says whether that is of this code"
        for result in sorted(missing(text, found)):
            yield f"{name} quotes {result}, which is not in bench/results"


def show(found: Results, console: Console) -> None:
    """Print every result: fresh or stale, and how to make it anew. A list: names and commands are long."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print("bench/results, held against the code that is here:\n", highlight=False)
    for r in found.values():
        state = ("stale", "bold red") if r.changed else ("fresh", "bold green")
        console.print(Text.assemble((r.name, "bold"), " is ", state))
        facts = Table.grid(padding=(0, 2, 0, 0))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for name, words in (
            ("changed since", ", ".join(r.changed)),
            ("measured at", r.commit),
            ("made anew by", KINDS[r.kind].command),
        ):
            if words:
                facts.add_row(name, Text(words))
        console.print(Padding(facts, (0, 0, 0, 2)))


@click.command()
@click.option("--write", is_flag=True, help="Write the pages anew first.")
@click.option("--json", "as_json", is_flag=True, help="Print the results for a machine.")
def evidence(write: bool, as_json: bool) -> None:
    """List measured results as fresh or stale, and check the pages that quote them.

    A result in bench/results carries a digest of the code that it rests on; it is stale once that code is another.
    Stale is no fault: a page that quotes a stale result without saying so is.

    Exit codes: 0 every page says of what it quotes whether it is of this code, 1 one does not, 2 no checkout.

    \b
    Examples:
      kv-canary evidence
      kv-canary evidence --write
    """
    from rich.console import Console

    if not RESULTS.is_dir():
        raise click.UsageError("evidence must run in a checkout, got an installed package without bench/results")
    console = Console()
    found = {result.name: result for result in results()}
    if write:
        for path in pages():
            text = path.read_text(encoding="utf-8")
            path.write_text(filled_in(text, found), encoding="utf-8")
    wrong = list(problems(found))
    if as_json:
        facts = [
            {"result": r.name, "kind": r.kind, "commit": r.commit, "changed": list(r.changed)} for r in found.values()
        ]
        click.echo(json.dumps({"results": facts, "problems": wrong}, indent=2))
        raise SystemExit(1 if wrong else 0)
    show(found, console)
    for line in wrong:
        console.print(line, style="bold red")
    if not wrong:
        console.print("Every page says of what it quotes whether it is of this code.")
    raise SystemExit(1 if wrong else 0)
