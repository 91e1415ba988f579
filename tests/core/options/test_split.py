"""Where a split divides a history."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.core.options.split import best_front
from kvrs.profiles.tables import PrefillTable


@given(
    pages=st.integers(2, 400),
    token_s=st.floats(1e-6, 1e-2),
    overhead_s=st.floats(0, 0.1),
    page_s=st.floats(1e-5, 0.5),
    fixed_s=st.floats(0, 1.0),
    tail=st.integers(1, 300),
)
def test_the_front_is_optimal_to_the_page_for_a_straight_table(
    pages: int, token_s: float, overhead_s: float, page_s: float, fixed_s: float, tail: int
) -> None:
    """In closed form, against trying every page."""
    history = pages * 16 + tail
    table = PrefillTable("line", "made up", 10_000, [overhead_s, overhead_s + 10_000 * token_s])

    def both_s(k: int) -> float:
        return max(fixed_s + (pages - k) * page_s, table.seconds_for(16 * k))

    best_s = min(both_s(k) for k in range(1, pages))
    found = best_front(table, 16, pages, page_s, fixed_s, table.seconds_for(history), history)

    if found is None:
        assert best_s >= (fixed_s + pages * page_s) * (1 - 1e-9)
    else:
        assert found[1] == pytest.approx(both_s(found[0]))
        assert found[1] <= best_s * (1 + 1e-9)


@given(
    pages=st.integers(2, 400),
    page_s=st.floats(1e-4, 0.1),
    fixed_s=st.floats(0, 0.5),
    curve=st.floats(0, 1e-8),
)
def test_the_front_is_near_the_optimum_for_a_bent_table(
    pages: int, page_s: float, fixed_s: float, curve: float
) -> None:
    """Attention makes prefill quadratic: a fixed number of look-ups must still do."""
    table = PrefillTable(
        "bent", "made up", 100, [0.005 + 1e-5 * n + curve * n * n for n in range(0, 8000, 100)]
    )
    history = pages * 16 + 1

    best_s = min(
        max(fixed_s + (pages - k) * page_s, table.seconds_for(16 * k)) for k in range(1, pages)
    )
    found = best_front(table, 16, pages, page_s, fixed_s, table.seconds_for(history), history)

    assert (found[1] if found is not None else fixed_s + pages * page_s) <= best_s * 1.15
