"""A model engine with full attention and a sliding window behind a LUT, and what is scraped of it.

Run as a program, it writes docs/example-scrape.txt.
"""

from __future__ import annotations

import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import torch

import kv_canary as kc
from kv_canary.difftest.simulator import Action, EngineConfig, GroupConfig
from kv_canary.difftest.simulator.canary_engine import CanaryEngine

PAGE, PAGES, WINDOW = 4, 64, 8


def make_engine(
    *, window: int = WINDOW, kinds: tuple[str, ...] = ("full", "lut"), device: str = "cpu", **settings: Any
) -> CanaryEngine:
    """Return an engine with these groups; settings are the canary's."""
    slots = PAGE * (PAGES + 1)
    return CanaryEngine(
        EngineConfig(
            groups=tuple(
                GroupConfig(
                    kind=kind,
                    num_slots=slots,
                    window=0 if kind == "full" else window,
                    k_source=_source(slots),
                    v_source=_source(slots),
                )
                for kind in kinds
            ),
            page_size=PAGE,
            num_pages=PAGES,
            first_slot=PAGE,
            max_rows=6,
            max_len=64,
        ),
        canary=kc.CanaryConfig(**{"backend": "reference", **settings}),
        device=device,
    )


def live(engine: CanaryEngine, *, steps: int, prompt: int = 24) -> None:
    """Let two requests arrive, prefill them in one step, and decode them in the others."""
    for pick in (1, 3):
        engine.run(Action(kind="arrive", pick=pick, amount=prompt))
    engine.run(Action(kind="prefill", amount=prompt))
    for _ in range(steps - 1):
        engine.run(Action(kind="decode"))


def flip(engine: CanaryEngine, position: int) -> None:
    """Flip a covered bit of the K of a position of the first running request, in the first group."""
    group, request = engine.groups[0], engine.running[0]
    source = group.config.k_source
    layer, start, _ = source.coverage(position)
    source.layers[layer][group.page_slots(request.pages)[position], start] ^= 1


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def get(port: int) -> str:
    """Return what is served on a port of this host."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def scrape() -> str:
    """Return what Prometheus is served after eleven steps, in which one bit was flipped and plans were cut short."""
    port = free_port()
    engine = make_engine(metrics_port=port, verify_capacity=57, seals="layer")
    try:
        live(engine, steps=6)
        flip(engine, 5)
        for _ in range(4):
            engine.run(Action(kind="decode"))
        engine.manager.scrub()
        request = engine.running[0]
        slots = {g.name: torch.tensor(g.page_slots(request.pages)) for g in engine.groups}
        engine.manager.complete("0", slots)
        engine.manager.flush()
        engine.run(Action(kind="decode"))
        engine.manager.flush()
        return get(port)
    finally:
        engine.manager.close()


def without_times(text: str) -> str:
    """Return a scrape with every point in time, and every time that was measured, replaced by a word."""
    return re.sub(r"(?m)^(\w+_(?:timestamp|step|host|oldest)_seconds\S*) .*$", r"\1 TIME", text)


def _source(slots: int) -> kc.KvSource:
    layers = tuple(torch.zeros(slots, 32, dtype=torch.uint8) for _ in range(2))
    return kc.KvSource(layers=layers, page_size=1, bytes_per_token=32)


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[2] / "docs/example-scrape.txt"
    path.write_text(scrape(), encoding="utf-8")
    print(f"written: {path}")
