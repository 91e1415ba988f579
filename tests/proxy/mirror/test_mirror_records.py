"""Record book and outbox alone: grants, order and bounds with repeated, lost and late messages."""

import zlib
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.proxy import are_workers_of_one
from kvrs.errors import RequestError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import (
    AckStatus,
    Claim,
    RecordVersion,
    Refusal,
    StreamEvent,
    StreamHeader,
    StreamState,
    Update,
    UpdateAck,
    pack_ids,
)
from kvrs.proxy.mirror.book import Delivery, Outbox, Received, RecordBook, delivery_of
from kvrs.proxy.mirror.records import (
    CLAIM_S,
    PresentPeers,
    Record,
    RecordRole,
    best_of,
    merged,
    mirror_for,
    record_from,
)
from kvrs_testkit.examples import examples

HEADER = StreamHeader(b"digest", 7, (None, None, 9.0), 0.0, 0.0)
S = StreamId("ab")


def record(key: str = "k", owner: str = "a-1", stream: StreamId = S) -> Record:
    return Record(key, stream, HEADER, 0.0, owner, 0)


def event(seq: int) -> StreamEvent:
    return StreamEvent(seq, pack_ids([seq]), b"event %d" % seq)


def pack_all(book: RecordBook, now_s: float) -> None:
    for _ in book.pack(now_s):
        """Nobody else wants a turn."""


def up(*peers: str) -> PresentPeers:
    return PresentPeers(frozenset(peers), frozenset(peers))


def claim_for(book: RecordBook, claimant: str, **changes: object) -> Claim:
    seen = book.version("k")
    assert seen is not None
    return msgspec.structs.replace(Claim("k", claimant, seen, b"digest"), **changes)


@pytest.mark.parametrize("seed", range(40))
def test_a_mirror_has_a_prefix_of_the_stream_whatever_becomes_of_messages(seed: int) -> None:
    """With lost and repeated updates and restarts of the mirror, every event is there once and in
    order, and what is acknowledged is there.
    """
    random, sent = Random(seed), record()
    outbox, books = Outbox(sent), {"m": RecordBook(), "n": RecordBook()}
    outbox.assign("m")
    for step in range(200):
        drawn = random.random()
        if drawn < 0.5:
            sent.add(event(len(sent.events) + 1))
            outbox.dirty = True
        elif drawn < 0.53:
            outbox.assign(random.choice(["m", "n"]))
        elif drawn < 0.56 and outbox.mirror is not None:
            books[outbox.mirror] = RecordBook()
        elif outbox.mirror is not None:
            book, update = books[outbox.mirror], outbox.next(float(step))
            for _ in range(random.choice([0, 1, 1, 1, 2])):
                received = book.receive(update, "a", float(step))
                assert not received.stops_local_stream
                outbox.take(received.ack)
        for book in books.values():
            if (held := book.records.get("k")) is not None:
                assert held.events == sent.events[: len(held.events)]
    while not outbox.settled:
        assert outbox.mirror is not None
        outbox.take(books[outbox.mirror].receive(outbox.next(200.0), "a", 200.0).ack)
    assert outbox.mirror is None or books[outbox.mirror].records["k"].events == sent.events


@pytest.mark.parametrize("seed", range(40))
def test_an_owner_epoch_is_granted_once_and_only_rises(seed: int) -> None:
    """One claim of any number for the same version of a record is granted."""
    random, book, now_s = Random(seed), RecordBook(), 0.0
    sent = record()
    sent.mirror_no = 1
    book.receive(sent.update(0.0), "a", 0.0)
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


def test_a_claim_right_after_a_grant_is_refused() -> None:
    """Even for the current version, unless the owner has released the stream."""
    book, sent = RecordBook(), record()
    sent.mirror_no = 1
    book.receive(sent.update(0.0), "a", 0.0)
    assert book.claim(claim_for(book, "c-1"), 0.0).granted is not None

    assert book.claim(claim_for(book, "d-1"), CLAIM_S / 2).refusal is Refusal.BUSY
    book.records["k"].state = StreamState(released=True)
    assert book.claim(claim_for(book, "d-1"), CLAIM_S / 2).granted is not None
    assert book.claim(claim_for(book, "e-1"), CLAIM_S * 2).granted is not None


