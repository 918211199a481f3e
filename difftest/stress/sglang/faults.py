"""Faults in a running SGLang, one a life, and the traffic around them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kv_canary.difftest.stress import causes
from kv_canary.difftest.stress.life import Life
from kv_canary.difftest.stress.sglang.engine import (
    BYTES_PER_TOKEN,
    LAYERS,
    VOCABULARY,
    cached_length,
    row_of,
    step,
    submit,
)

Half = Literal["K", "V"]
Script = Literal["in use", "cached", "newcomer"]

PAGE = 16
# Positions whose bytes change where a whole stretch is hit.
STRETCH = 32
# The victim's prompt, and the tokens that it has generated when the fault comes.
PROMPT, DECODED = 100, 8
# Slots that are freed while they are in use.
FREED = 40
# Steps after which a life that does not end is given up.
LONGEST = 500


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The parts of an engine that a fault can reach.

    Args:
        scheduler: the engine.
        rng: where choices come from.
        slots: int64, the slots of the victim's positions so far.
        rows: the lines of `req_to_token` of the victim and of its neighbour, which is as long; None if they ended.
    """

    scheduler: Any
    rng: random.Random
    slots: torch.Tensor
    rows: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class Act:
    """The damage that a fault did.

    Args:
        where: in words.
        position, byte, layer: of a single changed byte.
    """

    where: str
    position: int | None = None
    byte: int | None = None
    layer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which an engine goes wrong.

    Args:
        name: what it is called.
        doc: what goes wrong.
        script: the traffic around it: the victim is decoding ("in use"), or idle in the prefix cache ("cached"), or
            decoding while a long request comes that takes all free slots and more ("newcomer").
        act: does it; None: nothing goes wrong.
        page_size: the engine's.
        layer, half: whose bytes change, where the fault says.
        right, half_right: parts of causes, see `causes`.
    """

    name: str
    doc: str
    script: Script
    act: Callable[[Scene], Act] | None
    page_size: int = 1
    layer: int | None = None
    half: Half | None = None
    right: Sequence[str] = causes.CHANGED
    half_right: Sequence[str] = ()

    @property
    def one_byte(self) -> bool:
        """Whether a single byte of a single slot changes: what a fingerprint of some of the bytes may miss."""
        return self.name.startswith("one byte")


def live(fault: Fault, scheduler: Any, *, seed: int, see: Callable[[int], None]) -> Life[Act]:
    """Serve the fault's traffic, with the fault in the midst of it.

    Args:
        fault: what goes wrong.
        scheduler: a fresh engine, which is used up.
        seed: of the traffic, which all faults of a script share, and of the fault's choices.
        see: called after every step with its number, counted from 0.
    """
    return _Traffic(scheduler, fault, seed, see).serve()


class _Traffic:
    """Requests of one life."""

    def __init__(self, scheduler: Any, fault: Fault, seed: int, see: Callable[[int], None]) -> None:
        self._scheduler, self._fault, self._see = scheduler, fault, see
        self._texts, self._choices = random.Random(seed), random.Random(f"{fault.name} {seed}")
        self._requests: dict[str, Any] = {}
        self._steps, self._acted_at = 0, 0
        self._act: Act | None = None

    def serve(self) -> Life[Act]:
        ended = ""
        try:
            if self._fault.script == "cached":
                self._serve_cached()
            else:
                self._serve_in_use()
        except Exception as error:
            # A fault may also break the engine, and a canary that raises ends the life.
            ended = f"{type(error).__name__}: {error}"
        return Life(
            outputs={name: list(r.output_ids) for name, r in self._requests.items()},
            act=self._act,
            acted_at=self._acted_at,
            steps=self._steps,
            ended=ended,
        )

    def _serve_in_use(self) -> None:
        self._submit("earlier", self._text(60), 6)
        self._run()
        texts = [self._text(PROMPT), self._text(PROMPT)]
        both = [self._submit(name, text, 24) for name, text in zip(("victim", "neighbour"), texts, strict=True)]
        self._run(lambda: all(len(r.output_ids) >= DECODED for r in both))
        said = [list(r.output_ids)[: DECODED // 2] for r in both]
        free = int(self._scheduler.token_to_kv_pool_allocator.available_size())
        self._do(self._slots(both[0]), (row_of(both[0]), row_of(both[1])))
        if self._fault.script == "newcomer":
            later = self._steps + 3
            self._run(lambda: self._steps >= later)
            self._submit("newcomer", self._text(free + FREED // 2), 4)
        self._run()
        self._come_back([text + more for text, more in zip(texts, said, strict=True)])

    def _serve_cached(self) -> None:
        text = self._text(PROMPT)
        # Of many lengths, so that the next sweep is far in some lives and near in others.
        new_tokens = DECODED + self._texts.randrange(10)
        victim = self._submit("victim", text, new_tokens)
        # The last step ends the request, and hands its slots to the prefix cache.
        self._run(lambda: len(victim.output_ids) == new_tokens - 1)
        slots = self._slots(victim)
        self._run()
        self._do(slots, None)
        self._submit("stranger", self._text(20), 14)
        self._run()
        self._come_back([text])

    def _come_back(self, texts: Sequence[list[int]]) -> None:
        """Send requests that hit what the cache holds, and one that runs on a little, for what is reported late."""
        for i, text in enumerate(texts):
            self._submit(f"again {i}", text + self._text(5), 8)
        self._run()
        self._submit("last", self._text(20), 6)
        self._run()

    def _do(self, slots: torch.Tensor, rows: tuple[int, int] | None) -> None:
        self._acted_at = self._steps
        if self._fault.act is not None:
            self._act = self._fault.act(Scene(scheduler=self._scheduler, rng=self._choices, slots=slots, rows=rows))

    def _submit(self, name: str, text: list[int], new_tokens: int) -> Any:
        self._requests[name] = submit(self._scheduler, name, text, new_tokens=new_tokens)
        return self._requests[name]

    def _run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until `until` holds, or there is nothing left to do."""
        while not until():
            if self._steps == LONGEST:
                raise RuntimeError(f"the requests did not end in {LONGEST} steps")
            if step(self._scheduler) is None:
                return
            self._steps += 1
            self._see(self._steps - 1)

    def _text(self, length: int) -> list[int]:
        return [self._texts.randrange(3, VOCABULARY) for _ in range(length)]

    def _slots(self, request: Any) -> torch.Tensor:
        table: torch.Tensor = self._scheduler.req_to_token_pool.req_to_token
        return table[row_of(request), : cached_length(request)].long().clone()


