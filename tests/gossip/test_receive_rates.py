from hypothesis import given
from hypothesis import strategies as st

from kvrs.gossip.authenticator import Rates, ReceiveRates, TokenBucket

MEMBER = ("10.0.0.1", 7000)
RATES = Rates(member_per_s=10, unknown_per_s=20, total_per_s=100, burst_s=1)


@given(st.lists(st.floats(0, 0.5), max_size=200), st.floats(0.1, 100), st.floats(1, 50))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(
    waits: list[float], per_s: float, burst: float
) -> None:
    """For any sequence of calls."""
    bucket, now_s, given_out = TokenBucket(per_s, burst, 0.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        given_out += bucket.take(now_s)

    assert given_out <= burst + now_s * per_s + 1e-6


def test_a_bucket_fills_at_its_rate_up_to_one_burst() -> None:
    """However long it was idle."""
    bucket = TokenBucket(per_s=10, burst=20, now_s=0.0)

    given_out = [sum(bucket.take(now_s) for _ in range(100)) for now_s in (0.0, 0.5, 1000.0)]

    assert given_out == [20, 5, 20]


def test_a_flood_from_unknown_sources_costs_members_nothing() -> None:
    """However many addresses it comes from, it uses up only the share of unknown sources."""
    rates = ReceiveRates(RATES, 0.0)
    rates.on_authentic(MEMBER, 0.0)

    flood = [rates.admit((f"10.6.{n // 250}.{n % 250}", n), False, 0.0) for n in range(10_000)]

    assert sum(flood) == 20
    assert [rates.admit(MEMBER, True, 0.0) for _ in range(12)] == [True] * 10 + [False] * 2


def test_forged_packets_use_up_no_member_s_share() -> None:
    """They name its address, and lack the echo that only its answers have."""
    rates = ReceiveRates(RATES, 0.0)
    rates.on_authentic(MEMBER, 0.0)

    forged = [rates.admit(MEMBER, False, 0.0) for _ in range(10_000)]

    assert sum(forged) == 20
    assert sum(rates.admit(MEMBER, True, 0.0) for _ in range(10)) == 10


def test_all_members_together_are_bounded() -> None:
    """By the total rate."""
    rates = ReceiveRates(RATES, 0.0)
    members = [("10.0.0.1", port) for port in range(50)]
    for member in members:
        rates.on_authentic(member, 0.0)

    assert sum(rates.admit(member, True, 0.0) for member in members for _ in range(10)) == 100


def test_the_number_of_known_sources_is_bounded() -> None:
    """The one that is silent for longest is forgotten first."""
    rates = ReceiveRates(RATES, 0.0)
    rates.on_authentic(MEMBER, 0.0)
    bucket = rates._members[MEMBER]
    for n in range(10_000):
        rates.on_authentic((f"10.{n // 250}.{n % 250}.1", 1), 0.0)
        if n % 1000 == 0:
            rates.on_authentic(MEMBER, 0.0)

    assert len(rates._members) == 4096
    assert rates._members[MEMBER] is bucket