def test_nothing_goes_to_a_client_before_the_mirror_has_the_header() -> None:
    """Otherwise a client could hold a position in a stream that no proxy knows. Without a mirror
    nothing waits.
    """
    outbox = Outbox(record())
    for seq in (1, 2, 3):
        outbox.record.add(event(seq))
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 3]

    outbox.assign("m")
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [0, 0]
    outbox.next(0.0)
    outbox.take(UpdateAck(AckStatus.STORED, 1))
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 1]
    # The owner may have been stopped for so long, and the stream been granted elsewhere.
    assert [outbox.sendable(5.0, sync=sync) for sync in (False, True)] == [1, 1]
    outbox.take(UpdateAck(AckStatus.FULL))
    assert [outbox.sendable(0.0, sync=sync) for sync in (False, True)] == [3, 3]


def test_updates_of_a_superseded_owner_are_refused() -> None:
    """Events as well as a header; the record stays as it is."""
    book, sent = RecordBook(), record()
    sent.mirror_no = 1
    book.receive(sent.update(0.0), "a", 0.0)
    book.claim(claim_for(book, "c-1"), 1.0)

    sent.add(event(1))
    late = book.receive(sent.update(1.0, from_event=0, with_header=False), "a", 1.0)
    again = book.receive(sent.update(1.0), "a", 1.0)

    assert {late.ack.status, again.ack.status} == {AckStatus.SUPERSEDED}
    assert book.records["k"].events == []


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"digest": b"other"}, Refusal.OTHER_BODY),
        ({"stream": StreamId("cd")}, Refusal.OTHER_STREAM),
        ({"after": 9}, Refusal.INEXACT),
        ({"key": "unknown"}, Refusal.UNKNOWN),
        ({"version": RecordVersion(S, 3, 1, True)}, Refusal.BUSY),
        ({"after": 2}, None),
    ],
)
def test_a_claim_is_refused_for_its_reason(
    changes: dict[str, object], refusal: Refusal | None
) -> None:
    """A refused claim leaves the stream with its owner."""
    book, sent = RecordBook(), record()
    sent.mirror_no, sent.state = 1, StreamState(inexact=("temperature",))
    sent.add(event(1))
    sent.add(event(2))
    book.receive(sent.update(0.0), "a", 0.0)

    answer = book.claim(claim_for(book, "c-1", **changes), 1.0)

    assert answer.refusal is refusal
    assert book.records["k"].owner_epoch == (1 if refusal is None else 0)


def test_a_complete_stream_goes_to_every_claimant() -> None:
    """It needs no owner; a position behind its end is refused."""
    book, sent = RecordBook(), record()
    sent.add(event(1))
    sent.state = StreamState(complete=True)
    book.receive(sent.update(0.0), "a", 0.0)

    answers = [book.claim(claim_for(book, f"c{n}-1"), 0.0) for n in range(3)]

    assert all(answer.granted is not None and answer.granted.owner_epoch == 0 for answer in answers)
    assert book.claim(claim_for(book, "c-1", after=2), 0.0).refusal is Refusal.BEYOND


def test_an_owner_with_a_mirror_does_not_grant() -> None:
    """Otherwise two proxies would grant one stream."""
    book, own = RecordBook(), record()
    book.own(own, 0.0)
    outbox = Outbox(own)
    seen = book.version("k")
    assert seen is not None
    assert seen.grants

    outbox.assign("m")
    assert book.claim(claim_for(book, "c-1"), 1.0).refusal is Refusal.BUSY
    book.lose("m")

    assert book.claim(claim_for(book, "c-1"), 1.0).granted is not None
    assert book.records["k"].role is RecordRole.MIRROR


