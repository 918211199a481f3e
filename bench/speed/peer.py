"""The peer: SGLang's KV-canary kernels, on the same requests, slots and bytes as ours.

Its step is what its runtime launches: one plan, then verify and write at each of four endpoints: HEAD of K and of V,
without bytes, and TAIL of K and of V, with the first 16 bytes of layer 0 (or the whole row of it). It keeps a record
of 32 bytes at each of the four. Ours is one HEAD with bytes, one write and one TAIL, on one record; it also tracks
lifetimes (FREED, OVERWRITE), compares each row's tail, and rotates over layers and windows.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kv_canary.backends import interpreting
from kv_canary.bench.speed.checking import CheckFailed
from kv_canary.bench.speed.state import Flat, State
from kv_canary.bench.speed.timing import Launch
from kv_canary.errors import must_be
from kv_canary.reports.versions import installed

PACKAGE = "sglang.kernels.ops.kv_canary"
# Of the sources of its kernels, by `_digest`: which version they are of, where they are not an installed package.
DIGESTS = {"dd048d1797486386": "0.5.23"}
MOST_REQUESTS = {"step": 4096, "write": 4096, "scatter": 511, "sweep": 4096}
COMPARED = {
    "step": "ours: HEAD (K and V bytes), write, TAIL; the peer's: plan, then verify and write at HEAD K, HEAD V (no "
    "bytes), TAIL K, TAIL V (bytes)",
    "write": "ours: one write of a record for K and V; the peer's: one write each of TAIL K and TAIL V, all bytes",
    "scatter": "ours: scatter_token_ids; the peer's: scatter_req_token_ids",
    "sweep": "ours: verify in explicit plans, K and V bytes; the peer's: verify of TAIL K and of TAIL V, the same plan",
}
HEAD_K, HEAD_V, TAIL_K, TAIL_V = range(4)


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerWork:
    """The peer's launches for a case, with its count of violations."""

    launch: Launch
    compared: str
    violations: torch.Tensor


