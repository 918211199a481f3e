"""SGLang's host tier: what goes to host memory and comes back is verified, and what goes wrong on the way is found."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

from kv_canary.difftest.stress import tier_lives
from kv_canary.difftest.stress.sglang import tiers as tiers_campaign
from kv_canary.difftest.stress.sglang.drafts import accepted, save_models
from kv_canary.engines.sglang import hicache, session
from kv_canary.engines.sglang.storage import StoredPages
from kv_canary.reports import CanaryViolationError
from kv_canary.tier import HostTier

from . import eagle_harness, engine
from .clean import Run, Tokens, run_clean

TIERED = {
    "enable_hierarchical_cache": True,
    "hicache_io_backend": "direct",
    "hicache_ratio": 4.0,
    "max_total_tokens": 512,
    "page_size": 16,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "write through": {"hicache_write_policy": "write_through", "hicache_mem_layout": "layer_first"},
    "write back": {"hicache_write_policy": "write_back", "hicache_mem_layout": "page_first_direct"},
    "selective, overlap": {
        "hicache_write_policy": "write_through_selective",
        "hicache_mem_layout": "layer_first",
        "disable_overlap_schedule": False,
    },
    "write back, overlap, mixed": {
        "hicache_write_policy": "write_back",
        "hicache_mem_layout": "layer_first",
        "disable_overlap_schedule": False,
        "enable_mixed_chunk": True,
    },
}


USUAL = (("llama", "write through"), ("llama", "write back, overlap, mixed"), ("mellum", "write back"))


def tiers() -> list[Any]:
    tiered = session.current()._host_tiers
    assert tiered is not None
    return list(tiered.tiers)


def looked_at() -> None:
    """Look at all that lies on the host, and report what was found."""
    for tier in tiers():
        tier.settle()
        tier.check(whole=True)
    session.current().manager.flush()


def run_tiered(
    model: str, scenario: Callable[[Run], None], variant: str, *, settings: dict[str, str] | None = None, **args: Any
) -> Run:
    run = run_clean(model, scenario, settings=settings, **{**TIERED, **VARIANTS[variant], **args})
    looked_at()
    assert [r.sentence for r in session.current().manager.reports] == []
    for tier in tiers():
        facts = tier.facts
        assert facts.backed_up > 0, tier.group.name
        assert facts.verified > 0, tier.group.name
        assert facts.unsealed == 0, tier.group.name
    return run


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        pytest.param(kind, variant, marks=[] if (kind, variant) in USUAL else [pytest.mark.long])
        for kind in ("llama", "mellum")
        for variant in VARIANTS
    ],
)
def test_prefixes_that_come_back_from_the_host_are_clean(request, kind, variant):
    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in (100, 60, 130, 90, 110, 70, 40)]
        for _ in range(3):
            for prompt in prompts:
                # What is hit again goes to the host, whatever the policy.
                run.serve([prompt], 2)
            for prompt in prompts:
                run.serve([prompt], 2)
                run.submit([*prompt, *run.tokens(5)], 9)
            run.go()

    run = run_tiered(request.getfixturevalue(kind), scenario, variant)
    assert sum(req.cached_tokens for req in run.reqs) > 500
    # Not all of it was on the device still.
    assert tiers()[0].facts.loaded > 300
    assert session.current().manager.summary().unverified == 0


@pytest.fixture
def looks(monkeypatch) -> list[str]:
    """What forwards that read what is being loaded, and HEAD, have done, in order."""
    order: list[str] = []
    may, compose, before, after = (
        getattr(session.Session, f"_{name}") for name in ("may_look_later", "compose", "before", "after")
    )

    def may_look_later(self: Any, runner: Any, forward_batch: Any) -> bool:
        is_late: bool = may(self, runner, forward_batch)
        order.append("late" if is_late else "first")
        return is_late

    def look_up(self: Any, *args: Any) -> None:
        order.append("composes")
        compose(self, *args)

    def begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        order.append("HEAD")
        return before(self, *args, **kwargs)

    def end(self: Any, *args: Any) -> None:
        order.append("TAIL")
        after(self, *args)

    wraps = {"_may_look_later": may_look_later, "_compose": look_up, "_before": begin, "_after": end}
    for name, wrapped in wraps.items():
        monkeypatch.setattr(session.Session, name, wrapped)
    return order


@pytest.mark.parametrize("variant", ["write through", "write back, overlap, mixed"])
def test_what_is_being_loaded_is_looked_at_behind_the_forward(llama, variant, looks):
    """Where nothing else is to be known in front of it: the model waits for a layer at a time."""

    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in (100, 60, 130, 90, 110, 70, 40)]
        for _ in range(4):
            for prompt in prompts:
                run.serve([[*prompt, *run.tokens(3)]], 2)

    run = run_tiered(llama, scenario, variant, settings={"KV_CANARY_CHECK_WRITES": "0"})
    assert sum(req.cached_tokens for req in run.reqs) > 500
    assert looks.count("late") > 5
    assert looks.count("late") + looks.count("first") == looks.count("HEAD") == looks.count("TAIL")
    # Who is in such a batch is looked up behind its launch, too; of the others before.
    assert {tuple(looks[i : i + 3]) for i, look in enumerate(looks) if look == "late"} == {("late", "HEAD", "composes")}
    assert {looks[i - 1] for i, look in enumerate(looks) if look == "first"} == {"composes"}
    looks.clear()
    run = run_tiered(llama, scenario, variant)
    assert looks.count("late") == 0
    assert tiers()[0].facts.loaded > 300


@pytest.mark.parametrize("variant", ["write through", "write back, overlap, mixed"])
def test_what_ends_is_looked_at_before_a_load_would_wait_for_it(llama, variant, monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(
        session.Session,
        "_complete_ended",
        lambda self, original=session.Session._complete_ended: (
            order.append("looked at") if self._ended else None,
            original(self),
        ),
    )
    monkeypatch.setattr(
        hicache.HostTiers,
        "_start_loading",
        lambda self, original, *args, start=hicache.HostTiers._start_loading, **kwargs: (
            order.append("not looked at" if self._ended else "loads") if self._controller.load_queue else None,
            start(self, original, *args, **kwargs),
        )[1],
    )

    def scenario(run: Run) -> None:
        prompts = [run.tokens(n) for n in (100, 60, 130, 90, 110, 70, 40)]
        for _ in range(2):
            for prompt in prompts:
                run.serve([prompt], 2)
                run.serve([prompt], 2)

    run_tiered(llama, scenario, variant)
    assert order.count("loads") > 3
    assert order.count("looked at") > 3
    assert "not looked at" not in order


@pytest.mark.parametrize(("with_pictures", "is_late"), [(False, True), (True, False)])
def test_a_model_that_takes_pictures_out_of_the_input_ids_is_looked_at_before(with_pictures, is_late):
    watched, runner = session.Session.__new__(session.Session), object()
    watched._host_tiers = SimpleNamespace(is_loading=True, look_beside=lambda: None)
    watched.off, watched._groups, watched._speculation, watched._ended = "", {runner: ()}, None, None
    watched.manager = SimpleNamespace(
        config=SimpleNamespace(check_writes=False), unverified=SimpleNamespace(is_clean=True)
    )
    batch = SimpleNamespace(batch_size=1, contains_mm_inputs=lambda: with_pictures)
    assert watched._may_look_later(runner, batch) == is_late


def test_what_ended_requests_rested_on_is_looked_at_before_a_load_may_write_there(monkeypatch):
    """Where it lies is computed on the scheduler's stream; in front of a load it is looked at on the forwards'."""
    order: list[Any] = []
    tiers = hicache.HostTiers.__new__(hicache.HostTiers)
    forwards = SimpleNamespace(name="forwards")
    tiers._device = torch.device("cuda")
    tiers._scheduled = SimpleNamespace(
        record=lambda: order.append("the scheduler's"), wait=lambda stream: order.append(f"{stream.name} wait")
    )
    tiers._controller = SimpleNamespace(load_fence_stream=forwards, load_queue=[1])
    tiers._following = lambda what: contextlib.nullcontext()
    tiers._ended, tiers._complete_ended = [1], lambda: order.append("looked at")

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        order.append(f"on the {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    tiers._start_loading(lambda: order.append("loads"))
    assert order == ["the scheduler's", "forwards wait", "on the forwards", "looked at", "loads"]
    tiers._ended = []
    tiers._start_loading(lambda: order.append("loads again"))
    assert order[5:] == ["loads again"]


@pytest.mark.parametrize("is_beside", [True, False])
def test_what_comes_back_while_a_forward_runs_is_looked_at_beside_it(monkeypatch, is_beside):
    """The stream of the forwards waits for that behind the forward, and it waits for what was there before."""
    order: list[str] = []

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_stream=lambda other: order.append(f"{name} waits for {other.name}"))

    forwards, beside = stream("forwards"), stream("beside")
    current = [forwards]

    @contextlib.contextmanager
    def on(chosen: Any) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    tiers = hicache.HostTiers.__new__(hicache.HostTiers)
    tiers._device, tiers._beside, tiers.is_loading = torch.device("cuda"), beside, True
    tiers._following = lambda what: contextlib.nullcontext()
    tiers._retire_freed = lambda: order.append(f"retires on {current[-1].name}")
    monkeypatch.setattr(tiers, "settle", lambda: order.append("settles"))
    tiers._tiers = [SimpleNamespace(is_quiet=False, land=lambda: order.append(f"lands on {current[-1].name}"))]
    if is_beside:
        tiers.look_beside()
        order.append("the forward is launched")
    tiers.before_forward(is_beside=is_beside)
    assert not tiers.is_loading
    assert order == (
        [
            "beside waits for forwards",
            "the forward is launched",
            "settles",
            "retires on beside",
            "lands on beside",
            "forwards waits for beside",
        ]
        if is_beside
        else ["settles", "lands on forwards"]
    )


@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_that_raises_while_kv_is_loaded_is_given_up(llama, looks, monkeypatch, raises):
    """Whatever the canary finds behind it, the engine gets the model's own exception."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    settings = {"KV_CANARY_MODE": "raise" if raises else "log", "KV_CANARY_SEALS": "layer", "SGLANG_ON_CPU": "hicache"}
    with engine.overriding(**settings):
        scheduler = engine.build_scheduler(llama, **{**TIERED, **VARIANTS["write through"]})
    manager, tokens = session.current().manager, Tokens()
    prompts = [tokens(100) for _ in range(7)]
    for prompt in prompts:
        engine.submit(scheduler, prompt, 2)
        engine.run_all(scheduler)
    inner = ModelRunner._forward_raw

    def break_when_late(self: Any, *args: Any, **kwargs: Any) -> Any:
        if looks[-1] == "late":
            raise MemoryError("the model's own")
        return inner(self, *args, **kwargs)

    given_up: list[Any] = []
    monkeypatch.setattr(session.Session, "_give_up", lambda self, watched: given_up.append(watched) or watched.abort())
    before = session.Session._before

    def find(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched = before(self, *args, **kwargs)
        if raises and [look for look in looks if look != "composes"][-2:] == ["late", "HEAD"]:
            raise CanaryViolationError([], 1)
        return watched

    monkeypatch.setattr(session.Session, "_before", find)
    looks.clear()
    monkeypatch.setattr(ModelRunner, "_forward_raw", break_when_late)
    engine.submit(scheduler, [*prompts[0], *tokens(3)], 2)
    with pytest.raises(MemoryError, match="the model's own"):
        engine.run_all(scheduler)
    assert [look for look in looks if look != "composes"][-2:] == ["late", "HEAD"]
    if raises:
        return
    assert not manager.guard.failures
    manager.flush()
    assert [r.sentence for r in manager.reports] == []
    assert len(given_up) == 1
    assert not session.current().off


@pytest.mark.parametrize(
    "variant", [pytest.param("write through", marks=pytest.mark.long), "write back, overlap, mixed"]
)
def test_turns_that_are_retracted_aborted_and_flushed_are_clean(llama, variant):
    def scenario(run: Run) -> None:
        random = run.tokens.random
        stems = [run.tokens(random.randrange(20, 110)) for _ in range(6)]

        def before_step(iteration: int) -> bool:
            if iteration >= 250:
                return False
            if len(run.alive()) < 7 and random.random() < 0.5:
                stem = random.choice(stems)
                if run.reqs and random.random() < 0.3 and (ended := random.choice(run.reqs)).finished():
                    stem = [*ended.origin_input_ids, *ended.output_ids][:180]
                run.submit([*stem, *run.tokens(random.choice((1, 9, 30)))], random.choice((2, 12, 40)))
            if run.alive() and random.random() < 0.05:
                run.abort(random.choice(run.alive()))
            return True

        run.go(before_step)
        looked_at()
        assert run.scheduler.flush_cache()
        run.serve(stems, 4)

    run = run_tiered(llama, scenario, variant, schedule_conservativeness=0.2)
    assert run.aborted
    assert tiers()[0].facts.loaded > 100


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """A target and an EAGLE draft model."""
    return save_models(tmp_path_factory.mktemp("eagle"))


def drafts(models: tuple[str, str], **args: Any) -> Any:
    """Return a watched scheduler with a host tier that decodes with drafts."""
    settings = {"KV_CANARY_SEALS": "layer", "SGLANG_ON_CPU": "speculative,hicache"}
    scheduler = eagle_harness.build(models, mode="log", settings=settings, **{**TIERED, **args})
    for tier in tiers():
        tier.close()
    assert [tier.group.name for tier in tiers()] == ["full on the host", "draft on the host"]
    return scheduler


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=[] if v == "write back, overlap, mixed" else [pytest.mark.long]) for v in VARIANTS],
)
def test_a_draft_models_kv_goes_to_the_host_and_back_as_well(drafting, variant):
    scheduler = drafts(drafting, **VARIANTS[variant])
    prompts = [Tokens(n)(n) for n in (100, 60, 130, 90, 110, 70, 40)]
    reqs = []
    for _ in range(2):
        for prompt in prompts:
            reqs += served(scheduler, [prompt])
        longer = [[*prompt, *Tokens(1)(5)] for prompt in prompts]
        reqs += served(scheduler, [*prompts, *longer])
    looked_at()
    assert seen() == {}
    assert session.current().manager.summary().unverified == 0
    assert min(accepted(reqs)) > 30
    for tier in tiers():
        assert (tier.facts.loaded > 300, tier.facts.verified > 0, tier.facts.unsealed) == (True, True, 0)


