"""How many entries a second do the pure-PyTorch references check and record on one core, beside the peer's?

    python -P -m kv_canary.bench.references --json bench/results/cpu_references.json
    python -P -m kv_canary.bench.references --before CHECKOUT --json bench/results/cpu_references.json

The peer is SGLang's KV canary, whose reference comes with it (sglang==0.5.23); where it is not installed ours is timed
alone. Both are checked first (a healthy pool gives no violation, one changed record gives one) and then timed by turns,
one thread each, in CPU time, so that other processes count as little as may be. A ratio is the median of those of the
rounds. Ours always does the whole case; the peer plans and verifies as many of its requests as end in a second.

With --before, the fuzzer and an engine in debug mode run as well, on an older checkout and on this one: see
`kv_canary.bench.references_before`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.table import Table

import kv_canary as kc
from kv_canary.backends import implementation
from kv_canary.bench.facts import facts
from kv_canary.bench.references_before import compare_checkouts, tables
from kv_canary.bench.references_peer import Peer, peer_version
from kv_canary.bench.speed.cases import Case, Request, decode
from kv_canary.bench.speed.state import State, build, pool_bytes, random_bytes
from kv_canary.specs import get_spec

Launch = Callable[[], object]

ROW_BYTES, LAYERS = 64, 2
# What fingerprints cover: nothing, 16 bytes of each token's K, or of its K and its V.
BYTES = ("none", "K", "K and V")
ROUNDS = 7
# A launch is repeated until its share of a round is at least so long.
LEAST_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case, and how many of its requests the peer plans and verifies."""

    case: Case
    peer_requests: int


def _case(name: str, requests: tuple[Request, ...]) -> Case:
    return Case(name=name, requests=requests, row_bytes=ROW_BYTES, most_layers=LAYERS)


COMPARISONS = (
    Comparison(case=_case("decode 256x4096", decode(256, 4096)), peer_requests=4),
    Comparison(case=_case("prefill 1x8192", (Request(cached=0, new=8192),)), peer_requests=1),
)
QUICK = (
    Comparison(case=_case("decode 3x20", decode(3, 20)), peer_requests=2),
    Comparison(case=_case("prefill 2x9", (Request(cached=0, new=9),) * 2), peer_requests=2),
)


class Side(Protocol):
    """One contender on one state: what it launches, by op, and how many entries each launch is of.

    `violations` counts, `damaged` changes the record of one cached token while its block runs.
    """

    entries: dict[str, int]
    launches: dict[str, Launch]
    violations: torch.Tensor

    def damaged(self) -> Any: ...


class Ours:
    """The references of this package."""

    def __init__(self, state: State, *, covered: str) -> None:
        self._records, self.violations = state.records, state.violations.count
        n, after = len(state.rows), verified_lens(state)
        entries = int(after.sum())
        verify_plan = kc.VerifyPlan.allocate(verify_cap=entries)
        write_plan, unused = (kc.WritePlan.allocate(write_cap=n) for _ in range(2))
        endpoint = kc.Endpoint(
            tag=kc.Tag.HEAD_FULL,
            records=state.records,
            k_source=state.k_source if covered != "none" else None,
            v_source=state.v_source if covered == "K and V" else None,
        )
        found = {"violations": state.violations, "counters": state.counters, "step": state.step}
        status = torch.zeros(1, dtype=torch.int32)
        table = {"rows": state.rows, "owners": state.owners, "req_to_token": state.table, "status": status}
        later = {**table, "prefix_lens": after, "extend_lens": state.new}
        now = {**table, "prefix_lens": state.cached, "extend_lens": state.new}
        scratch = kc.VerifyPlan.allocate(verify_cap=max(1, int(state.cached.sum())))
        _bound("plan", **now, verify_plan=scratch, write_plan=write_plan)()
        resolved = kc.ResolvedSlots.allocate(entry_cap=entries)
        self.launches: dict[str, Launch] = {
            "plan": _bound("plan", **later, verify_plan=verify_plan, write_plan=unused),
            "verify": _bound("verify", verify_plan=verify_plan, endpoint=endpoint, **found),
            "verify_prefixes": _bound(
                "verify_prefixes", **later, endpoint=endpoint, resolved=resolved, write_plan=unused, **found
            ),
            "write": _bound(
                "write",
                write_plan=write_plan,
                input_ids=state.batch.tokens,
                positions=state.batch.positions,
                out_slots=state.batch.slots,
                endpoint=endpoint,
                tails=state.tails,
                check_positions=torch.ones(1, dtype=torch.int32),
                **found,
            ),
        }
        self.entries = dict.fromkeys(self.launches, entries) | {"write": len(state.batch.tokens)}
        self._changed = int(state.table[1, 0])

    @contextmanager
    def damaged(self) -> Iterator[None]:
        self._records[self._changed, 0] ^= 1
        yield
        self._records[self._changed, 0] ^= 1