def test_of_two_streams_under_one_key_all_proxies_prefer_the_same() -> None:
    """The stream with the smaller name stays; the owner of the other one is superseded."""
    first, second = (
        record(owner="a-1", stream=StreamId("1")),
        record(owner="b-1", stream=StreamId("2")),
    )
    for own, other in ((first, second), (second, first)):
        book = RecordBook()
        book.own(own, 0.0)

        received = book.receive(other.update(0.0), "a", 0.0)

        assert (received.ack.status is AckStatus.SUPERSEDED) == (own is first)
        assert received.stops_local_stream == (own is second)


def test_a_book_is_bounded_and_keeps_streams_that_run_here() -> None:
    """Bounded by number, bytes and time; a full book refuses new records."""
    book = RecordBook(max_records=3, max_bytes=8000, keep_s=10.0)
    assert book.own(record("mine"), 0.0)
    for n in range(5):
        done = record(f"k{n}")
        done.state = StreamState(complete=True)
        book.receive(done.update(0.0), "a", float(n))
    assert set(book.records) == {"mine", "k3", "k4"}
    live = record("big")
    live.add(StreamEvent(1, pack_ids([1]), b"x" * 9000))
    assert book.receive(live.update(0.0), "a", 5.0) == Received(UpdateAck(AckStatus.FULL))

    book.expire(100.0)

    assert set(book.records) == {"mine"}
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())


def test_of_many_finished_records_several_make_room() -> None:
    """To find the oldest ones takes a look at all of them, which new streams seldom wait for."""
    book, dropped = RecordBook(max_records=640), []
    for n in range(700):
        before, new = len(book.records), record(f"k{n}")
        assert book.own(new, float(n))
        dropped.append(before + 1 - len(book.records))
        new.state = StreamState(complete=True)
        book.end(new, float(n))

    assert sum(count > 0 for count in dropped) == 6
    assert [*book.records] == [f"k{n}" for n in range(sum(dropped), 700)]


def test_a_client_gets_what_it_lacks_and_nothing_twice() -> None:
    """From any position at which an event ends; a position within an event needs a cut."""
    seqs = [0, 1, 2, 5, 6]
    for after in [-1, *seqs]:
        deliveries = [
            delivery_of(before, event(seq), after)
            for before, seq in zip([-1, *seqs], seqs, strict=False)
        ]
        assert deliveries == [Delivery.SKIP if seq <= after else Delivery.SEND for seq in seqs]
    assert delivery_of(2, event(5), 4) is Delivery.CUT
    assert delivery_of(-1, event(1), 0) is Delivery.SEND


def test_a_claimant_adds_the_events_it_has_as_the_owner_before() -> None:
    """Its client came back to it: nothing has to be regenerated."""
    own = record()
    for seq in (1, 2, 3):
        own.add(event(seq))
    granted = record_from(
        msgspec.structs.replace(own.update(0.0), owner_epoch=1, events=own.events[:1]), 0.0
    )

    assert [event.seq for event in merged(granted, own).events] == [1, 2, 3]
    assert (
        merged(record_from(msgspec.structs.replace(own.update(0.0), owner_epoch=2), 0.0), own).seq
        == 3
    )


def test_the_best_version_is_the_latest() -> None:
    """A mirror that was cut off has a version of an older owner, or of an older mirror."""
    found = [
        ("m", RecordVersion(S, 0, 3, True)),
        ("n", RecordVersion(S, 1, 1, True)),
        ("o", RecordVersion(S, 1, 2, False)),
        ("p", RecordVersion(S, 1, 2, True)),
    ]

    best = best_of(found)

    assert best is not None
    assert best[0] == "p"
    assert best_of([]) is None


