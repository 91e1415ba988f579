"""Links measured by hand-offs that an engine counts itself."""

import pytest

from kvrs.ids import NodeId
from kvrs.transfer.hand_offs import MEMORY_S, FetchedHandOff, HandOffMeter, Pulled

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
GB = 1e9


class Engine:
    """An engine that counts, and is read once a second."""

    def __init__(self) -> None:
        self.meter = HandOffMeter()
        self.now_s = 0.0
        self.counts = Pulled(0, 0.0, 0.0)
        self.meter.counted(self.counts, self.now_s)

    def fetches(
        self, source: NodeId, size_bytes: float, seconds: float, *, ranks: int = 1, parts: int = 1
    ) -> None:
        """One hand-off, whose parts take so long, each for itself."""
        fetched = FetchedHandOff(source, size_bytes, ranks)
        self.meter.begins(fetched)
        fetched.is_over = True
        self.others(size_bytes, seconds, parts=parts)

    def others(self, size_bytes: float, seconds: float, *, parts: int = 1) -> None:
        """Another proxy has it fetch so much."""
        before = self.counts
        self.counts = Pulled(
            before.transfers + parts,
            before.size_bytes + size_bytes,
            before.seconds + seconds * parts,
        )

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


def test_a_short_hand_off_weighs_as_little_as_it_has_bytes() -> None:
    """One-shot noise: a tiny transfer waits for the step of the engine that notes its end."""
    engine = Engine()
    engine.fetches(A, 10 * GB, 1.0)
    engine.read()
    engine.fetches(A, 0.001 * GB, 0.02)
    engine.read()

    assert engine.rates()[A] == pytest.approx(10.0, rel=0.03)


def test_what_is_old_is_forgotten() -> None:
    engine = Engine()
    engine.fetches(A, 10 * GB, 1.0)
    engine.read()
    engine.fetches(A, 10 * GB, 10.0)
    engine.read(after_s=5 * MEMORY_S)

    assert engine.rates()[A] == pytest.approx(1.0, rel=0.1)


def test_a_hand_off_that_stalled_weighs_no_more_than_others() -> None:
    """An engine that compiles notes the end of a transfer a minute later: that is no slow link."""
    engine = Engine()
    for seconds in (0.5, 0.5, 60.0, 0.5, 0.5):
        engine.fetches(A, GB, seconds)
        engine.read()

    (found,) = engine.meter.measurements(engine.now_s).values()
    assert engine.rates()[A] == pytest.approx(1.6, rel=0.05)
    assert found.spread < found.bytes_per_s / 2


@pytest.mark.parametrize(("ranks", "parts", "rate"), [(4, 4, 4.0), (4, 1, 1.0), (1, 4, 1.0)])
def test_ranks_read_their_parts_at_the_same_time(ranks: int, parts: int, rate: float) -> None:
    """Each part takes all the time; only as many count as there are ranks, and parts."""
    engine = Engine()
    engine.fetches(A, 4 * GB, 4.0 / parts, ranks=ranks, parts=parts)
    engine.read()

    assert engine.rates()[A] == pytest.approx(rate)


def test_nodes_that_hand_over_in_one_interval_are_told_apart_by_others() -> None:
    """A mixed interval scales what is known of both; intervals of one node find the ratio."""
    engine = Engine()
    for _ in range(60):
        engine.fetches(A, 4 * GB, 0.5)
        engine.read()
        engine.fetches(A, 4 * GB, 0.5)
        engine.fetches(B, 1 * GB, 1.0)
        engine.read()
        engine.fetches(B, 1 * GB, 1.0)
        engine.read()

    assert engine.rates() == {A: pytest.approx(8.0, rel=0.05), B: pytest.approx(1.0, rel=0.05)}


def test_nodes_that_are_only_seen_together_get_the_rate_of_both() -> None:
    engine = Engine()
    engine.fetches(A, 4 * GB, 0.5)
    engine.fetches(B, 4 * GB, 1.5)
    engine.read()

    assert engine.rates() == {A: pytest.approx(4.0), B: pytest.approx(4.0)}


def test_hand_offs_of_other_proxies_are_no_measure_of_several_nodes() -> None:
    """Nobody says from where they came. Where all come from one node it does not matter."""
    engine = Engine()
    engine.fetches(A, 1 * GB, 1.0)
    engine.others(9 * GB, 1.0)
    engine.read()
    alone = engine.rates()
    engine.fetches(B, 1 * GB, 1.0)
    engine.others(9 * GB, 1.0)
    engine.read()

    assert alone == engine.rates() == {A: pytest.approx(5.0)}


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
    waits = FetchedHandOff(A, GB, 1)
    engine.meter.begins(waits)
    engine.others(GB, 1.0)
    engine.read()
    before = engine.rates()
    waits.is_over = True
    engine.others(GB, 0.5)
    engine.read()

    assert not before
    assert engine.rates() == {A: pytest.approx(2.0)}


def test_a_hand_off_that_is_counted_before_it_is_over_is_measured_when_it_is() -> None:
    """The proxy hears the first token behind it after the engine has counted it."""
    engine = Engine()
    early = FetchedHandOff(A, GB, 1)
    engine.meter.begins(early)
    engine.others(GB, 0.5)
    engine.read()
    engine.read()
    before = engine.rates()
    early.is_over = True
    engine.read()

    assert not before
    assert engine.rates() == {A: pytest.approx(2.0)}


def test_counts_of_a_former_process_are_no_measure() -> None:
    engine = Engine()
    engine.read(process=1.0)
    early = FetchedHandOff(A, GB, 1)
    engine.meter.begins(early)
    engine.others(GB, 0.5)
    engine.read(process=1.0)
    engine.read(process=2.0)
    early.is_over = True
    engine.read(process=2.0)

    assert engine.rates() == {}
