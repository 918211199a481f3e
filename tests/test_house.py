"""The house rules: one installed package, one file name and one signature per op, imports that run one way."""

from __future__ import annotations

import ast
import email
import graphlib
import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import yaml

import kv_canary
from kv_canary.backends import implementation
from kv_canary.specs import all_specs, get_spec

ROOT = Path(__file__).resolve().parents[1]
# Folder in the repository -> the package that it installs as.
PACKAGES = {
    "kv_canary": "kv_canary",
    "reference": "kv_canary.reference",
    "kernels": "kv_canary.kernels",
    "difftest": "kv_canary.difftest",
    "bench": "kv_canary.bench",
}
# What implementations may import, besides their own folder.
SHARED = ("kv_canary.specs", "kv_canary.constants", "kv_canary.errors", "kv_canary.backends")
IMPLEMENTATIONS = ("kv_canary.reference", "kv_canary.kernels", "kv_canary.difftest", "kv_canary.bench")
# A spec's file is told by what it defines, as the registry tells it.
OPS = sorted(path.stem for path in (ROOT / "kv_canary/specs").glob("*.py") if "\nSPEC = " in path.read_text())


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield what runs, or is read by a type checker, when the module is imported; function bodies are left out."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.stmt):
            yield node
        pending.extend(ast.iter_child_nodes(node))


def imported_by(path: Path, *, everywhere: bool) -> set[str]:
    """The modules, and names out of modules, that `path` imports: at module level, or in functions too."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else module_level(tree)
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def module_name(path: Path) -> str:
    folder, *parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGES[folder], *(part for part in parts if part != "__init__")])


def runtime_imports(path: Path, modules: Collection[str], *, types_too: bool = False) -> Iterator[str]:
    """Yield those of `modules` that `path` imports, in functions too; for a type checker alone, with `types_too`."""
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)
        pending.extend(ast.iter_child_nodes(node))


def inside(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def build_wheel(folder: Path, **environment: str) -> Path:
    """Build a wheel of a copy of the checkout."""
    made = (".pyc", ".so")
    found = (path for name in PACKAGES for path in (ROOT / name).rglob("*"))
    files = [path for path in found if path.suffix not in made and path.is_file()]
    # A copy, so that the build leaves nothing in the checkout.
    top = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
    for path in [*files, *(ROOT / name for name in top)]:
        copy = folder / "checkout" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-I", "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(folder / "checkout")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the checkout."""
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def wheel_names(wheel: zipfile.ZipFile) -> list[str]:
    return wheel.namelist()


