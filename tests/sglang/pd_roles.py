"""Two SGLang schedulers, each in a process of its own: one prefills, the other decodes."""

from __future__ import annotations

import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_canary.difftest.stress.sglang import engine as sglang_engine

from . import engine, pd_transfer_engine, ports

HOST = "127.0.0.1"
# Seconds that a side waits for the other, which may yet have to build its scheduler.
_PATIENCE = 240


@dataclass(frozen=True, kw_only=True)
class Round:
    """Requests that are served together; the next round begins when they are done.

    Args:
        prompts: token ids of each, by name.
        new_tokens: to generate.
        fault: of the transfers; one of `pd_transfer_engine.FAULTS`.
        aborted: names of those that the decode side gives up as soon as it has handed them to the other side.
        adapters: give every request a cache key of another name on each side, as adapters have.
    """

    prompts: dict[str, list[int]]
    new_tokens: int = 8
    fault: str = ""
    aborted: Sequence[str] = ()
    adapters: bool = False


@dataclass(kw_only=True)
class Outcome:
    """What one side has to say about one round: outputs by request, what was reported, and how much was seen."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    retracted: int = 0

    def found(self, tag: str) -> dict[str | None, set[str]]:
        """Return the reasons under tags that start with `tag`, by request."""
        reasons: dict[str | None, set[str]] = {}
        for report in self.reports:
            if report["tag"].startswith(tag):
                reasons.setdefault(report["request_id"], set()).update(report["reasons"])
        return reasons


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A prefill and a decode scheduler, and what they are given to do.

    Args:
        model: a folder of `save_tiny_model`.
        rounds: one after the other.
        both, prefill, decode: of SGLang's ServerArgs.
        environ: variables of both sides.
        prefill_environ: variables of the prefill side besides.
        guarded: the sides that have a canary.
        retract_every: steps of the decode side after which it puts off what does not fit, as if nothing did; 0: never.
    """

    model: str
    rounds: Sequence[Round]
    both: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    prefill_environ: dict[str, str] = field(default_factory=dict)
    guarded: Sequence[str] = ("prefill", "decode")
    retract_every: int = 0


def play(scenes: dict[str, Scene]) -> dict[str, dict[str, list[Outcome]]]:
    """Play the scenes, each with schedulers of its own; return what each side says, by scene, side and round.

    Raises:
        RuntimeError: one of the processes failed; the text is its traceback.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    bootstrap_ports = {name: ports.claim() for name in scenes}
    processes = [
        context.Process(target=_play, args=(role, scenes, bootstrap_ports, answers), daemon=True)
        for role in ("prefill", "decode")
    ]
    results: dict[str, dict[str, list[Outcome]]] = {name: {} for name in scenes}
    try:
        with _importable():
            for process in processes:
                process.start()
        for _ in range(2 * len(scenes)):
            role, name, outcomes = _next(answers, processes)
            if isinstance(outcomes, str):
                raise RuntimeError(f"{role}, {name}: {outcomes}")
            results[name][role] = outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


@contextmanager
def _importable() -> Iterator[None]:
    """Let processes that are started find this module; they get this one's path."""
    # Last: the checkout has folders of names that are other packages', too.
    sys.path.append(str(Path(__file__).parents[2]))
    try:
        yield
    finally:
        sys.path.pop()


def _next(answers: Any, processes: Sequence[Any], *, patience: float = 300) -> Any:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=2)
        except queue.Empty:
            if not all(process.is_alive() for process in processes):
                raise RuntimeError("a role has died") from None
    raise RuntimeError("a role does not answer")


def _play(role: str, scenes: dict[str, Scene], bootstrap_ports: dict[str, int], answers: Any) -> None:
    for name, scene in scenes.items():
        mode = "log" if role in scene.guarded else "off"
        try:
            variables = {"SGLANG_ON_CPU": "pd,hybrid_swa", "KV_CANARY_BACKEND": "reference", **scene.environ}
            if role == "prefill":
                variables |= scene.prefill_environ
            with engine.overriding(KV_CANARY_MODE=mode, **variables):
                answers.put((role, name, _Role(role, scene, port=bootstrap_ports[name]).play(scene.rounds)))
        except BaseException:
            answers.put((role, name, traceback.format_exc()))
            break
    # The other side may still want to be told that all is sent; the parent ends both.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()


