"""Lives of a real SGLang with one fault each, before one canary or another: how it is turned on, and what it says."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kv_canary.config import CanaryConfig
from kv_canary.difftest.stress import causes
from kv_canary.difftest.stress.processes import in_fork
from kv_canary.difftest.stress.sglang.engine import BYTES_PER_TOKEN, build_scheduler
from kv_canary.difftest.stress.sglang.faults import FAULTS, HEALTHY, Fault, live

# Steps between two sweeps, of every canary.
SWEEP_EVERY = 10
# Slots of the engine's pool: so few that a long newcomer takes all that are free.
POOL = 768
# Seconds that a life may take.
PATIENCE = 120


@dataclass(frozen=True, kw_only=True)
class Column:
    """One way to turn a canary on.

    Args:
        name: of the column.
        doc: what is turned on, in words.
        environment: variables that are set before the engine is built.
        arguments: of SGLang's `ServerArgs`.
        read_bytes: of kv-canary's fingerprints; None: another canary, or none.
        sealed: whether it keeps seals, which are scrubbed after every `SWEEP_EVERY` steps.
    """

    name: str
    doc: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    read_bytes: int | None = None
    sealed: bool = False

    @property
    def builtin(self) -> bool:
        """Whether it is SGLang's own canary."""
        return "kv_canary" in self.arguments


# SGLang's canary has one Triton kernel that runs everywhere; on a CPU the interpreter runs it.
_ON_CPU = {"TRITON_INTERPRET": "1", "SGLANG_ON_CPU": "builtin_canary"}
_OURS = {"KV_CANARY_MODE": "log", "KV_CANARY_SWEEP_EVERY": str(SWEEP_EVERY)}
_BUILTIN = {"kv_canary": "raise", "kv_canary_sweep_interval": SWEEP_EVERY}

NONE = Column(name="none", doc="no canary")
COLUMNS = (
    Column(
        name="ours",
        doc="kv-canary as it comes: `KV_CANARY_MODE=log`",
        environment=_OURS,
        read_bytes=CanaryConfig().read_bytes,
    ),
    Column(
        name="ours_whole_rows",
        doc=f"the same with `KV_CANARY_READ_BYTES={BYTES_PER_TOKEN}`, all bytes of a layer",
        environment={**_OURS, "KV_CANARY_READ_BYTES": str(BYTES_PER_TOKEN)},
        read_bytes=BYTES_PER_TOKEN,
    ),
    Column(
        name="ours_sealed",
        doc=f"the same with `KV_CANARY_SEALS=layer`, and a scrub of all slots every {SWEEP_EVERY} steps",
        environment={**_OURS, "KV_CANARY_SEALS": "layer"},
        read_bytes=CanaryConfig().read_bytes,
        sealed=True,
    ),
    Column(
        name="builtin",
        doc="`--kv-canary raise --kv-canary-real-data partial`",
        environment=_ON_CPU,
        arguments={**_BUILTIN, "kv_canary_real_data": "partial"},
    ),
    Column(
        name="builtin_everything",
        doc="`--kv-canary raise --kv-canary-real-data all`, `SGLANG_KV_CANARY_ENABLE_MHA_V=1`, "
        "`SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT=1`",
        # Its write assertions are left out: they want a token oracle, which takes the place of sampling.
        environment={
            **_ON_CPU,
            "SGLANG_KV_CANARY_ENABLE_MHA_V": "1",
            "SGLANG_KV_CANARY_ENABLE_VERIFY_TOKEN_ASSERT": "1",
        },
        arguments={**_BUILTIN, "kv_canary_real_data": "all"},
    ),
)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The outcome of one life before one canary.

    Args:
        outputs: the tokens that each request generated.
        where, position, byte, layer: what the fault did.
        report: the first report, in words; empty if there was none.
        reasons: of the first report, in its canary's words.
        cause: that kv-canary's first incident tells.
        steps_late: steps from the first that ran with the fault to the one in which the report came.
        error: what else ended the life.
    """

    outputs: dict[str, list[int]]
    where: str = ""
    position: int | None = None
    byte: int | None = None
    layer: int | None = None
    report: str = ""
    reasons: str = ""
    cause: str = ""
    steps_late: int | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One life to be lived."""

    fault: str
    seed: int


