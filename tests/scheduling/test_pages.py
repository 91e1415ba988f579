"""Claims about the page manager that its model (`test_pages_machine.py`) does not have."""

import tracemalloc

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.pages import Tag, page_tags, root_tag
from kvrs_engine.scheduling.pages import PageManager

S, OTHER = StreamId("s"), StreamId("other")
P = 4  # Tokens per page.
TAGS = page_tags(root_tag("model"), list(range(10 * P)), P)


def computed_run(pages: PageManager, tags: list[Tag]) -> list[int]:
    """A run of computed pages, still with its hard pins."""
    run = pages.allocate(len(tags))
    assert run is not None
    for page, tag in zip(run, tags, strict=True):
        pages.register(page, tag)
    return run


def held(pages: PageManager, tags: list[Tag]) -> int:
    """How long a leading run of `tags` can be found; leaves all pins as they were (but refreshes
    what it finds).
    """
    run = pages.match(tags)
    pages.release(run)
    pages.check()
    return len(run)


def test_a_second_release_is_our_bug() -> None:
    """Books that do not agree stop the process instead of giving one page to two owners."""
    pages = PageManager(2, P)
    run = pages.allocate(1)
    assert run is not None
    pages.release(run)

    with pytest.raises(AssertionError, match="once too often"):
        pages.release(run)


def test_pinning_a_free_page_is_our_bug() -> None:
    """There is nothing in it, and the next owner would not know of the pin."""
    pages = PageManager(2, P)

    with pytest.raises(AssertionError, match="is free"):
        pages.pin(0)
    with pytest.raises(AssertionError, match="is free"):
        pages.retain(S, [0], tokens=1, until_s=1.0)


def test_what_is_left_of_a_page_goes_to_one_owner_of_its_base() -> None:
    """It is found by none before its cells are there again, and can be taken as any cached page."""
    pages = PageManager(3, P)
    run = pages.allocate(3, base=1)
    assert run is not None
    for page, tag in zip(run, TAGS[:3], strict=True):
        pages.register(page, tag)
    pages.release(run)
    gone = {run[0]: frozenset({(0, 1)}), run[1]: frozenset({(0, 1), (2, 0)})}

    pages.lose(lambda page: gone.get(page, frozenset()))

    assert (held(pages, TAGS[:1]), held(pages, TAGS[2:3])) == (0, 1)
    assert pages.mend(TAGS[0], base=0) is None
    assert pages.mend(TAGS[0], base=1) == (run[0], gone[run[0]])
    assert pages.mend(TAGS[0], base=1) is None
    pages.damaged.brought(run[0], frozenset({(2, 0)}))
    pages.register(run[0], TAGS[0])
    assert held(pages, TAGS[:1]) == 1
    pages.allocate(2)
    assert pages.mend(TAGS[1], base=1) is None
    pages.check()


def test_what_has_not_come_of_a_page_is_there_for_the_next_owner() -> None:
    """Also where cells are lost before it has come, and while what comes is still written; a page
    that is computed anew is new.
    """
    pages, one, other = PageManager(3, P), frozenset({(0, 1)}), frozenset({(2, 0)})
    run = computed_run(pages, TAGS[:2])
    pages.release(run)
    pages.lose(lambda page: one)
    assert pages.mend(TAGS[0]) == (run[0], one)
    assert pages.mend(TAGS[1]) == (run[1], one)

    pages.release(run[1:])
    pages.lose(lambda page: other)
    pages.damaged.brought(run[0], one)

    assert pages.mend(TAGS[0]) == (run[0], other)
    assert pages.mend(TAGS[1]) == (run[1], one | other)
    pages.release(run[:1])
    assert pages.mend(TAGS[0]) is None
    pages.damaged.spoil(run[0])
    pages.release(run[:1])
    assert pages.mend(TAGS[0]) is None
    assert held(pages, TAGS) == 0
    pages.check()


def test_leases_given_back_early_leave_no_litter() -> None:
    """The normal end of a stream gives its lease back; the order of ends must not grow for ever by
    it.
    """
    pages = PageManager(1, P)
    run = computed_run(pages, TAGS[:1])

    for number in range(1000):
        pages.retain(StreamId(str(number)), run, tokens=P, until_s=float("inf"))
        pages.unretain([StreamId(str(number))])

    assert len(pages._ends._ends) < 100
    pages.check()


def test_pages_of_one_chain_have_one_base() -> None:
    """A run is found up to the first page of another base; an equal page of another base stays with
    its owner, and is not found.
    """
    pages = PageManager(8, P)
    first, other = pages.allocate(2, base=1), pages.allocate(3, base=2)
    assert first is not None
    assert other is not None
    for page, tag in zip(first, TAGS, strict=False):
        pages.register(page, tag)

    kept = [pages.register(page, tag) for page, tag in zip(other, TAGS, strict=False)]

    assert kept == other
    assert held(pages, TAGS) == 2
    assert {pages.bases[page] for page in first} == {1}
    pages.release(other)
    pages.release(first)
    again = pages.allocate(8)
    assert again is not None
    assert not any(pages.bases[page] for page in again)


def test_disowned_pages_are_found_no_more_and_stay_with_those_that_have_them() -> None:
    """Others may have some of them. All are free once nothing refers to them."""
    pages = PageManager(8, P)
    run = computed_run(pages, TAGS[:3])
    shared = pages.match(TAGS[:2])
    pages.retain(S, run, tokens=3 * P, until_s=10.0)

    pages.disown(run)

    assert held(pages, TAGS[:3]) == 0
    pages.release(run)
    pages.release(shared)
    pages.check()
    pages.unretain([S])
    pages.check()
    again = computed_run(pages, TAGS[:3])
    assert held(pages, TAGS[:3]) == 3
    pages.release(again)
    assert pages.free_pages == 8


def test_adopted_pages_are_cached_and_evicted_least_recently_used_first() -> None:
    """The others are free, and given before them."""
    pages = PageManager(4, P)
    old, new = TAGS[0], TAGS[1]

    pages.adopt([(2, old), (0, new)])

    pages.check()
    assert pages.free_pages == 4
    assert pages.allocate(3) == [1, 3, 2]
    assert [pages.holds(tag) for tag in (old, new)] == [False, True]
    assert pages.match([new]) == [0]


def test_a_new_pool_takes_a_few_bytes_a_page() -> None:
    """A simulator has thousands of pools, of which most pages are never used."""
    pages = 10_000
    tracemalloc.start()
    try:
        pool = PageManager(pages, page_size_tokens=16)
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert pool.free_pages == pages
    assert size_bytes < 30 * pages


def test_pools_of_a_process_share_the_numbers_of_their_pages() -> None:
    """Each would take 32 bytes for every page that a sequence has, or that is found by its tag."""
    given = []
    for pages in (PageManager(1000, P), PageManager(1000, P)):
        pages.allocate(900)
        (page,) = computed_run(pages, TAGS[:1])
        (found,) = pages.match(TAGS[:1])
        pages.release([page, found])
        pages.allocate(98)
        evicted = pages.allocate(2)
        assert evicted is not None
        pages.release([999])
        pages.replicas.most = 1
        given.append([page, found, *evicted, pages.allocate_replica(S)])

    one, other = given

    assert one == [900, 900, 999, 900, 999]
    assert all(page is same for page, same in zip(one, other, strict=True))
