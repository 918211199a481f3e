"""Mutants of kernels, references and the runtime: one small change each, which the tests must notice.

A mutant is made by syntax and applied by text: the syntax tree says where an expression stands, and only that
expression's text is replaced, so that the difference of the two sources is what a reviewer would see.
"""

from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_canary.difftest.mutation.edits import Edit, Kind, Source
from kv_canary.difftest.mutation.overlay import is_runtime, read_source, source_files

# What a reviewer looks for first. A statement gives up to two mutants of these kinds and one of the others, a call that
# stands alone on a line one in all, chosen by a checksum of the change: each is tried, and the number stays in reach.
TELLING = frozenset(
    {
        *(Kind.DROPPED_OPERAND, Kind.COMPARISON, Kind.DROPPED_STATEMENT, Kind.ASSIGNMENT),
        *(Kind.SCAN, Kind.TILE, Kind.CONDITION),
    }
)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed source.

    Args:
        file: which, as `kernels/<name>.py`, `reference/<name>.py` or `kv_canary/<...>.py`.
        function: the top-level function or the method that is changed, or "<module>".
        kind: what is changed.
        line: number of the first changed line.
        before, after: the changed lines' text, with white space squeezed.
        ordinal: which one it is of those with the same file, function, before and after.
        original, text: the whole file, before and after.
    """

    file: str
    function: str
    kind: Kind
    line: int
    before: str
    after: str
    ordinal: int
    original: str
    text: str

    @property
    def num_lines(self) -> int:
        """The number of lines of the original that are changed."""
        matcher = difflib.SequenceMatcher(a=self.original.splitlines(), b=self.text.splitlines(), autojunk=False)
        changed = [(first, end) for tag, first, end, _, _ in matcher.get_opcodes() if tag != "equal"]
        return max(1, changed[-1][1] - changed[0][0]) if changed else 1

    @property
    def id(self) -> str:
        """A name that stays while the changed lines stay, wherever in the function they move."""
        told = "\0".join((self.file, self.function, self.before, self.after, str(self.ordinal)))
        return f"{self.file}:{self.function}:{hashlib.sha256(told.encode()).hexdigest()[:8]}"

    @property
    def diff(self) -> str:
        """The unified diff."""
        lines = difflib.unified_diff(
            self.original.splitlines(), self.text.splitlines(), self.file, self.file, n=0, lineterm=""
        )
        return "\n".join(lines)


def make_mutants(files: Sequence[str] | None = None) -> list[Mutant]:
    """Return every mutant of `files`, or of all kernels and references, in the order of the sources.

    Raises:
        ValueError: a file is none that can be changed.
    """
    return [mutant for file in files or source_files() for mutant in mutants_of(file, read_source(file))]


@functools.cache
def mutants_of(file: str, original: str) -> tuple[Mutant, ...]:
    """Return every mutant of the source `original`, which is called `file`; no two of them read the same."""
    source = Source(original, runtime=is_runtime(file))
    seen = {original}
    ordinals: Counter[tuple[str, str, str]] = Counter()
    found = []
    for function, edit in _thinned(source):
        text = source.apply(edit)
        if text in seen or not source.parses(edit):
            continue
        seen.add(text)
        line, before, after = source.changed_lines(edit)
        ordinals[function, before, after] += 1
        mutant = Mutant(
            file=file,
            function=function,
            kind=edit.kind,
            line=line,
            before=before,
            after=after,
            ordinal=ordinals[function, before, after],
            original=original,
            text=text,
        )
        found.append(mutant)
    return tuple(found)


def _thinned(source: Source) -> Iterator[tuple[str, Edit]]:
    """Yield the edits that are kept of each statement, with the name of the top-level function around it."""
    for function, statement, edits in source.edits():
        bare = isinstance(statement, ast.Expr) and statement.lineno == statement.end_lineno
        telling = [edit for edit in edits if bare or edit.kind in TELLING]
        others = [edit for edit in edits if edit not in telling]
        for group, most in ((telling, 1 if bare else 2), (others, 1)):
            kept = sorted(group, key=lambda edit: zlib.crc32("".join(source.changed_lines(edit)[1:]).encode()))[:most]
            yield from ((function, edit) for edit in group if edit in kept)
