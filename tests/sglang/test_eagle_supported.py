"""What is refused of speculative decoding, what its forwards are about, and how its CUDA graphs are followed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kv_canary.difftest.stress.sglang.drafts import save_models
from kv_canary.engines.patches import Patches
from kv_canary.engines.sglang import batches, session, speculative

from . import eagle_harness, engine
from .eagle_harness import some_tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_models(tmp_path_factory.mktemp("eagle"))


def arguments(**given: Any) -> SimpleNamespace:
    served = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "pp_size": 1}
    return SimpleNamespace(**(served | given))


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE"])
def test_chains_of_drafts_are_served(algorithm: str | None) -> None:
    speculative.check_supported(arguments(speculative_algorithm=algorithm))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"speculative_eagle_topk": 4}, "speculative_eagle_topk must be 1"),
        ({"speculative_algorithm": "NGRAM"}, "speculative_algorithm must be one of EAGLE, EAGLE3, NEXTN, STANDALONE"),
        ({"speculative_algorithm": "DFLASH"}, "got DFLASH"),
        ({"speculative_algorithm": "DSPARK"}, "got DSPARK"),
        ({"speculative_algorithm": "UNO"}, "got UNO"),
        ({"speculative_algorithm": "FROZEN_KV_MTP"}, "got FROZEN_KV_MTP"),
        ({"speculative_algorithm": "A_PLUGIN_S"}, "got A_PLUGIN_S"),
        ({"enable_multi_layer_eagle": True}, "enable_multi_layer_eagle must be off"),
        ({"speculative_adaptive": True}, "speculative_adaptive must be off"),
        ({"speculative_draft_window_size": 128}, "speculative_draft_window_size must be off"),
        ({"enable_streaming_session": True}, "enable_streaming_session must be off"),
        ({"pp_size": 2}, "pp_size must be 1 with speculative decoding"),
    ],
)
def test_others_are_refused_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        speculative.check_supported(arguments(**given))


def test_settings_of_the_environment_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "false")
    speculative.check_supported(arguments())
    monkeypatch.setenv("SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "true")
    with pytest.raises(ValueError, match="SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND must be off"):
        speculative.check_supported(arguments())


@pytest.mark.parametrize(("value", "refused"), [("-1", False), ("0", False), ("2.5", True), ("", False)])
def test_an_acceptance_that_is_made_up_is_refused(value: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", value)
    if not refused:
        speculative.check_supported(arguments())
        return
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN must be off .*, got 2.5"):
        speculative.check_supported(arguments())


def test_a_tree_that_sglang_has_chosen_itself_is_refused(models: tuple[str, str]) -> None:
    from sglang.srt.server_args import ServerArgs

    given = {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": models[1]}
    server_args = ServerArgs(model_path=models[0], **engine.ARGS, **given)
    server_args.resolve_once()
    assert server_args.speculative_eagle_topk is None
    with pytest.raises(ValueError, match="speculative_eagle_topk must be 1"):
        speculative.check_supported(server_args)


class Worker:
    """A speculative worker whose results are told in advance; it calls `forward` as the engine calls its runners."""

    def __init__(self) -> None:
        self.draft_worker = SimpleNamespace(draft_runner=object())
        self.target_worker = SimpleNamespace(forward_batch_generation=self.run_target)
        self.forward: Any = None
        self.chosen: torch.Tensor | None = None
        self.counts: torch.Tensor | None = None

    def forward_batch_generation(self, step: Any) -> Any:
        if step.forward_mode is ForwardMode.EXTEND:
            return self.target_worker.forward_batch_generation(step)
        return self.verify(step)

    def run_target(self, step: Any, is_verify: bool = False) -> Any:
        self.forward(step)
        return SimpleNamespace(next_token_ids=self.chosen, accept_lens=self.counts)

    def verify(self, step: Any) -> Any:
        return self.target_worker.forward_batch_generation(step, is_verify=True)


class Req:
    def __init__(self, prompt: list[int]) -> None:
        self.origin_input_ids, self.output_ids = prompt, []
        self.kv = SimpleNamespace(req_pool_idx=1)


def test_tokens_go_on_with_what_was_chosen_and_not_taken_in_yet() -> None:
    worker, req = Worker(), Req([1, 2, 3])
    told = speculative.Speculation(
        worker,
        max_rows=4,
        owner_of=lambda _: 7,
        patches=Patches(),
        step=contextlib.nullcontext,
        forward=None,
    )
    worker.forward = told.describe
    tokens = told.tokens(req)

    def run(mode: ForwardMode, seq_len: int, chosen: list[int], count: int | None = None) -> None:
        step = batch(mode, [seq_len], spec_info=SimpleNamespace(draft_token_num=3))
        step.extend_prefix_lens_cpu, step.extend_seq_lens_cpu = [0], [seq_len]
        batches.note(step, SimpleNamespace(reqs=[req]))
        worker.chosen = torch.tensor(chosen)
        worker.counts = None if count is None else torch.tensor([count])
        worker.forward_batch_generation(step)

    run(ForwardMode.EXTEND, 3, [4])
    assert tokens(0, 4) == [1, 2, 3, 4]
    # The prompt's is not taken in yet, nor is this one's; then both are.
    run(ForwardMode.TARGET_VERIFY, 3, [5, 6, 0], 2)
    assert tokens(0, 6) == [1, 2, 3, 4, 5, 6]
    assert tokens(4, 9) == [5, 6]
    req.output_ids = [4]
    assert tokens(1, 6) == [2, 3, 4, 5, 6]
    req.output_ids = [4, 5, 6]
    assert tokens(1, 6) == [2, 3, 4, 5, 6]
    run(ForwardMode.TARGET_VERIFY, 5, [7, 8, 9], 3)
    assert tokens(4, 9) == [5, 6, 7, 8, 9]
    # The request is put off, and what was chosen last is dropped; it comes again, and other tokens are chosen.
    run(ForwardMode.EXTEND, 6, [17])
    assert tokens(4, 7) == [5, 6, 17]
    run(ForwardMode.TARGET_VERIFY, 6, [18, 0, 0], 1)
    assert tokens(4, 9) == [5, 6, 17, 18]


def batch(mode: ForwardMode, seq_lens: list[int] | None, **given: Any) -> SimpleNamespace:
    lengths = None if seq_lens is None else torch.tensor(seq_lens)
    return SimpleNamespace(forward_mode=mode, seq_lens_cpu=lengths, **given)


def test_lengths_of_every_kind_of_forward() -> None:
    describe = speculative.describe_forward
    drafting = batch(ForwardMode.DECODE, [10, 20])
    assert describe(drafting) == [(10, 1), (20, 1)]
    assert describe(drafting, drafted=2) == [(12, 1), (22, 1)]
    verify = batch(ForwardMode.TARGET_VERIFY, [10, 20], spec_info=SimpleNamespace(draft_token_num=4))
    assert describe(verify) == [(10, 4), (20, 4)]
    # It counts what it is about to write.
    extend = batch(ForwardMode.DRAFT_EXTEND_V2, [14, 24], spec_info=SimpleNamespace(num_tokens_per_req=4))
    assert describe(extend) == [(10, 4), (20, 4)]
    prefill = batch(ForwardMode.EXTEND, [10, 20], extend_prefix_lens_cpu=[4, 0], extend_seq_lens_cpu=[6, 20])
    assert describe(prefill) == [(4, 6), (0, 20)]


def test_lengths_that_the_batch_has_not_are_given() -> None:
    extend = batch(ForwardMode.DRAFT_EXTEND_V2, None, spec_info=SimpleNamespace(num_tokens_per_req=4))
    assert speculative.describe_forward(extend, seq_lens=[10, 20]) == [(10, 4), (20, 4)]
    with pytest.raises(ValueError, match="lengths are not on the host"):
        speculative.describe_forward(extend)


class Graph:
    """Stands for a CUDA graph of the draft model: what it runs does not go through `ModelRunner.forward`."""

    def __init__(self, worker: Any, run: Any) -> None:
        self.worker, self.run = worker, run
        self.replays = 0

    def can_run_graph(self, forward_batch: Any) -> bool:
        return True

    def execute(self, forward_batch: Any, *args: Any) -> Any:
        from sglang.srt.model_executor.model_runner import ModelRunner

        self.replays += 1
        runner = self.worker.draft_runner
        runner.forward = lambda batch: ModelRunner.forward.__wrapped__(runner, batch)
        try:
            return self.run(self.worker, forward_batch, *args)
        finally:
            del runner.forward


def chain(worker: Any, forward_batch: Any) -> Any:
    worker.draft_attn_backend.init_forward_metadata(forward_batch)
    return worker.draft_forward(forward_batch)


def extend(worker: Any, forward_batch: Any, select: torch.Tensor) -> Any:
    worker.draft_runner.attn_backend.init_forward_metadata(forward_batch)
    output = worker.draft_runner.forward(forward_batch).logits_output
    output.next_token_logits = output.next_token_logits[select]
    output.hidden_states = output.hidden_states[select]
    return output


@pytest.mark.parametrize("followed", [True, False])
def test_what_the_draft_model_s_graphs_write_is_followed(
    models: tuple[str, str], monkeypatch: pytest.MonkeyPatch, followed: bool
) -> None:
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker

    def capture(worker: Any) -> None:
        worker.cuda_graph_runner = Graph(worker, chain)
        worker.cuda_graph_runner_for_draft_extend = Graph(worker, extend)

    monkeypatch.setattr(EagleDraftWorker, "_capture_cuda_graphs", capture)
    scheduler = eagle_harness.build(models, mode="log")
    worker = scheduler.draft_worker.draft_worker
    if not followed:
        del worker.cuda_graph_runner_for_draft_extend.execute
    reqs = [engine.submit(scheduler, some_tokens(n, seed=n), 20) for n in (30, 70)]
    engine.run_all(scheduler)
    # What was generated is another request's prefix, of both models.
    text = [*reqs[0].origin_input_ids, *reqs[0].output_ids]
    reqs.append(engine.submit(scheduler, text + some_tokens(3, seed=1), 20))
    engine.run_all(scheduler)
    assert reqs[-1].cached_tokens > 40
    session.current().manager.flush()
    assert worker.cuda_graph_runner.replays == worker.cuda_graph_runner_for_draft_extend.replays > 5
    assert all(engine.is_greedy(models[0], req.origin_input_ids, list(req.output_ids)[:20]) for req in reqs)
    assert bool(session.current().manager.reports) is not followed
    assert session.current().off == ""
