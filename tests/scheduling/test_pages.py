"""Claims about the page manager, one by one."""

import tracemalloc

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.tags import Tag, page_tags, root_tag
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


def test_allocation_is_all_or_nothing() -> None:
    """A request for more than there is changes nothing."""
    pages = PageManager(4, P)
    pages.allocate(2)

    refused = pages.allocate(3)

    assert refused is None
    assert pages.free_pages == 2
    pages.check()


def test_free_pages_counts_everything_without_a_hard_pin() -> None:
    """Free, cached and soft-pinned pages can all be allocated; hard-pinned ones cannot."""
    pages = PageManager(8, P)
    cached, leased, pinned = (computed_run(pages, TAGS[i : i + 2]) for i in (0, 2, 4))
    pages.release(cached)
    pages.retain(S, leased, tokens=2 * P, until_s=10.0)
    pages.release(leased)

    everything = pages.allocate(6)

    assert everything is not None
    assert not set(everything) & set(pinned)
    assert pages.free_pages == 0
    pages.check()


def test_released_computed_pages_are_found_by_their_tags() -> None:
    """A page keeps its content until it is allocated again."""
    pages = PageManager(4, P)
    run = computed_run(pages, TAGS[:3])
    pages.release(run)

    found = pages.match(TAGS[:4])

    assert found == run
    assert pages.free_pages == 1
    pages.check()


def test_match_stops_at_the_first_gap() -> None:
    """A page is of use only with all pages before it."""
    pages = PageManager(4, P)
    pages.release(computed_run(pages, [TAGS[0], TAGS[2]]))

    found = pages.match(TAGS[:3])

    assert len(found) == 1


def test_free_pages_are_given_before_cached_ones() -> None:
    """The cache is not touched while there are pages without content."""
    pages = PageManager(4, P)
    pages.release(computed_run(pages, TAGS[:2]))

    pages.allocate(2)

    assert held(pages, TAGS[:2]) == 2


def test_the_least_recently_released_page_is_evicted_first() -> None:
    """LRU by the order of release, not by the order of allocation."""
    pages = PageManager(2, P)
    first, second = computed_run(pages, TAGS[:2])
    pages.release([second])
    pages.release([first])

    pages.allocate(1)

    assert held(pages, [TAGS[0]]) == 1
    assert held(pages, [TAGS[1]]) == 0


def test_a_match_makes_a_page_recent() -> None:
    """The page that was used last is evicted last."""
    pages = PageManager(2, P)
    first, second = computed_run(pages, TAGS[:2])
    pages.release([first])
    pages.release([second])
    held(pages, [TAGS[0]])

    pages.allocate(1)

    assert held(pages, [TAGS[0]]) == 1
    assert held(pages, [TAGS[1]]) == 0


def test_a_run_that_is_released_together_is_evicted_from_its_tail() -> None:
    """A head without its tail is of use; a tail without its head is not."""
    pages = PageManager(4, P)
    pages.release(computed_run(pages, TAGS[:4]))

    pages.allocate(3)

    assert held(pages, TAGS[:4]) == 1


def test_cached_pages_go_before_leased_ones() -> None:
    """A lease is worth more than recency."""
    pages = PageManager(4, P)
    leased, cached = computed_run(pages, TAGS[:2]), computed_run(pages, TAGS[2:4])
    pages.retain(S, leased, tokens=2 * P, until_s=10.0)
    pages.release(leased)
    pages.release(cached)

    pages.allocate(2)

    assert held(pages, TAGS[:2]) == 2
    assert held(pages, TAGS[2:4]) == 0


def test_the_lease_that_ends_first_loses_its_run_from_the_tail() -> None:
    """Under pressure a lease shrinks before a later one is touched, and what is left is a leading
    run.
    """
    pages = PageManager(6, P)
    late, early = computed_run(pages, TAGS[:3]), computed_run(pages, TAGS[3:6])
    pages.retain(S, late, tokens=3 * P, until_s=20.0)
    pages.retain(OTHER, early, tokens=3 * P, until_s=10.0)
    pages.release(late)
    pages.release(early)

    taken = pages.allocate(2)

    assert taken == [early[2], early[1]]
    assert [pages.retained_page(OTHER, index) for index in range(3)] == [early[0], None, None]
    assert [pages.retained_page(S, index) for index in range(3)] == late
    pages.check()


def test_a_renewed_lease_outlives_the_others() -> None:
    """The order in which leases lose pages follows their renewals."""
    pages = PageManager(2, P)
    first, second = computed_run(pages, TAGS[:2])
    pages.retain(S, [first], tokens=P, until_s=10.0)
    pages.retain(OTHER, [second], tokens=P, until_s=11.0)
    pages.release([first, second])

    unknown = pages.renew([S, StreamId("stranger")], until_s=20.0)
    pages.allocate(1)

    assert unknown == ["stranger"]
    assert pages.retained_page(S, 0) == first
    assert pages.retained_page(OTHER, 0) is None


