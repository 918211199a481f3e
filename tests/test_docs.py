"""The pages and the reference of the API: every link leads somewhere, and every public name has its place."""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import kv_canary as kc
from kv_canary.engines.transformers_layouts import layout_class

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted(DOCS.glob("*.md")),
]
API = sorted((DOCS / "api").glob("*.rst"))
OPS = sorted(path.stem for path in (ROOT / "kv_canary/specs").glob("*.py") if "\nSPEC = " in path.read_text())
DOCUMENTED = [
    name
    for page in API
    for name in re.findall(r"^\.\. auto(?:function|class|exception|data)::\s+([\w.]+)", page.read_text(), re.M)
]


def prose(page: Path) -> str:
    """What of a page is neither in a block of code nor behind its fence; code in a line stays, without its ticks."""
    text = re.sub(r"^(`{3,}|~{3,}).*?^\1`*$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"^ {4}.*$", "", text, flags=re.M)


SOURCES = [path for folder in ("kv_canary", "difftest", "bench", "examples") for path in (ROOT / folder).rglob("*.py")]


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them, and those that it sets itself."""
    text = prose(page)
    found: set[str] = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.M):
        shown = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 0
        while (unique := f"{slug}-{count}" if count else slug) in found:
            count += 1
        found.add(unique)
    return found


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, anchor) of every link and image of a page, but for those to other hosts."""
    text = re.sub(r"(`+)(?!`)(.*?)(?<!`)\1(?!`)", "code", prose(page))
    targets = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    targets += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M)
    targets += re.findall(r"<(?:a|img)\b[^>]*\b(?:href|src)=\"([^\"]+)\"", text)
    for target in targets:
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield path, anchor


def dead_links(page: Path) -> list[str]:
    dead = []
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        there = target.is_file() and (not anchor or (target.suffix == ".md" and anchor in anchors(target)))
        if not there:
            dead.append(f"{path}#{anchor}" if anchor else path)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name if page.parent == DOCS else f"top-{page.name}")
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_told_from_one_that_lives(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# What `it` is, and: why\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n")
    page.write_text(
        "# Here\n\n[a](other.md) [b](other.md#what-it-is-and-why) [c](other.md#twice-1) [d](#here) [e](https://x.org/#y)\n"
        "`[code](nowhere.md)`\n\n```\n[code](nowhere.md)\n```\n\n"
        "[f](nowhere.md) [g](other.md#no-heading) [`h`](other.md#twice-2) [i](#there) ![j](nowhere.svg)\n"
    )
    assert dead_links(page) == ["nowhere.md", "other.md#no-heading", "other.md#twice-2", "#there", "nowhere.svg"]


def test_nothing_is_installed_by_a_name_that_is_on_no_registry() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for path in {*PAGES, *SOURCES}:
        text = path.read_text()
        assert not re.search(r"pip install \S*kv-canary", text), path
        for named in re.findall(r"pip install '?\.\[([\w,]+)\]", text):
            assert set(named.split(",")) <= set(extras), path


@pytest.mark.parametrize("page", API, ids=lambda page: page.name)
def test_the_reference_links_to_pages_that_are_there(page: Path) -> None:
    for target in re.findall(r":doc:`(?:[^`<]*<)?([^`>]+)>?`", page.read_text()):
        assert any((page.parent / f"{target}{suffix}").is_file() for suffix in (".md", ".rst")), target


def test_the_index_names_every_page_once() -> None:
    index = (DOCS / "README.md").read_text()
    expected = sorted(page.name for page in DOCS.glob("*.md") if page.name != "README.md")
    assert sorted(re.findall(r"\]\(([\w-]+\.md)\)", index)) == expected
    assert "(api/index.rst)" in index


def test_the_reference_of_the_api_has_every_page_in_its_contents() -> None:
    (contents,) = re.findall(r"^\.\. toctree::\n(.*?)^\S", (DOCS / "api/index.rst").read_text(), re.M | re.S)
    assert sorted(re.findall(r"^ +([\w-]+)$", contents, re.M)) == [page.stem for page in API if page.stem != "index"]


def test_every_public_name_is_in_the_reference_of_the_api_once() -> None:
    expected = {f"kv_canary.{name}" for name in kc.__all__ if name != "ops"} | {f"kv_canary.ops.{op}" for op in OPS}
    assert expected - set(DOCUMENTED) == set()
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_reference_of_the_api_names_what_is_there_and_has_a_docstring(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute).__doc__


def _takes(version: str) -> bool:
    try:
        layout_class(version)
    except ValueError:
        return False
    return True


def test_the_versions_of_transformers_are_those_that_the_adapter_takes() -> None:
    """What is installed with the adapter, and what pages say of it, is what it does not refuse."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = (text for text in extras["transformers"] if text.startswith("transformers"))
    allowed = Requirement(wanted).specifier
    versions = [f"{major}.{minor}.0" for major in (4, 5, 6) for minor in range(40)]
    taken = [version for version in versions if _takes(version)]
    assert taken
    assert taken == [version for version in versions if allowed.contains(version)]
    first, *_, last = (version.removesuffix(".0") for version in taken)
    for page in ("README.md", "CHANGELOG.md", "docs/transformers.md"):
        assert f"({first}, 5.19 to {last})" in (ROOT / page).read_text()
    assert taken == ["5.17.0", *(f"5.{minor}.0" for minor in range(19, int(last.partition(".")[2]) + 1))]
