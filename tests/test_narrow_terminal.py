"""A terminal of 80 columns: no line is longer, nothing is cut off, and names stay in one piece."""

from __future__ import annotations

import io
from collections.abc import Iterator

import click
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from kv_canary.cli import main
from kv_canary.commands.checkup import BackendCheck, Checkup, EngineCheck
from kv_canary.commands.doctor import _show as show_checkup
from kv_canary.commands.evidence import KINDS, results
from kv_canary.commands.settings import all_settings
from kv_canary.constants import Reason
from kv_canary.demo.faults import FAULTS
from kv_canary.demo.random_bits import RandomBits
from kv_canary.demo.run import DemoResult, FaultResult
from kv_canary.demo.run import _show as show_demo
from kv_canary.demo.serving import Served
from kv_canary.difftest.console import bytes_table
from kv_canary.difftest.corpus import entries
from kv_canary.difftest.mutation.planted import PLANTED_BUGS
from kv_canary.specs import all_specs

WIDTH = 80


def fits(text: str) -> str:
    """Return what was printed, once it is known that it fits and that nothing of it was cut off."""
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    assert "…" not in text
    return text


def printed(*words: str, width: int = WIDTH) -> str:
    found = CliRunner(env={"COLUMNS": str(width)}).invoke(main, words, terminal_width=width)
    assert found.exit_code in (0, 1), found.output
    return found.output


def narrow_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=WIDTH, no_color=True), out


def commands(command: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, *words, name)


@pytest.mark.parametrize("words", [*commands(main)], ids=" ".join)
def test_the_help_of_every_command_fits(words: tuple[str, ...]) -> None:
    # A command's short help in its group's list ends in three dots of its own.
    fits(printed(*words, "--help"))


def test_every_op_is_listed_with_its_whole_contract() -> None:
    text = fits(printed("ops"))
    for spec in all_specs().values():
        assert " ".join(spec.doc.split("\n\n")[0].split()) in " ".join(text.split())
    assert [line.split()[0] for line in text.splitlines() if not line.startswith(" ")] == list(all_specs())
    # Where there is room, each in a line of its own.
    assert len(printed("ops", width=200).splitlines()) == len(all_specs())


@pytest.mark.parametrize("op", ["plan", "write"])
def test_the_arguments_of_an_op_are_shown_whole(op: str) -> None:
    text = fits(printed("ops", op))
    assert [name for name in all_specs()[op].arguments if f" {name} " not in text] == []


@pytest.mark.parametrize("words", [(), ("seals",), ("_",)])
def test_settings_and_what_they_may_be_stay_in_one_piece(words: tuple[str, ...]) -> None:
    text = fits(printed("settings", *words))
    shown = [s for of in all_settings().values() for s in of if not words or words[0].upper() in s.variable]
    assert [s.variable for s in shown if f"{s.variable}={s.default} " not in text] == []
    assert [word for s in shown for word in s.values.split() if word not in text] == []


def test_results_their_sources_and_their_commands_stay_in_one_piece() -> None:
    text = fits(printed("evidence"))
    lines = text.splitlines()
    for result in results():
        state = "stale" if result.changed else "fresh"
        assert f"{result.name} is {state}" in lines
        assert [word for word in (*result.changed, *KINDS[result.kind].command.split()) if word not in text] == []


def test_planted_bugs_are_listed_with_their_whole_names() -> None:
    text = fits(printed("difftest", "planted", "--list"))
    assert [bug.name for bug in PLANTED_BUGS if not any(x.startswith(f"{bug.name}  ") for x in text.splitlines())] == []


def test_a_checkup_cuts_no_path_off() -> None:
    path = "/var/log/" + "kv-canary/" * 8 + "events.jsonl"
    checkup = Checkup(
        versions={"python": "3.11.7", "sglang": None},
        devices=("cpu: x86_64, 2 cores",),
        backends=(BackendCheck(name="triton", device="cpu", works=False, detail="it fell over: " + "why " * 30),),
        engines=(EngineCheck(name="transformers", version="5.23.0", supported=True, detail=""),),
        environment={},
        config={"mode": "log", "verify_bytes_at_tail": False, "event_log": path},
        cost=None,
        covered=("reads of freed slots, two owners of a slot: on (track_lifetime)",),
        not_covered=("a model write that lands nowhere or in another slot, except through its victim",),
        warnings=(),
        problems=("something is " + "very " * 20 + "wrong",),
    )
    console, out = narrow_console()
    show_checkup(checkup, console)
    text = fits(out.getvalue())
    assert path in "".join(text.split())
    assert "verify_bytes_at_tail    False" in text


def test_the_demo_shows_every_fault_with_what_it_did_and_what_was_found() -> None:
    where = "all 6 pages of user13.turn1 name pages of user10.turn1"
    faults = [
        FaultResult(
            name=fault.name,
            model="gemma3",
            found=fault is not FAULTS[0],
            reasons=[Reason.WRITE_POSITION.name or ""],
            tag="SWEEP_FULL",
            steps_late=10,
            planted_step=117,
            where=where,
            slot=123456,
            report="step 7: a sentence",
        )
        for fault in FAULTS
    ]
    bits = RandomBits(
        model="gemma3",
        layers=32,
        flipped=340,
        sampled=120,
        found_by_sample=120,
        found_by_seals=340,
        gone=100,
        median_steps_to_seals=13.5,
        most_steps_to_seals=124,
        false_alarms=0,
    )
    clean = {"gemma3": Served(requests=32, forwards=9100, positions_verified=113357000, violations=0, reports=[])}
    result = DemoResult(
        engine="transformers 5.23.0",
        backend="reference",
        device="cuda:0",
        clean={"violations": 0, "forwards": 9100, "positions_verified": 113357000},
        faults=faults,
        random_bits=[bits],
    )
    console, out = narrow_console()
    show_demo(result, clean, console)
    text = fits(out.getvalue())
    for fault in FAULTS:
        assert any(line.split()[:1] == [fault.name] for line in text.splitlines())
    for word in ("NOT FOUND", "WRITE_POSITION", "SWEEP_FULL", "123456", "13.5 (to 124)", "113,357,000"):
        assert word in text
    assert text.count("user13.turn1") == len(FAULTS)


def test_the_cases_of_the_corpus_stay_in_one_piece() -> None:
    lines = fits(printed("difftest", "corpus", "list")).splitlines()
    assert [path.stem for path in entries() if path.stem not in lines] == []


@pytest.mark.parametrize(("width", "lines"), [(8, 4), (16, 2)])
def test_bytes_stand_in_lines_of_their_own(width: int, lines: int) -> None:
    expected, got = torch.zeros(32, dtype=torch.uint8), torch.ones(32, dtype=torch.uint8)
    out = io.StringIO()
    Console(file=out, width=WIDTH if width == 8 else 112).print(bytes_table("out", expected, got, width=width))
    rows = [line for line in out.getvalue().splitlines() if line.startswith("│")]
    assert [line.split()[1] for line in rows] == [f"{at:#x}" for at in range(0, 32, width)]
    assert len(rows) == lines
    assert all(line.count("00") == line.count("01") == width for line in rows)
