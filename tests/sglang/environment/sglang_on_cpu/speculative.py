"""Speculative decoding with chains of drafts on the CPU.

SGLang's workers for it run on a CPU, but what they call there is compiled for one: five functions of `sgl_kernel`, and
an attention backend that knows the shapes of a verify and of a chain of drafts. Here are the functions in torch, for
chains (top-k 1), and what `torch_native` attention lacks: it takes a verify for an extend without lengths, and has no
backend for the drafts' steps, of which each sees one token more. SGLang also turns the overlapped schedule off for
speculation on a CPU, where it is not implemented; here it stays as the arguments say, to be tested, with the one Triton
kernel that it needs in torch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


def apply() -> None:
    """Put all of it in place; whatever has been imported before."""
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers import overlap_utils
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    cache_locs.assign_draft_cache_locs_contiguous_cpu = gather_drafts
    cache_locs.assign_extend_cache_locs_cpu = gather_extends
    eagle.fill_bonus_tokens_cpu = last_accepted
    spec_tree.sgl_build_tree_kernel_efficient_cpu = build_chain
    spec_tree.sgl_verify_tree_greedy_cpu = verify_chain
    extend = TorchNativeAttnBackend.forward_extend
    decode = TorchNativeAttnBackend.forward_decode

    def forward_extend(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_target_verify():
            batch, width = copy.copy(batch), batch.spec_info.draft_token_num
            batch.extend_prefix_lens = batch.seq_lens
            batch.extend_seq_lens = torch.full_like(batch.seq_lens, width)
            batch.seq_lens = batch.seq_lens + width
        return extend(self, q, k, v, layer, batch, *args, **kwargs)

    class DraftStep(TorchNativeAttnBackend):  # type: ignore[misc]
        def __init__(self, runner: Any, step: int) -> None:
            super().__init__(runner)
            self.step = step

        def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = copy.copy(batch)
            batch.seq_lens = batch.seq_lens + self.step + 1
            return decode(self, q, k, v, layer, batch, *args, **kwargs)

    class DraftSteps:
        def __init__(self, runner: Any, steps: int) -> None:
            self.attn_backends = [DraftStep(runner, step) for step in range(steps - 1)]

        def init_forward_metadata(self, batch: Any) -> None:
            for backend in self.attn_backends:
                backend.init_forward_metadata(batch)

    def create_decode_backend(self: Any) -> Any:
        steps = self.speculative_num_steps
        return DraftSteps(self.draft_model_runner, steps) if steps > 1 else None

    speculative_hook._disable_overlap_schedule_for_cpu = lambda server_args: None
    overlap_utils.gather_spec_extras = gather_rows
    TorchNativeAttnBackend.forward_extend = forward_extend
    DraftBackendFactory.create_decode_backend = create_decode_backend
    DraftBackendFactory.create_draft_extend_backend = lambda self: TorchNativeAttnBackend(self.draft_model_runner)


def gather_drafts(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
    top_k: int,
    steps: int,
) -> None:
    """Write into `slots` those of the next `top_k * steps` positions of each row, request after request."""
    gather_extends(rows, req_to_token, seq_lens, seq_lens + top_k * steps, slots, row_length)


def gather_extends(
    rows: torch.Tensor,
    req_to_token: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    row_length: int,
) -> None:
    """Write `req_to_token[rows[i], starts[i]:ends[i]]` into `slots`, request after request."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots[taken : taken + end - start] = req_to_token[row, start:end]
        taken += end - start


def gather_rows(indices: torch.Tensor, *tables: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return these rows of every table."""
    return tuple(None if table is None else table[indices] for table in tables)


def last_accepted(tokens: torch.Tensor, lens: torch.Tensor, last: torch.Tensor, width: int) -> None:
    """Write into `last` the last of each request's accepted tokens [requests, width]."""
    last.copy_(tokens.view(-1, width).gather(1, lens[:, None].long() - 1)[:, 0])


def build_chain(
    parents: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    top_k: int,
    depth: int,
    width: int,
    mask_mode: int,
) -> None:
    """Describe a chain of `width` tokens behind each request's `seq_lens`; only as its own mask, of mode QLEN_ONLY."""
    if top_k != 1 or int(mask_mode) != 1:
        raise NotImplementedError(f"trees, and masks of mode {mask_mode}, have no stand-in")
    requests, each = len(seq_lens), torch.arange(width)
    positions.view(requests, width)[:] = seq_lens[:, None] + each
    index[:] = torch.arange(requests * width).view(requests, width)
    next_token[:] = torch.where(each + 1 < width, each + 1, -1)
    next_sibling[:] = -1
    mask.view(requests, width, width)[:] = each <= each[:, None]


def verify_chain(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
) -> None:
    """Accept each request's drafts up to the first that is not what the target predicts in its place."""
    agrees = candidates[:, 1:] == target_predict[:, :-1]
    accepted = agrees.long().cumprod(1).sum(1)
    accept_token_num.copy_(accepted)
    kept = torch.arange(candidates.shape[1]) <= accepted[:, None]
    accept_index.copy_(torch.where(kept, retrive_index, -1))
    predicts[retrive_index[kept]] = target_predict[kept].to(predicts.dtype)
