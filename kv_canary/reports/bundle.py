"""Bundles: an incident and all that is known of it in one file, for `kv-canary report`."""

from __future__ import annotations

import dataclasses
import json
import os
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kv_canary.errors import must_be
from kv_canary.private_file import new_file
from kv_canary.reports.from_json import from_plain
from kv_canary.reports.incidents import Incident
from kv_canary.reports.neighbourhood import Neighbourhood
from kv_canary.reports.report import ViolationReport

FORMAT = "kv-canary-bundle"
VERSION = 1
# Files that one canary writes at most.
MOST_BUNDLES = 64
# Reports and raw violation rows that a bundle holds at most.
MOST_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """An incident, and all that was known of it when it was new.

    Args:
        format, version: FORMAT, and VERSION of this file's layout; a newer one is refused.
        written: when, UTC, ISO 8601.
        incident: with its neighbourhood.
        reports: of its violations, the first ones.
        rows: the raw violation rows of these, 16 words each; see docs/data-layout.md.
        timeline: the request's slots further around: which token lies where, who wrote it and when.
        config: the canary's configuration.
        versions: of Python and packages; None: not installed.
        summary: what the canary had done by then.
    """

    format: str = FORMAT
    version: int = VERSION
    written: str
    incident: Incident
    reports: tuple[ViolationReport, ...]
    rows: tuple[tuple[int, ...], ...]
    timeline: Neighbourhood | None
    config: dict[str, Any]
    versions: dict[str, str | None]
    summary: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Return the bundle as JSON-ready values."""
        return dataclasses.asdict(self)


class BundleFolder:
    """The folder of a canary's bundles: at most MOST_BUNDLES files, each written whole or not at all.

    A bundle names requests and holds their token ids: files are readable by their owner only.

    Args:
        folder: made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Ranks and restarts may share the folder.
        self._run = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._reserved = 0

    @property
    def is_full(self) -> bool:
        """Whether as many bundles as there may be were saved, or are about to be."""
        return self._reserved >= MOST_BUNDLES

    def reserve(self) -> None:
        """Count a bundle that is about to be saved."""
        self._reserved += 1

    def give_back(self) -> None:
        """Count one less: it could not be saved."""
        self._reserved -= 1

    def save(self, bundle: Bundle) -> Path:
        """Write a bundle; return its path.

        Raises:
            OSError: it cannot be written; then nothing is left of it.
        """
        text = json.dumps(bundle.as_dict(), indent=1, default=str) + "\n"
        path = self._folder / f"incident-{self._run}-{bundle.incident.number:04d}.json"
        with new_file(path) as file:
            file.write(text.encode())
        return path


def read_bundle(path: Path) -> Bundle:
    """Return the bundle in a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no bundle, or one of a newer version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(must_be("report", str(path), "a bundle, which is JSON", str(error))) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = f"format {data.get('format')!r}" if isinstance(data, dict) else type(data).__name__
        raise ValueError(must_be("report", str(path), f"a bundle of format {FORMAT!r}", got))
    if data.get("version") != VERSION:
        expected = f"a bundle of version {VERSION}, which this kv-canary reads"
        raise ValueError(must_be("report", str(path), expected, repr(data.get("version"))))
    try:
        return from_plain(Bundle, data)
    except ValueError as error:
        raise ValueError(must_be("report", str(path), "a whole bundle", f"one in which {error}")) from error


def utc_now() -> str:
    """Return the time, UTC, ISO 8601, in seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
