"""The record book alone: grants, order, bounds, whatever is repeated, lost or late."""

from random import Random

import msgspec
import pytest

from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import Ack, Claim, Opening, Refusal, Said, Seen, Standing, Update
from kvrs.proxy.mirror.records import (
    CLAIM_S,
    Fate,
    Outbox,
    Record,
    RecordBook,
    best_of,
    fate_of,
    merged,
    mirror_for,
    record_of,
)

OPENING = Opening(b"digest", 7, (None, None, 9.0), 0.0, 0.0)
S = StreamId("ab")


def record(key: str = "k", owner: str = "a-1", stream: StreamId = S) -> Record:
    return Record(key, stream, OPENING, 0.0, owner, 0)


def said(seq: int) -> Said:
    return Said(seq, [seq], b"event %d" % seq)


def claim_for(book: RecordBook, claimant: str, **changes: object) -> Claim:
    seen = book.look("k")
    assert seen is not None
    return msgspec.structs.replace(Claim("k", claimant, seen, b"digest"), **changes)


@pytest.mark.parametrize("seed", range(40))
def test_a_mirror_holds_a_prefix_of_the_stream_whatever_becomes_of_messages(seed: int) -> None:
    """Lost, said twice, mirror restarted: every event once and in order, and what is acknowledged is there."""
    random, sent = Random(seed), record()
    outbox, books = Outbox(sent), {"m": RecordBook("m-1"), "n": RecordBook("n-1")}
    outbox.assign("m")
    for step in range(200):
        drawn = random.random()
        if drawn < 0.5:
            sent.add(said(len(sent.events) + 1))
            outbox.dirty = True
        elif drawn < 0.53:
            outbox.assign(random.choice(["m", "n"]))
        elif drawn < 0.56 and outbox.mirror is not None:
            books[outbox.mirror] = RecordBook(f"{outbox.mirror}-{step}")
        elif outbox.mirror is not None:
            book, update = books[outbox.mirror], outbox.next(float(step))
            for _ in range(random.choice([0, 1, 1, 1, 2])):
                ack, ousts = book.apply(update, "a", float(step))
                assert not ousts
                outbox.take(ack)
        for book in books.values():
            if (held := book.records.get("k")) is not None:
                assert held.events == sent.events[: len(held.events)]
    while not outbox.settled:
        assert outbox.mirror is not None
        outbox.take(books[outbox.mirror].apply(outbox.next(200.0), "a", 200.0)[0])
    assert outbox.mirror is None or books[outbox.mirror].records["k"].events == sent.events


@pytest.mark.parametrize("seed", range(40))
def test_an_owner_epoch_is_granted_once_and_only_rises(seed: int) -> None:
    """Of any number of claims that saw the same, one is granted."""
    random, book, now_s = Random(seed), RecordBook("m-1"), 0.0
    sent = record()
    sent.mirror_no = 1
    book.apply(sent.update(0.0), "a", 0.0)
    granted: list[int] = []
    waiting: list[Claim] = []
    for number in range(100):
        now_s += random.choice([0.0, CLAIM_S / 2, CLAIM_S * 2])
        waiting.append(claim_for(book, f"c{number}-1"))
        if random.random() < 0.6:
            answer = book.claim(waiting.pop(random.randrange(len(waiting))), now_s)
            if answer.granted is not None:
                granted.append(answer.granted.owner_epoch)
            else:
                assert answer.refusal is Refusal.BUSY

    assert granted == list(range(1, len(granted) + 1))
    assert granted


def test_who_asks_right_after_another_has_resumed_is_refused() -> None:
    """Though it has seen how the stream stands; one whose owner has let go of it may be had."""
    book, sent = RecordBook("m-1"), record()
    sent.mirror_no = 1
    book.apply(sent.update(0.0), "a", 0.0)
    assert book.claim(claim_for(book, "c-1"), 0.0).granted is not None

    assert book.claim(claim_for(book, "d-1"), CLAIM_S / 2).refusal is Refusal.BUSY
    book.records["k"].standing = Standing(released=True)
    assert book.claim(claim_for(book, "d-1"), CLAIM_S / 2).granted is not None
    assert book.claim(claim_for(book, "e-1"), CLAIM_S * 2).granted is not None