def verified_lens(state: State) -> torch.Tensor:
    """Return how many cached positions of each request are verified: after a prefill, those that it wrote."""
    return torch.where(state.cached > 0, state.cached, state.new)


def check(side: Side, what: str) -> None:
    """Raise RuntimeError unless a healthy pool gives no violation, and one changed record one."""

    def expect(launches: Sequence[str], count: int, of: str) -> None:
        side.violations.zero_()
        for op in launches:
            side.launches[op]()
        if int(side.violations) != count:
            raise RuntimeError(f"kv-canary: bench: {what}: {of} must give {count} violations, got {side.violations}")

    verifying = [op for op in side.launches if op.startswith("verify")]
    writing = [op for op in ("write", "plan") if op in side.launches]
    expect([*writing, *verifying], 0, "a healthy pool")
    for op in verifying:
        with side.damaged():
            expect([op], 1, f"one changed record in {op}")
    side.violations.zero_()


def measure(comparison: Comparison, *, with_peer: bool, rounds: int) -> list[dict[str, Any]]:
    """Check and time one case; return a row for each op and for what fingerprints cover."""
    case = comparison.case
    slice_ = _case(case.name, case.requests[: comparison.peer_requests])
    state = _state(case)
    rows = []
    for covered in BYTES:
        ours: Side = Ours(state, covered=covered)
        check(ours, f"{case.name}, ours")
        peers: dict[str, Side] = {}
        if with_peer:
            # It copies all of its records to write some, so it writes to a pool as large as ours.
            part = Peer(_state(slice_), covered=covered, history=True)
            whole = part if len(slice_.requests) == len(case.requests) else Peer(state, covered=covered, history=False)
            for peer in {part, whole}:
                check(peer, f"{case.name}, the peer's")
            peers = {"plan": part, "verify": part, "verify_prefixes": part, "write": whole}
        for op in ours.launches:
            if op == "plan" and covered != "none":
                continue
            rows.append({"case": case.name, "op": op, "bytes": covered, **_by_turns(op, ours, peers.get(op), rounds)})
            print(_line(rows[-1]), flush=True)
    return rows


def _by_turns(op: str, ours: Side, peer: Side | None, rounds: int) -> dict[str, Any]:
    """Time one op of both by turns, and return rates in millions of entries a second."""
    sides = {"ours": ours} | ({} if peer is None else {"peer": peer})
    # Ours of both plans and verifies: what the peer does in two launches.
    launches = {name: side.launches.get(op, _both(side)) for name, side in sides.items()}
    repeats = {name: max(1, round(LEAST_SECONDS / _seconds(launch, 1))) for name, launch in launches.items()}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, launch in launches.items():
            entries = sides[name].entries["verify" if op == "verify_prefixes" else op]
            rates[name].append(entries / _seconds(launch, repeats[name]) / 1e6)
    row: dict[str, Any] = {"entries": ours.entries[op]}
    for name, values in rates.items():
        row[f"{name}_m_per_s"] = round(statistics.median(values), 4)
        row[f"{name}_from_to"] = [round(min(values), 4), round(max(values), 4)]
    if peer is not None:
        ratios = [a / b for a, b in zip(rates["ours"], rates["peer"], strict=True)]
        row["peer_entries"] = peer.entries["verify" if op == "verify_prefixes" else op]
        row["ratio"] = round(statistics.median(ratios), 1)
        row["ratio_from_to"] = [round(min(ratios), 1), round(max(ratios), 1)]
    return row


