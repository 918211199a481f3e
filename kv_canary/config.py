"""The settings that an operator can choose, by argument or by environment."""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import os
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from kv_canary.constants import BACKENDS
from kv_canary.errors import must_be
from kv_canary.perturb_settings import PerturbConfig
from kv_canary.settings import ENVIRONMENT, kinds_of, nearest, read_settings
from kv_canary.shadow_settings import ShadowSettings

Mode = Literal["log", "raise", "off"]
Records = Literal["one", "head_and_tail"]
Seals = Literal["layer", "model", "off"]
T = TypeVar("T")


def _with_names_checked(cls: type[T]) -> type[T]:
    """Have a class say which setting may be meant where one that it has not is given."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: T, *args: Any, **settings: Any) -> None:
        check_names("CanaryConfig", "arguments", settings)
        made(self, *args, **settings)

    setattr(cls, "__init__", init)  # noqa: B010
    return cls


@_with_names_checked
@dataclass(frozen=True, kw_only=True)
class CanaryConfig:
    """The canary's settings. Each field can also come from the environment: `KV_CANARY_<FIELD>`, see `from_env`.

    Args:
        mode: "log" reports violations and goes on; "raise" also raises `CanaryViolationError`, at the next step; "off"
            watches nothing.
        backend: "reference" for debugging, "triton" for production; None or "auto" chooses by device.
        read_bytes: bytes of each token's K, and of its V, that are fingerprinted; which layer and window, the
            position decides, once and for all. A whole token's bytes or more cover one layer wholly.
        verify_bytes_at_tail: fingerprint the cached K/V bytes again after the forward, not only before it.
        records: "one" record buffer for HEAD and TAIL; or "head_and_tail", two, of which HEAD's goes first and TAIL's
            last in the buffer lists of a transfer, so that one cut short is seen whichever end it lost.
        seals: keep a hash of every byte of each slot, and go round the pools verifying them: "layer" tells layers
            apart, as far as records and seals stay below 0.3 % of the pool; "model" takes all of them together; "off".
            None: "layer" on a GPU where `track_lifetime` is on, and with `check_writes`; else "off": on a CPU it takes
            as long as a model.
        shared_seals: make seals that other processes can hold the bytes against, where KV is handed from one to
            another, through storage too; nobody outside can make bytes that fit the others. None: where there are two
            records, and where an adapter sees that pages go to storage.
        scrub_share: share of the time that going round the pools may take; one slot at a time at 0.
        admission: where seals are kept, hold a request's cached prefix against them before its first forward.
        completion: likewise, hold all that a request rested on against them when it has ended.
        check_writes: with seals, hold what a forward has written against what the model has handed over to be
            written: an engine's adapter, or the engine itself (`CanaryManager.handed`), says what that is.
        stride: a cached position is verified on admission and then every so many steps. None: 1 on a CPU; on a GPU
            chosen, up to `max_stride`, so that the canary takes `overhead_target` of a step.
        overhead_target: share of a step's time that the canary may take where it chooses the stride.
        max_stride: the longest stride that it chooses: how late, in steps, corruption may be seen.
        verify_capacity: entries that one forward can verify in a group; None: as many as the engine's limits allow.
        own_graphs: on a GPU, with Triton, HEAD and TAIL outside of an engine's graphs are replayed from graphs of the
            canary's own once their like has come up before, which takes the host less time.
        track_lifetime: report reads of freed slots (FREED) and writes to another owner's (OVERWRITE). Off where an
            engine's frees cannot be hooked.
        quarantine: a sweep also checks that freed slots stay unchanged until they are reused. For engines that tell the
            canary of every copy into a slot on the stream of the copy, before anything else is launched.
        check_tokens: check every cached token against the request's own (TOKEN), by a table of 4 bytes a row and
            position. None: where the table takes at most `token_table_share` of the pool's bytes, or 16 MiB.
        token_table_share: see check_tokens.
        check_inputs: hold what the model is given against each request's own next tokens (WRITE_TOKEN).
        sweep_every: steps between sweeps of everything that the prefix cache holds; 0: none.
        ring_capacity: violations whose details are kept between two drains; all are counted.
        max_reports_per_step: violations written out in full per drain; the rest are counted.
        stats_every: steps between two lines of statistics in the log; 0: none.
        swa_divergence_every: steps between two reports of how far windowed groups differ from full ones; 0: none.
        digest_every: steps between two comparisons of digests across ranks; 0: none.
        metrics_port: port that Prometheus metrics are served on, by HTTP; needs `prometheus-client`; 0: none.
        metrics_address: address of this host that they are served at; 0.0.0.0 or :: for all of its addresses.
        event_log: file that events are appended to, one JSON object a line; None: none.
        bundles: folder that reports are saved in, for `kv-canary report`; None: none.
        redact: put keyed hashes in the place of token ids, names of requests, chains and fingerprints, in the log,
            events, bundles and reports.
        redact_key: of those hashes, so that those of several processes can be compared; a secret, shown nowhere. None:
            a random one for every canary.

    Raises:
        TypeError, ValueError: naming the setting, what it must be and what came.
    """

    mode: Mode = "log"
    backend: str | None = None
    read_bytes: int = 16
    verify_bytes_at_tail: bool = False
    records: Records = "one"
    seals: Seals | None = None
    shared_seals: bool | None = None
    scrub_share: float = 0.002
    admission: bool = True
    completion: bool = True
    check_writes: bool = False
    stride: int | None = None
    overhead_target: float = 0.01
    max_stride: int = 32
    verify_capacity: int | None = None
    own_graphs: bool = True
    track_lifetime: bool = True
    quarantine: bool = False
    check_tokens: bool | None = None
    token_table_share: float = 0.01
    check_inputs: bool = False
    sweep_every: int = 0
    ring_capacity: int = 1024
    max_reports_per_step: int = 16
    stats_every: int = 0
    swa_divergence_every: int = 0
    digest_every: int = 0
    metrics_port: int = 0
    metrics_address: str = "127.0.0.1"
    event_log: Path | None = None
    bundles: Path | None = None
    redact: bool = False
    redact_key: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), _HINTS[field.name])
        if self.backend is not None and self.backend not in BACKENDS:
            raise ValueError(must_be("CanaryConfig", "backend", f"one of {', '.join(BACKENDS)}", repr(self.backend)))
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(must_be("CanaryConfig", name, f"at least {low}", str(value)))
        if self.metrics_port > 65535:
            raise ValueError(must_be("CanaryConfig", "metrics_port", "at most 65535", str(self.metrics_port)))
        if not is_address(self.metrics_address):
            expected = "an IP address of this host, or 0.0.0.0 or :: for all of them"
            raise ValueError(must_be("CanaryConfig", "metrics_address", expected, repr(self.metrics_address)))
        if not 0 <= self.token_table_share <= 1:
            raise ValueError(must_be("CanaryConfig", "token_table_share", "in [0, 1]", str(self.token_table_share)))
        if not 0 < self.overhead_target <= 1:
            raise ValueError(must_be("CanaryConfig", "overhead_target", "in (0, 1]", str(self.overhead_target)))
        if not 0 <= self.scrub_share <= 1:
            raise ValueError(must_be("CanaryConfig", "scrub_share", "in [0, 1]", str(self.scrub_share)))
        if self.seals not in (None, "off") and not self.track_lifetime:
            raise ValueError(must_be("CanaryConfig", "seals", "off where track_lifetime is", self.seals))
        if self.check_writes and (self.seals == "off" or not self.track_lifetime):
            raise ValueError(must_be("CanaryConfig", "check_writes", "off where seals or track_lifetime are", "on"))
        if self.quarantine and not (self.track_lifetime and self.sweep_every):
            expected = "off where track_lifetime or sweep_every is"
            raise ValueError(must_be("CanaryConfig", "quarantine", expected, "on"))

    def shown(self) -> dict[str, Any]:
        """Return the settings by name, for people and files to see: all but the secret."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.repr}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **settings: Any) -> Self:
        """Return the configuration that the environment describes; `settings` given here come before it.

        Numbers and names stand as they are, switches as 1 or 0 (true, false, on, off, yes, no), `none` for None, and
        off, none, 0 or nothing for the mode "off".

        Raises:
            ValueError: a variable `KV_CANARY_...` names no setting, or its text is none of the setting's
                values; also one of another part (`KV_CANARY_SHADOW_...`, `KV_CANARY_PERTURB_...`), which else nobody
                would miss until that part is used.
        """
        others = other_parts()
        config = cls(**read_settings(cls, ENVIRONMENT, environ, settings, others=others))
        for part in others.values():
            part.from_env(environ)
        return config


