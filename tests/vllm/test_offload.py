"""vLLM's KV in host memory: what goes there and comes back is verified, and what goes wrong on the way is found."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kv_canary.difftest.stress import tier_lives
from kv_canary.difftest.stress.vllm import tiers as campaign
from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine, Runner, Traffic, drafts_of, save_model
from kv_canary.engines.vllm import offload
from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.engines.vllm.session import Session
from kv_canary.engines.vllm.told import Brought, Told
from kv_canary.tier import HostTier

from .waiting import serve_held_up

Model = Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Life:
    """A life of an engine with host memory."""

    kind: str = "llama"
    runner: Runner = "V1"
    steps: int = 50
    per_chunk: int = 1
    # Bytes on the host: few, so that blocks are given up there too.
    size: int = 1 << 20
    asynchronous: bool = False
    drafts: bool = False
    canary: Mapping[str, str] = field(default_factory=lambda: {"seals": "layer"})
    arguments: Mapping[str, Any] = field(default_factory=dict)


LIVES = {
    "usual": Life(),
    "chunks of two blocks": Life(per_chunk=2),
    "three groups over one memory": Life(kind="gemma3", arguments={"num_gpu_blocks_override": 70}),
    "windows": Life(kind="mistral", steps=70),
    "asynchronous": Life(asynchronous=True),
    "without a prefix cache": Life(steps=20, arguments={"enable_prefix_caching": False}),
    "V2": Life(runner="V2", steps=25),
    "V2, without seals": Life(runner="V2", steps=25, canary={"check_inputs": "1"}),
    "a draft model": Life(drafts=True, steps=40, size=2 << 20),
}
LONG = (
    "windows",
    "three groups over one memory",
    "asynchronous",
    "chunks of two blocks",
    "without a prefix cache",
    "V2, without seals",
    "a draft model",
)


def serve(model: str, life: Life, canary: Mapping[str, str] | None) -> tuple[dict[str, list[int]], int, Any]:
    """Live a life; return its outputs, the blocks that came back, and the canary's session."""
    from kv_canary.difftest.stress.vllm import offloading

    more = {"speculative_config": drafts_of("draft_model", model)} if life.drafts else {}
    host = offloading.settings(size=life.size, per_chunk=life.per_chunk)
    arguments = {**life.arguments, **more, "kv_transfer_config": host}
    with Engine(model, runner=life.runner, canary=canary, asynchronous=life.asynchronous, **arguments) as engine:
        Traffic(seed=3, documents=(70, 130, 200, 260, 300, 333), aborts=0.08).serve(engine, life.steps)
        loaded = offloading.WORKERS[0].loaded
        if canary is None:
            return engine.outputs, loaded, None
        session = engine.session
        session.manager.flush()
        for tier in session.offload.tiers:
            tier.settle()
            tier.check(whole=True)
        session.manager.flush()
        return engine.outputs, loaded, session


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] if n in LONG else []) for n in LIVES])
def test_a_healthy_life_is_silent_and_nothing_is_taken_in_as_it_comes(model: Model, name: str) -> None:
    life = LIVES[name]
    folder = model(life.kind)
    without, _, _ = serve(folder, life, None)
    outputs, loaded, session = serve(folder, life, life.canary)
    assert outputs == without
    assert loaded > 0
    assert session.manager.guard.failures == {}
    assert [report.sentence for report in session.manager.reports] == []
    summary = session.manager.summary()
    assert summary.violations == summary.discarded == summary.skipped == summary.unverified == summary.uncovered == 0
    assert summary.positions_verified == summary.positions_relied_on > 5000
    for tier in session.offload.tiers:
        facts = tier.facts
        assert facts.backed_up > 0
        assert facts.unsealed == 0
        assert (facts.verified > 0) == ("seals" in life.canary)
    # Of requests that are given up while they wait nobody relies on anything.
    assert 0 < sum(tier.facts.loaded for tier in session.offload.tiers) <= loaded * 32 * (2 if life.drafts else 1)
    assert session.status()["host_tiers"].keys() == {tier.group.name for tier in session.offload.tiers}


