import random
from math import inf, isfinite
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.ids import NodeId
from kvrs.transfer.meter import PROBE_S, PROBE_SHARE, LinkMeter, lower_bound
from kvrs_testkit.examples import examples

A, B = NodeId("a"), NodeId("b")
PROBE_BYTES = (1 << 16, 1 << 24)  # Least and most.

# One busy period: the order in which overlapping transfers get chunks of these sizes, and the idle
# time before it.
CHUNKS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1 << 20)), min_size=1, max_size=30)
PERIODS = st.lists(st.tuples(st.floats(0, 10), CHUNKS), min_size=1, max_size=8)


def play(
    meter: LinkMeter,
    link: NodeId,
    period: list[tuple[int, int]],
    start_s: float,
    bytes_per_s: float,
) -> float:
    """A link that carries `bytes_per_s` serves transfers that overlap; returns when it is done.

    A transfer begins at some time before its first chunk is through and ends after its last.
    """
    now_s = start_s
    first = {
        transfer: min(i for i, (t, _) in enumerate(period) if t == transfer)
        for transfer, _ in period
    }
    last = {
        transfer: max(i for i, (t, _) in enumerate(period) if t == transfer)
        for transfer, _ in period
    }
    # The period is one: the transfer of the last chunk is open all the time.
    first[period[-1][0]] = 0
    for index, (transfer, size_bytes) in enumerate(period):
        for starting, at in first.items():
            if at == index:
                meter.begin(link, now_s)
                assert starting in last
        now_s += size_bytes / bytes_per_s
        meter.add(link, size_bytes, now_s)
        if last[transfer] == index:
            meter.end(link, now_s)
    return now_s


@examples(150)
@given(PERIODS, st.floats(1e4, 1e10))
def test_the_estimate_of_a_constant_link_is_its_rate_for_any_chunking_and_overlap(
    periods: list[tuple[float, list[tuple[int, int]]]], bytes_per_s: float
) -> None:
    """The meter measures the link's rate, not how transfers were cut or what each of them got."""
    meter = LinkMeter(min_sample_bytes=1000)
    now_s = 0.0

    for idle_s, period in periods:
        now_s = play(meter, A, period, now_s + idle_s, bytes_per_s)

        for estimate in meter.estimates().values():
            assert abs(estimate / bytes_per_s - 1) < 1e-2


@pytest.mark.parametrize("after", [1e8, 1e10])
def test_a_step_under_constant_traffic_is_believed_after_two_samples(after: float) -> None:
    """A transfer without an end is cut into samples of a tenth of a second."""
    meter = LinkMeter(min_sample_bytes=1000)
    meter.begin(A, 0.0)
    now_s = 0.0
    for rate, seconds in ((1e9, 2.0), (after, 0.35)):
        for _ in range(int(seconds * 100)):
            now_s += 0.01
            meter.add(A, int(rate * 0.01), now_s)

    assert 0.85 < meter.estimates()[A] / after < 1.15


def settled_at(bytes_per_s: float, samples: int = 50) -> tuple[LinkMeter, float]:
    """A meter that has seen nothing else, and the time."""
    meter = LinkMeter(min_sample_bytes=1000)
    now_s = 0.0
    for _ in range(samples):
        now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, bytes_per_s)
    return meter, now_s


@pytest.mark.parametrize("odd", [1e7, 1e8, 2.5e9, 1e10])
def test_one_odd_sample_is_refuted_by_the_next(odd: float) -> None:
    """However large it is; rate and spread before it hold again."""
    meter, now_s = settled_at(1e9)
    before = meter.measurements(now_s)[A]

    now_s = play(meter, A, [(0, 1 << 28)], now_s + 0.1, odd)
    now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, 1e9)

    after = meter.measurements(now_s)[A]
    assert after.bytes_per_s == pytest.approx(1e9)
    assert after.spread <= before.spread


