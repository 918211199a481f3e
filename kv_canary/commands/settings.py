"""`kv-canary settings`: every setting, what it does, what it is by default, and what it costs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shutil
import textwrap
import typing
from dataclasses import dataclass
from typing import Any, get_args

import click

# What a setting costs where it is turned on or up; the others cost nothing that a step would show.
COSTS = {
    "read_bytes": "bytes that HEAD reads of each position that it verifies, twice as many with V",
    "verify_bytes_at_tail": "what HEAD reads of bytes, once more",
    "records": "head_and_tail: 32 bytes a slot more, and what HEAD verifies again behind the model",
    "seals": "TAIL hashes all bytes of new tokens; words beside the records, below 0.3 % of the pool",
    "scrub_share": "that share of the time, on the device",
    "admission": "a read of the prefix of each request that comes",
    "completion": "a read of all that each request rested on when it has ended",
    "check_writes": "a copy of K and V a layer, in the model's own launches",
    "stride": "1: every position at every step; n: an n-th of that",
    "overhead_target": "that share of a step, on the device",
    "verify_capacity": "16 bytes an entry, 72 for rings",
    "check_tokens": "4 bytes a row and position; each step's tokens on the way",
    "check_inputs": "the host asks each request for its next token",
    "sweep_every": "a look at every record of the prefix cache, at each of these steps",
    "quarantine": "sweeps look at freed slots too",
    "digest_every": "a small exchange over Gloo, at each of these steps",
    "backend": "reference: as long as a model; triton on a CPU: many times that",
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting.

    Args:
        name: of the field.
        variable: in the environment.
        values: what it may be.
        default: as the environment would have it.
        doc: what it does.
        cost: what it costs; "" for nothing that a step would show.
    """

    name: str
    variable: str
    values: str
    default: str
    doc: str
    cost: str = ""


def settings_of(cls: type, prefix: str) -> list[Setting]:
    """Return the settings of a dataclass, whose docstring has a line for each under "Args:"."""
    hints, docs = typing.get_type_hints(cls), _docs(cls)
    return [
        Setting(
            name=field.name,
            variable=f"{prefix}{field.name.upper()}",
            values=_values(hints[field.name]),
            default="" if field.default is dataclasses.MISSING else _text(field.default),
            doc=docs[field.name],
            cost=COSTS.get(field.name, "") if prefix.count("_") == _DEPTH else "",
        )
        for field in dataclasses.fields(cls)
    ]


def all_settings() -> dict[str, list[Setting]]:
    """Return every setting, by what it is of."""
    from kv_canary.config import CanaryConfig
    from kv_canary.perturb_settings import PREFIX, PerturbConfig
    from kv_canary.settings import ENVIRONMENT
    from kv_canary.shadow_settings import ShadowSettings

    return {
        "The canary": settings_of(CanaryConfig, ENVIRONMENT),
        "The shadow backend": settings_of(ShadowSettings, f"{ENVIRONMENT}SHADOW_"),
        "Fault injection": settings_of(PerturbConfig, PREFIX),
    }


def page() -> str:
    """Return docs/settings.md."""
    parts = [
        "# Settings\n\nMade by `kv-canary settings --markdown`. Each is a variable of the environment, a field of "
        "`kv_canary.CanaryConfig`, and an option of\n`kv_canary.install`; a variable that names no setting is refused. "
        "What to turn on where: [operating](operating.md).\n"
    ]
    for title, settings in all_settings().items():
        parts.append(f"## {title}\n")
        for setting in settings:
            default = f", by default `{setting.default}`" if setting.default else ""
            parts.append(f"### `{setting.variable}`\n\n{_sentence(setting.values)}{default}. {_sentence(setting.doc)}")
            parts[-1] += f" Cost: {setting.cost}.\n" if setting.cost else "\n"
    return "\n".join(parts)


@click.command()
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="Print the whole page, as it stands in docs/settings.md.")
@click.option("--json", "as_json", is_flag=True, help="Print them for a machine.")
def settings(name: str | None, markdown: bool, as_json: bool) -> None:
    """Show the settings: what each does, what it is by default, and what it costs.

    NAME is a setting, or a part of one: as it stands in the environment, or without KV_CANARY_.

    \b
    Examples:
      kv-canary settings
      kv-canary settings stride
      kv-canary settings --json
    """
    known = all_settings()
    if as_json:
        click.echo(json.dumps({title: [dataclasses.asdict(s) for s in of] for title, of in known.items()}, indent=2))
        return
    if markdown:
        click.echo(page(), nl=False)
        return
    wanted = (name or "").upper()
    found = [s for of in known.values() for s in of if wanted in s.variable]
    if not found:
        from kv_canary.errors import must_be

        raise click.UsageError(must_be("settings", "NAME", "a setting, or a part of one", repr(name)))
    # As wide as the terminal, and no wider than can be read; nothing that may be set is broken.
    width = min(shutil.get_terminal_size().columns, 100)
    lines = textwrap.TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    for setting in found:
        click.echo(lines.fill(f"{setting.variable}={setting.default}    ({setting.values})"))
        if name is not None:
            text = _sentence(setting.doc) + (f" Cost: {setting.cost}." if setting.cost else "")
            click.echo(lines.fill(f"    {text}"))


# Underscores in the prefix of the canary's own settings; and types in words.
_DEPTH = 2
_WORDS = {"int": "a whole number", "float": "a number", "str": "a text", "Path": "a path"}


def _docs(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of each of its arguments."""
    arguments = re.split(r"\n\n *Raises:", inspect.cleandoc(cls.__doc__ or "").partition("Args:\n")[2])[0]
    # What goes on stands further in.
    entries = re.split(r"\n(?=    \w)", arguments)
    docs = {}
    for entry in entries:
        names, _, said = entry.strip().partition(": ")
        for name in names.split(", "):
            docs[name] = " ".join(said.split())
    return docs


def _values(hint: Any) -> str:
    """Return what a setting may be, in words."""
    from kv_canary.settings import kinds_of

    words = []
    for kind in kinds_of(hint):
        if get_args(kind):
            words += [f"`{value}`" for value in get_args(kind) if value != ""]
        elif kind is bool:
            words.append("`1` or `0`")
        elif kind is type(None):
            words.append("`none`")
        else:
            words.append(_WORDS[kind.__name__])
    return " or ".join(words)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return "none" if value is None else str(value)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
