"""`kv-canary doctor`: what works here, what is configured, and what is seen."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from kv_canary.constants import BACKENDS
from kv_canary.settings import ENVIRONMENT

if TYPE_CHECKING:
    from rich.console import Console

    from kv_canary.commands.checkup import Checkup
    from kv_canary.runtime.cost import CanaryCost


@click.command()
@click.option("--backend", type=click.Choice(BACKENDS), help="A backend that must work here. [default: as configured]")
@click.option(
    "--engine",
    "engines",
    type=click.Choice(["transformers", "sglang", "vllm"]),
    multiple=True,
    help="An engine that must be installed and supported; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print it for a machine.")
def doctor(backend: str | None, engines: tuple[str, ...], as_json: bool) -> None:
    """Look at this machine: versions, backends, devices, engines, configuration, coverage.

    Every backend is tried with a real, tiny plan, write and verify, healthy and with a flipped bit; Triton in processes
    of its own. The configuration is what the KV_CANARY_... variables of this environment say; every error in it is
    told. What it names is tried: the event log, the folder of bundles, the port of metrics. Nothing is left behind.

    Exit codes: 0 all is well, 1 something that was asked for (by an option or by the environment) is missing or wrong,
    2 misuse.

    \b
    Examples:
      kv-canary doctor
      kv-canary doctor --backend triton --engine transformers
      KV_CANARY_BUNDLES=/var/log/canary kv-canary doctor --json
    """
    from rich.console import Console

    from kv_canary.commands.checkup import check_up

    found = check_up(backend=backend, engines=engines)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        _show(found, Console())
    raise SystemExit(1 if found.problems else 0)


def _show(found: Checkup, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    from kv_canary.commands.trial import CACHED, REQUESTS

    def section(title: str, rows: list[tuple[str, str, str]]) -> None:
        console.print(Text(title, style="italic"))
        table = Table(show_header=False, box=None, padding=(0, 2))
        for column in ("mark", "name", "words"):
            # Nothing is cut off: a path may be longer than its column.
            table.add_column(column, overflow="fold", no_wrap=column == "mark")
        for mark, name, words in rows:
            style = {"yes": "green", "no": "red"}.get(mark, "dim")
            table.add_row(Text(mark, style=style), Text(name), Text(words))
        console.print(table)
        console.print()

    section("Versions", [("", name, version or "not installed") for name, version in found.versions.items()])
    section("Devices", [("", *name.split(": ", 1)) for name in found.devices])  # type: ignore[misc]
    section("Backends", [("yes" if b.works else "no", f"{b.name} on {b.device}", b.detail) for b in found.backends])
    section(
        "Engines",
        [
            ("yes" if e.supported else "no" if e.version else "", f"{e.name} {e.version or ''}".strip(), e.detail)
            for e in found.engines
        ],
    )
    given = {name.removeprefix(ENVIRONMENT).lower() for name in found.environment}
    section(
        "Configuration",
        [("*" if name in given else "", name, str(value)) for name, value in (found.config or {}).items()],
    )
    if given:
        console.print(Text("* from the environment\n", style="dim"))
    section(
        f"A decode step of {REQUESTS} requests with {CACHED} cached tokens each, without an engine", _cost(found.cost)
    )
    section("Covered", [("", line.split(": ", 1)[0], line.split(": ", 1)[1]) for line in found.covered])
    section("Not visible to any slot checker", [("", "", line) for line in found.not_covered])
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    for problem in found.problems:
        console.print(Text(f"problem: {problem}", style="bold red"))
    if not found.problems:
        console.print(Text("All that was asked for is here.", style="bold green"))


def _cost(cost: CanaryCost | None) -> list[tuple[str, str, str]]:
    from kv_canary.commands.trial import CACHED, REQUESTS

    if cost is None:
        return [("", "", "could not be measured")]
    of = f"us, {REQUESTS} requests of {CACHED} tokens"
    rows = [("", "the host's time", f"{cost.host_us:,.0f} {of}")]
    if cost.device_us is not None:
        rows.append(("", "the device's time", f"{cost.device_us:,.0f} {of}"))
    return rows
