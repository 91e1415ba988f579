"""Claims about ranges that are in order and apart."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.scheduling.sequences import at_least, union

ranges = st.lists(st.builds(range, st.integers(0, 20), st.integers(0, 20)), max_size=6)


@given(ranges, st.integers(0, 20), st.integers(0, 20))
def test_a_union_is_what_any_covers_within_bounds(spans: list[range], first: int, end: int) -> None:
    """Whatever their order, and however they overlap; nothing of it is twice there, and no two
    parts touch.
    """
    parts = union(spans, first, end)

    assert [index for part in parts for index in part] == [
        index for index in range(first, end) if any(index in one for one in spans)
    ]
    assert all(earlier.stop < later.start for earlier, later in pairwise(parts))


@given(ranges, st.integers(0, 20))
def test_what_is_at_least_there_is_the_rest(spans: list[range], first: int) -> None:
    """Parts that lie before are gone, and one that straddles is cut."""
    parts = union(spans, 0, 20)

    rest = at_least(parts, first)

    assert [index for part in rest for index in part] == [
        index for part in parts for index in part if index >= first
    ]
    assert all(rest)
