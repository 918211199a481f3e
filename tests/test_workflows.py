"""The workflows of GitHub: what would break there without a word, since nothing here runs them."""

from __future__ import annotations

import re
import shlex
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import URLError

import click
import pytest
import yaml
from click.testing import CliRunner
from hypothesis.database import GitHubArtifactDatabase

from kv_canary.cli import main
from kv_canary.difftest.databases import open_database

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
# What GitHub puts in the place of the expressions that commands hold.
EXPRESSIONS = {
    "github.run_number": "12",
    "github.repository": "owner/repository",
    "matrix.shard": "3",
    "matrix.python": "3.12",
    "matrix.target": "test-sglang",
}

Job = dict[str, Any]


def jobs(path: Path) -> dict[str, Job]:
    found: dict[str, Job] = yaml.safe_load(path.read_text())["jobs"]
    return found


def filled_in(text: str) -> str:
    """Replace every expression; one that is not known here is a KeyError."""
    return re.sub(r"\$\{\{\s*(.*?)\s*\}\}", lambda match: EXPRESSIONS[match[1]], text)


def commands(script: str) -> list[list[str]]:
    """The words of every `kv-canary` command in a step's script."""
    found = []
    for line in filled_in(script).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        if words and words[0].endswith("/kv-canary"):
            end = next((i for i, word in enumerate(words) if word in ("|", "||", "&&", ";", ">")), len(words))
            found.append(words[1:end])
    return found


def values(words: list[str], option: str) -> list[str]:
    """The values of an option that may be repeated."""
    return [words[i + 1] for i, word in enumerate(words) if word == option]


FUZZING = [
    pytest.param(job, step, words, id=f"{path.stem}-{name}")
    for path in WORKFLOWS
    for name, job in jobs(path).items()
    for step in job["steps"]
    for words in commands(step.get("run", ""))
]
UPLOADS = [
    pytest.param(path, job, step, id=f"{path.stem}-{step['with']['name']}")
    for path in WORKFLOWS
    for job in jobs(path).values()
    for step in job["steps"]
    if step.get("uses", "").startswith("actions/upload-artifact@")
]


def uploaded(job: Job) -> list[str]:
    steps = [step for step in job["steps"] if step.get("uses", "").startswith("actions/upload-artifact@")]
    return [step["with"]["path"] for step in steps]


def test_every_workflow_fuzzes_or_runs_targets_of_the_makefile() -> None:
    assert {param.id.rsplit("-", 1)[0] for param in FUZZING} == {"fuzz-nightly", "fuzz-pull-request"}
    assert {path.stem for path in WORKFLOWS} == {"fuzz-nightly", "fuzz-pull-request", "tests"}
    assert {"test", "test-long", "test-tf517", "test-sglang"} <= {target for _, target in targets()}


def targets() -> list[tuple[str, str]]:
    """What jobs make, by workflow; a matrix gives its values."""
    found = []
    for path in WORKFLOWS:
        for job in jobs(path).values():
            values = job.get("strategy", {}).get("matrix", {}).get("target", [])
            for step in job["steps"]:
                found += [(path.stem, word) for word in re.findall(r"\bmake ([a-z0-9-]+)", step.get("run", ""))]
                found += [(path.stem, v) for v in values if "make ${{ matrix.target }}" in step.get("run", "")]
    return found


@pytest.mark.parametrize("target", sorted({target for _, target in targets()}))
def test_the_makefile_has_what_workflows_make(target: str) -> None:
    assert f"\n{target}:" in (WORKFLOWS[0].parents[2] / "Makefile").read_text()


@pytest.mark.parametrize(("job", "step", "words"), FUZZING)
def test_the_command_line_takes_the_command(
    job: Job, step: Job, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: click.Command = main
    depth = 0
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[depth])
        assert found is not None, words
        command, depth = found, depth + 1
    called: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "callback", lambda **options: called.append(options))
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, len(called)) == (0, 1), result.output


