from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.limiter import LinkTurns, Turn
from kvrs_testkit.examples import examples

RECOVERY, HANDOFF, CHECKPOINT = TrafficClass
RATES = st.floats(1e4, 1e9)
CLASSES = st.sampled_from(TrafficClass)
FOREVER = 1 << 60
CHUNK_S = 0.0065  # At the slowest of RATES, where 64 bytes are a chunk.


@dataclass
class Transfer:
    traffic: TrafficClass
    left_bytes: int = FOREVER
    starts_s: float = 0.0


@dataclass(frozen=True)
class Sent:
    at_s: float
    transfer: int
    bytes: int


def play(
    bytes_per_s: float,
    transfers: list[Transfer],
    until_s: float,
    lateness_s: float = 0.0,
    seed: int = 0,
    start_s: float = 0.0,
) -> list[Sent]:
    """The parts sent by transfers that ask again as soon as they had their turn; a turn is served
    up to `lateness_s` late.
    """
    turns, random, order = LinkTurns(), Random(seed), count()
    turns.set_rate(bytes_per_s, start_s)
    asked: dict[Turn, int] = {}
    sent: list[Sent] = []
    wakes = [
        (start_s + transfer.starts_s, next(order), number)
        for number, transfer in enumerate(transfers)
    ]
    wakes.sort()
    planned_s = None
    while wakes and wakes[0][0] <= start_s + until_s:
        now_s, _, number = heappop(wakes)
        if number >= 0:
            asked[
                turns.ask(
                    transfers[number].traffic, min(transfers[number].left_bytes, 1 << 20), now_s
                )
            ] = number
        else:
            planned_s = None
        waiting = {turn.traffic for turn in asked}
        for turn in turns.grant(now_s):
            # Strict order: no transfer of a higher class was waiting.
            assert turn.traffic == min(waiting)
            number = asked.pop(turn)
            waiting = {turn.traffic for turn in asked}
            assert 1 <= turn.granted_bytes <= turn.wanted_bytes
            sent.append(Sent(now_s - start_s, number, turn.granted_bytes))
            transfers[number].left_bytes -= turn.granted_bytes
            if transfers[number].left_bytes:
                heappush(wakes, (now_s, next(order), number))
        if planned_s is None and (due_s := turns.next_s()) is not None:
            planned_s = due_s + (random.random() * lateness_s if due_s > now_s else 0.0)
            heappush(wakes, (planned_s, next(order), -1))
    return sent


def bytes_of(sent: list[Sent], transfer: int) -> int:
    return sum(one.bytes for one in sent if one.transfer == transfer)


def end_of(sent: list[Sent], transfer: int) -> float:
    return max(one.at_s for one in sent if one.transfer == transfer)


@examples(60)
@given(RATES, st.lists(CLASSES, min_size=1, max_size=5), st.floats(0, 0.015), st.integers(0, 1000))
def test_the_rate_over_a_second_is_within_five_percent_of_the_limit(
    bytes_per_s: float, classes: list[TrafficClass], lateness_s: float, seed: int
) -> None:
    """Senders that always have something to send get the limit, together, however many they are and
    though they oversleep.
    """
    sent = play(bytes_per_s, [Transfer(traffic) for traffic in classes], 2.0, lateness_s, seed)

    for start_s in (0.0, 0.37, 0.9):
        rate = sum(one.bytes for one in sent if start_s <= one.at_s < start_s + 1.0)
        assert 0.95 <= rate / bytes_per_s <= 1.05


@examples(60)
@given(RATES, CLASSES, st.integers(2, 6), st.floats(0, 0.015), st.integers(0, 1000))
def test_connections_of_a_class_share_a_link_evenly(
    bytes_per_s: float, traffic: TrafficClass, senders: int, lateness_s: float, seed: int
) -> None:
    """Every waiting transfer gets the same share, also of bytes made up for late turns."""
    sent = play(bytes_per_s, [Transfer(traffic) for _ in range(senders)], 1.0, lateness_s, seed)

    totals = [bytes_of(sent, sender) for sender in range(senders)]
    assert max(totals) - min(totals) <= 2 * max(CHUNK_S, 0.02 if lateness_s else 0) * bytes_per_s


