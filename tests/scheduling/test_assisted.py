"""Streams that a helper knows: which bursts count, and what the helper is told."""

from kvrs.protocol.instance import Burst, DraftChoice, MirrorUpdate
from kvrs_engine.scheduling.assisted import AssistedStreams
from tests.scheduling.batch_steps import sequence

CHOICE = DraftChoice(0.0, 1.0, 0, 0.0, 7)


def test_a_burst_of_a_former_attempt_is_not_that_of_the_next_one() -> None:
    """Each attempt has a number of its own, so a burst that was under way proposes nothing."""
    streams, first, again = AssistedStreams(4), sequence(20), sequence(20)
    assert streams.propose(first, CHOICE, 4) == []
    (begun,) = streams.take_updates()
    streams.ended(first)
    assert streams.propose(again, CHOICE, 4) == []

    streams.came([Burst(begun.number, 20, [1, 2, 3])])

    assert streams.propose(again, CHOICE, 4) == []
    ended, other = streams.take_updates()
    assert (ended, other.choice) == (MirrorUpdate(begun.number), CHOICE)
    assert other.number != begun.number
    assert streams.stream(begun.number) is None
    streams.came([Burst(other.number, 20, [1, 2, 3, 4, 5])])
    assert streams.propose(again, CHOICE, 9) == [1, 2, 3, 4], "at most the depth"


def test_bursts_of_streams_that_never_were_are_nothing() -> None:
    streams, one = AssistedStreams(4), sequence(20)
    streams.propose(one, CHOICE, 4)
    (begun,) = streams.take_updates()

    streams.came([Burst(begun.number + 1, 20, [1]), Burst(1 << 40, 0, [2])])

    assert streams.propose(one, CHOICE, 4) == []
    assert streams.stale == 0


def test_drafts_are_proposed_at_their_position() -> None:
    """Those behind the end wait, those before it are used from there, if they agree."""
    streams, one = AssistedStreams(4), sequence(20)
    streams.propose(one, CHOICE, 4)
    (begun,) = streams.take_updates()

    streams.came([Burst(begun.number, 21, [8, 9])])
    assert streams.propose(one, CHOICE, 4) == []
    one.token_ids.append(5)
    assert streams.propose(one, CHOICE, 4) == [8, 9]
    streams.came([Burst(begun.number, 18, [*one.token_ids[18:], 6])])
    assert streams.propose(one, CHOICE, 4) == [6]
    streams.came([Burst(begun.number, 18, [one.token_ids[18] + 1, 5, 6])])
    assert streams.propose(one, CHOICE, 4) == []
    assert streams.stale > 0


def test_a_helper_learns_the_tokens_of_a_step_that_verifies_nothing() -> None:
    """Its drafts follow them, so the next step that may have drafts has right ones."""
    streams, one = AssistedStreams(4), sequence(20)
    assert streams.propose(one, CHOICE, 0) == []
    (begun,) = streams.take_updates()
    one.token_ids.append(5)
    assert streams.propose(one, CHOICE, 0) == []
    assert streams.take_updates() == [MirrorUpdate(begun.number, [5])]

    streams.came([Burst(begun.number, 20, [5, 6, 7])])
    one.token_ids.append(6)

    assert streams.propose(one, CHOICE, 4) == [7]


def test_what_a_helper_was_told_is_told_to_the_next_one_anew() -> None:
    """With all tokens that the stream has by then."""
    streams, one = AssistedStreams(4), sequence(20)
    streams.propose(one, CHOICE, 4)
    streams.take_updates()
    one.token_ids.append(3)
    streams.left()

    assert streams.take_updates() == []
    streams.propose(one, CHOICE, 4)
    (told,) = streams.take_updates()
    assert (told.token_ids, told.choice) == (one.token_ids, CHOICE)


def test_stale_drafts_stay_counted() -> None:
    """When their stream has ended, and when the helper has left."""
    streams, first, other = AssistedStreams(4), sequence(20), sequence(20)
    for one, count in ((first, 2), (other, 3)):
        streams.propose(one, CHOICE, 4)
        begun = streams.take_updates()[-1]
        streams.came([Burst(begun.number, 20, [9] * count)])
        one.token_ids.append(5)
        assert streams.propose(one, CHOICE, 4) == []
    assert streams.stale == 5
    streams.ended(first)
    assert streams.stale == 5
    streams.left()
    assert streams.stale == 5
