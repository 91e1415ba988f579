"""Every death of a stream, in worlds drawn at random, in virtual time. KVRS_SIM_SEEDS=5000 looks at
more of them.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import get_args

import pytest

from kvrs.agent.slots import SlotTable
from kvrs.core import checkpoints, kv_locations, ledger
from kvrs.core.books.waiting import SlotBook
from kvrs.core.event_log import rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.watch import WatchLimits
from kvrs.protocol.instance import Slot
from kvrs.transfer.store.book import CheckpointBook
from kvrs_engine.scheduling.scheduler import BatchScheduler
from kvrs_lab.sim.attempts import SimAttempt
from kvrs_lab.sim.cluster import CUT, Outcome
from kvrs_lab.sim.process import InvariantError
from kvrs_lab.sim.proxy import SimShell
from kvrs_lab.sim.world import World
from kvrs_testkit.death_scenarios import DEATH_SCENARIOS
from kvrs_testkit.examples import scaled
from kvrs_testkit.random_worlds import contended, in_turn, peers, poisoned, scenario, sick
from tests.sim.drawn import seeds
from tests.sim.stepwise import Drawn, assert_same_step_by_step, outcome_told

SEEDS = seeds(48)
BLOCKS = 8
COMPARED = range(6)


@cache
def outcome_of(seed: int) -> Outcome:
    return outcome_told(scenario, seed) if seed in COMPARED else scenario(seed).run()


@pytest.mark.parametrize("block", range(BLOCKS))
def test_invariants_hold_under_every_death(block: int) -> None:
    """One writer, every position once and in order, every stream ends, no dead holder, no slot too
    many, empty books.
    """
    broken = {}
    for seed in range(block, SEEDS, BLOCKS):
        try:
            outcome_of(seed)
        except AssertionError as error:
            broken[seed] = repr(error)

    assert not broken


def test_invariants_hold_with_replicas_at_peers() -> None:
    """No page is found that is not there, and streams go on where theirs are."""
    outcomes = [outcome_told(peers, seed) for seed in COMPARED]
    outcomes += [peers(seed).run() for seed in range(COMPARED.stop, scaled(40))]

    recoveries = sum((outcome.recoveries for outcome in outcomes), Counter[str]())
    assert recoveries[Option.REUSE.value] > 5


@pytest.mark.parametrize(
    ("drawn", "seeds"),
    [
        (scenario, COMPARED),
        (peers, COMPARED),
        *(pytest.param(drawn, range(3), marks=pytest.mark.nightly) for drawn in (contended, sick)),
    ],
)
def test_a_world_is_the_same_step_by_step(
    drawn: Drawn, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deaths, freezes, cut links, drains, aborts, preemption and proxies that die in between."""
    assert_same_step_by_step(drawn, seeds, monkeypatch)


@pytest.mark.parametrize(("make", "seed"), [(scenario, 2764), (contended, 26)])
def test_rare_worlds_hold_the_invariants(make: Callable[[int], World], seed: int) -> None:
    """A new owner's transfer replaces one that is not fenced yet; a prefill instance without work
    goes on with checkpoints of streams that have ended.
    """
    make(seed).run()


def test_rows_of_simulated_recoveries_have_the_predicted_intervals() -> None:
    """Once the token is there, a row has the prediction of the whole event, as a proxy's has."""
    world = scenario(1)
    world.run()
    recovered = [each for proxy in world.cluster.proxies for each in proxy.recovered]

    rows = [each.row() for each in recovered]

    starts = [row for row in rows if row["option"] == "start"]
    assert {(row["low_s"], row["high_s"]) for row in starts} == {(None, None)}
    recovered = [each for each in recovered if each.action.option is not Option.START]
    rows = [row for row in rows if row not in starts]
    said = {
        (row["predicted_s"], row["low_s"], row["high_s"])
        for row, each in zip(rows, recovered, strict=True)
        if each.settled is not None
    }
    settled = [each.settled for each in recovered if each.settled is not None]
    assert said == {(each.predicted_s, each.low_s, each.high_s) for each in settled}
    assert all(low_s is not None and low_s < high_s for _, low_s, high_s in said)
    assert {each[0] for each in said} - {each.action.predicted_s for each in recovered}


