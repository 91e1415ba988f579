"""Every death of a stream, in worlds drawn at random, in virtual time. KVRS_SIM_SEEDS=5000 looks at more of them."""

import os
from collections import Counter
from functools import cache

import pytest

from kvrs.agent.slots import SlotTable
from kvrs.policy.attempts import Attempts
from kvrs.policy.checkpoints import Checkpoints
from kvrs.policy.costs import Option
from kvrs.policy.event_log import rerun
from kvrs.policy.keepers import Keepers
from kvrs.policy.recovery import RecoveryPolicy
from kvrs.policy.slots import SlotBook
from kvrs.protocol.instance import Slot
from kvrs.scheduling.batches import BatchScheduler
from kvrs.sim.deaths import STORIES
from kvrs.sim.process import LawBrokenError
from kvrs.sim.proxy import SimProxy
from kvrs.sim.scenarios import scenario
from kvrs.sim.world import Outcome
from kvrs.transfer.store.book import CheckpointBook

SEEDS = int(os.environ.get("KVRS_SIM_SEEDS", "128"))
BLOCKS = 8


@cache
def outcome_of(seed: int) -> Outcome:
    return scenario(seed).run()


@pytest.mark.parametrize("block", range(BLOCKS))
def test_laws_hold_whatever_dies(block: int) -> None:
    """One writer, every position once and in order, every stream ends, no dead holder, no slot too many, empty books."""
    broken = {}
    for seed in range(block, SEEDS, BLOCKS):
        try:
            outcome_of(seed)
        except AssertionError as error:
            broken[seed] = repr(error)

    assert not broken


def test_worlds_are_rough_enough() -> None:
    """Guards the test above: every death, option and kind of end must really occur, and so must late tokens."""
    outcomes = [outcome_of(seed) for seed in range(min(SEEDS, 128))]

    ended = sum((outcome.ended for outcome in outcomes), Counter[str]())
    recoveries = sum((outcome.recoveries for outcome in outcomes), Counter[str]())
    hit: Counter[str] = Counter()
    for one in (one for outcome in outcomes for one in outcome.hits):
        hit[one.death] += one.streams
    assert set(ended) == {"complete", "no_instance", "slo", "retries"}
    assert set(recoveries) == {option.value for option in Option} - {Option.ABORT.value}
    assert set(hit) == set(STORIES)
    assert min(hit.values()) > 0
    assert sum(outcome.dropped_tokens for outcome in outcomes) > 10
    assert sum(outcome.slot_denials for outcome in outcomes) > 5
    assert sum(outcome.unarbitrated for outcome in outcomes) > 5
    assert ended["complete"] > sum(ended.values()) / 2


@pytest.mark.parametrize("seed", range(12))
def test_event_log_of_a_simulated_proxy_can_be_run_again(seed: int) -> None:
    """The policy is pure: what it was told is all that its answers depend on."""
    world = scenario(seed, keep_log=True)
    world.run()

    for proxy in world.proxies:
        assert proxy.log is not None
        assert rerun(proxy.log).difference is None


def first_broken(seeds: int = 60) -> str:
    """What the first world to go wrong says."""
    for seed in range(seeds):
        try:
            scenario(seed).run()
        except (LookupError, AttributeError, AssertionError) as error:
            return repr(error)
    return ""


# What is broken on purpose, and what is to be said of it.
BREAKS = {
    "old attempts count": (RecoveryPolicy, "_current", lambda self, stream, attempt: self._streams.get(stream), "Law"),
    "a slot is never given back": (SlotBook, "release", lambda self, stream: None, ""),
    "there is always a slot more": (
        SlotBook,
        "acquire",
        lambda self, target, stream, now_s, predicted_s: self.leave(stream) is None,
        "slots",
    ),
    "agents grant whatever is asked for": (
        SlotTable,
        "_deny",
        lambda self, asked, target, ahead, now_s: Slot(self._grant("any", asked, target, now_s, now_s + 5)),
        "",
    ),
    "a lost agent still holds": (Checkpoints, "lose", lambda self, stream, holder, why: None, ""),
    "a lost instance still holds": (Keepers, "forget", lambda self, stream_id, holder: None, ""),
    "bytes stay on links": (Attempts, "done_waiting", lambda self, stream: None, "books"),
    "reservations never end": (CheckpointBook, "_end", lambda self, stream: None, "reserves"),
    "pages are not given back": (BatchScheduler, "_give_back", lambda self, sequence: None, ""),
}


@pytest.mark.parametrize("what", BREAKS)
def test_simulator_notices_what_is_broken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that cannot be broken proves nothing."""
    owner, name, wrong, said = BREAKS[what]
    monkeypatch.setattr(owner, name, wrong)

    found = first_broken()

    assert found
    assert said in found


def test_relay_that_takes_late_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an attempt that is over still says would be repeated to the client."""
    real = SimProxy.token

    def careless(self: SimProxy, live, attempt, name, position, token, *, is_last):  # type: ignore[no-untyped-def]
        live.at = "decode" if live.attempt > attempt else live.at
        real(self, live, live.attempt, name, position, token, is_last=is_last)

    monkeypatch.setattr(SimProxy, "token", careless)

    assert LawBrokenError.__name__ in first_broken(80)
