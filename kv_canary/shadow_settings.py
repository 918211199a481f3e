"""The environment's settings of the shadow backend."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kv_canary.errors import must_be
from kv_canary.settings import ENVIRONMENT, read_settings

PREFIX = f"{ENVIRONMENT}SHADOW_"


@dataclass(frozen=True, kw_only=True)
class ShadowSettings:
    """Settings of the shadow backend. Each can also come from the environment: `KV_CANARY_SHADOW_<FIELD>`.

    Args:
        every: compare each op's first launch, and every `every`-th after it.
        folder: where differences are saved.
        most_files: saved at most, so that a broken kernel does not fill a disk.

    Raises:
        TypeError, ValueError: naming the setting, what it must be and what came.
    """

    every: int = 100
    folder: Path = Path("kv-canary-shadow")
    most_files: int = 20

    def __post_init__(self) -> None:
        for name, low in (("every", 1), ("most_files", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(must_be("ShadowConfig", name, "an int", type(value).__name__))
            if value < low:
                raise ValueError(must_be("ShadowConfig", name, f"at least {low}", str(value)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return what the environment asks for.

        Raises:
            ValueError: a variable names no setting, or its text is none of the setting's values.
        """
        return cls(**read_settings(ShadowSettings, PREFIX, environ, {}))
