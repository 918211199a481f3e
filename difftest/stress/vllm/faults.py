"""Faults in a running vLLM, one a life, and the traffic around them."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kv_canary.difftest.stress import causes
from kv_canary.difftest.stress.life import Life
from kv_canary.difftest.stress.vllm.engine import BLOCK, VOCABULARY, Engine
from kv_canary.engines.vllm import pools, support
from kv_canary.engines.vllm.pools import AttachedGroup
from kv_canary.specs.structures import KvSource

Script = Literal["in use", "cached", "newcomer", "preempted"]
Setting = Literal["plain", "writes", "drafts", "ahead", "32 layers", "80 layers"]

# The prompts of the victim and its neighbour, what they generate at least, and how much of that comes before a fault.
PROMPT, GENERATED, DECODED = 100, 40, 8


@dataclass(frozen=True, kw_only=True)
class Scene:
    """The parts of an engine that a fault can reach.

    Args:
        engine: vLLM.
        rng: where choices come from.
        blocks: the victim's, in order.
        length: how many of the victim's positions are in the cache.
        others: its neighbour's blocks.
        before: blocks that the victim had before it was put off.
        victim, neighbour: vLLM's names of the requests, "" if they have ended.
    """

    engine: Engine
    rng: random.Random
    blocks: Sequence[int]
    length: int
    others: Sequence[int]
    before: Sequence[int] = ()
    victim: str = ""
    neighbour: str = ""

    @property
    def runner(self) -> Any:
        """vLLM's model runner."""
        return self.engine.worker.model_runner

    @property
    def is_v2(self) -> bool:
        """Whether it is V2."""
        return bool(self.engine.worker.use_v2_model_runner)

    @functools.cached_property
    def groups(self) -> list[AttachedGroup]:
        """The groups of the worker's KV cache as the canary sees them, whether there is one or not."""
        drafts = support.draft_layers(self.runner, is_v2=self.is_v2)
        return pools.attach(self.engine.worker, read_bytes=16, drafts=drafts)[0]

    def slot(self, position: int) -> int:
        """Return the slot of one of the victim's positions."""
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def table_row(self, name: str) -> torch.Tensor:
        """Return a running request's row of block ids, int32, from which what the kernels get is copied."""
        if self.is_v2:
            row = self.runner.req_states.req_id_to_index[name]
            found: torch.Tensor = self.runner.block_tables.block_tables[0].gpu[row]
            return found
        batch = self.runner.input_batch
        table: torch.Tensor = batch.block_table[0].block_table.cpu[batch.req_id_to_index[name]]
        return table


