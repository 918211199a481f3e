"""Ranks that differ: real processes over a real group, each with an engine without a model, KV bytes and a canary."""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch

import kv_canary as kc
from kv_canary.commands.facts import facts
from kv_canary.difftest.options import commit_option, device_option, json_option
from kv_canary.difftest.stress.rank_engine import Facts, Place
from kv_canary.difftest.stress.rank_scenarios import SCENARIOS, judge

# Seconds after which a rank that hears nothing goes on alone; and after which all scenarios together count as hung.
TIMEOUTS = {"cpu": 2.0, "cuda": 5.0}
LIMIT = 120.0


def launch(names: Sequence[str], *, device: str = "cpu") -> dict[str, list[Facts]]:
    """Run scenarios one after the other in processes of their own, and return what each rank said.

    Args:
        names: of scenarios, those that kill a rank last.
        device: "cpu", or "cuda": each rank has a GPU, or shares one with others.

    Raises:
        RuntimeError: the processes took too long; those that are left have been killed.
    """
    plan = _members(names)
    size = 1 + max(max(members) for members in plan.values())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_work, args=(rank, size, plan, device, folder)) for rank in range(size)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        results: dict[str, list[Facts]] = {}
        for name, members in plan.items():
            paths = [Path(folder) / f"{name}.{rank}.json" for rank in members]
            results[name] = [json.loads(p.read_text()) if p.exists() else {} for p in paths]
    if hung:
        raise RuntimeError(f"kv-canary: stress: ranks {hung} hung for {LIMIT:g} seconds; the ranks had said {results}")
    return results


def _members(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the processes that take part in each scenario; one that has died takes part in none."""
    kills = sum(SCENARIOS[name].kills for name in names)
    alive = list(range(max(1 + kills, *(SCENARIOS[name].size for name in names))))
    plan = {}
    for name in names:
        plan[name] = [alive[0], alive.pop()] if SCENARIOS[name].kills else alive[: SCENARIOS[name].size]
    return plan


def _work(rank: int, size: int, plan: Mapping[str, list[int]], device: str, folder: str) -> None:
    """Be one rank."""
    import torch.distributed as dist

    logging.getLogger("kv_canary").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    # Groups are made by all processes together, so before any of them can be lost.
    groups = {}
    for name, members in plan.items():
        new = [kc.RankGroup.new(members, timeout=TIMEOUTS[device]) for _ in range(SCENARIOS[name].managers)]
        groups[name] = ([group for group in new if group], dist.new_group(members, backend="gloo", timeout=limit))
    for name, (mine, model) in groups.items():
        if not mine:
            continue
        # They come from different scenarios.
        dist.barrier(model)
        try:
            said = SCENARIOS[name].run(Place(ranks=mine[0], spare=mine[1:], model=model, device=place))
        except Exception:
            said = {"error": traceback.format_exc()}
        path = Path(folder) / f"{name}.{rank}"
        path.write_text(json.dumps(said), encoding="utf-8")
        path.rename(path.with_name(f"{path.name}.json"))


@click.command()
@device_option("Where the pools are.")
@json_option()
@commit_option()
def main(device: str, json_path: Path | None, commit: str | None) -> None:
    """Let ranks compare what they hold: equal ones, ones that differ, slow ones, and ones that die.

    Exit codes: 0 every scenario went as it should, 1 not so, 2 misuse.

    \b
    Examples:
      kv-canary stress ranks
      kv-canary stress ranks --device cuda --json h200_ranks.json
    """
    said: dict[str, Any]
    try:
        results = launch(list(SCENARIOS), device=device)
        said = {name: {"right": judge(name, ranks), "ranks": ranks} for name, ranks in results.items()}
    except RuntimeError as error:
        said = {name: {"right": False, "error": str(error)} for name in SCENARIOS}
    for name, result in said.items():
        click.echo(f"{name:24} {'right' if result['right'] else 'WRONG'}")
    if json_path is not None:
        where = {**facts(device, commit=commit, kind="ranks"), "gpus": torch.cuda.device_count()}
        json_path.write_text(json.dumps({**where, "backends": {"gloo": said}}, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(result["right"] for result in said.values()) else 1)


if __name__ == "__main__":
    main()
