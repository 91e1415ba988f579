"""Requests that end what they run on, and a loss just below saturation, in virtual time."""

import pytest

from kvrs.core.books.poison import PoisonCounter
from kvrs.core.model.member import AnswerHealth
from kvrs_lab.sim.cluster import POISONED, Outcome
from kvrs_lab.sim.world import World
from kvrs_testkit.random_worlds import avalanche, poisoned
from tests.sim.drawn import seeds
from tests.sim.stepwise import assert_same_step_by_step, outcome_told

STREAMS = 560  # Of an avalanche; the last ones come at 41 s.
SEEDS, BLOCKS = seeds(40), 8
COMPARED = range(6)


def deaths(outcome: Outcome) -> int:
    return sum(hit.death == POISONED for hit in outcome.hits)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_three_poisoned_requests_end_three_instances_each_and_no_other_stream(block: int) -> None:
    """However late their deaths become known: in a fifth of the worlds the second death of a
    request is known before its first one.
    """
    outcomes = {
        seed: outcome_told(poisoned, seed) if seed in COMPARED else poisoned(seed).run()
        for seed in range(block, SEEDS, BLOCKS)
    }

    ended = {"complete": 150, "poison": 3}
    assert {seed: each.ended for seed, each in outcomes.items() if each.ended != ended} == {}
    assert max(max(each.poison_deaths.values()) for each in outcomes.values()) <= 3


def test_a_world_is_the_same_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where instances die of what runs there."""
    assert_same_step_by_step(poisoned, COMPARED, monkeypatch)


@pytest.mark.parametrize("seed", range(2))
def test_survivors_of_a_loss_just_below_saturation_do_not_collapse(seed: int) -> None:
    """They have no room for all: none is lost, tries are few, the survivors do their work, and what
    has waited is made up for soon after the instance is back.
    """
    world = avalanche(seed)
    sent: list[int] = []
    for at_s in (9.0, 14.0, 16.0, 19.0):
        world.cluster.clock.after(at_s, lambda: sent.append(tokens(world)))

    outcome = world.run()

    before_per_s, after_per_s = (sent[1] - sent[0]) / 5, (sent[3] - sent[2]) / 3
    assert outcome.ended == {"complete": STREAMS}
    assert after_per_s > 0.75 * before_per_s
    assert outcome.actions["Start"] < 1.4 * STREAMS
    assert outcome.span_s < 47.0


def tokens(world: World) -> int:
    proxies = world.cluster.proxies
    return sum(len(live.output) for proxy in proxies for live in proxy.streams.values())


def test_simulator_notices_a_policy_that_counts_no_deaths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bounds above can be broken."""
    monkeypatch.setattr(PoisonCounter, "lost", lambda *_, **__: [])

    outcome = poisoned(0).run()

    assert deaths(outcome) > 12


def test_simulator_notices_tries_of_instances_that_are_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams that do not wait for room ask the survivors again and again, and end late."""
    monkeypatch.setattr(AnswerHealth, "is_busy", lambda self, now_s: False)
    monkeypatch.setattr(AnswerHealth, "note_room", lambda self, now_s: False)

    outcome = avalanche(0).run()

    assert outcome.actions["Start"] > 1.4 * STREAMS or outcome.span_s > 47.0