def test_wheel_installs_one_top_level_package(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kv_canary"}


def test_what_a_registry_shows_is_the_readme_without_links_that_lead_nowhere(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    shown, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text()
    assert shown.startswith(readme.splitlines()[0])
    assert len(re.findall(r"\]\((?!https:)", readme)) > 8
    assert re.findall(r"\]\((?!https:)", shown) == []


def test_links_of_the_readme_are_made_absolute_where_the_repository_has_an_address() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = "[a](docs/a.md#b) ![c](c.svg) [d](https://x.org/d) [e](#e)"
    there = "https://x.org/k"
    absolute = f"[a]({there}/blob/HEAD/docs/a.md#b) ![c]({there}/raw/HEAD/c.svg) [d](https://x.org/d) [e](#e)"
    assert description(text, "https://x.org/k/") == absolute
    assert description(text, None) == "a c [d](https://x.org/d) [e](#e)"


def test_who_cites_it_cites_what_is_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert cited["version"] == project["version"] == kv_canary.__version__
    assert cited["license"] == project["license"]
    assert cited["keywords"] == project["keywords"]
    assert cited["authors"] == project["authors"]


def test_wheel_holds_every_module_but_mutants_and_campaigns(wheel_names: list[str]) -> None:
    expected = {
        PACKAGES[folder].replace(".", "/") + "/" + str(path.relative_to(ROOT / folder))
        for folder in PACKAGES
        for path in sources(folder)
        if not path.is_relative_to(ROOT / "difftest/mutation") and not path.is_relative_to(ROOT / "difftest/stress")
    }
    held = {name for name in wheel_names if name.endswith(".py")}
    assert (expected - held, held - expected) == (set(), set())
    assert "kv_canary/py.typed" in wheel_names


def test_what_is_compiled_serves_every_version_of_python(wheel: zipfile.ZipFile, wheel_names: list[str]) -> None:
    compiler = sysconfig.get_config_var("CC").split()[0]
    assert "-cp311-abi3-" in str(wheel.filename)
    held = [name for name in wheel_names if name.endswith(".so")]
    assert held == ["kv_canary/engines/sglang/_items.abi3.so"] or shutil.which(compiler) is None
    # The digests of results are of the source.
    assert "kv_canary/engines/sglang/_items.c" in wheel_names


@pytest.mark.long
def test_wheel_is_built_without_a_compiler(tmp_path: Path) -> None:
    names = zipfile.ZipFile(build_wheel(tmp_path, CC="false")).namelist()
    assert [name for name in names if name.endswith(".so")] == []
    assert "kv_canary/engines/sglang/items.py" in names


def test_spec_is_named_like_its_file() -> None:
    assert OPS
    assert set(OPS) <= set(all_specs())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("folder", ["kv_canary/specs", "reference", "kernels", "difftest/strategies"])
def test_op_has_one_file_name(op: str, folder: str) -> None:
    assert (ROOT / folder / f"{op}.py").is_file()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_implementation_has_the_signature_of_its_spec(op: str, backend: str) -> None:
    function: Callable[..., None] = implementation(op, backend)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == list(get_spec(op).arguments)
    # Defaults are the spec's alone: a call binds them all before it reaches an implementation.
    kinds = {(parameter.kind, parameter.default) for parameter in parameters.values()}
    assert kinds == {(inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty)}


@pytest.mark.parametrize("folder", ["reference", "kernels"])
def test_implementations_import_shared_parts_and_their_own_folder(folder: str) -> None:
    allowed = (*SHARED, PACKAGES[folder])
    foreign = {
        f"{name_of(path)}: {name}"
        for path in sources(folder)
        for name in imported_by(path, everywhere=True)
        if name.startswith("kv_canary") and not inside(name, allowed)
    }
    assert foreign == set()


def test_runtime_reaches_implementations_through_the_registry_only() -> None:
    direct = {
        f"{name_of(path)}: {name}"
        for path in sources("kv_canary")
        for name in imported_by(path, everywhere=False)
        if inside(name, IMPLEMENTATIONS)
    }
    assert direct == set()


def test_the_runtime_imports_nothing_of_the_tools_not_even_in_functions() -> None:
    tools = ("kv_canary.difftest", "kv_canary.bench")
    reached = {
        f"{name_of(path)}: {name}"
        for path in sources("kv_canary")
        for name in imported_by(path, everywhere=True)
        if inside(name, tools)
    }
    assert reached == set()


def test_no_module_imports_itself_by_way_of_others_not_even_in_functions() -> None:
    modules = {module_name(path): path for folder in PACKAGES for path in sources(folder)}
    sorter = graphlib.TopologicalSorter(
        {name: {found for found in runtime_imports(path, modules) if found != name} for name, path in modules.items()}
    )
    sorter.prepare()


def test_the_runtime_looks_down_only_not_even_a_type_looks_up() -> None:
    """So nothing below the manager knows of it, and nothing below a forward calls back into one by its class."""
    layered = ("runtime", "ranks", "reports", "observers", "perturb", "engines", "transfer", "tier")
    modules = {module_name(path): path for path in sources("kv_canary")}
    modules = {name: path for name, path in modules.items() if inside(name, tuple(f"kv_canary.{x}" for x in layered))}
    sorter = graphlib.TopologicalSorter(
        {
            name: {x for x in runtime_imports(path, modules, types_too=True) if x in modules and x != name}
            for name, path in modules.items()
        }
    )
    order = list(sorter.static_order())
    assert order.index("kv_canary.runtime.manager") > order.index("kv_canary.runtime.forward")


def test_what_was_raised_is_logged_by_one_rule() -> None:
    """So no text of an exception goes past `redact`."""
    past = {
        f"{name_of(path)}:{node.lineno}"
        for path in sources("kv_canary")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and path != ROOT / "kv_canary/output.py"
        if (isinstance(node.func, ast.Attribute) and node.func.attr == "exception")
        or any(keyword.arg == "exc_info" for keyword in node.keywords)
    }
    assert past == set()


def test_slots_of_the_host_come_to_the_device_by_one_rule() -> None:
    """A plain `to` waits for all that was launched, where the host's memory is not pinned."""
    owner = ROOT / "kv_canary/runtime/host.py"
    folders = (ROOT / "kv_canary/runtime", ROOT / "kv_canary/engines/vllm")
    files = [path for folder in folders for path in folder.glob("*.py")]
    files += [ROOT / "kv_canary/tier.py", ROOT / "kv_canary/transfer.py"]
    past = {
        f"{name_of(path)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        if path != owner and any("device" in ast.unparse(part) for part in (*node.args, *node.keywords))
        if not any(keyword.arg == "non_blocking" for keyword in node.keywords)
    }
    assert past == set()


def test_the_end_of_a_process_is_awaited_in_two_places() -> None:
    """One is of every process; the other leaves out those that were forked."""
    awaited = {
        name_of(path)
        for path in sources("kv_canary")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "atexit.register"
    }
    assert awaited == {"kv_canary/output.py", "kv_canary/engines/ending.py"}


def test_kernels_init_holds_a_docstring_only() -> None:
    body = ast.parse((ROOT / "kernels/__init__.py").read_text()).body
    assert [type(node) for node in body] == [ast.Expr]


def test_importing_the_package_imports_neither_triton_nor_an_engine() -> None:
    code = "import sys, kv_canary; print(*({'triton', 'transformers', 'vllm', 'sglang'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
