"""Bundles: one file an incident, whole or not at all, read back strictly, and shown to people."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import io
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kv_canary as kc
from kv_canary import output
from kv_canary.errors import printable
from kv_canary.reports import bundle as bundles
from kv_canary.reports.bundle import FORMAT, Bundle, read_bundle
from kv_canary.reports.picture import layout, page
from kv_canary.reports.text import show

from .engine import Engine, full_engine

NASTY = "a<script>alert(1)</script>&\"'\x1b[31m[bold]"


def damage(engine: Engine, *slots: int) -> None:
    for layer in engine.groups[0].pool.k_source.layers:
        layer[list(slots), 0] ^= 1


def damaged_engine(folder: Path, **options: Any) -> Engine:
    """Return an engine whose request, 30 tokens in slots 1 to 30 beside another's, was damaged in 3 and was run."""
    engine = full_engine(bundles=folder, **options)
    a, b = engine.add(NASTY, 60), engine.add("b", 60)
    engine.step((a, 20), (b, 4))
    for _ in range(3):
        engine.step((a, 1))
    table = engine.tables["full"]
    table[a.row, 5] = table[b.row, 2]
    damage(engine, 10, 11)
    table[a.row, 15] = 100
    engine.step((a, 1))
    return engine


@pytest.fixture
def saved(tmp_path: Path) -> list[Path]:
    engine = damaged_engine(tmp_path / "deep" / "folder")
    engine.manager.flush()
    assert output.drain()
    return sorted((tmp_path / "deep" / "folder").iterdir())


def the(saved: list[Path], reason: str) -> Bundle:
    return next(b for b in map(read_bundle, saved) if reason in b.incident.reasons)


def test_each_new_incident_is_one_file_that_reads_back_as_it_was(tmp_path: Path) -> None:
    engine = damaged_engine(tmp_path)
    engine.manager.flush()
    assert output.drain()
    files = sorted(tmp_path.iterdir())
    known = engine.manager.accounts.incidents
    assert [read_bundle(f).incident for f in files] == known
    assert len(known) == 3
    engine.step((engine.requests[NASTY], 1))
    engine.manager.flush()
    assert output.drain()
    # It goes on, and is not saved again.
    assert sorted(tmp_path.iterdir()) == files
    assert engine.manager.accounts.incidents[0].count > known[0].count


