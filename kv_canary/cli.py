"""The command line. Exit codes: 0 clean, 1 something was found, 2 misuse."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import click

from kv_canary import __version__
from kv_canary.commands.group import LazyGroup
from kv_canary.commands.paths import OUT_FILE
from kv_canary.constants import BACKENDS
from kv_canary.extras import install_command

_ELSEWHERE = {
    "bench": "kv_canary.bench.cli:bench",
    "difftest": "kv_canary.difftest.cli:difftest",
    "doctor": "kv_canary.commands.doctor:doctor",
    "evidence": "kv_canary.commands.evidence_pages:evidence",
    "report": "kv_canary.commands.report:report",
    "run": "kv_canary.commands.run:run",
    "settings": "kv_canary.commands.settings:settings",
    "stress": "kv_canary.difftest.stress.cli:stress",
}


class LogLines(logging.Formatter):
    """Log lines that name their logger, unless they begin with the name of the program, as kv-canary's own do."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        line = super().format(record)
        is_named = line.startswith("kv-canary: ")
        return f"{record.levelname} {line}" if is_named else f"{record.levelname} {record.name}: {line}"


@click.group(cls=LazyGroup, elsewhere=_ELSEWHERE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kv-canary")
@click.option("-v", "--verbose", is_flag=True, help="Log what the canary does.")
def main(verbose: bool) -> None:
    """A canary for LLM inference engines.

    kv-canary keeps a 32-byte record beside every KV slot and verifies the records around every forward, so that a
    request that reads another one's KV is seen at the forward in which it happens.

    Start with `kv-canary demo`; who writes kernels starts with `kv-canary difftest`.
    Exit codes: 0 clean, 1 something was found, 2 misuse.

    \b
    Completion in bash (zsh and fish: docs/README.md):
      eval "$(_KV_CANARY_COMPLETE=bash_source kv-canary)"
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines())
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[handler])


@main.command()
@click.option(
    "--backend",
    type=click.Choice(BACKENDS),
    default="auto",
    show_default=True,
    help="Who verifies: the PyTorch reference, or Triton (on a CPU: in its interpreter, slowly).",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where to run.")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A text file to cut the prompts from instead of Python's own documentation; may be repeated.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay the lengths (and shared prefix blocks) of a Mooncake .jsonl or an Azure .csv trace.",
)
@click.option(
    "--trace-scale", type=click.IntRange(1, 512), default=64, show_default=True, help="Divide its lengths by."
)
@click.option("--requests", type=click.IntRange(2), help="Conversations to serve. [default: 16, interpreted: 3]")
@click.option("--turns", type=click.IntRange(1), help="Turns of each. [default: 2, interpreted: 1]")
@click.option("--new-tokens", type=click.IntRange(2), help="Tokens per answer. [default: 24, interpreted: 20]")
@click.option(
    "--read-bytes", type=click.IntRange(1), default=16, show_default=True, help="Bytes fingerprinted a token."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the models and of what is damaged.")
@click.option("--json", "json_path", type=OUT_FILE, help="Write the facts here too.")
def demo(
    backend: str,
    device: str,
    prompts: tuple[Path, ...],
    trace: Path | None,
    trace_scale: int,
    requests: int | None,
    turns: int | None,
    new_tokens: int | None,
    read_bytes: int,
    seed: int,
    json_path: Path | None,
) -> None:
    """Serve real text on a real engine with the canary on; then plant faults and see each one found.

    Two tiny, randomly initialised models (Llama with prefix sharing; Gemma3 with full and sliding layers) run in
    transformers' continuous batching. First healthy: the canary must stay silent. Then one run per planted fault:
    each must be found at the next verification, at the right slot. Then bits flip in any byte of any layer, of the
    Llama and of one with 32 layers: the table says how many the sample showed, and how many the seals of
    KV_CANARY_SEALS=layer; not where Triton is interpreted, which would take too long. Exit code 0 only if all was found
    that could be.

    \b
    Examples:
      kv-canary demo
      kv-canary demo --prompts my.txt --json facts.json
      kv-canary demo --trace conversation_trace.jsonl --requests 24
      kv-canary demo --device cuda --backend triton
    """
    interpreted = backend == "triton" and device == "cpu"
    if interpreted:
        # Triton decides when a kernel is decorated: this comes before any is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import torch
        from rich.console import Console

        from kv_canary.config import CanaryConfig
        from kv_canary.demo import traffic
        from kv_canary.demo.run import DEPTHS, run_demo
    except ModuleNotFoundError as error:
        raise click.UsageError(f"the demo needs transformers: {install_command('transformers')} ({error})") from error
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda must be on a machine with a CUDA GPU, got one without")
    count, turns, new_tokens = (
        requests or (3 if interpreted else 16),
        turns or (1 if interpreted else 2),
        new_tokens or (20 if interpreted else 24),
    )
    text = traffic.read_files(prompts) if prompts else traffic.python_text()
    try:
        if trace is not None:
            talks = traffic.trace_conversations(trace, text, count=count, scale=trace_scale, longest=400)
        else:
            talks = traffic.conversations(text, count=count, turns=turns, new_tokens=new_tokens, longest=96)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    config = CanaryConfig(backend=backend, read_bytes=read_bytes)
    depths = () if interpreted else DEPTHS
    result = run_demo(talks, config=config, device=device, seed=seed, console=Console(), depths=depths)
    if json_path is not None:
        from kv_canary.commands.facts import facts

        content = {**result.as_dict(), **facts(device, kind="demo")}
        json_path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if result.passed else 1)


@main.command()
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="Print the whole page, as it stands in docs/ops.md.")
@click.option("--json", "as_json", is_flag=True, help="Print names and arguments for a machine.")
def ops(name: str | None, markdown: bool, as_json: bool) -> None:
    """Show the ops: what each takes, writes and means.

    \b
    Examples:
      kv-canary ops
      kv-canary ops verify
    """
    from rich.console import Console
    from rich.markdown import Markdown

    from kv_canary.specs import all_specs, get_spec
    from kv_canary.specs.document import op_section, ops_page

    if as_json:
        click.echo(json.dumps({n: list(s.arguments) for n, s in all_specs().items()}, indent=2))
    elif markdown:
        click.echo(ops_page(), nl=False)
    elif name is None:
        lines = click.HelpFormatter(width=shutil.get_terminal_size().columns)
        lines.write_dl([(spec.name, " ".join(spec.doc.split("\n\n")[0].split())) for spec in all_specs().values()])
        click.echo(lines.getvalue(), nl=False)
    else:
        try:
            section = op_section(get_spec(name))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        Console().print(Markdown(section))
