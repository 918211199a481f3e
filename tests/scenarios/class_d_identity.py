"""Class D: the same tokens, but not the same KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_canary import CanaryConfig, Reason
from kv_canary.difftest.simulator import EngineConfig, Request
from kv_canary.difftest.simulator.prefix_cache import PrefixCache

from .harness import Scenario, model_scenario
from .served import CANARY, ServedEngine, full


class MergingCache(PrefixCache):
    """Its keys have a part of the identity only."""

    mask = 0

    def match(self, identity: int, tokens: Sequence[int]) -> list[int]:
        return super().match(identity & self.mask, tokens)

    def insert(
        self, identity: int, tokens: Sequence[int], pages: Sequence[int], *, usable: Callable[[int], bool]
    ) -> tuple[list[int], list[int]]:
        return super().insert(identity & self.mask, tokens, pages, usable=usable)


class MergesIdentities(ServedEngine):
    """Prefixes of other adapters are hit."""

    mask = 0

    def restart(self) -> None:
        super().restart()
        self.cache = MergingCache(self.config.page_size)
        self.cache.mask = self.mask
        # Whose the KV of a page is.
        self.made_for: dict[int, int] = {}

    def take_cached_prefix(self, request: Request) -> None:
        super().take_cached_prefix(request)
        foreign = [p for p in request.pages if self.made_for[p] != request.identity]
        if foreign:
            self.acted(self.slots_of(foreign), [request])

    def new_pages(self, count: int) -> list[int]:
        pages = super().new_pages(count)
        # The engine gives out pages for one request at a time here.
        self.made_for.update(dict.fromkeys(pages, self.running[-1].identity))
        return pages


class TruncatesImages(MergesIdentities):
    """Images are told apart by 16 bits of their hash."""

    mask = 0xFFFF


class UpdatedEngine(MergesIdentities):
    """The weights change, and the cache is emptied then: its keys need not tell them apart."""

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        self.version = 1
        super().__init__(config, canary=canary)

    def update_weights(self) -> None:
        self.version += 1
        self.flush()

    def arrive(self, *, stem: int, shared: int, fresh: int, identity: int = 0) -> Request:
        return super().arrive(stem=stem, shared=shared, fresh=fresh, identity=self.version)


class KeepsOldCache(UpdatedEngine):
    def update_weights(self) -> None:
        self.version += 1


def two_identities(engine: ServedEngine, *, first: int, second: int) -> None:
    """An A -> B -> A pattern: the same prompt under one identity, another, and the first again."""
    for identity in (first, second, first):
        request = engine.come(shared=12, fresh=2, identity=identity)
        engine.prefill(request)
        engine.decode(request)
        engine.leave(request)


def updated(engine: UpdatedEngine) -> None:
    before = engine.come(shared=12, fresh=2)
    engine.prefill(before)
    engine.decode(before)
    engine.leave(before)
    engine.update_weights()
    after = engine.come(shared=12, fresh=3)
    engine.prefill(after)
    engine.decode(after, steps=2)


CACHED = "full attention, prefix cache"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="adapter-not-in-key",
        fault="D",
        example="vllm#3263",
        doc="the prefix cache's keys leave out the adapter",
        engine=f"{CACHED}, requests with identities",
        expected=Reason.CHAIN,
        life=lambda engine: two_identities(engine, first=1, second=2),
        config=lambda: full(anchors=True),
        faulty=MergesIdentities,
    ),
    model_scenario(
        name="image-hash-truncated",
        fault="D",
        example="LMCache#3301",
        doc="two images whose hashes have 16 bits in common are one to the prefix cache",
        engine=f"{CACHED}, requests with identities",
        expected=Reason.CHAIN,
        life=lambda engine: two_identities(engine, first=0x5EED_0001_BEEF, second=0x5EED_0002_BEEF),
        config=lambda: full(anchors=True),
        faulty=TruncatesImages,
    ),
    model_scenario(
        name="weights-updated",
        fault="D",
        example="lmdeploy#4917",
        doc="the prefix cache survives an update of the weights",
        engine=f"{CACHED}, the weights' version as identity",
        expected=Reason.CHAIN,
        life=updated,
        config=lambda: full(anchors=True),
        healthy=UpdatedEngine,
        faulty=KeepsOldCache,
    ),
)
