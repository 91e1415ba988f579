from kvrs.config.tenants import TenantSettings
from kvrs.core.books.tenants import GuessLimit, TenantMeter


def limits(**given: int) -> TenantSettings:
    return TenantSettings(keys=["0" * 64], **given)  # type: ignore[arg-type]


def test_streams_count_while_they_are_open() -> None:
    one = TenantMeter(limits(streams=2))

    assert one.take(2)
    assert not one.take(1)

    one.give(2)
    assert one.take(1)


def test_other_limits_keep_what_is_open() -> None:
    """A reload is no way to begin anew."""
    one = TenantMeter(limits(streams=1))
    assert one.take(1)

    one.limits = limits(streams=2)

    assert one.take(1)
    assert not one.take(1)


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
