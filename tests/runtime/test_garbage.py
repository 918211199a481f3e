"""What a remembered step leaves for the garbage collector to walk: a few objects, however many requests it served."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
import torch

import kv_canary as kc
from kv_canary.difftest.simulator.scripted_engine import kv_source
from kv_canary.runtime.batch import ForwardBatch, ModelInputs
from kv_canary.runtime.composition import BatchRequests, Composition
from kv_canary.runtime.history import REMEMBERED_STEPS

from .test_repetition import SOURCE, text

# Objects that may survive a step, and seconds that a full collection may take for those of all that are remembered.
MOST_SURVIVORS = 10
MOST_SECONDS = 0.005


class Decoder:
    """A canary around decode steps of so many requests, each of one token more."""

    def __init__(self, requests: int) -> None:
        self.count, self.length = requests, 10
        slots = requests * 4
        k, v = (kv_source(slots, 32, layers=1, read_bytes=16) for _ in range(2))
        pool = kc.KvPool(name="pool", num_slots=slots, k_source=k, v_source=v, device="cpu")
        limits = kc.CanaryLimits(max_rows=requests + 1, max_requests=requests, max_tokens=requests, max_len=512)
        # Tokens are kept from the first step on for as long as these requests may grow.
        config = kc.CanaryConfig(backend="reference", check_tokens=False)
        self.manager = kc.CanaryManager([kc.BufferGroup(name="full", pool=pool)], limits=limits, config=config)
        self.forward = self.manager.forward()
        self.table = torch.zeros(requests + 1, 512, dtype=torch.int32)
        rows = np.arange(1, requests + 1)
        members = [text(1000 * n) for n in rows.tolist()]
        self.composition = Composition(members, rows=rows, owners=rows, source=SOURCE)
        self.extend = np.ones(requests, np.int64)
        tensors = (torch.zeros(requests, dtype=torch.int64) for _ in range(5))
        ids, positions, slots_, given_rows, lengths = tensors
        self.inputs = ModelInputs(
            input_ids=ids, positions=positions, out_slots={"full": slots_}, rows=given_rows, lengths=lengths, stays=True
        )

    def step(self, *, repeats: bool) -> None:
        prefix = np.full(self.count, self.length)
        newest = SOURCE.newest(self.composition.members, prefix)
        requests = BatchRequests(self.composition, prefix=prefix, extend=self.extend, newest=newest)
        if not (repeats and self.forward.repeat(requests, out_slots=dict)):
            inputs = self.inputs
            self.forward.begin(
                ForwardBatch(
                    requests=requests,
                    input_ids=inputs.input_ids,
                    positions=inputs.positions,
                    out_slots=inputs.out_slots,
                    tables={"full": self.table},
                    rows=inputs.rows,
                    lengths=inputs.lengths,
                    check_positions=False,
                    is_given_at_tail=True,
                )
            )
            self.forward.head()
        self.forward.tail(given=self.inputs)
        self.forward.end()
        self.length += 1


def survivors(decoder: Decoder, steps: int, *, repeats: bool) -> float:
    """Return how many more objects the collector walks for each of so many steps."""
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(steps):
        decoder.step(repeats=repeats)
    gc.collect()
    return (len(gc.get_objects()) - before) / steps


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forwards launch nothing: what they find is not what is looked at here."""
    monkeypatch.setattr("kv_canary.runtime.forward.SingleForwardManager._launch_head", lambda self: None)
    monkeypatch.setattr("kv_canary.runtime.forward.SingleForwardManager._opened_head", lambda *_: lambda: None)
    monkeypatch.setattr("kv_canary.runtime.forward.SingleForwardManager._launch_tail", lambda self: None)
    monkeypatch.setattr("kv_canary.runtime.forward.SingleForwardManager.launches", {})


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("requests", [4, 256])
def test_few_objects_survive_a_step_however_many_requests_it_served(quiet: None, requests: int, repeats: bool) -> None:
    decoder = Decoder(requests)
    for _ in range(8):
        decoder.step(repeats=repeats)
    assert survivors(decoder, REMEMBERED_STEPS // 2, repeats=repeats) <= MOST_SURVIVORS
    for _ in range(REMEMBERED_STEPS):
        decoder.step(repeats=repeats)
    # As many are forgotten as are remembered; what is left is room for more positions, made once.
    assert survivors(decoder, REMEMBERED_STEPS, repeats=repeats) <= 2


def collection_seconds() -> float:
    """Return the CPU time that a full collection takes, at best."""
    best = float("inf")
    for _ in range(7):
        began = time.thread_time()
        gc.collect()
        best = min(best, time.thread_time() - began)
    return best


def test_remembered_steps_of_many_requests_add_nothing_to_a_full_collection(quiet: None) -> None:
    decoder = Decoder(256)
    for _ in range(4):
        decoder.step(repeats=False)
    gc.collect()
    gc.freeze()
    try:
        for _ in range(2 * REMEMBERED_STEPS):
            decoder.step(repeats=True)
        # Of what is new alone.
        assert collection_seconds() <= MOST_SECONDS
    finally:
        gc.unfreeze()
