"""`kv-canary run`: a program that serves, watched, and the verdict at its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from kv_canary.commands.paths import OUT_FILE
from kv_canary.settings import ENVIRONMENT

if TYPE_CHECKING:
    from kv_canary.runtime.summary import CanarySummary

MODE, EVENT_LOG = f"{ENVIRONMENT}MODE", f"{ENVIRONMENT}EVENT_LOG"
# What a shell says of a program that a signal has ended: this and the signal's number.
_BY_SIGNAL = 128
# Incidents that are printed; the event log has the others.
_MOST_SHOWN = 8
# What the last events of canaries have that adds up.
_SUMS = ("step", "skipped", "positions_relied_on", "positions_verified")
_FOUND = ("violations", "incidents")
_NOBODY = (
    "no canary was at work. SGLang and vLLM find kv-canary where it is installed beside them; transformers: call "
    "kv_canary.install(model); an engine with a pool of its own: CanaryConfig.from_env()"
)

_NO_STEP = (
    "a canary was there, and no step ran before it: see the program's own log for what the engine, or the canary, said"
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a program.

    Args:
        exit_code: of the program.
        canaries: that began in its processes.
        unfinished: those of them that did not end: what their last steps found may be missing.
        summary: of all of them together.
        incidents: sentences, the first ones.
    """

    exit_code: int
    canaries: int
    unfinished: int
    summary: CanarySummary
    incidents: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code that tells it: 1 found, 2 nothing was watched, else the program's own."""
        if not self.summary.is_clean:
            return 1
        return self.exit_code or (0 if self.watched else 2)

    @property
    def watched(self) -> bool:
        """Whether a canary has seen a step; of one that was killed, its events say so."""
        return self.summary.steps > 0

    def __str__(self) -> str:
        lines = [f"kv-canary: verdict: {self.summary}"]
        lines += [f"kv-canary:   {sentence}" for sentence in self.incidents[:_MOST_SHOWN]]
        if self.summary.incidents > _MOST_SHOWN:
            lines.append(f"kv-canary:   and {self.summary.incidents - _MOST_SHOWN} incidents more")
        if not self.canaries:
            lines.append(f"kv-canary: {_NOBODY}")
        elif not self.watched:
            lines.append(f"kv-canary: {_NO_STEP}")
        if self.unfinished:
            lines.append(
                f"kv-canary: {self.unfinished} of {self.canaries} canaries did not come to an end: what their last "
                "steps found may be missing"
            )
        if self.exit_code:
            lines.append(f"kv-canary: the program itself ended with exit code {self.exit_code}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {**asdict(self), "summary": self.summary.as_dict(), "code": self.code}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--mode", type=click.Choice(["log", "raise"]), help="log goes on; raise ends the step. [default: log]")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="A setting, as stride=1; repeatable.")
@click.option("--event-log", type=OUT_FILE, help="Keep the events here. [default: nowhere]")
@click.option("--json", "json_path", type=OUT_FILE, help="Write the verdict here too.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    mode: str | None,
    settings: tuple[str, ...],
    event_log: Path | None,
    json_path: Path | None,
    program: tuple[str, ...],
) -> None:
    """Run a program that serves with the canary on, and end with the verdict.

    SGLang's and vLLM's processes install the canary themselves where KV_CANARY_MODE is set, as it is here; a program
    that calls kv_canary.install, or makes a CanaryManager of CanaryConfig.from_env(), takes its settings from there.
    What their canaries found is collected over all processes and said at the end, on stderr.

    \b
    Exit codes:
      0    the program ended well, and nothing was found
      1    something was found
      2    misuse; or the program ended well, and no canary saw a step
      else the program's own

    \b
    Examples:
      kv-canary run -- python serve.py
      kv-canary run -- vllm serve Qwen/Qwen3-8B
      kv-canary run --mode raise --set stride=1 --json verdict.json -- \\
        pytest tests/serving
    """
    environment = {**os.environ, **environment_of(settings)}
    if mode is not None or environment.get(MODE, "off").lower() in ("", "0", "off", "none"):
        environment[MODE] = mode or "log"
    with tempfile.TemporaryDirectory(prefix="kv-canary-run-") as folder:
        path = event_log or Path(environment.get(EVENT_LOG) or Path(folder, "events.jsonl"))
        environment[EVENT_LOG] = str(path.absolute())
        try:
            from kv_canary.config import CanaryConfig

            CanaryConfig.from_env(environment)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        began = datetime.now(UTC)
        exit_code = _watch(program, environment)
        verdict = verdict_of(events(path, since=began), exit_code=exit_code)
    click.echo(str(verdict), err=True)
    if json_path is not None:
        json_path.write_text(json.dumps(verdict.as_dict(), indent=2) + "\n", encoding="utf-8")
    raise SystemExit(verdict.code)


