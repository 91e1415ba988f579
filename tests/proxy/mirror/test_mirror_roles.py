"""Tables of the mirror: every role with every message, and the pairs of roles that come of them."""

from itertools import product

import msgspec

from kvrs.ids import StreamId
from kvrs.protocol.mirror import (
    AckStatus,
    Claim,
    Refusal,
    StreamEvent,
    StreamHeader,
    UpdateAck,
    pack_ids,
)
from kvrs.proxy.mirror.book import _DROPPED_S, CopyQueue, Outbox, Received, RecordBook
from kvrs.proxy.mirror.records import (
    CLAIM_S,
    ROLE_AFTER,
    STEP_WITHOUT_RECORD,
    STEPS,
    Message,
    PresentPeers,
    Record,
    RecordRole,
    Relation,
    RoleChange,
    UpdateStep,
)

T = PresentPeers(frozenset("t"), frozenset("t"))
HEADER = StreamHeader(b"digest", 7, (None, None, None), 0.0, 0.0)


def record(mirror_no: int = 0, owner_epoch: int = 0, events: int = 0) -> Record:
    made = Record("k", StreamId("ab"), HEADER, 0.0, "a-1", owner_epoch, mirror_no)
    for seq in range(1, events + 1):
        made.add(StreamEvent(seq, pack_ids([seq]), b"event"))
    return made


def book_in(role: RecordRole, kept: Record) -> RecordBook:
    """A book with a record in this role; its peer is `p`."""
    book = RecordBook()
    if role.is_owner:
        assert book.own(kept, 0.0)
        Outbox(kept).assign("p" if role is RecordRole.MIRRORED else None)
        return book
    update = kept.copy(0.0) if role is RecordRole.COPY else kept.update(0.0)
    assert book.receive(update, "p", 0.0).ack.status is AckStatus.STORED
    return book


def claim_of(book: RecordBook) -> Claim:
    version = book.version("k")
    assert version is not None
    return Claim("k", "c-1", version, b"digest")


def test_the_tables_are_total() -> None:
    """Every role has an entry for every message in every relation, and for every change."""
    assert set(STEPS) == set(product(Message, Relation))
    assert all(set(row) == set(RecordRole) for row in STEPS.values())
    assert set(STEP_WITHOUT_RECORD) == set(Message)
    assert set(ROLE_AFTER) == set(RoleChange)
    assert all(set(row) == set(RecordRole) for row in ROLE_AFTER.values())


def test_a_record_gets_the_role_that_it_was_received_in() -> None:
    """`book_in` reaches every role, by the messages that lead to it."""
    for role in RecordRole:
        kept = book_in(role, record()).records["k"]
        assert kept.role is role
        assert kept.peer == (None if role is RecordRole.UNMIRRORED else "p")


def test_only_unmirrored_and_mirror_grant_claims() -> None:
    """The pairs MIRRORED + MIRROR and MIRROR + COPY have one proxy that grants."""
    for role in RecordRole:
        book = book_in(role, record())

        answer = book.claim(claim_of(book), 1.0)

        assert (answer.granted is not None) == (role in (RecordRole.UNMIRRORED, RecordRole.MIRROR))
        assert answer.refusal is (None if answer.granted is not None else Refusal.BUSY)


def test_a_role_without_a_peer_grants_claims() -> None:
    """Otherwise the last proxy with a record could never grant it."""
    for role in RecordRole:
        book = book_in(role, record())
        book.lose("p")

        assert book.records["k"].peer is None
        assert book.records["k"].role.grants


def test_a_stream_that_ends_leaves_the_role_of_its_peer_complementary() -> None:
    """The owner of a mirrored stream keeps a copy; an unmirrored one keeps the grant."""
    after = {}
    for role in (RecordRole.UNMIRRORED, RecordRole.MIRRORED):
        book = book_in(role, record())
        book.end(book.records["k"], 1.0)
        after[role] = book.records["k"].role

    assert after == {RecordRole.UNMIRRORED: RecordRole.MIRROR, RecordRole.MIRRORED: RecordRole.COPY}


def test_only_a_record_that_is_replaced_stops_a_stream() -> None:
    """A stream that runs here stops exactly if a later record takes the place of its own."""
    updates = {
        Relation.OUTRANKED: record(owner_epoch=1, mirror_no=5),
        Relation.STALE: record(owner_epoch=2, mirror_no=1),
        Relation.NEWER: record(owner_epoch=3),
    }
    for role, message, relation in product(RecordRole, (Message.HEADER, Message.COPY), updates):
        book = book_in(role, record(owner_epoch=2, mirror_no=2))
        sent = updates[relation]
        update = sent.copy(0.0) if message is Message.COPY else sent.update(0.0)

        received = book.receive(update, "s", 1.0)

        step = STEPS[message, relation][role]
        assert received.stops_local_stream == (step is UpdateStep.STORE and role.is_owner)
        assert (book.records["k"].peer == "s") == (step is UpdateStep.STORE)