@pytest.mark.long
def test_a_healthy_life_of_groups_of_unequal_layers_is_silent(unequal: str) -> None:
    # Few blocks on the host: they go from group to group.
    life = Life(size=1150000, steps=40, arguments={"num_gpu_blocks_override": 70})
    without, _, _ = serve(unequal, life, None)
    outputs, loaded, session = serve(unequal, life, life.canary)
    assert outputs == without
    assert loaded > 0
    assert session.manager.guard.failures == {}
    assert [report.sentence for report in session.manager.reports] == []
    summary = session.manager.summary()
    assert summary.violations == summary.unverified == summary.uncovered == 0
    assert all(tier.facts.loaded > 0 and tier.facts.unsealed == 0 for tier in session.offload.tiers)


def test_what_goes_wrong_on_the_way_is_found_and_nothing_without() -> None:
    names = ("healthy", "backup dropped", "one bit on the host", "load dropped", "one address for two layers")
    rows = tier_lives.campaign(
        "vllm", campaign.lead, campaign.SETTINGS[:1], lambda _: names, [0], faults=campaign.FAULTS
    )
    assert [row["fault"] for row in rows] == list(names)
    assert [text for row in rows for text in tier_lives.objections(row)] == []
    assert [set(row["where"]) for row in rows] == [set(), {"host"}, {"host"}, {"load"}, {"load"}]


@pytest.mark.long
def test_a_load_that_one_rank_makes_alone_is_found_on_the_others_and_by_nobody_else() -> None:
    [setting] = [s for s in campaign.SETTINGS if s.ranks > 1]
    names = [fault.name for fault in campaign.FAULTS if campaign.belongs(setting, fault)]
    assert names == ["one rank loads alone"]
    rows = tier_lives.campaign(
        "vllm", campaign.lead, [setting], lambda _: ("healthy", *names), [0, 1], faults=campaign.FAULTS
    )
    assert [text for row in rows for text in tier_lives.objections(row)] == []
    assert [(row["found"], set(row["where"])) for row in rows] == [(0, set()), (2, {"load"})]


def test_host_memory_is_followed_beside_another_connector(model: Model) -> None:
    """What the other one brings is taken in as it comes, and nothing of what comes from the host."""
    from kv_canary.difftest.stress.vllm import loopback, offloading

    def serve_with(canary: Mapping[str, str] | None) -> tuple[dict[str, list[int]], Any, int]:
        inner = [offloading.settings(size=1 << 17), loopback.settings("beside", waits=True)]
        both = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": inner},
        }
        with Engine(model("llama"), canary=canary, kv_transfer_config=both) as engine:
            Traffic(seed=3, documents=(70, 130, 200, 260, 300, 333)).serve(engine, 50)
            session = None if canary is None else engine.session
            if session is not None:
                session.manager.flush()
            return engine.outputs, session, offloading.WORKERS[0].loaded

    without, _, _ = serve_with(None)
    outputs, session, loaded = serve_with({"seals": "layer"})
    assert outputs == without
    assert loaded > 0
    brought = loopback.STORES["beside"].brought
    assert brought > 0
    summary = session.manager.summary()
    assert session.manager.guard.failures == {}
    assert [report.sentence for report in session.manager.reports] == []
    assert 0 < summary.uncovered <= brought
    assert 0 < sum(tier.facts.loaded for tier in session.offload.tiers) <= loaded * 32


PROMPT = [(7 * n) % VOCABULARY + 3 for n in range(170)]


@pytest.fixture
def hosted(model: Model, request: pytest.FixtureRequest) -> Any:
    """An engine with host memory; what the test changes of it comes with `request.param`."""
    from kv_canary.difftest.stress.vllm import offloading

    host = offloading.settings(size=4 << 20)
    with Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=host) as engine:
        yield engine


