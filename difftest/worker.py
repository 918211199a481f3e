"""A process that runs cases for another one: a kernel that crashes or hangs costs that process, not the campaign."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, Self

import torch

from kv_canary.backends import interpreting
from kv_canary.cases.casefile import decode, encode
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.difftest.autotuned import never_time
from kv_canary.difftest.interpreter import quicken
from kv_canary.difftest.patience import Patience
from kv_canary.difftest.runner import check_case
from kv_canary.errors import must_be
from kv_canary.specs import all_specs, get_spec
from kv_canary.specs.interface import KernelSpec

# Seconds of a core: longer than any case takes, compilation included.
TIME_LIMIT_S = 120.0


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported, because it decides then whether to interpret."""
    return importlib.util.find_spec("triton") is not None


def import_all(names: Sequence[str]) -> None:
    """Import the Python files and modules that register ops.

    Raises:
        ValueError: one cannot be imported.
    """
    for name in names:
        try:
            _import_one(name)
        except (ImportError, FileNotFoundError) as error:
            expected = "a Python file or module that can be imported"
            raise ValueError(must_be("difftest", "import", expected, f"{name!r} ({error})")) from error


def _import_one(name: str) -> None:
    if not name.endswith(".py"):
        importlib.import_module(name)
        return
    path = Path(name).resolve()
    # One name for one file: a second import of it does nothing.
    module_name = f"kv_canary_imported_{path.stem}_{abs(hash(str(path)))}"
    if module_name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


class Executor:
    """Runs the differential check of one case after another in a process of its own, restarted where a case kills it.

    Args:
        device: where Triton runs, "cpu" (its interpreter) or "cuda".
        imports: Python files or modules that register ops; it runs these, and none that a case file names.
        plant: name of a planted bug that the process runs with, or None.
        time_limit_s: seconds of a core that a case may take.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        imports: Sequence[str] = (),
        plant: str | None = None,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.device, self.imports, self.plant, self.time_limit_s = device, tuple(imports), plant, time_limit_s
        self.restarts = 0
        # Ops that were seen to hang twice in the same call.
        self._hang: set[str] = set()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._last_words: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, spec: KernelSpec, arguments: Mapping[str, Any]) -> Mismatch | None:
        """Run `check_case` there; return how it failed, or None. What hangs is run once more before that is believed.

        Raises:
            ValueError, TypeError: the call is refused.
        """
        found = self._check(spec, arguments)
        if found is not None and found.outcome is Outcome.HUNG and spec.name not in self._hang:
            found = self._check(spec, arguments)
            if found is not None and found.outcome is Outcome.HUNG:
                self._hang.add(spec.name)
        return found

    def _check(self, spec: KernelSpec, arguments: Mapping[str, Any]) -> Mismatch | None:
        pipe = self._start()
        try:
            pipe.send_bytes(pickle.dumps((spec.name, _to_numpy(encode(spec, spec.bind(arguments))))))
            patience = Patience(self._pid, self.time_limit_s)
            while not pipe.poll(min(self.time_limit_s, 1.0)):
                if patience.over:
                    self._stop()
                    detail = f"{self.time_limit_s:.0f} s of a core"
                    return Mismatch(Outcome.HUNG, op=spec.name, backend="triton", detail=detail)
            answer = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError, BrokenPipeError):
            exit_code, where = self._stop()
            detail = f"exit code {exit_code}" + (f", in {where}" if where else "")
            return Mismatch(Outcome.CRASHED, op=spec.name, backend="triton", detail=detail)
        if isinstance(answer, Exception):
            raise answer
        if answer is None:
            return None
        fields = {**answer, "expected": _to_torch(answer["expected"]), "got": _to_torch(answer["got"])}
        found = Mismatch(Outcome[fields.pop("outcome")], op=spec.name, **fields)
        if self.device == "cuda" and found.outcome is Outcome.RAISED:
            # After an illegal address nothing else works in that process.
            self._stop()
        return found

    def close(self) -> None:
        """End the process."""
        self._stop()

    def _start(self) -> Connection:
        if self._process is None or self._pipe is None or not self._process.is_alive():
            if self._process is not None:
                self._stop()
            context = _context(self.device)
            self._pipe, theirs = context.Pipe()
            handle, name = tempfile.mkstemp(prefix="kv-canary-", suffix=".crash")
            os.close(handle)
            self._last_words = Path(name)
            arguments = (theirs, self.device, self.imports, self.plant, name)
            self._process = context.Process(target=_serve, args=arguments, daemon=True)  # type: ignore[attr-defined]
            self._process.start()
            theirs.close()
        return self._pipe

    @property
    def _pid(self) -> int:
        return 0 if self._process is None else self._process.pid or 0

    def _stop(self) -> tuple[int | None, str]:
        """End the process; return its exit code and the line that it crashed in, if it did."""
        process, self._process = self._process, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if process is None:
            return None, ""
        process.join(timeout=1.0)
        self.restarts += 1
        exit_code, where = process.exitcode, ""
        if process.is_alive():
            process.kill()
            process.join()
        if self._last_words is not None:
            where = _crashed_in(self._last_words.read_text(encoding="utf-8", errors="replace"))
            self._last_words.unlink()
            self._last_words = None
        return exit_code, where


def _context(device: str) -> BaseContext:
    """Return how the process is made: on the CPU it is forked from one that has imported everything, which is quick."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Kernels are imported beforehand only where they become what the process needs them to be.
    kernels = [f"kv_canary.kernels.{op}" for op in all_specs()] if interpreting() and has_triton() else []
    context.set_forkserver_preload([__name__, *(k for k in kernels if importlib.util.find_spec(k) is not None)])
    return context


