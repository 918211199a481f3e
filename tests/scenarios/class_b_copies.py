"""Class B: copies that run before, or after, they should."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from kv_canary import CanaryConfig, Reason
from kv_canary.difftest.simulator import Call, EngineConfig, Request

from .class_f_drafts import SEALED, hit_for_long, hit_for_one_token, many_layers
from .harness import NOTHING, Scenario, model_scenario
from .served import CANARY, PAGE, ServedEngine, full
from .tiers import HostTierEngine


class LoadsBeforeStored(HostTierEngine):
    def wait_for_stores(self) -> None:
        if self.stores:
            self.acted({})

    def restore(self, request: Request) -> None:
        late = bool(self.stores)
        super().restore(request)
        if late:
            self.acted({"full": self.pages.slots(request.pages)[: request.cached]}, [request])


class FreesBeforeStored(HostTierEngine):
    """A page is handed on before the store has read it."""

    def keep_until_stored(self, pages: list[int], hosts: list[int], owner: int) -> None:
        self.stores.append(lambda: self.store(pages, hosts))
        self.acted({})

    def store(self, pages: Sequence[int], hosts: Sequence[int]) -> None:
        written = {s for r in self.running for s in self.pages.slots(r.pages)[: len(r.tokens)]}
        self.reused = [i for i, s in enumerate(self.pages.slots(pages)) if s in written]
        super().store(pages, hosts)

    def restore(self, request: Request) -> None:
        super().restore(request)
        slots = self.pages.slots(request.pages)
        self.acted({"full": [slots[i] for i in self.reused if i < request.cached]}, [request])


class OverwritesBuffer(HostTierEngine):
    """The staging buffer is filled again while it is still being copied from."""

    def wait_for_buffer(self, copies: deque[Callable[[], None]]) -> None:
        pass

    def restore(self, request: Request) -> None:
        super().restore(request)
        # The last page of each of the two buffers is right.
        self.acted({"full": self.pages.slots(request.pages[:-2])}, [request])


class CopiesOverOneLayer(ServedEngine):
    """A copy of one layer lands in a page that is cached, of whose positions another layer is sampled."""

    def finish(self, request: Request, *, keep: bool = True) -> Iterator[Call]:
        page = list(request.pages)[:1]
        yield from super().finish(request, keep=keep)
        [group] = self.groups
        slots = group.page_slots(page)
        self.acted({"full": slots})
        for source in group.sources:
            source.layers[5][slots] = 0x5A


class CopiesLogicalPages(HostTierEngine):
    """A physical page has room for two logical ones; the copy moves one."""

    def block_tokens(self) -> int:
        return PAGE // 2

    def restore(self, request: Request) -> None:
        super().restore(request)
        missed = [s for i, s in enumerate(self.pages.slots(request.pages)[: request.cached]) if i % PAGE >= PAGE // 2]
        self.acted({"full": missed}, [request])


class ZeroingEngine(ServedEngine):
    """Pages are zeroed before the forward that first writes to them."""

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        self.to_zero: list[int] = []
        super().__init__(config, canary=canary)

    def new_pages(self, count: int) -> list[int]:
        pages = super().new_pages(count)
        self.to_zero += pages
        return pages

    def zero(self) -> None:
        """Zero what is to be zeroed, once."""
        for group in self.groups:
            for source in group.sources:
                for layer in source.layers:
                    layer[group.page_slots(self.to_zero)] = 0
        self.to_zero = []

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        self.zero()
        yield from super()._step_calls(extends, padding=padding)


class ZeroesAgain(ZeroingEngine):
    """The list of the step before is used once more where a step hands out nothing."""

    last: Sequence[int] = ()

    def zero(self) -> None:
        if not self.to_zero:
            self.to_zero, self.last = list(self.last), ()
            live = [s for s in self.pages.slots(self.to_zero) if self.users_of(s)]
            if live:
                self.acted({"full": live})
        else:
            self.last = list(self.to_zero)
        super().zero()


def stored_twice(engine: HostTierEngine) -> None:
    """Another request has left its KV in the host pages; the second store is followed by a load at once."""
    first = engine.come(fresh=10)
    engine.prefill(first)
    engine.decode(first)
    engine.offload(first)
    engine.go(engine.step({}))
    engine.restore(first)
    engine.decode(first)
    second = engine.come(fresh=11)
    engine.prefill(second)
    engine.offload(second)
    engine.restore(second)
    engine.decode(first, second, steps=2)


def stored_and_reused(engine: HostTierEngine) -> None:
    first = engine.come(fresh=10)
    engine.prefill(first)
    engine.decode(first)
    engine.offload(first)
    second = engine.come(fresh=11)
    engine.prefill(second)
    engine.leave(second)
    engine.restore(first)
    engine.decode(first, steps=2)


def stored_and_loaded(engine: HostTierEngine) -> None:
    """Sixteen positions: four pages to the last slot."""
    first = engine.come(fresh=15)
    engine.prefill(first)
    engine.decode(first)
    engine.offload(first)
    second = engine.come(fresh=13)
    engine.prefill(second)
    engine.leave(second)
    engine.restore(first)
    engine.decode(first, steps=3)


def quiet_step(engine: ServedEngine) -> None:
    both = [engine.come(fresh=9), engine.come(fresh=6)]
    engine.prefill(*both)
    engine.decode(*both, steps=3)


TIER = "host tier"

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="loaded-before-stored",
        fault="B",
        example="vllm#46278",
        doc="a load does not wait for the store: what another request left on the host arrives",
        engine=TIER,
        expected=Reason.K | Reason.V,
        life=stored_twice,
        config=lambda: full(prefix_cache=False),
        healthy=HostTierEngine,
        faulty=LoadsBeforeStored,
    ),
    model_scenario(
        name="freed-before-stored",
        fault="B",
        example="TensorRT-LLM#9056",
        doc="pages are handed on before they are stored: the host keeps another request's KV",
        engine=TIER,
        expected=Reason.K | Reason.V,
        life=stored_and_reused,
        config=lambda: full(prefix_cache=False),
        healthy=HostTierEngine,
        faulty=FreesBeforeStored,
    ),
    model_scenario(
        name="buffer-overwritten",
        fault="B",
        example="vllm#51667",
        doc="one of two staging buffers is filled again before it was copied to the device",
        engine=f"{TIER}, double-buffered loads",
        expected=Reason.K | Reason.V,
        life=stored_and_loaded,
        config=lambda: full(prefix_cache=False),
        healthy=HostTierEngine,
        faulty=OverwritesBuffer,
    ),
    *(
        model_scenario(
            name=name,
            fault="B",
            example="sglang#30738, in one layer",
            doc=f"a copy of one layer lands in a page that is cached{more}",
            engine=f"eight layers, prefix cache{seals}",
            expected=expected,
            beyond=expected,
            life=life,
            config=many_layers,
            faulty=CopiesOverOneLayer,
            canary=canary,
        )
        for name, more, seals, expected, life, canary in (
            ("one-layer-page", "", ", `seals=layer`", Reason.SEAL_K | Reason.SEAL_V, hit_for_long, SEALED),
            (
                "one-layer-page-one-token",
                "; a request for a single token hits it",
                ", `seals=layer`",
                Reason.SEAL_K | Reason.SEAL_V,
                hit_for_one_token,
                SEALED,
            ),
            ("one-layer-page-unsealed", ", without seals", "", NOTHING, hit_for_long, CANARY),
        )
    ),
    model_scenario(
        name="live-page-zeroed",
        fault="B",
        example="vllm#48085",
        doc="the list of pages to zero is used twice, the second time when they are in use",
        engine="zeroes new pages",
        expected=Reason.K | Reason.V,
        life=quiet_step,
        config=full,
        healthy=ZeroingEngine,
        faulty=ZeroesAgain,
    ),
    model_scenario(
        name="logical-page-length",
        fault="B",
        example="vllm#54272, on a host tier",
        doc="a copy moves one logical page of each physical page, which holds two",
        engine=TIER,
        expected=Reason.K | Reason.V,
        life=stored_and_loaded,
        config=lambda: full(prefix_cache=False),
        healthy=HostTierEngine,
        faulty=CopiesLogicalPages,
    ),
)