def served_again(engine: Engine) -> None:
    """Serve a prompt whose KV has been pushed off the device since it was served first."""
    engine.submit("first", PROMPT, new_tokens=4)
    engine.run()
    for n in range(6):
        engine.submit(f"other {n}", [(5 * k + n) % VOCABULARY + 3 for k in range(150)], new_tokens=2)
    engine.run()
    engine.submit("second", PROMPT, new_tokens=4)
    engine.run()
    engine.session.manager.flush()
    told = {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}
    assert told["first"] == told["second"]


@pytest.mark.parametrize("part", ["backup", "backed_up", "fetch", "put_back", "settle"])
def test_a_tier_that_fails_in_log_mode_costs_no_more_than_its_watch(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    hosted.session.manager.guard.contains = True

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(part)

    monkeypatch.setattr(HostTier, part, fails)
    served_again(hosted)
    assert hosted.session.manager.guard.failures
    assert [report.sentence for report in hosted.session.manager.reports] == []


def test_what_is_stored_behind_a_forward_that_could_not_be_followed_is_taken_in_as_it_is(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted.session.manager.guard.contains = True
    failed, its = [], Session._known

    def fails(self: Any, inputs: Any) -> Any:
        if not failed and inputs.extend.sum() > 70:
            # A chunk of a prompt: it fills blocks, whose store is queued.
            failed.append(True)
            raise RuntimeError("of the canary's own")
        return its(self, inputs)

    monkeypatch.setattr(Session, "_known", fails)
    served_again(hosted)
    assert failed
    assert hosted.session.manager.guard.failures
    assert [report.sentence for report in hosted.session.manager.reports] == []


def test_a_load_that_cannot_be_followed_is_taken_in_as_it_comes(
    hosted: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = offload.Offload._pairs

    def fails(self: Any, on_device: Any, chunks: Any) -> Any:
        if hosted.session.offload.facts["full 0 on the host"]["backed_up"] > 300:
            raise RuntimeError("of the canary's own")
        return pairs(self, on_device, chunks)

    monkeypatch.setattr(offload.Offload, "_pairs", fails)
    served_again(hosted)
    summary = hosted.session.manager.summary()
    assert [report.sentence for report in hosted.session.manager.reports] == []
    assert summary.uncovered + summary.unverified > 0


def test_a_request_that_is_given_up_while_it_is_loaded_leaves_nothing_behind(hosted: Engine) -> None:
    served_again(hosted)
    for n in range(6):
        hosted.submit(f"more {n}", [(11 * k + n) % VOCABULARY + 3 for k in range(150)], new_tokens=2)
    hosted.run()
    for n in range(3):
        hosted.submit(f"given up {n}", PROMPT, new_tokens=4)
        hosted.step()
        hosted.abort(f"given up {n}")
    hosted.run()
    hosted.submit("third", PROMPT, new_tokens=4)
    hosted.run()
    hosted.session.manager.flush()
    assert [report.sentence for report in hosted.session.manager.reports] == []
    assert hosted.session.manager.summary().uncovered == 0


def test_blocks_that_are_handed_on_while_their_store_is_queued_go_to_the_host_as_they_were(model: Model) -> None:
    from kv_canary.difftest.stress.vllm import offloading

    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(250)] for _ in range(24)]
    host = offloading.settings(size=1 << 20)
    arguments = {"kv_transfer_config": host, "max_num_batched_tokens": 512}
    with Engine(model("llama"), canary={"seals": "layer"}, **arguments) as engine:
        for n, prompt in enumerate(prompts):
            engine.submit(f"first {n}", prompt, new_tokens=1)
        engine.run()
        for n, prompt in enumerate(prompts[-5:-1]):
            engine.submit(f"second {n}", prompt, new_tokens=3)
        engine.run()
        assert offloading.WORKERS[0].loaded > 0
        session = engine.session
        for tier in session.offload.tiers:
            tier.settle()
            tier.check(whole=True)
        session.manager.flush()
        assert session.manager.guard.failures == {}
        assert [report.sentence for report in session.manager.reports] == []
        summary = session.manager.summary()
        assert summary.unverified == summary.uncovered == 0
        assert sum(tier.facts.unsealed for tier in session.offload.tiers) == 0


@pytest.fixture
def unequal(tmp_path: Path) -> str:
    """The folder of a model that vLLM has four groups of over one memory: of 2, 2, 1 and 2 layers."""
    layers = ["full_attention" if n in (2, 5) else "sliding_attention" for n in range(7)]
    return save_model(tmp_path / "unequal", "gemma3", num_hidden_layers=len(layers), layer_types=layers)


@pytest.mark.parametrize("is_queued", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_chunk_of_a_group_that_goes_to_another_one_holds_nothing_of_the_first(
    unequal: str, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    """A group with fewer layers over the same memory has records of its own on the host, and the chunks of all."""
    from kv_canary.difftest.stress.vllm import offloading

    rng = random.Random(0)
    prompts = [[rng.randrange(3, VOCABULARY) for _ in range(140)] for _ in range(8)]
    # 20 chunks on the host.
    host = offloading.settings(size=330000)
    with Engine(unequal, canary={"seals": "layer"}, kv_transfer_config=host, num_gpu_blocks_override=70) as engine:
        session = engine.session
        assert len(session.offload.tiers) == 2
        for n, prompt in enumerate(prompts):
            if n == 4 and not is_queued:
                # What is there now is looked at before others come, however slow the thread that does so is.
                for tier in session.offload.tiers:
                    tier.settle()
                    tier.check(whole=True)
                # What is queued from now on is not followed.
                monkeypatch.setattr(session.offload, "queue", lambda scheduled: None)
            engine.submit(f"r{n}", prompt, new_tokens=1)
            engine.run()
        for tier in session.offload.tiers:
            tier.settle()
            tier.check(whole=True)
        session.manager.flush()
        assert session.manager.guard.failures == {}
        assert [report.sentence for report in session.manager.reports] == []
        first = [tier.facts for tier in session.offload.tiers]
        assert all(facts.backed_up > 0 and facts.verified > 0 for facts in first)
        assert any(facts.brought_unknown > 0 for facts in first) is not is_queued


def stored(engine: Engine, job: int, block: int, place: int, *, is_queued: bool = True) -> None:
    """Store a block as vLLM's connector does, in a step of its own."""
    its, side = engine.session.offload, offload.find(engine.worker)
    source = SimpleNamespace(block_ids=np.array([block]), group_sizes=[1], block_indices=[0])
    target = SimpleNamespace(block_ids=np.array([place]))
    if is_queued:
        side._unsubmitted_store_jobs.append((job, source, target))
        its.queue(SimpleNamespace(kv_connector_metadata=None, finished_req_ids=set()))
        side._unsubmitted_store_jobs.clear()
    side.worker.submit_store(job, source, target)
    side.worker.get_finished()
    its.settle()
    engine.session.manager.flush()


def test_a_store_that_is_queued_of_blocks_that_nobody_has_any_more_is_found(hosted: Engine) -> None:
    served_again(hosted)
    (group,) = hosted.session.groups
    records = group.group.pool.records[: 32 * (len(group.group.pool.records) // 32)].view(-1, 32, 4)
    block = next(n for n in range(1, len(records)) if records[n].any(dim=1).all())
    stored(hosted, 1 << 30, block, 0)
    assert [report.sentence for report in hosted.session.manager.reports] == []
    hosted.session.manager.retire(group.group.pool, torch.arange(block * 32, block * 32 + 32), owner=7)
    stored(hosted, (1 << 30) + 1, block, 0)
    assert {report.reasons for report in hosted.session.manager.reports} == {("FREED",)}


def test_a_store_whose_queueing_was_not_followed_is_taken_in_as_it_comes(hosted: Engine) -> None:
    served_again(hosted)
    (group,), (tier,) = hosted.session.groups, hosted.session.offload.tiers
    hosted.session.manager.retire(group.group.pool, torch.arange(32, 64), owner=7)
    stored(hosted, 1 << 30, 1, 0, is_queued=False)
    assert tier.facts.brought_unknown == 32
    assert [report.sentence for report in hosted.session.manager.reports] == []


def test_what_was_loaded_keeps_its_records_where_others_have_its_place_on_the_host_by_then(model: Model) -> None:
    from kv_canary.difftest.stress.vllm import offloading

    rng = random.Random(0)
    others = [[rng.randrange(3, VOCABULARY) for _ in range(400)] for _ in range(2)]
    # 14 blocks on the host, and so few requests at a time that one waits while others take its place there.
    host = offloading.settings(size=14 * 24576)
    arguments = {"num_gpu_blocks_override": 60, "max_num_seqs": 2, "long_prefill_token_threshold": 48}
    with Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=host, **arguments) as engine:
        engine.submit("first", PROMPT, new_tokens=4)
        engine.run()
        engine.llm.reset_prefix_cache()
        engine.submit("second", PROMPT, new_tokens=4)
        for n, prompt in enumerate(others):
            engine.submit(f"other {n}", prompt, new_tokens=40)
        engine.run()
        engine.session.manager.flush()
        told = {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}
        assert told["first"] == told["second"]
        assert offloading.WORKERS[0].loaded == 5
        assert sum(tier.facts.loaded for tier in engine.session.offload.tiers) == 5 * 32
        assert [report.sentence for report in engine.session.manager.reports] == []
        summary = engine.session.manager.summary()
        assert summary.unverified == summary.uncovered == 0


@pytest.mark.parametrize("is_given_up", [True, False])
def test_what_was_loaded_for_a_request_that_has_not_come_is_known_to_who_finds_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, is_given_up: bool
) -> None:
    """It is in the prefix cache once it has been loaded, whether its request is given up, or has to wait for room."""
    from kv_canary.difftest.stress.vllm import offloading

    monkeypatch.setattr(offloading, "_DELAY", 40)
    host = offloading.settings(size=4 << 20)
    with Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=host) as engine:
        serve_held_up(engine, PROMPT, is_given_up=is_given_up)
        engine.session.manager.flush()
        told = {name.partition("-")[0]: tokens for name, tokens in engine.outputs.items()}
        assert told["first"] == told["second"]
        assert told.get("held up") == (None if is_given_up else told["first"])
        assert offloading.WORKERS[0].loaded == 5
        assert sum(tier.facts.loaded for tier in engine.session.offload.tiers) == 5 * 32
        assert engine.session.manager.guard.failures == {}
        assert [report.sentence for report in engine.session.manager.reports] == []
        summary = engine.session.manager.summary()
        assert summary.unverified == summary.uncovered == 0


def test_a_block_that_is_handed_out_again_is_not_taken_for_what_was_loaded_there_before(hosted: Engine) -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    served_again(hosted)
    (group,), its = hosted.session.groups, hosted.session.offload
    slots = torch.arange(32, 96)
    load = SimpleNamespace(block_ids=np.array([1, 2]), group_sizes=[2], block_indices=[0])
    worker = offload.find(hosted.worker).worker
    worker.submit_load(1 << 30, SimpleNamespace(block_ids=np.array([0, 1])), load)
    worker.wait({1 << 30})
    worker.get_finished()
    step = SchedulerOutput.make_empty()
    # Another connector brings a prompt of 64 tokens, the first 32 of which were found in block 1.
    step.kv_canary_told = Told(coming={"another": Brought(start=32, end=64, blocks=[[1, 2]])})
    hosted.session._begin_step(step)
    assert its.take(group, slots).tolist() == [0] * 32 + slots[32:].tolist()
    its.took(0, slots)
    assert its.take(group, slots).tolist() == slots.tolist()


def side(**changed: Any) -> Any:
    """Return what `find` reads of a connector that it follows, but for what is changed."""
    config = SimpleNamespace(canonical_layout=changed.get("canonical", False))
    kind = type(changed.get("spec", "CPUOffloadingSpec"), (), {})
    spec = kind()
    spec.config, spec.replicated_layout = config, changed.get("replicated", False)  # type: ignore[attr-defined]
    connector = type(changed.get("connector", "OffloadingConnector"), (), {})()
    worker = SimpleNamespace(spec=spec, worker=changed.get("worker", object()), _unsubmitted_store_jobs=[])
    if not changed.get("queues", True):
        del worker._unsubmitted_store_jobs
    connector.connector_worker = worker
    return connector


@pytest.mark.parametrize(
    ("changed", "is_followed"),
    [
        ({}, True),
        ({"canonical": True}, False),
        ({"replicated": True}, False),
        ({"spec": "TieringOffloadingSpec"}, False),
        ({"several": ["OffloadingConnector", "NixlConnector"]}, True),
        ({"several": ["NixlConnector"]}, False),
        ({"several": ["OffloadingConnector", "OffloadingConnector"]}, False),
        ({"worker": None}, False),
        ({"queues": False}, False),
    ],
)
def test_host_memory_that_may_hold_what_others_brought_is_not_followed(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], is_followed: bool
) -> None:
    from vllm.distributed import kv_transfer

    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    several = [side(connector=name) for name in changed.pop("several", ())]
    connector = type("MultiConnector", (), {"sub_connectors": several})() if several else side(**changed)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: connector)
    worker = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=object()))
    assert (offload.find(worker) is not None) is is_followed
    worker.vllm_config.kv_transfer_config = None
    assert offload.find(worker) is None


