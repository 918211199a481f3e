"""Sentences, word for word: which layers and bytes they name, and what they say of the slot."""

from __future__ import annotations

import kv_canary as kc

from .engine import BYTES, Engine, full_engine, make_pool
from .test_seals import damage, sealed_engine, slots_of


def test_a_changed_byte_is_told_in_one_sentence_of_what_the_slot_holds_and_what_was_expected() -> None:
    engine = full_engine()
    a = engine.add("a", 40)
    engine.step((a, 9))
    slot = int(slots_of(engine, a, 4, 5))
    damage(engine, "K", slot, layer=0, byte=0)
    engine.step((a, 1))
    (report,) = engine.found()
    assert report.sentence == (
        f"step 2 HEAD_FULL: request a reads position 4 in slot {slot} of full: K. Changed: K of layer 0, bytes 0 to "
        f"{BYTES}. The slot holds token {a.tokens[4]} of position 4, written by request a at step 1; expected token "
        f"{a.tokens[4]} of position 4. Likely: {report.cause}."
    )


def test_a_damaged_seal_is_told_in_one_sentence_of_layers_token_writer_and_time() -> None:
    engine = sealed_engine()
    a = engine.add("a", 40)
    engine.step((a, 9))
    slot = int(slots_of(engine, a, 4, 5))
    damage(engine, "V", slot, layer=1, byte=31)
    engine.manager.scrub()
    (report,) = engine.found()
    assert report.sentence == (
        f"step 1 SWEEP_FULL: a check between forwards reads position 4 in slot {slot} of full: SEAL_V. Changed: V "
        f"somewhere from layer 0 to layer 1. The slot holds token {a.tokens[4]} of position 4, written by request a "
        f"at step 1; its bytes were sealed then. Likely: {report.cause}."
    )


def test_layers_that_have_no_name_are_told_by_their_numbers() -> None:
    named = make_pool(read_bytes=1)
    pool = kc.KvPool(
        name="pool",
        num_slots=named.num_slots,
        k_source=named.k_source,
        v_source=named.v_source,
        layer_names=("embedding",),
        device="cpu",
    )
    engine = Engine([kc.BufferGroup(name="full", pool=pool)], kc.CanaryConfig(backend="reference", seals="layer"))
    a = engine.add("a", 40)
    engine.step((a, 9))
    damage(engine, "K", int(slots_of(engine, a, 4, 5)), layer=1, byte=BYTES - 1)
    engine.manager.scrub()
    (report,) = engine.found()
    assert report.places == ("K somewhere from embedding to layer 1",)
