"""`kv-canary stress vllm-tiers`: what goes wrong between vLLM's device and host memory, one fault a life.

A real engine on the CPU with vLLM's own OffloadingConnector, whose copies have a stand-in (`offloading`). A life serves
a prompt, pushes it off the device by others, and serves it again, so that its KV goes to host memory and comes back;
somewhere on the way one thing goes wrong. What the thread on the host does, the life does: it looks at a piece after
every step.
"""

from __future__ import annotations

import itertools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click

from kv_canary.difftest.stress import causes, tier_lives
from kv_canary.difftest.stress.vllm.engine import BLOCK, VOCABULARY, Engine, Runner, prepare, save_model

PROMPT, NEW_TOKENS, OTHERS, HOST_BYTES = 170, 6, 6, 8 << 20

# Makes a copy wrong: given the worker, the blocks on the device, the places on the host, whether the copy is already
# made, and where choices come from; returns whether the copy is left out.
Mistake = Callable[[Any, Any, Any, bool, random.Random], bool]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine: its runner, its model, how many blocks of it are a chunk of host memory."""

    name: str
    runner: Runner = "V1"
    kind: str = "llama"
    layers: int = 3
    per_chunk: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


SETTINGS = (
    Setting(name="V1, 3 layers"),
    Setting(name="V1, chunks of two blocks, 3 layers", per_chunk=2),
    Setting(name="V1, three groups over one memory", kind="gemma3", arguments={"num_gpu_blocks_override": 70}),
    Setting(name="V2, 3 layers", runner="V2"),
    Setting(name="V1, 32 layers", layers=32, arguments={"kv_cache_memory_bytes": 64 << 20}),
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which a tier goes wrong.

    Args:
        name, doc: what it is called, and what goes wrong.
        right, half: see `causes`.
        of: which copy: to the host ("store") or back; or none, but what lies there.
        do: makes it wrong; None for what lies there.
    """

    name: str
    doc: str
    right: Sequence[str] = causes.CAME_WRONG
    half: Sequence[str] = ()
    of: Literal["store", "load", "host"] = "load"
    do: Mistake | None = None


def _random(rows: Any, places: Any, rng: random.Random) -> None:
    import torch

    at = int(rng.choice(list(places)))
    rows[at] = torch.randint(-128, 127, rows[at].shape, dtype=rows.dtype)