class _Role:
    """One of the two schedulers."""

    def __init__(self, role: str, scene: Scene, *, port: int) -> None:
        import torch

        torch.set_num_threads(1)
        os.environ.update({"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "100"})
        pd_transfer_engine.stand_in()
        self._role, self._port = role, port
        self._scheduler = self._build(scene.model, {**scene.both, **getattr(scene, role)})
        from sglang.srt.managers import scheduler

        scheduler.TEST_RETRACT = role == "decode" and scene.retract_every > 0
        scheduler.TEST_RETRACT_INTERVAL = scene.retract_every or 1
        if role == "prefill":
            pd_transfer_engine.TransferEngine.entries = self._entries()
        elif self._session():
            # So that the other side's number of a request is no one's here.
            self._session().owners._last = 1000
        self._rooms = 100

    def play(self, rounds: Sequence[Round]) -> list[Outcome]:
        return [self._round(r) for r in rounds]

    def _round(self, wanted: Round) -> Outcome:
        fault = pd_transfer_engine.FAULTS[wanted.fault] if wanted.fault else None
        pd_transfer_engine.TransferEngine.fault = staticmethod(fault) if fault else None  # type: ignore[assignment]
        reqs = {name: self._submit(name, prompt, wanted) for name, prompt in wanted.prompts.items()}
        reports = self._reports()
        before = len(reports)
        aborted = False
        deadline = time.monotonic() + _PATIENCE

        def wait(_: int) -> bool:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the scheduler is still busy after {_PATIENCE} seconds")
            # The other side wants a processor, too.
            time.sleep(0.002)
            nonlocal aborted
            if self._role == "decode" and wanted.aborted and not aborted and self._are_under_way():
                aborted = True
                for name in wanted.aborted:
                    engine.abort(self._scheduler, name)
            return False

        # More iterations than there is time for.
        engine.run_all(self._scheduler, wait, limit=_PATIENCE * 1000)
        return Outcome(
            outputs={name: list(req.output_ids) for name, req in reqs.items()},
            reports=list(self._reports())[before:],
            summary=self._summary(),
            retracted=sum(int(getattr(req, "retraction_count", 0)) for req in reqs.values()),
        )

    def _are_under_way(self) -> bool:
        return bool(self._scheduler.disagg_decode_transfer_queue.queue)

    def _submit(self, name: str, prompt: list[int], wanted: Round) -> Any:
        self._rooms += 1
        message = sglang_engine.message(
            name,
            prompt,
            new_tokens=wanted.new_tokens,
            bootstrap_host=HOST,
            bootstrap_port=self._port,
            bootstrap_room=self._rooms,
            extra_key=self._role if wanted.adapters else None,
        )
        self._scheduler.process_input_requests([message])
        if self._role == "prefill":
            return self._scheduler.disagg_prefill_bootstrap_queue.queue[-1]
        return self._scheduler.disagg_decode_prealloc_queue.queue[-1].req

    def _build(self, model: str, args: dict[str, Any]) -> Any:
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

        # SGLang keeps one for the process, and so what an earlier scheduler registered with it.
        mooncake_transfer_engine._mooncake_transfer_engine = None
        given = {
            "disaggregation_mode": self._role,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_bootstrap_port": self._port,
            "host": HOST,
            **args,
        }
        if self._role == "decode":
            given.setdefault("disaggregation_decode_retraction_backup", "cpu_tensor")
            return engine.build_scheduler(model, **given)
        # In a server another process of the prefill side starts it.
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer

        self._bootstrap = MooncakeKVBootstrapServer(host=HOST, port=self._port)
        return engine.build_scheduler(model, **given)

    def _entries(self) -> list[pd_transfer_engine.Entry]:
        args = self._scheduler.disagg_prefill_bootstrap_queue.kv_manager.kv_args
        lists = [("", args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
        states = zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
        lists += [("swa ", *state) for state in states]
        entries = []
        for prefix, addresses, lengths, page_bytes in lists:
            session = self._session()
            before, behind = ([], []) if session is None else (["HEAD"], ["TAIL"])
            if session is not None and session.manager.pools[0].seals is not None:
                before, behind = [*before, "SEALS"], ["FILLER", *behind]
            layers = (len(addresses) - 2 * len(before)) // 2
            names = [*before, *(f"{half}{layer}" for half in "KV" for layer in range(layers)), *behind]
            for name, address, length, size in zip(names, addresses, lengths, page_bytes, strict=False):
                part = prefix + name
                entries.append(pd_transfer_engine.Entry(part=part, address=address, length=length, page_bytes=size))
        return entries

    def _session(self) -> Any:
        from kv_canary.engines.sglang import session

        try:
            return session.current()
        except RuntimeError:
            return None

    def _reports(self) -> list[dict[str, Any]]:
        session = self._session()
        if session is None:
            return []
        session.manager.flush()
        keys = ("reasons", "tag", "group", "slot", "request_id", "position", "step", "sentence")
        return [{key: getattr(r, key) for key in keys} for r in session.manager.reports]

    def _summary(self) -> dict[str, Any]:
        session = self._session()
        return {} if session is None else session.status()
