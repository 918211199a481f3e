"""The facts that every result holds about where it was measured."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kv_canary.commands.evidence import digests
from kv_canary.reports.versions import installed


def facts(device: torch.device | str, *, kind: str, commit: str | None = None) -> dict[str, Any]:
    """Return device, versions, commit, date and digests of the sources, JSON-ready.

    Args:
        device: that was measured on.
        kind: of result, of `kv_canary.commands.evidence.KINDS`.
        commit: what was measured; None: what git says of the checkout, or "unknown" where it is none.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {
        "device": name,
        "versions": {
            "kv-canary": installed("kv-canary"),
            "python": platform.python_version(),
            **{package: installed(package) for package in ("torch", "triton", "transformers", "numpy")},
        },
        "commit": commit or commit_of_checkout(),
        "date": datetime.now(UTC).date().isoformat(),
        "sources": digests(kind),
    }


def commit_of_checkout() -> str:
    """Return what git says of the checkout, or "unknown" where it is none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