def test_nothing_goes_to_a_client_before_a_mirror_knows_of_the_stream() -> None:
    """Or a client could have a place in a stream that nobody knows. Without a mirror there is nobody to wait for."""
    outbox = Outbox(record())
    outbox.record.events = [said(1), said(2), said(3)]
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 3]

    outbox.assign("m")
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [0, 0]
    outbox.next(0.0)
    outbox.take(Ack(1))
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 1]
    # It may have been stopped for so long, and another one's by now.
    assert [outbox.sendable(5.0, sync=sync) for sync in (False, True)] == [1, 1]
    outbox.take(Ack(-1, full=True))
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 3]


def test_an_owner_that_lost_its_stream_is_told_and_changes_nothing() -> None:
    """Whatever it says late."""
    book, sent = RecordBook("m-1"), record()
    sent.mirror_no = 1
    book.apply(sent.update(0.0), "a", 0.0)
    book.claim(claim_for(book, "c-1"), 1.0)

    sent.add(said(1))
    ack, _ = book.apply(sent.update(1.0, from_event=0, opening=False), "a", 1.0)
    again, _ = book.apply(sent.update(1.0), "a", 1.0)

    assert (ack.superseded, again.superseded) == (True, True)
    assert book.records["k"].events == []


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"digest": b"other"}, Refusal.OTHER_BODY),
        ({"stream": StreamId("cd")}, Refusal.OTHER_STREAM),
        ({"after": 9}, Refusal.INEXACT),
        ({"key": "unknown"}, Refusal.UNKNOWN),
        ({"seen": Seen(S, 3, 1, True)}, Refusal.BUSY),
        ({"after": 2}, None),
    ],
)
def test_a_claim_is_refused_for_its_reason(changes: dict[str, object], refusal: Refusal | None) -> None:
    """And a refused claim leaves the stream to its owner."""
    book, sent = RecordBook("m-1"), record()
    sent.mirror_no, sent.standing = 1, Standing(inexact=("temperature",))
    sent.add(said(1))
    sent.add(said(2))
    book.apply(sent.update(0.0), "a", 0.0)

    answer = book.claim(claim_for(book, "c-1", **changes), 1.0)

    assert answer.refusal is refusal
    assert book.records["k"].owner_epoch == (1 if refusal is None else 0)


def test_what_is_complete_is_for_everybody() -> None:
    """It has no writer any more; but nobody has more of it than there is."""
    book, sent = RecordBook("m-1"), record()
    sent.add(said(1))
    sent.standing = Standing(complete=True)
    book.apply(sent.update(0.0), "a", 0.0)

    answers = [book.claim(claim_for(book, f"c{n}-1"), 0.0) for n in range(3)]

    assert all(answer.granted is not None and answer.granted.owner_epoch == 0 for answer in answers)
    assert book.claim(claim_for(book, "c-1", after=2), 0.0).refusal is Refusal.BEYOND


def test_an_owner_with_a_mirror_does_not_grant() -> None:
    """Or two would."""
    book, own = RecordBook("a-1"), record()
    book.own(own, 0.0)
    outbox = Outbox(own)
    seen = book.look("k")
    assert seen is not None
    assert seen.grants

    outbox.assign("m")
    assert book.claim(claim_for(book, "c-1"), 1.0).refusal is Refusal.BUSY
    book.lose("m")

    assert book.claim(claim_for(book, "c-1"), 1.0).granted is not None
    assert book.held == set()


def test_two_that_begin_under_one_key_prefer_the_same() -> None:
    """Everybody keeps the stream with the smaller name; the other one's owner learns that it lost."""
    first, second = record(owner="a-1", stream=StreamId("1")), record(owner="b-1", stream=StreamId("2"))
    for own, other in ((first, second), (second, first)):
        book = RecordBook(own.owner)
        book.own(own, 0.0)

        ack, ousts = book.apply(other.update(0.0), "a", 0.0)

        assert (ack.superseded, ousts) == (own is first, own is second)