def test_the_holder_of_a_copy_grants_claims_once_its_peer_drops_the_record() -> None:
    """The peer sent an older copy, and drops it on the answer. Otherwise no proxy would grant the
    stream until it expires.
    """
    book = book_in(RecordRole.COPY, record(mirror_no=2))

    received = book.receive(record(mirror_no=1).copy(0.0), "p", 1.0)

    assert received == Received(UpdateAck(AckStatus.SUPERSEDED))
    assert book.claim(claim_of(book), 1.0).granted is not None


def test_a_copy_that_is_passed_on_leaves_the_grant_with_its_sender() -> None:
    """A record whose peer is not live is copied on, whichever role it had; of the two, the sender
    grants.
    """
    book, third, now_s = book_in(RecordRole.COPY, record(events=2)), RecordBook(), 2 * CLAIM_S
    queue = CopyQueue(book)
    assert queue.plan(T, now_s) == {"t"}
    (sent,) = queue.records_for("t")
    update = sent.copy(now_s)

    queue.take(sent, update, "t", third.receive(update, "b", now_s).ack, T)

    assert (book.records["k"].role, book.records["k"].peer) == (RecordRole.MIRROR, "t")
    assert third.records["k"].role is RecordRole.COPY
    assert queue.plan(T, now_s) == set()


def test_of_peers_that_leave_the_one_that_grants_sees_to_a_copy() -> None:
    """A proxy that holds a copy leaves it alone while the one that grants is up, so that no two of
    them grant; that one sends a copy to a peer that stays, if there is one.
    """
    stays = PresentPeers(frozenset("pt"), frozenset("t"))  # `p` is about to end.
    for role, targets in ((RecordRole.MIRROR, {"t"}), (RecordRole.COPY, set())):
        book, third = book_in(role, record(events=2)), RecordBook()
        queue = CopyQueue(book)

        assert queue.plan(PresentPeers(frozenset("p"), frozenset("p")), 1.0) == set()
        assert queue.plan(stays, 1.0) == targets
        for sent in queue.records_for("t"):
            ack = third.receive(sent.copy(1.0), "b", 1.0).ack
            queue.take(sent, sent.copy(1.0), "t", ack, stays)

        assert book.records["k"].role is role
        assert queue.plan(stays, 1.0) == set()


def test_a_copy_refused_for_want_of_room_waits_for_a_change_of_peers() -> None:
    """It is not sent again and again to a full peer."""
    book = book_in(RecordRole.MIRROR, record())
    queue = CopyQueue(book)
    queue.plan(T, 1.0)
    (sent,) = queue.records_for("t")

    queue.take(sent, sent.copy(1.0), "t", UpdateAck(AckStatus.FULL), T)

    assert queue.plan(T, 1.0) == set()
    queue.peers_changed(T)
    assert queue.plan(T, 1.0) == {"t"}


def test_a_copy_of_the_same_owner_does_not_stop_its_stream() -> None:
    """Even with more events, or for a later mirror: only a later owner takes a stream over."""
    for ahead in (record(events=3), record(mirror_no=9)):
        book = book_in(RecordRole.UNMIRRORED, record(events=1))

        received = book.receive(ahead.copy(0.0), "s", 1.0)

        assert received == Received(UpdateAck(AckStatus.STORED, 1))
        assert msgspec.structs.asdict(book.records["k"].update(0.0))["owner_epoch"] == 0


def test_a_deleted_record_is_refused_while_anything_of_it_may_be_on_its_way() -> None:
    """The book remembers a limited number of deletions, for a while; then a key may be reused."""
    book, kept = RecordBook(max_records=2), record(events=1)
    for key in ("another", "a third", "k"):
        book.forget(key, dropped_s=0.0)

    book.expire(_DROPPED_S - 1.0)
    for sent in (kept.update(0.0), kept.copy(0.0)):
        assert book.receive(sent, "p", 0.0).ack.status is AckStatus.SUPERSEDED
    assert len(book._dropped) == 2
    book.expire(_DROPPED_S)

    assert not book._dropped
    assert book.receive(kept.update(0.0), "p", 0.0).ack.status is AckStatus.STORED
