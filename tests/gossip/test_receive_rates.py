from hypothesis import given
from hypothesis import strategies as st

from kvrs.gossip.rates import Rates, ReceiveRates, TokenBucket

MEMBER, STRANGER = ("10.0.0.1", 7000), ("10.6.6.6", 6666)
RATES = Rates(member_per_s=10, strangers_per_s=20, total_per_s=100, burst_s=1)


@given(st.lists(st.floats(0, 0.5), max_size=200), st.floats(0.1, 100), st.floats(1, 50))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(waits: list[float], per_s: float, burst: float) -> None:
    bucket, now_s, given_out = TokenBucket(per_s, burst, 0.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        given_out += bucket.take(now_s)

    assert given_out <= burst + now_s * per_s + 1e-6


def test_silence_saves_up_no_more_than_a_burst() -> None:
    bucket = TokenBucket(per_s=10, burst=20, now_s=0.0)

    assert sum(bucket.take(1000.0) for _ in range(100)) == 20


def test_strangers_cost_members_nothing() -> None:
    """A flood from unknown places uses up the strangers' share only, from however many places it comes."""
    rates = ReceiveRates(RATES, 0.0)
    rates.trust(MEMBER, 0.0)

    flood = [rates.admit((f"10.6.{n // 250}.{n % 250}", n), 0.0) for n in range(10_000)]

    assert sum(flood) == 20
    assert [rates.admit(MEMBER, 0.0) for _ in range(12)] == [True] * 10 + [False] * 2


def test_all_members_together_are_bounded() -> None:
    rates = ReceiveRates(RATES, 0.0)
    members = [("10.0.0.1", port) for port in range(50)]
    for member in members:
        rates.trust(member, 0.0)

    assert sum(rates.admit(member, 0.0) for member in members for _ in range(10)) == 100


def test_a_bucket_fills_again() -> None:
    rates = ReceiveRates(RATES, 0.0)
    assert sum(rates.admit(STRANGER, 0.0) for _ in range(100)) == 20

    assert sum(rates.admit(STRANGER, 0.5) for _ in range(100)) == 10


def test_what_is_remembered_of_sources_is_bounded() -> None:
    """Who was silent for longest is forgotten first."""
    rates = ReceiveRates(RATES, 0.0)
    rates.trust(MEMBER, 0.0)
    bucket = rates._members[MEMBER]
    for n in range(10_000):
        rates.trust((f"10.{n // 250}.{n % 250}.1", 1), 0.0)
        if n % 1000 == 0:
            rates.trust(MEMBER, 0.0)

    assert rates.sources == 4096
    assert rates._members[MEMBER] is bucket
