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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kv_canary.difftest.stress import tier_lives
from kv_canary.difftest.stress.vllm.engine import VOCABULARY, Engine, Runner, prepare, save_model
from kv_canary.difftest.stress.vllm.tier_faults import FAULTS, HEALTHY, Fault

PROMPT, NEW_TOKENS, OTHERS, HOST_BYTES = 170, 6, 6, 8 << 20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine: its runner, its model, how many blocks of it are a chunk of host memory, its tensor-parallel ranks."""

    name: str
    runner: Runner = "V1"
    kind: str = "llama"
    layers: int = 3
    per_chunk: int = 1
    ranks: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


SETTINGS = (
    Setting(name="V1, 3 layers"),
    Setting(name="V1, chunks of two blocks, 3 layers", per_chunk=2),
    Setting(name="V1, three groups over one memory", kind="gemma3", arguments={"num_gpu_blocks_override": 70}),
    Setting(name="V2, 3 layers", runner="V2"),
    Setting(name="V1, two ranks, 3 layers", ranks=2, arguments={"distributed_executor_backend": "mp"}),
    Setting(name="V1, 32 layers", layers=32, arguments={"kv_cache_memory_bytes": 64 << 20}),
)


class Life:
    """An engine with host memory and a canary, which lives one life after another."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        overrides = {} if setting.layers == 3 else {"num_hidden_layers": setting.layers}
        if setting.ranks > 1:
            overrides["num_key_value_heads"] = setting.ranks
        model = save_model(folder / setting.kind, setting.kind, **overrides)
        prepare()
        from kv_canary.difftest.stress.vllm import offloading
        from kv_canary.difftest.stress.vllm.tier_rank import EXTENSION

        self._ranks = range(setting.ranks)
        self.engine = Engine(
            model,
            runner=setting.runner,
            canary={"seals": "layer", "scrub_share": "0"},
            kv_transfer_config=offloading.settings(
                size=HOST_BYTES * max(1, setting.layers // 3), per_chunk=setting.per_chunk
            ),
            worker_extension_cls=EXTENSION,
            tensor_parallel_size=setting.ranks,
            **setting.arguments,
        )
        self._ask("life_led")
        self._numbers = itertools.count()

    def serve(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Serve prompts to their end; look at a piece of the host after every step. Return their names."""
        names = [f"r{next(self._numbers)}" for _ in prompts]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.submit(name, prompt, new_tokens=NEW_TOKENS)
        while self.engine.unfinished:
            self.engine.step()
            self._ask("life_looks")
        return names

    def tokens_of(self, name: str) -> list[int]:
        """Return what a request has generated."""
        return next(tokens for its, tokens in self.engine.outputs.items() if its.partition("-")[0] == name)

    def live(self, fault: Fault, seed: int) -> dict[str, Any]:
        """Live one life; return what came of it, JSON-ready."""
        rng = random.Random(f"{fault.name} {seed}")

        def some() -> list[int]:
            return rng.choices(range(3, VOCABULARY), k=PROMPT)

        prompt, before = some(), self._ask("life_begins")
        spared = rng.choice(self._ranks) if fault.leaves_one else None
        wrong = [rank for rank in self._ranks if rank != spared]
        if fault.of == "store":
            self._err(fault, seed, wrong)
        [first] = self.serve([prompt])
        # Stores are made at the beginning of later steps.
        self.serve([some() for _ in range(OTHERS)])
        if fault.of == "host":
            self._ask("life_flips", prompt, seed, ranks=wrong)
        if fault.of == "load":
            self._err(fault, seed, wrong)
        [second] = self.serve([prompt])
        told = self._ask("life_tells")
        self._empty()
        found = [told[rank] for rank in wrong if told[rank]["steps"]]
        named = {name for one in told for name in one["requests"]}
        elsewhere = any(told[rank]["steps"] for rank in self._ranks if rank not in wrong)
        return {
            # By each that it happens on; a false alarm of one is one.
            "found": len(found) >= (len(wrong) if fault.do or fault.of == "host" else 1),
            "where": found[0]["where"] if found else "",
            "late": max((max(0, one["steps"][0] - one["began"] - 1) for one in found), default=0),
            "blamed_wrongly": elsewhere or not named <= {"", first, second},
            "says": found[0]["says"] if found else "",
            "wrong_text": self.tokens_of(first) != self.tokens_of(second),
            "came_back": max(one["loaded"] - had for one, had in zip(told, before, strict=True)),
        }

    def _err(self, fault: Fault, seed: int, wrong: Sequence[int]) -> None:
        if fault.do is not None:
            self._ask("life_errs", fault.name, fault.of, seed, ranks=wrong)

    def _empty(self) -> None:
        """Leave nothing of a life on the host, and nothing that is found there."""
        self.engine.llm.llm_engine.reset_prefix_cache(reset_connector=True)
        # What has ended is looked at in the next step.
        self.serve([[3, 4, 5]])
        self._ask("life_ends")

    def _ask(self, what: str, *arguments: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        """Have ranks, or all of them, do what `LedRank` does; return what each of all of them answers."""
        its = self._ranks if ranks is None else ranks
        answers: list[Any] = self.engine.llm.collective_rpc("life_does", args=(what, arguments, tuple(its)))
        return answers


def belongs(setting: Setting, fault: Fault) -> bool:
    """Whether a fault is one that an engine of a setting lives."""
    return fault.leaves_one == (setting.ranks > 1)


def lead(setting: Setting, names: Sequence[str], seeds: Sequence[int], told: Any) -> None:
    """Live in a process of its own, and send what came of every life; see `tier_lives.campaign`."""
    os.environ["TRITON_INTERPRET"] = "1"
    if setting.ranks > 1:
        # A core for each rank, as far as there are so many.
        cores = (sorted(os.sched_getaffinity(0)) * setting.ranks)[: setting.ranks]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
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
    tier_lives.run("vllm", lead, SETTINGS, FAULTS, belongs=belongs, kind="vllm_tiers", **options)
