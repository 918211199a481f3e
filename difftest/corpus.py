"""The committed corpus: calls that once failed somewhere, kept as case files, which must never fail again."""

from __future__ import annotations

from pathlib import Path

from kv_canary.cases.casefile import MOST_BYTES, SUFFIX, CaseFile, load, save

FOLDER = Path(__file__).parent / "corpus"


def entries(folder: Path = FOLDER) -> list[Path]:
    """Return the case files of the corpus, in order of name."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def add(path: Path, *, folder: Path = FOLDER, name: str | None = None, most_bytes: int = MOST_BYTES) -> Path:
    """Put a copy of a case file into the corpus, without the wrong output; return where it went.

    Raises:
        ValueError: `path` is no case file, or one of more than `most_bytes`, or another one has that name.
    """
    file = load(path, most_bytes=most_bytes)
    target = folder / f"{name or path.stem}{SUFFIX}"
    if target.exists():
        raise ValueError(f"kv-canary: corpus: name must be new, got {target.stem!r}")
    # What it was is enough to know; the outputs would be those of a kernel that is no more.
    save(CaseFile(**{**vars(file), "expected": {}, "got": {}}), target)
    return target
