"""A sum over units has one association, whichever rank has which of them."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.elastic.trees import Node, combine, cover, root, steps


def neighbours_first(parts: list[str]) -> str:
    """The association written down in the plainest way."""
    while len(parts) > 1:
        pairs = [f"({a}+{b})" for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(parts) & ~1 :]
    return parts[0]


def add(left: str, right: str) -> str:
    return f"({left}+{right})"


def summed(node: Node, units: int) -> str:
    """The sum that the steps of a node make."""
    sums: dict[int, str] = {}
    for unit, additions in steps(node, units):
        sums[unit] = str(unit)
        for into, other in additions:
            sums[into] = add(sums[into], sums.pop(other))
        assert len(sums) <= node.level + 1, "one sum per level is waiting"
    (total,) = sums.values()
    return total


@given(units=st.integers(1, 200))
def test_steps_add_neighbours_first(units: int) -> None:
    """The order that `pair_sum` of the engine has, too."""
    assert summed(root(units), units) == neighbours_first([str(unit) for unit in range(units)])


@given(units=st.integers(1, 100), owners=st.integers(1, 6), seed=st.integers(0, 10_000))
def test_any_owners_make_the_same_sum(units: int, owners: int, seed: int) -> None:
    """Covers of disjoint owners are disjoint and complete, and combining them in any order gives
    the association of one owner.
    """
    choose = random.Random(seed)
    owner_of = [choose.randrange(owners) for _ in range(units)]
    covers = [
        cover([unit for unit in range(units) if owner_of[unit] == owner], units)
        for owner in range(owners)
    ]
    sums = [(node, summed(node, units)) for nodes in covers for node in nodes]
    choose.shuffle(sums)

    covered = [unit for nodes in covers for node in nodes for unit, _ in steps(node, units)]

    assert sorted(covered) == list(range(units))
    assert combine(dict(sums), units, add) == neighbours_first([str(unit) for unit in range(units)])


def test_aligned_owners_send_one_sum_each() -> None:
    """Equal shares of a power of two are whole subtrees."""
    assert cover(range(64), 64) == [Node(6, 0)]
    assert [cover(range(at, at + 8), 64) for at in (0, 56)] == [[Node(3, 0)], [Node(3, 7)]]
    assert len(cover(range(7), 64)) == 3
    assert cover([4], 5) == [Node(0, 4)]