def test_a_connector_that_does_not_tell_of_its_stores_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm.distributed import kv_transfer

    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: side(queues=False))
    monkeypatch.setattr(offload, "_told_by_metadata", lambda: {"store_jobs"})
    worker = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=object()))
    assert offload.find(worker) is None
    assert "SimpleNamespace._unsubmitted_store_jobs, OffloadingConnectorMetadata.jobs_to_flush must be" in caplog.text


def test_chunks_that_begin_and_end_within_a_transfer_are_told_apart(hosted: Engine) -> None:
    its = hosted.session.offload
    its._per_chunk, its._order, its._sizes = 4, [0, 7, 1], {0: 2, 1: 2}
    spec = SimpleNamespace(
        block_ids=np.array([5, 6, 9, 20, 30, 31, 32]), group_sizes=[3, 1, 3], block_indices=[3, 0, 4]
    )
    found = [(p.number, p.here.tolist(), p.there.tolist()) for p in its._pairs(spec, np.array([10, 11, 12, 13]))]
    # Block 3 of chunk 10 and the first two of chunk 11; group 7, which is not followed, has chunk 12.
    assert found == [
        (0, [10, 11, 12, 13, 18, 19], [86, 87, 88, 89, 90, 91]),
        (1, [60, 61, 62, 63, 64, 65], [104, 105, 106, 107, 108, 109]),
    ]


