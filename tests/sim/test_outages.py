"""Outages that no request caused, and poisoned requests that come at once, in virtual time: the two
look alike to a stream that is at each of the deaths.
"""

import pytest

from kvrs.core.books.poison import PoisonCounter
from kvrs_testkit.random_worlds import outage, poisons_at_once
from tests.sim.drawn import seeds

SEEDS = seeds(20)
# Each seed with one bound, which takes half the time; there are pairs, and instances that do both
# stages, among those of either.
WORLDS = {allowed: range(allowed % 2, SEEDS, 2) for allowed in (2, 3)}


@pytest.mark.parametrize("spread_s", [0.0, 0.06, 0.3])
def test_an_outage_refuses_no_stream(spread_s: float) -> None:
    """Four of eight instances are killed within a moment, with pairs and with instances that do
    both stages in turn. Every stream that was taken is complete, with the three deaths that are
    allowed by default, but for fewer than one of a thousand, which waited at three of them.
    """
    refused, victims = {}, 0

    for seed in WORLDS[3]:
        outcome = outage(seed, spread_s, both=bool(seed % 4 // 2)).run()
        victims += outcome.recovered_streams
        if outcome.innocents_lost:
            refused[seed] = outcome.given_up

    assert len(refused) <= victims / 1000, refused
    assert victims > 10 * len(WORLDS[3])


@pytest.mark.parametrize("allowed", WORLDS)
@pytest.mark.parametrize("pairs", [4, 6])
def test_poisoned_requests_that_come_at_once_end_no_more_instances_than_allowed(
    pairs: int, allowed: int
) -> None:
    """Three within 10 ms, beside ten others: each is refused, and fewer than one of a thousand
    other streams where three deaths are allowed. With two, some are that waited beside one at both.
    """
    worlds = {
        seed: poisons_at_once(seed, pairs, poison_deaths=allowed).run() for seed in WORLDS[allowed]
    }

    refused = {each.ended["poison"] - each.innocents_refused for each in worlds.values()}
    lost = {seed: each.given_up for seed, each in worlds.items() if each.innocents_lost}
    assert refused == {3}
    assert max(max(each.poison_deaths.values()) for each in worlds.values()) <= allowed
    assert allowed == 2 or len(lost) <= sum(each.ended.total() for each in worlds.values()) / 1000


@pytest.mark.parametrize("allowed", WORLDS)
def test_poisoned_requests_under_load_end_no_more_instances_than_allowed(allowed: int) -> None:
    """Four pairs at three times the rate, all of which are back soon after they died: more streams
    wait where a poisoned one died.
    """
    outcomes = [
        poisons_at_once(seed, 4, 30.0, poison_deaths=allowed, stay_away=0.0).run()
        for seed in WORLDS[allowed]
    ]

    lost = sum(each.innocents_lost for each in outcomes)
    assert max(max(each.poison_deaths.values()) for each in outcomes) <= allowed
    assert allowed == 2 or lost <= sum(each.ended.total() for each in outcomes) / 1000


@pytest.mark.parametrize("allowed", [2, 3])
def test_poisoned_requests_end_no_more_instances_than_allowed_when_reports_are_late(
    allowed: int,
) -> None:
    """A report that was under way while its instance died clears nobody of that death."""
    outcomes = [
        poisons_at_once(seed, 6, poison_deaths=allowed, load_interval_s=1.0).run()
        for seed in (6, 10, 11, 14)
    ]

    assert max(max(each.poison_deaths.values()) for each in outcomes) <= allowed


def test_a_supervisor_that_tells_the_causes_changes_no_refusal() -> None:
    """Processes that a request ended are told apart from those that were killed."""
    attack = poisons_at_once(0, 6, is_supervised=True).run()
    killed = outage(2, 0.3, both=True, is_supervised=True).run()

    assert attack.ended["poison"] == 3
    assert max(attack.poison_deaths.values()) <= 3
    assert attack.events["InstanceExited"] == sum(attack.poison_deaths.values())
    assert killed.events["InstanceExited"] == 4
    assert set(killed.ended) == {"complete"}


def test_simulator_notices_a_policy_that_has_no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kills that a supervisor reports refuse streams then, once two deaths are too many."""
    monkeypatch.setattr(PoisonCounter, "exited", lambda self, instance, epoch, now_s: None)

    worlds = [
        outage(seed, 0.3, both=True, poison_deaths=2, is_supervised=True) for seed in range(24)
    ]

    assert sum(world.run().innocents_refused for world in worlds) > 0
