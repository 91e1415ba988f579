"""Who is believed to hold which pages of a history, and in which order they are asked."""

from dataclasses import dataclass

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.frames import TrafficClass
from kvrs.scheduling.sequences import Pull


@dataclass(frozen=True, slots=True)
class Source:
    """Who is believed to hold which full pages of the history."""

    instance: InstanceId  # Or an agent.
    epoch: int | None  # Pages of another epoch are not asked for; None: whichever is running.
    pages: range  # By index into the history; not empty unless there is a hand-off.
    traffic: TrafficClass
    handoff: StreamId | None = None  # Names the retained run whose partial last page may be pulled too.


def next_source(sources: list[Source], pull: Pull, first_page: int) -> tuple[Source, range] | None:
    """The next source that is believed to have something from that page on, with just that; those before it are used up."""
    while sources:
        source = sources.pop(0)
        wanted = range(max(first_page, source.pages.start), min(pull.end_page, source.pages.stop))
        if wanted:
            return source, wanted
        if source.handoff is not None and first_page == pull.tail_index:
            return source, range(first_page, first_page)
    return None
