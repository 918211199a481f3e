"""`kv-canary stress sglang-tiers`: what goes wrong between SGLang's device and host memory, one fault a life.

A real scheduler with HiCache, on the CPU with stand-ins for its compiled copies, on a GPU with those that SGLang
compiles while it runs (`--device cuda`). A life serves a prompt, pushes it off
the device by others, and serves it again, so that its KV goes to host memory and comes back; somewhere on the way one
thing goes wrong. With storage, everything is flushed in between, so that its KV comes back out of files. What the
thread on the host does, the life does: it looks at a piece after every step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import click
import torch

from kv_canary.difftest.options import device_option
from kv_canary.difftest.stress import causes, tier_lives
from kv_canary.difftest.stress.sglang import engine

PAGE, POOL, PROMPT, NEW_TOKENS, OTHERS = 16, 512, 104, 6, 7
# Whole pages of the prompt, which go to the host.
KEPT = PROMPT // PAGE * PAGE
# Of a request that is running while the prompt comes back: tokens of its prompt and new ones, and steps before.
BYSTANDER, BYSTANDING, AHEAD = 3 * PAGE, 24, 4

# Of two requests with the same prompt, which must not find each other's KV.
_SALTS = ("one", "another")

Phase = Literal["backup", "host", "load", "storage"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """An engine: how it writes, how its host memory lies, how many layers its model has, whether it stores pages."""

    name: str
    policy: str
    layout: str
    layers: int = 3
    stores: bool = False
    device: str = "cpu"


SETTINGS = (
    Setting(name="write-through, 3 layers", policy="write_through", layout="layer_first"),
    Setting(name="write-back, 3 layers", policy="write_back", layout="page_first_direct"),
    Setting(name="write-through, 32 layers", policy="write_through", layout="page_first_direct", layers=32),
    Setting(name="write-through, 80 layers", policy="write_through", layout="layer_first", layers=80),
    Setting(name="files, 3 layers", policy="write_through", layout="layer_first", stores=True),
    Setting(name="files, 32 layers", policy="write_through", layout="page_first_direct", layers=32, stores=True),
)
# Of SGLang's copies, those that need no compiled package: its own kernels between buffers that lie alike.
GPU_SETTINGS = (
    Setting(name="GPU, write-through, 3 layers", policy="write_through", layout="layer_first", device="cuda"),
    Setting(name="GPU, write-back, 3 layers", policy="write_back", layout="layer_first", device="cuda"),
    Setting(
        name="GPU, write-through, 32 layers", policy="write_through", layout="layer_first", layers=32, device="cuda"
    ),
)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One copy under way, or what was copied.

    Args:
        pool: the host pool.
        host, device: the slots, in the same order; those of the host on the CPU.
        layer: that is copied; -1: all of them.
        rng: where choices come from.
    """

    pool: Any
    host: torch.Tensor
    device: torch.Tensor
    layer: int
    rng: random.Random

    def rows(self, half: int, layer: int) -> torch.Tensor:
        """Return the host's rows of K (0) or V (1) of a layer, one a slot, as a copy on the device."""
        return self.side("host", half, layer)[self.at(self.host)].to(self.device.device)

    def side(self, side: str, half: int, layer: int) -> torch.Tensor:
        """Return the whole of one side's buffer of a layer."""
        if side == "host":
            found: torch.Tensor = (self.pool.k_data_refs, self.pool.v_data_refs)[half][layer]
        else:
            found = (self.pool.device_k_buffers, self.pool.device_v_buffers)[half][layer]
        return found

    def at(self, host: torch.Tensor) -> Any:
        """Return the index of host slots in a buffer of the host's."""
        return (host // PAGE, host % PAGE) if self.pool.layout == "page_first_direct" else host

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return len(self.pool.k_data_refs)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way in which a tier goes wrong.

    Args:
        name, doc: what it is called, and what goes wrong.
        right, half: see `causes`.
        phase: when: while KV is backed up, while it lies on the host, while it is loaded, or in storage.
        before, behind: do it to a copy, before it is made or behind it; `before` returns True where it is not made.
        operation: does it to the controller's operation, before records and bytes are.
        files: does it to the files of a prompt's pages, in order, and to those of another prompt's.
        around: gives a context in which pages are stored and brought.
        into: whether a page is loaded into slots of a request that is running.
    """

    name: str
    doc: str
    right: Sequence[str] = causes.CAME_WRONG
    half: Sequence[str] = ()
    phase: Phase = "load"
    before: Callable[[Copy], bool] | None = None
    behind: Callable[[Copy], None] | None = None
    operation: Callable[[Any, random.Random], None] | None = None
    files: Callable[[Sequence[Path], Sequence[Path], random.Random], None] | None = None
    around: Callable[[Any, random.Random], AbstractContextManager[Any]] | None = None
    into: bool = False


def _some(copy: Copy, count: int) -> slice:
    first = copy.rng.randrange(len(copy.host) - count + 1)
    return slice(first, first + count)


def _copied_too_early(copy: Copy) -> None:
    some = _some(copy, 4)
    for layer in range(copy.layers):
        for half in range(2):
            there = copy.side("host", half, layer)
            there[copy.at(copy.host[some])] = torch.rand_like(there[copy.at(copy.host[some])])


def _written_before(copy: Copy) -> bool:
    some, half = copy.device[_some(copy, 3)], copy.rng.randrange(2)
    there = copy.side("device", half, copy.rng.randrange(copy.layers))
    there[some] = torch.rand_like(there[some])
    return False


def _dropped(copy: Copy) -> bool:
    return True


def _bit(copy: Copy) -> None:
    half, layer, at = copy.rng.randrange(2), copy.rng.randrange(copy.layers), copy.at(copy.host[_some(copy, 1)])
    there = copy.side("host", half, layer)
    row = there[at].contiguous().view(torch.uint8).view(-1)
    row[copy.rng.randrange(len(row))] ^= 1 << copy.rng.randrange(8)
    there[at] = row.view(there.dtype).view(there[at].shape)


def _skips_one_layer(copy: Copy) -> bool:
    # The same one for every layer's copy of a load.
    return copy.layer == random.Random(int(copy.device[0])).randrange(copy.layers)


def _shifted(copy: Copy) -> bool:
    for half in range(2):
        copy.side("device", half, copy.layer)[copy.device] = copy.rows(half, (copy.layer + 1) % copy.layers)
    return True


def _k_into_v(copy: Copy) -> None:
    copy.side("device", 1, copy.layer)[copy.device] = copy.rows(0, copy.layer)


def _a_page_late(copy: Copy) -> None:
    late = copy.rows(0, copy.layer)[PAGE : 2 * PAGE]
    copy.side("device", 0, copy.layer)[copy.device[:PAGE]] = late


def _reused_meanwhile(copy: Copy) -> bool:
    if copy.layer == copy.layers - 1:
        there = copy.side("host", 0, copy.layer)
        at = copy.at(copy.host[_some(copy, PAGE)])
        there[at] = torch.rand_like(there[at])
    return False


def _cut_short(operation: Any, rng: random.Random) -> None:
    operation.host_indices = operation.host_indices[:-PAGE]
    operation.device_indices = operation.device_indices[:-PAGE]


def _pages_swapped(operation: Any, rng: random.Random) -> None:
    order = [*range(len(operation.host_indices) // PAGE)]
    a, b = rng.sample(order, 2)
    order[a], order[b] = order[b], order[a]
    pages = operation.host_indices.view(-1, PAGE)
    operation.host_indices = pages[order].reshape(-1).clone()


def _as_if_pages_were_half(operation: Any, rng: random.Random) -> None:
    """Indices of pages half as long for pages: vllm#28677's form."""
    operation.host_indices = operation.host_indices // 2 // PAGE * PAGE + operation.host_indices % PAGE


def _rots(mine: Sequence[Path], others: Sequence[Path], rng: random.Random) -> None:
    file = rng.choice(mine)
    facts, data = file.stat(), bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with open(file, "r+b") as there:
        there.write(data)
    # Nobody has written to it.
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _renamed(mine: Sequence[Path], others: Sequence[Path], rng: random.Random) -> None:
    place = rng.randrange(len(mine))
    os.replace(others[place], mine[place])


def _swapped(mine: Sequence[Path], others: Sequence[Path], rng: random.Random) -> None:
    a, b = rng.sample(mine, 2)
    aside = a.with_suffix(".aside")
    for old, new in ((a, aside), (b, a), (aside, b)):
        os.replace(old, new)


def _published_whole(controller: Any, rng: random.Random) -> AbstractContextManager[Any]:
    """A prefetch that was cut short is published as a whole one: sglang#30738's form."""
    transfer, there = controller._page_transfer_kv_batch, rng.randrange(1, KEPT // PAGE)

    def cut_short(operation: Any, keys: Any, slots: Any, *more: Any) -> int:
        transfer(operation, keys[:there], slots[: there * PAGE], *more)
        return len(keys)

    return mock.patch.object(controller, "_page_transfer_kv_batch", cut_short)


def _forgets_the_salt(controller: Any, rng: random.Random) -> AbstractContextManager[Any]:
    from sglang.srt.mem_cache import utils

    # Names that are made outside of Python keep the salt: so all are given the first request's.
    seed = utils.storage_namespace_seed(None, _SALTS[0])
    return mock.patch.object(utils, "storage_namespace_seed", return_value=seed)


FAULTS = (
    Fault(
        name="backed up too early",
        doc="a backup copies slots before the forward has written them",
        phase="backup",
        behind=_copied_too_early,
    ),
    Fault(
        name="device slots reused during the backup",
        doc="others write to the slots while they are copied to the host",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        phase="backup",
        before=_written_before,
    ),
    Fault(name="backup dropped", doc="a backup is acknowledged and never made", phase="backup", before=_dropped),
    Fault(
        name="backup cut short",
        doc="the last page of a backup is left out, and the tree keeps it",
        right=causes.NEVER_CAME,
        phase="backup",
        operation=_cut_short,
    ),
    Fault(
        name="one bit on the host",
        doc="a random bit of host memory flips",
        right=causes.CHANGED,
        half=causes.CAME_WRONG,
        phase="host",
        behind=_bit,
    ),
    Fault(name="one layer skipped", doc="a load leaves a layer out", before=_skips_one_layer),
    Fault(name="layers shifted", doc="a load puts every layer's KV into the one before", before=_shifted),
    Fault(name="K into V", doc="a load puts K where V belongs", behind=_k_into_v),
    Fault(name="a page late", doc="a load puts the second page's K where the first one's belongs", behind=_a_page_late),
    Fault(
        name="host slots reused during the load",
        doc="others get host slots while they are loaded",
        right=(*causes.CAME_WRONG, *causes.CHANGED),
        before=_reused_meanwhile,
    ),
    Fault(
        name="two pages swapped",
        doc="a load takes two pages in each other's place",
        right=causes.FROM_ELSEWHERE,
        half=causes.WRONG_PREFIX,
        operation=_pages_swapped,
    ),
    Fault(
        name="pages of half the length",
        doc="a load counts host pages as half as long as they are",
        right=causes.FROM_ELSEWHERE,
        half=causes.WRONG_PREFIX,
        operation=_as_if_pages_were_half,
    ),
    Fault(
        name="loaded into slots in use",
        doc="a load puts its first page where a running request reads",
        right=(*causes.FROM_ELSEWHERE, *causes.NEVER_FILLED),
        into=True,
    ),
    Fault(name="a bit rots in a file", doc="a random bit of a page's file flips", phase="storage", files=_rots),
    Fault(
        name="another prompt's file",
        doc="a page's file is put in the place of another's",
        right=causes.FROM_ELSEWHERE,
        half=causes.WRONG_PREFIX,
        phase="storage",
        files=_renamed,
    ),
    Fault(
        name="two files swapped",
        doc="files of two pages have each other's names",
        right=causes.FROM_ELSEWHERE,
        half=causes.WRONG_PREFIX,
        phase="storage",
        files=_swapped,
    ),
    Fault(
        name="prefetch cut short",
        doc="the last pages of a prefetch never come, and it is published as whole",
        right=causes.NEVER_CAME,
        phase="storage",
        around=_published_whole,
    ),
    Fault(
        name="the key forgets the salt",
        doc="names of files are made without the requests' cache salt: one finds the other's pages",
        right=causes.WRONG_PREFIX,
        phase="storage",
        around=_forgets_the_salt,
    ),
)
HEALTHY = Fault(name=tier_lives.HEALTHY, doc="nothing goes wrong")


class Engine:
    """A scheduler with a host tier and a canary, which lives one life after another."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        from kv_canary.demo.models import save_tiny_model

        self._files = folder / "files"
        more: dict[str, Any] = {}
        if setting.stores:
            more = {"hicache_storage_backend": "file", "hicache_storage_prefetch_policy": "wait_complete"}
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self._files)
        os.environ |= {"KV_CANARY_MODE": "log", "KV_CANARY_SEALS": "layer", "KV_CANARY_SCRUB_SHARE": "0"}
        more |= _on(setting.device)
        model = save_tiny_model(folder, "llama", num_hidden_layers=setting.layers)
        self.scheduler = engine.build_scheduler(
            Path(model),
            enable_hierarchical_cache=True,
            hicache_ratio=8.0,
            hicache_mem_layout=setting.layout,
            hicache_write_policy=setting.policy,
            page_size=PAGE,
            max_total_tokens=POOL,
            **more,
        )
        from kv_canary.engines.sglang import session

        self.session = session.current()
        tiers = self.session._host_tiers
        if tiers is None:
            raise RuntimeError("kv-canary: the scheduler must have a host tier, got none")
        [self.tier] = tiers.tiers
        # Led by the life.
        self.tier.close()
        self.controller = self.scheduler.tree_cache.cache_controller
        self.pool = self.controller.mem_pool_host.entries[0].host_pool
        self._numbers = itertools.count()
        self._stores = setting.stores
        if setting.stores:
            # Prompts that are so short are fetched too.
            self.scheduler.tree_cache.prefetch_threshold = self.controller.prefetch_threshold = PAGE

    def serve(self, prompts: Sequence[Sequence[int]], *, salt: str | None = None) -> list[Any]:
        """Serve prompts to their end; look at a piece of the host after every step."""
        reqs = [
            engine.submit(self.scheduler, f"r{next(self._numbers)}", prompt, new_tokens=NEW_TOKENS, cache_salt=salt)
            for prompt in prompts
        ]
        self._run(lambda: all(req.finished() for req in reqs))
        self._come_to_rest()
        return reqs

    def _come_to_rest(self) -> None:
        """Let the engine take in that requests have ended and copies are over."""
        for _ in range(3):
            engine.step(self.scheduler)
            self.scheduler.tree_cache.check_hicache_events()
        self.look()

    def _run(self, is_over: Callable[[], bool]) -> None:
        """Let the engine run until something is so; look at a piece of the host after every step."""
        end = time.monotonic() + 120
        while not is_over():
            engine.step(self.scheduler)
            self.look()
            if time.monotonic() > end:
                raise RuntimeError("kv-canary: a life must come to its end, got one that does not")

    def look(self) -> None:
        """Look at a piece of the host, as the thread does."""
        self.tier.settle()
        self.tier.check()

    def live(self, fault: Fault, seed: int) -> dict[str, Any]:
        """Live one life; return what came of it, JSON-ready."""
        rng = random.Random(f"{fault.name} {seed}")

        def some(count: int) -> list[int]:
            return rng.choices(range(3, engine.VOCABULARY), k=count)

        manager = self.session.manager
        prompt = some(PROMPT)
        manager.reports.clear()
        began = {"step": 0, "incidents": causes.last_incident(manager)}
        if self._stores:
            return self._outcome(*self._live_with_files(fault, prompt, some(PROMPT), rng, began), began)
        with self._wrong(fault, "backup", rng, began, of=prompt):
            [first] = self.serve([prompt])
            # With write-back it goes to the host when it is pushed off the device.
            self.serve([some(PROMPT) for _ in range(OTHERS)])
        if fault.phase == "host" and fault.behind is not None:
            host = self._host_slots(prompt)
            began["step"] = manager.step
            fault.behind(Copy(pool=self.pool, host=host, device=host, layer=-1, rng=rng))
            rounds, end = self.tier.facts.rounds, time.monotonic() + 60
            # What has just arrived, and then all of it once.
            while self.tier.facts.rounds < rounds + 2 and time.monotonic() < end:
                self.look()
        bystander = self._begin(some(BYSTANDER)) if fault.into else None
        if bystander is not None:
            fault = dataclasses.replace(fault, operation=functools.partial(self._load_into, bystander))
        with self._wrong(fault, "load", rng, began, of=prompt):
            [second] = self.serve([prompt])
        if bystander is not None:
            self._run(lambda: bystander.finished())
            self._come_to_rest()
        return self._outcome(first, second, began, hit=bystander)

    def _begin(self, prompt: Sequence[int]) -> Any:
        """Return a request that is running, and will be for some steps."""
        req = engine.submit(self.scheduler, f"r{next(self._numbers)}", prompt, new_tokens=BYSTANDING)
        self._run(lambda: len(req.output_ids) >= AHEAD)
        return req

    def _load_into(self, bystander: Any, operation: Any, rng: random.Random) -> None:
        """Have a load put its first page into a page of a request that is running."""
        row = self.scheduler.req_to_token_pool.req_to_token[bystander.kv.req_pool_idx]
        first = rng.randrange(BYSTANDER // PAGE) * PAGE
        slots = operation.device_indices.clone()
        slots[:PAGE] = row[first : first + PAGE].to(slots.device, slots.dtype)
        operation.device_indices = slots

    def _live_with_files(
        self, fault: Fault, prompt: Sequence[int], other: Sequence[int], rng: random.Random, began: dict[str, int]
    ) -> tuple[Any, Any]:
        """Serve a prompt, flush all, and serve it again out of files; return both requests."""
        with contextlib.nullcontext() if fault.around is None else fault.around(self.controller, rng):
            salts = _SALTS if fault.around is _forgets_the_salt else (None, None)
            [first] = self.serve([prompt], salt=salts[0])
            mine = self._stored([])
            others = []
            if fault.files is not None:
                self.serve([other])
                others = self._stored(mine)
            self.scheduler.flush_cache()
            began["step"] = self.session.manager.step
            if fault.files is not None:
                fault.files(mine, others, rng)
            [second] = self.serve([prompt], salt=salts[1])
            for file in self._files.iterdir():
                file.unlink()
        return first, second

    def _stored(self, before: Sequence[Path]) -> list[Path]:
        """Return the files of the pages of what was served last, in order, once their records are there too."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            files = [*self._files.glob("*.bin")]
            pages = [file for file in files if not file.name.startswith("kv-canary") and file not in before]
            if len(pages) >= KEPT // PAGE and len(files) == 2 * (len(pages) + len(before)):
                return sorted(pages, key=lambda file: file.stat().st_mtime_ns)
            engine.step(self.scheduler)
            self.scheduler.tree_cache.check_hicache_events()
            time.sleep(0.01)
        raise RuntimeError("kv-canary: pages must come to storage with their records, got some that do not")

    def _outcome(self, first: Any, second: Any, began: Mapping[str, int], *, hit: Any = None) -> dict[str, Any]:
        """Return what came of a life that has served a prompt twice, JSON-ready.

        hit: another request that is damaged, which has to be told of too; None: there is none.
        """
        manager = self.session.manager
        self.tier.settle()
        manager.flush()
        reports = list(manager.reports)
        damaged = [req.rid for req in (first, second, hit) if req is not None]
        found = {
            "found": bool(reports) and (hit is None or any(r.request_id == hit.rid for r in reports)),
            "where": "" if not reports else tier_lives.look_of(reports[0]),
            "late": max(0, reports[0].step - began["step"] - 1) if reports else 0,
            "blamed_wrongly": any(r.request_id not in (None, *damaged) for r in reports),
            "says": causes.first_cause(manager, behind=began["incidents"]),
            "wrong_text": list(first.output_ids) != list(second.output_ids),
            "came_back": second.cached_tokens,
        }
        if not self.scheduler.flush_cache():
            # The next life would find what this one has done.
            raise RuntimeError(
                "kv-canary: a life must leave nothing behind, got an engine that keeps what it has cached"
            )
        manager.flush()
        return found

    @contextlib.contextmanager
    def _wrong(
        self, fault: Fault, phase: Phase, rng: random.Random, began: dict[str, int], *, of: Sequence[int]
    ) -> Iterator[None]:
        """Let copies of a phase go wrong, once in a life: the first one that is of the prompt."""
        if fault.phase != phase or fault is HEALTHY:
            yield
            return
        name = "backup_from_device_all_layer" if phase == "backup" else "load_to_device_per_layer"
        original = getattr(type(self.pool), name)
        moves = ("_move_write_operation",) if phase == "backup" else ("_move_op_indices",)
        chosen: list[Any] = []

        def copied(pool: Any, device_pool: Any, host: Any, device: Any, *args: Any, **kwargs: Any) -> None:
            layer = args[0] if phase == "load" else -1
            if not chosen:
                chosen.append((host, device))
                began["step"] = self.session.manager.step
            is_it = chosen[0][0] is host
            if is_it and host.is_cuda:
                # What was launched before is over, and what lies on the host can be looked at and changed.
                torch.cuda.synchronize()
            there = host.to("cpu", torch.int64)
            copy = Copy(pool=pool, host=there, device=device.to(torch.int64), layer=layer, rng=rng)
            if not (is_it and fault.before is not None and fault.before(copy)):
                original(pool, device_pool, host, device, *args, **kwargs)
            if is_it and fault.behind is not None:
                if host.is_cuda:
                    torch.cuda.synchronize()
                fault.behind(copy)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(type(self.pool), name, copied))
            if fault.operation is not None:
                self._change_operations(stack, moves, fault.operation, rng, began)
            yield

    def _change_operations(
        self,
        stack: contextlib.ExitStack,
        moves: Sequence[str],
        change: Callable[[Any, random.Random], None],
        rng: random.Random,
        began: dict[str, int],
    ) -> None:
        done: list[bool] = []
        for move in moves:
            original = getattr(self.controller, move)

            def changed(operation: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                if not done:
                    done.append(True)
                    began["step"] = self.session.manager.step
                    change(operation, rng)
                return original(operation, *args, **kwargs)

            stack.enter_context(mock.patch.object(self.controller, move, changed))

    def _host_slots(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return the engine's host slots of a prompt's pages: those whose records are of its tokens."""
        self.tier.settle()
        records = self.tier.pool.records
        written = {int(token): n for n, token in enumerate(prompt[:KEPT])}
        there = self.tier.held
        tokens = records[torch.from_numpy(there), 0] & 0xFFFFFFFF
        positions = (records[torch.from_numpy(there), 0] >> 32) & 0xFFFFFFFF
        mine = [
            int(slot) - 1
            for slot, token, position in zip(there, tokens.tolist(), positions.tolist(), strict=True)
            if token in written and position < KEPT and prompt[position] == token
        ]
        return torch.tensor(mine, dtype=torch.int64)


def _on(device: str) -> dict[str, Any]:
    """Prepare the process for a device, and return SGLang's arguments for it."""
    if device == "cpu":
        os.environ["SGLANG_ON_CPU"] = "hicache"
        return {"hicache_io_backend": "direct"}
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "0", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    from kv_canary.difftest.stress.sglang import standins

    standins.use()
    standins.patch()
    return {"device": device, "attention_backend": "triton", "hicache_io_backend": "kernel"}


def lead(setting: Setting, names: Sequence[str], seeds: Sequence[int], told: Any) -> None:
    """Live in a process of its own, and send what came of every life; see `tier_lives.campaign`."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        life = Engine(setting, Path(folder))
        for fault in (HEALTHY, *FAULTS):
            if fault.name in names:
                for seed in seeds:
                    told.put((setting.name, fault.name, life.live(fault, seed)))
        life.session.close()
    told.put(None)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@device_option()
@tier_lives.options
def main(device: str, **options: Any) -> None:
    """Let KV go to host memory and back in SGLang, with one fault a life, and see what is found, where and when.

    Exit code 0 where every fault is found and nothing else is reported, 1 otherwise.

    \b
    Examples:
      kv-canary stress sglang-tiers --json bench/results/tiers_detection.json
      kv-canary stress sglang-tiers --fault "one bit" --lives 50
      kv-canary stress sglang-tiers --device cuda --json h200_tiers.json
    """
    settings = GPU_SETTINGS if device == "cuda" else SETTINGS
    tier_lives.run("sglang", lead, settings, FAULTS, belongs=belongs, kind="tiers", device=device, **options)


def belongs(setting: Setting, fault: Fault) -> bool:
    """Whether a fault is one of a setting's."""
    return setting.stores == (fault.phase == "storage")
