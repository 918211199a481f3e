"""Bits of a running engine's KV that flip at random: how many the sample shows, and how many the seals.

Each flips in any byte of any layer of a slot in use, as `KV_CANARY_PERTURB_MODE=real_kv_used` has it. HEAD sees those
that are sampled, in that very forward. Before the next forward all slots are held against their seals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kv_canary.config import CanaryConfig
from kv_canary.constants import OWNER_BITS, STEP_MASK, WRITER_WORD
from kv_canary.demo.faults import WARM_UP_STEPS
from kv_canary.demo.serving import Hooks, serve
from kv_canary.demo.traffic import Conversation
from kv_canary.engines.transformers import TransformersCanary
from kv_canary.perturb import Injection, PerturbConfig, Perturber
from kv_canary.reports import ViolationReport

# Bits that flip in one life, one before each forward.
BITS = 40
# All that is damaged is reported anew by every scrub.
_REPORTS = 1024


@dataclass(frozen=True, kw_only=True)
class RandomBits:
    """The outcome of one life in which bits flip at random.

    Args:
        model: name of the model.
        layers: of the model.
        flipped: bits that flipped and that a scrub came after, of slots in which one alone did.
        sampled: those of them in bytes that are sampled.
        found_by_sample: those that HEAD reported, in the forward that read them.
        found_by_seals: those that were reported by a scrub, an admission or a completion.
        gone: those that were freed or written anew before a scrub came, and that nothing reported.
        median_steps_to_seals, most_steps_to_seals: steps from the damage to that report; None without one.
        false_alarms: reports of slots in which nothing flipped.
    """

    model: str
    layers: int
    flipped: int
    sampled: int
    found_by_sample: int
    found_by_seals: int
    gone: int
    median_steps_to_seals: float | None
    most_steps_to_seals: int | None
    false_alarms: int

    @property
    def passed(self) -> bool:
        """Whether the sample showed all that it covers, seals all that was there, and nothing else was reported."""
        all_sampled = self.found_by_sample == self.sampled
        return 0 < self.flipped == self.found_by_seals + self.gone and all_sampled and not self.false_alarms


@dataclass(kw_only=True)
class _Life:
    """One life: flips its bits, and scrubs before each forward that follows; `scrubbed` says how many have been."""

    seed: int
    gone: set[int] = field(default_factory=set)
    scrubbed: int = 0
    _perturber: Perturber | None = None

    def hooks(self) -> Hooks:
        return Hooks(
            started=self._started,
            before_tables=lambda canary, processor, requests: None,
            before_forward=self._before_forward,
            done=lambda canary: self.scrubbed == BITS,
        )

    @property
    def injections(self) -> Sequence[Injection]:
        return [] if self._perturber is None else self._perturber.injections

    def _started(self, canary: TransformersCanary) -> None:
        config = PerturbConfig(mode="real_kv_used", warm_up=WARM_UP_STEPS, count=BITS, seed=self.seed)
        self._perturber = canary.manager.perturber = Perturber(config, canary.manager.groups)

    def _before_forward(self, canary: TransformersCanary, processor: Any, batch_data: dict[str, Any]) -> None:
        new = list(self.injections[self.scrubbed :])
        if not new:
            return
        pools = {g.name: g.pool for g in canary.manager.groups}
        for injection in new:
            [slot] = injection.slots
            writer = int(pools[injection.group].records[slot, WRITER_WORD])
            # Retired, or of a token that came later.
            if writer < 0 or (writer >> OWNER_BITS & STEP_MASK) >= injection.step:
                self.gone.add(slot)
        canary.manager.scrub()
        self.scrubbed += len(new)


def flip_bits(
    model: Any, name: str, conversations: Sequence[Conversation], *, config: CanaryConfig, seed: int
) -> RandomBits:
    """Serve `conversations` while bits flip at random, and return how many were found, by what and when.

    Args:
        model: a `models.tiny_model`.
        name: of it.
        conversations: the traffic.
        config: the canary's; whatever it says, seals are kept, and all reports.
        seed: of what flips.
    """
    life = _Life(seed=seed)
    sealed = replace(config, seals="layer", max_reports_per_step=_REPORTS)
    served = serve(model, conversations, config=sealed, hooks=life.hooks())
    hit = [slot for i in life.injections for slot in i.slots]
    # Of two bits of one slot nobody could say whose a report is.
    alone = [i for i in life.injections[: life.scrubbed] if all(hit.count(slot) == 1 for slot in i.slots)]
    early = [i for i in alone if any(r.step == i.step and _is_of(r, i, {"K", "V"}) for r in served.reports)]
    late = [_steps_to_seals(i, served.reports) for i in alone]
    steps = [n for n in late if n is not None]
    gone = [i for i, n in zip(alone, late, strict=True) if n is None and i.slots <= life.gone]
    return RandomBits(
        model=name,
        layers=model.config.num_hidden_layers,
        flipped=len(alone),
        sampled=sum(i.sampled for i in alone),
        found_by_sample=len(early),
        found_by_seals=len(steps),
        gone=len(gone),
        median_steps_to_seals=median(steps) if steps else None,
        most_steps_to_seals=max(steps, default=None),
        false_alarms=sum(r.slot not in hit for r in served.reports),
    )


def _is_of(report: ViolationReport, injection: Injection, reasons: set[str]) -> bool:
    return report.slot in injection.slots and bool(reasons & set(report.reasons))


def _steps_to_seals(injection: Injection, reports: Sequence[ViolationReport]) -> int | None:
    steps = [r.step - injection.step for r in reports if _is_of(r, injection, {"SEAL_K", "SEAL_V"})]
    return min((n for n in steps if n >= 0), default=None)
