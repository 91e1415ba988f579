"""The book of bodies that have come in part."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvrs.net.unfinished import (
    GRACE_PAUSES,
    LEAST_BYTES_PER_S,
    SMALL_BYTES,
    UnfinishedBodies,
    due_s,
)

KIB = 1 << 10


@dataclass
class Sent:
    """A body as the model knows it: the order of the steps is by `step`."""

    received: int = 0
    held: int = 0
    step_bytes: int = 0
    step: int = 0


# Which of eight bodies, by how much it grows, by how much what it takes exceeds that in percent,
# and whether it ends then.
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.one_of(st.integers(0, 3 * KIB), st.integers(0, 300 * KIB)),
        st.integers(0, 13),
        st.sampled_from([False] * 7 + [True]),
    ),
    max_size=120,
)


@given(EVENTS, st.integers(0, 1024 * KIB))
def test_the_larger_bodies_stay_within_the_budget_and_the_least_progress_is_cut_first(
    events: list[tuple[int, int, int, bool]], budget: int
) -> None:
    """Whatever comes: small bodies are never cut, the larger ones hold at most the budget or are
    one alone, those that are cut are the ones that have gone without a step for longest, none is
    cut without need, and what has ended is not counted.
    """
    book, sent = UnfinishedBodies[int](budget), dict[int, Sent]()
    for number, (who, grown, percent, ends) in enumerate(events):
        each = sent.setdefault(who, Sent())
        if ends:
            book.end(who)
            del sent[who]
        else:
            was_small = each.received <= SMALL_BYTES
            each.received += grown
            each.held = each.received * (100 + percent) // 100
            is_large = each.received > SMALL_BYTES
            if is_large and (was_small or each.received - each.step_bytes >= SMALL_BYTES):
                each.step_bytes, each.step = each.received, number

            cut = book.note(who, each.held, each.received, float(number))

            large = {name: one for name, one in sent.items() if one.received > SMALL_BYTES}
            in_line = sorted(large, key=lambda name: large[name].step)
            assert [one.body for one in cut] == in_line[: len(cut)]
            for one in cut:
                gone = sent.pop(one.body)
                assert (one.held_bytes, one.quiet_s) == (gone.held, number - gone.step)
                assert book.large_bytes + gone.held > budget
        large_held = sum(one.held for one in sent.values() if one.received > SMALL_BYTES)
        count = sum(one.received > SMALL_BYTES for one in sent.values())
        assert book.large_bytes == large_held
        assert book.held_bytes == sum(one.held for one in sent.values())
        assert large_held <= budget or count == 1


def test_a_small_body_has_room_when_the_budget_is_full() -> None:
    """Up to 64 kB of each body are taken beside the budget."""
    book = UnfinishedBodies[str](SMALL_BYTES + 1)
    assert book.note("large", SMALL_BYTES + 1, SMALL_BYTES + 1, 0.0) == []

    cut = [book.note(f"small {n}", SMALL_BYTES, SMALL_BYTES, 1.0) for n in range(1000)]

    assert cut == [[]] * 1000
    assert book.large_bytes == SMALL_BYTES + 1


def test_a_client_that_drips_is_cut_before_one_that_sends() -> None:
    """A byte now and then is no progress: a step of 64 kB is."""
    book = UnfinishedBodies[str](300 * KIB)
    book.note("drips", 65 * KIB, 65 * KIB, 0.0)
    book.note("sends", 65 * KIB, 65 * KIB, 0.1)
    book.note("sends", 130 * KIB, 130 * KIB, 0.2)
    book.note("drips", 66 * KIB, 66 * KIB, 5.0)

    (cut,) = book.note("sends", 250 * KIB, 250 * KIB, 5.1)

    assert (cut.body, cut.held_bytes, cut.quiet_s) == ("drips", 66 * KIB, 5.1)


def test_a_body_that_is_alone_is_never_cut() -> None:
    """A budget below the longest body must not refuse that body for ever."""
    book = UnfinishedBodies[str](100 * KIB)

    assert book.note("alone", 8 << 20, 8 << 20, 0.0) == []


def test_a_body_of_64_kib_is_small_and_one_of_a_byte_more_is_not() -> None:
    book = UnfinishedBodies[str](1 << 20)

    book.note("small", 64 * KIB, 64 * KIB, 0.0)
    book.note("large", 64 * KIB + 1, 64 * KIB + 1, 0.0)

    assert (book.small_bytes, book.large_bytes) == (64 * KIB, 64 * KIB + 1)


def test_a_body_that_comes_on_is_awaited_however_long_it_takes() -> None:
    """The time without a byte counts, and not that since the beginning."""
    assert due_s(0.0, 0.0, 0, pause_s=10.0) == 10.0
    assert due_s(0.0, 300.0, 300 * LEAST_BYTES_PER_S, pause_s=10.0) == 310.0


def test_a_body_that_comes_byte_by_byte_ends() -> None:
    """At the latest when its bytes so far would have come at the least rate, after the grace."""
    grace_s = 10.0 * GRACE_PAUSES

    assert due_s(5.0, 5.0 + grace_s - 1, 1, pause_s=10.0) == 5.0 + grace_s + 1 / LEAST_BYTES_PER_S
    assert due_s(5.0, 900.0, 100, pause_s=10.0) < 900.0
