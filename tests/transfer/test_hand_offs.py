"""Links measured by hand-offs that an engine counts itself."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.ids import NodeId
from kvrs.transfer.meter import FetchedHandOff, HandOffMeter, Pulled, lower_bound
from kvrs_testkit.examples import examples

A, B = NodeId("a"), NodeId("b")
GB = 1e9


class Engine:
    """An engine that counts, and is read when the test says so."""

    def __init__(self) -> None:
        self.meter = HandOffMeter()
        self.now_s = 0.0
        self.counts = Pulled(0, 0.0, 0.0)
        self.meter.counted(self.counts, self.now_s)

    def asks(self, source: NodeId, size_bytes: float, *, at_s: float = 0.0) -> FetchedHandOff:
        """The proxy sends a call, so long after now."""
        asked = FetchedHandOff(source, size_bytes, 1, self.now_s + at_s)
        self.meter.begins(asked)
        return asked

    def fetches(
        self, source: NodeId, size_bytes: float, seconds: float, *, ranks: int = 1, parts: int = 1
    ) -> None:
        """One hand-off after the other; its parts take so long, each for itself."""
        fetched = FetchedHandOff(source, size_bytes, ranks, self.now_s)
        self.meter.begins(fetched)
        self.now_s += seconds + 0.001  # The proxy hears of the end a moment later.
        fetched.over_s = self.now_s
        self.counts_more(size_bytes, seconds * parts, parts)

    def fetches_together(
        self, source: NodeId, sizes: Sequence[float], ends_s: Sequence[float]
    ) -> None:
        """Hand-offs that begin now, and end so long after it."""
        for size_bytes, end_s in zip(sizes, ends_s, strict=True):
            self.asks(source, size_bytes).over_s = self.now_s + end_s
            self.counts_more(size_bytes, end_s)
        self.now_s += max(ends_s)

    def counts_more(self, size_bytes: float, seconds: float, parts: int = 1) -> None:
        self.counts = self.counts.plus(Pulled(parts, size_bytes, seconds))

    def read(self, process: float | None = None, after_s: float = 1.0) -> None:
        self.now_s += after_s
        self.meter.counted(self.counts, self.now_s, process)

    def rates(self) -> dict[NodeId, float]:
        return {
            source: found.bytes_per_s / GB
            for source, found in self.meter.measurements(self.now_s).items()
        }


def test_bytes_over_seconds_are_the_rate_of_the_link() -> None:
    """The link begins at the node from which they came; one sample has a wide spread."""
    engine = Engine()
    engine.fetches(A, 2 * GB, 0.25)
    engine.fetches(A, 2 * GB, 0.25)
    engine.read()

    (found,) = engine.meter.measurements(engine.now_s + 3.0).values()
    assert engine.rates() == {A: pytest.approx(8.0)}
    assert found.spread == pytest.approx(2 * GB)
    assert found.age_s == 3.0


def test_nothing_is_measured_before_the_second_read_or_without_a_hand_off() -> None:
    """The counts of the first read are of all time, those without a hand-off of a self-test."""
    meter = HandOffMeter()
    meter.counted(Pulled(9, 9 * GB, 1.0), 0.0)
    meter.counted(Pulled(10, 10 * GB, 2.0), 1.0)

    assert meter.measurements(1.0) == {}


@pytest.mark.parametrize("number", [4, 16])
@pytest.mark.parametrize("in_turn", [False, True])
def test_hand_offs_that_overlap_have_the_link_once(number: int, *, in_turn: bool) -> None:
    """NIXL counts the time of each: bytes over its seconds would be a fraction of the rate, however
    the link divides itself.
    """
    engine = Engine()
    ends_s = [0.1 * (index + 1 if in_turn else number) for index in range(number)]
    engine.fetches_together(A, [0.5 * GB] * number, ends_s)
    engine.read()

    assert engine.counts.size_bytes / engine.counts.seconds < 3 * GB
    assert engine.rates() == {A: pytest.approx(5.0)}


def test_calls_that_wait_in_the_engines_queue_do_not_make_a_link_slow() -> None:
    """The calls take seconds, the transfers do not."""
    engine = Engine()
    for size_bytes in (1 * GB, 1 * GB):
        engine.asks(A, size_bytes).over_s = engine.now_s + 7.0
        engine.counts_more(size_bytes, 0.2)
    engine.read(after_s=8.0)

    assert engine.rates() == {A: pytest.approx(5.0)}


@given(
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.01, 2.0)), min_size=1, max_size=8),
    st.floats(0.0, 0.5),
)
@examples(50)
def test_a_link_looks_no_faster_than_it_is(
    hand_offs: list[tuple[float, float]], late_s: float
) -> None:
    """Whatever overlaps, and however late the engine and the proxy see the end: 1 GB/s."""
    engine = Engine()
    waiting = sorted(hand_offs)
    moving: list[tuple[float, float, float]] = []  # Bytes left, bytes in all, begun.
    now_s = 0.0
    while waiting or moving:
        starts = waiting[0][0] if waiting else float("inf")
        ends = now_s + min((left for left, *_ in moving), default=float("inf")) * len(moving)
        until_s = min(starts, ends) if moving else starts
        done = (until_s - now_s) / max(1, len(moving))
        now_s, moving = until_s, [(left - done, size, begun) for left, size, begun in moving]
        for left, size, begun in moving:
            if left <= 1e-9:
                engine.asks(A, size * GB, at_s=begun).over_s = now_s + 2 * late_s
                engine.counts_more(size * GB, now_s - begun + late_s)
        moving = [each for each in moving if each[0] > 1e-9]
        if waiting and starts <= now_s:
            begun, size = waiting.pop(0)
            moving.append((size, size, begun))
    engine.read(after_s=now_s + 2)

    assert 0 < engine.rates()[A] <= 1.0 + 1e-6


def test_a_drop_is_believed_with_the_next_sample() -> None:
    """A mean of half a minute would believe it after a minute."""
    engine = Engine()
    for _ in range(60):
        engine.fetches(A, 0.1 * GB, 0.05)
        engine.read()
    before = engine.rates()[A]
    engine.fetches(A, 0.1 * GB, 0.5)
    engine.read()

    assert before == pytest.approx(2.0)
    assert engine.rates()[A] == pytest.approx(0.2)


def test_a_drop_is_believed_while_hand_offs_go_on() -> None:
    """Not even all bytes that are open would make it what it was."""
    engine = Engine()
    engine.fetches(A, 1 * GB, 0.5)
    engine.read()
    first, *_ = (engine.asks(A, 0.1 * GB) for _ in range(3))
    engine.now_s += 1.0
    first.over_s = engine.now_s
    engine.counts_more(0.1 * GB, 1.0)
    engine.read(after_s=0.0)

    assert engine.rates()[A] == pytest.approx(0.2), "of the open two half"


def test_a_busy_period_is_measured_whole() -> None:
    """Hand-offs that have ended say little of a link that carries others at the same time."""
    engine = Engine()
    asked = [engine.asks(A, 1 * GB) for _ in range(8)]
    asked[0].over_s = engine.now_s + 1.9
    engine.counts_more(1 * GB, 1.9)
    engine.read(after_s=2.0)
    meanwhile = engine.rates()
    for each in asked[1:]:
        each.over_s = engine.now_s
        engine.counts_more(1 * GB, 2.0)
    engine.read()

    assert not meanwhile
    assert engine.rates() == {A: pytest.approx(4.0)}


def test_a_link_that_is_never_idle_is_measured() -> None:
    """Every few seconds, with half of what is open."""
    engine = Engine()
    asked = [engine.asks(A, 1 * GB)]
    for _ in range(30):
        asked.append(engine.asks(A, 1 * GB, at_s=0.5))
        engine.now_s += 1.0
        asked.pop(0).over_s = engine.now_s
        engine.counts_more(1 * GB, 1.5)
        engine.read(after_s=0.0)

    assert engine.rates()[A] == pytest.approx(1.0, rel=0.1)


# Latency.


def test_latency_is_told_from_the_rate_by_hand_offs_of_different_lengths() -> None:
    """So the rate holds for other lengths."""
    engine = Engine()
    for number in range(40):
        size_bytes = (0.05, 0.4, 0.1, 0.2)[number % 4] * GB
        engine.fetches(A, size_bytes, 0.1 + size_bytes / (2 * GB))
        engine.read()

    assert engine.rates()[A] == pytest.approx(2.0, rel=0.01)


def test_without_different_lengths_the_rate_contains_the_latency() -> None:
    engine = Engine()
    for _ in range(40):
        engine.fetches(A, 0.2 * GB, 0.1 + 0.1)
        engine.read()

    assert engine.rates()[A] == pytest.approx(1.0)


def test_latency_stays_over_a_change_of_the_rate() -> None:
    """It is that of the engine, which the link does not change."""
    engine = Engine()
    for rate in (2 * GB, 0.2 * GB):
        for number in range(40):
            size_bytes = (0.05, 0.4, 0.1, 0.2)[number % 4] * GB
            engine.fetches(A, size_bytes, 0.1 + size_bytes / rate)
            engine.read()
            if rate < GB and number > 1:
                assert engine.rates()[A] == pytest.approx(0.2, rel=0.1)


def test_a_rise_is_believed_with_the_next_sample() -> None:
    """Whatever latency was fitted to transfers of a slow link: all their time is too little for the
    rate before.
    """
    engine = Engine()
    noisy_s = (1.1, 0.3, 0.6, 0.8)  # Of other traffic on the slow link, say.
    for number in range(40):
        size_bytes = (0.05, 0.4, 0.1, 0.2)[number % 4] * GB
        engine.fetches(A, size_bytes, noisy_s[number % 4] + size_bytes / (0.2 * GB))
        engine.read()
    engine.fetches(A, 0.2 * GB, 0.1)
    engine.read()

    assert engine.rates()[A] == pytest.approx(2.0, rel=0.02)


def test_transfers_shorter_than_a_step_are_measured_too() -> None:
    """All take a step, so no rate shows in them, however many there are. What they show is that the
    link carries them in a part of it.
    """
    engine = Engine()
    for number in range(200):
        engine.fetches(A, (0.14, 0.26, 0.18, 0.22)[number % 4] * GB, 0.02)
        engine.read()

    (found,) = engine.meter.measurements(engine.now_s).values()
    assert found.age_s < 100
    assert found.bytes_per_s > 0.2 * GB / 0.02


def test_a_short_hand_off_alone_is_no_sample() -> None:
    """Its time is the wait for the step of the engine that notes its end."""
    engine = Engine()
    engine.fetches(A, 10 * GB, 1.0)
    engine.read()
    engine.fetches(A, 0.001 * GB, 0.02)
    engine.read()

    assert engine.rates()[A] == pytest.approx(10.0)


def test_a_hand_off_that_stalled_is_refuted_by_the_next() -> None:
    """An engine that compiles notes the end of a transfer a minute later: that is no slow link."""
    engine = Engine()
    for seconds in (0.5, 0.5, 60.0, 0.5, 0.5):
        engine.fetches(A, GB, seconds)
        engine.read()

    (found,) = engine.meter.measurements(engine.now_s).values()
    assert engine.rates()[A] == pytest.approx(2.0, rel=0.05)
    assert lower_bound(found) > GB


# What the counts tell.


@pytest.mark.parametrize(("ranks", "parts", "rate"), [(4, 4, 4.0), (4, 1, 4.0), (1, 4, 1.0)])
def test_ranks_read_their_parts_at_the_same_time(ranks: int, parts: int, rate: float) -> None:
    """Each part takes all the time; only as many count as there are ranks, and parts. The call
    waits, so that it tells nothing.
    """
    engine = Engine()
    waits = FetchedHandOff(A, 4 * GB, ranks, engine.now_s)
    engine.meter.begins(waits)
    waits.over_s = engine.now_s + 9.0
    engine.counts_more(4 * GB, 1.0 * parts, parts)
    engine.read(after_s=9.0)

    assert engine.rates()[A] == pytest.approx(rate)


def test_what_the_engines_cache_has_did_not_come_over_the_link() -> None:
    """The proxy knows the whole history; the engine counts what it has fetched."""
    engine = Engine()
    engine.asks(A, 1 * GB).over_s = engine.now_s + 0.1
    engine.counts_more(0.25 * GB, 0.1)
    engine.read()

    assert engine.rates() == {A: pytest.approx(2.5)}


def test_nodes_that_hand_over_at_the_same_time_are_told_apart_by_their_calls() -> None:
    """Each link is busy for its own calls; the engine's seconds are those of both together."""
    engine = Engine()
    engine.asks(A, 4 * GB).over_s = engine.now_s + 0.5
    engine.counts_more(4 * GB, 0.5)
    engine.asks(B, 1 * GB).over_s = engine.now_s + 1.0
    engine.counts_more(1 * GB, 1.0)
    engine.read()

    assert engine.rates() == {A: pytest.approx(8.0), B: pytest.approx(1.0)}