def test_a_bundle_says_all_that_is_known(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert (bundle.format, bundle.version) == (FORMAT, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", bundle.written)
    assert (bundle.incident.count, bundle.incident.slots) == (2, ((10, 11),))
    assert [r.slot for r in bundle.reports] == [10, 11]
    assert [words[2] for words in bundle.rows] == [10, 11]
    assert all(len(words) == 16 for words in bundle.rows)
    assert bundle.config["backend"] == "reference"
    assert bundle.config["read_bytes"] == 16
    assert bundle.versions["torch"]
    assert bundle.versions["python"]
    assert bundle.summary["violations"] == 8
    assert bundle.summary["steps"] == 5
    assert bundle.summary["launches"] == {"HEAD_FULL": 5, "TAIL_FULL": 10}
    assert bundle.summary["positions_relied_on"] == 20 + 21 + 22 + 23
    assert bundle.timeline is not None
    assert [r.position for r in bundle.timeline.rows] == list(range(24))
    assert bundle.incident.neighbourhood is not None
    assert [r.position for r in bundle.incident.neighbourhood.rows] == list(range(1, 19))
    assert {r.step for r in bundle.timeline.rows if r.position >= 20} == {2, 3, 4, 5}


def test_a_bundle_is_for_its_owner_only(saved: list[Path]) -> None:
    assert {f.stat().st_mode & 0o777 for f in saved} == {0o600}


def test_a_run_saves_only_so_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bundles, "MOST_BUNDLES", 2)
    engine = damaged_engine(tmp_path)
    engine.manager.flush()
    assert output.drain()
    assert len(list(tmp_path.iterdir())) == 2
    assert len(engine.manager.accounts.incidents) == 3
    assert "bundles are saved, no more will be" in caplog.text


def test_a_folder_that_cannot_be_written_to_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    engine = damaged_engine(tmp_path / "file" / "folder")
    engine.manager.flush()
    assert output.drain()
    assert "incident 1 could not be saved; the canary goes on" in caplog.text
    assert engine.manager.summary().violations == 8
    engine.step((engine.requests["b"], 1))


def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    engine = damaged_engine(tmp_path)
    monkeypatch.setattr(bundles.os, "replace", full)
    engine.manager.flush()
    assert output.drain()
    assert list(tmp_path.iterdir()) == []
    assert "no space left on device" in caplog.text


def test_raise_mode_saves_before_it_raises(tmp_path: Path) -> None:
    engine = full_engine(bundles=tmp_path, mode="raise")
    a = engine.add("a", 30)
    engine.step((a, 10))
    damage(engine, 3)
    engine.step((a, 1))
    with pytest.raises(kc.CanaryViolationError):
        engine.manager.flush()
    assert output.drain()
    assert [read_bundle(f).incident.count for f in tmp_path.iterdir()] == [1]


def change(data: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    at: Any = data
    for name in parents:
        at = at[int(name)] if isinstance(at, list) else at[name]
    if value is None:
        del at[last]
    else:
        at[int(last) if isinstance(at, list) else last] = value


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("format", "other", "a bundle of format 'kv-canary-bundle', got format 'other'"),
        ("version", 2, "a bundle of version 1, which this kv-canary reads, got 2"),
        ("incident", None, "$.incident must be given"),
        ("incident.count", "6", "$.incident.count must be int, got str"),
        ("incident.count", True, "$.incident.count must be int, got bool"),
        ("incident.positions.0", [1, 2, 3], "$.incident.positions[0] must be 2 values, got 3"),
        ("timeline.rows.0.slot", "<script>", "$.timeline.rows[0].slot must be int, got str"),
        ("reports", {}, "$.reports must be list, got dict"),
        ("versions.python", 3, "$.versions.python must be str, got int"),
    ],
)
def test_what_is_no_whole_bundle_is_refused(saved: list[Path], path: str, value: Any, words: str) -> None:
    data = json.loads(saved[0].read_text())
    change(data, path, value)
    saved[0].write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(words)):
        read_bundle(saved[0])


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"format": 1}', "\x00"])
def test_what_is_no_bundle_at_all_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"kv-canary: report: .*x\.json must be a bundle"):
        read_bundle(tmp_path / "x.json")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="must be a bundle"):
        read_bundle(tmp_path / "x.json")


def test_a_terminal_shows_the_fault_and_no_control_characters(saved: list[Path]) -> None:
    out = io.StringIO()
    bundle = the(saved, "TOKEN")
    show(bundle, Console(file=out, width=160, no_color=True))
    text = out.getvalue()
    assert "\x1b" not in text
    assert "[bold]" in text
    assert " ".join(text.split()).startswith(printable(bundle.incident.sentence))
    line = next(line for line in text.splitlines() if line.split()[:2] == ["5", str(bundle.incident.first.slot)])
    assert "POSITION" in line
    assert " b " in line
    assert sum(line.rstrip().endswith(" ok") for line in text.splitlines()) > 8


