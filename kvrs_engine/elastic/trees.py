"""The fixed order of additions over the results of units: a binary tree of neighbours.

A result without a neighbour passes on unchanged: adding zero could change a sign. A node
`(level, place)` covers the units `place * 2**level` to `(place + 1) * 2**level`, as far as they
exist. `combine` gives the same bits for any division of the units among owners that have summed
their own nodes.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A subtree of the sum."""

    level: int
    place: int


def root(units: int) -> Node:
    return Node((units - 1).bit_length(), 0)


def cover(owned: Collection[int], units: int) -> list[Node]:
    """Return the largest subtrees whose units are all owned, from left to right."""
    return _cover(root(units), frozenset(owned), units)


class SumStep(NamedTuple):
    """The next unit of a sum, and the additions after it. An addition (a, b) adds the subtree that
    begins with unit b to the subtree that begins with unit a.
    """

    unit: int
    additions: tuple[tuple[int, int], ...]


@cache
def steps(node: Node, units: int) -> tuple[SumStep, ...]:
    """Return the steps of a subtree's sum from left to right, with at most one pending sum per
    level. The result is in the place of the node's first unit.
    """
    level, place = node
    left, right = Node(level - 1, 2 * place), Node(level - 1, 2 * place + 1)
    if level == 0:
        return (SumStep(place, ()),)
    if _is_empty(right, units):
        return steps(left, units)
    *others, last = steps(right, units)
    added = (place << level, right.place << right.level)
    return (*steps(left, units), *others, SumStep(last.unit, (*last.additions, added)))


def combine(sums: Mapping[Node, Value], units: int, add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum of all units from the sums of disjoint nodes that cover them."""
    return _combine(root(units), sums, units, add)


def _cover(node: Node, owned: frozenset[int], units: int) -> list[Node]:
    level, place = node
    members = range(place << level, min((place + 1) << level, units))
    if members and owned.issuperset(members):
        return [_lowest(node, units)]
    if owned.isdisjoint(members):
        return []
    left, right = Node(level - 1, 2 * place), Node(level - 1, 2 * place + 1)
    return _cover(left, owned, units) + _cover(right, owned, units)


def _lowest(node: Node, units: int) -> Node:
    """Return the canonical node: a node with one child is replaced by the child."""
    while node.level and _is_empty(Node(node.level - 1, 2 * node.place + 1), units):
        node = Node(node.level - 1, 2 * node.place)
    return node


def _combine(
    node: Node, sums: Mapping[Node, Value], units: int, add: Callable[[Value, Value], Value]
) -> Value:
    node = _lowest(node, units)
    if node in sums:
        return sums[node]
    level, place = node
    assert level > 0, f"unit {place} is in no sum"
    return add(
        _combine(Node(level - 1, 2 * place), sums, units, add),
        _combine(Node(level - 1, 2 * place + 1), sums, units, add),
    )


def _is_empty(node: Node, units: int) -> bool:
    return node.place << node.level >= units
