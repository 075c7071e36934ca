"""Circles of a directed graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def circles(leads_to: Mapping[int, set[int]]) -> list[set[int]]:
    """The largest sets of nodes that all lead to one another, by Tarjan's algorithm; a node alone
    is one if it leads to itself. Without recursion: chains are as long as a graph."""
    order: dict[int, int] = {}
    lowest: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    path: list[tuple[int, Iterator[int]]] = []
    found: list[set[int]] = []

    def enter(node: int) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        on_stack.add(node)
        path.append((node, iter(leads_to.get(node, ()))))

    def leave(node: int) -> None:
        path.pop()
        if path:
            above = path[-1][0]
            lowest[above] = min(lowest[above], lowest[node])
        if lowest[node] == order[node]:
            start = _last(stack, node)
            part = set(stack[start:])
            del stack[start:]
            on_stack.difference_update(part)
            if len(part) > 1 or node in leads_to.get(node, ()):
                found.append(part)

    for root in leads_to:
        if root not in order:
            enter(root)
        while path:
            node, targets = path[-1]
            for target in targets:
                if target not in order:
                    enter(target)
                    break
                if target in on_stack:
                    lowest[node] = min(lowest[node], order[target])
            else:
                leave(node)
    return found


def _last(stack: list[int], node: int) -> int:
    place = len(stack) - 1
    while stack[place] != node:
        place -= 1
    return place
