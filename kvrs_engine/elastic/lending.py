"""Loans of a pipeline stage's KV pages to an instance that has lost its own host of that stage
(KevlarFlow): the decision on a request, and the number of pages.
"""

from collections import deque
from dataclasses import dataclass

# Iterative copy when a stage returns to its own instance: batches stop for the last copy, of at
# most this many pages or after this many rounds.
FEW_PAGES = 8
MOST_ROUNDS = 4

LEND_PAGES = 0.5  # The largest share of its KV pages that an instance lends at each stage.
_WINDOW_S = 5.0


class BusyShare:
    """Measures the share of the last seconds in which a stage computed."""

    def __init__(self, ranks: int) -> None:
        """`ranks` is the number of ranks of the stage, which compute in parallel."""
        self._ranks = ranks
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, worked_s: float) -> None:
        """Note the cumulative processor time of all ranks; a lower value than before is a reset."""
        if self._seen and worked_s < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, worked_s))
        # Keep one sample from before the window, so that the samples cover all of it.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()

    def share(self, now_s: float) -> float:
        """Return the busy share, from 0 to 1; 0 if nothing is known."""
        if not self._seen:
            return 0.0
        before = [seen for seen in self._seen if seen[0] <= now_s - _WINDOW_S]
        first_s, first_worked_s = before[-1] if before else self._seen[0]
        if now_s <= first_s:
            return 0.0
        worked_s = self._seen[-1][1] - first_worked_s
        return min(1.0, worked_s / self._ranks / (now_s - first_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lender:
    """The state of an instance that is asked for a loan."""

    pages: int  # All KV pages of the instance.
    spare_pages: int  # Pages that no stream holds, and pages lent at other stages.
    lent_pages: int  # Pages already lent at that stage, and free pages that cannot be lent.
    busy: float  # Share of the time in which the stage computes.
    least_gain: float  # Setting `elastic.least_gain`.
    refusal: str | None = None  # The reason why the instance can lend no page now.


def terms(lender: Lender, pages: int, least_pages: int, busy: float) -> int | str:
    """Return the number of pages to lend, at most `pages`, or the reason for a refusal. `busy` is
    the share of the time in which the borrower's stage computed.
    """
    if lender.refusal is not None:
        return lender.refusal
    gain = min(1.0, (1 - lender.busy) / busy) if busy else 1.0
    if gain < lender.least_gain:
        return (
            f"the stage computes {lender.busy:.0%} of the time, which leaves a gain of "
            f"{gain:.2f}; allowed: {lender.least_gain} (elastic.least_gain) or above"
        )
    most = min(int(LEND_PAGES * lender.pages) - lender.lent_pages, lender.spare_pages)
    if most < least_pages:
        return f"{most} pages could be lent; allowed: {least_pages} or more"
    return min(most, pages)