def test_a_book_is_bounded_and_keeps_what_lives_here() -> None:
    """By number, bytes and time; what is full says so."""
    book = RecordBook("m-1", most_records=3, most_bytes=4000, keep_s=10.0)
    assert book.own(record("mine"), 0.0)
    for n in range(5):
        done = record(f"k{n}")
        done.standing = Standing(complete=True)
        book.apply(done.update(0.0), "a", float(n))
    assert set(book.records) == {"mine", "k3", "k4"}
    live = record("big")
    live.add(Said(1, [1], b"x" * 5000))
    assert book.apply(live.update(0.0), "a", 5.0) == (Ack(-1, full=True), False)

    book.expire(100.0)

    assert set(book.records) == {"mine"}
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())


def test_a_client_gets_what_it_lacks_and_nothing_twice() -> None:
    """From any place at which an event ends; within an event nothing can be cut."""
    seqs = [0, 1, 2, 5, 6]
    for after in [-1, *seqs]:
        fates = [fate_of(before, said(seq), after) for before, seq in zip([-1, *seqs], seqs, strict=False)]
        assert fates == [Fate.SKIP if seq <= after else Fate.SEND for seq in seqs]
    assert fate_of(2, said(5), 4) is Fate.TORN
    assert fate_of(-1, said(1), 0) is Fate.SEND


def test_an_owner_adds_what_only_it_knows() -> None:
    """Its client came back to it: nothing has to be made again."""
    own = record()
    own.events = [said(1), said(2), said(3)]
    granted = record_of(msgspec.structs.replace(own.update(0.0), owner_epoch=1, events=own.events[:1]), 0.0)

    assert [event.seq for event in merged(granted, own).events] == [1, 2, 3]
    assert merged(record_of(msgspec.structs.replace(own.update(0.0), owner_epoch=2), 0.0), own).seq == 3


def test_the_best_of_several_is_the_latest() -> None:
    """A mirror that was cut off knows an older owner, or an older mirror."""
    found = [("m", Seen(S, 0, 3, True)), ("n", Seen(S, 1, 1, True)), ("o", Seen(S, 1, 2, False)), ("p", Seen(S, 1, 2, True))]

    best = best_of(found)

    assert best is not None
    assert best[0] == "p"
    assert best_of([]) is None


def test_everybody_finds_the_same_mirror_and_few_move() -> None:
    """Rendezvous hashing."""
    keys = [f"key{n}" for n in range(300)]
    before = {key: mirror_for(key, ["a", "b", "c"]) for key in keys}

    after = {key: mirror_for(key, ["c", "a"]) for key in keys}

    assert all(after[key] == before[key] for key in keys if before[key] != "b")
    assert min(list(before.values()).count(peer) for peer in "abc") > 60
    assert mirror_for("k", []) is None


def test_an_update_survives_the_wire() -> None:
    """MessagePack and back."""
    sent = record()
    sent.add(said(1))

    update = sent.update(2.5)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=Update) == update
    assert update.opening is not None
    assert update.opening.age_s == 2.5


def test_a_copy_grants_nothing_before_whoever_sent_it_is_lost() -> None:
    """Or two could be granted the same stream."""
    mirror, keeper, sent = RecordBook("m-1"), RecordBook("k-1"), record()
    sent.add(said(1))
    mirror.apply(sent.update(0.0), "a", 0.0)
    assert mirror.alone({"a", "k"}, 0.0) == []
    mirror.lose("a")
    (orphan,) = mirror.alone({"k"}, 0.0)

    assert keeper.keep(orphan.copy(0.0), "m", 0.0) == (Ack(1), False)
    assert keeper.claim(claim_for(keeper, "c-1"), 1.0).refusal is Refusal.BUSY
    assert best_of([("k", keeper.look("k")), ("m", mirror.look("k"))])[0] == "m"  # type: ignore[list-item,index]
    keeper.lose("m")

    assert keeper.alone({"a"}, 1.0)[0].copied == 1
    assert keeper.claim(claim_for(keeper, "c-1"), 1.0).granted is not None
    assert keeper.alone({"a"}, 1.0) == [], "its new owner is about to say where it is"
    assert keeper.alone({"a"}, 1.0 + CLAIM_S) == [keeper.records["k"]]