@pytest.mark.parametrize("writer", ["user17.turn3", "chatcmpl-6f9e2c0b7d1a4f35"])
def test_80_columns_break_neither_a_verdict_nor_a_writer(saved: list[Path], writer: str) -> None:
    bundle = the(saved, "K")
    around = bundle.incident.neighbourhood
    assert around is not None
    verdicts = itertools.cycle([("NEVER_WRITTEN",), ("CHAIN", "POSITION", "TOKEN"), ()])
    held = {"slot": 1234567, "token": 151643, "stored_position": 131072, "expected_token": 151643, "writer": writer}
    rows = tuple(dataclasses.replace(row, **held, verdict=next(verdicts)) for row in around.rows)
    around = dataclasses.replace(around, rows=rows)
    bundle = dataclasses.replace(bundle, incident=dataclasses.replace(bundle.incident, neighbourhood=around))
    out = io.StringIO()
    show(bundle, Console(file=out, width=80, no_color=True))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    table = [line.split() for line in lines if "1234567" in line]
    assert len(table) == len(rows)
    # A name that does not fit goes on in the next line, by more than a few letters.
    assert all(writer.startswith(words[6]) and len(words[6]) >= 12 for words in table)
    assert sum("NEVER_WRITTEN" in words for words in table) == len(rows[::3])
    assert sum(words[7:10] == ["CHAIN", "+", "POSITION"] for words in table) == len(rows[1::3])


