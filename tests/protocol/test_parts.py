"""The intersection of two rectangles of cells has exactly their common cells, and rectangles can
cover any cells.
"""

from hypothesis import given
from hypothesis import strategies as st

from kvrs.protocol.pages import Part, rectangles


@st.composite
def parts(draw: st.DrawFn) -> Part:
    def span() -> range:
        first = draw(st.integers(0, 6))
        return range(first, draw(st.integers(first + 1, 8)))

    return Part(span(), span())


def cells(part: Part | None) -> set[tuple[int, int]]:
    return {(layer, head) for layer in part.layers for head in part.heads} if part else set()


@given(parts(), parts())
def test_shared_cells_are_those_of_both(left: Part, right: Part) -> None:
    assert cells(left.shared(right)) == cells(left) & cells(right)
    assert len(cells(left)) == left.cells


@given(parts(), parts())
def test_local_place_is_the_distance_from_the_own_corner(whole: Part, other: Part) -> None:
    if (shared := whole.shared(other)) is None:
        return

    layers, heads = whole.local(shared)

    assert list(whole.layers)[layers] == list(shared.layers)
    assert list(whole.heads)[heads] == list(shared.heads)


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_rectangles_have_each_cell_once_and_no_other(gone: set[tuple[int, int]]) -> None:
    found = rectangles(gone)

    assert sum(part.cells for part in found) == len(gone)
    assert {cell for part in found for cell in cells(part)} == gone


@given(parts())
def test_a_rectangle_is_one(part: Part) -> None:
    """A rank's heads that lie beside each other in all its layers are asked for at once."""
    assert rectangles(cells(part)) == [part]
