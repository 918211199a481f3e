"""Class F: a draft worker whose KV is not what its tokens say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from kv_canary import BufferGroup, CanaryConfig, ForwardBatch, KvPool, Reason
from kv_canary.difftest.simulator import Call, EngineConfig, Request
from kv_canary.difftest.simulator.groups import Group
from kv_canary.difftest.simulator.prefix_cache import PrefixCache

from .harness import NOTHING, Scenario, model_scenario
from .served import CANARY, ServedEngine, full, kv_source, name_of
from .toy_model import Layers, Span, run_model


class SpeculatingEngine(ServedEngine):
    """A target with full attention and a draft worker behind it, whose pool has the same slots.

    Position p of the draft pool holds what comes of token p + 1, as in EAGLE. Behind each forward of the target the
    draft worker extends by what was accepted; both are one step.
    """

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        # Requests that are to be served without drafts.
        self.plain: set[Request] = set()
        super().__init__(config, canary=canary)
        [target] = self.manager.groups
        slots = target.pool.num_slots
        self.draft = KvPool(
            name="draft",
            num_slots=slots,
            k_source=kv_source(slots, layers=1),
            v_source=kv_source(slots, layers=1),
            device="cpu",
        )
        self.install([target, BufferGroup(name="draft", pool=self.draft, token_offset=1)])

    def restart(self) -> None:
        super().restart()
        self.cache = PairedCache(self.config.page_size)

    def retire(self, group: Group, slots: Sequence[int], *, owner: int) -> Iterator[Call]:
        yield from super().retire(group, slots, owner=owner)
        if slots:
            self.manager.retire(self.draft, torch.tensor(list(slots)), owner=owner)

    def drafted(self, extends: Mapping[Request, int]) -> dict[Request, int]:
        """Return by how much the draft worker extends each request."""
        return {r: self.kept(r, n) for r, n in extends.items()}

    def draft_batch(self, drafted: Mapping[Request, int]) -> ForwardBatch:
        """Return the draft worker's forward."""
        batch = self.forward_batch(drafted)
        known = {r: self.known(r, n) for r, n in drafted.items()}
        return replace(
            batch,
            requests=[
                replace(d, tokens=lambda a, b, r=r: known[r][a:b]) for d, r in zip(batch.requests, drafted, strict=True)
            ],
            input_ids=torch.tensor([t for r, n in drafted.items() for t in self.draft_ids(r, known[r], n)]).long(),
            out_slots={"draft": batch.out_slots["full"]},
            tables={"draft": batch.tables["full"]},
        )

    def known(self, request: Request, extend: int) -> list[int]:
        """Return a request's own tokens, the one that the target has just generated included."""
        end = request.cached + extend
        goes_on = request not in self.accepted and len(request.tokens) > end
        return request.tokens if goes_on else [*request.tokens[:end], self.next_tokens[request]]

    def draft_ids(self, request: Request, tokens: Sequence[int], extend: int) -> list[int]:
        """Return what the draft worker is given."""
        return list(tokens[request.cached + 1 : request.cached + extend + 1])

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        batch = self.forward_batch(extends)
        self.watch(batch, extends)
        with self.manager.one_step():
            self.in_step = True
            with self.manager.forward("target", groups=["full"]).around(batch):
                self.take_tokens(extends, self.run_kernels(batch, extends))
            drafted = self.drafted(extends)
            draft = self.draft_batch(drafted)
            self.watch_draft(draft, drafted)
            with self.manager.forward("draft", groups=["draft"]).around(draft):
                self.run_draft(draft, drafted)
            self.in_step = False
        yield from ()

    def watch_draft(self, batch: ForwardBatch, drafted: Mapping[Request, int]) -> None:
        [group] = self.groups
        written = iter(batch.out_slots["draft"].tolist())
        for request, extend in drafted.items():
            self.note(request, "draft", self.kernel_reads(group, request), "read")
            self.note(request, "draft", [next(written) for _ in range(extend)], "write")

    def run_draft(self, batch: ForwardBatch, drafted: Mapping[Request, int]) -> None:
        """Run the draft model, and note which tokens it drafts."""
        [group] = self.groups
        ends = np.cumsum([*drafted.values()]).tolist()
        spans = [
            Span(start=end - n, end=end, read=[self.kernel_reads(group, r)], windows=[None])
            for (r, n), end in zip(drafted.items(), ends, strict=True)
        ]
        layers = Layers(k=self.draft.k_source, v=self.draft.v_source, write=batch.out_slots["draft"].tolist())
        seeds = np.zeros(len(batch.input_ids), np.uint64)
        tokens = run_model(ids=batch.input_ids, positions=batch.positions, seeds=seeds, spans=spans, groups=[layers])
        for request, span in zip(drafted, spans, strict=True):
            drafts = self.life.drafts.setdefault(name_of(request), [])
            drafts.append((self.manager.step, tokens[span.end - 1]))


