"""The reservation of a sequence's pages at its admission, and their registration in the cache."""

from collections.abc import Iterable

from kvrs_engine.scheduling.pages import PageManager
from kvrs_engine.scheduling.sequences import Sequence, coverable_pages, pages_for, union


def reserve(pages: PageManager, sequence: Sequence, headroom: int) -> int | None:
    """Reserve pages for a sequence's whole history: cached pages, then damaged pages where peers
    can send the missing cells, else new pages.

    Returns the number of whole leading pages; None, changing nothing, if there are not enough pages
    with `headroom` left.
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
    assert new is not None, "enough pages are free"
    rest = iter(new)
    behind = range(len(found), len(found) + missing)
    sequence.pages = found + [damaged[at] if at in damaged else next(rest) for at in behind]
    return len(found)


def find_late(pages: PageManager, sequence: Sequence) -> int:
    """Replace a sequence's next pages by equal pages that were registered since its admission;
    return their number. The sequence must have computed nothing.
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
    """Register full pages of a sequence, and replace those for which an equal page is
    registered.
    """
    for index in indexes:
        page = sequence.pages[index]
        parent = sequence.tags[index - 1] if index else sequence.root
        found = pages.register(page, sequence.tags[index], parent)
        if found != page:
            # A second copy would waste a page, and a lease on it would not protect the other.
            pages.pin(found)
            pages.release([page])
            sequence.pages[index] = found


def spoil(pages: PageManager, sequence: Sequence, tokens: int) -> None:
    """Remove the damaged state and the tags of pages that the next tokens of a sequence
    overwrite.
    """
    size = pages.page_size_tokens
    first, end = sequence.computed_tokens, sequence.computed_tokens + tokens
    for index in range(first // size, pages_for(end, size)):
        if sequence.gone.pop(index, None) is not None:
            pages.damaged.spoil(sequence.pages[index])
