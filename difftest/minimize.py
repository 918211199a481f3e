"""Shrinking a failing call of any op, wherever it came from, to one that a person can read.

It is delta debugging (Zeller & Hildebrandt 2002) led by the op's spec: what is optional is left out, numbers go towards
their defaults, every symbolic size is cut along all the tensors that share it, rows move together, and contents
become zero. A call with a defined outcome stays one: elements are removed, zeroed (slot 0 and row 0 are padding) or
brought towards zero where they stay distinct.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kv_canary.cases.comparison import violation_logs
from kv_canary.difftest.call_tools import (
    Call,
    digest,
    is_plain,
    numbers,
    of_words,
    relaid,
    renumbered,
    replaced,
    sources,
    weigh,
    with_columns,
    with_layers,
    with_rows,
    words,
)
from kv_canary.errors import must_be
from kv_canary.specs.interface import KernelSpec, Leaf, ScalarSpec, TensorSpec, TensorsSpec
from kv_canary.specs.structures import KvSource
from kv_canary.specs.violation_row import VIOLATION_WORDS

# Values below this are sizes, positions and indices, worth making as small as can be; above it are hashes.
PLAIN_NUMBERS = 1 << 20


def minimize(
    spec: KernelSpec,
    arguments: Mapping[str, Any],
    fails: Callable[[Mapping[str, Any]], bool],
    *,
    on_progress: Callable[[int, int], None] | None = None,
    max_tries: int = 10_000,
) -> dict[str, Any]:
    """Return the smallest call found that still fails: a complete one, on the CPU.

    The same call and the same answers give the same result. KeyboardInterrupt ends the search like `max_tries` does:
    with the best call so far.

    Args:
        spec: the op.
        arguments: a call that fails; it is not changed.
        fails: tells whether a complete call, one that `spec.bind` took, fails. It must not change the call.
        on_progress: is told, whenever the call got smaller, the calls tried so far and the size of this one.
        max_tries: how often `fails` may be asked.

    Raises:
        TypeError, ValueError: `spec` refuses the call, or the call does not fail.
    """
    search = _Search(spec, arguments, fails, on_progress, max_tries)
    with contextlib.suppress(_Enough, KeyboardInterrupt):
        search.run()
    return search.best


class _Enough(Exception):  # noqa: N818 - it ends the search
    """The tries are used up."""


class _Search:
    """The best call so far, and what has been tried."""

    def __init__(
        self,
        spec: KernelSpec,
        arguments: Mapping[str, Any],
        fails: Callable[[Mapping[str, Any]], bool],
        on_progress: Callable[[int, int], None] | None,
        max_tries: int,
    ) -> None:
        self.spec, self.fails, self.on_progress, self.max_tries = spec, fails, on_progress, max_tries
        self.best: Call = spec.map_tensors(spec.bind(arguments), lambda leaf: leaf.tensor.cpu())
        self.weight = weigh(spec, self.best)
        self.tries = 0
        self._fresh: Call = {}
        self._has_one_outcome = spec.has_one_outcome(self.best)
        self._seen: set[bytes] = set()

    def run(self) -> None:
        """Shrink until nothing gets smaller: in coarse steps first, so that an early end leaves a good call."""
        self._start()
        parts = 16
        while True:
            before = self.weight
            self._leave_out(parts)
            self._cut_sizes(parts)
            self._cut_sources(parts)
            self._lower_numbers()
            self._straighten()
            for leaf in self._leaves():
                self._clear(leaf, parts)
            for leaf in self._leaves():
                self._lower_words(leaf, parts)
            if self.weight == before:
                if parts >= max((leaf.tensor.numel() for leaf in self._leaves()), default=0):
                    return
                parts *= 16

    def _start(self) -> None:
        if not self._ask(self.best):
            raise ValueError(must_be("minimize", "arguments", "a call that fails", "one that does not"))
        # What scratch holds seldom matters: `bind` allocates it, as large as each smaller call needs.
        scratch = self.spec.scratch
        call = self.spec.bind({**self.best, **dict.fromkeys(scratch)})
        if scratch and self._ask(call):
            self.best, self._fresh = call, dict.fromkeys(scratch)
        for name in violation_logs(self.spec):
            self._make_room(name)

    def _make_room(self, name: str) -> None:
        """Make a log empty, and as long as it takes: which rows a full one has room for changes with everything."""
        log = self.best[name]
        count, capacity = int(log.count), len(log.ring)
        if count == 0:
            return
        ring = log.ring.new_zeros(capacity + min(max(-count, 0), 256), VIOLATION_WORDS)
        call = {**self.best, name: replace(log, ring=ring, count=torch.zeros_like(log.count))}
        if self._ask(call):
            self.best, self.weight = call, weigh(self.spec, call)

    def _ask(self, call: Call) -> bool:
        if self.tries >= self.max_tries:
            raise _Enough
        self.tries += 1
        return self.fails(call)

    def _attempt(self, make: Callable[[], Call]) -> bool:
        """Take the call that `make` returns, if it is smaller and fails; one that is refused is not asked about."""
        try:
            call = self.spec.bind({**make(), **self._fresh})
        except (TypeError, ValueError):
            return False
        weight = weigh(self.spec, call)
        if weight >= self.weight or (self._has_one_outcome and not self.spec.has_one_outcome(call)):
            return False
        seen = digest(self.spec, call)
        if seen in self._seen:
            return False
        self._seen.add(seen)
        if not self._ask(call):
            return False
        self.best, self.weight = call, weight
        if self.on_progress is not None:
            self.on_progress(self.tries, weight[0])
        return True

    def _leaves(self) -> list[Leaf]:
        return [leaf for leaf in self.spec.leaves(self.best) if leaf.role != "scratch"]

    def _with(self, base: Call, tensors: Mapping[str, torch.Tensor]) -> Call:
        return self.spec.map_tensors(base, lambda leaf: tensors.get(leaf.path, leaf.tensor))

    def _leave_out(self, parts: int) -> None:
        for name, spec in self.spec.arguments.items():
            if isinstance(spec, TensorSpec) and spec.optional:
                self._attempt_without(name, *([spec.with_] if spec.with_ else []))
            elif isinstance(spec, TensorsSpec):
                self._cut_tuple(name, parts)
        for path, _ in list(sources(self.spec, self.best, optional=True)):
            self._attempt_without(path)

    def _attempt_without(self, *paths: str) -> bool:
        return self._attempt(lambda: functools.reduce(lambda call, path: replaced(call, path, None), paths, self.best))

    def _cut_tuple(self, name: str, parts: int) -> None:
        base, tensors = self.best, self.best[name]
        _thin(
            len(tensors),
            parts,
            lambda kept: self._attempt(lambda: {**base, name: tuple(tensors[i] for i in kept.tolist())}),
        )

    def _cut_sizes(self, parts: int) -> None:
        # Symbol -> where it stands: (tensor, axis, elements past the symbol's own).
        axes: dict[str, list[tuple[Leaf, int, int]]] = {}
        for leaf in self._leaves():
            for axis, size in enumerate(leaf.spec.shape if leaf.spec else ()):
                if isinstance(size, str):
                    symbol, _, plus = size.partition("+")
                    axes.setdefault(symbol, []).append((leaf, axis, int(plus or 0)))
        for symbol, along in axes.items():
            # An earlier symbol may have cut the same tensors.
            now = {leaf.path: leaf for leaf in self._leaves()}
            self._cut_size(symbol, [(now[leaf.path], axis, plus) for leaf, axis, plus in along], parts)

    def _cut_size(self, symbol: str, along: list[tuple[Leaf, int, int]], parts: int) -> None:
        base = self.best
        leaf, axis, plus = along[0]
        count = leaf.tensor.shape[axis] - plus

        def cut(kept: torch.Tensor, *, last: bool) -> Call:
            smaller: dict[str, torch.Tensor] = {}
            for leaf, axis, plus in along:
                # Of n + 1 fence posts the last stays and each other goes with the field behind it, or the first stays.
                posts = torch.arange(count, count + plus) if last else torch.arange(plus)
                index = torch.cat([kept, posts] if last else [posts, kept + plus])
                tensor = smaller.get(leaf.path, leaf.tensor)
                smaller[leaf.path] = relaid(tensor.index_select(axis, index), leaf.tensor)
            return self._with(base, smaller)

        def candidate(kept: torch.Tensor, *, anew: bool, last: bool) -> Call:
            call = cut(kept, last=last)
            return self._numbered_anew(call, symbol, kept, count) if anew else call

        def accept(kept: torch.Tensor) -> bool:
            return any(
                self._attempt(partial(candidate, kept, anew=anew, last=last))
                for anew in (True, False)
                for last in (True, False)
            )

        _thin(count, parts, accept)

    def _numbered_anew(self, call: Call, symbol: str, kept: torch.Tensor, count: int) -> Call:
        """Return `call`, which keeps `kept` of `count` along `symbol`, with the indices along it as they are now."""
        smaller: dict[str, torch.Tensor] = {}
        for leaf in self.spec.leaves(call):
            columns = {} if leaf.spec is None else leaf.spec.index_of
            is_table = "lut_len" in columns
            translated = is_table and symbol == "num_slots" and call.get("lut") is not None
            # Pages are not slots: the slots that one names are not numbered anew one by one.
            paged = is_table and call.get("page_size", 1) > 1
            if symbol not in columns or translated or paged:
                continue
            column = columns[symbol]
            values = leaf.tensor.clone()
            part = values if column is None else values[..., column]
            part.copy_(renumbered(part, kept, count))
            smaller[leaf.path] = relaid(values, leaf.tensor)
        call = self._with(call, smaller)
        for path, source in list(sources(self.spec, call)):
            if symbol == "num_slots" and source.page_size == 1:
                # A row of the source is a slot's: they go together.
                slots = torch.arange(source.num_rows) + source.slot_bias
                stays = (slots >= count) | torch.isin(slots, kept)
                rows = with_rows(source, stays.nonzero().view(-1))
                call = replaced(call, path, replace(rows, slot_bias=int((kept < source.slot_bias).sum())))
        return call

    def _cut_sources(self, parts: int) -> None:
        for path, _ in list(sources(self.spec, self.best)):
            self._cut_source(path, with_layers, lambda source: len(source.layers), parts)
            self._cut_source(path, with_rows, lambda source: source.num_rows, parts)
            self._cut_source(path, with_columns, lambda source: source.row_bytes, parts)

    def _cut_source(
        self,
        path: str,
        change: Callable[[KvSource, torch.Tensor], KvSource],
        count: Callable[[KvSource], int],
        parts: int,
    ) -> None:
        base = self.best
        source = dict(sources(self.spec, base))[path]
        _thin(count(source), parts, lambda kept: self._attempt(lambda: replaced(base, path, change(source, kept))))

    def _lower_numbers(self) -> None:
        for path, value in list(numbers(self.spec, self.best)):
            declared = self.spec.arguments.get(path)
            default = declared.default if isinstance(declared, ScalarSpec) else None
            if isinstance(default, int) and self._attempt_number(path, default):
                continue
            if isinstance(value, bool):
                self._attempt_number(path, False)
            else:
                _lower(value, partial(self._attempt_number, path))

    def _attempt_number(self, path: str, value: int) -> bool:
        return self._attempt(lambda: replaced(self.best, path, value))

    def _straighten(self) -> None:
        """Bring rows together at aligned addresses; of a source in all layers at once, for they are of one geometry."""
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for leaf in self._leaves():
            groups.setdefault(leaf.path.split(".layers[")[0], {})[leaf.path] = leaf.tensor
        for tensors in groups.values():
            if not all(map(is_plain, tensors.values())):
                straight = {path: tensor.contiguous().clone() for path, tensor in tensors.items()}
                self._attempt(partial(self._with, self.best, straight))

    def _clear(self, leaf: Leaf, parts: int) -> None:
        """Zero what can be of a tensor."""
        base, before = self.best, words(leaf.tensor)
        filled = before.nonzero().view(-1)

        def only(kept: torch.Tensor) -> Call:
            after = torch.zeros_like(before)
            after[filled[kept]] = before[filled[kept]]
            return self._with(base, {leaf.path: of_words(after, leaf.tensor)})

        _thin(len(filled), parts, lambda kept: self._attempt(lambda: only(kept)))

    def _lower_words(self, leaf: Leaf, parts: int) -> None:
        """Bring what is left of a tensor towards zero, where that is little."""
        filled = words(leaf.tensor).nonzero().view(-1).tolist()
        if len(filled) > parts or leaf.tensor.dtype.is_floating_point or leaf.tensor.dtype == torch.bool:
            return
        for index in filled:
            value = int(words(leaf.tensor)[index])
            _lower(value, partial(self._attempt_word, leaf.path, index))

    def _attempt_word(self, path: str, index: int, value: int) -> bool:
        leaf = next(leaf for leaf in self._leaves() if leaf.path == path)
        after = words(leaf.tensor).clone()
        # The bytes of a source may be alike; elements of an argument may be slots or rows.
        if leaf.spec is not None and bool((after == value).any()):
            return False
        after[index] = value
        return self._attempt(lambda: self._with(self.best, {path: of_words(after, leaf.tensor)}))


def _thin(count: int, parts: int, accept: Callable[[torch.Tensor], bool]) -> None:
    """Remove what can be from range(count), in ever smaller chunks, as long as `accept` takes the indices that stay.

    The smallest chunk is a part of `parts`.
    """
    kept, chunk = torch.arange(count), count
    while chunk >= max(1, count // parts):
        at = 0
        while at < len(kept):
            without = torch.cat([kept[:at], kept[at + chunk :]])
            if accept(without):
                kept = without
            else:
                at += chunk
        chunk //= 2


def _lower(value: int, accept: Callable[[int], bool]) -> None:
    """Bring `value` towards 0 as far as `accept` goes along: to 0, to 1 or -1, by halves, then by smaller steps."""
    sign = 1 if value > 0 else -1
    if accept(0) or accept(sign):
        return
    while abs(value) > 3 and accept(sign * (abs(value) // 2)):
        value = sign * (abs(value) // 2)
    step = 1 << abs(value).bit_length() - 1 if 1 < abs(value) < PLAIN_NUMBERS else 0
    while step:
        if abs(value) > step and accept(value - sign * step):
            value -= sign * step
        else:
            step //= 2
