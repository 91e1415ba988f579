"""Limits that workers share, and turns of a key, without processes."""

import random

import pytest

from kvrs.proxy.workers.limits import Give, SharedLimits, Take, TenantLimits, Turns

NONE = TenantLimits(None, None)


def limits(streams: int | None = None, open_bytes: int | None = None) -> TenantLimits:
    return TenantLimits(streams, open_bytes)


def stream(most: int, key: str = "", streams: int = 1) -> Take:
    return Take("t", limits(streams=most), streams=streams, key=key)


def limit_of(shared: SharedLimits, worker: int, asked: Take) -> str | None:
    """The kind of the limit that is exceeded."""
    excess = shared.take(worker, asked).excess
    return None if excess is None else excess[0]


def test_limits_that_do_not_exist_are_told_from_those_that_do() -> None:
    """Only a tenant with one costs a question."""
    assert not NONE.exist
    assert limits(open_bytes=1024).exist


def test_streams_of_all_workers_count_together() -> None:
    """What one gives back another may take."""
    shared = SharedLimits()
    assert limit_of(shared, 0, stream(2)) is None
    assert limit_of(shared, 1, stream(2)) is None
    assert limit_of(shared, 2, stream(2)) == "streams"

    shared.give(0, Give("t", 0, 1))

    assert limit_of(shared, 2, stream(2)) is None
    assert limit_of(shared, 0, stream(2)) == "streams"


def test_a_stream_with_a_key_counts_once_at_however_many_workers() -> None:
    """A client that resumes it elsewhere needs no second place, and keeps the one it has."""
    shared = SharedLimits()
    assert limit_of(shared, 0, stream(1, "k")) is None
    assert limit_of(shared, 1, stream(1, "k")) is None

    shared.give(0, Give("t", 0, 1, "k"))

    assert limit_of(shared, 0, stream(1)) == "streams"
    shared.give(1, Give("t", 0, 1, "k"))
    assert limit_of(shared, 0, stream(1)) is None


def test_a_worker_that_ends_gives_back_what_it_has() -> None:
    """Also a stream with a key that runs nowhere else, and none that runs elsewhere too."""
    shared = SharedLimits()
    asked = limits(streams=4, open_bytes=2048)
    assert limit_of(shared, 0, Take("t", asked, size_bytes=2048)) is None
    for worker, key in ((0, ""), (0, "a"), (0, "b"), (1, "b"), (1, "")):
        assert limit_of(shared, worker, Take("t", asked, streams=1, key=key)) is None
    assert limit_of(shared, 1, Take("t", asked, size_bytes=1)) == "bytes"
    assert limit_of(shared, 1, Take("t", asked, streams=1)) == "streams"

    shared.end(0)

    assert limit_of(shared, 1, Take("t", asked, size_bytes=2048)) is None
    assert limit_of(shared, 1, Take("t", asked, streams=2)) is None
    assert limit_of(shared, 1, Take("t", asked, streams=1)) == "streams"


def test_other_limits_of_a_tenant_apply_to_what_is_open() -> None:
    """As after a change of the key file."""
    shared = SharedLimits()
    assert limit_of(shared, 0, stream(2)) is None

    assert limit_of(shared, 1, stream(1)) == "streams"
    assert limit_of(shared, 1, stream(3)) is None


def test_failed_keys_of_an_address_count_together() -> None:
    """Ten at once, at whichever worker."""
    shared = SharedLimits()

    waits = [shared.guess("10.0.0.9", 0.0) for _ in range(12)]

    assert waits[:10] == [0.0] * 10
    assert all(waits[10:])
    assert shared.guess("10.0.0.8", 0.0) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_no_limit_is_exceeded_whatever_workers_do(seed: int) -> None:
    """They take, give and end in any order; what is open is what was granted and not given."""
    draw, shared, most = random.Random(seed), SharedLimits(), limits(streams=5, open_bytes=5000)
    held: list[tuple[int, Give]] = []
    for _ in range(400):
        worker, kind = draw.randrange(3), draw.random()
        mine = [each for each in held if each[0] == worker]
        if kind < 0.05:
            shared.end(worker)
            held = [each for each in held if each[0] != worker]
        elif kind < 0.45 and mine:
            held.remove(given := draw.choice(mine))
            shared.give(worker, given[1])
        else:
            key = draw.choice(["", "", "a", "b"])
            streams, size_bytes = (1 if key else draw.randrange(3)), draw.randrange(2000)
            asked = Take("t", most, size_bytes=size_bytes)
            if shared.take(worker, asked).excess is None:
                held.append((worker, Give("t", size_bytes, 0)))
            asked = Take("t", most, streams=streams, key=key)
            if streams and shared.take(worker, asked).excess is None:
                held.append((worker, Give("t", 0, streams, key)))

        keys = {given.key for _, given in held if given.key}
        streams = len(keys) + sum(given.streams for _, given in held if not given.key)
        assert streams <= 5
        assert sum(given.size_bytes for _, given in held) <= 5000
        meter = shared._meters.get("t")
        if meter is not None:
            assert (meter.open_streams, meter.open_bytes) == (
                streams,
                sum(given.size_bytes for _, given in held),
            )


def test_turns_of_a_key_come_one_after_the_other() -> None:
    """Other keys do not wait."""
    turns, begun = Turns(), list[str]()
    turns.begin("k", 0, lambda: begun.append("first"))
    turns.begin("k", 1, lambda: begun.append("second"))
    turns.begin("other", 1, lambda: begun.append("other"))
    assert begun == ["first", "other"]

    turns.end("k")

    assert begun == ["first", "other", "second"]
    turns.end("k")
    turns.begin("k", 0, lambda: begun.append("again"))
    assert begun[-1] == "again"


def test_a_worker_that_ends_leaves_no_turn_behind() -> None:
    """Neither one that it has nor one that it waits for."""
    turns, begun = Turns(), list[str]()
    turns.begin("k", 0, lambda: begun.append("a"))
    turns.begin("k", 0, lambda: begun.append("b"))
    turns.begin("k", 1, lambda: begun.append("c"))

    turns.end_all(0)

    assert begun == ["a", "c"]
    turns.end("k")
    assert not turns._turns
