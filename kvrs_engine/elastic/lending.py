"""Loans of pages of a stage, from the instance that has it to one of which the own host is lost
(KevlarFlow): whether one is given, and how large it is.

Pure: moments are arguments.
"""

from collections import deque
from dataclasses import dataclass

# Batches stop for a stage that goes home while so many pages are copied, or what was written while
# others were.
FEW_PAGES = 8
MOST_ROUNDS = 4

# The largest part of its KV pages that an instance of a group lends, at each of its stages.
LEND_PAGES = 0.5
_WINDOW_S = 5.0


class BusyShare:
    """The share of the last seconds in which a stage computed."""

    def __init__(self, ranks: int) -> None:
        """`ranks`: of the stage, which compute at the same time."""
        self._ranks = ranks
        self._seen: deque[tuple[float, float]] = deque()

    def note(self, now_s: float, worked_s: float) -> None:
        """`worked_s`: processor time of all ranks, since some moment; less than before: since a
        later one.
        """
        if self._seen and worked_s < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now_s, worked_s))
        # One before the window is left, so that all of it is covered.
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()

    def share(self, now_s: float) -> float:
        """0 to 1; 0 where nothing is known."""
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
    """An instance that is asked for a loan."""

    pages: int  # All of its pages.
    spare_pages: int  # That no stream holds, or that are lent at other stages.
    lent_pages: int  # By now, at that stage; and others that no stream has, which it cannot lend.
    busy: float  # The share of the time in which the stage computes.
    least_gain: float  # Section `elastic`.
    refusal: str | None = None  # Why it can lend nothing now.


def terms(lender: Lender, pages: int, least_pages: int, busy: float) -> int | str:
    """How many of the wanted pages it lends, or why none; `busy`: the share of the time in which
    the borrower's stage computed.
    """
    if lender.refusal is not None:
        return lender.refusal
    gain = min(1.0, (1 - lender.busy) / busy) if busy else 1.0
    if gain < lender.least_gain:
        return (
            f"its stage computes {lender.busy:.0%} of the time, which leaves a gain of "
            f"{gain:.2f}; allowed: {lender.least_gain} (elastic.least_gain) or above"
        )
    most = min(int(LEND_PAGES * lender.pages) - lender.lent_pages, lender.spare_pages)
    if most < least_pages:
        return f"{most} pages could be lent; allowed: {least_pages} or more"
    return min(most, pages)
