"""A group of commands that are imported when they are asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import click


class LazyGroup(click.Group):
    """A group whose commands stand in other modules.

    Args:
        elsewhere: `module:name` of the command, by what it is called here. Those whose module is not installed are not
            listed: campaigns and mutants come with a checkout alone.
    """

    def __init__(self, *args: Any, elsewhere: Mapping[str, str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._elsewhere = elsewhere

    def list_commands(self, ctx: click.Context) -> list[str]:
        there = [name for name, place in self._elsewhere.items() if _is_installed(place.partition(":")[0])]
        return sorted([*super().list_commands(ctx), *there])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._elsewhere:
            return super().get_command(ctx, cmd_name)
        module, _, name = self._elsewhere[cmd_name].partition(":")
        if not _is_installed(module):
            raise click.UsageError(f"{cmd_name} needs a checkout of kv-canary: an installed package does not hold it")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
