"""The peer's reference: SGLang's KV canary in PyTorch and Python, on the same requests, slots and bytes as ours."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kv_canary.bench.speed.state import Flat, State
from kv_canary.reports.versions import installed
from kv_canary.specs.structures import KvSource

PACKAGE = "sglang.kernels.ops.kv_canary"
CPU = torch.device("cpu")


def peer_version() -> str | None:
    """Return the peer's version, or None where it is not installed."""
    return installed("sglang") if importlib.util.find_spec("sglang") else None


class Peer:
    """The peer on one state. It keeps a record each for K and for V; a launch is one for each half that is covered.

    Args:
        covered: "none", "K" or "K and V", 16 bytes each; "none" is one launch, too.
        history: whether all cached tokens are recorded, so that they can be verified, or the last ones only, which
            the new tokens' records begin with.
    """

    def __init__(self, state: State, *, covered: str, history: bool) -> None:
        self._state = state
        self._consts, self._plan, self._verify, self._write, structs, write_structs = (
            importlib.import_module(f"{PACKAGE}.{name}")
            for name in ("consts", "plan_ref", "verify_ref", "write_ref", "verify", "write")
        )
        self.violations = torch.zeros(1, dtype=torch.int32)
        self._assert_positions = torch.zeros(1, dtype=torch.int32)
        sources: dict[str, tuple[KvSource | None, ...]] = {
            "none": (None,),
            "K": (state.k_source,),
            "K and V": (state.k_source, state.v_source),
        }
        self._halves = [self._context(structs, source) for source in sources[covered]]
        after = torch.where(state.cached > 0, state.cached, state.new)
        self._entries = int(after.sum())
        self._verify_plan = structs.VerifyPlan.allocate(verify_capacity=self._entries, device=CPU)
        self._write_plan, self._unused = (
            write_structs.WritePlan.allocate(write_req_capacity=len(state.rows), device=CPU) for _ in range(2)
        )
        self._record_history(whole=history)
        self._set_write_plan(state.cached, state.new)
        self.launches: dict[str, Callable[[], object]] = {"write": lambda: self._run_write(state.batch)}
        if history:
            self.launches["plan"] = lambda: self._run_plan(after)
            self.launches["verify"] = self._run_verify
        self.entries = dict.fromkeys(self.launches, self._entries) | {"write": len(state.batch.tokens)}

    @contextmanager
    def damaged(self) -> Iterator[None]:
        """Change the token in one record, of K."""
        word = self._halves[0].canary_buf.view(torch.int64)[int(self._state.table[1, 0])]
        word[self._consts.CANARY_FIELD_TOKEN] ^= 1
        yield
        word[self._consts.CANARY_FIELD_TOKEN] ^= 1

    def _record_history(self, *, whole: bool) -> None:
        state, history = self._state, self._state.history
        if len(history.tokens):
            kept = torch.arange(len(history.tokens)) if whole else history.offsets[1:] - 1
            lens = state.cached if whole else torch.ones_like(state.cached)
            self._set_write_plan(state.cached - lens, lens)
            self._run_write(
                Flat(
                    tokens=history.tokens[kept],
                    positions=history.positions[kept],
                    slots=history.slots[kept],
                    offsets=self._write_plan.write_offsets,
                )
            )
        self._assert_positions.fill_(1)

    def _set_write_plan(self, prefix_lens: torch.Tensor, extend_lens: torch.Tensor) -> None:
        """Plan what is written, but not what is verified, which would take long."""
        plan, state = self._write_plan, self._state
        plan.write_offsets[0] = 0
        plan.write_offsets[1:] = extend_lens.cumsum(0)
        seeds = state.table[state.rows, (prefix_lens - 1).clamp(min=0)]
        plan.write_seed_slot_indices.copy_(torch.where(prefix_lens > 0, seeds, -1))
        plan.write_num_valid_reqs.fill_(len(state.rows))

    def _run_plan(self, prefix_lens: torch.Tensor) -> None:
        state = self._state
        self._plan.launch_canary_plan_kernels_torch_reference(
            verify_plan_out=self._verify_plan,
            write_plan_out=self._unused,
            req_pool_indices=state.rows,
            prefix_lens=prefix_lens,
            extend_seq_lens=state.new,
            req_to_token=state.table,
            swa_window_size=0,
            full_to_swa_index_mapping=None,
            verify_capacity=self._entries,
            req_to_verify_expected_tokens=None,
            req_to_verify_expected_tokens_valid_lens=None,
            kv_token_id_vs_position_offset=0,
        )

    def _run_verify(self) -> None:
        for half in self._halves:
            self._verify.launch_canary_verify_kernel_torch_reference(
                context=half, plan=self._verify_plan, check_verify_expected_token=False
            )

    def _run_write(self, flat: Flat) -> None:
        for half in self._halves:
            self._write.launch_canary_write_kernel_torch_reference(
                context=half,
                plan=self._write_plan,
                input_ids=flat.tokens,
                positions=flat.positions,
                out_cache_loc=flat.slots,
                enable_write_input_assert=False,
                expected_input_tokens=None,
                expected_input_positions=None,
            )

    def _context(self, structs: Any, source: KvSource | None) -> Any:
        modes = self._consts.RealKvHashMode
        sources: tuple[Any, ...] = ()
        if source is not None:
            sources = (
                structs.RealKvSource(
                    tensor=source.layers[0],
                    page_size=1,
                    num_bytes_per_token=source.bytes_per_token,
                    read_bytes=source.read_bytes,
                ),
            )
        return structs.VerifyOrWriteContext(
            canary_buf=torch.zeros(self._state.num_slots, 32, dtype=torch.uint8),
            kernel_kind=structs.CanaryLaunchTag.TAIL_K_FULL,
            violation_ring=torch.zeros(64, 8, dtype=torch.int64),
            violation_write_index=self.violations,
            slot_run_counter=torch.zeros(1, dtype=torch.int64),
            kernel_run_counter=torch.zeros(1, dtype=torch.int64),
            real_kv_sources=sources,
            real_kv_hash_mode=modes.PARTIAL if sources else modes.NONE,
            enable_chain_position_assert=self._assert_positions,
        )
