from kvrs.config.tenants import TenantSettings
from kvrs.control.tenants import GuessLimit, TenantMeter


def meter(**limits: float) -> TenantMeter:
    return TenantMeter(TenantSettings(keys=["0" * 64], **limits), 100.0)  # type: ignore[arg-type]


def test_requests_come_at_their_rate() -> None:
    """A second's worth at once, then as fast as the rate; what was refused costs nothing."""
    one = meter(requests_per_s=2.0)

    taken = [one.take_request(100.0) is None for _ in range(4)]
    refused = one.take_request(100.0)

    assert taken == [True, True, False, False]
    assert refused is not None
    assert refused.retry_after_s == 0.5
    assert one.take_request(100.5) is None
    assert one.take_request(100.5) is not None


def test_a_rate_below_one_allows_one_request() -> None:
    one = meter(requests_per_s=0.1)

    assert one.take_request(100.0) is None
    assert one.take_request(109.0) is not None
    assert one.take_request(110.0) is None


def test_streams_and_bytes_count_while_they_are_open() -> None:
    one = meter(streams=2, open_bytes=2048)

    assert one.take_streams(2, 0, 100.0) is None
    assert one.take_streams(1, 0, 100.0) is not None
    assert one.take_bytes(2048) is None
    assert one.take_bytes(1) is not None

    one.end_streams(2, 0, 0, 101.0)
    one.give_bytes(2048)
    assert one.take_streams(1, 0, 101.0) is None
    assert one.take_bytes(1) is None


def test_tokens_are_settled_at_the_end() -> None:
    """What was expected is taken at once, so that requests that come together share the limit; what
    was not used is given back, and what was used beyond it is waited for.
    """
    one = meter(tokens_per_min=600)

    assert one.take_streams(1, 500, 100.0) is None
    refused = one.take_streams(1, 200, 100.0)
    assert refused is not None
    assert refused.retry_after_s == 10.0
    one.end_streams(1, 500, 100, 100.0)
    assert one.take_streams(1, 200, 100.0) is None
    one.end_streams(1, 200, 800, 100.0)

    assert one.take_streams(1, 0, 129.0) is not None
    assert one.take_streams(1, 0, 130.0) is None


def test_a_request_larger_than_the_limit_has_all_of_it() -> None:
    """It waits for a full minute's worth, not for ever."""
    one = meter(tokens_per_min=60)

    assert one.take_streams(1, 1000, 100.0) is None
    one.end_streams(1, 1000, 60, 100.0)

    assert one.take_streams(1, 1000, 159.0) is not None
    assert one.take_streams(1, 1000, 160.0) is None


def test_other_limits_keep_what_was_used() -> None:
    """A reload is no way to begin a new minute."""
    one = meter(requests_per_s=4.0, streams=1)
    for _ in range(4):
        assert one.take_request(100.0) is None
    assert one.take_streams(1, 0, 100.0) is None

    one.change(TenantSettings(keys=["0" * 64], requests_per_s=5.0, streams=2), 100.0)

    assert one.take_request(100.0) is None
    assert one.take_request(100.0) is not None
    assert one.take_streams(1, 0, 100.0) is None
    assert one.take_streams(1, 0, 100.0) is not None


def test_a_clock_that_goes_back_gives_nothing() -> None:
    one = meter(requests_per_s=1.0)
    assert one.take_request(100.0) is None

    assert one.take_request(90.0) is not None
    assert one.take_request(100.5) is not None
    assert one.take_request(101.0) is None


def test_failed_keys_are_slowed_down_by_address() -> None:
    guesses = GuessLimit()
    for _ in range(10):
        assert guesses.wait_s("a", 0.0) == 0.0
        guesses.note_failure("a", 0.0)

    assert guesses.wait_s("a", 0.0) == 1.0
    assert guesses.wait_s("b", 0.0) == 0.0
    assert guesses.wait_s("a", 1.0) == 0.0


def test_the_addresses_of_a_flood_are_bounded() -> None:
    guesses = GuessLimit()
    for number in range(10_000):
        guesses.note_failure(f"{number}", 0.0)

    assert len(guesses._buckets) == 4096