def test_hand_offs_of_another_proxy_only_make_a_link_look_slower() -> None:
    """Nobody says when they began, so their bytes count for nothing, and their time does."""
    engine = Engine()
    engine.asks(A, 1 * GB).over_s = engine.now_s + 1.0
    engine.counts_more(4 * GB, 4.0, parts=4)
    engine.read()

    assert engine.rates() == {A: pytest.approx(1.0)}


def test_counts_of_another_process_begin_anew() -> None:
    """A restart, or one of several processes that answer in turn."""
    engine = Engine()
    engine.read(process=1.0)
    engine.fetches(A, 4 * GB, 1.0)
    engine.read(process=2.0)
    engine.fetches(A, 4 * GB, 1.0)
    engine.counts = Pulled(1, GB, 0.5)
    engine.read(process=2.0)

    assert engine.rates() == {}


def test_a_hand_off_that_is_not_over_is_not_counted_yet() -> None:
    """It may wait in the queue of the engine: with the read in which it ends it is."""
    engine = Engine()
    waits = engine.asks(A, GB)
    engine.read()
    before = engine.rates()
    engine.counts_more(GB, 0.5)
    waits.over_s = engine.now_s + 0.5
    engine.read()

    assert not before
    assert engine.rates() == {A: pytest.approx(2.0)}


