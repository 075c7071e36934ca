"""The rows of a report as a tree by module path, which the table and the treemap show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ecornn.profiler.model import Row


@dataclass
class Node:
    """A module: what it holds `own`, by kind, and the modules inside it."""

    name: str
    path: str
    own: dict[str, int] = field(default_factory=dict)
    inside: dict[str, Node] = field(default_factory=dict)

    def by_kind(self) -> dict[str, int]:
        """Its own and that of all inside it."""
        found = dict(self.own)
        for node in self.inside.values():
            for kind, count in node.by_kind().items():
                found[kind] = found.get(kind, 0) + count
        return found

    def bytes(self) -> int:
        return sum(self.by_kind().values())


@dataclass(frozen=True)
class Line:
    """A line of the tree as it is printed. The lines with `whole` unset add up to the root."""

    name: str
    depth: int
    by_kind: dict[str, int]
    #: A sum over lines that follow.
    whole: bool

    @property
    def bytes(self) -> int:
        return sum(self.by_kind.values())


def tree_of(rows: Iterable[Row]) -> Node:
    root = Node("", "")
    for row in rows:
        node = root
        for name in row.module.split(".") if row.module else ():
            path = f"{node.path}.{name}" if node.path else name
            node = node.inside.setdefault(name, Node(name, path))
        node.own[row.kind] = node.own.get(row.kind, 0) + row.bytes
    return root


def lines_of(root: Node, depth: int | None = None, at_most: int | None = None) -> list[Line]:
    """The tree below the root, the largest first. Modules deeper than `depth` are in their parent's
    line. Only the `at_most` largest modules, and those that tie with them, have a line; the others
    are one line of the module that holds them."""
    return list(_walk(root, 0, depth, _smallest(root, at_most)))


def _smallest(root: Node, at_most: int | None) -> int | None:
    """The size under which a module has no line of its own."""
    sizes = sorted(_sizes(root), reverse=True)
    return None if at_most is None or len(sizes) <= at_most else sizes[at_most - 1]


def _sizes(node: Node) -> Iterator[int]:
    for part in node.inside.values():
        yield part.bytes()
        yield from _sizes(part)


def _walk(node: Node, depth: int, deepest: int | None, smallest: int | None) -> Iterator[Line]:
    parts = sorted(node.inside.values(), key=lambda part: (-part.bytes(), part.name))
    large = [part for part in parts if smallest is None or part.bytes() >= smallest]
    own = [Line("", depth, dict(node.own), False)] if node.own else []
    blocks: list[tuple[int, list[Line]]] = [(line.bytes, [line]) for line in own]
    for part in large:
        name, part = joined(part)
        if not part.inside or (deepest is not None and depth + 1 >= deepest):
            block = [Line(name, depth, part.by_kind(), False)]
        else:
            block = [
                Line(name, depth, part.by_kind(), True),
                *_walk(part, depth + 1, deepest, smallest),
            ]
        blocks.append((part.bytes(), block))
    for _, block in sorted(blocks, key=lambda found: -found[0]):
        yield from block
    rest = parts[len(large) :]
    if rest:
        together: dict[str, int] = {}
        for part in rest:
            for kind, count in part.by_kind().items():
                together[kind] = together.get(kind, 0) + count
        yield Line(f"… {len(rest)} smaller", depth, together, False)


def joined(node: Node) -> tuple[str, Node]:
    """A module that only holds one other shares its line: "model.encoder"."""
    name = node.name
    while not node.own and len(node.inside) == 1:
        (node,) = node.inside.values()
        name = f"{name}.{node.name}" if name else node.name
    return name, node
