"""What the documents say of records and strides, in numbers."""

from __future__ import annotations

from .engine import MAX_LEN, full_engine


def test_a_record_keeps_its_writer_as_a_step_and_24_bits_of_owner() -> None:
    engine = full_engine()
    a = engine.add("a", 20)
    engine.step((a, 4))
    engine.step((a, 4))
    slot = engine.slot_of(engine.groups[0], a, 5)
    assert int(engine.groups[0].pool.records[slot, 3]) == 2 << 24 | a.owner
    engine.flip(engine.groups[0], "K", slot, 5)
    engine.step((a, 1))
    (report,) = engine.found()
    assert report.record is not None
    assert (report.record.owner, report.record.step, report.record.request_id) == (a.owner, 2, "a")


def test_within_a_stride_positions_come_round_in_blocks_of_16() -> None:
    engine = full_engine(stride=2, max_reports_per_step=64)
    a = engine.add("a", MAX_LEN)
    engine.step((a, 64))
    engine.step((a, 1))
    for position in range(64):
        engine.flip(engine.groups[0], "K", engine.slot_of(engine.groups[0], a, position), position)
    engine.step((a, 1))
    found = {report.position for report in engine.found()}
    assert found in ({*range(16), *range(32, 48)}, {*range(16, 32), *range(48, 64)})
