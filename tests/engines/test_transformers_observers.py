"""Observers in a real engine: sliding windows in transformers, and what an uninstalled canary leaves behind."""

from __future__ import annotations

import json
import logging
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import kv_canary
from kv_canary.observers.swa_divergence import assert_all_signals, find_last

from .scenarios import Prompts, make_model, serve


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def get(port: int) -> str:
    """Return what is served on a port of this host."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_gemma3_shows_every_signal_of_sliding_windows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model, path, port = make_model("gemma3"), tmp_path / "events.jsonl", free_port()
    settings = {"backend": "reference", "swa_divergence_every": 2, "event_log": path, "metrics_port": port}
    canary = kv_canary.install(model, config=kv_canary.CanaryConfig(**settings))
    scrapes: list[str] = []

    def run() -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "kv_canary"), serve(model) as server:
            server.run(Prompts().of_lengths(40, 5, 60), new_tokens=8)
            scrapes.append(get(port))
        return caplog.text

    try:
        found = assert_all_signals(run)
        canary.flush()
        # A window of 24 reads 23 cached positions; a chunk of the longest prompt alone lies before it.
        assert found.swa_out_of_window_tokens > 0
        assert found.forward_ct % 2 == 0
        assert find_last(caplog.text) is not None
        assert canary.summary().violations == 0
    finally:
        canary.uninstall()
    assert 'kv_canary_entries_total{canary="0",tag="HEAD_SWA"}' in scrapes[0]
    with pytest.raises(urllib.error.URLError):
        get(port)
    events = [json.loads(line)["event"] for line in path.read_text().splitlines()]
    assert (events[0], events[-1]) == ("start", "stop")
    assert events.count("start") == events.count("stop") == len(scrapes)
    assert "report" not in events


def test_one_cache_after_another_on_one_port(tmp_path: Path) -> None:
    model, port = make_model("llama"), free_port()
    canary = kv_canary.install(model, config=kv_canary.CanaryConfig(backend="reference", metrics_port=port))
    try:
        for _ in range(2):
            with serve(model, warm_up=False) as server:
                server.run(Prompts().of_lengths(20), new_tokens=3)
                text = get(port)
            # The cache before is gone, and its metrics with it.
            assert text.count("\nkv_canary_steps_total{") == 1
            assert 'kv_canary_watching{canary="0",watching="complete"} 1.0' in text
            # Between two caches the port answers, and is nobody else's.
            assert "kv_canary_steps_total{" not in get(port)
    finally:
        canary.uninstall()
    with pytest.raises(urllib.error.URLError):
        get(port)


def test_what_cannot_be_had_is_refused_when_it_is_installed(tmp_path: Path) -> None:
    model = make_model("llama")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"metrics_port must be a port that is free here.*{port}"):
            kv_canary.install(model, config=kv_canary.CanaryConfig(backend="reference", metrics_port=port))
    missing = tmp_path / "none" / "events.jsonl"
    with pytest.raises(ValueError, match=r"event_log must be a file that can be appended to, got .*No such file"):
        kv_canary.install(model, config=kv_canary.CanaryConfig(backend="reference", event_log=missing))
    kept = tmp_path / "events.jsonl"
    canary = kv_canary.install(model, config=kv_canary.CanaryConfig(backend="reference", event_log=kept))
    assert (kept.read_text(), kept.stat().st_mode & 0o777) == ("", 0o600)
    canary.uninstall()


def test_a_cache_is_watched_though_nobody_can_be_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kv_canary.observers.events import EventLog

    def full(*_: object, **__: object) -> None:
        raise ValueError("No space left on device")

    model = make_model("llama")
    settings = {"backend": "reference", "event_log": tmp_path / "events.jsonl", "metrics_port": free_port()}
    canary = kv_canary.install(model, config=kv_canary.CanaryConfig(**settings))
    monkeypatch.setattr(EventLog, "_append", full)
    canary.guard.contains = True
    try:
        with serve(model, warm_up=False) as server:
            server.run(Prompts().of_lengths(20), new_tokens=3)
        summary = canary.summary()
        assert summary.positions_verified == summary.positions_relied_on > 20
        assert list(canary.guard.failures) == [
            "transformers adapter: beginning the metrics or the event log: ValueError"
        ]
    finally:
        canary.uninstall()
