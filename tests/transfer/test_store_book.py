"""Reservations and slots of a checkpoint store, beyond what its machine asks."""

from kvrs.ids import StreamId
from kvrs.protocol.pages import CheckpointClaim, HeldPages, StoreCode, Tag, page_tags, root_tag
from kvrs.transfer.store.book import CheckpointBook

S, T, U = StreamId("s"), StreamId("t"), StreamId("u")
OK, FENCED, FULL = StoreCode.OK, StoreCode.FENCED, StoreCode.FULL


def tags(family: int, pages: int, shared: int = 0) -> tuple[Tag, ...]:
    """Tags of a stream's pages; the first `shared` of them are those of every family."""
    return tuple(page_tags(root_tag("model"), [0] * shared + [family] * (pages - shared), 1))


def store(
    book: CheckpointBook, claim: CheckpointClaim, first: int, some: tuple[Tag, ...]
) -> HeldPages:
    """Send pages, as a connection does when all goes well."""
    incoming = book.begin(claim, first, some)
    for position, number in enumerate(incoming.slots):
        if number is not None:
            book.commit(incoming, position)
    return book.end(incoming)


def filled(capacity: int, stream: StreamId, pages: tuple[Tag, ...]) -> CheckpointBook:
    """A store that holds those pages under a reservation of just as many."""
    book = CheckpointBook(capacity)
    claim = CheckpointClaim(stream, 0, 1)
    assert book.offer(claim, len(pages), pages, until_s=10.0) == HeldPages(OK, 0)
    assert store(book, claim, 0, pages) == HeldPages(OK, len(pages))
    return book


def test_a_page_that_finds_no_slot_is_taken_when_readers_are_done() -> None:
    """A slot that is read is not overwritten, and the writer is told how many pages are kept."""
    book = filled(4, S, tags(1, 3))
    book.release([S], until_s=20.0)
    read, claim, pages = book.match(tags(1, 3)), CheckpointClaim(T, 0, 1), tags(2, 3)
    book.offer(claim, 3, (), until_s=10.0)

    early = store(book, claim, 0, pages)
    book.unpin(read)

    assert early == HeldPages(OK, 1)
    assert store(book, claim, 1, pages[1:]) == HeldPages(OK, 3)
    book.check([])


def test_pages_of_another_way_replace_those_that_are_here_from_there_on() -> None:
    """Also where the claim is the same, whichever instance has computed them."""
    book, claim, other = filled(3, S, tags(1, 3)), CheckpointClaim(S, 0, 1), tags(2, 3)
    there = tags(1, 1) + other[1:]

    offered = book.offer(claim, 3, there[:2], until_s=10.0)

    assert offered == HeldPages(OK, 1)
    assert store(book, claim, 1, there[1:]) == HeldPages(OK, 3)
    assert len(book.match(there)) == 3


def test_a_range_outlives_the_reservation_that_it_was_meant_for() -> None:
    """Its slots are busy until the connection ends; what arrived whole is kept while there is
    room.
    """
    book, claim = CheckpointBook(2), CheckpointClaim(S, 0, 1)
    book.offer(claim, 2, (), until_s=10.0)
    incoming = book.begin(claim, 0, tags(1, 2))
    book.release([S], until_s=20.0)

    book.commit(incoming, 0)

    assert book.end(incoming) == HeldPages(OK, 0)
    assert book.held_slots == 1
    book.check([])


def test_a_new_writer_has_no_pages_before_its_offer() -> None:
    """Those that are here may be another way that the stream went; they are found by their tags."""
    book, claim = filled(4, S, tags(1, 2)), CheckpointClaim(S, 0, 2)

    early = store(book, claim, 2, tags(1, 3)[2:])

    assert early == HeldPages(OK, 0)
    assert book.offer(claim, 3, tags(1, 2), until_s=10.0) == HeldPages(OK, 2)
    assert store(book, claim, 2, tags(1, 3)[2:]) == HeldPages(OK, 3)


def test_a_gap_is_answered_with_what_is_held() -> None:
    """So that the writer goes back there."""
    book = filled(10, S, tags(1, 2))
    book.offer(CheckpointClaim(S, 0, 1), 6, tags(1, 2), until_s=10.0)

    incoming = book.begin(CheckpointClaim(S, 0, 1), 3, tags(1, 6)[3:])

    assert incoming.slots == [None] * 3
    assert book.end(incoming) == HeldPages(OK, 2)


def test_a_run_may_begin_where_another_one_is_still_arriving() -> None:
    """One frame carries several ranges of a stream; what comes second waits for the first."""
    book = CheckpointBook(10)
    claim, pages = CheckpointClaim(S, 0, 1), tags(1, 4)
    book.offer(claim, 4, (), until_s=10.0)
    first, second = book.begin(claim, 0, pages[:2]), book.begin(claim, 2, pages[2:])

    for position in (0, 1):
        book.commit(second, position)
    early = book.end(second)
    for position in (0, 1):
        book.commit(first, position)

    assert early == HeldPages(OK, 0)
    assert book.end(first) == HeldPages(OK, 4)
    book.check()


