"""`kvrs lab compare`."""

import json
from collections import Counter

import pytest
from typer.testing import CliRunner

from kvrs.cli import app
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError
from kvrs_lab.sim.case import SimulateOptions
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.command import simulate_policies
from kvrs_lab.sim.comparison import INCOMPLETE, WAITED, compare, parse_policies, verdict
from kvrs_lab.sim.seeds import Simulated

AUTO, ROM, RECOMPUTE = PolicyName.AUTO, PolicyName.ROM, PolicyName.ALWAYS_RECOMPUTE


def runs(*pauses_s: float, complete: int = 10) -> Simulated:
    """A seed for each pause, of one of ten streams."""
    outcomes = [
        Outcome(ended=Counter(complete=complete, aborted=10 - complete), pauses_s=[pause_s])
        for pause_s in pauses_s
    ]
    return Simulated(dict(enumerate(outcomes)), {})


def test_runs_of_a_seed_are_pairs() -> None:
    """A small difference shows although the seeds differ much more."""
    contests = compare({ROM: runs(2.1, 20.1, 200.1), AUTO: runs(2.0, 20.0, 200.0)})

    assert [each.policy for each in contests] == [AUTO, ROM]
    difference = contests[1].differences[WAITED]
    assert difference.mean == pytest.approx(0.01)  # 0.1 s of one of ten streams.
    assert difference.half_width == pytest.approx(0, abs=1e-9)
    assert verdict(contests) == "auto is better than rom (95 %, 3 seeds)."


def test_a_difference_whose_interval_includes_zero_is_not_shown() -> None:
    """Means alone decide nothing."""
    contests = compare(
        {AUTO: runs(1.0, 2.0, 3.0), ROM: runs(3.0, 2.0, 1.5), RECOMPUTE: runs(5.0, 6.0, 7.0)}
    )

    assert verdict(contests) == (
        "auto is better than always_recompute; no difference between auto and rom is shown "
        "(95 %, 3 seeds)."
    )


def test_a_policy_that_gives_up_is_not_better_for_its_short_waits() -> None:
    """Streams that are not completed count first."""
    contests = compare({AUTO: runs(5.0, 5.1, 5.2), ROM: runs(0.1, 0.1, 0.1, complete=7)})

    assert contests[0].policy is AUTO
    assert contests[1].differences[INCOMPLETE].mean == pytest.approx(0.3)
    assert verdict(contests).startswith("auto is better than rom")


def test_one_seed_has_no_interval() -> None:
    """And the verdict says so."""
    assert "one seed has no interval" in verdict(compare({AUTO: runs(1.0), ROM: runs(2.0)}))


def test_equal_policies_are_both_best() -> None:
    """Even with a single seed, none is better than an equal one."""
    policies = {ROM: runs(1.0), AUTO: runs(1.0), PolicyName.ALWAYS_RESTORE: runs(2.0)}

    assert verdict(compare(policies)).startswith("rom, auto did best;")


def test_seeds_that_violated_an_invariant_are_no_pairs() -> None:
    """The others are compared."""
    rom = runs(3.0, 4.0, 5.0)
    del rom.by_seed[1]

    contests = compare({AUTO: runs(1.0, 2.0, 3.1), ROM: rom})

    assert contests[1].differences[WAITED].n == 2


@pytest.mark.parametrize(
    ("text", "reason"), [("auto,best", "got 'best'; allowed: always_"), ("rom, rom", "two or more")]
)
def test_policies_that_cannot_be_compared_are_refused(text: str, reason: str) -> None:
    """One line, with what is allowed."""
    with pytest.raises(ConfigError, match=reason):
        parse_policies(text)


def test_policies_meet_the_same_load_and_faults() -> None:
    """Arrivals, victims and times are functions of the seed."""
    _, _, found = simulate_policies(
        SimulateOptions(policy=(ROM, AUTO), deaths=2, requests=15, seeds=2)
    )

    for rom, auto in zip(found[ROM].outcomes, found[AUTO].outcomes, strict=True):
        assert rom.tokens == auto.tokens > 0
        assert [hit.death for hit in rom.hits] == [hit.death for hit in auto.hits]


def test_each_policy_decides_its_own_runs() -> None:
    """The configuration's is replaced."""
    _, _, found = simulate_policies(
        SimulateOptions(policy=(RECOMPUTE, PolicyName.ALWAYS_MIGRATE), deaths=3, requests=30)
    )
    recoveries = {policy: set(each.outcomes[0].recoveries) for policy, each in found.items()}

    assert "migrate" not in recoveries[RECOMPUTE]
    assert "migrate" in recoveries[PolicyName.ALWAYS_MIGRATE]


def test_compare_prints_a_verdict_or_json() -> None:
    """JSON holds every seed, and what was compared."""
    given = ["lab", "compare", "--policies", "rom,auto", "--deaths", "2", "--requests", "15"]
    result = CliRunner().invoke(app, [*given, "--seeds", "2"])
    document = CliRunner().invoke(app, [*given, "--seeds", "2", "--json"]).stdout

    assert result.exit_code == 0, result.output
    assert "2 seeds)." in " ".join(result.output.split())
    kept = json.loads(document)
    assert kept["comparison"]["best"] in ("rom", "auto")
    assert sorted(kept["policies"]["rom"]["seeds"]) == ["0", "1"]
    assert kept["policies"]["auto"]["seeds"]["0"]["streams"] == 15


def test_nothing_is_compared_without_deaths() -> None:
    """All policies are alike then."""
    result = CliRunner().invoke(app, ["lab", "compare", "--policies", "rom,auto"])

    assert isinstance(result.exception, ConfigError)
    assert "--fault, --deaths: missing" in str(result.exception)