def environment_of(settings: Iterable[str]) -> dict[str, str]:
    """Return the variables that settings of the form NAME=VALUE stand for.

    Raises:
        click.UsageError: one has another form.
    """
    found = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not (name and equals):
            raise click.UsageError(f"--set: must be NAME=VALUE, as stride=1, got {setting!r}")
        name = name.upper()
        found[name if name.startswith(ENVIRONMENT) else f"{ENVIRONMENT}{name}"] = value
    return found


def events(path: Path, *, since: datetime) -> Iterator[dict[str, Any]]:
    """Yield the events of an event log since then, in order, those of the older file first; none where it is not there.

    Lines that are none, of a process that was killed while it wrote, are left out.
    """
    for file in (Path(f"{path}.1"), path):
        if not file.exists():
            continue
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                    # Times are cut off to milliseconds.
                    is_new = datetime.fromisoformat(event["time"]) >= since - timedelta(milliseconds=1)
                except (ValueError, KeyError, TypeError):
                    continue
                if is_new:
                    yield event


def verdict_of(told: Iterable[Mapping[str, Any]], *, exit_code: int) -> Verdict:
    """Return what the events of all canaries of a program come to.

    A canary that was killed has said what it found up to then; of how much it was watching nothing is known.
    """
    # Not imported earlier: whoever asks for help need not wait for torch.
    from kv_canary.runtime.summary import MOST_NAMES, CanarySummary, Watching

    begun = ended = 0
    watching = Watching.OFF
    # Of those that have ended; and, by process, what is found: at their ends, and while they ran.
    ends = Counter[str]()
    at_end, told_of = Counter[tuple[int, str]](), Counter[tuple[int, str]]()
    # By process: steps that those have seen at least which have not ended.
    seen = dict[int, int]()
    held = set[str]()
    incidents = list[str]()
    requests: dict[str, None] = {}
    for event in told:
        kind = event["event"]
        if kind == "start":
            begun += 1
        elif kind == "incident":
            told_of[event["pid"], "incidents"] += 1 + event["held_back"]
            incidents.append(event["sentence"])
            requests |= dict.fromkeys(event["requests"])
        elif kind == "report":
            told_of[event["pid"], "violations"] += 1 + event["held_back"]
        elif kind == "watching":
            watching = max(watching, Watching(event["watching"]), key=list(Watching).index)
            seen[event["pid"]] = event["step"]
        elif kind == "stop" and "watching" in event:
            ended += 1
            seen.pop(event["pid"], None)
            ends.update({name: event[name] for name in _SUMS})
            at_end.update({(event["pid"], name): event[name] for name in _FOUND})
            requests |= dict.fromkeys(event["requests"])
            watching = max(watching, Watching(event["watching"]), key=list(Watching).index)
            held |= {event.get("bytes_held", "")} - {""}
        elif kind == "stop":
            ended += 1
    # What a canary told of is in its sum too; of one that was killed there is no sum.
    found = at_end | told_of
    summary = CanarySummary(
        watching=watching,
        steps=ends["step"] + sum(seen.values()),
        positions_relied_on=ends["positions_relied_on"],
        positions_verified=ends["positions_verified"],
        # As `CanarySummary` adds up.
        bytes_held=min(held, default=""),
        violations=sum(count for (_, what), count in found.items() if what == "violations"),
        incidents=sum(count for (_, what), count in found.items() if what == "incidents"),
        requests=tuple(requests)[:MOST_NAMES],
        skipped=ends["skipped"],
    )
    return Verdict(
        exit_code=exit_code, canaries=begun, unfinished=max(begun - ended, 0), summary=summary, incidents=incidents
    )


def _watch(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a program to its end, hand it the signals that come meanwhile, and return its exit code as a shell has it.

    Raises:
        click.UsageError: it cannot be run.
    """
    try:
        child = subprocess.Popen(program, env=dict(environment))
    except OSError as error:
        raise click.UsageError(f"{program[0]} cannot be run: {error.strerror}") from error
    with _handing_on(child):
        code = child.wait()
    return code if code >= 0 else _BY_SIGNAL - code


@contextmanager
def _handing_on(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand signals on to a program inside the block; one by the keyboard reaches it by itself."""

    def hand_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    handlers = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGHUP)}
    handlers[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