def _buffer(scene: Scene, half: Half, layer: int) -> torch.Tensor:
    pool = scene.scheduler.tp_worker.model_runner.token_to_kv_pool
    buffer: torch.Tensor = (pool.k_buffer if half == "K" else pool.v_buffer)[layer]
    return buffer


def _stretch(half: Half, layer: int) -> Callable[[Scene], Act]:
    def act(scene: Scene) -> Act:
        start = scene.rng.randrange(PROMPT - STRETCH)
        slots, buffer = scene.slots[start : start + STRETCH], _buffer(scene, half, layer)
        generator = torch.Generator().manual_seed(scene.rng.randrange(1 << 31))
        # What somebody else would have stored there.
        buffer[slots] = torch.randn(buffer[slots].shape, generator=generator) * buffer[scene.slots].std()
        return Act(where=f"positions {start} to {start + STRETCH - 1}")

    return act


def _one_byte(half: Half, layer: int) -> Callable[[Scene], Act]:
    def act(scene: Scene) -> Act:
        position, byte = _change(scene, half, layer)
        return Act(where=f"position {position}, byte {byte}", position=position, byte=byte, layer=layer)

    return act


def _any_byte(scene: Scene) -> Act:
    halves: tuple[Half, ...] = ("K", "V")
    half, layer = scene.rng.choice(halves), scene.rng.randrange(LAYERS)
    position, byte = _change(scene, half, layer)
    where = f"{half} of layer {layer}, position {position}, byte {byte}"
    return Act(where=where, position=position, byte=byte, layer=layer)


def _change(scene: Scene, half: Half, layer: int) -> tuple[int, int]:
    """Change a random byte of a random position, and return position and byte."""
    position, byte = scene.rng.randrange(PROMPT), scene.rng.randrange(BYTES_PER_TOKEN)
    rows = _buffer(scene, half, layer).view(torch.uint8).view(-1, BYTES_PER_TOKEN)
    rows[scene.slots[position], byte] ^= 0xFF
    return position, byte