def test_all_proxies_choose_the_same_mirror_and_few_keys_move() -> None:
    """Rendezvous hashing."""
    keys = [f"key{n}" for n in range(300)]
    before = {key: mirror_for(key, ["a", "b", "c"]) for key in keys}

    after = {key: mirror_for(key, ["c", "a"]) for key in keys}

    assert all(after[key] == before[key] for key in keys if before[key] != "b")
    assert min(list(before.values()).count(peer) for peer in "abc") > 60
    assert mirror_for("k", []) is None


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        ("a.0", "a.1", True),
        ("a.b.0", "a.b.12", True),
        ("a.0", "b.0", False),
        ("a", "a.0", False),
        ("0", "1", False),
        ("a.x", "a.y", False),
    ],
)
def test_workers_of_one_proxy_are_known_by_their_ids(
    one: str, other: str, *, together: bool
) -> None:
    """Their records go to other proxies, where there are any: a proxy may be lost as a whole."""
    assert are_workers_of_one(one, other) is together


def test_an_update_survives_the_wire() -> None:
    """MessagePack and back."""
    sent = record()
    sent.add(event(1))

    update = sent.update(2.5)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(update), type=Update) == update
    assert update.header is not None
    assert update.header.age_s == 2.5


def test_a_copy_grants_nothing_before_its_sender_is_lost() -> None:
    """Otherwise two claimants could be granted the same stream."""
    mirror, keeper, sent = RecordBook(), RecordBook(), record()
    sent.add(event(1))
    mirror.receive(sent.update(0.0), "a", 0.0)
    assert mirror.sole(up("a", "k"), 0.0) == []
    mirror.lose("a")
    (orphan,) = mirror.sole(up("k"), 0.0)

    assert keeper.receive(orphan.copy(0.0), "m", 0.0) == Received(UpdateAck(AckStatus.STORED, 1))
    assert keeper.claim(claim_for(keeper, "c-1"), 1.0).refusal is Refusal.BUSY
    assert best_of([("k", keeper.version("k")), ("m", mirror.version("k"))])[0] == "m"  # type: ignore[list-item,index]
    keeper.lose("m")

    assert keeper.sole(up("a"), 1.0)[0].copy_hops == 1
    assert keeper.claim(claim_for(keeper, "c-1"), 1.0).granted is not None
    assert keeper.sole(up("a"), 1.0) == [], "its new owner is about to send an update"
    assert keeper.sole(up("a"), 1.0 + CLAIM_S) == [keeper.records["k"]]


def test_the_better_of_two_copies_stays() -> None:
    """By owner, mirror and events; the record of a stream that runs here is replaced only by one of
    a later owner.
    """
    book, older, newer = RecordBook(), record(), record()
    newer.mirror_no = 1
    newer.add(event(1))
    assert book.receive(newer.copy(0.0), "m", 0.0) == Received(UpdateAck(AckStatus.STORED, 1))
    assert book.receive(older.copy(0.0), "n", 0.0) == Received(UpdateAck(AckStatus.SUPERSEDED))
    assert book.records["k"].peer == "m"
    assert book.receive(newer.copy(0.0), "o", 0.0) == Received(UpdateAck(AckStatus.STORED, 1))
    assert book.records["k"].peer == "o"
    newer.add(event(2))
    assert book.receive(newer.copy(0.0), "m", 0.0) == Received(UpdateAck(AckStatus.STORED, 2))

    mine = record(owner="k-1")
    mine.owner_epoch = 1
    book.own(mine, 0.0)
    assert book.receive(newer.copy(0.0), "m", 0.0) == Received(UpdateAck(AckStatus.SUPERSEDED))
    newer.owner_epoch = 1
    assert book.receive(newer.copy(0.0), "m", 0.0) == Received(UpdateAck(AckStatus.STORED, 0))
    assert book.records["k"] is mine
    newer.owner_epoch = 2
    assert book.receive(newer.copy(0.0), "m", 0.0) == Received(
        UpdateAck(AckStatus.STORED, 2), stops_local_stream=True
    )


