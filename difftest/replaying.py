"""Saved cases run again, decoded, and made smaller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_canary.cases.casefile import CaseFile, case_file
from kv_canary.cases.comparison import Mismatch, Outcome
from kv_canary.cases.imports import check_imports
from kv_canary.difftest.decode import Difference, differences
from kv_canary.difftest.minimize import minimize
from kv_canary.difftest.worker import Executor, expect_device
from kv_canary.specs import get_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome of replaying a saved case: None where it no longer fails, and what differs where outputs do."""

    mismatch: Mismatch | None
    differences: list[Difference]

    def as_dict(self) -> dict[str, Any]:
        found = self.mismatch
        return {
            "fails": found is not None,
            "says": "" if found is None else str(found),
            "differences": [dataclasses.asdict(d) for d in self.differences],
        }


def replay_case(
    file: CaseFile,
    *,
    imports: Sequence[str] = (),
    device: str = "cpu",
    plant: str | None = None,
    most: int = 20,
    trace: bool = True,
) -> Replay:
    """Run a saved case again, in a process of its own, and decode what differs.

    Args:
        imports: Python files or modules to run there first, those among them that the case names.
        most: how many differences to decode.
        trace: find out which program wrote each, by one more launch, in the interpreter, in this process.

    Raises:
        ValueError: the case names code that is not among `imports`, of which none has run, or there is no such device
            or planted bug here.
    """
    _check_here(file, imports=imports, device=device, plant=plant)
    spec = get_spec(file.op)
    with Executor(device=device, imports=imports, plant=plant) as executor:
        mismatch = executor.check(spec, file.arguments)
    if mismatch is None or not mismatch.expected:
        return Replay(mismatch=mismatch, differences=[])
    fresh = dataclasses.replace(file, expected=mismatch.expected, got=mismatch.got)
    trace = trace and mismatch.outcome is Outcome.BYTES_DIFFER and mismatch.backend == "triton"
    if trace and plant is not None:
        from kv_canary.difftest.mutation.planted import planted

        with planted(plant):
            found = differences(spec, fresh, most=most)
    else:
        found = differences(spec, fresh, most=most, trace=trace)
    return Replay(mismatch=mismatch, differences=found)


def _check_here(file: CaseFile, *, imports: Sequence[str], device: str, plant: str | None) -> None:
    """See that a case can run here: what a process of its own cannot begin with is not the case's failure."""
    check_imports(file.imports, imports)
    expect_device(device)
    if plant is not None:
        from kv_canary.difftest.mutation.planted import find_planted

        find_planted(plant)


def minimize_case(
    file: CaseFile,
    *,
    imports: Sequence[str] = (),
    device: str = "cpu",
    plant: str | None = None,
    max_tries: int = 5000,
    on_progress: Callable[[int, int], None] | None = None,
) -> CaseFile | None:
    """Return the smallest case found that fails as this one does, or None where it does not fail here.

    Args:
        imports: Python files or modules to run first, those among them that the case names.
        max_tries: runs, at most.
        on_progress: told the runs so far and the size of the smallest case.

    Raises:
        ValueError: the case names code that is not among `imports`, of which none has run, or there is no such device
            or planted bug here.
    """
    _check_here(file, imports=imports, device=device, plant=plant)
    spec = get_spec(file.op)
    with Executor(device=device, imports=imports, plant=plant) as executor:
        first = executor.check(spec, file.arguments)
        if first is None:
            return None

        def still_fails(arguments: Mapping[str, Any]) -> bool:
            found = executor.check(spec, arguments)
            return found is not None and found.signature == first.signature

        arguments = minimize(spec, file.arguments, still_fails, max_tries=max_tries, on_progress=on_progress)
        mismatch = executor.check(spec, arguments)
    return case_file(spec, arguments, mismatch, facts=file.facts, imports=tuple(imports))
