"""Few numbers from many times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs_engine.engine.profiler import fit_transfer


def test_a_transfer_is_its_start_and_its_rate() -> None:
    """`alpha + bytes / rate`."""
    found = fit_transfer([(size, 1e-4 + size / 2e9) for size in (1000, 50_000, 4_000_000)])

    assert found.alpha_s == pytest.approx(1e-4)
    assert found.bytes_per_s == pytest.approx(2e9)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e3)), min_size=1, max_size=6))
def test_no_measurement_makes_a_transfer_impossible(points: list[tuple[int, float]]) -> None:
    """Noise may bend times in any way; what is kept starts at zero or later and has a rate above
    zero.
    """
    found = fit_transfer(points)

    assert found.alpha_s >= 0
    assert found.bytes_per_s > 0