def run(column: Column, page_size: int, tasks: Sequence[Task], *, model: Path) -> Iterator[tuple[Task, Seen]]:
    """Live the lives of one column, each in a fork of one process that has built an engine.

    Raises:
        RuntimeError: the engine could not be built, or its process ended.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = context.Process(target=_serve, args=(column, page_size, tasks, model, Path(log.name), theirs))
        process.start()
        theirs.close()
        try:
            for task in tasks:
                seen = mine.recv()
                if isinstance(seen, str):
                    raise RuntimeError(f"{column.name}: {seen}")
                yield task, seen
        except EOFError as error:
            tail = Path(log.name).read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{column.name}: the engine's process has ended; it said:\n{tail}") from error
        finally:
            process.kill()
            process.join()


def _serve(column: Column, page_size: int, tasks: Sequence[Task], model: Path, log: Path, results: Connection) -> None:
    """Build the engine and live the lives, in a process of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("KV_CANARY_", "SGLANG_KV_CANARY_"))}
    os.environ.clear()
    os.environ.update({**clean, **column.environment})
    # A fork has one thread only.
    torch.set_num_threads(1)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faults = {f.name: f for f in (*HEALTHY.values(), *FAULTS)}
    try:
        scheduler = build_scheduler(model, page_size=page_size, max_total_tokens=POOL, **column.arguments)
        for task in tasks:
            live = functools.partial(_live, column, scheduler, faults[task.fault], task)
            results.send(Seen(**{"outputs": {}, **in_fork(live, patience=PATIENCE)}))
    except Exception:
        results.send(traceback.format_exc())
    results.close()
    # The engine's threads and sockets wait for nobody.
    os._exit(0)


def _live(column: Column, scheduler: Any, fault: Fault, task: Task) -> dict[str, Any]:
    """Live one life, and return what was `Seen`; look after every step whether kv-canary has reported something."""
    manager, session = None, None
    if column.read_bytes is not None:
        from kv_canary.engines.sglang.session import current

        session = current()
        manager = session.manager
    reported_at: list[int] = []

    def see(step: int) -> None:
        if column.sealed and manager is not None and step % SWEEP_EVERY == SWEEP_EVERY - 1:
            manager.scrub()
        if manager is not None and manager.reports and not reported_at:
            reported_at.append(step)

    life = live(fault, scheduler, seed=task.seed, see=see)
    error, report, reasons, cause = life.ended, "", "", ""
    if column.builtin and _IS_BUILTIN in life.ended:
        # The step that raised is not counted.
        error, reported_at = "", [life.steps]
        report = life.ended[life.ended.index(_IS_BUILTIN) :].splitlines()[0]
        said = dict(part.split("=", 1) for part in report.split() if "=" in part)
        reasons = f"{said['fail_reason']} in {said['launch_tag']}"
    if manager is not None and session is not None:
        manager.flush()
        see(life.steps)
        if session.off:
            error = f"the canary turned itself off: {session.off}"
        if manager.reports:
            first = manager.reports[0]
            report, reasons = first.sentence, " + ".join(first.reasons) + " in " + first.tag
            cause = causes.first_cause(manager)
    seen = Seen(
        outputs=life.outputs,
        where=life.act.where if life.act else "",
        position=life.act.position if life.act else None,
        byte=life.act.byte if life.act else None,
        layer=life.act.layer if life.act else None,
        report=report,
        reasons=reasons,
        cause=cause,
        steps_late=reported_at[0] - life.acted_at if report else None,
        error=error,
    )
    return dataclasses.asdict(seen)


# What its exception says first.
_IS_BUILTIN = "kv_canary violation:"
