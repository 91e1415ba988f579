"""Decisions that differ between two runs are taken apart by their inputs, without a cluster: both
runs are simulated.
"""

from unittest.mock import patch

import pytest

from experiments.kills.simulated import config_of
from experiments.simulator import causes, cluster
from kvrs.config.file import Config
from kvrs.config.policy import PolicyName
from kvrs_lab.demo import scaled_requests
from kvrs_lab.traces.generator import GeneratorSettings, generate


def slow_links(name: PolicyName, seed: int) -> Config:
    config = config_of(name, seed)
    rate = config.transfer.link_bytes_per_s
    assert rate is not None
    transfer = config.transfer.model_copy(update={"link_bytes_per_s": rate / 6})
    return config.model_copy(update={"transfer": transfer})


@pytest.fixture(scope="module")
def sides() -> dict[str, cluster.Side]:
    requests = scaled_requests(generate(GeneratorSettings(requests=100), 0), 0, 8.0)
    faults = cluster.kills_of(3, requests[-1].arrival_s, 0)
    usual = cluster.simulated(requests, faults, 0)
    other = cluster.simulated(requests, faults, 0, delays_seed=1)
    with patch.object(cluster, "config_of", slow_links):
        slow = cluster.simulated(requests, faults, 0)
    return {"usual": usual, "other": other, "slow": slow}


def test_a_run_differs_from_itself_in_nothing(sides: dict[str, cluster.Side]) -> None:
    usual = sides["usual"]
    there = causes.decided(usual.log, usual.numbers, 1.0)

    first, *rows = causes.causes(causes.decided(usual.log, usual.numbers, 1.0, there), there, there)

    assert first["pairs"] == first["alike"] > 30
    assert first["differing"] == 0
    assert all(row["changed"] == 0 for row in rows)


@pytest.mark.parametrize("name", ["other", "slow"])
def test_all_inputs_together_explain_every_difference(
    sides: dict[str, cluster.Side], name: str
) -> None:
    """None is left out, then: with all of the other side's each decision is the other side's."""
    usual, other = sides["usual"], sides[name]
    there = causes.decided(other.log, other.numbers, 1.0)

    first, *rows = causes.causes(causes.decided(usual.log, usual.numbers, 1.0, there), there, there)

    found = {row["input"]: row for row in rows}
    assert first["differing"] > 5
    assert found["all of them"]["mended"] == first["differing"]
    assert (found["rates of links"]["mended"] > 0) is (name == "slow")
    assert found["prefill tables"]["changed"] == 0
    assert "MB/s" in causes.as_text([first, *rows])
