"""Front doors of the simulated case of goodput under skew."""

import pytest

from experiments.load_skew.run import requests
from experiments.load_skew.simulated import TwoDoors, simulated_settings
from kvrs.config.policy import Handoff


@pytest.mark.parametrize(
    ("handoff", "decodes"),
    [(Handoff.OWN_PAIR, [{"d0"}, {"d1"}]), (Handoff.ROM, [{"d0", "d1"}, {"d1"}])],
)
def test_each_door_prefills_on_its_node_and_rom_decodes_on_both(
    handoff: Handoff, decodes: list[set[str]]
) -> None:
    """With 90 % of the requests at the first door, only that one has a reason to go elsewhere."""
    asked = requests(0, 10.0, 0.9, 5.0)
    cluster = TwoDoors(simulated_settings(), handoff, seed=0)

    records = cluster.take(asked, 60.0)

    plans = [
        [live.attempt.plan for live in proxy.streams.values() if live.attempt.plan is not None]
        for proxy in cluster.serving
    ]
    assert all(record.completed for record in records)
    assert [len(each) for each in plans] == [len(each) for each in asked]
    assert [{plan.prefill for plan in each} for each in plans] == [{"p0"}, {"p1"}]
    assert [{plan.decode for plan in each} for each in plans] == decodes
