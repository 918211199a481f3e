"""What the extras of this package bring, for messages that say what to install."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

PACKAGE = "kv-canary"
_EXTRA = re.compile(r"""^(?P<requirement>[^;]+);.*\bextra == ["'](?P<extra>[\w.-]+)["']""")


def install_command(*extras: str) -> str:
    """Return the command that installs what `extras` of kv-canary bring.

    It names the packages that are missing, never kv-canary itself: what is installed here came from a checkout or a
    wheel, and what a registry has under that name may be somebody else's.
    """
    # Not at the top: help would wait for it.
    from importlib.metadata import PackageNotFoundError, requires

    try:
        requirements: Iterable[str] = requires(PACKAGE) or ()
    except PackageNotFoundError:
        requirements = ()
    # The checkout's own where that runs without having been installed.
    wanted = _brought_by(extras, requirements) or [f".[{','.join(extras)}]"]
    return f"pip install {shlex.join(wanted)}"


def _brought_by(extras: Iterable[str], requirements: Iterable[str]) -> list[str]:
    """Return the requirements of `extras`, in their order, each once."""
    parsed = [match for match in map(_EXTRA.match, requirements) if match]
    return list(
        dict.fromkeys(match["requirement"].strip() for extra in extras for match in parsed if match["extra"] == extra)
    )
