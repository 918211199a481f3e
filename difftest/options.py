"""The options that the commands of difftest and of its campaigns share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kv_canary.commands.paths import OUT_FILE
from kv_canary.constants import BACKENDS

Option = Callable[[Any], Any]

DEVICES = click.Choice(["cpu", "cuda"])
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

backend_option = click.option(
    "--backend", type=click.Choice(BACKENDS), default="auto", show_default=True, help="The canary's."
)


def device_option(help: str = "Where to run.") -> Option:
    """The device, `device`."""
    return click.option("--device", type=DEVICES, default="cpu", show_default=True, help=help)


def jobs_option(help: str = "Processes that live.", *, default: int | None = 1) -> Option:
    """How many processes there are at a time, `jobs`; without a default, as many as there are cores."""
    number, shown = (os.cpu_count() or 1, "cores") if default is None else (default, True)
    return click.option("--jobs", type=click.IntRange(1), default=number, show_default=shown, help=help)


def seed_option(help: str, *, default: int = 0) -> Option:
    """The seed of whatever is drawn, `seed`."""
    return click.option("--seed", type=int, default=default, show_default=True, help=help)


def number_option(help: str = "Of the first life.") -> Option:
    """The seed of the first of many, from which the others count on: `number`."""
    return click.option("--seed", "number", type=click.IntRange(0), default=0, show_default=True, help=help)


def json_option(help: str = "Write the facts here too.") -> Option:
    """The file that facts are written to, `json_path`."""
    return click.option("--json", "json_path", type=OUT_FILE, help=help)


def commit_option(*, default: str | None = None) -> Option:
    """The commit that facts are of, `commit`; without a default, None stands for what git says."""
    says = " [default: what git says]" if default is None else ""
    return click.option("--commit", default=default, help=f"The commit under test, for --json.{says}")
