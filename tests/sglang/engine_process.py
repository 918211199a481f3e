"""An SGLang Engine in processes of its own: `run_engine` starts this file, which serves what a job asks for.

The Engine is what users start: a scheduler process for each rank, with the overlapped schedule, fed by messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT = 420.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """Prompts that are sent at once.

    Args:
        prompts: token ids of each.
        new_tokens: to generate for each.
        abort: which of them to abort, by their index, once a few tokens have come.
        flush: empty the cache first.
        beams: the beam width of some of them, by their index.
    """

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    abort: Sequence[int] = ()
    flush: bool = False
    beams: Mapping[int, int] = field(default_factory=dict)

    def beam_width(self, index: int) -> int | None:
        """Return the beam width of a prompt; None: it is no beam search."""
        # JSON has made strings of the numbers.
        return {int(i): width for i, width in self.beams.items()}.get(index)


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What came of it.

    Args:
        outputs: of each round, of each prompt; those of aborted requests are whatever had come, those of beam searches
            the best beam's.
        beams: of each round, of each prompt: what all of its beams have generated, the best first; [] without beams.
        cached: how many tokens of each prompt were found in the cache.
        states: the internal states of the schedulers at the end.
        log: all that the processes wrote.
    """

    outputs: list[list[list[int]]]
    beams: list[list[list[list[int]]]]
    cached: list[list[int]]
    states: list[dict[str, Any]]
    log: str


def run_engine(model: str, rounds: Sequence[Round], *, env: Mapping[str, str] | None = None, **args: Any) -> EngineRun:
    """Start an Engine, send it one round after another, and end it.

    Args:
        model: a folder of `save_tiny_model`.
        rounds: what to send.
        env: environment variables of its processes, on top of this one's that say nothing of a canary.
        args: of SGLang's ServerArgs, on top of `engine.ARGS`.

    Raises:
        RuntimeError: the Engine did not come through; the text ends with its log.
    """
    from . import ports
    from .engine import ARGS

    clean = {name: text for name, text in os.environ.items() if not name.startswith(("KV_CANARY_", "SGLANG_ON_CPU"))}
    job = {
        "args": {"model_path": model, **ARGS, "nccl_port": ports.claim(), **args},
        "rounds": [asdict(r) for r in rounds],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        with (Path(folder) / "log").open("w") as log:
            # -P: this folder is not a place to import from.
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, folder],
                cwd=folder,
                env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # The schedulers are in its process group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = (Path(folder) / "log").read_text()
        result = Path(folder) / "result.json"
        if not result.exists():
            what = f"did not end in {TIMEOUT:.0f} s" if code is None else f"ended with {code}"
            raise RuntimeError(f"the engine {what}; its log ends with:\n{text[-6000:]}")
        return EngineRun(log=text, **json.loads(result.read_text()))


def main(folder: Path) -> None:
    """Serve `job.json` of a folder, and leave `result.json` there."""
    import sglang

    job = json.loads((folder / "job.json").read_text())
    engine = sglang.Engine(**job["args"])
    try:
        outputs, beams, cached = [], [], []
        for number, one in enumerate(job["rounds"]):
            if one["flush"]:
                engine.flush_cache()
            answers = engine.loop.run_until_complete(_serve(engine, number, Round(**one)))
            outputs.append([answer["output_ids"] for answer in answers])
            beams.append([[b["output_ids"] for b in a["meta_info"].get("beam_results", ())] for a in answers])
            cached.append([answer["meta_info"]["cached_tokens"] for answer in answers])
        states = engine.get_server_info()["internal_states"]
        result = json.dumps({"outputs": outputs, "beams": beams, "cached": cached, "states": states}, default=str)
        (folder / "result.json").write_text(result)
    finally:
        engine.shutdown()


async def _serve(engine: Any, number: int, one: Round) -> list[dict[str, Any]]:
    async def ask(index: int) -> dict[str, Any]:
        rid = f"round {number} prompt {index}"
        sampling = {"temperature": 0, "max_new_tokens": one.new_tokens, "ignore_eos": True}
        if width := one.beam_width(index):
            sampling |= {"beam_width": width, "n": width}
        answers = await engine.async_generate(
            input_ids=list(one.prompts[index]), sampling_params=sampling, stream=True, rid=rid
        )
        answer: dict[str, Any] = {}
        async for answer in answers:
            if index in one.abort and len(answer["output_ids"]) >= 3:
                engine.tokenizer_manager.abort_request(rid)
        return answer

    return await asyncio.gather(*(ask(index) for index in range(len(one.prompts))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
