"""The decisions of a proxy that ends: what it waits for, and for how long."""

import pytest

from kvrs.proxy.mirror.book import COPIED_WITHIN_S, TOGETHER_S, Ending, EndStep, Left

TOLD_S, DRAIN_S = 100.0, 30.0
NOTHING = Left(streams=0, away=0, uncopied=0, has_peers=False, staying=frozenset())
# What it still has while one peer stays.
BESIDE = NOTHING._replace(has_peers=True, staying=frozenset("b"))


def ending(left: Left, *, drain_s: float = DRAIN_S) -> tuple[Ending, float]:
    """An end behind its first steps, with the time: peers are told, and asked."""
    made, now_s = Ending(TOLD_S, TOLD_S + drain_s), TOLD_S + TOGETHER_S
    if left.staying:
        assert asks_twice(made, left, now_s)
    return made, now_s


def asks_twice(made: Ending, left: Left, now_s: float) -> bool:
    return [made.next_step(left, now_s) for _ in range(2)] == [EndStep.ASK] * 2


def test_a_proxy_with_nothing_and_no_peer_closes_at_once() -> None:
    assert Ending(TOLD_S, TOLD_S + DRAIN_S).next_step(NOTHING, TOLD_S) is EndStep.CLOSE


def test_one_with_a_peer_waits_for_news_of_it_first() -> None:
    """Also with nothing left: streams may be handed over to this one until then."""
    made, left = Ending(TOLD_S, TOLD_S + DRAIN_S), NOTHING._replace(has_peers=True)

    assert made.next_step(left, TOLD_S) is EndStep.WAIT
    assert made.next_step(left, TOLD_S + TOGETHER_S - 0.01) is EndStep.WAIT
    assert made.next_step(left, TOLD_S + TOGETHER_S) is EndStep.CLOSE


def test_each_peer_that_seems_to_stay_is_asked_before_anything_is_handed_over() -> None:
    made, now_s = ending(left := BESIDE._replace(streams=1))

    assert made.next_step(left, now_s) is EndStep.HAND_OVER
    another = left._replace(staying=frozenset("bc"))
    assert asks_twice(made, another, now_s)
    assert made.next_step(another, now_s) is EndStep.HAND_OVER


def test_a_peer_that_was_gone_is_asked_again() -> None:
    """It is another process."""
    made, now_s = ending(left := BESIDE._replace(streams=1))

    assert made.next_step(left._replace(staying=frozenset()), now_s) is EndStep.HAND_OVER
    assert asks_twice(made, left, now_s)


def test_a_peer_that_did_not_answer_is_asked_twice_when_it_is_back() -> None:
    """It was paused, and may give its first answer before it has read its own signal to end."""
    made, left = Ending(TOLD_S, TOLD_S + DRAIN_S), BESIDE._replace(streams=1)
    now_s = TOLD_S + TOGETHER_S
    assert made.next_step(left, now_s) is EndStep.ASK

    assert made.next_step(left._replace(staying=frozenset()), now_s) is EndStep.HAND_OVER
    assert asks_twice(made, left, now_s)


@pytest.mark.parametrize("beside", [NOTHING, BESIDE])
@pytest.mark.parametrize("what", ["streams", "away"])
def test_it_serves_clients_until_the_end_of_its_drain(beside: Left, what: str) -> None:
    """Those that it has, and those that are about to come back."""
    made, now_s = ending(
        left := beside._replace(streams=1) if what == "streams" else beside._replace(away=1)
    )

    assert made.next_step(left, now_s) is EndStep.HAND_OVER
    assert made.next_step(left, TOLD_S + DRAIN_S - 0.01) is EndStep.HAND_OVER
    assert made.next_step(left, TOLD_S + DRAIN_S) is EndStep.CLOSE


def test_without_clients_it_closes_before_the_end_of_its_drain() -> None:
    made, now_s = ending(BESIDE._replace(streams=1))

    assert made.next_step(BESIDE, now_s + 1.0) is EndStep.CLOSE


def test_records_that_no_peer_has_are_copied_first() -> None:
    """For as long behind the last client as a copy may take."""
    made, now_s = ending(BESIDE._replace(streams=1))
    assert made.next_step(BESIDE._replace(streams=1), last_s := now_s + 5.0) is EndStep.HAND_OVER

    left = BESIDE._replace(uncopied=1)
    assert made.next_step(left, last_s + COPIED_WITHIN_S - 0.01) is EndStep.HAND_OVER
    assert made.next_step(left, last_s + COPIED_WITHIN_S) is EndStep.CLOSE


def test_a_copied_record_is_not_waited_for() -> None:
    made, now_s = ending(BESIDE)

    assert made.next_step(BESIDE._replace(uncopied=1), now_s) is EndStep.HAND_OVER
    assert made.next_step(BESIDE, now_s + 0.02) is EndStep.CLOSE


def test_records_are_not_waited_for_where_no_peer_stays() -> None:
    """None would have them a moment later."""
    made, now_s = ending(left := NOTHING._replace(uncopied=1, has_peers=True))

    assert made.next_step(left, now_s) is EndStep.CLOSE


@pytest.mark.parametrize("drain_s", [0.0, TOGETHER_S])
def test_records_are_copied_also_where_the_drain_is_over_at_once(drain_s: float) -> None:
    """Clients are not waited for, but their streams are not to be lost."""
    left = BESIDE._replace(streams=1, uncopied=1)
    made, now_s = ending(left, drain_s=drain_s)

    assert made.next_step(left, now_s + COPIED_WITHIN_S - 0.01) is EndStep.HAND_OVER
    assert made.next_step(left, now_s + COPIED_WITHIN_S) is EndStep.CLOSE
