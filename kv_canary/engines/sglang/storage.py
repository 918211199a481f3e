"""SGLang's storage behind the host tier (L3): records and seals are stored beside each page, and come back with it.

The file backend writes each page to a file of its own, under a name made of a hash of the tokens, and renames it into
place. Beside it goes another file of the same backend, whose name says which file it is of: by inode and time of the
last change, not by the page's name. So a page that another process has put in the place of one is not held against that
one's seals, and a file that is found under another's name brings its own records, which name its own tokens.

What another backend brings, or what is stored without records, is taken in as it comes by who reads it first, and
counted. What the engine takes for brought, and never was, has no record at all, and who reads it first is told so.

Pages are read and written by threads of the engine's, on which the wrappers here run too.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from kv_canary.constants import OWNER_BITS, RECORD_WORDS, STEP_MASK, WRITER_WORD
from kv_canary.engines.patches import Patches
from kv_canary.output import logger
from kv_canary.runtime.manager import CanaryManager
from kv_canary.tier import Expected, HostTier
from kv_canary.transfer import geometry_word

# What a file of records begins with, and the number of its form.
_MAGIC, _FORM = 0x6B76_6361_6E61_7279, 1
# Words before the rows: magic, form, process, updates of the weights, bytes covered, seed, slots and words of a slot.
_HEAD_WORDS = 8
_BACKEND = "HiCacheFile"
_BITS = (1 << 63) - 1

T = TypeVar("T")


class _File(NamedTuple):
    """A page's file: which one it is, whatever it is called."""

    inode: int
    changed: int

    @property
    def key(self) -> str:
        """The name of its records in the backend."""
        return f"kv-canary-{self.inode:x}-{self.changed:x}"