def test_a_copy_expires_with_the_record_that_it_was_made_from() -> None:
    """Otherwise a record that is copied on and on would never expire; a full book refuses."""
    book, sent = RecordBook(max_records=1, keep_s=10.0), record()
    sent.touched_s = 1.0

    book.receive(sent.copy(8.0), "m", 108.0)
    other = record("other")
    other.touched_s = 8.0

    assert book.records["k"].touched_s == 101.0
    assert book.receive(other.copy(8.0), "m", 103.0).ack.status is AckStatus.FULL
    book.expire(112.0)
    assert book.records == {}


def test_records_that_grow_stay_within_the_bounds() -> None:
    """A mirror that becomes full refuses and keeps no part; an owner keeps its own stream and
    evicts what is idle.
    """
    mirror, sent = RecordBook(max_bytes=8000), record()
    outbox = Outbox(sent)
    outbox.assign("m")
    for seq in range(1, 100):
        sent.add(event(seq))
        if outbox.mirror is not None:
            outbox.take(mirror.receive(outbox.next(0.0), "a", 0.0).ack)

    owner = RecordBook(max_bytes=8000)
    for key in ("idle", "own"):
        assert owner.own(record(key), 0.0)
    owner.end(owner.records["idle"], 0.0)
    for seq in range(1, 100):
        owner.add(owner.records["own"], event(seq))
    owner.expire(10.0)

    assert (outbox.mirror, outbox.full, mirror.records, mirror.size_bytes) == (None, True, {}, 0)
    assert list(owner.records) == ["own"]


def test_an_idle_record_is_packed_and_has_the_same_events() -> None:
    """That of a finished stream, and that of a mirror, which more events then follow."""
    book = RecordBook()
    own, mirrored = record("own"), record("mirrored")
    assert book.own(own, 0.0)
    for seq in range(1, 101):
        book.add(own, event(seq))
        mirrored.add(event(seq))
    book.receive(mirrored.update(0.0), "a", 0.0)
    running_bytes = own.size_bytes
    pack_all(book, 6.0)
    assert own.events is own.events, "a running stream reads its record with each token"
    book.end(own, 0.0)
    expected = [event(seq) for seq in range(1, 101)]

    pack_all(book, 4.0)
    assert own.size_bytes == running_bytes
    pack_all(book, 6.0)

    for each in book.records.values():
        assert each.size_bytes < running_bytes / 5
        assert (each.events, each.seq) == (expected, 100)
        assert each.update(6.0, from_event=98).events == expected[98:]
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())

    mirrored.add(event(101))
    received = book.receive(mirrored.update(6.0, from_event=100, with_header=False), "a", 6.0)
    assert received.ack == UpdateAck(AckStatus.STORED, 101)
    assert book.records["mirrored"].events == [*expected, event(101)]
    assert book.records["mirrored"].size_bytes > running_bytes
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())