def test_a_draft_models_kv_that_changes_on_the_host_is_found(drafting):
    scheduler = drafts(drafting, **VARIANTS["write through"])
    served(scheduler, [PROMPT])
    [_, draft] = scheduler.tree_cache.cache_controller.mem_pool_host.entries
    draft.host_pool.kv_buffer.view(torch.uint8)[1, 0, 33].view(-1)[0] ^= 1
    looked_at()
    assert seen() == {"draft on the host": {"SEAL_V"}}
    fill(scheduler)
    served(scheduler, [PROMPT])
    assert seen()["draft"] == {"SEAL_V"}


def test_a_draft_models_kv_is_stored_with_its_records(drafting, tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    scheduler = drafts(drafting, **STORED, **VARIANTS["write through"])
    scheduler.tree_cache.prefetch_threshold = scheduler.tree_cache.cache_controller.prefetch_threshold = 16
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    assert scheduler.flush_cache()
    [req] = served(scheduler, [PROMPT])
    assert req.cached_tokens > 0
    looked_at()
    assert (seen(), session.current().manager.summary().unverified) == ({}, 0)
    facts = in_storage()
    assert set(facts) == {"stored", "brought"}
    # Of each page, the target's part and the draft model's.
    assert facts["brought"] == 2 * (req.cached_tokens // 16)


def watched(model: str, *, starts: bool = False, seals: str = "layer", **args: Any) -> Any:
    settings = {"KV_CANARY_MODE": "log", "KV_CANARY_SEALS": seals, "SGLANG_ON_CPU": "hicache,hybrid_swa"}
    with engine.overriding(**settings):
        scheduler = engine.build_scheduler(model, **{**TIERED, **VARIANTS["write through"], **args})
    # A thread that looks around would find things in its own time.
    for tier in () if starts else tiers():
        tier.close()
    return scheduler


def served(scheduler: Any, prompts: list[list[int]]) -> list[Any]:
    reqs = [engine.submit(scheduler, prompt, 6) for prompt in prompts]
    # Files are read by other threads.
    engine.run_all(scheduler, lambda iteration: time.sleep(0.001))
    return reqs


def fill(scheduler: Any, number: int = 7) -> None:
    """Push everything else off the device."""
    served(scheduler, [Tokens(100 + i)(100) for i in range(number)])


def seen() -> dict[str, set[str]]:
    """Return the reasons that reports give, by group."""
    session.current().manager.flush()
    found: dict[str, set[str]] = {}
    for report in session.current().manager.reports:
        found.setdefault(report.group, set()).update(report.reasons)
    return found


PROMPT = Tokens(5)(96)


def test_a_bit_that_flips_in_host_memory_is_found_there(llama):
    scheduler = watched(llama)
    served(scheduler, [PROMPT])
    host = scheduler.tree_cache.cache_controller.mem_pool_host.entries[0].host_pool
    [used] = tiers()
    used.settle()
    slot = int(used.held[10])
    host.kv_buffer.view(torch.uint8)[1, 1, slot - 1].view(-1)[5] ^= 8
    looked_at()
    assert seen() == {"full on the host": {"SEAL_V"}}
    [report] = session.current().manager.reports
    assert (report.slot, report.position) == (slot, 10)
    assert report.places == ("V somewhere from layer 0 to layer 2",)


def test_what_the_thread_finds_while_nothing_runs_is_told(llama):
    scheduler = watched(llama, starts=True)
    served(scheduler, [PROMPT])
    host = scheduler.tree_cache.cache_controller.mem_pool_host.entries[0].host_pool
    host.kv_buffer.view(torch.uint8)[0, 2, :] ^= 1
    end = time.monotonic() + 60
    while not session.current().manager.reports and time.monotonic() < end:
        time.sleep(0.05)
        # What an idle scheduler calls.
        session.idle()
    assert {r.group for r in session.current().manager.reports} == {"full on the host"}


def lived(setting: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return what came of a life with each fault."""
    return tier_lives.campaign(
        "sglang", tiers_campaign.lead, [setting], lambda _: names, [0], faults=tiers_campaign.FAULTS
    )


def test_what_goes_wrong_on_the_way_is_found_and_nothing_without() -> None:
    names = (
        "healthy",
        "backed up too early",
        "backup cut short",
        "K into V",
        "host slots reused during the load",
        "loaded into slots in use",
    )
    rows = lived(tiers_campaign.SETTINGS[1], names)
    assert [row["fault"] for row in rows] == list(names)
    assert [text for row in rows for text in tier_lives.objections(row)] == []
    places = {row["fault"]: set(row["where"]) for row in rows}
    assert places == {
        "healthy": set(),
        "backed up too early": {"host"},
        "backup cut short": {"head"},
        "K into V": {"load"},
        "host slots reused during the load": {"load"},
        "loaded into slots in use": {"head"},
    }


def test_what_another_request_has_stored_is_found_by_its_identity() -> None:
    [setting] = [s for s in tiers_campaign.SETTINGS if s.name == "files, 3 layers"]
    rows = lived(setting, ["healthy", "the key forgets the salt"])
    assert [text for row in rows for text in tier_lives.objections(row)] == []
    assert [row["where"] for row in rows] == [{}, {"head": 1}]


def test_a_node_whose_host_slots_are_another_ones_is_found_by_its_tokens(llama):
    """Slots that were given to another behind the tree's back: the bytes fit their seals, and not the text."""
    scheduler = watched(llama)
    served(scheduler, [PROMPT])
    fill(scheduler)
    controller = scheduler.tree_cache.cache_controller
    move = controller._move_op_indices
    other = next(int(s) for s in tiers()[0].held[::-1])

    def swapped(operation: Any) -> Any:
        operation.host_indices = operation.host_indices.clone()
        operation.host_indices[-16:] = torch.arange(other - 16, other)
        return move(operation)

    controller._move_op_indices = swapped
    served(scheduler, [PROMPT])
    assert {"TOKEN"} <= seen()["full"]


STORED = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}


def with_files(model: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **args: Any) -> Any:
    """Return a watched scheduler that stores pages in a folder."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(folder))
    scheduler = watched(model, **STORED, **VARIANTS["write through"], **args)
    scheduler.tree_cache.prefetch_threshold = scheduler.tree_cache.cache_controller.prefetch_threshold = 16
    return scheduler


def pages(folder: Path) -> list[Path]:
    """Return the files of pages, the first page's first."""
    found = [file for file in folder.glob("*.bin") if not file.name.startswith("kv-canary")]
    return sorted(found, key=lambda file: file.stat().st_mtime_ns)


def stored(scheduler: Any, prompt: list[int], folder: Path) -> None:
    """Serve a prompt, and wait until its pages and their records are in files."""
    before = in_storage().get("stored", 0)
    served(scheduler, [prompt])
    end = time.monotonic() + 30
    while in_storage().get("stored", 0) < before + len(prompt) // 16 and time.monotonic() < end:
        engine.run_all(scheduler)
        time.sleep(0.02)
    assert in_storage()["stored"] == before + len(prompt) // 16
    assert scheduler.flush_cache()


def in_storage() -> dict[str, int]:
    facts: dict[str, int] = session.current().status()["host_tiers"].get("storage", {})
    return facts


@pytest.mark.parametrize("kind", ["llama", "mellum"])
def test_what_comes_from_files_is_held_against_what_was_stored(request, kind, tmp_path, monkeypatch):
    model = request.getfixturevalue(kind)
    scheduler = with_files(model, tmp_path, monkeypatch)
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    assert "stored_without" not in in_storage()
    assert scheduler.flush_cache()
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(model, PROMPT, req.output_ids)
    assert req.cached_tokens > 0
    looked_at()
    assert seen() == {}
    facts = in_storage()
    assert session.current().manager.summary().unverified == 0
    assert facts["brought"] >= req.cached_tokens // 16
    assert "brought_without" not in facts
    assert all(tier.facts.brought for tier in tiers())
    served(scheduler, [PROMPT])
    assert seen() == {}


def wait_for_files(scheduler: Any, folder: Path) -> None:
    """Wait until nothing is stored any more."""
    end, count = time.monotonic() + 30, -1
    while count != (count := len(list(folder.glob("*.bin")))) and time.monotonic() < end:
        time.sleep(0.5)
        engine.run_all(scheduler)


def test_a_storage_backend_that_is_detached_is_let_go(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    cache, gone = scheduler.tree_cache, []
    for attached in range(3):
        served(scheduler, [PROMPT])
        wait_for_files(scheduler, tmp_path)
        assert scheduler.flush_cache()
        [req] = served(scheduler, [PROMPT])
        assert req.cached_tokens > 0
        looked_at()
        assert seen() == {}
        # What was brought before came with records as well.
        assert in_storage()["brought"] >= (attached + 1) * (req.cached_tokens // 16)
        assert "brought_without" not in in_storage()
        assert scheduler.flush_cache()
        gone.append(weakref.ref(cache.cache_controller.storage_backend))
        assert cache.detach_storage_backend()[0]
        done = cache.attach_storage_backend(
            storage_backend="file",
            storage_backend_extra_config_json=None,
            served_model_name="m",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_write_policy=None,
        )
        assert done[0]
        cache.prefetch_threshold = cache.cache_controller.prefetch_threshold = 16
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_another_process_holds_what_it_finds_against_what_was_stored(llama, tmp_path, monkeypatch):
    stored(with_files(llama, tmp_path, monkeypatch), PROMPT, tmp_path)
    session.current().close()
    scheduler = with_files(llama, tmp_path, monkeypatch)
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(llama, PROMPT, req.output_ids)
    looked_at()
    assert (seen(), session.current().manager.summary().unverified) == ({}, 0)
    assert in_storage()["brought"] == req.cached_tokens // 16 > 0
    # Nobody here has written it.
    [used] = tiers()
    writers = used.pool.records[torch.from_numpy(used.held)][: req.cached_tokens, 3]
    assert (writers & ((1 << 24) - 1)).tolist() == [0] * req.cached_tokens


def test_what_is_stored_without_records_is_taken_in_as_it_comes(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    for file in tmp_path.glob("kv-canary*"):
        file.unlink()
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(llama, PROMPT, req.output_ids)
    looked_at()
    assert seen() == {}
    # As many as came back, and no more.
    assert session.current().manager.summary().unverified == req.cached_tokens > 0
    assert in_storage()["brought_without"] == req.cached_tokens // 16
    served(scheduler, [PROMPT])
    assert seen() == {}


@pytest.mark.parametrize("seals", [("off", "layer"), ("layer", "off")], ids=["narrower", "wider"])
def test_records_of_another_geometry_are_taken_for_none(llama, tmp_path, monkeypatch, seals):
    stored(with_files(llama, tmp_path, monkeypatch, seals=seals[0]), PROMPT, tmp_path)
    session.current().close()
    scheduler = with_files(llama, tmp_path, monkeypatch, seals=seals[1])
    other = Tokens(77)(96)
    served(scheduler, [other])
    [used] = tiers()
    used.settle()
    before = used.held
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(llama, PROMPT, req.output_ids)
    looked_at()
    assert seen() == {}
    summary = session.current().manager.summary()
    assert summary.failures == {}
    assert summary.unverified == req.cached_tokens > 0
    assert in_storage()["brought_without"] == req.cached_tokens // 16
    # What else is there is watched as before.
    assert len(before) == 96
    assert set(before) <= set(used.held)


def rot(file: Path, at: int) -> None:
    """Flip a bit of a file; nobody has written to it."""
    facts, data = file.stat(), bytearray(file.read_bytes())
    data[at] ^= 4
    with open(file, "r+b") as there:
        there.write(data)
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_a_rotten_file_is_found_before_it_is_read(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    rot(pages(tmp_path)[2], 1234)
    served(scheduler, [PROMPT])
    looked_at()
    found = seen()
    # On the host, and where it arrived on the device.
    assert set(found) == {"full on the host", "full"}
    assert set().union(*found.values()) <= {"SEAL_K", "SEAL_V"}
    assert {r.position // 16 for r in session.current().manager.reports} == {2}


def test_another_pages_file_is_found_by_its_tokens(llama, tmp_path, monkeypatch):
    """Its records are those of the file, whatever it is called."""
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    mine = pages(tmp_path)
    stored(scheduler, Tokens(77)(96), tmp_path)
    others = [file for file in pages(tmp_path) if file not in mine]
    os.replace(others[3], mine[3])
    served(scheduler, [PROMPT])
    looked_at()
    found = seen()
    assert set(found) == {"full"}
    assert {"TOKEN"} <= found["full"]
    assert session.current().manager.reports[0].position == 48


def test_a_file_that_others_have_replaced_is_not_held_against_what_it_was(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    page = pages(tmp_path)[1]
    (tmp_path / "new").write_bytes(page.read_bytes())
    rot(tmp_path / "new", 99)
    os.replace(tmp_path / "new", page)
    served(scheduler, [PROMPT])
    looked_at()
    assert seen() == {}
    assert session.current().manager.summary().unverified == 16
    assert in_storage()["brought_without"] == 1


def test_a_page_that_another_has_stored_is_not_given_records(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    controller = scheduler.tree_cache.cache_controller
    set_page = controller.storage_backend.set

    def another_was_quicker(key: str, value: Any) -> bool:
        if not key.startswith("kv-canary"):
            value = value.clone()
            value.view(torch.uint8)[0] ^= 1
        return bool(set_page(key, value))

    controller.storage_backend.set = another_was_quicker
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    assert in_storage() == {"stored_by_others": len(PROMPT) // 16}
    assert seen() == {}


def test_a_truncated_file_is_computed_anew(llama, tmp_path, monkeypatch):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    page = pages(tmp_path)[2]
    page.write_bytes(page.read_bytes()[:-64])
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(llama, PROMPT, req.output_ids)
    looked_at()
    assert seen() == {}


def test_pages_that_never_came_and_are_taken_for_brought_are_found(llama, tmp_path, monkeypatch):
    """A prefetch that was cut short is published as a whole one."""
    scheduler = with_files(llama, tmp_path, monkeypatch)
    stored(scheduler, PROMPT, tmp_path)
    controller = scheduler.tree_cache.cache_controller
    transfer = controller._page_transfer_kv_batch

    def cut_short(operation: Any, keys: Any, slots: Any, *more: Any) -> int:
        transfer(operation, keys[:3], slots[: 3 * 16], *more)
        return len(keys)

    controller._page_transfer_kv_batch = cut_short
    served(scheduler, [PROMPT])
    looked_at()
    found = seen()
    assert {"NEVER_WRITTEN"} <= found["full"]
    assert min(r.position for r in session.current().manager.reports) == 48


@pytest.mark.parametrize(
    ("changed", "is_good"),
    [
        ({}, True),
        ({3: 1}, True),
        ({2: 5}, True),
        ({2: 5, 3: 1}, False),
        ({5: 1}, False),
        ({4: 1}, False),
        ({1: 2}, False),
    ],
)
def test_records_of_others_are_relied_on_only_where_their_numbers_are_the_same(
    llama, tmp_path, monkeypatch, changed, is_good
):
    scheduler = with_files(llama, tmp_path, monkeypatch)
    its = session.current()._host_tiers._storage
    words = its._head("kv", 16)
    for place, value in changed.items():
        words[place] = value
    assert its._is_good("kv", words, 16) is is_good
    its._has_adapters = True
    assert its._is_good("kv", words, 16) is (is_good and 2 not in changed)
    assert scheduler.flush_cache()


@pytest.mark.parametrize("part", ["backup", "load", "land", "settle", "free", "check"])
def test_a_tier_that_fails_in_log_mode_costs_no_more_than_its_watch(llama, monkeypatch, part):
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(part)

    # So little room on the host that slots are freed there too.
    scheduler = watched(llama, starts=part == "check", hicache_ratio=1.5)
    monkeypatch.setattr(HostTier, part, fails)
    for _ in range(2):
        [req] = served(scheduler, [PROMPT])
        assert engine.is_greedy(llama, PROMPT, req.output_ids)
        fill(scheduler, 12)
    for _ in range(200 if part == "check" else 1):
        if session.current().status()["failures"]:
            break
        time.sleep(0.05)
    assert scheduler.flush_cache()
    state = session.current().status()
    assert (state["off"], state["violations"]) == ("", 0)
    assert state["failures"]


def test_what_is_backed_up_behind_a_forward_that_could_not_be_followed_is_taken_in_as_it_is(llama, monkeypatch):
    scheduler = watched(llama)
    served(scheduler, [Tokens(6)(96)])
    failed, its = [], session.Session._described

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not failed:
            failed.append(True)
            raise RuntimeError("of the canary's own")
        return its(self, *args, **kwargs)

    monkeypatch.setattr(session.Session, "_described", fails)
    monkeypatch.setattr(session.Session, "_repeat", lambda self, *args: None)
    # Of one chunk: it is backed up before there is another forward.
    prompt = PROMPT[:48]
    for _ in range(2):
        [req] = served(scheduler, [prompt])
        assert engine.is_greedy(llama, prompt, req.output_ids)
        fill(scheduler)
    looked_at()
    assert failed
    assert session.current().status()["failures"]
    assert [r.sentence for r in session.current().manager.reports] == []
    assert all(tier.facts.backed_up > 0 for tier in tiers())


@pytest.mark.parametrize(
    "part", ["rows_of", "expect", "bring", "_read", "_store", "_backed_up", "_coming", "_came", "_pages"]
)
def test_records_in_storage_that_fail_cost_no_more_than_their_watch(llama, tmp_path, monkeypatch, part):
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(part)

    scheduler = with_files(llama, tmp_path, monkeypatch)
    monkeypatch.setattr(HostTier if hasattr(HostTier, part) else StoredPages, part, fails)
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    assert scheduler.flush_cache()
    for _ in range(2):
        [req] = served(scheduler, [PROMPT])
        assert engine.is_greedy(llama, PROMPT, req.output_ids)
        assert req.cached_tokens > 0
    looked_at()
    state = session.current().status()
    assert (state["off"], state["violations"]) == ("", 0)
    assert state["failures"]


@pytest.mark.parametrize(
    ("kind", "when"), [("llama", "it is copied"), ("mellum", "it is copied"), ("mellum", "another pool's begins")]
)
def test_a_load_under_way_outlives_what_fails_in_storage(request, kind, when, tmp_path, monkeypatch):
    """Of another page, on a thread of its own: the slots that it writes to have no record of what was there before."""
    model = request.getfixturevalue(kind)
    scheduler = with_files(model, tmp_path, monkeypatch)
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    fill(scheduler, 12)
    its, load, loaded, failed = session.current()._host_tiers._storage, HostTier.load, HostTier.loaded, list[str]()

    def fail() -> None:
        failed.append(when)
        its._contained("reading records from storage", lambda: 1 // 0)

    def begin(self: Any, *args: Any) -> None:
        load(self, *args)
        if when == "another pool's begins" and not failed:
            fail()

    def end(self: Any, *args: Any) -> None:
        loaded(self, *args)
        if when == "it is copied" and not failed:
            fail()

    monkeypatch.setattr(HostTier, "load", begin)
    monkeypatch.setattr(HostTier, "loaded", end)
    [req] = served(scheduler, [PROMPT])
    assert engine.is_greedy(model, PROMPT, req.output_ids)
    assert failed
    looked_at()
    assert seen() == {}
    assert session.current().manager.summary().unverified > 0


@pytest.mark.parametrize("part", ["rows_of", "_path", "_backed_up"])
def test_records_that_cannot_be_stored_leave_those_on_the_host_watched(llama, tmp_path, monkeypatch, part):
    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(part)

    scheduler = with_files(llama, tmp_path, monkeypatch)
    monkeypatch.setattr(HostTier if hasattr(HostTier, part) else StoredPages, part, fails)
    served(scheduler, [PROMPT])
    wait_for_files(scheduler, tmp_path)
    session.current()._host_tiers.settle()
    [used] = tiers()
    assert len(used.held) == len(PROMPT)
    assert set(session.current().manager.summary().failures) == {"storing records: RuntimeError"}
    # Where nobody knows which pages were to be stored, none is counted.
    assert in_storage() == ({} if part == "_backed_up" else {"stored_without": len(PROMPT) // 16})
    fill(scheduler)
    [req] = served(scheduler, [PROMPT])
    assert used.facts.loaded > 0
    assert req.cached_tokens > 0
    looked_at()
    assert (seen(), session.current().manager.summary().unverified) == ({}, 0)
    used.settle()
    host = scheduler.tree_cache.cache_controller.mem_pool_host.entries[0].host_pool
    host.kv_buffer.view(torch.uint8)[1, 1, int(used.held[10]) - 1].view(-1)[5] ^= 8
    looked_at()
    assert seen() == {"full on the host": {"SEAL_V"}}


class Known:
    """A host pool of a kind that is known."""

    dcp_size = 1


Known.__name__ = "MHATokenToKVPoolHost"


def with_tier(**changed: Any) -> Any:
    """Return what `hicache.check` reads of a scheduler that it serves, but for what is changed."""
    entry = {"name": SimpleNamespace(value="kv"), "host_pool": Known(), "packed_draft_device_pools": ()}
    entry |= {name: value for name, value in changed.items() if name in entry}
    controller = SimpleNamespace(
        host_memory_mode=changed.get("mode", "cache"),
        mem_pool_host=SimpleNamespace(entries=[SimpleNamespace(**entry)]),
    )
    return SimpleNamespace(
        tree_cache=SimpleNamespace(cache_controller=controller),
        server_args=SimpleNamespace(disaggregation_mode=changed.get("disaggregation", "null")),
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"disaggregation": "decode"}, "disaggregation_mode must be off .* with a host tier, got decode"),
        ({"mode": "buffer_only"}, "the host memory's mode must be cache with a host tier, got buffer_only"),
        ({"host_pool": object()}, "the host pool of kv must be one of MHATokenToKVPoolHost, .* got object"),
        ({"packed_draft_device_pools": (1,)}, "the host pool of kv must be one of"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(changed, said):
    hicache.check(with_tier())
    with pytest.raises(ValueError, match=said):
        hicache.check(with_tier(**changed))