@pytest.mark.parametrize(
    ("host", "stride"),
    [
        (torch.zeros(6, 2 * 64, dtype=torch.int8), 128),
        # With other layers' between chunks, as vLLM keeps them on a GPU.
        (torch.zeros(6, 4 * 64, dtype=torch.int8)[:, 128:], 256),
        # Of another length; no bytes side by side.
        (torch.zeros(6, 2 * 60, dtype=torch.int8), None),
        (torch.zeros(2 * 64, 6, dtype=torch.int8).t(), None),
    ],
)
def test_rows_of_a_chunk_on_the_host_lie_as_on_the_device(host: torch.Tensor, stride: int | None) -> None:
    memory = torch.zeros(2, 10 * 64, dtype=torch.int8)
    tensors = [part.view(10, 64) for part in memory]
    # The second half of each half of a block of the second layer: two rows to a block.
    layer = torch.as_strided(tensors[1], (20, 16), (32, 1), 10 * 64 + 16).view(torch.float32)
    found = offload._row_of(layer, tensors, [torch.zeros(6, 128, dtype=torch.int8), host], 2)
    assert (found is not None) is (stride is not None)
    if found is not None:
        rows, pages = found
        assert (list(rows.shape), rows.stride(), pages) == ([6, 3 * 32 + 16], (stride, 1), 4)
        assert rows.storage_offset() == host.storage_offset() + 16
    elsewhere = torch.zeros(20, 16, dtype=torch.uint8)
    assert offload._row_of(elsewhere, tensors, [host, host], 2) is None