def _zero_page(scene: Scene) -> Act:
    start = PAGE * scene.rng.randrange(PROMPT // PAGE)
    for layer in range(LAYERS):
        for half in ("K", "V"):
            _buffer(scene, half, layer)[scene.slots[start : start + PAGE]] = 0
    return Act(where=f"positions {start} to {start + PAGE - 1}")


def _table(scene: Scene) -> tuple[torch.Tensor, tuple[int, int]]:
    if scene.rows is None:
        raise RuntimeError("kv-canary: sglang_faults: the victim must be running, got one that ended")
    return scene.scheduler.req_to_token_pool.req_to_token, scene.rows


def _swap_within(scene: Scene) -> Act:
    table, (row, _) = _table(scene)
    # Among the generated tokens, which the cache takes over when the request ends; half of them come again.
    p, q = PROMPT + scene.rng.randrange(2), PROMPT + DECODED // 2 + scene.rng.randrange(2)
    table[row, [p, q]] = table[row, [q, p]]
    return Act(where=f"positions {p} and {q}")


def _swap_with_neighbour(scene: Scene) -> Act:
    table, rows = _table(scene)
    p = scene.rng.randrange(1, PROMPT)
    table[list(rows), p] = table[list(reversed(rows)), p]
    return Act(where=f"position {p} of both")


def _wrong_prefix(scene: Scene) -> Act:
    table, (row, neighbour) = _table(scene)
    length = len(scene.slots)
    table[row, :length] = table[neighbour, :length]
    return Act(where=f"all {length} positions")


def _free_early(scene: Scene) -> Act:
    start = scene.rng.randrange(PROMPT - FREED)
    scene.scheduler.token_to_kv_pool_allocator.free(scene.slots[start : start + FREED].clone())
    return Act(where=f"positions {start} to {start + FREED - 1}")


def _bytes(script: Script) -> list[Fault]:
    which = {0: "first", LAYERS // 2: "middle", LAYERS - 1: "last"}
    whose = "of a request that is decoding" if script == "in use" else "of an idle prefix in the cache"
    halves: tuple[Half, ...] = ("K", "V")
    return [
        Fault(
            name=f"{extent}, {half} of the {which[layer]} layer, {script}",
            doc=f"{half} of the {which[layer]} layer {changed} {whose}",
            script=script,
            act=act(half, layer),
            layer=layer,
            half=half,
        )
        for extent, changed, act in (
            ("stretch", f"is overwritten at {STRETCH} positions", _stretch),
            ("one byte", "changes in one byte of one position", _one_byte),
        )
        for half in halves
        for layer in which
    ]


_SCRIPTS: tuple[tuple[Script, int], ...] = (
    ("in use", 1),
    ("cached", 1),
    ("newcomer", 1),
    ("in use", PAGE),
    ("cached", PAGE),
)
# The same traffic, in which nothing goes wrong; by script and page size.
HEALTHY = {
    (script, page_size): Fault(
        name=f"healthy, {script}" + (f", pages of {page_size}" if page_size > 1 else ""),
        doc="nothing goes wrong" + ("; the long request has the cache evicted" if script == "newcomer" else ""),
        script=script,
        act=None,
        page_size=page_size,
    )
    for script, page_size in _SCRIPTS
}

FAULTS = (
    *_bytes("in use"),
    *_bytes("cached"),
    Fault(
        name="one byte, anywhere, in use",
        doc="K or V of any layer changes in one byte of one position of a request that is decoding",
        script="in use",
        act=_any_byte,
    ),
    Fault(
        name="one byte, anywhere, cached",
        doc="K or V of any layer changes in one byte of one position of an idle prefix in the cache",
        script="cached",
        act=_any_byte,
    ),
    Fault(
        name="page zeroed, in use",
        doc=f"K and V of a page of {PAGE} are zeroed in all layers, of a request that is decoding",
        script="in use",
        act=_zero_page,
        page_size=PAGE,
        right=causes.ZEROED,
        half_right=causes.STRAY,
    ),
    Fault(
        name="page zeroed, cached",
        doc=f"K and V of a page of {PAGE} are zeroed in all layers, of an idle prefix in the cache",
        script="cached",
        act=_zero_page,
        page_size=PAGE,
        right=causes.ZEROED,
        half_right=causes.STRAY,
    ),
    Fault(
        name="entries swapped within a request",
        doc="two entries of a request's row of req_to_token are swapped",
        script="in use",
        act=_swap_within,
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="entries swapped between requests",
        doc="two requests' entries of req_to_token for one position are swapped",
        script="in use",
        act=_swap_with_neighbour,
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="another request's whole prefix",
        doc="a request's row names all of another's slots, which is as long: a prefix that is consistent in itself",
        script="in use",
        act=_wrong_prefix,
        right=causes.WRONG_PREFIX,
    ),
    Fault(
        name="freed while in use",
        doc=f"{FREED} slots of a request that is decoding are freed; three steps later a long request takes them",
        script="newcomer",
        act=_free_early,
        right=causes.FREED,
    ),
)
