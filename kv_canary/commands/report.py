"""`kv-canary report`: a saved incident, for people, for machines, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kv_canary.commands.paths import OUT_FILE


@click.command()
@click.argument("bundle", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the bundle for a machine.")
@click.option(
    "--html",
    "html_path",
    metavar="OUT.html",
    type=OUT_FILE,
    help="Draw the slot timeline into this file: one page that needs no network.",
)
def report(bundle: Path, as_json: bool, html_path: Path | None) -> None:
    """Show an incident that the canary saved.

    A canary with `KV_CANARY_BUNDLES=FOLDER` (or `CanaryConfig(bundles=...)`) saves every new incident there: what was
    found, who wrote the slots around it and when, and the likely cause. docs/reading-a-report.md explains every word.

    Exit codes: 1 the bundle was shown (something was found), 2 the file is no bundle.

    \b
    Examples:
      kv-canary report bundles/incident-4711-5ba1c0de-0001.json
      kv-canary report bundles/incident-4711-5ba1c0de-0001.json \\
        --html incident.html
      kv-canary report bundles/incident-4711-5ba1c0de-0001.json --json \\
        | jq .incident.cause
    """
    from rich.console import Console

    from kv_canary.reports.bundle import read_bundle
    from kv_canary.reports.picture import page
    from kv_canary.reports.text import show

    try:
        saved = read_bundle(bundle)
        if html_path is not None:
            html_path.write_text(page(saved), encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        click.echo(json.dumps(saved.as_dict(), indent=2))
    else:
        show(saved, Console())
        if html_path is not None:
            click.echo(f"Drawn: {html_path}")
    raise SystemExit(1)
