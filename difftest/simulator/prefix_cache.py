"""A prefix cache: a tree whose edges are pages of tokens, as radix caches are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """A cached page: the tokens on the way to it are those of its prefix."""

    page: int
    key: tuple[int, ...] = ()
    parent: Node | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    used: int = 0


class PrefixCache:
    """Pages by identity and prefix. Holding and freeing them is its caller's business."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[int, Node] = {}
        self._clock = 0

    def match(self, identity: int, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest cached prefix of `tokens`, whole pages only."""
        return [node.page for node in self._walk(identity, tokens)]

    def insert(
        self, identity: int, tokens: Sequence[int], pages: Sequence[int], *, usable: Callable[[int], bool]
    ) -> tuple[list[int], list[int]]:
        """Keep the whole pages of `tokens`, and return (the page to use for each, the pages newly kept).

        Where the cache has a usable page for the same prefix already, that one is to be used.
        """
        node = self._roots.setdefault(identity, Node(page=-1))
        chosen, kept = [], []
        for i, page in enumerate(pages[: len(tokens) // self.page_size]):
            key = tuple(tokens[i * self.page_size : (i + 1) * self.page_size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(page=page, key=key, parent=node)
                kept.append(page)
            self._touch(child)
            chosen.append(child.page if usable(child.page) else page)
            node = child
        return chosen, kept

    def evict(self, *, idle: Callable[[int], bool]) -> int | None:
        """Forget the leaf used longest ago of those whose page is `idle`; return its page, or None without one."""
        leaves = [n for n in self._nodes() if not n.children and idle(n.page)]
        if not leaves:
            return None
        oldest = min(leaves, key=lambda n: n.used)
        if oldest.parent is not None:
            del oldest.parent.children[oldest.key]
        return oldest.page

    def pages(self) -> list[int]:
        """Return the page of every node."""
        return [n.page for n in self._nodes()]

    def walk(self) -> Iterator[tuple[int, int, int]]:
        """Yield (page, its place in its prefix, the page before it or -1) of every node."""
        waiting = [(root, -1) for root in self._roots.values()]
        while waiting:
            node, place = waiting.pop()
            waiting += [(child, place + 1) for child in node.children.values()]
            if node.parent is not None:
                yield node.page, place, node.parent.page

    def _walk(self, identity: int, tokens: Sequence[int]) -> Iterator[Node]:
        node = self._roots.get(identity)
        for at in range(0, len(tokens) - self.page_size + 1, self.page_size):
            node = None if node is None else node.children.get(tuple(tokens[at : at + self.page_size]))
            if node is None:
                return
            self._touch(node)
            yield node

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            if node.parent is not None:
                yield node
