"""The scenarios of the sentinel of links in virtual time, one seed each."""

from kvrs_testkit.link_scenarios import (
    BAR_PROBES,
    LAST,
    OURS,
    VirtualLink,
    measure,
    scenarios,
)


def test_decisions_on_the_estimate_cost_no_more_than_those_on_the_last_sample() -> None:
    """In no scenario: an average that decides worse than the last sample is not worth its name.
    Probes keep to their share, and five time constants after a step the estimate is the rate.
    """
    rows = {(row["scenario"], row["rule"]): row for row in measure(range(1))}

    scenarios = {scenario for scenario, _ in rows}
    assert len(scenarios) == 6
    for scenario in scenarios:
        ours, last = rows[scenario, OURS], rows[scenario, LAST]
        assert ours["regret"] <= last["regret"] + 1e-4, scenario
        assert ours["settled_error"] <= 0.01, scenario
        assert ours["probe_share"] <= BAR_PROBES, scenario


def test_probes_stay_below_1_percent_where_the_rate_drops_during_one() -> None:
    """A probe that is under way when a link becomes slow takes longer than its share."""
    (oscillation,) = (each for each in scenarios() if each.name.startswith("oscillation"))
    links = [VirtualLink(oscillation, seed) for seed in range(8)]

    for link in links:
        link.run()

    assert max(link.probe_share for link in links) < BAR_PROBES
