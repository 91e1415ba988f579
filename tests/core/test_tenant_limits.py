"""Limits of a tenant's open streams, and of an address's failed keys."""

from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.security import TenantSettings
from kvrs.core.books.tenants import GuessLimit, StreamShare, TenantMeter
from kvrs_testkit.examples import examples


def limits(**given: int) -> TenantSettings:
    return TenantSettings(keys=["0" * 64], **given)  # type: ignore[arg-type]


def test_streams_count_while_they_are_open() -> None:
    one = TenantMeter(limits(streams=2))

    share = one.take(2)
    assert share is not None
    assert one.take(1) is None

    share.release()
    assert one.take(1) is not None
    assert one.refused == 1


def test_other_limits_keep_what_is_open() -> None:
    """A reload is no way to begin anew."""
    one = TenantMeter(limits(streams=1))
    assert one.take(1) is not None

    one.limits = limits(streams=2)

    assert one.take(1) is not None
    assert one.take(1) is None


def test_a_key_that_is_sent_again_holds_the_share_of_its_stream() -> None:
    """Also at the limit; the stream counts until the last of its requests has ended."""
    one = TenantMeter(limits(streams=1))
    first, again = one.take(1, "k"), one.take(1, "k")
    assert first is not None
    assert again is not None
    assert one.take(1, "other") is None

    first.release()
    assert one.open_streams == 1
    assert one.take(1) is None
    again.release()

    assert one.open_streams == 0
    assert one.take(1, "k") is not None


def test_a_call_that_outlives_its_stream_keeps_the_place() -> None:
    """The stream's own recovery needs no second one, nor does a request that takes it over; from
    the second such call on one does, since each request could leave a call behind.
    """
    one = TenantMeter(limits(streams=2))
    stream = one.take(1, "k")
    assert stream is not None

    first, second = stream.hold(), stream.hold()
    first.outlive()
    assert one.take(1, "k") is stream
    assert one.open_streams == 1
    second.outlive()
    later = one.take(1, "k")

    assert later is not stream
    assert one.open_streams == 2
    assert one.take(1) is None
    for _ in range(2):
        stream.release()
    for call in (first, second):
        call.release(outlived=True)
    assert one.open_streams == 1


def test_a_key_whose_call_was_closed_is_taken_over_again() -> None:
    """One call at a time may outlive its attempt."""
    one = TenantMeter(limits(streams=1))
    stream = one.take(1, "k")
    assert stream is not None

    for _ in range(3):
        call = stream.hold()
        call.outlive()
        assert one.take(1, "k") is stream
        call.release(outlived=True)

    assert one.open_streams == 1


KEYS = st.sampled_from([None, "a", "b", "c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("end"), st.none(), st.integers(0, 99)),
        st.tuples(st.sampled_from(["hold", "close"]), st.none(), st.integers(0, 99)),
        st.tuples(st.just("limit"), st.none(), st.integers(1, 4)),
    ),
    max_size=60,
)


@given(STEPS)
@examples(300)
def test_no_order_of_requests_exceeds_the_limit_or_leaks(
    steps: list[tuple[str, str | None, int]],
) -> None:
    """Streams are opened, sent again and left, calls outlive them, and limits change, in any
    order.
    """
    meter, held = TenantMeter(limits(streams=2)), list[StreamShare]()
    calls = list[StreamShare]()  # That outlive their attempts.
    for what, key, number in steps:
        before = meter.open_streams
        match what:
            case "open":
                share = meter.take(1 if key else number, key)
                if share is not None:
                    held.append(share)
                    most = meter.limits.streams
                    assert most is not None
                    assert meter.open_streams <= max(before, most)
            case "end" if held:
                held.pop(number % len(held)).release()
            case "hold" if held:
                calls.append(held[number % len(held)].hold())
                calls[-1].outlive()
            case "close" if calls:
                calls.pop(number % len(calls)).release(outlived=True)
            case "limit":
                meter.limits = limits(streams=number)
            case _:
                pass
        shares = {*held, *calls}
        assert meter.open_streams == sum(each.streams for each in shares)
        assert len({each.key for each in shares} - {None}) <= meter.open_streams
    for share in held:
        share.release()
    for share in calls:
        share.release(outlived=True)

    assert meter.open_streams == 0
    assert meter._keyed == {}


def test_failed_keys_are_slowed_down_by_address() -> None:
    guesses = GuessLimit()
    for _ in range(10):
        assert guesses.wait_s("a", 0.0) == 0.0
        guesses.note_failure("a", 0.0)

    assert guesses.wait_s("a", 0.0) == 1.0
    assert guesses.wait_s("b", 0.0) == 0.0
    assert guesses.wait_s("a", 1.0) == 0.0


def test_an_address_that_stopped_guessing_is_as_free_as_before() -> None:
    """Ten guesses at once again, however long it was away."""
    guesses = GuessLimit()
    for now_s in (0.0, 1000.0):
        assert [guesses.guess("a", now_s) for _ in range(11)] == [0.0] * 10 + [1.0]


def test_the_addresses_of_a_flood_are_bounded() -> None:
    guesses = GuessLimit()
    for number in range(10_000):
        guesses.note_failure(f"{number}", 0.0)

    assert len(guesses._left) == 4096
