"""Scuttlebutt: copies catch up, whatever the order of the deltas, and removed entries stay
removed.
"""

import random

import pytest

from kvrs.gossip.facts import FactRecord, Key, start_for
from kvrs.gossip.wire import MAX_ENTRIES, RecordDelta, encoded_bytes
from kvrs.ids import NodeId

OWNER = NodeId("owner")


def contents(record: FactRecord) -> dict[Key, bytes]:
    return {key: held.value for key, held in record.entries.items() if held.value is not None}


def delta_of(source: FactRecord, start: int, room: int = 10_000, now_s: float = 0.0) -> RecordDelta:
    made = source.delta(OWNER, 1, start, room, now_s)
    assert made is not None
    return made


def pull(reader: FactRecord, source: FactRecord, room: int = 10_000, now_s: float = 0.0) -> bool:
    """One exchange; return whether the source had anything."""
    start = start_for(reader.version, reader.floor, source.version, source.floor)
    made = source.delta(OWNER, 1, start, room, now_s) if start is not None else None
    if made is not None:
        assert encoded_bytes(made) <= room
        reader.apply(made, now_s)
    return made is not None


def test_only_changes_are_sent() -> None:
    """A delta holds the entries above the reader's version, the newest edit of each."""
    owner, reader = FactRecord(), FactRecord()
    for name in "abc":
        owner.write((1, name), name.encode(), 0.0)
    pull(reader, owner)
    owner.write((1, "b"), b"B", 1.0)
    owner.write((1, "b"), b"BB", 2.0)

    delta = delta_of(owner, reader.version, now_s=3.0)

    assert [(entry.name, entry.version, entry.age_ms) for entry in delta.entries] == [
        ("b", 5, 1000)
    ]
    assert reader.apply(delta, 10.0) == [(1, "b")]
    assert reader.entries[1, "b"].written_s == 9.0


def test_a_delta_fits_its_room_and_the_next_continues() -> None:
    """A small packet delays the rest and loses nothing."""
    owner, reader, rounds = FactRecord(), FactRecord(), 0
    for i in range(40):
        owner.write((1, f"k{i}"), bytes(100), 0.0)

    while pull(reader, owner, room=500):
        rounds += 1

    assert contents(reader) == contents(owner)
    assert rounds >= 10


def test_an_entry_without_room_ends_the_exchange() -> None:
    """Nothing is sent rather than a part of an entry."""
    owner = FactRecord()
    owner.write((1, "k"), bytes(300), 0.0)

    assert owner.delta(OWNER, 1, 0, 200, 0.0) is None


def test_a_removed_entry_stays_removed_after_its_tombstone_is_forgotten() -> None:
    """A reader from before the tombstone starts again; a copy with the entry cannot bring it
    back.
    """
    owner, early, late = FactRecord(), FactRecord(), FactRecord()
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
    assert (
        contents(early)
        == contents(late)
        == contents(owner)
        == {(1, "kept"): b"y", (1, "new"): b"z"}
    )


def test_a_copy_that_starts_again_accepts_nothing_from_older_copies() -> None:
    """Below the floor, an older copy's entries might be removed ones."""
    owner, old, reader = FactRecord(), FactRecord(), FactRecord()
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
    """A version states that everything up to it is there."""
    owner, reader = FactRecord(), FactRecord()
    for i in range(4):
        owner.write((1, f"k{i}"), b"", 0.0)

    assert reader.apply(delta_of(owner, 2), 0.0) == []
    assert reader.version == 0


def test_the_entries_of_a_record_are_bounded() -> None:
    """A faulty node cannot fill another one's memory."""
    owner, reader = FactRecord(), FactRecord()
    for i in range(3 * MAX_ENTRIES):
        owner.write((1, f"k{i}"), b"", 0.0)

    while pull(reader, owner, room=1 << 20):
        pass

    assert len(reader.entries) == MAX_ENTRIES


@pytest.mark.parametrize("seed", range(20))
def test_all_copies_converge(seed: int) -> None:
    """Any edits and exchanges, with deltas lost, duplicated and late, then one exchange with
    each; also without the owner, if one copy is as new.
    """
    draw = random.Random(seed)
    owner, now_s = FactRecord(), 0.0
    copies, late = [FactRecord() for _ in range(5)], []
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
                made = (
                    source.delta(OWNER, 1, start, draw.choice((130, 260, 9000)), now_s)
                    if start is not None
                    else None
                )
                if made is not None and reader is not owner:
                    late.append((reader, made))
                    for _ in range(draw.randrange(3)):
                        reader_then, delta = draw.choice(late)
                        reader_then.apply(delta, now_s)

    while pull(copies[0], owner, room=260):
        pass
    others = [owner, *copies] if seed % 2 else copies
    while any(pull(copy, other, room=260) for copy in copies for other in others):
        pass
    assert all(
        contents(copy) == contents(owner) and copy.version == owner.version for copy in copies
    )
