"""Restores in a ring of nodes, with real agents and a real proxy before scripted servers whose tier
is the product's.
"""

from argparse import Namespace

import pytest

from experiments.vllm_rows.ring import KINDS, missed, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.nightly,
    pytest.mark.xdist_group("clusters"),
]


def test_streams_load_their_rows_wherever_they_go_on_in_a_ring() -> None:
    """After the death of one server, of two neighbours, and of a node with its agent."""
    kills = len(KINDS) + 1  # One of each, and the second one of two neighbours.
    found = run(Namespace(real=False, seed=7, moves=1000, kills=kills, limit_s=240.0), 3)

    assert {move["kind"] for move in found["each"]} == {*KINDS}
    assert missed([found], moves=1000, kills=kills) == []
