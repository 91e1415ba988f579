"""Decode instances that are paused and go on, in virtual time: where nothing else can take their
streams, these wait.
"""

import pytest

from kvrs.core.recovery import RecoveryPolicy
from kvrs.sim.cluster import Outcome
from kvrs.sim.scenarios import paused

STREAMS = 40


@pytest.mark.parametrize("seed", range(4))
def test_streams_wait_for_the_only_decode_instance_while_it_is_paused(seed: int) -> None:
    """Their attempts go on when it is back, those of new requests too: nothing is given up."""
    outcome = paused(seed, decodes=1, for_s=8.0).run()

    assert [hit.streams > 5 for hit in outcome.hits] == [True]
    assert outcome.ended == {"complete": STREAMS}
    assert attempts_lost(outcome) == 0


@pytest.mark.parametrize("seed", range(4))
def test_streams_wait_where_all_decode_instances_are_paused_at_once(seed: int) -> None:
    """To give up one of them would only move its streams to another one that is silent."""
    outcome = paused(seed, decodes=2, pick="all", for_s=8.0).run()

    assert len(outcome.hits) == 1
    assert outcome.ended == {"complete": STREAMS}
    assert attempts_lost(outcome) == 0


@pytest.mark.parametrize("seed", range(4))
def test_streams_leave_a_paused_instance_where_another_one_can_take_them(seed: int) -> None:
    """After the usual limit, which is far shorter than its pause."""
    outcome = paused(seed, decodes=2, for_s=8.0).run()

    assert outcome.ended == {"complete": STREAMS}
    assert outcome.recoveries.total() >= outcome.hits[0].streams
    assert max(outcome.pauses_s) < 6.0


@pytest.mark.parametrize("seed", range(2))
def test_a_pause_beyond_the_longest_silence_ends_the_wait(seed: int) -> None:
    """`proxy.token_gap_s`, then everything is as with any silence."""
    outcome = paused(seed, decodes=1, for_s=14.0).run()

    assert outcome.ended == {"complete": STREAMS}
    assert outcome.events["InstanceLost"] == 1
    assert outcome.recoveries.total() >= outcome.hits[0].streams


def test_simulator_notices_streams_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claims above can be broken."""
    monkeypatch.setattr(RecoveryPolicy, "has_others", lambda *_: True)

    outcome = paused(0, decodes=1, for_s=8.0).run()

    assert attempts_lost(outcome) > 0


def attempts_lost(outcome: Outcome) -> int:
    return (
        outcome.events["InstanceLost"]
        + outcome.events["AttemptFailed"]
        + outcome.recoveries.total()
    )
