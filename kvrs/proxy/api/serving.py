"""The service of clients' streams: admission, running the streams, and responses."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, assert_never

from kvrs.core.model.live_stream import Complete
from kvrs.errors import RequestError, UndecodableError
from kvrs.net.routes import WRITTEN, Request, Response
from kvrs.protocol.openai.chunks import DONE, error_body, sse
from kvrs.proxy.api.admission import Admissions, ClientCall, whole_fields
from kvrs.proxy.api.answers import json_response, refusal
from kvrs.proxy.api.choices import ChoiceClient, Merger, run_together
from kvrs.proxy.api.passed import Passed
from kvrs.proxy.backends.backend import is_the_clients_fault
from kvrs.proxy.mirror.failures import SUPERSEDED
from kvrs.proxy.mirror.headers import ResumeRequest
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.streams.clients import Client, ClientGoneError, KeepAlives, StreamClient
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.streams.open_stream import Failed, Outcome, undecodable
from kvrs.proxy.streams.responses import HeldBack, WholeClient, answer, total_usage
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import ParsedRequest

_FLUSH_TIMEOUT_S = 1.0  # Longest wait until the mirror has all events of a failed stream.

Read = Callable[..., ParsedRequest]


class Serving:
    """Serves streams. `passed` serves requests that one engine answers whole."""

    def __init__(
        self,
        admissions: Admissions,
        driver: Driver,
        mirror: Mirror,
        passed: Passed,
        metrics: Metrics,
    ) -> None:
        self.admissions = admissions
        self.keep_alives = KeepAlives()
        self._driver = driver
        self._mirror = mirror
        self._passed = passed
        self._counts = metrics.requests

    async def serve(
        self,
        read: Read,
        request: Request,
        client_of: Callable[[ClientCall], StreamClient] | None = None,
    ) -> Response:
        """Admit a request, serve it and respond; count the request by its outcome. `client_of`:
        makes the client of a stream from an admitted call; None: it gets the chat's own events.
        """
        call = self.admissions.begin(request)
        try:
            try:
                await self.admissions.admit(call, read)
            except RequestError:
                self._counts["rejected"].value += 1
                raise
            if client_of is not None and call.client is not None:
                call.client = client_of(call)
            if (client := call.client) is not None:
                self.keep_alives.begin(client)
            try:
                if client is None or call.resume is not None:
                    outcome, response = await self._respond(call)
                else:
                    if call.merger is None:
                        outcome = await self._driver.run(call.journals[0], client)
                    else:
                        outcome = await self._stream_choices(call, client)
                    if isinstance(outcome, Complete):
                        has_all = call.merger is None and not call.journals[0].wants_usage
                        response = await client.finish(DONE if has_all else missing_end(call))
                    else:
                        response = await end_stream(client, outcome)
            except asyncio.CancelledError:
                self._counts["client_gone"].value += 1
                raise
            except ClientGoneError:
                self._counts["client_gone"].value += 1
                assert client is not None
                return WRITTEN if client.has_begun else Response(499)
            finally:
                if client is not None:
                    self.keep_alives.open.discard(client)
            self.count(outcome)
            return response
        finally:
            call.held.end()

    def count(self, outcome: Outcome) -> None:
        name = "complete"
        if isinstance(outcome, Failed):
            name = "rejected" if outcome.rejected else "failed"
        self._counts[name].value += 1

    def _respond(self, call: ClientCall) -> Coroutine[Any, Any, tuple[Outcome, Response]]:
        if call.whole is not None:
            return self._respond_by_one(call)
        if call.resume is not None:
            return self._respond_resumable(call, call.resume)
        return self._respond_whole(call)

    def _stream_choices(self, call: ClientCall, client: StreamClient) -> Awaitable[Outcome]:
        """Run the streams of a response with several choices or an echo. Not a coroutine, because
        its frame would be kept as long as the streams.
        """
        journals, merger = call.journals, call.merger
        assert merger is not None
        streams: list[tuple[Journal, Client]] = [
            (journal, ChoiceClient(client, merger, index, journal, echo))
            for index, (journal, echo) in enumerate(zip(journals, call.echoes, strict=True))
        ]
        return run_together(self._driver.run, streams)

    async def _respond_whole(self, call: ClientCall) -> tuple[Outcome, Response]:
        journals = call.journals
        clients = [WholeClient(self._driver.parsers) for _ in journals]
        outcome = await run_together(self._driver.run, list(zip(journals, clients, strict=True)))
        make = partial(answer, call.parsed, journals, clients, call.echoes)
        return whole_response(outcome, make, call.head())

    async def _respond_by_one(self, call: ClientCall) -> tuple[Outcome, Response]:
        """Let one engine answer the whole request, and another engine if the first dies."""
        path, fields = call.parsed.endpoint.path, whole_fields(call.parsed)
        answer = await self._passed.ask(path, fields, call.name.key)
        answer.headers.update(call.head())
        if answer.status == 200:
            return Complete(), answer
        is_rejected = is_the_clients_fault(answer.status)
        return Failed(answer.status, b"", rejected=is_rejected), answer

    async def _respond_resumable(
        self, call: ClientCall, resume: ResumeRequest
    ) -> tuple[Outcome, Response]:
        """Respond to a keyed request, whose stream is new or was taken over."""
        (journal,), (echo,) = call.journals, call.echoes
        gathered = WholeClient()
        journal.marks = []
        sync = call.client is not None and call.client.numbers_events
        inner = call.client or gathered
        keyed = self._mirror.open(resume, journal, call.found, inner, sync=sync)
        try:
            sends_echo = call.client is not None and not keyed.record.events
            outcome = await self.run_keyed(keyed, journal, echo if sends_echo else None)
            is_refused = isinstance(outcome, Failed) and outcome.status < 500
            if is_refused and not keyed.failure and not keyed.record.events:
                self._mirror.forget(keyed)
            elif isinstance(outcome, Failed) and outcome is not SUPERSEDED:
                keyed.release()
                await keyed.flushed(_FLUSH_TIMEOUT_S)
            keyed.close()  # Close the stream now: no event may follow the end of the response.
            if call.client is not None:
                return outcome, await end_stream(call.client, outcome)
            make = partial(answer, call.parsed, [journal], [gathered], [echo])
            return whole_response(outcome, make, call.head())
        finally:
            self._mirror.close(keyed)

    async def run_keyed(self, keyed: KeyedStream, journal: Journal, echo: str | None) -> Outcome:
        """Run a keyed stream until its client has all events."""
        # The stream was cancelled, or moved away, before it began here.
        if keyed.failure is not None:
            return keyed.failure
        outcome: Outcome = Complete()
        if not journal.finished and not keyed.record.state.complete:
            client: Client = keyed
            if echo is not None:
                client = ChoiceClient(keyed, Merger(), 0, journal, echo)
            if journal.begins_again:
                client = HeldBack(client, journal)
            else:  # The record gets the events as they come, for a proxy that takes over.
                journal.can_begin_again = False
            outcome = await self._driver.run(journal, client)
        if outcome == Complete():
            await keyed.finish([] if keyed.record.state.complete else journal.missing_end())
            if keyed.after > keyed.record.seq:
                message = "Last-Event-ID lies behind the end of the stream"
                return Failed(400, error_body(message, code="beyond_end"))
        return keyed.failure or outcome


def missing_end(call: ClientCall) -> bytes:
    """Return the events that a complete response still lacks."""
    first, parsed, merger = call.journals[0], call.parsed, call.merger
    if len(call.journals) == 1:
        return b"".join(map(sse, first.missing_end())) + DONE if first.wants_usage else DONE
    assert merger is not None
    assert merger.head is not None
    if not parsed.request.wants_usage:
        return DONE
    usage, facts = total_usage(call.journals)
    return sse(parsed.endpoint.event(merger.head, [], usage, facts.beside)) + DONE


async def end_stream(client: StreamClient, outcome: Outcome) -> Response:
    """End a streamed response that has all its events."""
    match outcome:
        case Complete():
            return await client.finish(DONE)
        case Failed() if not client.has_begun:
            return refusal(outcome)
        case Failed():
            # A stream that ends with an error does not get the [DONE] of a complete response.
            return await client.finish(sse(outcome.body))
        case _:
            assert_never(outcome)


def whole_response(
    outcome: Outcome, make_body: Callable[[], bytes], headers: Mapping[str, str]
) -> tuple[Outcome, Response]:
    """Return the response of a client that does not stream, and the outcome that counts: it is
    another one if no body can be made.
    """
    match outcome:
        case Complete():
            try:
                return outcome, json_response(make_body(), headers=headers)
            except UndecodableError as error:
                failure = undecodable(error)
                return failure, refusal(failure)
        case Failed():
            return outcome, refusal(outcome)
        case _:
            assert_never(outcome)