@dataclass(frozen=True, kw_only=True)
class Act:
    """The damage that a fault did.

    Args:
        where: in words.
        slots: that a report may be of; it may grow for as long as damage is done.
    """

    where: str
    slots: Set[int]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which an engine goes wrong.

    Args:
        name: what it is called.
        doc: what goes wrong.
        script: the traffic around it: the victim is decoding ("in use"), idle in the prefix cache ("cached"), decoding
            while requests come that take free blocks ("newcomer"), or back from being put off ("preempted").
        act: does it; None: nothing goes wrong.
        setting: of the engine and the canary: as they come, with `check_writes`, with a draft model, with one and steps
            that are prepared ahead, or with as many layers as large models have.
        right, half: parts of causes, see `causes`.
    """

    name: str
    doc: str
    script: Script
    act: Callable[[Scene], Act] | None
    setting: Setting = "plain"
    right: Sequence[str] = causes.CHANGED
    half: Sequence[str] = ()


def live(fault: Fault, engine: Engine, *, seed: int, see: Callable[[], None]) -> Life[Act]:
    """Serve the fault's traffic, with the fault in the midst of it.

    Args:
        fault: what goes wrong.
        engine: a fresh one, which is used up.
        seed: of the traffic, which all faults of a script share, and of the fault's choices.
        see: called after every step.
    """
    return _Traffic(engine, fault, seed, see).serve()


class _Traffic:
    """Requests of one life."""

    def __init__(self, engine: Engine, fault: Fault, seed: int, see: Callable[[], None]) -> None:
        self._engine, self._fault, self._see = engine, fault, see
        self._texts, self._choices = random.Random(seed), random.Random(f"{fault.name} {seed}")
        self._acted_at = 0
        self._act: Act | None = None

    def serve(self) -> Life[Act]:
        ended = ""
        try:
            self._serve()
        except Exception as error:
            # A fault may also break the engine.
            ended = f"{type(error).__name__}: {error}"
        engine = self._engine
        return Life(outputs=engine.outputs, act=self._act, acted_at=self._acted_at, steps=engine.steps, ended=ended)

    def _serve(self) -> None:
        engine, script = self._engine, self._fault.script
        # The last block first: that is where an index of -1 leads.
        queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        for block in reversed([queue.popleft() for _ in range(queue.num_free_blocks)]):
            queue.append(block)
        texts = [self._text(PROMPT), self._text(PROMPT)]
        # Of many lengths, so that blocks end at many places.
        most = [GENERATED + self._texts.randrange(10) for _ in texts]
        for name, text, tokens in zip(("victim", "neighbour"), texts, most, strict=True):
            engine.submit(name, text, new_tokens=tokens)
        self._run(lambda: min(map(self._generated, ("victim", "neighbour"))) >= DECODED)
        before: Sequence[int] = ()
        if script == "preempted":
            before = self._blocks(self._name("victim"))
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
            # As many as take what the two have given back.
            fillers = [f"filler {n}" for n in range(4)]
            for name in fillers:
                engine.submit(name, self._text(130), new_tokens=20)
            done = self._generated("victim")
            self._run(lambda: min(map(self._generated, fillers)) > 0 and self._generated("victim") > done)
        elif script == "cached":
            others = self._blocks(self._name("neighbour"))
            self._run(lambda: self._generated("victim") == most[0] - 1)
            blocks, length = self._blocks(self._name("victim")), self._length()
            self._run()
            self._do(Scene(engine=engine, rng=self._choices, blocks=blocks, length=length, others=others))
        if script != "cached":
            victim, neighbour = self._name("victim"), self._name("neighbour")
            self._do(
                Scene(
                    engine=engine,
                    rng=self._choices,
                    blocks=self._blocks(victim),
                    length=self._length(),
                    others=self._blocks(neighbour),
                    before=before,
                    victim=victim,
                    neighbour=neighbour,
                )
            )
        for n in range(2):
            engine.submit(f"stranger {n}", self._text(40), new_tokens=6)
        if script == "newcomer":
            # As many as take every free block.
            free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            for n in range(-(-free // 5)):
                engine.submit(f"newcomer {n}", self._text(140), new_tokens=6)
        self._run()
        for n, text in enumerate(texts):
            engine.submit(f"again {n}", text + self._text(5), new_tokens=8)
        self._run()
        engine.submit("last", self._text(20), new_tokens=6)
        self._run()

    def _do(self, scene: Scene) -> None:
        self._acted_at = self._engine.steps
        if self._fault.act is not None:
            self._act = self._fault.act(scene)

    def _run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until `until` holds, or there is nothing left to do."""

        def ends() -> bool:
            self._see()
            return until()

        self._engine.run(ends, most=500)
        self._see()

    def _name(self, name: str) -> str:
        """Return vLLM's name of a request; "" where it has ended."""
        return next((r for r in self._engine.scheduler.requests if r.startswith(name)), "")

    def _generated(self, name: str) -> int:
        found = self._name(name)
        return self._engine.scheduler.requests[found].num_output_tokens if found else len(self._engine.outputs[name])

    def _blocks(self, name: str) -> list[int]:
        ids: list[int] = self._engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
        return list(ids)

    def _length(self) -> int:
        length: int = self._engine.scheduler.requests[self._name("victim")].num_computed_tokens
        return length

    def _text(self, length: int) -> list[int]:
        return [self._texts.randrange(3, VOCABULARY) for _ in range(length)]