def test_a_page_that_arrives_twice_at_once_is_received_once() -> None:
    """Prefill and decode may both send a prompt's page: what was reserved for it has room for
    one.
    """
    book = CheckpointBook(2)
    claim, pages = CheckpointClaim(S, 0, 1), tags(1, 2)
    book.offer(claim, 2, (), until_s=10.0)
    one = book.begin(claim, 0, pages)
    two = book.begin(claim, 0, pages)

    assert two.slots == [None, None]
    assert book.end(two) == HeldPages(OK, 0)
    book.commit(one, 0)
    book.commit(one, 1)
    assert book.end(one) == HeldPages(OK, 2)


def test_a_page_that_two_streams_bring_at_once_is_kept_once() -> None:
    """The slot of the second one is free again."""
    book = CheckpointBook(4)
    page = tags(0, 1)
    for stream in (S, T):
        book.offer(CheckpointClaim(stream, 0, 1), 1, (), until_s=10.0)
    ranges = [book.begin(CheckpointClaim(stream, 0, 1), 0, page) for stream in (S, T)]

    kept = [book.commit(incoming, 0) for incoming in ranges]

    assert kept == [0, None]
    assert [book.end(incoming) for incoming in ranges] == [HeldPages(OK, 1), HeldPages(OK, 1)]
    assert book.held_slots == 1
    book.check()


def test_only_pages_without_a_reservation_make_room_least_recently_used_first() -> None:
    """And of one incoming its tail first: the beginning is worth more."""
    book = filled(5, S, tags(1, 2))
    book.offer(CheckpointClaim(T, 0, 1), 2, (), until_s=10.0)
    store(book, CheckpointClaim(T, 0, 1), 0, tags(2, 2))
    book.release([S], until_s=20.0)

    book.offer(CheckpointClaim(U, 0, 1), 2, (), until_s=10.0)
    store(book, CheckpointClaim(U, 0, 1), 0, tags(3, 2))

    assert len(book.match(tags(1, 2))) == 1
    assert len(book.match(tags(2, 2))) == 2
    book.check()


def test_what_was_read_gives_way_tail_first() -> None:
    """A later reader of a history finds its beginning."""
    book = filled(3, S, tags(1, 2))
    book.release([S], until_s=20.0)
    book.unpin(book.match(tags(1, 2)))

    book.offer(CheckpointClaim(T, 0, 1), 2, (), until_s=10.0)
    store(book, CheckpointClaim(T, 0, 1), 0, tags(2, 2))

    assert len(book.match(tags(1, 2))) == 1


def test_pages_that_an_attempt_has_yet_to_compute_are_not_those_of_the_one_before() -> None:
    """It tells of its history only, and goes another way behind it; what it is told that it need
    not send it would never send.
    """
    ways = (
        tuple(page_tags(root_tag("model"), [1, 1, 1, 1], 1)),
        tuple(page_tags(root_tag("model"), [1, 1, 2, 2], 1)),
    )
    book, claim = filled(4, S, ways[0]), CheckpointClaim(S, 0, 2)

    offered = book.offer(claim, 4, ways[1][:1], until_s=10.0)
    answers = [store(book, claim, 1, ways[1][1:2]), store(book, claim, 2, ways[1][2:])]

    assert [offered, *answers] == [HeldPages(OK, 1), HeldPages(OK, 2), HeldPages(OK, 4)]
    assert len(book.match(ways[1])) == 4
    book.check()


def test_adopted_pages_are_found_and_give_way_in_the_order_of_their_age() -> None:
    """Nothing is reserved after a restart."""
    book = CheckpointBook(4)
    old, new = tags(1, 1)[0], tags(2, 1)[0]

    book.adopt([(3, old), (1, new), (2, old)])

    book.check()
    assert book.held_slots == 2
    book.offer(CheckpointClaim(S, 0, 1), 3, (), until_s=10.0)
    store(book, CheckpointClaim(S, 0, 1), 0, tags(3, 3))
    assert (book.match([old]), book.match([new])) == ([], [1])


def test_slots_between_adopted_ones_are_used_lowest_first() -> None:
    """The memory of a store grows only as needed."""
    book = CheckpointBook(8)
    book.adopt([(4, tags(1, 1)[0]), (1, tags(2, 1)[0])])
    book.offer(CheckpointClaim(S, 0, 1), 4, (), until_s=10.0)

    incoming = book.begin(CheckpointClaim(S, 0, 1), 0, tags(3, 4))

    assert incoming.slots == [0, 2, 3, 5]
    book.end(incoming)
    book.check()


def test_stores_of_a_process_share_the_numbers_of_their_slots() -> None:
    """Each would take 32 bytes for every page that is reserved or held."""
    given = []
    for _ in range(2):
        book, claim = filled(400, S, tags(1, 400)), CheckpointClaim(T, 0, 1)
        found = book.match(tags(1, 400))
        book.unpin(found)
        book.release([S], until_s=11.0)
        book.offer(claim, 400, (), until_s=10.0)
        evicted = book.begin(claim, 0, tags(2, 1))
        slots = [found[399], *evicted.slots]
        book.end(evicted)
        given.append([*slots, *book.begin(claim, 0, tags(2, 1)).slots])

    one, other = given

    assert one == [399, 399, 399]
    assert all(slot is same for slot, same in zip(one, other, strict=True))
