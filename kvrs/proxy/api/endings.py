"""How responses end: streams with the events that they lack, whole answers with their body."""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from aiohttp import web

from kvrs.core.live import Complete
from kvrs.proxy.api.answers import json_response, refusal
from kvrs.proxy.api.choices import Merger
from kvrs.proxy.streams.clients import SseClient
from kvrs.proxy.streams.live import Failed, Outcome
from kvrs.proxy.streams.responses import total_usage
from kvrs.proxy.wire.downstream import StreamedResponse
from kvrs.proxy.wire.journal import Journal

Response = web.Response | StreamedResponse


def missing_end(journals: Sequence[Journal], merger: Merger | None) -> list[bytes]:
    """The events that a complete response of these streams still lacks."""
    first = journals[0]
    if len(journals) == 1:
        return first.missing_end()
    assert merger is not None
    assert merger.head is not None
    parsed = first.parsed
    usage = [parsed.endpoint.event(merger.head, [], total_usage(journals))]
    return usage if parsed.request.wants_usage else []


async def end_stream(client: SseClient, outcome: Outcome, missing: Sequence[bytes]) -> Response:
    """End a streamed response, after the events that it still lacks."""
    match outcome:
        case Complete():
            return await client.end(missing)
        case Failed() if client.response is None:
            return refusal(outcome)
        case Failed():
            return await client.fail(outcome.body)
        case _:
            assert_never(outcome)


def whole_response(
    outcome: Outcome, make_body: Callable[[], bytes], headers: Mapping[str, str]
) -> Response:
    match outcome:
        case Complete():
            return json_response(make_body(), headers=headers)
        case Failed():
            return refusal(outcome)
        case _:
            assert_never(outcome)
