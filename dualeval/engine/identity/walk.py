"""Objects and what they hold, each made once, without recursion: the digests of graphs with any cycles."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

# Of a cycle: so often its objects are told apart by what they hold, and so many are made for that at most.
_LEAST_ROUNDS = 8
_MOST_MADE = 100_000
_UNKNOWN = bytes(32)

Make = Callable[[Any, Callable[[Any], bytes]], bytes]


class Walk:
    """Makes the digests of an object and of all that it reaches.

    Objects outside of cycles are made of the digests of what they hold (Tarjan's algorithm finds the order).
    Those of a cycle have no first one. They are told apart by what they say without the others, then by what
    the others say, and so on until that tells no more apart. So it counts neither where a cycle is entered,
    nor in which order a set gives its objects.
    """

    def __init__(self, done: MutableMapping[int, tuple[Any, bytes]], make: Make) -> None:
        self._done = done
        self._make = make
        self._nodes: dict[int, _Node] = {}
        self._open: list[_Node] = []

    def visit(self, root: Any) -> None:
        """Make an object's digest, and those of all that it reaches."""
        path = [self._enter(root)]
        while path:
            node = path[-1]
            child = next(node.left, _END)
            if child is _END:
                path.pop()
                if path:
                    path[-1].low = min(path[-1].low, node.low)
                if node.low == node.number:
                    self._close(node)
            elif id(child) not in self._done:
                met = self._nodes.get(id(child))
                if met is None:
                    path.append(self._enter(child))
                else:
                    node.low = min(node.low, met.number)

    def _enter(self, value: Any) -> _Node:
        held: list[Any] = []

        def record(child: Any) -> bytes:
            held.append(child)
            return _UNKNOWN

        made = self._make(value, record)
        node = _Node(value, held, made, len(self._nodes))
        self._nodes[id(value)] = node
        self._open.append(node)
        return node

    def _close(self, first: _Node) -> None:
        place = next(number for number in range(len(self._open) - 1, -1, -1) if self._open[number] is first)
        members = self._open[place:]
        del self._open[place:]
        if len(members) > 1 or any(child is first.value for child in first.held):
            made = self._cycle(members)
        else:
            made = {id(first.value): self._again(first, {}) if first.held else first.made}
        self._done.update({id(node.value): (node.value, made[id(node.value)]) for node in members})

    def _cycle(self, members: list[_Node]) -> dict[int, bytes]:
        colours = {id(node.value): _UNKNOWN for node in members}
        apart = 1
        for _ in range(max(_LEAST_ROUNDS, _MOST_MADE // len(members))):
            colours = {id(node.value): self._again(node, colours) for node in members}
            before, apart = apart, len(set(colours.values()))
            if before == apart:
                break
        whole = hashlib.sha256(b"cycle" + b"".join(sorted(set(colours.values())))).digest()
        return {
            key: hashlib.sha256(b"of a cycle" + colour + whole).digest() for key, colour in colours.items()
        }

    def _again(self, node: _Node, colours: Mapping[int, bytes]) -> bytes:
        """An object's digest, from those of the objects that it held when it was entered."""
        held: Iterator[Any] = iter(node.held)

        def known(_: Any) -> bytes:
            # The object that is asked for may be a list made for the asking: its place counts.
            child = next(held, _END)
            if child is _END:  # it holds more than before: another thread writes to it
                return _UNKNOWN
            return colours[id(child)] if id(child) in colours else self._done[id(child)][1]

        return self._make(node.value, known)


class _Node:
    __slots__ = ("held", "left", "low", "made", "number", "value")

    def __init__(self, value: Any, held: list[Any], made: bytes, number: int) -> None:
        self.value = value
        self.held = held
        self.left = iter(held)
        self.made = made
        self.number = self.low = number


_END = object()
