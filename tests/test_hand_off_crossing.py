"""The crossing of a hand-off that is measured, beside those that are predicted."""

import pytest

from experiments.crossover.hand_off import Cell, step_s
from kvrs.core.model.estimates import HANDSHAKE_S
from kvrs.profiles import catalog

SERVICE_S, NEAR_BYTES_PER_S = 0.07, 100e9
DEPTHS = (0, 2, 4, 6)


def test_the_products_crossing_has_whole_pages_and_the_transfer_within_the_node() -> None:
    """Times as the product predicts them cross where it says, by reported queues as well; the
    formula has neither.
    """
    cell = Cell(1475, 40.0, near_bytes_per_s=[NEAR_BYTES_PER_S], engine_step_s=0.002)
    of_token_bytes = catalog.kv_geometry("opt-13b-a100-distserve-tp1").bytes_per_token
    kv_bytes = 1488 * of_token_bytes
    both_s, near_s = HANDSHAKE_S + step_s(1475, 0.002), kv_bytes / NEAR_BYTES_PER_S
    far_s = kv_bytes / 5e9
    cell.own_s = {depth: [depth * SERVICE_S + both_s + near_s] for depth in DEPTHS}
    cell.queue_s = {depth: [depth * SERVICE_S] for depth in DEPTHS}
    cell.remote_s = [both_s + far_s]

    assert cell.measured == pytest.approx((far_s - near_s) / SERVICE_S)
    assert cell.off_predicted == pytest.approx(0.0, abs=1e-9)
    assert cell.off_reported == pytest.approx(0.0, abs=1e-9)
    assert cell.late_s == pytest.approx(0.0, abs=1e-9)
    assert cell.off_measured == pytest.approx(
        (1488 - 1475) / 1475 - near_s * 5e9 / (1475 * of_token_bytes)
    )


def test_the_tables_crossing_has_the_engines_part_of_a_step() -> None:
    """Three steps of a request, each longer by what the engine has measured."""
    cell, plain = Cell(1475, 25.0, engine_step_s=0.002), Cell(1475, 25.0)

    times = plain.analytic / cell.analytic

    assert times == pytest.approx(1 + 0.006 / sum(step_s(1475 + each) for each in range(3)))