def other_parts() -> dict[str, type[ShadowSettings] | type[PerturbConfig]]:
    """Return the settings of parts that read them themselves, by what follows `KV_CANARY_` in their variables."""
    return {"SHADOW_": ShadowSettings, "PERTURB_": PerturbConfig}


def check_names(part: str, argument: str, names: Iterable[str], *, also: Iterable[str] = ()) -> None:
    """Check that all `names` are those of settings.

    Args:
        part, argument: who says so otherwise.
        names: as they were given.
        also: names that may be meant besides.

    Raises:
        TypeError: naming those that are none, and what may be meant.
    """
    unknown = sorted(set(names) - set(_HINTS))
    if unknown:
        known = [*_HINTS, *also]
        near = {name: nearest(name, known) for name in unknown}
        got = ", ".join(f"{name} (did you mean {near[name]}?)" if near[name] else name for name in unknown)
        raise TypeError(must_be(part, argument, "settings of CanaryConfig", got))


def is_address(text: str) -> bool:
    """Whether `text` is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


_HINTS: dict[str, Any] = typing.get_type_hints(CanaryConfig)
_LEAST = {
    "read_bytes": 1,
    "stride": 1,
    "max_stride": 1,
    "verify_capacity": 1,
    "sweep_every": 0,
    "ring_capacity": 1,
    "max_reports_per_step": 1,
    "stats_every": 0,
    "swa_divergence_every": 0,
    "digest_every": 0,
    "metrics_port": 0,
}


def _check_type(name: str, value: Any, hint: Any) -> None:
    if value is None and type(None) in kinds_of(hint):
        return
    for kind in kinds_of(hint):
        if typing.get_origin(kind) is Literal:
            if value not in get_args(kind):
                raise ValueError(must_be("CanaryConfig", name, f"one of {', '.join(get_args(kind))}", repr(value)))
            return
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return
    names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds_of(hint))
    article = "an" if names[0] in "aeiou" else "a"
    raise TypeError(must_be("CanaryConfig", name, f"{article} {names}", repr(value)))
