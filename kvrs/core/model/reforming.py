"""The policy's record of an instance that re-forms."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrs.ids import StreamId


@dataclass(slots=True, eq=False)
class PredictedReforming:
    """By the instance's last report; it restores the streams that stay in the order in which they
    were booked here.
    """

    number: int
    cause: str
    ready_s: float
    missing_pages: Mapping[StreamId, int]
    page_s: float
    held_pages: Mapping[StreamId, int]  # Of these; their lost cells are fetched.
    held_page_s: float
    step_s: float  # Of decoding, with the ranks that will serve.
    queue_s: float  # Its queue, as it reports it beside.
    ahead_s: float = 0.0  # What restoring the streams takes that stay, as far as they are decided.

    def pages_of(self, stream: StreamId) -> tuple[int, int]:
        """Pages with lost cells, and those of them of which only the cells are fetched."""
        missing = self.missing_pages.get(stream, 0)
        return missing, min(self.held_pages.get(stream, 0), missing)

    def restore_s(self, stream: StreamId) -> float:
        """Seconds until the lost cells of a stream's pages are there again."""
        missing, held = self.pages_of(stream)
        return held * self.held_page_s + (missing - held) * self.page_s
