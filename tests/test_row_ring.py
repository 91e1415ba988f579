"""Restores in a ring of nodes, and from damaged rows, with real agents and a real proxy before
scripted servers whose tier is the product's.
"""

import time
from argparse import Namespace

import pytest

from experiments.vllm_rows import damaged
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


def test_streams_go_on_rightly_behind_damaged_rows() -> None:
    """Over the socket of the own node, and over TCP."""
    options = Namespace(real=False, seed=7)
    found = [damaged.run(options, way, 2, time.monotonic() + 200.0) for way in damaged.WAYS]

    assert damaged.missed(found, 4) == []
