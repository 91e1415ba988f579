"""The one order in which the results of units are added up: neighbours, then neighbours of those.

An odd one out passes on as it is; nothing is added for it, since adding zero can change a sign. A
node `(level, place)` stands for the units `place * 2**level` to `(place + 1) * 2**level`, as far as
there are so many. Whatever nodes the owners of units have summed among themselves, `combine` makes
the sum that one owner of all units would have made, to the last bit.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A subtree."""

    level: int
    place: int


def root(units: int) -> Node:
    return Node((units - 1).bit_length(), 0)


def cover(owned: Collection[int], units: int) -> list[Node]:
    """The largest subtrees of which all units are owned, from left to right."""
    return _cover(root(units), frozenset(owned), units)


class SumStep(NamedTuple):
    """The next unit of a sum, and the additions that are made once it is there: each of the second
    number's subtree to that of the first, both named by their first units.
    """

    unit: int
    additions: tuple[tuple[int, int], ...]


@cache
def steps(node: Node, units: int) -> tuple[SumStep, ...]:
    """How a subtree is summed, from left to right: at most one sum per level is waiting. The result
    is that of the node's first unit.
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
    """The sum of all units, from the sums of covers that are complete together."""
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
    """The same sum under one name: a node with one child is that child."""
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
