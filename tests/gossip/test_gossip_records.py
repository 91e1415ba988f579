"""Scuttlebutt: whoever is behind catches up, whatever order pieces come in, and what was taken out stays out."""

import random

import pytest

from kvrs.gossip.records import Key, Record, start_for
from kvrs.gossip.wire import MAX_ENTRIES, RecordDelta
from kvrs.ids import NodeId

OWNER = NodeId("owner")


def contents(record: Record) -> dict[Key, bytes]:
    return {key: held.value for key, held in record.entries.items() if held.value is not None}


def delta_of(source: Record, start: int, room: int = 10_000, now_s: float = 0.0) -> RecordDelta:
    made = source.delta(OWNER, 1, start, room, now_s)
    assert made is not None
    return made[0]


def pull(reader: Record, source: Record, room: int = 10_000, now_s: float = 0.0) -> bool:
    """One exchange; whether anything was to be had."""
    start = start_for(reader.version, reader.floor, source.version, source.floor)
    made = source.delta(OWNER, 1, start, room, now_s) if start is not None else None
    if made is not None:
        reader.apply(made[0], now_s)
    return made is not None


def test_only_what_changed_is_sent() -> None:
    """A delta holds the entries above the reader's version, the newest edit of each."""
    owner, reader = Record(), Record()
    for name in "abc":
        owner.write((1, name), name.encode(), 0.0)
    pull(reader, owner)
    owner.write((1, "b"), b"B", 1.0)
    owner.write((1, "b"), b"BB", 2.0)

    delta = delta_of(owner, reader.version, now_s=3.0)

    assert [(entry.name, entry.version, entry.age_ms) for entry in delta.entries] == [("b", 5, 1000)]
    assert reader.apply(delta, 10.0) == [(1, "b")]
    assert reader.entries[1, "b"].written_s == 9.0


def test_a_delta_takes_no_more_than_its_room_and_goes_on_where_it_ended() -> None:
    """A small packet delays the rest and loses nothing."""
    owner, reader, rounds = Record(), Record(), 0
    for i in range(40):
        owner.write((1, f"k{i}"), bytes(100), 0.0)

    while pull(reader, owner, room=500):
        rounds += 1

    assert contents(reader) == contents(owner)
    assert rounds >= 10


def test_an_entry_without_room_ends_the_exchange() -> None:
    """Nothing is sent rather than a piece of an entry."""
    owner = Record()
    owner.write((1, "k"), bytes(300), 0.0)

    assert owner.delta(OWNER, 1, 0, 200, 0.0) is None


def test_what_was_taken_out_stays_out_although_its_tombstone_is_forgotten() -> None:
    """A reader from before the tombstone begins anew; one who still has the entry cannot bring it back."""
    owner, early, late = Record(), Record(), Record()
    owner.write((1, "gone"), b"x", 0.0)
    owner.write((1, "kept"), b"y", 0.0)
    pull(early, owner)
    owner.write((1, "gone"), None, 1.0)
    owner.write((1, "new"), b"z", 90.0)
    owner.collect(50.0)
    pull(late, owner)

    pull(late, early)
    pull(early, owner)

    assert owner.floor == 3
    assert contents(early) == contents(late) == contents(owner) == {(1, "kept"): b"y", (1, "new"): b"z"}


def test_who_begins_anew_in_pieces_takes_nothing_from_older_copies_in_between() -> None:
    """Half-way up to the floor, an older copy's entries might be those that were taken out."""
    owner, old, reader = Record(), Record(), Record()
    for i in range(4):
        owner.write((1, f"k{i}"), bytes(100), 0.0)
    owner.write((1, "gone"), bytes(100), 0.0)
    pull(old, owner)
    owner.write((1, "gone"), None, 1.0)
    owner.collect(50.0)
    pull(reader, owner, room=300)
    assert reader.version < reader.floor

    assert not pull(reader, old)
    reader.apply(delta_of(old, 0), 0.0)
    while pull(reader, owner, room=300):
        pass

    assert contents(reader) == contents(owner)


def test_a_delta_behind_a_gap_is_not_applied() -> None:
    """Versions say that all up to them is there."""
    owner, reader = Record(), Record()
    for i in range(4):
        owner.write((1, f"k{i}"), b"", 0.0)

    assert reader.apply(delta_of(owner, 2), 0.0) == []
    assert reader.version == 0


def test_a_record_never_has_more_entries_than_it_may() -> None:
    """A faulty node fills nobody's memory."""
    owner, reader = Record(), Record()
    for i in range(3 * MAX_ENTRIES):
        owner.write((1, f"k{i}"), b"", 0.0)

    while pull(reader, owner, room=1 << 20):
        pass

    assert len(reader.entries) == MAX_ENTRIES


@pytest.mark.parametrize("seed", range(40))
def test_all_copies_agree_in_the_end(seed: int) -> None:
    """Any edits, any exchanges between any two, pieces lost, doubled and late: then everybody asks once around."""
    draw = random.Random(seed)
    owner, now_s = Record(), 0.0
    copies, late = [Record() for _ in range(5)], []
    for _ in range(400):
        now_s += draw.random()
        key = draw.randrange(2), f"k{draw.randrange(6)}"
        match draw.randrange(8):
            case 0 | 1:
                owner.write(key, draw.choice((None, draw.randbytes(draw.randrange(60)))), now_s)
            case 2:
                owner.collect(now_s - draw.choice((0.0, 5.0)))
            case _:
                reader, source = draw.sample([owner, *copies], 2)
                start = start_for(reader.version, reader.floor, source.version, source.floor)
                made = source.delta(OWNER, 1, start, draw.choice((130, 260, 9000)), now_s) if start is not None else None
                if made is not None and reader is not owner:
                    late.append((reader, made[0]))
                    for _ in range(draw.randrange(3)):
                        reader_then, delta = draw.choice(late)
                        reader_then.apply(delta, now_s)

    for copy in copies:
        while pull(copy, owner, room=260):
            pass
    assert all(contents(copy) == contents(owner) and copy.version == owner.version for copy in copies)


@pytest.mark.parametrize("seed", range(20))
def test_copies_pass_on_what_the_owner_no_longer_can(seed: int) -> None:
    """The owner is gone; whoever had the newest copy brings the others there."""
    draw = random.Random(seed)
    owner, copies = Record(), [Record() for _ in range(4)]
    for _ in range(100):
        owner.write((1, f"k{draw.randrange(8)}"), draw.choice((None, draw.randbytes(20))), 0.0)
        if draw.random() < 0.1:
            owner.collect(1.0)
        if draw.random() < 0.3:
            pull(draw.choice(copies), owner, room=draw.choice((200, 9000)))
    pull(copies[0], owner)

    while any(pull(a, b, room=300) for a in copies for b in copies if a is not b):
        pass

    assert all(contents(copy) == contents(owner) for copy in copies)
