"""The shadow backend: Triton's result is served, a difference is seen, saved and replayed."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import kv_canary as kc
from kv_canary import backends, ops, shadow
from kv_canary.cases.casefile import load
from kv_canary.cases.comparison import Mismatch
from kv_canary.difftest.memory import guarded
from kv_canary.difftest.runner import check_case
from kv_canary.specs import all_specs, get_spec


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path) -> Iterator[None]:
    shadow.configure(shadow.ShadowConfig(every=1, folder=tmp_path))
    yield
    shadow.configure()


def scatter_call(device: torch.device) -> dict[str, Any]:
    return {
        "flat": torch.arange(10, 16, device=device),
        "offsets": torch.tensor([0, 2, 6], device=device),
        "rows": torch.tensor([1, 2], device=device),
        "pool": torch.zeros(3, 8, dtype=torch.int32, device=device),
        "status": torch.zeros(1, dtype=torch.int32, device=device),
    }


@pytest.fixture
def _broken_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    right = backends.implementation("scatter_token_ids", "triton")

    def wrong(**arguments: Any) -> None:
        right(**arguments)
        arguments["pool"][2, 1] += 1

    monkeypatch.setitem(backends._implementations, ("scatter_token_ids", "triton"), wrong)


@pytest.mark.parametrize("op", all_specs())
def test_serves_what_triton_gives_and_finds_nothing(
    op: str, device: torch.device, quick_cases: Callable[[str], Any]
) -> None:
    spec = get_spec(op)

    @settings(max_examples=min(10, max(1, settings.default.max_examples // 6)))
    @given(case=quick_cases(op))
    def agree(case: dict[str, Any]) -> None:
        bound = spec.bind(case)
        left = []
        for backend in ("triton", "shadow"):
            call, spans = guarded(spec, bound, device=device, fill=1)
            ops_call = {name: value for name, value in call.items() if name in spec.arguments}
            getattr(ops, op)(**ops_call, backend=backend)
            left.append({s.leaf.path: s.data for s in spans if s.leaf.role in ("out", "inout")})
        # Rings in another order are equal too, so only what has an order is compared here.
        for path, data in left[0].items():
            if not path.endswith(".ring"):
                assert torch.equal(data, left[1][path]), path

    agree()
    summary = shadow.summary()
    assert summary.compared[op] == summary.launches[op] > 0
    assert not summary.differences


@pytest.mark.usefixtures("_broken_scatter")
def test_a_difference_is_logged_saved_and_replays(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = scatter_call(device)
    with caplog.at_level(logging.ERROR, "kv_canary"):
        ops.scatter_token_ids(**call, backend="shadow")
    # What Triton wrote is what the engine gets.
    assert call["pool"][2].tolist()[:4] == [12, 14, 14, 15]
    summary = shadow.summary()
    assert summary.differences == {"scatter_token_ids": 1}
    (file,) = summary.files
    assert f"kv-canary difftest replay {file}" in caplog.text
    assert "[2, 1]: expected 13, got 14" in caplog.text
    saved = load(file)
    assert saved.path == "pool"
    # The call as it was before the launch, so that it fails again, and not once the kernel is right again.
    assert not saved.arguments["pool"].any()
    with pytest.raises(Mismatch):
        check_case(get_spec(saved.op), saved.arguments, device=device)
    monkeypatch.undo()
    check_case(get_spec(saved.op), saved.arguments, device=device)


@pytest.mark.usefixtures("_broken_scatter")
def test_what_is_saved_is_its_owners_alone_and_whole(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made" / "here"
    shadow.configure(shadow.ShadowConfig(every=1, folder=folder))
    before = os.umask(0o022)
    try:
        ops.scatter_token_ids(**scatter_call(device), backend="shadow")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    ops.scatter_token_ids(**scatter_call(device), backend="shadow")
    assert list(folder.iterdir()) == [file]


def test_what_a_comparison_raises_is_said_without_its_text(
    device: torch.device, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(**_: object) -> None:
        raise ValueError("token 774411")

    monkeypatch.setitem(backends._implementations, ("scatter_token_ids", "reference"), breaks)
    ops.scatter_token_ids(**scatter_call(device), backend="shadow")
    assert "scatter_token_ids could not be compared" in caplog.text
    assert "ValueError" in caplog.text
    assert "774411" not in caplog.text


@pytest.mark.usefixtures("_broken_scatter")
def test_only_every_nth_launch_is_compared(device: torch.device, tmp_path: Path) -> None:
    shadow.configure(shadow.ShadowConfig(every=3, folder=tmp_path))
    for _ in range(7):
        ops.scatter_token_ids(**scatter_call(device), backend="shadow")
    assert shadow.summary().launches == {"scatter_token_ids": 7}
    assert shadow.summary().compared == {"scatter_token_ids": 3}


@pytest.mark.usefixtures("_broken_scatter")
def test_a_full_folder_and_a_failing_handler_stop_nothing(device: torch.device, tmp_path: Path) -> None:
    seen = []

    def handler(mismatch: Mismatch, file: Path | None) -> None:
        seen.append(file)
        raise RuntimeError("no thanks")

    shadow.configure(shadow.ShadowConfig(every=1, folder=tmp_path, most_files=1, on_difference=handler))
    for _ in range(3):
        ops.scatter_token_ids(**scatter_call(device), backend="shadow")
    assert [file is not None for file in seen] == [True, False, False]
    assert len(list(tmp_path.iterdir())) == 1


def test_of_a_large_pool_only_the_named_rows_are_saved(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows, width = 1 << 14, 2048
    layer = torch.arange(rows, device=device, dtype=torch.int64)[:, None].repeat(1, width // 8).view(torch.uint8)
    source = kc.KvSource(layers=(layer.view(rows, width),), page_size=1, bytes_per_token=width)
    plan = kc.VerifyPlan.allocate(verify_cap=2, device=device)
    plan.slots[:] = torch.tensor([70, 9000])
    plan.num_valid[0] = 2
    # Too large for the numbers in it to be taken for names of rows.
    records = torch.ones((shadow.WHOLE_BYTES >> 5) + 1, 4, dtype=torch.int64, device=device)
    records[5] = 71
    call = {
        "verify_plan": plan,
        "endpoint": kc.Endpoint(tag=0, records=records, k_source=source),
        "step": torch.ones(1, dtype=torch.int64, device=device),
        "violations": kc.ViolationLog.allocate(ring_cap=8, device=device),
        "counters": torch.zeros(6, 2, dtype=torch.int64, device=device),
    }
    right = backends.implementation("verify", "triton")

    def wrong(**arguments: Any) -> None:
        right(**arguments)
        arguments["counters"][0, 0] += 1

    monkeypatch.setitem(backends._implementations, ("verify", "triton"), wrong)
    ops.verify(**call, backend="shadow")
    (file,) = shadow.summary().files
    assert file.stat().st_size < 2 << 20
    saved = load(file).arguments["endpoint"].k_source.layers[0]
    assert torch.equal(saved[[70, 9000]], layer.view(rows, width)[[70, 9000]].cpu())
    assert not saved[71].any()


def test_what_a_graph_captures_is_counted_as_not_compared(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    call = scatter_call(device)
    ops.scatter_token_ids(**call, backend="shadow")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.scatter_token_ids(**call, backend="shadow")
    graph.replay()
    assert shadow.summary().not_comparable == {"scatter_token_ids": 1}
    assert not shadow.summary().differences


@pytest.mark.parametrize(("name", "value", "error"), [("every", 0, ValueError), ("every", True, TypeError)])
def test_bad_configuration(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        shadow.ShadowConfig(**{name: value})


def test_the_environment_configures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CANARY_SHADOW_EVERY", "often")
    with pytest.raises(ValueError, match="KV_CANARY_SHADOW_EVERY must be int, got 'often'"):
        shadow.ShadowConfig.from_env()
    monkeypatch.setenv("KV_CANARY_SHADOW_EVERY", "7")
    monkeypatch.setenv("KV_CANARY_SHADOW_FOLDER", "found")
    monkeypatch.setenv("KV_CANARY_SHADOW_MOST_FILES", "3")
    found = shadow.ShadowConfig.from_env()
    assert (found.every, found.folder, found.most_files, found.on_difference) == (7, Path("found"), 3, None)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("EVRY", r"did you mean KV_CANARY_SHADOW_EVERY\?"),
        ("ON_DIFFERENCE", "must be a known setting, got an unknown one"),
    ],
)
def test_the_environment_may_not_say_what_is_no_setting(monkeypatch: pytest.MonkeyPatch, name: str, says: str) -> None:
    monkeypatch.setenv(f"KV_CANARY_SHADOW_{name}", "3")
    with pytest.raises(ValueError, match=f"KV_CANARY_SHADOW_{name} .*{says}"):
        shadow.ShadowConfig.from_env()


FOREIGN = """
import logging, sys
import torch
import kv_canary as kc
from kv_canary import ops
from kv_canary import shadow
from kv_canary.specs.interface import KernelSpec, TensorSpec