def test_a_hand_off_that_is_counted_before_it_is_over_is_measured_when_it_is() -> None:
    """The proxy hears the first token behind it after the engine has counted it."""
    engine = Engine()
    early = engine.asks(A, GB)
    engine.counts_more(GB, 0.5)
    engine.read()
    engine.read()
    before = engine.rates()
    early.over_s = engine.now_s
    engine.read()

    assert not before
    assert engine.rates() == {A: pytest.approx(2.0)}


def test_counts_of_a_former_process_are_no_measure() -> None:
    engine = Engine()
    engine.read(process=1.0)
    early = engine.asks(A, GB)
    engine.counts_more(GB, 0.5)
    engine.read(process=1.0)
    engine.read(process=2.0)
    early.over_s = engine.now_s
    engine.read(process=2.0)

    assert engine.rates() == {}


def test_counts_that_no_hand_off_explains_are_not_kept_for_a_later_one() -> None:
    """They are of another proxy, or of a self-test."""
    engine = Engine()
    engine.counts_more(9 * GB, 0.001)
    engine.read()
    engine.asks(A, 1 * GB).over_s = engine.now_s + 9.0
    engine.counts_more(1 * GB, 0.5)
    engine.read(after_s=9.0)

    assert engine.rates() == {A: pytest.approx(2.0)}