@pytest.mark.parametrize("odd", [2.5e9, 1e10, 1e12])
def test_one_fast_sample_makes_no_decision_count_on_more(
    odd: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket of tokens that is full lets a probe pass at any rate."""
    meter, now_s = settled_at(1e9)

    now_s = play(meter, A, [(0, 1 << 28)], now_s + 0.1, odd)

    monkeypatch.setattr("kvrs.transfer.meter.LEAST_SHARE", 1e-6)
    assert lower_bound(meter.measurements(now_s)[A]) <= 1e9 * (1 + 1e-6)


@pytest.mark.parametrize("after", [1e8, 4e8, 2.5e9, 1e10])
def test_a_step_is_believed_at_once_and_counted_on_when_the_next_sample_agrees(
    after: float,
) -> None:
    """A rule that waits for the second sample decides worse than the last sample alone. The spread
    begins anew.
    """
    meter, now_s = settled_at(1e9)

    now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, after)
    assert meter.estimates()[A] == pytest.approx(after)
    now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, after * 1.1)

    assert meter.estimates()[A] == pytest.approx(after * 1.1)
    (measured,) = meter.measurements(now_s).values()
    assert lower_bound(measured) > after / 2


def test_a_trend_is_followed_without_a_lag() -> None:
    """Samples that keep to one side of the rate have all the weight, where there is no noise; none
    of them is far enough to be a step.
    """
    meter, now_s = settled_at(1e9)
    rate = 1e9
    for _ in range(60):
        rate *= 1.012
        now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, rate)

    assert meter.estimates()[A] == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_noise_without_a_trend_is_averaged(seed: int) -> None:
    """The last sample alone is twice as far off."""
    draw, meter, now_s = random.Random(seed), *settled_at(1e9)
    off, last_off = list[float](), list[float]()
    for _ in range(400):
        sample = 1e9 * draw.uniform(0.8, 1.2)
        now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, sample)
        off.append(abs(meter.estimates()[A] - 1e9))
        last_off.append(abs(sample - 1e9))

    assert fmean(off) < fmean(last_off) / 2


def test_samples_that_disagree_or_are_near_are_no_step() -> None:
    """The first one near the rate before refutes all that were far off."""
    meter, now_s = settled_at(1e9)

    for bytes_per_s in (3e9, 1e10, 1.4e9, 1.4e9):
        now_s = play(meter, A, [(0, 1 << 24)], now_s + 0.1, bytes_per_s)

    assert 1e9 < meter.estimates()[A] < 2e9


def test_a_reader_that_held_up_its_peer_is_not_the_links_fault() -> None:
    """Bytes between its turns came at the rate of the link; waits for its turns do not count."""
    meter = LinkMeter(min_sample_bytes=1000)
    meter.begin(A, 0.0)

    for turn in range(40):
        meter.add(A, 100_000, 0.02 * turn + 0.01, waited_s=0.01 if turn else 0.0)
    meter.end(A, 0.8)

    assert abs(meter.estimates()[A] / 1e7 - 1) < 1e-6


@pytest.mark.parametrize(("others", "bytes_per_s"), [(0, 1e7), (1, 1.5e7)])
def test_the_first_part_of_a_probe_is_not_measured(others: int, bytes_per_s: float) -> None:
    """A token bucket let it pass at twice the rate. With other transfers all bytes count."""
    meter = LinkMeter(min_sample_bytes=1000)
    for _ in range(others):
        meter.begin(A, 0.0)
    meter.probe_begins(A, 0.0, 1_500_000)

    meter.add(A, 1_000_000, 0.05)
    meter.restart(A, 0.05)
    meter.add(A, 500_000, 0.1)
    meter.end(A, 0.1)
    for _ in range(others):
        meter.end(A, 0.1)

    assert abs(meter.estimates()[A] / bytes_per_s - 1) < 1e-6


def test_probes_grow_with_the_rate_and_where_nothing_is_seen() -> None:
    """Until one takes long enough to show a rate, within the least and the most."""
    meter, least, most = LinkMeter(min_sample_bytes=1000), 1 << 16, 1 << 24
    sizes = []
    for blind in range(4):
        sizes.append(meter.probe_bytes(A, least, most))
        meter.probe_begins(A, 10.0 * blind, sizes[-1])
        meter.end(A, 10.0 * blind)

    play(meter, A, [(0, 1 << 20)], 50.0, 1e8)
    seen = meter.probe_bytes(A, least, most)
    play(meter, B, [(0, 1 << 20)], 50.0, 1e10)

    assert sizes == [1 << 16, 1 << 18, 1 << 20, 1 << 20]
    assert seen == pytest.approx(1e8 * PROBE_S, rel=1e-6)
    assert meter.probe_bytes(B, least, most) == most


def probe(meter: LinkMeter, now_s: float, rates: list[float]) -> tuple[list[int], float]:
    """A probe and those that follow it at once, each of which sees a rate; their sizes, and when
    the last one is over.
    """
    size: int | None = meter.probe_bytes(A, *PROBE_BYTES)
    sizes: list[int] = []
    for rate in rates:
        assert size is not None
        meter.probe_begins(A, now_s, size, follows=bool(sizes))
        sizes.append(size)
        now_s += size / rate
        meter.add(A, size, now_s)
        meter.end(A, now_s)
        size = meter.follow_up_bytes(A, *PROBE_BYTES)
    assert size is None
    return sizes, now_s


def test_the_first_rate_of_a_link_is_confirmed_at_once() -> None:
    """A token bucket lets the bytes of a short probe pass at ten times the rate."""
    meter = LinkMeter(min_sample_bytes=1000)

    sizes, _ = probe(meter, 0.0, [1e8, 1e7, 1e7])

    assert sizes == [1 << 16, 8 << 16, int(1e7 * PROBE_S)]
    assert meter.estimates()[A] == pytest.approx(1e7)


@pytest.mark.parametrize("after", [1e7, 1e9])
def test_a_step_is_believed_with_the_first_probe_and_the_one_that_follows_it(after: float) -> None:
    """The second is sized by what the first one saw."""
    meter = LinkMeter(min_sample_bytes=1000)
    _, now_s = probe(meter, 0.0, [1e8, 1e8])

    sizes, _ = probe(meter, now_s + 2.0, [after, after])

    assert sizes == [int(1e8 * PROBE_S), min(int(after * PROBE_S), PROBE_BYTES[1])]
    assert meter.estimates()[A] == pytest.approx(after)


def test_one_odd_probe_is_refuted_by_the_next_and_both_are_paid_for() -> None:
    """The estimate stays near the rate, and the pause is that of two probes."""
    meter = LinkMeter(min_sample_bytes=1000)
    _, now_s = probe(meter, 0.0, [1e8, 1e8])
    interval_s = PROBE_S / PROBE_SHARE

    _, now_s = probe(meter, now_s + 0.1, [2e8, 1e8])

    assert meter.estimates()[A] == pytest.approx(1e8, rel=0.06)
    size = meter.probe_bytes(A, *PROBE_BYTES)
    due = [meter.may_probe(A, size, 0.1, 1, now_s + times * interval_s) for times in (1.9, 2.2)]
    assert due == [False, True]


def test_a_link_that_never_agrees_with_itself_is_probed_four_times_at_once_and_no_more() -> None:
    meter = LinkMeter(min_sample_bytes=1000)

    sizes, _ = probe(meter, 0.0, [1e8, 1e6, 1e10, 1e4])

    assert len(sizes) == 4


@examples(200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "add", "end"]), st.integers(0, 1 << 40), st.floats(-1, 1e6)
        ),
        max_size=60,
    )
)
def test_no_estimate_is_ever_negative_zero_or_infinite(calls: list[tuple[str, int, float]]) -> None:
    """Whatever the clock does between the calls, a cost can be computed with what comes out."""
    meter = LinkMeter(min_sample_bytes=1)
    transfers, now_s = 0, 0.0

    for call, size_bytes, step_s in calls:
        now_s += step_s
        match call:
            case "begin":
                meter.begin(A, now_s)
                transfers += 1
            case "add" if transfers:
                meter.add(A, size_bytes, now_s)
            case "end" if transfers:
                meter.end(A, now_s)
                transfers -= 1

        assert all(isfinite(estimate) and estimate > 0 for estimate in meter.estimates().values())


def test_transfers_that_are_too_small_say_nothing() -> None:
    """A few bytes are over before a rate can be seen in them."""
    meter = LinkMeter(min_sample_bytes=1000)
    play(meter, A, [(0, 100_000)], 0.0, 1e6)

    play(meter, A, [(0, 999)], 10.0, 1e3)

    assert abs(meter.estimates()[A] / 1e6 - 1) < 1e-6


def test_the_time_after_the_last_byte_is_not_the_links_fault() -> None:
    """A peer that dies silently in the middle does not make its link look slow."""
    meter = LinkMeter(min_sample_bytes=1000)
    meter.begin(A, 0.0)
    meter.add(A, 100_000, 0.1)

    meter.end(A, 60.0)

    assert abs(meter.estimates()[A] / 1e6 - 1) < 1e-6


def test_a_link_is_unmeasured_since_the_last_byte_of_its_last_sample() -> None:
    """Probes are for links whose own traffic does not measure them; small transfers do not, nor
    does another link's traffic.
    """
    meter = LinkMeter(min_sample_bytes=1000)
    meter.begin(A, 5.0)
    while_open = meter.unmeasured_s(A, 9.0)
    meter.add(A, 1000, 6.0)
    meter.end(A, 7.0)
    play(meter, A, [(0, 999)], 8.0, 1e6)
    play(meter, B, [(0, 999)], 8.0, 1e6)

    assert (while_open, meter.unmeasured_s(A, 9.0), meter.unmeasured_s(B, 9.0)) == (0.0, 3.0, inf)