class StoredPages:
    """The records of pages in storage.

    Args:
        controller: of the prefix cache; its storage may come later.
        tiers: by name of the host pool whose pages they are.
        primary: name of the pool that has a page for every page of tokens.
        has_adapters: whether requests may name adapters, of which each process has names of its own.
        manager: the canary.
        patches: what is wrapped.
        updates: returns how often the weights have changed.
    """

    def __init__(
        self,
        controller: Any,
        tiers: Mapping[str, Sequence[HostTier]],
        *,
        primary: str,
        has_adapters: bool,
        manager: CanaryManager,
        patches: Patches,
        updates: Callable[[], int],
    ) -> None:
        self._controller, self._primary = controller, primary
        # Not those of pools that are not watched.
        self._tiers = {name: mine for name, mine in tiers.items() if mine}
        self._manager, self._updates = manager, updates
        self._has_adapters = has_adapters
        self._pools = {entry.name.value: entry.host_pool for entry in controller.mem_pool_host.entries}
        # No other process has it: identities of requests may count what only this one knows.
        self._process = secrets.randbits(63)
        self._geometry = {name: _geometry(mine) for name, mine in self._tiers.items()}
        seals = [tier.device_pool.seals for mine in self._tiers.values() for tier in mine]
        self._seed = _digest(*(None if its is None else its.seed for its in seals))
        # Where what threads count lands.
        self._lock, self._counts = threading.Lock(), Counter[str]()
        # Whether something has failed that what comes depends on, so that nobody can say what has come.
        self._failed = False
        # None where there is no storage, or none of files; what of it is wrapped.
        self._backend: Any = None
        self._of_backend = patches.inner()
        patches.wrap(controller, "_page_backup", self._back_up)
        patches.wrap(controller, "_page_transfer_kv_batch", self._transfer)
        patches.wrap(controller, "attach_storage_backend", self._attach)
        patches.wrap(controller, "detach_storage_backend", self._detach)
        if controller.enable_storage:
            self._watch()

    @property
    def facts(self) -> Mapping[str, Any]:
        """What was stored and brought, in pages, if anything was; JSON-ready."""
        with self._lock:
            return {"storage": dict(self._counts)} if self._counts else {}

    def take_failed(self) -> bool:
        """Return whether something has failed since the last call, so that nobody can say what has come."""
        failed, self._failed = self._failed, False
        return failed

    def _attach(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._contained("attaching to storage", self._watch)
        return result

    def _detach(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        # Else each one that was ever attached would stay.
        self._of_backend.undo_all()
        self._backend = None
        return result

    def _watch(self) -> None:
        """Follow the backend's transfers of pools that have not a page for every page of tokens."""
        self._of_backend.undo_all()
        backend = self._controller.storage_backend
        self._backend = backend if type(backend).__name__ == _BACKEND else None
        if self._backend is None:
            logger.warning(
                "kv-canary: sglang adapter: pages that the storage backend %s brings are taken in as they come, and "
                "counted: only the file backend keeps their records",
                type(backend).__name__,
            )
        self._of_backend.wrap(backend, "batch_set_v2", self._set)
        self._of_backend.wrap(backend, "batch_get_v2", self._get)

    # What goes to storage.

    def _back_up(self, original: Callable[..., Any], operation: Any) -> Any:
        result = original(operation)
        self._contained("storing records", self._backed_up, operation, brings=False)
        return result

    def _backed_up(self, operation: Any) -> None:
        if not self._controller.backup_skip:
            pages = operation.completed_tokens // self._controller.page_size
            self._store(self._primary, operation.hash_value[:pages], operation.host_indices)

    def _set(self, original: Callable[..., Any], transfers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        results = original(transfers, *args, **kwargs)
        for transfer in transfers:
            self._contained("storing records", self._was_set, transfer, results, brings=False)
        return results

    def _was_set(self, transfer: Any, results: Any) -> None:
        # One that is stored with the first pool's pages is of no pool that is watched.
        name, done = _name(transfer), results.get(transfer.name, ())
        if name in self._tiers and name != self._primary and all(done) and done:
            self._store(name, transfer.keys, transfer.host_indices)

    def _store(self, name: str, keys: Sequence[str], slots: torch.Tensor) -> None:
        """Store the records of pages that have been stored."""
        for key, its in zip(keys, self._pages(name, len(keys), slots), strict=True):
            if self._backend is None:
                return
            what = self._contained("storing records", self._store_page, name, key, its, brings=False)
            if what != "":
                self._count(what or "stored_without")

    def _store_page(self, name: str, key: str, slots: torch.Tensor) -> str:
        """Store the records of a page; return what it is counted as, "" where there is nothing to store."""
        rows = [tier.rows_of(slots) for tier in self._tiers[name]]
        # What was freed is nobody's to find again.
        whole = [r for r in rows if r is not None and not (r[:, WRITER_WORD] < 0).any()]
        if len(whole) < len(rows):
            return "stored_without"
        try:
            with open(self._path(name, key), "rb") as file:
                facts, there = os.fstat(file.fileno()), file.read()
        except FileNotFoundError:
            # Evicted meanwhile.
            return ""
        file_key = _File(facts.st_ino, facts.st_mtime_ns).key
        if self._backend.exists(file_key):
            return ""
        page = self._pools[name].get_data_page(int(slots[0]), flat=True).contiguous().view(torch.uint8)
        if there != page.numpy().tobytes():
            # Somebody else has stored it: the same tokens, and other bytes.
            return "stored_by_others"
        words = torch.cat([self._head(name, len(slots)), *(r.flatten() for r in whole)])
        return "stored" if self._backend.set(file_key, words) else "stored_without"

    # What comes back.

    def _transfer(
        self, original: Callable[..., Any], operation: Any, keys: Sequence[str], slots: torch.Tensor, *more: Any
    ) -> Any:
        coming = self._contained("expecting pages from storage", self._coming, self._primary, keys, slots) or ()
        hits = original(operation, keys, slots, *more)
        self._contained("taking in what storage brought", lambda: self._came(self._primary, keys[:hits], coming))
        return hits

    def _get(self, original: Callable[..., Any], transfers: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        coming = self._contained("expecting pages from storage", self._all_coming, transfers) or ()
        results = original(transfers, *args, **kwargs)
        for transfer, its in coming:
            self._contained("taking in what storage brought", self._was_got, transfer, its, results)
        return results

    def _all_coming(self, transfers: Sequence[Any]) -> list[tuple[Any, list[_Coming]]]:
        mine = [t for t in transfers if _name(t) in self._tiers and _name(t) != self._primary]
        return [(t, self._coming(_name(t), t.keys or (), t.host_indices)) for t in mine]

    def _was_got(self, transfer: Any, coming: Sequence[_Coming], results: Any) -> None:
        there = [bool(done) for done in results.get(transfer.name, ())]
        hits = there.index(False) if False in there else len(there)
        self._came(_name(transfer), (transfer.keys or ())[:hits], coming)

    def _coming(self, name: str, keys: Sequence[str], slots: Any) -> list[_Coming]:
        """Return what is to be known of pages before they come."""
        pages = zip(keys, self._pages(name, len(keys), slots), strict=True)
        return [_Coming([tier.expect(its) for tier in self._tiers[name]], self._file(name, key)) for key, its in pages]

    def _came(self, name: str, keys: Sequence[str], coming: Sequence[_Coming]) -> None:
        """Take in that pages have come."""
        for key, (expected, file) in zip(keys, coming, strict=False):
            # What goes wrong here leaves a page of which nobody knows anything.
            rows = self._contained("reading records from storage", self._read, name, key, file) or ()
            self._count("brought" if rows else "brought_without")
            for n, (tier, its) in enumerate(zip(self._tiers[name], expected, strict=True)):
                self._contained("taking in a page from storage", tier.bring, its, rows[n] if rows else None)

    def _read(self, name: str, key: str, file: _File | None) -> Sequence[torch.Tensor]:
        """Return the records of a page that has come from a file, for each tier; none where there are none of it."""
        # Another one may have been put in its place while it was read.
        if file is None or self._file(name, key) != file or not self._backend.exists(file.key):
            return ()
        tiers, size = self._tiers[name], self._pools[name].page_size
        words = torch.zeros(_HEAD_WORDS + size * sum(tier.width for tier in tiers), dtype=torch.int64)
        try:
            found = self._backend.get(file.key, words)
        except OSError:
            # A file of fewer words, as a narrower geometry makes.
            return ()
        if found is None or not self._is_good(name, words, size):
            return ()
        parts = words[_HEAD_WORDS:].split([size * tier.width for tier in tiers])
        rows = [part.view(size, -1) for part in parts]
        if int(words[2]) != self._process:
            for each in rows:
                _stamp(each, self._manager.step)
        return rows

    def _is_good(self, name: str, words: torch.Tensor, size: int) -> bool:
        """Whether a file of records can be relied on here."""
        head, mine = words[:_HEAD_WORDS].tolist(), self._head(name, size).tolist()
        # Names of adapters, and how often weights have changed, are each process's own.
        process, updates = 2, 3
        is_own = head[process] == mine[process]
        if not is_own and (self._has_adapters or head[updates] or mine[updates]):
            return False
        for place in (process, updates):
            head[place] = mine[place]
        return bool(head == mine)

    # Where it is.

    def _pages(self, name: str, count: int, slots: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the slots of each of so many pages."""
        size = self._pools[name].page_size
        return slots.to("cpu", torch.int64)[: count * size].split(size) if count else ()

    def _path(self, name: str, key: str) -> Path:
        backend = self._backend
        return Path(backend.file_path, backend._get_component_key(key, name) + ".bin")

    def _file(self, name: str, key: str) -> _File | None:
        """Return which file a page is in now; None where there is none, or no files."""
        if self._backend is None:
            return None
        try:
            facts = os.stat(self._path(name, key))
        except OSError:
            return None
        return _File(facts.st_ino, facts.st_mtime_ns)

    def _head(self, name: str, size: int) -> torch.Tensor:
        """Return the words before the rows of a page."""
        width = sum(tier.width for tier in self._tiers[name])
        head = (_MAGIC, _FORM, self._process, self._updates(), self._geometry[name], self._seed, size, width)
        return torch.tensor(head, dtype=torch.int64)

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _contained(self, what: str, do: Callable[..., T], *args: Any, brings: bool = True) -> T | None:
        """Return what something gives that may fail where the engine must not, on any thread; None where it fails.

        Args:
            what: for the log.
            do, args: what is called.
            brings: whether what comes to the host depends on it.
        """
        try:
            with torch.inference_mode(False):
                return do(*args)
        except Exception as error:
            self._failed |= brings
            self._manager.guard.failed(what, error)
            return None


class _Coming(NamedTuple):
    """A page that is to come: its slots in each tier, and which file it is in."""

    expected: Sequence[Expected]
    file: _File | None


def _name(transfer: Any) -> str:
    return str(getattr(transfer.name, "value", transfer.name))


def _geometry(tiers: Sequence[HostTier]) -> int:
    return _digest(*(geometry_word(tier.device_pool) for tier in tiers))


def _digest(*numbers: int | None) -> int:
    """Return 63 bits of numbers that these cannot be told from, and that are the same everywhere."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") & _BITS


def _stamp(rows: torch.Tensor, step: int) -> None:
    """Name nobody as the writer of records that another process has made: its numbers mean others here."""
    written = rows[:, :RECORD_WORDS].ne(0).any(dim=1)
    sealed = written & (rows[:, RECORD_WORDS] == rows[:, WRITER_WORD]) if rows.shape[1] > RECORD_WORDS else None
    writer = (step & STEP_MASK) << OWNER_BITS
    rows[written, WRITER_WORD] = writer
    if sealed is not None:
        rows[sealed, RECORD_WORDS] = writer
