"""The settings of fault injection: what to damage, and when."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from kv_canary.errors import must_be
from kv_canary.settings import ENVIRONMENT, read_settings

Mode = Literal["req_to_token", "real_kv_used", "real_kv_unused_cache", "real_kv_post_forward", "next_token_swap"]
Half = Literal["", "K", "V"]
MODES: tuple[Mode, ...] = get_args(Mode)
HALVES: tuple[str, ...] = get_args(Half)
# Those that flip a bit of K or V.
BYTE_MODES = frozenset({"real_kv_used", "real_kv_unused_cache", "real_kv_post_forward"})

PREFIX = f"{ENVIRONMENT}PERTURB_"


@dataclass(frozen=True, kw_only=True)
class PerturbConfig:
    """A fault to inject. Each field can also come from the environment: `KV_CANARY_PERTURB_<FIELD>`.

    Args:
        mode: "req_to_token" swaps two entries of a request's table, for one forward; "real_kv_used" flips a bit of K or
            V, any bit of any layer, in a slot that a request is about to read; "real_kv_unused_cache" in one that the
            prefix cache holds and no request of the forward uses; "real_kv_post_forward" in one that was just written,
            behind TAIL; "next_token_swap" gives two requests each other's next token, for one forward.
        group: name of the group to damage; "" for any.
        half: "K" or "V", where a bit is to flip; "" for either.
        layer: where a bit is to flip, by its place in the group's pool; None for any.
        warm_up: steps before the first injection.
        every: steps between two injections.
        count: how many injections; 0: no end.
        covered_only: flip bits of those bytes only that the slot's record has a fingerprint of, which HEAD sees. Any
            other byte is seen by a scrub, and by that only where there are seals.
        seed: of what is chosen.

    Raises:
        TypeError, ValueError: naming the setting, what it must be and what came.
    """

    mode: Mode
    group: str = ""
    half: Half = ""
    layer: int | None = None
    warm_up: int = 10
    every: int = 1
    count: int = 1
    covered_only: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("half", HALVES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(must_be("PerturbConfig", name, f"one of {', '.join(map(repr, known))}", repr(value)))
        for name, low in (("layer", 0), ("warm_up", 0), ("every", 1), ("count", 0)):
            value = getattr(self, name)
            if name == "layer" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(must_be("PerturbConfig", name, "an int", repr(value)))
            if value < low:
                raise ValueError(must_be("PerturbConfig", name, f"at least {low}", str(value)))
        if not isinstance(self.covered_only, bool):
            raise TypeError(must_be("PerturbConfig", "covered_only", "a bool", repr(self.covered_only)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **settings: Any) -> Self | None:
        """Return what the environment asks for, or None where it names no mode.

        Raises:
            ValueError: a variable names no setting, or its text is none of the setting's values; or there are
                settings and no mode.
        """
        settings = read_settings(cls, PREFIX, environ, settings)
        if not settings:
            return None
        if "mode" not in settings:
            raise ValueError(f"kv-canary: environment: {PREFIX}MODE must be given with {', '.join(sorted(settings))}")
        return cls(**settings)