class PairedCache(PrefixCache):
    """What a draft worker keeps of a position depends on the token behind it too, and so do the keys."""

    def match(self, identity: int, tokens: Sequence[int]) -> list[int]:
        return super().match(identity, _pairs(tokens))

    def insert(
        self, identity: int, tokens: Sequence[int], pages: Sequence[int], *, usable: Callable[[int], bool]
    ) -> tuple[list[int], list[int]]:
        return super().insert(identity, _pairs(tokens), pages, usable=usable)


def _pairs(tokens: Sequence[int]) -> list[int]:
    return [a << 32 | b for a, b in pairwise(tokens)]


class ShiftsPositions(SpeculatingEngine):
    """Drafts are made one position too far."""

    def draft_batch(self, drafted: Mapping[Request, int]) -> ForwardBatch:
        batch = super().draft_batch(drafted)
        if any(r.steps == 0 for r in drafted):
            return batch
        self.acted({"draft": batch.out_slots["draft"].tolist()}, list(drafted))
        return replace(batch, positions=batch.positions + 1)


class RotatesChunk(SpeculatingEngine):
    """A chunk's tokens are rotated by one: behind its last comes its first, and not the next chunk's."""

    tells_tokens = False

    def draft_ids(self, request: Request, tokens: Sequence[int], extend: int) -> list[int]:
        ids = super().draft_ids(request, tokens, extend)
        if extend > 1 and self.remaining(request) > extend:
            [group] = self.groups
            end = request.cached + extend
            self.acted({"draft": group.out_slots(request, end - 1, end)}, [request], later=not self.tells_tokens)
            ids[-1] = request.tokens[request.cached]
        return ids


class TellingEngine(SpeculatingEngine):
    """The canary is told which tokens the draft worker should be given."""

    def draft_batch(self, drafted: Mapping[Request, int]) -> ForwardBatch:
        batch = super().draft_batch(drafted)
        right = [t for r, n in drafted.items() for t in SpeculatingEngine.draft_ids(self, r, self.known(r, n), n)]
        return replace(batch, expected_input_ids=torch.tensor(right, dtype=torch.int64))


class RotatesToldChunk(RotatesChunk, TellingEngine):
    tells_tokens = True


class SkipsDraft(SpeculatingEngine):
    """The draft worker does not see requests that are served without drafts; their pages are cached all the same."""

    def restart(self) -> None:
        super().restart()
        self.undrafted: set[int] = set()

    def drafted(self, extends: Mapping[Request, int]) -> dict[Request, int]:
        for request in self.plain.intersection(extends):
            self.undrafted.update(request.pages)
            self.acted({})
        return {r: n for r, n in super().drafted(extends).items() if r not in self.plain}

    def take_cached_prefix(self, request: Request) -> None:
        super().take_cached_prefix(request)
        never = [p for p in request.pages if p in self.undrafted]
        if never:
            self.acted({"draft": self.pages.slots(never)}, [request])


class WritesDummies(ServedEngine):
    """The draft model is one more layer of the target's blocks, and its dummy steps write to cached slots of it."""

    def finish(self, request: Request, *, keep: bool = True) -> Iterator[Call]:
        pages = list(request.pages)
        yield from super().finish(request, keep=keep)
        [group] = self.groups
        slots = group.page_slots(pages)[:3]
        self.acted({"full": slots})
        for source in group.sources:
            source.layers[-1][slots] = 0x5A


def many_layers() -> EngineConfig:
    """Return an engine of eight layers, of each of which every eighth position is sampled."""
    config = full()
    slots = config.groups[0].num_slots
    source = [kv_source(slots, layers=8) for _ in range(2)]
    return replace(config, groups=(replace(config.groups[0], k_source=source[0], v_source=source[1]),))