def _crashed_in(traceback: str) -> str:
    """Return the innermost line of what a crash left behind that is not PyTorch's or Triton's: file, line, function."""
    for path, line, function in re.findall(r'File "(.+?)", line (\d+) in (\S+)', traceback):
        if not re.search(r"(site|dist)-packages/(numpy|torch|triton)/", path):
            return f"{'/'.join(Path(path).parts[-2:])}:{line} ({function})"
    return ""


def _serve(pipe: Connection, device: str, imports: Sequence[str], plant: str | None, last_words: str) -> None:
    """The process: read a case, check it, answer; until the pipe closes."""
    import signal

    # Never closed: what a crash leaves behind is written to it.
    faulthandler.enable(open(last_words, "w"), all_threads=False)  # noqa: SIM115

    # Ctrl-C, and what ends a whole group of processes, is for the process that started us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    prepare(device)
    if interpreting() and has_triton():
        quicken()
        never_time()
    import_all(imports)
    if plant is not None:
        from kv_canary.difftest.mutation.planted import plant as plant_bug

        plant_bug(plant)
    while True:
        try:
            op, encoded = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(pickle.dumps(_answer(op, encoded, device)))


def _answer(op: str, encoded: dict[str, Any], device: str) -> dict[str, Any] | Exception | None:
    try:
        spec = get_spec(op)
        check_case(spec, decode(spec, _to_torch(encoded)), device=device)
    except Mismatch as found:
        return {
            "outcome": found.outcome.name,
            "backend": found.backend,
            "path": found.path,
            "detail": found.detail,
            "expected": _to_numpy(found.expected),
            "got": _to_numpy(found.got),
        }
    except Exception as error:
        # A fault of the harness or of the call, not of a kernel: it belongs to whoever asked.
        return type(error)(str(error)) if isinstance(error, ValueError | TypeError) else RuntimeError(repr(error))
    return None


def prepare(device: str) -> None:
    """Set this process up to run kernels on `device`; before any kernel is imported."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)
        return
    expect_device(device)
    os.environ["TRITON_INTERPRET"] = "0"


def expect_device(device: str) -> None:
    """See that kernels can run on `device` here; ValueError where they cannot."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("kv-canary: difftest: device must be one that is here, got 'cuda' on a machine without a GPU")


def _to_numpy(value: Any) -> Any:
    """Tensors inside `value` as arrays, which travel faster."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {name: _to_numpy(each) for name, each in value.items()}
    return [_to_numpy(each) for each in value] if isinstance(value, list) else value


def _to_torch(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_torch(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_to_torch(each) for each in value]
    return torch.from_numpy(value) if hasattr(value, "__array_interface__") else value