def _both(side: Side) -> Launch:
    return lambda: (side.launches["plan"](), side.launches["verify"]())


def _seconds(launch: Launch, repeats: int) -> float:
    """Return the CPU time of one launch, on average."""
    begin = time.process_time()
    for _ in range(repeats):
        launch()
    return (time.process_time() - begin) / repeats


def _state(case: Case) -> State:
    return build(case, random_bytes(LAYERS * pool_bytes(case, 1), torch.device("cpu")), backend="reference")


def _bound(op: str, **arguments: Any) -> Launch:
    """Return a launch of the reference without the front door's validation, as the peer's is called."""
    bound = get_spec(op).bind(arguments)
    run = implementation(op, "reference")
    return lambda: run(**bound)


def _line(row: Mapping[str, Any]) -> str:
    beside = f", {row['ratio']} times the peer's {row['peer_m_per_s']}" if "ratio" in row else ""
    return f"{row['case']}, {row['op']}, bytes of {row['bytes']}: {row['ours_m_per_s']} M entries/s{beside}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("case", "op", "bytes", title="references on one core, millions of entries a second")
    for name in ("ours", "", "peer", "", "ratio", ""):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row["case"], row["op"], row["bytes"]]
        for name in ("ours_m_per_s", "ours_from_to", "peer_m_per_s", "peer_from_to", "ratio", "ratio_from_to"):
            value = row.get(name, "")
            cells.append(f"{value[0]} to {value[1]}" if isinstance(value, list) else str(value))
        table.add_row(*cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the JSON goes; what it holds of other parts is kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each side [{ROUNDS}]")
    parser.add_argument("--quick", action="store_true", help="tiny cases: does it work?")
    parser.add_argument(
        "--before", type=Path, action="append", metavar="CHECKOUT", help="fuzzer and engine, there and here; repeatable"
    )
    parser.add_argument("--fuzz-cases", type=int, default=60, help="of each op, in a run of the fuzzer [60]")
    parser.add_argument("--fuzz-rounds", type=int, default=3, help="runs of the fuzzer, of each checkout [3]")
    parser.add_argument("--engine-rounds", type=int, default=3, help="runs of the engine, of each checkout [3]")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    console, load = Console(width=150), os.getloadavg()
    result: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        result = json.loads(arguments.json.read_text(encoding="utf-8"))
    result |= facts("cpu", kind="references")
    if arguments.before is None:
        version = peer_version()
        print(f"the peer: sglang {version}" if version else "sglang is not installed: ours alone")
        rows = []
        for comparison in QUICK if arguments.quick else COMPARISONS:
            rows += measure(comparison, with_peer=version is not None, rounds=arguments.rounds)
        result["entries"] = {"peer": version and f"sglang {version}", "clock": "CPU time of the process", "rows": rows}
        console.print(_table(rows))
        part = "entries"
    else:
        part = "before_and_after"
        result[part] = compare_checkouts(
            arguments.before,
            fuzz_cases=arguments.fuzz_cases,
            fuzz_rounds=arguments.fuzz_rounds,
            engine_rounds=arguments.engine_rounds,
            quick=arguments.quick,
        )
        for table in tables(result[part]):
            console.print(table)
    result[part]["load"] = {"at_begin": load, "at_end": os.getloadavg(), "cores": os.cpu_count()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