def hit_for_long(engine: ServedEngine) -> None:
    _hit(engine, fresh=3, steps=2)


def hit_for_one_token(engine: ServedEngine) -> None:
    _hit(engine, fresh=1, steps=0)


def _hit(engine: ServedEngine, *, fresh: int, steps: int) -> None:
    first = engine.come(shared=12)
    engine.prefill(first)
    engine.decode(first, steps=2)
    engine.leave(first)
    again = engine.come(shared=12, fresh=fresh)
    engine.prefill(again)
    engine.decode(again, steps=steps)


def speculate(engine: SpeculatingEngine) -> None:
    requests = [engine.come(fresh=9), engine.come(fresh=6)]
    engine.prefill(*requests)
    for accepted in (1, 3, 2):
        engine.go(engine.step(dict.fromkeys(requests, 3), accepted=dict.fromkeys(requests, accepted)))


def chunked(engine: SpeculatingEngine) -> None:
    other = engine.come(fresh=6)
    engine.prefill(other)
    request = engine.come(fresh=13)
    for _ in range(3):
        engine.prefill(request, chunk=5)
    engine.decode(request, other, steps=2)


def hit_without_draft(engine: SpeculatingEngine) -> None:
    first = engine.come(shared=8)
    engine.plain.add(first)
    engine.prefill(first)
    engine.decode(first)
    engine.leave(first)
    again = engine.come(shared=8, fresh=3)
    engine.prefill(again)
    engine.decode(again, steps=2)


SPECULATING = "speculation, a draft pool of its own"
ONE_POOL = "speculation, the draft model is one more layer of eight"
SEALED = replace(CANARY, seals="layer")

SCENARIOS: tuple[Scenario, ...] = (
    model_scenario(
        name="draft-positions",
        fault="F",
        example="sglang#25015",
        doc="the draft worker's positions are off by one",
        engine=SPECULATING,
        expected=Reason.WRITE_POSITION,
        life=speculate,
        config=full,
        healthy=SpeculatingEngine,
        faulty=ShiftsPositions,
    ),
    model_scenario(
        name="rotated-chunk",
        fault="F",
        example="sglang#26800",
        doc="the last token of a chunk that the draft worker is given is the chunk's first",
        engine=f"{SPECULATING}, chunked prefill",
        expected=Reason.TOKEN,
        life=chunked,
        config=full,
        healthy=SpeculatingEngine,
        faulty=RotatesChunk,
    ),
    model_scenario(
        name="rotated-chunk-told",
        fault="F",
        example="sglang#26800",
        doc="the same, where the canary is told the tokens to expect",
        engine=f"{SPECULATING}, chunked prefill",
        expected=Reason.WRITE_TOKEN,
        beyond=Reason.WRITE_TOKEN,
        life=chunked,
        config=full,
        healthy=TellingEngine,
        faulty=RotatesToldChunk,
    ),
    model_scenario(
        name="draft-never-written",
        fault="F",
        example="sglang#19897",
        doc="a prefix hit: the target's KV is there, the draft worker's was never written",
        engine=f"{SPECULATING}, prefix cache",
        expected=Reason.NEVER_WRITTEN,
        life=hit_without_draft,
        config=full,
        healthy=SpeculatingEngine,
        faulty=SkipsDraft,
    ),
    *(
        model_scenario(
            name=name,
            fault="F",
            example="vllm#56734",
            doc=f"dummy steps of the draft model write to its layer of a cached prefix; {who} hits it",
            engine=f"{ONE_POOL}, prefix cache, `seals=layer`",
            expected=Reason.SEAL_K | Reason.SEAL_V,
            beyond=Reason.SEAL_K | Reason.SEAL_V,
            life=life,
            config=many_layers,
            faulty=WritesDummies,
            canary=SEALED,
        )
        for name, who, life in (
            ("draft-layer-overwritten", "a request", hit_for_long),
            ("draft-layer-overwritten-one-token", "a request for a single token", hit_for_one_token),
        )
    ),
    model_scenario(
        name="draft-layer-overwritten-unsealed",
        fault="F",
        example="vllm#56734",
        doc="the same, without seals: positions 0 to 2 are sampled in other layers",
        engine=f"{ONE_POOL}, prefix cache",
        expected=NOTHING,
        life=hit_for_long,
        config=many_layers,
        faulty=WritesDummies,
    ),
)
