"""Changed sources of kernels/ or reference/, loaded beside the real ones and put in their place in the registry.

The whole package is loaded anew from a folder of its own, under a name of its own: a changed helper is seen by every op
that imports it, and nothing that was compiled from another source (.pyc, source lines, kernels) can be taken for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import linecache
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kv_canary import backends
from kv_canary.errors import must_be
from kv_canary.specs import all_specs

# Folder of the sources -> the backend that they implement, and the package that they install as.
FOLDERS = {"kernels": ("triton", "kv_canary.kernels"), "reference": ("reference", "kv_canary.reference")}

ROOT = Path(__file__).resolve().parents[2]
# The runtime: what runs in an engine's process. An adapter that takes an environment of its own is not among it.
RUNTIME = (
    "kv_canary",
    *(
        f"kv_canary/{part}"
        for part in ("cases", "engines", "observers", "perturb", "ranks", "reports", "runtime", "specs")
    ),
)
_COMMANDS = ("kv_canary/cli.py", "kv_canary/__main__.py")

_numbers = itertools.count()


def source_files() -> list[str]:
    """Return every kernel and reference, as `kernels/<name>.py` or `reference/<name>.py`."""
    files = [f"{folder}/{path.name}" for folder in FOLDERS for path in sorted(_location(folder).glob("*.py"))]
    return [file for file in files if not file.endswith("/__init__.py")]


def runtime_files() -> list[str]:
    """Return every source of the runtime, as `kv_canary/<...>.py`."""
    files = [f"{folder}/{path.name}" for folder in RUNTIME for path in sorted((ROOT / folder).glob("*.py"))]
    return [file for file in files if not file.endswith("/__init__.py") and file not in _COMMANDS]


def is_runtime(file: str) -> bool:
    """Whether a source is the runtime's, whose tests judge it, and no kernel or reference."""
    return file.startswith("kv_canary/")


def read_source(file: str) -> str:
    """Return the text of one of `source_files()` or `runtime_files()`.

    Raises:
        ValueError: it is none of them.
    """
    known = runtime_files() if is_runtime(file) else source_files()
    if file not in known:
        raise ValueError(must_be("difftest", "file", f"one of {', '.join(known)}", repr(file)))
    if is_runtime(file):
        return (ROOT / file).read_text(encoding="utf-8")
    folder, name = file.split("/")
    return (_location(folder) / name).read_text(encoding="utf-8")


def reached_ops(file: str) -> list[str]:
    """Return the ops whose implementation imports `file`, or is in it."""
    folder, name = file.split("/")
    package = FOLDERS[folder][1]
    imported: dict[str, set[str]] = {}
    for path in _location(folder).glob("*.py"):
        found = re.findall(rf"^from {re.escape(package)}\.(\w+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        imported[path.stem] = set(found)

    def reaches(module: str) -> bool:
        return f"{module}.py" == name or any(reaches(inner) for inner in imported.get(module, ()))

    return [op for op in all_specs() if op in imported and reaches(op)]


def load(file: str, text: str, folder: Path) -> dict[tuple[str, str], backends.Implementation]:
    """Load `file`'s package with `text` in its place, from the empty or missing `folder`.

    Returns:
        The implementations, by op and backend.

    Raises:
        RuntimeError: something of the real package is still in use.
        Exception: whatever the changed source raises when it is imported.
    """
    kind, name = file.split("/")
    backend, package = FOLDERS[kind]
    alias = f"kv_canary_overlay_{next(_numbers)}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in _location(kind).glob("*.py"):
        content = text if path.name == name else path.read_text(encoding="utf-8")
        renamed = re.sub(rf"^from {re.escape(package)}\b", f"from {alias}", content, flags=re.MULTILINE)
        (folder / path.name).write_text(renamed, encoding="utf-8")
    wrote_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()
        _import_package(alias, folder)
        ops = [op for op in all_specs() if (folder / f"{op}.py").exists()]
        found = {(op, backend): getattr(importlib.import_module(f"{alias}.{op}"), op) for op in ops}
        _prove_replaced(alias, package, folder, Path(name).stem)
        return found
    finally:
        sys.dont_write_bytecode = wrote_bytecode


@contextmanager
def overlaid(file: str, text: str) -> Iterator[None]:
    """Make the registry serve the package of `file` with `text` in its place, inside the `with` block."""
    with tempfile.TemporaryDirectory(prefix="kv-canary-overlay-") as folder:
        changed = load(file, text, Path(folder, file.split("/")[0]))
        before = dict(backends._implementations)
        backends._implementations.update(changed)
        try:
            yield
        finally:
            backends._implementations.clear()
            backends._implementations.update(before)


def _import_package(alias: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        alias, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise RuntimeError(must_be("difftest", "overlay", "a package", str(folder)))
    sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[alias])


def _prove_replaced(alias: str, package: str, folder: Path, changed: str) -> None:
    """Check that the changed module was loaded, from `folder`, and that nothing there is the real package's."""
    modules = {n.removeprefix(f"{alias}."): m for n, m in sys.modules.items() if n.startswith(f"{alias}.")}
    if changed not in modules:
        raise RuntimeError(must_be("difftest", f"overlay of {package}.{changed}", "imported by an op", "by none"))
    for name, module in modules.items():
        part = f"overlay of {package}.{name}"
        path = folder / f"{name}.py"
        if module.__file__ != str(path) or "".join(linecache.getlines(str(path))) != path.read_text(encoding="utf-8"):
            raise RuntimeError(must_be("difftest", part, f"loaded from {path}", str(module.__file__)))
        for value in vars(module).values():
            home = getattr(getattr(value, "fn", value), "__module__", None) or ""
            if home == package or home.startswith(f"{package}."):
                raise RuntimeError(must_be("difftest", part, "free of the real package", home))


def _location(folder: str) -> Path:
    spec = importlib.util.find_spec(FOLDERS[folder][1])
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(must_be("difftest", FOLDERS[folder][1], "installed", "none"))
    return Path(next(iter(spec.submodule_search_locations)))