def _too_early(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        _random(worker.rows("host", rng.randrange(len(worker.device))), places, rng)
    return False


def _written_before(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if not is_made:
        _random(worker.rows("device", rng.randrange(len(worker.device))), blocks, rng)
    return False


def _left_out(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    return True


def _one_layer_skipped(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    skipped = rng.randrange(len(worker.device))
    for tensor in range(len(worker.device)):
        if tensor != skipped:
            worker.rows("device", tensor)[blocks] = worker.rows("host", tensor)[places]
    return True


def _one_base_for_two(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    """Two layers' tensors have one address on the host: vllm#57661's form."""
    first, second = rng.sample(range(len(worker.device)), 2)
    if is_made:
        worker.rows("device", second)[blocks] = worker.rows("host", first)[places]
    return False


def _k_into_v(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        tensor = rng.randrange(len(worker.device))
        device, host = worker.rows("device", tensor), worker.rows("host", tensor)
        half = device.shape[1] // 2
        for block, place in zip(blocks, places, strict=True):
            device[block, half:] = host[place, :half]
    return False


def _order(blocks: Any, places: Any, others: Any, worker: Any) -> bool:
    for tensor in range(len(worker.device)):
        worker.rows("device", tensor)[blocks] = worker.rows("host", tensor)[others]
    return True


def _swapped(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if is_made:
        return False
    others = places.copy()
    a, b = rng.sample(range(len(places)), 2)
    others[[a, b]] = others[[b, a]]
    return _order(blocks, places, others, worker)


def _half_as_long(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    """Numbers of kernels' blocks for the scheduler's: vllm#28677's form."""
    return False if is_made else _order(blocks, places, places // 2, worker)


def _reused_meanwhile(worker: Any, blocks: Any, places: Any, is_made: bool, rng: random.Random) -> bool:
    if not is_made:
        _random(worker.rows("host", rng.randrange(len(worker.device))), places, rng)
    return False


FAULTS = (
    Fault(name="backed up too early", doc="a store copies a block before it is written", of="store", do=_too_early),
    Fault(
        name="device slots reused during the backup",
        doc="others write to a block while it is copied to the host",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        of="store",
        do=_written_before,
    ),
    Fault(name="backup dropped", doc="a store is acknowledged and never made", of="store", do=_left_out),
    Fault(
        name="one bit on the host",
        doc="a random bit of host memory flips",
        right=causes.CHANGED,
        half=causes.CAME_WRONG,
        of="host",
    ),
    Fault(name="load dropped", doc="a load is acknowledged and never made: vllm#52234's form", do=_left_out),
    Fault(name="one layer skipped", doc="a load leaves a layer out", do=_one_layer_skipped),
    Fault(name="one address for two layers", doc="a load brings one layer's KV to another too", do=_one_base_for_two),
    Fault(name="K into V", doc="a load puts K where V belongs", do=_k_into_v),
    Fault(name="two blocks swapped", doc="a load takes two blocks in each other's place", do=_swapped),
    Fault(name="blocks of half the length", doc="a load counts blocks as half as long as they are", do=_half_as_long),
    Fault(
        name="host slots reused during the load",
        doc="others write to the host's slots while they are loaded",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        do=_reused_meanwhile,
    ),
)
HEALTHY = Fault(name=tier_lives.HEALTHY, doc="nothing goes wrong")


class Life:
    """An engine with host memory and a canary, which lives one life after another."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        overrides = {} if setting.layers == 3 else {"num_hidden_layers": setting.layers}
        model = save_model(folder / setting.kind, setting.kind, **overrides)
        prepare()
        from kv_canary.difftest.stress.vllm import offloading

        self._offloading = offloading
        host = offloading.settings(size=HOST_BYTES * max(1, setting.layers // 3), per_chunk=setting.per_chunk)
        self.engine = Engine(
            model,
            runner=setting.runner,
            canary={"seals": "layer", "scrub_share": "0"},
            kv_transfer_config=host,
            **setting.arguments,
        )
        self.session = self.engine.session
        for tier in self.session.offload.tiers:
            # Led by the life.
            tier.close()
        self._numbers = itertools.count()

    def serve(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Serve prompts to their end; look at a piece of the host after every step. Return their names."""
        names = [f"r{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.submit(name, prompt, new_tokens=NEW_TOKENS)
        while self.engine.unfinished:
            self.engine.step()
            self.look()
        return names

    def look(self) -> None:
        """Look at a piece of the host, as the thread does."""
        for tier in self.session.offload.tiers:
            tier.settle()
            tier.check()

    def tokens_of(self, name: str) -> list[int]:
        """Return what a request has generated."""
        return next(tokens for its, tokens in self.engine.outputs.items() if its.partition("-")[0] == name)

    def live(self, fault: Fault, seed: int) -> dict[str, Any]:
        """Live one life; return what came of it, JSON-ready."""
        rng, manager, offloading = random.Random(f"{fault.name} {seed}"), self.session.manager, self._offloading
        worker = offloading.WORKERS[0]

        def some() -> list[int]:
            return rng.choices(range(3, VOCABULARY), k=PROMPT)

        manager.reports.clear()
        prompt, began, incidents = some(), [0], causes.last_incident(manager)
        if fault.of == "store" and fault.do is not None:
            offloading.FAULTS.append(offloading.Fault("store", self._noted(fault.do, began), seed))
        [first] = self.serve([prompt])
        # Stores are made at the beginning of later steps.
        self.serve([some() for _ in range(OTHERS)])
        if fault.of == "host":
            began[0] = manager.step
            self._flip(prompt, worker, rng)
            for tier in self.session.offload.tiers:
                tier.check(whole=True)
        if fault.of == "load" and fault.do is not None:
            offloading.FAULTS.append(offloading.Fault("load", self._noted(fault.do, began), seed))
        before = worker.loaded
        [second] = self.serve([prompt])
        self.look()
        manager.flush()
        reports, says = list(manager.reports), causes.first_cause(manager, behind=incidents)
        offloading.FAULTS.clear()
        self._empty()
        named = {(r.request_id or "").partition("-")[0] for r in reports}
        return {
            "found": bool(reports),
            "where": "" if not reports else tier_lives.look_of(reports[0]),
            "late": max(0, reports[0].step - began[0] - 1) if reports else 0,
            "blamed_wrongly": not named <= {"", first, second},
            "says": says,
            "wrong_text": self.tokens_of(first) != self.tokens_of(second),
            "came_back": worker.loaded - before,
        }

    def _empty(self) -> None:
        """Leave nothing of a life on the host, and nothing that is found there."""
        self.engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        # What has ended is looked at in the next step.
        self.serve([[3, 4, 5]])
        self.session.manager.flush()
        # What it has damaged lies in free blocks, whose records a scrub may still come to.
        self.session.manager.clear()
        for tier in self.session.offload.tiers:
            tier.clear()

    def _noted(self, do: Mistake, began: list[int]) -> Mistake:
        def noted(*arguments: Any) -> bool:
            began[0] = began[0] or self.session.manager.step
            return do(*arguments)

        return noted

    def _flip(self, prompt: Sequence[int], worker: Any, rng: random.Random) -> None:
        """Flip a random bit of a slot on the host that a prompt's KV is in."""
        import torch

        tiers = [(tier, self._host_slots(tier, prompt)) for tier in self.session.offload.tiers]
        tier, slots = rng.choice([found for found in tiers if len(found[1])])
        source = rng.choice([s for s in (tier.pool.k_source, tier.pool.v_source) if s is not None])
        row, token = divmod(rng.choice(slots) - source.slot_bias, source.page_size)
        layer = rng.choice(source.layers).view(torch.uint8)
        at = source.offset_bytes + token * source.token_stride_bytes + rng.randrange(source.bytes_per_token)
        layer[row, at] ^= 1 << rng.randrange(8)

    def _host_slots(self, tier: Any, prompt: Sequence[int]) -> list[int]:
        """Return the slots of a tier whose records are of a prompt's tokens."""
        words = tier.pool.records[:, 0]
        tokens, positions = (words & 0xFFFFFFFF).tolist(), (words >> 32).tolist()
        return [
            slot
            for slot, (token, position) in enumerate(zip(tokens, positions, strict=True))
            if slot and position < PROMPT // BLOCK * BLOCK and prompt[position] == token and int(words[slot])
        ]


def lead(setting: Setting, names: Sequence[str], seeds: Sequence[int], told: Any) -> None:
    """Live in a process of its own, and send what came of every life; see `tier_lives.campaign`."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        life = Life(setting, Path(folder))
        for fault in (HEALTHY, *FAULTS):
            if fault.name in names:
                for seed in seeds:
                    told.put((setting.name, fault.name, life.live(fault, seed)))
        life.engine.close()
    told.put(None)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@tier_lives.options
def main(**options: Any) -> None:
    """Let KV go to host memory and back in vLLM, with one fault a life, and see what is found, where and when.

    Exit code 0 where every fault is found and nothing else is reported, 1 otherwise.

    \b
    Examples:
      kv-canary stress vllm-tiers --json bench/results/vllm_tiers_detection.json
      kv-canary stress vllm-tiers --fault "one bit" --lives 50
    """
    tier_lives.run("vllm", lead, SETTINGS, FAULTS, kind="vllm_tiers", **options)
