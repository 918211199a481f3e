"""The model engine with a model in it that reads what is cached, and a record of what its forwards use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from kv_canary import BufferGroup, CanaryConfig, CanaryManager, ForwardBatch, KvSource
from kv_canary.difftest.simulator import Call, EngineConfig, GroupConfig, Request
from kv_canary.difftest.simulator.canary_engine import CanaryEngine
from kv_canary.difftest.simulator.config import Kind
from kv_canary.difftest.simulator.groups import Group, RingGroup
from kv_canary.runtime.rows import RowTable

from .life import Act, Life, Touch, names
from .toy_model import Layers, Span, run_model

PAGE = 4
CANARY = CanaryConfig(backend="reference", max_reports_per_step=1000)


class ServedEngine(CanaryEngine):
    """An engine whose forwards compute: a text depends on all KV that its kernels read.

    Bugs are subclasses, each with the method that has the bug. What the engine tells the canary is `forward_batch`;
    what its kernels do is `kernel_reads`, `kernel_writes` and `kernel_load`. A bug says what it did by `acted`.
    """

    def __init__(self, config: EngineConfig, *, canary: CanaryConfig = CANARY) -> None:
        self.life = Life()
        self.in_step = self.in_model = False
        self.next_tokens: dict[Request, int] = {}
        self.accepted: Mapping[Request, int] = {}
        super().__init__(config, canary=canary)
        self.install(self.manager.groups)

    def install(self, groups: Sequence[BufferGroup]) -> None:
        """Let a canary guard these groups, and know the requests by their serial numbers."""
        limits, config = self.manager.limits, self.manager.config
        self.manager = CanaryManager(
            groups, limits=limits, config=config, rows=Serials(2), on_report=self.life.reports.append
        )
        # The canary's own failures are to be seen here, in log mode too.
        self.manager.guard.contains = False

    @property
    def current_step(self) -> int:
        """The step under way, or the next one."""
        return self.manager.step + (not self.in_step)

    def acted(
        self,
        slots: Mapping[str, Sequence[int]],
        requests: Sequence[Request] | None = None,
        *,
        shown_by: Sequence[Request] | None = None,
        later: bool = False,
    ) -> None:
        """Note that the bug has just spoiled these slots, by group; see `Act`."""
        act = Act(
            step=self.current_step,
            slots={name: frozenset(s) for name, s in slots.items()},
            requests=None if requests is None else names([r.serial for r in requests]),
            shown_by=None if shown_by is None else names([r.serial for r in shown_by]),
            later=later or self.in_model,
        )
        self.life.acts.append(act)

    def end_life(self) -> Life:
        """Return what was seen, everything that the canary has found included."""
        self.manager.flush()
        self.life.summary, self.life.incidents = self.manager.summary(), self.manager.incidents
        return self.life

    # What happens in a life.

    def come(self, *, stem: int = 0, shared: int = 0, fresh: int = 0, identity: int = 0) -> Request:
        """Let a request arrive and be admitted, by `shared` tokens of a text that others begin with too."""
        request = self.arrive(stem=stem, shared=shared, fresh=fresh, identity=identity)
        self.let_in(request)
        return request

    def let_in(self, request: Request) -> None:
        """Admit a waiting request; there must be room."""
        if not self.admit(request):
            raise RuntimeError(f"scenario: there must be a row for request {request.serial}, got none")

    def prefill(self, *requests: Request, chunk: int = 1 << 30) -> None:
        """Run one forward over so many tokens of each request that are not cached yet."""
        self.go(self.step({r: min(self.remaining(r), chunk) for r in requests}))

    def decode(self, *requests: Request, steps: int = 1) -> None:
        """Run forwards of one token of each request."""
        for _ in range(steps):
            self.go(self.step(dict.fromkeys(requests, 1)))

    def leave(self, request: Request, *, keep: bool = True) -> None:
        self.go(self.finish(request, keep=keep))

    def take_back(self, request: Request) -> None:
        self.go(self.retract(request))

    @staticmethod
    def go(calls: Iterator[Call]) -> None:
        """Let it happen."""
        for call in calls:
            raise RuntimeError(f"scenario: a guarded engine must make no calls, got {call.op}")

    def forward_batch(self, extends: Mapping[Request, int]) -> ForwardBatch:
        batch = super().forward_batch(extends)
        called = [replace(d, request_id=name_of(r)) for d, r in zip(batch.requests, extends, strict=True)]
        return replace(batch, requests=called)

    # What the kernels do.

    def kernel_reads(self, group: Group, request: Request) -> list[int]:
        """Return the slots of the cached positions that the kernels read for a request."""
        first = max(0, request.cached - group.config.window) if group.config.window else 0
        slots = group.table[request.row, first : request.cached].long()
        return (slots if group.lut is None else group.lut[slots]).tolist()

    def kernel_writes(self, group: Group, slots: Sequence[int]) -> list[int]:
        """Return where the kernels put the K and V of new tokens that are to go to `slots`."""
        return list(slots)

    def kernel_load(self, data: np.ndarray) -> np.ndarray:
        """Return what the kernels make of bytes that they read, uint8 [tokens, bytes]."""
        return data

    def seed(self, request: Request) -> int:
        """Return what a request's KV depends on besides its tokens."""
        return request.identity

    def run_kernels(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> list[int]:
        """Run the model; return the token behind each input."""
        return run_model(
            ids=batch.input_ids,
            positions=batch.positions,
            seeds=np.repeat(np.array([self.seed(r) for r in extends], np.uint64), list(extends.values())),
            spans=self.spans(extends, [[self.kernel_reads(g, r) for g in self.groups] for r in extends]),
            groups=[
                Layers(
                    k=group.config.k_source,
                    v=group.config.v_source,
                    write=self.kernel_writes(group, batch.out_slots[group.name].tolist()),
                    overwrites=isinstance(group, RingGroup),
                    load=self.kernel_load,
                )
                for group in self.groups
            ],
        )

    def spans(self, extends: Mapping[Request, int], reads: Sequence[Sequence[Sequence[int]]]) -> list[Span]:
        """Return each request's share of the forward; `reads` are its slots, by request and group."""
        ends = np.cumsum(list(extends.values())).tolist()
        windows = [g.config.window or None for g in self.groups]
        return [
            Span(start=end - n, end=end, read=read, windows=windows)
            for n, end, read in zip(extends.values(), ends, reads, strict=True)
        ]

    # Around a forward.

    def step(
        self, work: Mapping[Request, int], *, accepted: Mapping[Request, int] | None = None, padding: int = 0
    ) -> Iterator[Call]:
        self.accepted, self.next_tokens = accepted or {}, {}
        yield from super().step(work, accepted=accepted, padding=padding)
        for request, token in self.next_tokens.items():
            if request in self.running and self.remaining(request) == 0:
                request.tokens.append(token)
                self.life.texts.setdefault(name_of(request), []).append((self.manager.step, token))

    def _step_calls(self, extends: Mapping[Request, int], *, padding: int) -> Iterator[Call]:
        batch = self.forward_batch(extends)
        self.watch(batch, extends)
        with self.manager.forward().around(batch):
            self.in_step = self.in_model = True
            self.take_tokens(extends, self.run_kernels(batch, extends))
            self.in_step = self.in_model = False
        yield from ()

    def take_tokens(self, extends: Mapping[Request, int], generated: Sequence[int]) -> None:
        """Keep the token behind the last input of each request that stays."""
        end = 0
        for request, extend in extends.items():
            self.next_tokens[request] = generated[end + self.kept(request, extend) - 1]
            end += extend

    def kept(self, request: Request, extend: int) -> int:
        """Return how many of a request's inputs stay: where they are drafts, those that are accepted."""
        return min(extend, self.accepted.get(request, extend))

    def watch(self, batch: ForwardBatch, extends: Mapping[Request, int]) -> None:
        """Note which slots a forward uses, as the engine's tables have it."""
        for group in self.groups:
            written = iter(batch.out_slots[group.name].tolist())
            for request, extend in extends.items():
                self.note(request, group.name, ServedEngine.kernel_reads(self, group, request), "read")
                self.note(request, group.name, [next(written) for _ in range(extend)], "write")

    def note(self, request: Request, group: str, slots: Sequence[int], kind: str) -> None:
        """Note that the step about to run uses slots for a request."""
        touches = (
            Touch(step=self.current_step, request=name_of(request), group=group, slot=s, kind=kind) for s in slots
        )
        self.life.touches.extend(touches)

    def slots_of(self, pages: Sequence[int]) -> dict[str, list[int]]:
        """Return the slots of pages, by group."""
        return {g.name: g.page_slots(pages) for g in self.groups if not isinstance(g, RingGroup)}

    def users_of(self, slot: int) -> list[tuple[Request, int]]:
        """Return the running requests that have a slot of the pages cached, each with its position there."""
        found = []
        for request in self.running:
            slots = self.pages.slots(request.pages)[: request.cached]
            found += [(request, slots.index(slot))] if slot in slots else []
        return found


class Serials(RowTable):
    """Owners are serial numbers, and so are names."""

    def name(self, owner: int) -> str | None:
        return str(owner)


def name_of(request: Request) -> str:
    [name] = names([request.serial])
    return name


def kv_source(num_slots: int, *, layers: int = 2, width: int = 32) -> KvSource:
    """Return a pool of zeros, of which 16 bytes a token are fingerprinted, as in production."""
    return KvSource(
        layers=tuple(torch.zeros(num_slots, width, dtype=torch.uint8) for _ in range(layers)),
        page_size=1,
        bytes_per_token=width,
    )


def group_config(kind: Kind, num_slots: int, *, window: int = 0) -> GroupConfig:
    return GroupConfig(
        kind=kind, num_slots=num_slots, window=window, k_source=kv_source(num_slots), v_source=kv_source(num_slots)
    )


def full(*, num_pages: int = 24, **changes: object) -> EngineConfig:
    """Return an engine with full attention, pages of 4 and a prefix cache."""
    plain = EngineConfig(
        groups=(group_config("full", (1 + num_pages) * PAGE),),
        page_size=PAGE,
        num_pages=num_pages,
        first_slot=PAGE,
        max_rows=6,
        max_len=64,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def full_and_lut(*, num_pages: int = 24, window_pages: int = 12, window: int = 7, **changes: object) -> EngineConfig:
    """Return an engine that has layers with a window too, in a pool of their own behind a LUT."""
    groups = (
        group_config("full", (1 + num_pages) * PAGE),
        group_config("lut", (1 + window_pages) * PAGE, window=window),
    )
    return full(num_pages=num_pages, groups=groups, **changes)
