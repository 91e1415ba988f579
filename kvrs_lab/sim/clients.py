"""Records of the clients of a simulated cluster, in the form of a replay's records."""

from collections.abc import Iterable, Sequence

from kvrs.ids import StreamId
from kvrs_lab.sim.cluster import MOVED
from kvrs_lab.sim.proxy import SimProxy
from kvrs_lab.sim.streams import Arrival, SimStream
from kvrs_lab.traces.records import ErrorKind, StreamRecord


def stream_of(number: int) -> StreamId:
    """The id of the stream of a request."""
    return StreamId(f"s{number}")


def records_of(arrivals: Sequence[Arrival], proxies: Iterable[SimProxy]) -> list[StreamRecord]:
    """One record per request, by number. The client of a stream that moved to another proxy keeps
    its tokens.
    """
    streams: dict[StreamId, SimStream] = {}
    for proxy in proxies:
        for name, live in proxy.streams.items():
            if name not in streams or live.outcome != MOVED:
                streams[name] = live
    return [
        _record(number, asked, streams.get(stream_of(number)))
        for number, asked in enumerate(arrivals)
    ]


def _record(number: int, asked: Arrival, live: SimStream | None) -> StreamRecord:
    record = StreamRecord(
        number,
        asked.at_s,
        asked.prompt_tokens,
        asked.max_tokens,
        sent_s=asked.at_s,
        ended_s=asked.at_s,
        stream=stream_of(number),
    )
    if live is None:
        record.fail(ErrorKind.CONNECT, "no proxy was up")
        return record
    record.token_times_s = times_s = live.journal.received_s.tolist()
    record.ended_s = live.ended_s or (times_s[-1] if times_s else asked.at_s)
    if live.outcome == "complete":
        record.finish_reason = "length"
    else:
        record.fail(ErrorKind.EVENT, live.outcome)
    return record
