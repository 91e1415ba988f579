"""Pages of other instances' streams in the pool of this one: what is found, reported and given
up.
"""

from kvrs.ids import StreamId
from kvrs.protocol.pages import HeldPages, StoreCode, Tag, page_tags, root_tag
from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.replicas import ReplicaBook

PAGES = 12
A = StreamId("a")
TAGS: list[Tag] = page_tags(root_tag("model"), [1] * 24, 4)


def send(book: ReplicaBook, span: range) -> HeldPages:
    run = book.begin(A, span.start, TAGS[span.start : span.stop])
    for index, page in enumerate(run.taken):
        if page is not None:
            book.arrived(run, index)
    return book.end(run)


def test_a_stream_that_comes_here_has_them_as_its_own() -> None:
    pages = PageManager(PAGES, 4)
    book = ReplicaBook(pages, 0.5, lambda: 0.0)
    book.offer(A, [])
    assert send(book, range(4)) == HeldPages(StoreCode.OK, 4)
    found = pages.match(TAGS[:4])
    assert len(found) == 4
    assert len(pages.replicas) == 0
    pages.release(found)
    assert book.offer(A, TAGS[:4]) == HeldPages(StoreCode.OK, 4)
    pages.check()


def test_own_streams_take_the_room_and_the_loss_is_reported() -> None:
    pages, now_s = PageManager(PAGES, 4), [0.0]
    book = ReplicaBook(pages, 0.5, lambda: now_s[0])
    book.offer(A, [])
    send(book, range(4))
    assert book.changed() == {A: 4}
    now_s[0] = 5.0
    assert book.changed() == {}
    own = pages.allocate(PAGES - 2)
    assert own is not None
    assert book.changed() == {A: 2}
    assert pages.replicas.dropped == 2
    assert len(pages.match(TAGS[:4])) == 2
    pages.release(own)
    assert send(book, range(2, 4)) == HeldPages(StoreCode.OK, 4)
    pages.check()


def test_an_instance_without_room_for_replicas_says_so() -> None:
    book = ReplicaBook(PageManager(PAGES, 4), 0.01, lambda: 0.0)

    assert book.offer(A, []) == HeldPages(StoreCode.FULL, 0)