def test_the_better_of_two_copies_stays() -> None:
    """By owner, mirror and events; what lives here is no copy, and gives way to a later owner only."""
    book, older, newer = RecordBook("k-1"), record(), record()
    newer.mirror_no = 1
    newer.add(said(1))
    assert book.keep(newer.copy(0.0), "m", 0.0) == (Ack(1), False)
    assert book.keep(older.copy(0.0), "n", 0.0) == (Ack(1, superseded=True), False)
    assert book.records["k"].other == "m"
    assert book.keep(newer.copy(0.0), "o", 0.0) == (Ack(1), False)
    assert book.records["k"].other == "o"
    newer.add(said(2))
    assert book.keep(newer.copy(0.0), "m", 0.0) == (Ack(2), False)

    mine = record(owner="k-1")
    mine.owner_epoch = 1
    book.own(mine, 0.0)
    assert book.keep(newer.copy(0.0), "m", 0.0) == (Ack(0, superseded=True), False)
    newer.owner_epoch = 1
    assert book.keep(newer.copy(0.0), "m", 0.0) == (Ack(0), False)
    assert book.records["k"] is mine
    newer.owner_epoch = 2
    assert book.keep(newer.copy(0.0), "m", 0.0) == (Ack(2), True)


def test_a_copy_lives_no_longer_than_the_record() -> None:
    """Or what is passed on again and again would stay for ever; and a full book says so."""
    book, sent = RecordBook("k-1", most_records=1, keep_s=10.0), record()
    sent.touched_s = 1.0

    book.keep(sent.copy(8.0), "m", 108.0)
    other = record("other")
    other.touched_s = 8.0

    assert book.records["k"].touched_s == 101.0
    assert book.keep(other.copy(8.0), "m", 103.0)[0].full
    book.expire(112.0)
    assert book.records == {}


def test_what_grows_keeps_to_the_bounds_as_well() -> None:
    """Streams begin small. A mirror says that it is full, and keeps no part; an owner keeps its own, in place of what is idle."""
    mirror, sent = RecordBook("m-1", most_bytes=4000), record()
    outbox = Outbox(sent)
    outbox.assign("m")
    for seq in range(1, 100):
        sent.add(said(seq))
        if outbox.mirror is not None:
            outbox.take(mirror.apply(outbox.next(0.0), "a", 0.0)[0])

    owner = RecordBook("a-1", most_bytes=4000)
    for key in ("idle", "own"):
        assert owner.own(record(key), 0.0)
    owner.let_go(owner.records["idle"], 0.0)
    for seq in range(1, 100):
        owner.add(owner.records["own"], said(seq))
    owner.expire(10.0)

    assert (outbox.mirror, outbox.full, mirror.records, mirror.size_bytes) == (None, True, {}, 0)
    assert list(owner.records) == ["own"]


def test_who_gave_up_on_a_full_mirror_is_asked_before_it() -> None:
    """The mirror stays behind with a part of the stream."""
    mirror, outbox = RecordBook("m-1"), Outbox(record())
    outbox.assign("z")
    outbox.take(mirror.apply(outbox.next(0.0), "a", 0.0)[0])
    owner = RecordBook("a-1")
    assert owner.own(outbox.record, 0.0)

    outbox.take(Ack(-1, full=True))

    seen = [(name, book.look("k")) for name, book in (("a", owner), ("z", mirror))]
    best = best_of((name, each) for name, each in seen if each is not None)
    assert best is not None
    assert best[0] == "a"


def test_a_copy_without_its_beginning_is_refused() -> None:
    """Whoever says so is of another version, and hears it."""
    book, copy = RecordBook("m-1"), record().copy(0.0)

    for changes in ({"opening": None}, {"first_event": 1}):
        with pytest.raises(RequestError, match="copy"):
            book.keep(msgspec.structs.replace(copy, **changes), "a", 0.0)


def test_a_stream_that_was_kept_here_is_not_lost_for_want_of_room() -> None:
    """It has been granted, so nobody else may have it; what there was room for stays."""
    book = RecordBook("a-1", most_bytes=2000)
    assert book.own(record("other"), 0.0)
    assert book.own(record(), 0.0)
    book.let_go(book.records["k"], 0.0)
    for seq in range(1, 100):
        book.add(book.records["other"], said(seq))
    answer = book.claim(claim_for(book, "a-1"), 1.0)
    assert answer.granted is not None

    assert book.own(record_of(answer.granted, 1.0), 1.0)
    assert not book.own(record("new"), 1.0)