@pytest.mark.parametrize(("job", "step", "words"), FUZZING)
def test_the_databases_open(
    job: Job, step: Job, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(request: urllib.request.Request) -> None:
        raise URLError(f"not from a test: {request.full_url}")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.delenv("GITHUB_TOKEN", raising=False)
    if "GITHUB_TOKEN" in step.get("env", {}):
        monkeypatch.setenv("GITHUB_TOKEN", "a token")
    database = open_database(values(words, "--database"))
    database.save(b"key", b"value")
    assert list(database.fetch(b"key")) == [b"value"]


@pytest.mark.parametrize(("job", "step", "words"), FUZZING)
def test_what_the_command_leaves_is_uploaded(job: Job, step: Job, words: list[str]) -> None:
    folders = [d.removeprefix("dir:") for d in values(words, "--database") if d.startswith("dir:")]
    assert folders
    assert sorted(uploaded(job)) == sorted(folders + values(words, "--findings"))


@pytest.mark.parametrize(("job", "step", "words"), FUZZING)
def test_the_job_outlasts_the_command(job: Job, step: Job, words: list[str]) -> None:
    (minutes,) = values(words, "--minutes")
    # Setting up takes a while, and GitHub ends a job after six hours.
    assert float(minutes) + 30 <= job["timeout-minutes"] <= 360


@pytest.mark.parametrize(("path", "job", "step"), UPLOADS)
def test_uploads_happen_whatever_came_before(path: Path, job: Job, step: Job) -> None:
    # Where databases are only collected, a download that failed is not to replace the last whole one.
    fuzzes = any(commands(other.get("run", "")) for other in job["steps"])
    assert step.get("if") == ("always()" if fuzzes else None)
    options = step["with"]
    # Dot folders are left out unless asked for.
    assert options.get("include-hidden-files", False) == any(
        part.startswith(".") for part in Path(options["path"]).parts
    )
    # Nothing found is not a failure; a job that is run again finds the artifacts of its first try.
    assert (options["if-no-files-found"], options["overwrite"]) == ("ignore", True)
    # Jobs of one matrix cannot upload under one name.
    assert ("strategy" in job) == ("matrix." in options["name"])


def test_the_nightly_database_has_the_name_that_is_looked_for_and_no_other_run_uses_it() -> None:
    looked_for = GitHubArtifactDatabase("owner", "repository").artifact_name
    uploads = [param.values for param in UPLOADS if param.values[2]["with"]["name"] == looked_for]
    ((path, job, step),) = uploads
    assert path.stem == "fuzz-nightly"
    (download,) = (s for s in job["steps"] if s.get("uses", "").startswith("actions/download-artifact@"))
    assert download["with"]["merge-multiple"] is True
    assert download["with"]["path"] == step["with"]["path"]
    names = [p.values[2]["with"]["name"] for p in UPLOADS if p.values[2]["with"]["path"] == step["with"]["path"]]
    shards = [name for name in names if "matrix." in name]
    assert shards == [re.sub(r"\*$", "${{ matrix.shard }}", download["with"]["pattern"])]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_may_do_little_and_run_one_at_a_time(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    fuzzes = path.stem.startswith("fuzz")
    # To download what an earlier run has found.
    assert workflow["permissions"] == {"contents": "read", **({"actions": "read"} if fuzzes else {})}
    assert workflow["concurrency"]["group"]
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/none@v1"))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_for_issues_is_one_that_github_takes(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert set(form) == {"name", "description", "labels", "body"}
    assert all(element["type"] in ("markdown", "input", "textarea", "dropdown") for element in form["body"])
    asked = [element for element in form["body"] if element["type"] != "markdown"]
    assert all(element["attributes"]["label"] for element in asked)
    assert len({element["id"] for element in asked}) == len(asked)
    assert all(element["attributes"]["options"] for element in asked if element["type"] == "dropdown")
    # So that nobody sends an empty one.
    assert any(element.get("validations", {}).get("required") for element in asked)


@pytest.mark.parametrize("path", [*FORMS, ROOT / ".github/PULL_REQUEST_TEMPLATE.md"], ids=lambda path: path.stem)
def test_templates_name_pages_commands_and_targets_that_are_there(path: Path) -> None:
    text = path.read_text()
    for page in re.findall(r"\b(?:docs/)?[\w-]+\.md\b", text):
        assert (ROOT / page).is_file(), page
    for name, options in re.findall(r"`kv-canary (\w+)([^`]*)`", text):
        command = main.get_command(click.Context(main), name)
        assert command is not None, name
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[\w-]+", options)) <= known
    for target in re.findall(r"`make ([\w-]+)`", text):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
