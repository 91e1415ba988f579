from heapq import heapify, heappop, heappush
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrs.transfer.limiter import RateLimiter

RATES = st.floats(1e4, 1e9)


def send_for(limiter: RateLimiter, senders: int, seconds: float, lateness_s: float, seed: int) -> list[list[tuple[float, int]]]:
    """When each sender, always with something to send, sent how many bytes; a sleep lasts up to `lateness_s` too long."""
    random = Random(seed)
    sent: list[list[tuple[float, int]]] = [[] for _ in range(senders)]
    wakes = [(0.0, sender) for sender in range(senders)]
    heapify(wakes)
    while wakes[0][0] < seconds:
        now_s, sender = heappop(wakes)
        delay_s = limiter.delay_s(limiter.chunk_bytes, now_s)
        sends_s = now_s + delay_s + (random.random() * lateness_s if delay_s > 0 else 0.0)
        sent[sender].append((sends_s, limiter.chunk_bytes))
        heappush(wakes, (sends_s, sender))
    return sent


@settings(max_examples=60, deadline=None)
@given(RATES, st.integers(1, 5), st.floats(0, 0.015), st.integers(0, 1000))
def test_the_rate_over_a_second_is_within_five_percent_of_the_limit(
    bytes_per_s: float, senders: int, lateness_s: float, seed: int
) -> None:
    """Senders that always have something to send get the limit, together, however many they are and though they oversleep."""
    limiter = RateLimiter(bytes_per_s)

    sent = send_for(limiter, senders, 2.0, lateness_s, seed)

    for start_s in (0.0, 0.37, 0.9):
        rate = sum(size for one in sent for at_s, size in one if start_s <= at_s < start_s + 1.0)
        assert 0.95 <= rate / bytes_per_s <= 1.05


@settings(max_examples=60, deadline=None)
@given(RATES, st.integers(2, 6))
def test_connections_of_a_link_share_it_evenly(bytes_per_s: float, senders: int) -> None:
    """Whoever has something to send gets the same share."""
    limiter = RateLimiter(bytes_per_s)

    sent = send_for(limiter, senders, 1.0, lateness_s=0.0, seed=0)

    totals = [sum(size for _, size in one) for one in sent]
    assert max(totals) - min(totals) <= 2 * limiter.chunk_bytes


@given(RATES, st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 1 << 20)), min_size=1, max_size=50))
def test_no_span_carries_more_than_the_limit_and_a_burst(bytes_per_s: float, asks: list[tuple[float, int]]) -> None:
    """However the asks are spread in time, what is let through from the first grant on stays below the limit."""
    limiter = RateLimiter(bytes_per_s)
    now_s, granted = 0.0, 0

    for pause_s, size_bytes in asks:
        now_s += pause_s
        sends_s = now_s + limiter.delay_s(size_bytes, now_s)
        granted += size_bytes

        # The relative slack is for rounding only.
        assert granted <= bytes_per_s * (sends_s + 0.02) * (1 + 1e-9) + 1


@given(RATES, st.floats(0.03, 100))
def test_a_link_that_was_idle_has_saved_up_nothing(bytes_per_s: float, idle_s: float) -> None:
    """A short transfer after a pause takes as long as its bytes take at the limit, or it would measure more than there is."""
    limiter = RateLimiter(bytes_per_s)
    limiter.delay_s(1000, 0.0)
    now_s = 1000 / bytes_per_s + idle_s

    delay_s = limiter.delay_s(1000, now_s)

    assert abs(delay_s * bytes_per_s / 1000 - 1) < 1e-3