SPEC = KernelSpec(name="foreign", doc="Copy.", arguments={
    "x": TensorSpec(dtype=torch.int64, shape=("n",)),
    "y": TensorSpec(dtype=torch.int64, shape=("n",), role="out"),
})

@kc.register(SPEC, backend="reference")
def reference(*, x, y):
    y.copy_(x)

@kc.register(SPEC, backend="triton")
def triton(*, x, y):
    y.copy_(x + 1)

if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    ops.foreign(x=torch.arange(3), y=torch.zeros(3, dtype=torch.int64), backend="shadow")
"""


@pytest.mark.long
def test_a_case_of_an_op_from_outside_names_its_code_and_replays(tmp_path: Path) -> None:
    script = tmp_path / "foreign.py"
    script.write_text(FOREIGN)
    environment = {**os.environ, "KV_CANARY_SHADOW_FOLDER": str(tmp_path / "found"), "KV_CANARY_SHADOW_EVERY": "1"}
    options: dict[str, Any] = {"env": environment, "cwd": tmp_path, "capture_output": True, "text": True}
    served = subprocess.run([sys.executable, str(script)], check=True, **options)
    found = re.search(r"replay it with: kv-canary (.*)$", served.stderr, re.MULTILINE)
    assert found is not None, served.stderr
    line = shlex.split(found[1])
    assert line[-2:] == ["--import", str(script)]
    program = str(Path(sys.executable).with_name("kv-canary"))
    again = subprocess.run([program, *line], check=False, **options)
    assert again.returncode == 1, again.stdout + again.stderr
    assert subprocess.run([program, *line[:-2]], check=False, **options).returncode == 2