def test_many_records_that_are_left_at_once_are_packed_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams of others go on in between; a record may have more events than fit into a part."""
    compressed_bytes, compress = 0, zlib.compress

    def counting(data: bytes, *, level: int) -> bytes:
        nonlocal compressed_bytes
        compressed_bytes += len(data)
        return compress(data, level=level)

    monkeypatch.setattr(zlib, "compress", counting)
    book, parts = RecordBook(), list[int]()
    for n in range(40):
        made = record(f"k{n}")
        assert book.own(made, 0.0)
        for seq in range(1, 1001 if n else 50_001):
            book.add(made, StreamEvent(seq, pack_ids([seq]), b"%d" % seq * 50))
        book.end(made, 0.0)
    held_bytes = book.size_bytes

    for _ in book.pack(6.0):
        parts.append(compressed_bytes)
        compressed_bytes = 0

    assert len(parts) > 8
    assert max(parts) < 3 << 20
    assert book.size_bytes < held_bytes / 5
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())
    assert [each.seq for each in book.records["k0"].events] == [*range(1, 50_001)]
    assert not [*book.pack(6.0)]


def test_a_record_that_is_dropped_or_runs_again_between_two_parts_is_not_packed() -> None:
    """Its bytes are not counted twice, and its stream reads it with each token."""
    book = RecordBook()
    for key in ("first", "dropped", "again"):
        made = record(key)
        assert book.own(made, 0.0)
        for seq in range(1, 3001):
            book.add(made, StreamEvent(seq, pack_ids([seq]), b"x" * 1000))
        book.end(made, 0.0)

    packing = book.pack(6.0)
    next(packing)
    book.forget("dropped")
    again = record("again")
    for seq in range(1, 3001):
        again.add(StreamEvent(seq, pack_ids([seq]), b"x" * 1000))
    assert book.own(again, 6.0)
    remaining = [*packing]

    assert len(remaining) < 2
    assert again.events is again.events
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())


@examples(100)
@given(
    acts=st.lists(
        st.one_of(st.integers(0, 400).map(lambda n: ("add", n)), st.just(("pack", 500))),
        max_size=20,
    )
)
def test_a_record_packed_in_part_has_the_same_events(acts: list[tuple[str, int]]) -> None:
    """And says what it holds."""
    made, added = record(), list[StreamEvent]()
    empty_bytes = made.size_bytes
    for act, number in acts:
        if act == "add":
            added.append(StreamEvent(len(added) + 1, b"", b"x" * number))
            made.add(added[-1])
        else:
            made.pack(number)
        assert made.events == added
        assert made.seq == (added[-1].seq if added else -1)
        packed_bytes = sum(map(len, made._packed))
        events_bytes = sum(len(each.data) + 160 for each in made._events)
        assert made.size_bytes == empty_bytes + packed_bytes + events_bytes


def test_copies_are_packed_as_they_come() -> None:
    """All that a dead peer kept comes within a second, and is not to push other records out."""
    source = record()
    for seq in range(1, 201):
        source.add(event(seq))
    source.role, source.state = RecordRole.MIRROR, StreamState(complete=True)
    book = RecordBook(max_bytes=3 * source.size_bytes)

    for n in range(10):
        copy = msgspec.structs.replace(source.copy(0.0), key=f"k{n}")
        assert book.receive(copy, "m", 0.0).ack == UpdateAck(AckStatus.STORED, 200)

    assert len(book.records) == 10
    assert book.records["k0"].events == source.events
    assert book.size_bytes == sum(each.size_bytes for each in book.records.values())


def test_an_owner_that_gave_up_a_full_mirror_is_claimed_from_before_that_mirror() -> None:
    """The mirror may still have a part of the stream."""
    mirror, outbox = RecordBook(), Outbox(record())
    outbox.assign("z")
    outbox.take(mirror.receive(outbox.next(0.0), "a", 0.0).ack)
    owner = RecordBook()
    assert owner.own(outbox.record, 0.0)

    outbox.take(UpdateAck(AckStatus.FULL))

    seen = [(name, book.version("k")) for name, book in (("a", owner), ("z", mirror))]
    best = best_of((name, each) for name, each in seen if each is not None)
    assert best is not None
    assert best[0] == "a"


def test_a_copy_that_is_not_whole_is_refused() -> None:
    """The sender must be of another version, and gets an error."""
    book, copy = RecordBook(), record().copy(0.0)

    for changes in ({"header": None}, {"first_event": 1}):
        with pytest.raises(RequestError, match="must be whole"):
            book.receive(msgspec.structs.replace(copy, **changes), "a", 0.0)


def test_a_stream_granted_here_is_kept_even_without_room() -> None:
    """Its grant is spent, so no other proxy could own it. A new stream is refused."""
    book = RecordBook(max_bytes=4000)
    assert book.own(record("other"), 0.0)
    assert book.own(record(), 0.0)
    book.end(book.records["k"], 0.0)
    for seq in range(1, 100):
        book.add(book.records["other"], event(seq))
    answer = book.claim(claim_for(book, "a-1"), 1.0)
    assert answer.granted is not None

    assert book.own(record_from(answer.granted, 1.0), 1.0)
    assert not book.own(record("new"), 1.0)
