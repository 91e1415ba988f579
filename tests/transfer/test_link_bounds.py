from hypothesis import given
from hypothesis import strategies as st

from kvrs.ids import NodeId
from kvrs.transfer.meter import LinkMeter, Measurement, lower_bound
from kvrs_testkit.examples import examples

A = NodeId("a")
RATES = st.floats(1e3, 1e11)


def sample(
    meter: LinkMeter, size_bytes: int, bytes_per_s: float, now_s: float, *, probe: bool = False
) -> float:
    """One transfer; returns when it is over."""
    if probe:
        meter.probe_begins(A, now_s, size_bytes)
    else:
        meter.begin(A, now_s)
    now_s += size_bytes / bytes_per_s
    meter.add(A, size_bytes, now_s)
    meter.end(A, now_s)
    return now_s


@given(RATES, st.floats(0, 1), st.floats(0, 1e7), st.floats(0, 1e7))
def test_a_bound_sinks_with_age_and_spread_and_never_to_nothing(
    rate: float, share: float, age_s: float, more_s: float
) -> None:
    """The policy divides by it, and what was measured long ago is worth less than what was measured
    now.
    """
    young, old = (
        lower_bound(Measurement(rate, rate * share, at_s)) for at_s in (age_s, age_s + more_s)
    )

    assert rate * 0.0999 <= old <= young <= rate


def test_a_steady_link_is_trusted_more_with_every_sample_and_a_fickle_one_less() -> None:
    """The spread is what the samples differ by, so the bound is near the rate only where they
    agree.
    """
    steady, fickle = LinkMeter(1000), LinkMeter(1000)
    first = lower_bound(Measurement(1e8, 0.25e8, 0.0))
    now_s = 0.0

    for turn in range(30):
        sample(steady, 1 << 20, 1e8, now_s)
        now_s = sample(fickle, 1 << 20, 0.5e8 if turn % 2 else 1.5e8, now_s) + 1.0

    (trusted,), (doubted,) = (
        steady.measurements(now_s).values(),
        fickle.measurements(now_s).values(),
    )
    assert lower_bound(trusted) > 0.97e8 > first > lower_bound(doubted) > 0.1e8


@examples(60)
@given(
    st.floats(1e4, 1e9),
    st.integers(1, 8),
    st.floats(0.1, 10),
    st.lists(st.floats(0.05, 1.0), max_size=4),
)
def test_probes_of_all_who_probe_take_no_more_than_a_hundredth_of_a_link(
    rate: float, probers: int, interval_s: float, slower: list[float]
) -> None:
    """However slow it is, however many share it, and when it becomes slower."""
    meters = [LinkMeter(1000) for _ in range(probers)]
    size_bytes, now_s, carried_bytes, sent = 65536, 0.0, 0.0, 0
    for meter in meters:  # The first probe: nothing is known of the link yet.
        now_s = sample(meter, size_bytes, rate, now_s, probe=True)

    for change in (1.0, *slower):
        rate *= change
        for meter in meters:  # A change is seen with the next probe; from then on its rate counts.
            now_s = sample(meter, size_bytes, rate, now_s, probe=True)
        step_s = size_bytes * probers / rate
        for _ in range(400):
            now_s += step_s
            carried_bytes += rate * step_s
            for meter in meters:
                if meter.may_probe(A, size_bytes, interval_s, probers, now_s):
                    sample(meter, size_bytes, rate, now_s, probe=True)
                    sent += size_bytes

    # One probe of each may fall on the edge of what is looked at here.
    assert sent <= 0.01 * carried_bytes + size_bytes * probers * (1 + len(slower))


def test_a_link_with_traffic_of_its_own_needs_no_probe() -> None:
    """Transfers measure it for nothing."""
    meter = LinkMeter(1000)
    now_s = sample(meter, 1 << 20, 1e9, 0.0)

    due = [meter.may_probe(A, 65536, 2.0, 1, now_s + later_s) for later_s in (0.0, 1.9, 2.0)]

    assert due == [False, False, True]