def test_a_page_under_two_leases_is_given_up_with_the_last() -> None:
    """A shared prefix is held as long as one lease holds it."""
    pages = PageManager(3, P)
    shared, own = computed_run(pages, TAGS[:2])
    pages.retain(S, [shared], tokens=P, until_s=10.0)
    pages.retain(OTHER, [shared, own], tokens=2 * P, until_s=20.0)
    pages.release([shared, own])

    pages.allocate(2)

    assert pages.retained_page(S, 0) is None
    assert pages.retained_page(OTHER, 0) == shared
    assert pages.retained_page(OTHER, 1) is None
    assert held(pages, TAGS[:1]) == 1


def test_a_given_up_page_is_not_returned_when_its_number_is_used_again() -> None:
    """A page number does not identify the content; the lease records what it has lost."""
    pages = PageManager(1, P)
    run = computed_run(pages, TAGS[:1])
    pages.retain(S, run, tokens=P, until_s=10.0)
    pages.release(run)

    again = computed_run(pages, TAGS[5:6])

    assert again == run
    assert pages.retained_page(S, 0) is None
    assert pages.retained_tokens(S) == 0
    assert pages.renew([S], until_s=20.0) == [S]


def test_a_partial_page_lives_exactly_as_long_as_its_lease() -> None:
    """It has no tag: without the lease its content is unknown."""
    pages = PageManager(3, P)
    run = computed_run(pages, TAGS[:1]) + (pages.allocate(1) or [])
    pages.retain(S, run, tokens=P + 3, until_s=10.0)
    pages.release(run)
    kept = pages.retained_page(S, 1), pages.retained_tokens(S)

    pages.expire(10.0)

    assert kept == (run[1], P + 3)
    assert pages.retained_page(S, 1) is None
    assert held(pages, TAGS[:1]) == 1
    assert pages.allocate(2) is not None  # Both pages but the cached one are free again.
    assert held(pages, TAGS[:1]) == 1


def test_expiry_ends_only_leases_whose_time_has_come() -> None:
    """A renewal counts, also when the lease was made before one that ends earlier."""
    pages = PageManager(2, P)
    first, second = computed_run(pages, TAGS[:2])
    pages.retain(S, [first], tokens=P, until_s=10.0)
    pages.retain(OTHER, [second], tokens=P, until_s=12.0)
    pages.renew([S], until_s=15.0)

    pages.expire(12.0)

    assert pages.retained_page(S, 0) == first
    assert pages.retained_page(OTHER, 0) is None
    pages.check()


def test_a_second_lease_of_a_stream_replaces_the_first() -> None:
    """A later attempt's hand-off is the one that counts; what both hold is not lost in between."""
    pages = PageManager(4, P)
    old = computed_run(pages, TAGS[:2])
    pages.retain(S, old, tokens=2 * P, until_s=10.0)
    pages.release(old)

    pages.retain(S, old[:1], tokens=P, until_s=5.0)

    assert pages.retained_page(S, 0) == old[0]
    assert pages.retained_page(S, 1) is None
    pages.expire(5.0)
    assert pages.retained_page(S, 0) is None
    pages.check()


def test_a_page_being_sent_survives_the_end_of_its_lease() -> None:
    """A hard pin holds whatever becomes of the soft one."""
    pages = PageManager(1, P)
    run = pages.allocate(1)
    assert run is not None
    pages.retain(S, run, tokens=2, until_s=10.0)
    pages.release(run)
    pages.pin(run[0])

    pages.unretain([S, OTHER])

    assert pages.allocate(1) is None
    pages.release(run)
    assert pages.allocate(1) == run


def test_the_first_copy_of_a_page_is_the_one_that_is_found() -> None:
    """A second copy of an equal page stays private and is free when it is released."""
    pages = PageManager(2, P)
    first, second = (pages.allocate(1) or [])[0], (pages.allocate(1) or [])[0]
    assert pages.register(first, TAGS[0]) == first

    found = pages.register(second, TAGS[0])

    assert found == first
    pages.release([second])
    assert pages.allocate(1) == [second]
    pages.check()


def test_two_sequences_share_the_pages_of_a_common_prefix() -> None:
    """A shared page is free only when both have let go."""
    pages = PageManager(2, P)
    mine = computed_run(pages, TAGS[:2])
    yours = pages.match(TAGS[:2])

    pages.release(mine)

    assert yours == mine
    assert pages.free_pages == 0
    pages.release(yours)
    assert pages.free_pages == 2
    pages.check()


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


def test_reset_forgets_everything_without_a_hard_pin() -> None:
    """After a reset only pages in use can be found."""
    pages = PageManager(6, P)
    used, cached, leased = (computed_run(pages, TAGS[i : i + 2]) for i in (0, 2, 4))
    pages.retain(S, leased, tokens=2 * P, until_s=10.0)
    pages.release(cached)
    pages.release(leased)

    pages.reset_cache()

    assert held(pages, TAGS[2:4]) == held(pages, TAGS[4:6]) == 0
    assert pages.retained_page(S, 0) is None
    assert held(pages, TAGS[:2]) == len(used)


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