def _slots(*blocks: int) -> frozenset[int]:
    return frozenset(block * BLOCK + offset for block in blocks for offset in range(BLOCK))


def _any_bit(scene: Scene) -> Act:
    """Change a random bit of K or V, in a random layer, of a random position."""
    pool = scene.groups[0].group.pool
    source: KvSource = scene.rng.choice([half for half in (pool.k_source, pool.v_source) if half is not None])
    number, position = scene.rng.randrange(len(source.layers)), scene.rng.randrange(scene.length)
    byte, bit, slot = scene.rng.randrange(source.bytes_per_token), scene.rng.randrange(8), scene.slot(position)
    row = source.layers[number][slot // source.page_size].view(torch.uint8)
    row[source.offset_bytes + slot % source.page_size * source.token_stride_bytes + byte] ^= 1 << bit
    half = "K" if source is pool.k_source else "V"
    return Act(where=f"{half} of {pool.layer_names[number]}, position {position}, bit {bit}", slots=frozenset({slot}))


def _layer(scene: Scene) -> tuple[str, torch.Tensor]:
    """Return a random layer's name, and its cache."""
    config = scene.engine.worker.vllm_config.compilation_config
    name = scene.rng.choice(scene.groups[0].layers)
    return name, config.static_forward_context[name].kv_cache


def _page(scene: Scene) -> Act:
    """Overwrite one of the victim's blocks in one layer with what somebody else would have stored there."""
    return _overwrite(scene, *_layer(scene))


def _drafters_page(scene: Scene) -> Act:
    """Do so in a draft model's layer."""
    config = scene.engine.worker.vllm_config.compilation_config
    name = scene.rng.choice(scene.groups[-1].layers)
    return _overwrite(scene, name, config.static_forward_context[name].kv_cache)


def _overwrite(scene: Scene, name: str, cache: torch.Tensor) -> Act:
    block = scene.blocks[scene.rng.randrange(scene.length // BLOCK)]
    generator = torch.Generator().manual_seed(scene.rng.randrange(1 << 31))
    cache[block] = torch.randn(cache[block].shape, generator=generator) * cache.std()
    return Act(where=f"{name}, block {block}", slots=_slots(block))


def _swap_blocks(scene: Scene) -> Act:
    row = scene.table_row(scene.victim)
    a, b = int(row[0]), int(row[1])
    row[0], row[1] = b, a
    return Act(where=f"blocks {a} and {b}", slots=_slots(a, b))


def _neighbours_block(scene: Scene) -> Act:
    row, n = scene.table_row(scene.victim), scene.rng.randrange(scene.length // BLOCK)
    mine, theirs = int(row[n]), scene.others[n]
    row[n] = theirs
    return Act(where=f"block {theirs} for {mine}", slots=_slots(mine, theirs))


def _stale_row(scene: Scene) -> Act:
    """Leave in the victim's row a block that it had before it was put off, and that is another's now."""
    manager = scene.engine.scheduler.kv_cache_manager
    others = {b for r in scene.engine.scheduler.requests for b in manager.get_block_ids(r)[0] if r != scene.victim}
    found = [(n, b) for n, b in enumerate(scene.before) if b in others and n < scene.length // BLOCK]
    if not found:
        raise RuntimeError("kv-canary: stress: a block must be another request's by now, got none")
    n, block = found[0]
    row = scene.table_row(scene.victim)
    mine = int(row[n])
    row[n] = block
    return Act(where=f"entry {n}: block {block} for {mine}", slots=_slots(mine, block))


def _wrong_slot(scene: Scene) -> Act:
    """Let the victim's next token be written into the neighbour's newest slot."""
    wrong = scene.others[(scene.length - 2) // BLOCK] * BLOCK + (scene.length - 2) % BLOCK
    runner, touched = scene.runner, {wrong}

    def damage(names: Sequence[str], starts: torch.Tensor, slots: torch.Tensor) -> None:
        if len(touched) == 1:
            place = int(starts[list(names).index(scene.victim)])
            touched.add(int(slots[place]))
            slots[place] = wrong

    if scene.is_v2:
        prepare = runner.prepare_attn

        def prepare_attn(batch: Any, *args: Any, **kwargs: Any) -> Any:
            found = prepare(batch, *args, **kwargs)
            damage(batch.req_ids, batch.query_start_loc, runner.block_tables.slot_mappings[0])
            return found

        runner.prepare_attn = prepare_attn
    else:
        forward = runner._model_forward

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            damage(batch.req_ids, runner.query_start_loc.gpu, batch.block_table[0].slot_mapping.gpu)
            return forward(*args, **kwargs)

        runner._model_forward = model_forward
    return Act(where=f"slot {wrong} for the victim's next", slots=touched)


def _minus_one(scene: Scene) -> Act:
    """Let every forward's padding rows write to the slot that an index of -1 leads to."""
    _, cache = _layer(scene)
    last = cache.shape[0] * BLOCK - 1
    config = scene.engine.worker.vllm_config.compilation_config
    for name in scene.groups[0].layers:
        _around_update(
            config.static_forward_context[name], lambda cache, _slots, _k, _v: _write(cache, last, 0.5), times=1000
        )
    return Act(where=f"slot {last}", slots=frozenset({last}))


def _padding(scene: Scene) -> Act:
    """Let a padding row of the next forward write constants to the slot that the victim's token goes to."""
    name, _ = _layer(scene)
    slot = scene.blocks[scene.length // BLOCK] * BLOCK + scene.length % BLOCK
    layer = scene.engine.worker.vllm_config.compilation_config.static_forward_context[name]
    _around_update(layer, lambda cache, _slots, _k, _v: _write(cache, slot, 0.5))
    return Act(where=f"{name}, slot {slot}", slots=frozenset({slot}))


def _swapped_halves(scene: Scene) -> Act:
    """Let the next forward write K where V belongs and V where K belongs, for the victim's token in one layer."""
    name, _ = _layer(scene)
    slot = scene.blocks[scene.length // BLOCK] * BLOCK + scene.length % BLOCK
    layer = scene.engine.worker.vllm_config.compilation_config.static_forward_context[name]

    def swap(cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        at = slots.tolist().index(slot)
        _write(cache, slot, v[at], k[at])

    _around_update(layer, swap)
    return Act(where=f"{name}, slot {slot}", slots=frozenset({slot}))


def _dropped_write(scene: Scene) -> Act:
    """Let the next forward leave a layer's cache as it was at the victim's token."""
    name, cache = _layer(scene)
    slot = scene.blocks[scene.length // BLOCK] * BLOCK + scene.length % BLOCK
    layer = scene.engine.worker.vllm_config.compilation_config.static_forward_context[name]
    block = cache[slot // BLOCK].clone()

    def restore(cache: torch.Tensor, _slots: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor) -> None:
        cache[slot // BLOCK] = block

    _around_update(layer, restore)
    return Act(where=f"{name}, slot {slot}", slots=frozenset({slot}))


def _around_update(layer: Any, damage: Callable[..., None], *, times: int = 1) -> None:
    """Do damage behind a layer's next writes to its cache."""
    original, left = layer.impl.do_kv_cache_update, [times]

    def do_kv_cache_update(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> Any:
        result = original(layer, key, value, cache, slots)
        if left[0]:
            left[0] -= 1
            damage(cache, slots, key, value)
        return result

    layer.impl.do_kv_cache_update = do_kv_cache_update


def _write(cache: torch.Tensor, slot: int, k: Any, v: Any = None) -> None:
    """Write K and V of a token into a layer as the CPU's kernels keep them; [heads, numbers] or a constant."""
    heads, tokens, size = cache.shape[1], cache.shape[2], cache.shape[3] // 2
    block, offset = cache[slot // tokens].view(heads, 2, tokens * size), slot % tokens
    block[:, 0].view(heads, size, tokens)[:, :, offset] = k
    block[:, 1].view(heads, tokens, size)[:, offset] = k if v is None else v


def _block_pool(scene: Scene) -> Any:
    return scene.engine.scheduler.kv_cache_manager.block_pool


def _free_early(scene: Scene) -> Act:
    """Give the allocator a block back that the victim still uses."""
    pool, n = _block_pool(scene), scene.rng.randrange(scene.length // BLOCK)
    block = scene.engine.scheduler.kv_cache_manager.get_blocks(scene.victim).blocks[0][n]
    pool._maybe_evict_cached_block(block)
    pool.free_blocks([block])
    return Act(where=f"block {block.block_id}", slots=_slots(block.block_id))


def _hand_out_twice(scene: Scene) -> Act:
    """Let the allocator hand out a block that the victim still uses, the next time that it is asked."""
    pool, n = _block_pool(scene), scene.rng.randrange(scene.length // BLOCK)
    block = scene.engine.scheduler.kv_cache_manager.get_blocks(scene.victim).blocks[0][n]
    original = pool.get_new_blocks
    state: dict[str, bool] = {}

    def get_new_blocks(count: int) -> Any:
        found = original(count)
        if not state and found:
            state["done"] = True
            # As the allocator would have left it.
            pool._maybe_evict_cached_block(block)
            block.ref_cnt += 1
            found[0] = block
        return found

    pool.get_new_blocks = get_new_blocks
    return Act(where=f"block {block.block_id}", slots=_slots(block.block_id))


def _hash_collision(scene: Scene) -> Act:
    """Let the prefix cache find the neighbour's first block where the victim's is meant."""
    blocks, cached = _block_pool(scene).blocks, _block_pool(scene).cached_block_hash_to_block
    mine, theirs = blocks[scene.blocks[0]], blocks[scene.others[0]]
    key = mine.block_hash
    cached.pop(key, mine.block_id)
    cached.insert(key, theirs)
    return Act(where=f"block {theirs.block_id} for {mine.block_id}", slots=_slots(mine.block_id, theirs.block_id))


DEEP: tuple[Setting, ...] = ("32 layers", "80 layers")
SCRIPTS_OF_BITS: tuple[tuple[Script, str], ...] = (
    ("in use", "of a request that is decoding"),
    ("cached", "of an idle prefix in the cache"),
)

_FAULTS = (
    Fault(
        name="bit, in use",
        doc="a random bit of K or V of any layer changes, of a request that is decoding",
        script="in use",
        act=_any_bit,
    ),
    Fault(
        name="bit, cached",
        doc="a random bit of K or V of any layer changes, of an idle prefix in the cache",
        script="cached",
        act=_any_bit,
    ),
    Fault(
        name="one layer's block, in use",
        doc="a block is overwritten in one layer, of a request that is decoding",
        script="in use",
        act=_page,
        right=causes.STRAY,
        half=causes.UNRECORDED,
    ),
    Fault(
        name="one layer's block, cached",
        doc="a block is overwritten in one layer, of an idle prefix in the cache",
        script="cached",
        act=_page,
        right=causes.STRAY,
        half=causes.UNRECORDED,
    ),
    Fault(
        name="blocks swapped",
        doc="two entries of a request's block table are swapped",
        script="in use",
        act=_swap_blocks,
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="another request's block",
        doc="an entry of a request's block table is another request's, of the same place",
        script="in use",
        act=_neighbours_block,
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="stale row behind a preemption",
        doc="a request's row keeps a block from before it was put off, which is another request's now",
        script="preempted",
        act=_stale_row,
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="wrong slot_mapping entry",
        doc="a token is written to a slot of another request",
        script="in use",
        act=_wrong_slot,
        right=causes.WRONG_MAPPING,
    ),
    Fault(
        name="-1 taken for an index",
        doc="padding rows, whose slot is -1, write to the last slot of all, which is a request's",
        script="in use",
        act=_minus_one,
    ),
    Fault(
        name="freed while in use",
        doc="the allocator gets a block back that a request still reads, and hands it on",
        script="newcomer",
        act=_free_early,
        right=causes.FREED,
        # A worker sees the block in two tables; which of the two is too early, its engine core alone could say.
        half=causes.TWO_OWNERS,
    ),
    Fault(
        name="handed out twice",
        doc="the allocator hands out a block that a request still reads",
        script="newcomer",
        act=_hand_out_twice,
        right=causes.TWO_OWNERS,
        half=causes.FREED,
    ),
    Fault(
        name="hash collision in the prefix cache",
        doc="the prefix cache finds another text's block",
        script="cached",
        act=_hash_collision,
        right=causes.WRONG_PREFIX,
    ),
    Fault(
        name="constant padding in the same forward",
        doc="a padding row writes constants to a slot that the very forward writes, in one layer",
        script="in use",
        act=_padding,
        setting="writes",
        right=causes.WRITTEN_WRONG,
    ),
    Fault(
        name="K and V swapped",
        doc="a token's K and V are swapped in one layer, in the forward that writes them",
        script="in use",
        act=_swapped_halves,
        setting="writes",
        right=causes.WRITTEN_WRONG,
    ),
    Fault(
        name="write dropped",
        doc="a token's K and V are not written in one layer, in the forward that should",
        script="in use",
        act=_dropped_write,
        setting="writes",
        right=causes.WRITTEN_WRONG,
    ),
)
_DRAFTS = (
    Fault(
        name="a drafter's layer, in use",
        doc="a block is overwritten in a draft model's layer, of a request that is decoding",
        script="in use",
        act=_drafters_page,
        setting="drafts",
        right=causes.STRAY,
        half=causes.UNRECORDED,
    ),
    Fault(
        name="a drafter's layer, cached",
        doc="a block is overwritten in a draft model's layer, of an idle prefix in the cache",
        script="cached",
        act=_drafters_page,
        setting="drafts",
        right=causes.STRAY,
        half=causes.UNRECORDED,
    ),
)
_AHEAD = (
    Fault(
        name="drafted ahead: a drafter's layer, in use",
        doc="a block is overwritten in a draft model's layer, while scheduling is asynchronous",
        script="in use",
        act=_drafters_page,
        setting="ahead",
        right=causes.STRAY,
        half=causes.UNRECORDED,
    ),
    Fault(
        name="drafted ahead: blocks swapped",
        doc="two entries of a request's block table are swapped, while drafts are scheduled asynchronously",
        script="in use",
        act=_swap_blocks,
        setting="ahead",
        right=causes.WRONG_ENTRY,
    ),
    Fault(
        name="drafted ahead: wrong slot_mapping entry",
        doc="a token is written to a slot of another request, while drafts are scheduled asynchronously",
        script="in use",
        act=_wrong_slot,
        setting="ahead",
        right=causes.WRONG_MAPPING,
    ),
)
_DEEP: tuple[Fault, ...] = tuple(
    Fault(
        name=f"{layers}: bit, {script}",
        doc=f"a random bit of K or V of any of {layers} changes, {of}",
        script=script,
        act=_any_bit,
        setting=layers,
    )
    for layers in DEEP
    for script, of in SCRIPTS_OF_BITS
)


def healthy(fault: Fault) -> Fault:
    """Return the same traffic in the same engine, in which nothing goes wrong."""
    more = {"plain": "", "writes": ", writes checked", "drafts": ", with a draft model", "ahead": ", drafted ahead"}
    more |= {layers: f", {layers}" for layers in DEEP}
    name = f"healthy, {fault.script}{more[fault.setting]}"
    return dataclasses.replace(fault, name=name, doc="nothing goes wrong", act=None)


FAULTS = (*_FAULTS, *_DRAFTS, *_AHEAD, *_DEEP)
HEALTHY = tuple({healthy(f).name: healthy(f) for f in FAULTS}.values())
KNOWN = (*HEALTHY, *FAULTS)
