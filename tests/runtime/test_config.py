"""Every setting, by argument and by environment; what is unknown, impossible or contradictory is refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kv_canary.config import CanaryConfig

# A text for every setting, and what it stands for.
TEXTS: dict[str, tuple[str, Any]] = {
    "mode": ("raise", "raise"),
    "backend": ("reference", "reference"),
    "read_bytes": ("64", 64),
    "verify_bytes_at_tail": ("1", True),
    "records": ("head_and_tail", "head_and_tail"),
    "seals": ("model", "model"),
    "shared_seals": ("1", True),
    "scrub_share": ("0.01", 0.01),
    "admission": ("off", False),
    "completion": ("0", False),
    "check_writes": ("off", False),
    "stride": ("4", 4),
    "overhead_target": ("0.05", 0.05),
    "max_stride": ("8", 8),
    "verify_capacity": ("4096", 4096),
    "track_lifetime": ("off", False),
    "own_graphs": ("off", False),
    "quarantine": ("no", False),
    "check_tokens": ("True", True),
    "token_table_share": ("0", 0.0),
    "check_inputs": ("on", True),
    "sweep_every": ("100", 100),
    "ring_capacity": ("16", 16),
    "max_reports_per_step": ("2", 2),
    "stats_every": ("1000", 1000),
    "swa_divergence_every": ("50", 50),
    "digest_every": ("10", 10),
    "metrics_port": ("9400", 9400),
    "metrics_address": ("::1", "::1"),
    "event_log": ("/tmp/events.jsonl", Path("/tmp/events.jsonl")),
    "bundles": ("found", Path("found")),
    "redact": ("on", True),
    "redact_key": ("a secret", "a secret"),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CanaryConfig)])
def test_a_setting_comes_from_the_environment_unless_it_is_given(name: str) -> None:
    text, value = TEXTS[name]
    environ = {f"KV_CANARY_{name.upper()}": text, "PATH": "/bin", "KV_CANARY_SHADOW_EVERY": "5"}
    config = CanaryConfig.from_env(environ)
    assert getattr(config, name) == value
    assert config == dataclasses.replace(CanaryConfig(), **{name: value})
    default = getattr(CanaryConfig(), name)
    assert CanaryConfig.from_env(environ, **{name: default}) == CanaryConfig()


@pytest.mark.parametrize("text", ["off", "OFF", "none", "None", "0", ""])
def test_the_environment_turns_the_canary_off(text: str) -> None:
    assert CanaryConfig.from_env({"KV_CANARY_MODE": text}).mode == "off"
    assert CanaryConfig.from_env({"KV_CANARY_MODE": text}, mode="raise").mode == "raise"


def test_what_the_environment_says_of_faults_and_of_the_shadow_backend_is_theirs() -> None:
    variables = {"SHADOW_EVERY": "5", "SHADOW_FOLDER": "found", "PERTURB_MODE": "req_to_token", "PERTURB_EVERY": "2"}
    assert CanaryConfig.from_env({f"KV_CANARY_{name}": text for name, text in variables.items()}) == CanaryConfig()


@pytest.mark.parametrize("name", ["backend", "stride", "verify_capacity", "check_tokens", "event_log", "bundles"])
def test_none_is_a_text_too(name: str) -> None:
    assert getattr(CanaryConfig.from_env({f"KV_CANARY_{name.upper()}": "none"}), name) is None


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("KV_CANARY_REED_BYTES", "16", r"KV_CANARY_REED_BYTES must be a known setting.*did you mean KV_CANARY_READ_"),
        ("KV_CANARY_", "16", "must be a known setting"),
        ("KV_CANARY_READ_BYTES", "many", r"KV_CANARY_READ_BYTES must be int, got 'many'"),
        ("KV_CANARY_READ_BYTES", "none", r"KV_CANARY_READ_BYTES must be int, got 'none'"),
        ("KV_CANARY_TRACK_LIFETIME", "maybe", "KV_CANARY_TRACK_LIFETIME must be 1 or 0, got 'maybe'"),
        ("KV_CANARY_MODE", "panic", "mode must be one of log, raise, off, got 'panic'"),
        ("KV_CANARY_STRIDE", "0", "stride must be at least 1, got 0"),
        ("KV_CANARY_METRICS_ADDRESS", "none", "metrics_address must be an IP address of this host, .*, got 'none'"),
        # Those of other parts, which would read them later or never.
        ("KV_CANARY_SHADOW_EVRY", "3", r"KV_CANARY_SHADOW_EVRY must be a known.*did you mean KV_CANARY_SHADOW_EVERY\?"),
        ("KV_CANARY_SHADOW_EVERY", "often", "KV_CANARY_SHADOW_EVERY must be int, got 'often'"),
        ("KV_CANARY_SHADOW_EVERY", "0", "every must be at least 1, got 0"),
        ("KV_CANARY_SHADWO_EVERY", "3", r"KV_CANARY_SHADWO_EVERY must be.*did you mean KV_CANARY_SHADOW_EVERY\?"),
        ("KV_CANARY_PERTURB_MOD", "req_to_token", r"did you mean KV_CANARY_PERTURB_MODE\?"),
        ("KV_CANARY_PERTRUB_MODE", "req_to_token", r"did you mean KV_CANARY_PERTURB_MODE\?"),
        ("KV_CANARY_PERTURB_MODE", "explode", "PerturbConfig: mode must be one of 'req_to_token', .*, got 'explode'"),
        ("KV_CANARY_PERTURB_SEED", "1", "KV_CANARY_PERTURB_MODE must be given with seed"),
    ],
)
def test_what_the_environment_may_not_say(name: str, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CanaryConfig.from_env({name: text})


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"mod": "log"}, TypeError, r"arguments must be settings of CanaryConfig, got mod \(did you mean mode\?\)$"),
        ({"mode": None}, ValueError, "mode must be one of log, raise, off, got None"),
        ({"records": "two"}, ValueError, "records must be one of one, head_and_tail, got 'two'"),
        ({"backend": "cuda"}, ValueError, "backend must be one of reference"),
        ({"read_bytes": 0}, ValueError, "read_bytes must be at least 1, got 0"),
        ({"read_bytes": True}, TypeError, "read_bytes must be an int, got True"),
        ({"read_bytes": 1.5}, TypeError, "read_bytes must be an int, got 1.5"),
        ({"stride": "4"}, TypeError, "stride must be an int or None, got '4'"),
        ({"sweep_every": -1}, ValueError, "sweep_every must be at least 0, got -1"),
        ({"metrics_port": 65536}, ValueError, "metrics_port must be at most 65535, got 65536"),
        (
            {"metrics_address": "localhost"},
            ValueError,
            "metrics_address must be an IP address of this host, or 0.0.0.0",
        ),
        ({"metrics_address": "10.0.0.256"}, ValueError, "metrics_address must be an IP address of this host"),
        ({"metrics_address": 16909060}, TypeError, "metrics_address must be a str, got 16909060"),
        ({"token_table_share": 2.0}, ValueError, r"token_table_share must be in \[0, 1\], got 2.0"),
        ({"overhead_target": 0.0}, ValueError, r"overhead_target must be in \(0, 1\], got 0.0"),
        ({"event_log": "events"}, TypeError, "event_log must be a Path or None, got 'events'"),
        ({"track_lifetime": 1}, TypeError, "track_lifetime must be a bool, got 1"),
        ({"quarantine": True}, ValueError, "quarantine must be off where track_lifetime or sweep_every is, got on"),
    ],
)
def test_what_a_setting_may_not_be(settings: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"kv-canary: CanaryConfig: {says}"):
        CanaryConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"metrics_port": 65535}, {"token_table_share": 0.0}, {"token_table_share": 1.0}, {"overhead_target": 1.0}],
)
def test_the_ends_of_a_range_are_in_it(settings: dict[str, Any]) -> None:
    [(name, value)] = settings.items()
    assert getattr(CanaryConfig(**settings), name) == value