class Peer:
    """The peer's kernels, imported from where PYTHONPATH has them.

    Raises:
        ValueError: they cannot be imported, or what compiles them is missing.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            if not os.environ.get("CUDA_HOME"):
                raise ValueError(must_be("bench", "CUDA_HOME", "set: --peer sglang compiles its kernels", "nothing"))
            if shutil.which("ninja") is None:
                raise ValueError(must_be("bench", "ninja", "on PATH: --peer sglang compiles its kernels", "nothing"))
        try:
            self._consts, self._plan, self._verify, self._write, self._scatter = (
                importlib.import_module(f"{PACKAGE}.{name}")
                for name in ("consts", "plan", "verify", "write", "scatter_req_token_ids")
            )
        except ImportError as error:
            expected = f"one with {PACKAGE} to import (install sglang==0.5.23, or put its sources on PYTHONPATH)"
            raise ValueError(must_be("bench", "--peer sglang", expected, str(error))) from error

    def facts(self) -> dict[str, Any]:
        """Return what was measured beside, JSON-ready."""
        digest = _digest(Path(str(self._consts.__file__)).parent)
        version = installed("sglang") or DIGESTS.get(digest, "unknown")
        return {"name": "sglang", "version": version, "sources": digest, "compared": COMPARED}

    def work(self, state: State) -> PeerWork | None:
        """Return what the peer launches for a case, checked; None where it has no such op or takes fewer requests.

        Raises:
            CheckFailed: it reports a healthy pool, or does not see a changed byte.
        """
        does = state.case.does
        # It has no strides: it would do more.
        if len(state.rows) > MOST_REQUESTS.get(does, 0) or state.case.stride > 1:
            return None
        if does == "scatter" and state.device.type != "cuda" and not interpreting():
            # The others have references of their own; this one is a Triton kernel.
            return None
        builders: dict[str, Callable[[State], PeerWork]] = {
            "step": self._step,
            "write": self._write_alone,
            "scatter": self._scatter_alone,
            "sweep": self._sweep,
        }
        work = builders[does](state)
        self._check(state, work)
        return work

    def _step(self, state: State) -> PeerWork:
        run = _Run(self, state)
        run.write_history()
        run.plan(state.cached, state.new)

        def launch() -> None:
            run.plan(state.cached, state.new)
            for endpoint in (HEAD_K, HEAD_V, TAIL_K, TAIL_V):
                if state.case.cached:
                    run.verify(endpoint)
                run.write(endpoint, state.batch)

        return PeerWork(launch=launch, compared=COMPARED["step"], violations=run.violations)

    def _write_alone(self, state: State) -> PeerWork:
        run = _Run(self, state)
        run.plan(state.cached, state.new)

        def launch() -> None:
            for endpoint in (TAIL_K, TAIL_V):
                run.write(endpoint, state.batch)

        return PeerWork(launch=launch, compared=COMPARED["write"], violations=run.violations)

    def _sweep(self, state: State) -> PeerWork:
        run = _Run(self, state)
        run.write_history()
        run.plan(state.cached, state.new)

        def launch() -> None:
            for endpoint in (TAIL_K, TAIL_V):
                run.verify(endpoint)

        return PeerWork(launch=launch, compared=COMPARED["sweep"], violations=run.violations)

    def _scatter_alone(self, state: State) -> PeerWork:
        pool = torch.full((len(state.rows) + 1, int(state.new.max())), -1, dtype=torch.int32, device=state.device)

        def launch() -> None:
            self._scatter.launch_scatter_req_token_ids_kernel(
                flat_in=state.batch.tokens, offsets=state.batch.offsets, req_pool_indices=state.rows, pool_out=pool
            )

        launch()
        offsets = state.batch.offsets.tolist()
        for r, row in enumerate(state.rows.tolist()):
            tokens = state.batch.tokens[offsets[r] : offsets[r + 1]]
            if not torch.equal(pool[row, : len(tokens)].to(torch.int64), tokens):
                raise CheckFailed(f"{state.case.name}: the peer scatters other tokens")
        nothing = torch.zeros(1, dtype=torch.int32, device=state.device)
        return PeerWork(launch=launch, compared=COMPARED["scatter"], violations=nothing)

    def _check(self, state: State, work: PeerWork) -> None:
        work.launch()
        expect_silence(state, work)
        if state.case.does not in ("step", "sweep") or not state.case.cached:
            return
        # The last cached token of the first request that has one; the peer covers the first bytes of layer 0.
        first = next(r for r, q in enumerate(state.case.requests) if q.cached)
        slot = int(state.history.slots[int(state.history.offsets[first + 1]) - 1])
        state.k_source.layers[0][slot, 3] ^= 1
        work.launch()
        state.k_source.layers[0][slot, 3] ^= 1
        if int(work.violations) == 0:
            raise CheckFailed(f"{state.case.name}: the peer does not see a changed byte")
        work.violations.zero_()


def expect_silence(state: State, work: PeerWork) -> None:
    """Raise CheckFailed if the peer reported a violation."""
    if int(work.violations):
        raise CheckFailed(f"{state.case.name}: the peer reports {int(work.violations)} violations of a healthy pool")


class _Run:
    """The peer's buffers for one case, and its launches."""

    def __init__(self, peer: Peer, state: State) -> None:
        self._peer, self._state = peer, state
        device = state.device
        self.violations = torch.zeros(1, dtype=torch.int32, device=device)
        self._ring = torch.zeros(1024, 8, dtype=torch.int64, device=device)
        self._counters = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2)]
        self._assert_positions = torch.ones(1, dtype=torch.int32, device=device)
        # Slots and bytes as ours; records of its own: HEAD and TAIL, K and V.
        self._buffers = [torch.zeros(state.num_slots, 32, dtype=torch.uint8, device=device) for _ in range(4)]
        window = state.case.window
        entries = sum(min(r.cached, window) if window else r.cached for r in state.case.requests)
        self._capacity = max(1, entries)
        self._verify_plan = peer._verify.VerifyPlan.allocate(verify_capacity=self._capacity, device=device)
        self._write_plan = peer._write.WritePlan.allocate(write_req_capacity=len(state.rows), device=device)
        consts = peer._consts
        mode = consts.RealKvHashMode.ALL if state.case.whole_rows else consts.RealKvHashMode.PARTIAL
        self._contexts = [self._context(endpoint, mode) for endpoint in range(4)]

    def write_history(self) -> None:
        """Record every cached token at every endpoint."""
        state = self._state
        self.plan(torch.zeros_like(state.cached), state.cached)
        # It skips negative slots; ours leaves out slot 0.
        slots = torch.where(state.history.slots > 0, state.history.slots, -1)
        history = Flat(
            tokens=state.history.tokens,
            positions=state.history.positions,
            slots=slots,
            offsets=state.history.offsets,
        )
        for endpoint in range(4):
            self.write(endpoint, history)

    def plan(self, prefix_lens: torch.Tensor, extend_lens: torch.Tensor) -> None:
        state = self._state
        self._peer._plan.launch_canary_plan_kernels(
            verify_plan_out=self._verify_plan,
            write_plan_out=self._write_plan,
            req_pool_indices=state.rows,
            prefix_lens=prefix_lens,
            extend_seq_lens=extend_lens,
            req_to_token=state.table,
            swa_window_size=state.case.window,
            full_to_swa_index_mapping=state.lut,
            verify_capacity=self._capacity,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )

    def verify(self, endpoint: int) -> None:
        self._peer._verify.launch_canary_verify_kernel(
            context=self._contexts[endpoint], plan=self._verify_plan, check_verify_expected_token=False
        )

    def write(self, endpoint: int, flat: Flat) -> None:
        self._peer._write.launch_canary_write_kernel(
            context=self._contexts[endpoint],
            plan=self._write_plan,
            input_ids=flat.tokens,
            positions=flat.positions,
            out_cache_loc=flat.slots,
            enable_write_input_assert=False,
            expected_input_tokens=None,
            expected_input_positions=None,
        )

    def _context(self, endpoint: int, mode: Any) -> Any:
        verify, state = self._peer._verify, self._state
        source = (state.k_source, state.v_source, state.k_source, state.v_source)[endpoint]
        sources: tuple[Any, ...] = ()
        if endpoint in (TAIL_K, TAIL_V):
            sources = (
                verify.RealKvSource(
                    tensor=source.layers[0],
                    page_size=1,
                    num_bytes_per_token=state.case.row_bytes,
                    read_bytes=state.case.read_bytes,
                ),
            )
        tags = verify.CanaryLaunchTag
        return verify.VerifyOrWriteContext(
            canary_buf=self._buffers[endpoint],
            kernel_kind=(tags.HEAD_K_FULL, tags.HEAD_V_FULL, tags.TAIL_K_FULL, tags.TAIL_V_FULL)[endpoint],
            violation_ring=self._ring,
            violation_write_index=self.violations,
            slot_run_counter=self._counters[0],
            kernel_run_counter=self._counters[1],
            real_kv_sources=sources,
            real_kv_hash_mode=mode if sources else self._peer._consts.RealKvHashMode.NONE,
            enable_chain_position_assert=self._assert_positions,
        )


def _digest(ops: Path) -> str:
    """Return a digest of the sources of its kernels, Python and CUDA."""
    cuda = ops.parents[1] / "jit" / "csrc" / "kv_canary"
    digest = hashlib.sha256()
    for folder in (ops, cuda):
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".cuh")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