@examples(60)
@given(
    RATES,
    st.lists(st.tuples(CLASSES, st.floats(0, 1), st.integers(1, 1000)), min_size=1, max_size=8),
    st.floats(0, 0.1),
    st.integers(0, 1000),
)
def test_no_span_carries_more_than_the_limit_and_a_burst(
    bytes_per_s: float,
    transfers: list[tuple[TrafficClass, float, int]],
    lateness_s: float,
    seed: int,
) -> None:
    """However the transfers are spread in time, over classes and in size, and however late turns
    are served.
    """
    sent = play(
        bytes_per_s,
        [
            Transfer(traffic, max(1, int(ms / 1e3 * bytes_per_s)), at_s)
            for traffic, at_s, ms in transfers
        ],
        until_s=10.0,
        lateness_s=lateness_s,
        seed=seed,
    )

    chunk_bytes = max(CHUNK_S * bytes_per_s, 64)
    for first in range(0, len(sent), max(1, len(sent) // 20)):
        total = 0
        for one in sent[first:]:
            total += one.bytes
            # The relative slack is for rounding only.
            assert (
                total
                <= (bytes_per_s * (one.at_s - sent[first].at_s + 0.02) + chunk_bytes) * (1 + 1e-6)
                + 1
            )


@given(RATES, st.floats(0.03, 100))
def test_a_link_that_was_idle_has_saved_up_nothing(bytes_per_s: float, idle_s: float) -> None:
    """A short transfer after a pause takes as long as its bytes take at the limit, or it would
    measure more than there is.
    """
    size_bytes = max(1000, int(bytes_per_s * 0.02))
    starts_s = size_bytes / bytes_per_s + idle_s

    sent = play(
        bytes_per_s,
        [Transfer(HANDOFF, size_bytes), Transfer(HANDOFF, size_bytes, starts_s)],
        1000.0,
    )

    assert end_of(sent, 1) - starts_s == pytest.approx(size_bytes / bytes_per_s, rel=1e-3)


@examples(80)
@given(
    RATES,
    st.integers(1, 500),
    st.floats(0, 0.5),
    st.lists(st.sampled_from([HANDOFF, CHECKPOINT]), max_size=4),
)
def test_a_recovery_is_as_quick_as_on_an_empty_link(
    bytes_per_s: float, ms: int, starts_s: float, others: list[TrafficClass]
) -> None:
    """Lower classes on the link cost it one turn of a chunk at most."""
    size_bytes = max(1, int(bytes_per_s * ms / 1e3))

    sent = play(
        bytes_per_s,
        [Transfer(RECOVERY, size_bytes, starts_s), *(Transfer(other) for other in others)],
        2.0,
    )

    assert end_of(sent, 0) <= starts_s + size_bytes / bytes_per_s + CHUNK_S


@examples(60)
@given(
    RATES,
    st.lists(st.tuples(CLASSES, st.floats(0, 0.3), st.integers(1, 200)), min_size=1, max_size=8),
    st.sampled_from([0.0, 1e6, 1e9]),
)
def test_nothing_starves_when_there_is_room(
    bytes_per_s: float, transfers: list[tuple[TrafficClass, float, int]], clock_s: float
) -> None:
    """Everything is through when the link could have carried it all, at any reading of the clock;
    the lowest class too.
    """
    plan = [
        Transfer(traffic, max(1, int(ms / 1e3 * bytes_per_s)), at_s)
        for traffic, at_s, ms in transfers
    ]
    work_s = sum(one.left_bytes for one in plan) / bytes_per_s

    sent = play(bytes_per_s, plan, until_s=100.0, start_s=clock_s)

    assert not any(one.left_bytes for one in plan)
    assert max(one.at_s for one in sent) <= max(one.starts_s for one in plan) + work_s + 0.001


def test_classes_are_served_in_order() -> None:
    """All of the recovery, then all of the hand-off, then the checkpoint."""
    sizes = {CHECKPOINT: 300_000, HANDOFF: 200_000, RECOVERY: 100_000}

    sent = play(1e6, [Transfer(traffic, size) for traffic, size in sizes.items()], 10.0)

    order = [one.transfer for one in sent]
    assert [number for number, after in pairwise([*order, None]) if number != after] == [2, 1, 0]
    assert [bytes_of(sent, number) for number in range(3)] == list(sizes.values())


def test_without_a_limit_checkpoints_wait_for_everything_else() -> None:
    """They wait from the begin to the end of a hand-off or a recovery, also while it asks for no
    turn.
    """
    turns = LinkTurns()
    for traffic in (RECOVERY, HANDOFF, CHECKPOINT):
        turns.begin(traffic)
    asked = [turns.ask(traffic, 1 << 30, 0.0) for traffic in (CHECKPOINT, RECOVERY, HANDOFF)]

    at_first = turns.grant(0.0)
    turns.end(HANDOFF)
    after_one = turns.grant(1.0)
    turns.end(RECOVERY)
    after_both = turns.grant(2.0)

    assert (at_first, after_one, after_both) == ([asked[1], asked[2]], [], [asked[0]])
    # A checkpoint gets a piece at a time: what comes up meanwhile does not wait for gigabytes.
    assert [turn.granted_bytes for turn in asked] == [1 << 20, 1 << 30, 1 << 30]


@pytest.mark.parametrize("bytes_per_s", [None, 1e6])
def test_a_sign_of_life_is_one_byte_out_of_turn_that_the_link_owes(
    bytes_per_s: float | None,
) -> None:
    """It shows the peer that this end is there; it is not a way around the limit."""
    turns = LinkTurns()
    turns.set_rate(bytes_per_s, 0.0)
    turns.begin(HANDOFF)
    checkpoint, handoff = turns.ask(CHECKPOINT, 5000, 0.0), turns.ask(HANDOFF, 5000, 0.0)
    before_s = turns.next_s()

    assert turns.grant_keepalive(checkpoint, 0.001)

    assert (checkpoint.granted_bytes, handoff.granted_bytes) == (1, 0)
    if bytes_per_s is not None:
        assert before_s is not None
        assert turns.next_s() == pytest.approx(before_s + 1e-6)
    assert turns.grant(0.1) == [handoff]


def test_a_link_that_owes_gives_no_sign_of_life() -> None:
    """At a few bytes a second even single bytes are held to the rate."""
    turns = LinkTurns()
    turns.set_rate(1.0, 0.0)
    waiting = [turns.ask(CHECKPOINT, 100, 0.0) for _ in range(3)]

    granted = [turns.grant_keepalive(turn, 0.5) for turn in waiting]

    assert granted == [True, False, False]


def test_a_cut_link_carries_nothing_and_owes_nothing_afterwards() -> None:
    """Neither turns nor keepalives; then the rate is as before."""
    turns = LinkTurns()
    turns.set_rate(0, 0.0)
    turn = turns.ask(HANDOFF, 1000, 0.0)

    assert (turns.grant(100.0), turns.next_s(), turns.grant_keepalive(turn, 100.0)) == (
        [],
        None,
        False,
    )
    turns.set_rate(1e6, 100.0)
    assert turns.next_s() == pytest.approx(100.001)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "withdraw", "sign", "rate", "begin", "end", "grant"]),
        CLASSES,
        st.integers(0, 1 << 21),
        st.sampled_from([None, 0.0, 1.0, 64.0, 1e4, 1e7, 1e12]),
        st.floats(0, 0.1),
    ),
    max_size=60,
)


