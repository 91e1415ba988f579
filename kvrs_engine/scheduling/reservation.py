"""The pages that a sequence gets when it is admitted, and those of them that others then find."""

from collections.abc import Iterable

from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Sequence, coverable_pages, pages_for, union


def reserve(pages: PageManager, sequence: Sequence, headroom: int) -> int | None:
    """Give a sequence pages for its whole history: from the prefix cache what is there; behind
    that, where peers hold a page, what this instance has left of it; else new ones.

    Returns how many leading pages are whole. None: there are not so many pages, and `headroom`
    more; nothing has changed then.
    """
    size = pages.page_size_tokens
    coverable = coverable_pages(sequence, size)
    found = pages.match(sequence.tags[:coverable])
    missing = pages_for(len(sequence.token_ids), size) - len(found)
    if missing + headroom > pages.free_pages:
        pages.release(found)
        return None
    if found:
        sequence.base = pages.bases[found[0]]
    sequence.gone, damaged = {}, {}
    for span in union(sequence.pulls, len(found), coverable):
        for index in span:
            if (mended := pages.mend(sequence.tags[index], sequence.base)) is not None:
                damaged[index], sequence.gone[index] = mended
    new = pages.allocate(missing - len(damaged), sequence.base)
    assert new is not None, "as many as there were"
    rest = iter(new)
    behind = range(len(found), len(found) + missing)
    sequence.pages = found + [damaged[at] if at in damaged else next(rest) for at in behind]
    return len(found)


def find_late(pages: PageManager, sequence: Sequence) -> int:
    """Let a sequence that has only pages of the cache, and new ones, use those that others have
    computed since it was admitted. Returns how many more leading pages are whole.
    """
    size = pages.page_size_tokens
    first, end = sequence.computed_tokens // size, coverable_pages(sequence, size)
    if first >= end or not pages.holds(sequence.tags[first]):
        return 0
    found = pages.match(sequence.tags[first:end])
    if pages.bases[found[0]] != sequence.base:
        pages.release(found)
        return 0
    pages.release(sequence.pages[first : first + len(found)])
    sequence.pages[first : first + len(found)] = found
    return len(found)


def register(pages: PageManager, sequence: Sequence, indexes: Iterable[int]) -> None:
    """Register full pages of a sequence; where an equal page was registered before, the sequence
    uses that one.
    """
    for index in indexes:
        page = sequence.pages[index]
        parent = sequence.tags[index - 1] if index else sequence.root
        found = pages.register(page, sequence.tags[index], parent)
        if found != page:
            # Two copies would waste one, and a lease on ours would protect the copy that cannot be
            # found.
            pages.pin(found)
            pages.release([page])
            sequence.pages[index] = found


def spoil(pages: PageManager, sequence: Sequence, tokens: int) -> None:
    """The next tokens of a sequence are computed, so what was left of pages in which they are, and
    has not come whole, is not there any more.
    """
    size = pages.page_size_tokens
    first, end = sequence.computed_tokens, sequence.computed_tokens + tokens
    for index in range(first // size, pages_for(end, size)):
        if sequence.gone.pop(index, None) is not None:
            pages.damaged.spoil(sequence.pages[index])