def test_what_lies_in_vllms_own_host_memory_is_looked_at_and_let_go_before_that_is_closed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    from kv_canary.difftest.stress.vllm import offloading

    regions = []

    def memory(worker: Any, spec: Any) -> list[torch.Tensor]:
        region = SharedOffloadRegion(
            engine_id=f"kv-canary-{uuid.uuid4()}",
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        regions.append(region)
        return [region.create_next_worker_view(t.shape[1]) for t in worker.device]

    def shutdown(worker: Any) -> None:
        # As vLLM's own worker.
        worker.host.clear()
        regions[0].cleanup()

    monkeypatch.setattr(offloading.Worker, "memory", memory)
    monkeypatch.setattr(offloading.Worker, "shutdown", shutdown)
    with Engine(
        model("llama"), canary={"seals": "layer"}, kv_transfer_config=offloading.settings(size=1 << 20)
    ) as engine:
        mapped, session = regions[0].mmap_obj, engine.session
        (tier,) = session.offload.tiers
        served_again(engine)
        assert tier.looks
        assert tier._thread is not None
        tier.check(whole=True)
        assert (tier.facts.verified > 0, tier.facts.unsealed, tier.facts.waiting) == (True, 0, 0)
        assert [report.sentence for report in session.manager.reports] == []
    assert tier._thread is None
    assert mapped.closed


def test_where_bytes_on_the_host_lie_otherwise_nothing_waits_to_be_looked_at_and_that_is_said(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kv_canary.difftest.stress.vllm import offloading

    monkeypatch.setattr(offload, "_row_of", lambda *_: None)
    host = offloading.settings(size=1 << 20)
    with (
        caplog.at_level("WARNING", logger="kv_canary"),
        Engine(model("llama"), canary={"seals": "layer"}, kv_transfer_config=host) as engine,
    ):
        served_again(engine)
        (tier,) = engine.session.offload.tiers
        assert tier.facts.backed_up > 0
        assert tier.facts.waiting == tier.facts.verified == 0
    [said] = [r.getMessage() for r in caplog.records if "looked at when they come back" in r.getMessage()]
    assert "bytes of full 0 are" in said


def test_layers_that_share_blocks_with_others_have_no_rows_of_their_own() -> None:
    memory = torch.zeros(10, 128, dtype=torch.int8)
    here = torch.as_strided(memory, (10, 64), (128, 1), 64)
    layer = torch.as_strided(memory, (10, 32), (128, 1), 64)
    assert offload._row_of(layer, [here], [torch.zeros(6, 64, dtype=torch.int8)], 1) is None


def test_groups_know_their_tiers(hosted: Engine) -> None:
    its, (group,) = hosted.session.offload, hosted.session.groups
    assert isinstance(group, AttachedGroup)
    slots = torch.tensor([0, 40, 41])
    # Nothing was loaded there.
    assert its.take(group, slots).tolist() == slots.tolist()