@examples(200)
@given(OPERATIONS)
def test_whatever_happens_each_turn_comes_once_and_in_order(
    operations: list[tuple[str, TrafficClass, int, float | None, float]],
) -> None:
    """Senders come and go, rates change, clocks pass; afterwards a link that carries everything
    serves all that are left.
    """
    turns, waiting, rate, now_s = LinkTurns(), list[Turn](), None, 0.0
    opened = dict.fromkeys(TrafficClass, 0)
    for what, traffic, number, new_rate, pause_s in operations:
        now_s += pause_s
        match what:
            case "ask":
                waiting.append(turns.ask(traffic, number + 1, now_s))
            case "withdraw" if waiting:
                turns.withdraw(waiting.pop(number % len(waiting)))
            case "sign" if waiting:
                turn = waiting[number % len(waiting)]
                if turns.grant_keepalive(turn, now_s):
                    assert rate != 0
                    waiting.remove(turn)
            case "rate":
                turns.set_rate(new_rate, now_s)
                rate = new_rate
            case "begin":
                turns.begin(traffic)
                opened[traffic] += 1
            case "end" if opened[traffic]:
                turns.end(traffic)
                opened[traffic] -= 1
        granted = turns.grant(now_s)

        assert rate != 0 or not granted
        for turn in granted:
            first = next(other for other in sorted(waiting, key=lambda other: other.traffic))
            assert turn is first
            assert 1 <= turn.granted_bytes <= turn.wanted_bytes
            waiting.remove(turn)
        assert turns.has_waiting == bool(waiting)
        assert not any(turn.granted_bytes for turn in waiting)

    turns.set_rate(None, now_s)
    for traffic, many in opened.items():
        for _ in range(many):
            turns.end(traffic)
    assert set(turns.grant(now_s)) == set(waiting)