@pytest.mark.nightly
def test_generated_worlds_cover_every_death_event_and_action() -> None:
    """Guards the test above: every death, option and kind of end must really occur, every event
    that a proxy can raise and every action that a policy can ask for, and late tokens.
    """
    outcomes = [outcome_of(seed) for seed in range(160)]

    ended = sum((outcome.ended for outcome in outcomes), Counter[str]())
    ended += poisoned(0).run().ended  # No outage refuses a stream as poison.
    recoveries = sum((outcome.recoveries for outcome in outcomes), Counter[str]())
    hit: Counter[str] = Counter()
    # Deaths of several ranks at once are rare in worlds drawn at random.
    deaths = [*outcomes, *(outcome_told(in_turn, seed) for seed in range(6))]
    for one in (one for outcome in deaths for one in outcome.hits):
        if one.death in DEATH_SCENARIOS:
            hit[one.death] += one.streams
    assert set(ended) - {"refused", "busy"} == {
        *("complete", "no_instance", "overloaded", "slo", "retries", "poison"),
        CUT,
    }
    # No simulated engine generates known output again; those of `pipelines` lend stages.
    never = {Option.ABORT.value, Option.REPLAY.value, Option.SUBSTITUTE.value}
    assert set(recoveries) == {option.value for option in Option} - never
    assert set(hit) == set(DEATH_SCENARIOS)
    assert min(hit.values()) > 0
    # Random worlds have few of these, and fewer or more with every change of what is drawn.
    outcomes += [outcome_told(contended, seed) for seed in range(4)]
    assert sum(outcome.dropped_tokens for outcome in outcomes) > 10
    assert sum(outcome.slot_denials for outcome in outcomes) > 5
    assert sum(outcome.local_grants for outcome in outcomes) > 5
    assert sum(outcome.adopted for outcome in outcomes) > 5
    outcomes += [outcome_told(sick, seed) for seed in range(4)]
    events = sum((outcome.events for outcome in outcomes), Counter[str]())
    actions = sum((outcome.actions for outcome in outcomes), Counter[str]())
    # Not simulated: memory that outlives an engine, names of adapters, answers in one piece.
    kinds = (ev.PagesKept, ev.NamesListed, ev.WholeAsked)
    absent = {each.__name__ for each in kinds}
    simulated = {kind.__name__ for kind in get_args(ev.Event)} - absent
    assert set(events) == simulated
    assert set(actions) == {kind.__name__ for kind in get_args(act.Action)}
    assert ended["complete"] > sum(ended.values()) / 2


@pytest.mark.parametrize("seed", range(4))
def test_event_log_of_a_simulated_proxy_can_be_run_again(seed: int) -> None:
    """The policy is pure: what it was told is all that its answers depend on."""
    world = scenario(seed, keep_log=True)
    world.run()

    for proxy in world.cluster.proxies:
        assert proxy.log is not None
        assert rerun(proxy.log).difference is None


def first_broken(seeds: int = 60) -> str:
    """The error of the first world that goes wrong; empty if none does."""
    for seed in range(seeds):
        try:
            scenario(seed).run()
        except (LookupError, AttributeError, AssertionError) as error:
            return repr(error)
    return ""


# What is broken on purpose, and what is to be said of it.
BREAKS = {
    "old attempts count": (ev, "OfAttempt", (), "Invariant"),
    "a slot is never given back": (SlotBook, "release", lambda self, stream: None, ""),
    "agents grant whatever is asked for": (
        SlotTable,
        "_deny",
        lambda self, asked, target, ahead, now_s: Slot(
            self._grant("any", asked, target, now_s, now_s + 5)
        ),
        "",
    ),
    "a lost agent still holds": (checkpoints, "lose", lambda state, stream, holder, why: None, ""),
    "a lost instance still holds": (
        kv_locations,
        "forget",
        lambda state, stream_id, holder: None,
        "",
    ),
    "bytes stay on links": (ledger, "settle_bookings", lambda state, stream: None, "books"),
    "a gossiped death ends a watch": (
        WatchLimits,
        "silence_s",
        lambda self, *, is_gossiped_dead, **_: 0.0 if is_gossiped_dead else self.usual_s,
        "reports, and was lost",
    ),
    "a draining instance halts nothing": (
        SimShell,
        "end_attempt",
        lambda self, live: None,
        "",
    ),
    "reservations never end": (CheckpointBook, "_end", lambda self, stream: None, "reserves"),
    "pages are not given back": (BatchScheduler, "_give_back", lambda self, sequence: None, ""),
}


@pytest.mark.parametrize("what", BREAKS)
def test_simulator_notices_what_is_broken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant that cannot be broken proves nothing."""
    owner, name, wrong, said = BREAKS[what]
    monkeypatch.setattr(owner, name, wrong)

    found = first_broken()

    assert found
    assert said in found


def test_a_policy_that_has_always_a_slot_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets with one slot, which many want."""
    monkeypatch.setattr(SlotBook, "acquire", lambda self, _, stream, *__: not self.leave(stream))

    with pytest.raises(InvariantError, match="slots"):
        contended(0).run()


def test_relay_that_takes_late_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of an attempt that is over would be repeated to the client."""
    real = SimAttempt.token

    def careless(self: SimAttempt, position: int, token: int, is_last: bool, now_s: float) -> None:
        self._is_open = self._is_open or self.number[1] < self.live.journal.attempt
        real(self, position, token, is_last, now_s)

    monkeypatch.setattr(SimAttempt, "token", careless)

    with pytest.raises(InvariantError):
        in_turn(0).run()
