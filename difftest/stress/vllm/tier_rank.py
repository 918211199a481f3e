"""What a life of `tiers` has a rank of its engine do: an extension of vLLM's worker, called by its `collective_rpc`.

So the same life is led where the worker is in the life's own process, and where each rank has one of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from kv_canary.difftest.stress import causes, tier_lives
from kv_canary.difftest.stress.vllm import offloading
from kv_canary.difftest.stress.vllm.engine import BLOCK
from kv_canary.difftest.stress.vllm.tier_faults import Mistake, mistake

EXTENSION = f"{__name__}.LedRank"


class LedRank:
    """A worker whose tiers and whose canary a life leads."""

    _began = 0
    _incidents = 0

    @property
    def _rank(self) -> int:
        rank: int = self.rank  # type: ignore[attr-defined]
        return rank

    @property
    def _session(self) -> Any:
        from kv_canary.engines.vllm.session import sessions

        return next(session for session in sessions() if session.worker is self)

    def life_does(self, what: str, arguments: tuple[Any, ...], ranks: tuple[int, ...]) -> Any:
        """Do what the method of a name does, where this is one of the ranks; return what it returns."""
        return getattr(self, what)(*arguments) if self._rank in ranks else None

    def life_led(self) -> None:
        """End the threads that look at the host; the life looks instead."""
        for tier in self._session.offload.tiers:
            tier.close()

    def life_begins(self) -> int:
        """Begin a life; return how many blocks have come from the host up to here."""
        manager = self._session.manager
        manager.reports.clear()
        self._began, self._incidents = 0, causes.last_incident(manager)
        loaded: int = offloading.WORKERS[0].loaded
        return loaded

    def life_errs(self, fault: str, of: str, seed: int) -> None:
        """Have the next copy go wrong.

        Args:
            fault: the name of what goes wrong.
            of: "store" or "load".
            seed: of its choices.
        """
        offloading.FAULTS.append(offloading.Fault(of, self._noted(mistake(fault)), seed))

    def life_flips(self, prompt: Sequence[int], seed: int) -> None:
        """Flip a random bit of a slot on the host that a prompt's KV is in, and look at all of the host."""
        session, rng = self._session, random.Random(seed)
        self._began = session.manager.step
        tiers = [(tier, _host_slots(tier, prompt)) for tier in session.offload.tiers]
        tier, slots = rng.choice([found for found in tiers if len(found[1])])
        source = rng.choice([s for s in (tier.pool.k_source, tier.pool.v_source) if s is not None])
        row, token = divmod(rng.choice(slots) - source.slot_bias, source.page_size)
        layer = rng.choice(source.layers).view(torch.uint8)
        at = source.byte_of(token) + rng.randrange(source.bytes_per_token)
        layer[row, at] ^= 1 << rng.randrange(8)
        for each in session.offload.tiers:
            each.check(whole=True)

    def life_looks(self) -> None:
        """Look at a piece of the host, as the thread does."""
        for tier in self._session.offload.tiers:
            tier.settle()
            tier.check()

    def life_tells(self) -> dict[str, Any]:
        """Return what the canary has reported in a life: steps, requests, looks and cause; and what has come."""
        self.life_looks()
        manager = self._session.manager
        manager.flush()
        offloading.FAULTS.clear()
        reports = list(manager.reports)
        return {
            "steps": [report.step for report in reports],
            "requests": sorted({(report.request_id or "").partition("-")[0] for report in reports}),
            "where": tier_lives.look_of(reports[0]) if reports else "",
            "began": self._began,
            "says": causes.first_cause(manager, behind=self._incidents),
            "loaded": offloading.WORKERS[0].loaded,
        }

    def life_ends(self) -> None:
        """Leave nothing of a life on the host, and nothing that is found there."""
        session = self._session
        session.manager.flush()
        # What it has damaged lies in free blocks, whose records a scrub may still come to.
        session.manager.clear()
        for tier in session.offload.tiers:
            tier.clear()

    def _noted(self, do: Mistake) -> Mistake:
        def noted(*arguments: Any) -> bool:
            self._began = self._began or self._session.manager.step
            return do(*arguments)

        return noted


def _host_slots(tier: Any, prompt: Sequence[int]) -> list[int]:
    """Return the slots of a tier whose records are of a prompt's tokens, in whole blocks."""
    words = tier.pool.records[:, 0]
    tokens, positions = (words & 0xFFFFFFFF).tolist(), (words >> 32).tolist()
    return [
        slot
        for slot, (token, position) in enumerate(zip(tokens, positions, strict=True))
        if slot and position < len(prompt) // BLOCK * BLOCK and prompt[position] == token and int(words[slot])
    ]