class Reader(html.parser.HTMLParser):
    """Collects tags with their attributes, and the text outside of styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "path") and not (tag == "rect" and dict(attrs).get("class") == "ring"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open[-1:]:
            self.text += data


def read_page(bundle: Bundle) -> tuple[str, Reader]:
    text, reader = page(bundle), Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return text, reader


def test_the_page_needs_no_network_and_escapes_what_it_shows(saved: list[Path]) -> None:
    for bundle in map(read_bundle, saved):
        text, reader = read_page(bundle)
        names = {tag for tag, _ in reader.tags}
        assert names.isdisjoint({"script", "link", "img", "iframe", "object", "b"})
        for _, attributes in reader.tags:
            assert not {"src", "href", "onload", "onclick"} & set(attributes)
        assert re.findall(r"(?:url\(|@import|https?:)(?!//www.w3.org/2000/svg)", text) == []
        assert "\x1b" not in text
        assert "a<script>alert(1)</script>" in reader.text
        assert "prefers-color-scheme: dark" in text


def test_nasty_text_in_any_field_stays_text(saved: list[Path]) -> None:
    bundle = the(saved, "K")

    def poison(value: Any) -> Any:
        if isinstance(value, str):
            return "</title></style><script>x</script>" + NASTY
        if isinstance(value, tuple):
            return tuple(map(poison, value))
        if dataclasses.is_dataclass(value):
            return dataclasses.replace(value, **{k: poison(v) for k, v in vars(value).items()})
        return {k: poison(v) for k, v in value.items()} if isinstance(value, dict) else value

    _, reader = read_page(poison(bundle))
    assert "script" not in {tag for tag, _ in reader.tags}


def test_the_drawing_puts_every_position_where_it_belongs(saved: list[Path]) -> None:
    bundle = the(saved, "TOKEN")
    timeline, incident = bundle.timeline, bundle.incident
    assert timeline is not None
    drawing = layout(timeline, incident)
    columns = drawing.columns
    assert [c.row.position for c in columns] == list(range(24))
    # Left to right without overlap, inside the picture.
    for left, right in itertools.pairwise(columns):
        assert left.x + left.width <= right.x
    for c in columns:
        assert c.x > 0
        assert c.x + c.width <= drawing.width
        assert c.y > 0
        assert c.y + c.height <= drawing.height
    # What was written later lies higher, what was written in one step side by side, what was never written lowest.
    written = [c for c in columns if c.row.token is not None]
    by_step = {c.row.step: c.y for c in written}
    assert len({(c.row.step, c.y) for c in written}) == len(by_step) == 5
    assert [by_step[s] for s in sorted(by_step)] == sorted(by_step.values(), reverse=True)
    (never,) = [c for c in columns if c.row.token is None]
    assert never.row.position == 15
    assert never.y > max(by_step.values())
    # Their labels, of 11 pixels, stay apart.
    assert never.y + never.height / 2 - drawing.steps[0][1] >= 13
    # Colours are the writers'.
    assert drawing.writers[0] == NASTY
    assert {drawing.writers[c.colour] for c in columns if c.row.position == 5} == {"b"}
    assert [c.row.position for c in columns if c.faulty] == [5, 6, 9, 10, 15]


def test_the_picture_has_a_mark_for_every_position_and_a_ring_for_every_fault(saved: list[Path]) -> None:
    _, reader = read_page(the(saved, "TOKEN"))
    rects = [attributes for tag, attributes in reader.tags if tag == "rect"]
    rings = [r for r in rects if r.get("class") == "ring"]
    assert (len(rects) - len(rings), len(rings)) == (24, 5)
    assert len([tag for tag, _ in reader.tags if tag == "path"]) == 5
    assert "position 5, slot" in reader.text


def test_a_long_timeline_with_many_writers_still_fits(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert bundle.timeline is not None
    row = bundle.timeline.rows[0]
    rows = tuple(dataclasses.replace(row, position=i, writer=f"w{i % 11}", step=i + 1) for i in range(529))
    timeline = dataclasses.replace(bundle.timeline, rows=rows)
    drawing = layout(timeline, bundle.incident)
    assert len(drawing.writers) == 6
    assert {c.colour for c in drawing.columns} == set(range(7))
    assert all(c.width >= 2 and c.height >= 3 for c in drawing.columns)
    assert all(c.y >= 0 and c.y + c.height <= drawing.height for c in drawing.columns)
    _, reader = read_page(dataclasses.replace(bundle, timeline=timeline))
    assert "others" in reader.text


def test_what_was_freed_is_told_from_what_was_written(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert bundle.timeline is not None
    first = dataclasses.replace(bundle.timeline.rows[0], token=7, step=3)
    whose = {
        "a": dataclasses.replace(first, writer="a", retired=False),
        "freed by a": dataclasses.replace(first, writer="a", retired=True),
        "freed by owner 9": dataclasses.replace(first, writer=None, owner=9, retired=True),
        "handed out to b": dataclasses.replace(first, writer="b", retired=True, handed_out=True),
        "freed": dataclasses.replace(first, writer=None, owner=0, retired=True),
        "unknown": dataclasses.replace(first, writer=None, owner=0, retired=False),
    }
    rows = tuple(dataclasses.replace(row, position=n) for n, row in enumerate(whose.values()))
    timeline = dataclasses.replace(bundle.timeline, rows=rows)
    assert layout(timeline, bundle.incident).writers == tuple(whose)
    _, reader = read_page(dataclasses.replace(bundle, timeline=timeline))
    assert "Who wrote or freed the slots" in reader.text
    assert "token 7, freed by owner 9, step 3" in reader.text
    assert "token 7, handed out to b, step 3" in reader.text
    assert "token 7, writer unknown, step 3" in reader.text


def test_the_page_tells_the_cause_first_then_what_and_where_then_draws_and_lists(saved: list[Path]) -> None:
    for bundle in map(read_bundle, saved):
        text, reader = read_page(bundle)
        kinds = [tag for tag, _ in reader.tags if tag in ("h1", "dl", "svg", "table")]
        assert kinds == ["h1", "dl", "svg", "table"]
        heading = re.findall(r"<h1>(.*?)</h1>", text)[0]
        assert heading.lower() == html.escape(bundle.incident.cause).lower()
        facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text))
        assert [*facts][:4] == ["what", "request", "where", "when"]
        assert facts["what"] == f"{' + '.join(bundle.incident.reasons)}, {bundle.incident.count} violations"
        assert facts["request"] == html.escape(printable(NASTY))
        assert facts["where"].endswith("of full")
        assert facts["when"] == "step 5"
        assert facts["verdict"] == html.escape(printable(bundle.summary["verdict"]))
        assert text.index("<table>") < text.index(html.escape(printable(bundle.incident.sentence)))


def test_a_phone_shows_the_page_no_wider_than_it_is(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert bundle.timeline is not None
    row = bundle.timeline.rows[0]
    rows = tuple(dataclasses.replace(row, position=i, slot=500 + i, verdict=()) for i in range(400))
    incident = dataclasses.replace(bundle.incident, positions=((300, 301),))
    wide = dataclasses.replace(bundle, incident=incident, timeline=dataclasses.replace(bundle.timeline, rows=rows))
    text, reader = read_page(wide)
    viewport = [attributes["content"] for tag, attributes in reader.tags if attributes.get("name") == "viewport"]
    assert viewport == ["width=device-width, initial-scale=1"]
    # Only what scrolls in itself has a width of its own.
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.S)
    assert re.search(r"\.wide \{[^}]*overflow-x: auto", style)
    lengths = [float(number) for number in re.findall(r"(?<![-\w])(?:min-)?width: ([\d.]+)px", style)]
    assert max(lengths) <= 1
    held, outside = re.subn(r'<div class="wide">.*?</(?:svg|table)>', "", text, flags=re.S)
    assert outside == 2
    assert re.findall(r"<(?:svg|table)|width=\"", held) == []
    # The picture begins where the incident is, not at position 0.
    (left,) = re.findall(r'class="start" style="left: (\d+)px"', text)
    drawing = layout(wide.timeline, incident)
    assert drawing.width > 1000
    assert 0 < drawing.columns[300].x - float(left) < 300
    # Both schemes have a colour for all that has one, the picture's too.
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    used = set(re.findall(r"var\((--\w+)\)", text))
    for scheme in (light, dark.split("}")[0]):
        assert used <= set(re.findall(r"(--\w+): #", scheme))


def test_a_page_without_a_timeline_still_tells_the_incident(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    bare = dataclasses.replace(bundle, timeline=None, incident=dataclasses.replace(bundle.incident, neighbourhood=None))
    _, reader = read_page(bare)
    assert bare.incident.cause in reader.text
    assert "svg" not in {tag for tag, _ in reader.tags}


def test_the_table_below_the_drawing_shows_what_is_near_the_fault_alone(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    _, reader = read_page(bundle)
    assert bundle.incident.neighbourhood is not None
    assert bundle.timeline is not None
    near, drawn = len(bundle.incident.neighbourhood.rows), len(bundle.timeline.rows)
    assert near < drawn
    # And the line of its head.
    assert sum(tag == "tr" for tag, _ in reader.tags) == 1 + near
    # Where nothing near was kept, what is drawn is the table.
    far = dataclasses.replace(bundle, incident=dataclasses.replace(bundle.incident, neighbourhood=None))
    _, reader = read_page(far)
    assert sum(tag == "tr" for tag, _ in reader.tags) == 1 + drawn


def test_the_axis_has_a_request_s_positions_and_the_slots_of_what_lies_side_by_side(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert bundle.timeline is not None
    rows = tuple(dataclasses.replace(r, slot=500 + r.position) for r in bundle.timeline.rows)
    for request, noun, first in ((NASTY, "position", 0), (None, "slot", 500)):
        timeline = dataclasses.replace(bundle.timeline, rows=rows, request=request)
        text, _ = read_page(dataclasses.replace(bundle, timeline=timeline))
        labels = [int(label) for label in re.findall(r'text-anchor="middle">(\d+)<', text)]
        assert labels[0] == first
        assert labels == sorted(set(labels))
        assert set(labels) <= set(range(first, first + len(rows)))
        assert f">{noun}</text>" in text


def test_every_row_of_the_fault_is_bold_in_a_terminal_and_no_other(saved: list[Path]) -> None:
    bundle = the(saved, "K")
    assert bundle.incident.positions == ((9, 10),)
    out = io.StringIO()
    show(bundle, Console(file=out, width=160, force_terminal=True, color_system="standard"))
    bold = re.findall(r"^ *\x1b\[1m *(\d+)", out.getvalue(), flags=re.MULTILINE)
    assert bold == ["9", "10"]


def test_a_canary_saves_64_bundles_and_no_more(tmp_path: Path) -> None:
    folder = bundles.BundleFolder(tmp_path)
    for _ in range(64):
        assert not folder.is_full
        folder.reserve()
    assert folder.is_full
