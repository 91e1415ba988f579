"""OpenAI's Responses API. Each response is a chat's keyed stream whose key is the response's id, so
any proxy can continue it and send its events again.

The client of a response's stream, and the reader that gets the response's events from it, if
any.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from kvrs.errors import RequestError, UndecodableError
from kvrs.net.routes import WRITTEN, Request, Response
from kvrs.protocol.mirror import BYTES_PER_ID
from kvrs.protocol.openai.chunks import NO_FACTS, UNDECODABLE, error_body
from kvrs.protocol.openai.chunks import sse as framed
from kvrs.protocol.openai.responses import (
    CANCELLED,
    ID,
    PATH,
    ResponseRequest,
    Stored,
    Tokens,
    Translator,
    encoded,
    parse_response_request,
)
from kvrs.proxy.api.client_port import ClientCall, ClientPort, json_response, refusal
from kvrs.proxy.mirror.headers import KEY, SUPERSEDED, ResumeRequest
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.mirror.records import CLAIM_S, Record
from kvrs.proxy.mirror.replication import StoredRecord, drop_record, read_record
from kvrs.proxy.streams.open_stream import ClientGoneError, Failed, Outcome, SseClient, undecodable
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import CHAT, read


class ResponseReader:
    """Sends the events of a response, made from those of its stream, to a client
    that reads them.
    """

    def __init__(self, sse: SseClient, translator: Translator, after: int) -> None:
        self.sse = sse
        self.gone = asyncio.Event()
        self._translator = translator
        self._after = after
        self._has_begun = False

    @property
    def fault(self) -> str | None:
        """Reason why the stream cannot be translated any further; None: it can."""
        return self._translator.fault

    def begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            encoded(self._translator.begin(), self._after, self.sse.send_framed)

    def send(self, events: Sequence[bytes]) -> None:
        self.begin()
        made = [event for data in events for event in self._translator.take(data)]
        encoded(made, self._after, self.sse.send_framed)

    async def end(self, tokens: Tokens) -> Response:
        last: list[bytes] = []
        self.begin()
        encoded(self._translator.end(tokens), self._after, last.append)
        return await self.sse.finish(b"".join(last))


class ResponseClient:
    """Takes the events of a response's stream, and gives them to its reader, of which there is at
    most one.
    """

    direct = None
    take_token = None

    def __init__(self) -> None:
        self.reader: ResponseReader | None = None
        self.stays = False  # The stream continues when its reader has left.

    @property
    def blocked(self) -> bool:
        return self.reader is not None and self.reader.sse.blocked

    def when_free(self, resume: Callable[[], None]) -> None:
        if self.reader is None:
            resume()
        else:
            self.reader.sse.when_free(resume)

    def send(self, events: Sequence[bytes]) -> None:
        """Pass events to the reader. Raises UndecodableError: not all of them can be translated."""
        if (reader := self.reader) is None:
            return
        try:
            reader.send(events)
        except ClientGoneError:
            if not self.stays:
                raise
            self.detach()
        if reader.fault is not None:
            raise UndecodableError(reader.fault)

    def attach(self, reader: ResponseReader) -> None:
        self.detach()
        self.reader = reader

    def detach(self) -> None:
        if self.reader is not None:
            self.reader.gone.set()
            self.reader = None


@dataclass(slots=True, eq=False)
class RunningResponse:
    """A response whose stream runs at this proxy, with the stream's client and task."""

    stored: Stored
    asked: ResponseRequest
    keyed: KeyedStream
    client: ResponseClient
    task: "asyncio.Task[Outcome]"
    # Makes the extra headers of an answer that is about to begin, as `head_of`.
    head: Callable[[], Mapping[str, str]]

    @property
    def has_begun(self) -> bool:
        """Return whether a reader has the head of the response's stream, and so its id."""
        reader = self.client.reader
        return reader is not None and reader.sse.has_begun


_FLUSH_TIMEOUT_S = 1.0
# Delay after which a streamed response begins even without a first token, so that its client has
# the id. Errors before that have an HTTP status.
_BEGIN_AFTER_S = 1.0
_CONFLICT = "resume_conflict"
_TRIES = 3
_NO_HEADERS: Mapping[str, str] = {}
_CANCELLED = Failed(499, error_body("the response was cancelled", code=CANCELLED))
# Codes of failures that do not end the response: its stream continues elsewhere, or once the
# response is requested again.
_TRANSIENT_CODES = ("shutting_down", "handed_over", "superseded")


class BegunResponse(msgspec.Struct, frozen=True):
    """A response that `_run` begins, new or from a record, and its decoded request."""

    stored: Stored
    asked: ResponseRequest


Enter = Callable[[ClientCall], Awaitable[BegunResponse]]


class ResponsesApi:
    """Serves the routes of the Responses API."""

    def __init__(self, port: ClientPort) -> None:
        self._port = port
        # Responses whose streams run here, by key of the record.
        self._running: dict[str, RunningResponse] = {}
        self._tasks: set[asyncio.Task[Outcome]] = set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def create(self, request: Request) -> Response:
        if KEY in request.headers:
            raise RequestError(f"{KEY} is not supported at {PATH}: the id is the key", param=KEY)
        running = await self._start(request, partial(self._new, request))
        asked = running.asked
        if asked.background and not asked.stream:
            return self._answer(running.keyed.record, running.head())
        running.client.stays = asked.background
        try:
            if asked.stream:
                return await self._stream(request, running, after=-1)
            outcome = await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if not running.client.stays:
                running.task.cancel()
            raise
        if isinstance(outcome, Failed) and not running.keyed.record.state.complete:
            return refusal(outcome)
        return self._answer(running.keyed.record, running.head())

    async def retrieve(self, request: Request) -> Response:
        streams, after = _position(request)
        keys = self._keys(request)
        running = self._running_of(keys)
        if running is None:
            found = await self._found(request, keys)
            if found.record.state.complete or (found.runs and not streams):
                return await self._stored(request, found, after if streams else None)
            try:
                running = await self._take_over(request, found.record)
            except RequestError as error:
                if error.code != _CONFLICT or streams:
                    raise
                return await self._stored(request, found, None)
        running.client.stays = True
        if streams:
            self._promise(running.keyed.journal)
            return await self._stream(request, running, after=after)
        return self._answer(running.keyed.record, running.head())

    async def _take_over(self, request: Request, record: Record) -> RunningResponse:
        """Continue a stream here that may run at another proxy."""
        for _ in range(_TRIES):
            try:
                return await self._start(request, partial(self._again, request, record))
            except RequestError as error:
                if error.code != _CONFLICT:
                    raise
            # The stream was granted just now, and no further claim is granted for CLAIM_S.
            await asyncio.sleep(CLAIM_S)
        return await self._start(request, partial(self._again, request, record))

    async def cancel(self, request: Request) -> Response:
        keys = self._keys(request)
        found = await self._found(request, keys)
        asked = _asked(Stored.decode(found.record.header.request))
        if not asked.background:
            raise RequestError("only responses in the background can be cancelled")
        if found.record.state.complete:
            return self._answer(found.record)
        running = self._running_of(keys) or await self._take_over(request, found.record)
        running.keyed.fail(_CANCELLED)
        await asyncio.shield(running.task)
        return self._answer(running.keyed.record)

    async def delete(self, request: Request) -> Response:
        keys = self._keys(request)
        await self._found(request, keys)
        await drop_record(self._port.mirror, keys)
        deleted = {"id": request.parameters["id"], "object": "response", "deleted": True}
        return json_response(msgspec.json.encode(deleted))

    def _keys(self, request: Request) -> Sequence[str]:
        name = request.parameters["id"]
        if ID.fullmatch(name) is None:
            raise _unknown(name)
        return self._port.tenants.secret_of(request, request.tenant).record_keys(f"response {name}")

    def _running_of(self, keys: Sequence[str]) -> RunningResponse | None:
        return next((self._running[key] for key in keys if key in self._running), None)

    async def _found(self, request: Request, keys: Sequence[str]) -> StoredRecord:
        found = await read_record(self._port.mirror, keys, self._port.driver.clock())
        name = request.parameters["id"]
        if found is None or not found.record.header.request:
            raise _unknown(name)
        is_over = found.record.state.complete
        if is_over and not _asked(Stored.decode(found.record.header.request)).store:
            raise _unknown(name)
        return found

    async def _start(self, request: Request, enter: Enter) -> RunningResponse:
        """Start a response in a task of its own, and wait until its record is at a mirror."""
        started: asyncio.Future[RunningResponse] = asyncio.get_running_loop().create_future()
        task: asyncio.Task[Outcome] = asyncio.create_task(self._run(request, enter, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            both: set[asyncio.Future[Any]] = {task, started}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not started.done():
            task.result()  # This raises the task's error.
        return started.result()

    async def _run(
        self, request: Request, enter: Enter, started: "asyncio.Future[RunningResponse]"
    ) -> Outcome:
        call = self._port.begin(request)
        with call.held:
            entry = await enter(call)
            (journal,) = call.journals
            journal.marks, journal.asks_usage = [], True
            # A response in the background is read while it runs.
            if entry.asked.stream or entry.asked.background:
                journal.can_begin_again = False
            assert call.resume is not None
            client = ResponseClient()
            keyed = self._port.mirror.open(call.resume, journal, call.found, client, sync=True)
            key = keyed.record.key
            task = asyncio.current_task()
            assert task is not None
            running = RunningResponse(entry.stored, entry.asked, keyed, client, task, call.head)
            self._running[key] = running
            try:
                await keyed.flushed(_FLUSH_TIMEOUT_S)
                started.set_result(running)
                outcome = await self._port.run_keyed(keyed, journal, None)
                return await self._end(running, outcome)
            finally:
                keyed.close()
                if self._running.get(key) is running:
                    del self._running[key]
                self._port.mirror.close(keyed)

    async def _end(self, running: RunningResponse, outcome: Outcome) -> Outcome:
        """Record the end of a response and return its outcome; a failed response stays failed."""
        keyed = running.keyed
        if isinstance(outcome, Failed) and outcome is not SUPERSEDED:
            code = _error(outcome).get("code")
            is_final = (
                outcome is _CANCELLED
                or code == UNDECODABLE
                or (keyed.failure is None and code not in _TRANSIENT_CODES)
            )
            # A client that has nothing yet, and so no id, gets the error as a status, which its SDK
            # may repeat.
            is_unknown = not keyed.record.events and not running.has_begun
            if is_final and is_unknown and not running.asked.background:
                self._port.mirror.forget(keyed)
                return outcome
            if is_final:
                keyed.end_with(outcome.body)
            else:
                keyed.release()
            await keyed.flushed(_FLUSH_TIMEOUT_S)
        self._port.count(outcome)
        if not running.asked.store and keyed.record.state.complete:
            await drop_record(self._port.mirror, [keyed.record.key])
        return outcome

    async def _stream(self, request: Request, running: RunningResponse, after: int) -> Response:
        """Send all events after number `after`, present and future, until the response ends or
        another client reads it.
        """
        sse = SseClient(request, running.head)
        reader = ResponseReader(sse, self._translator(running.stored, running.asked), after)
        client, keyed, task = running.client, running.keyed, running.task
        gone = asyncio.ensure_future(reader.gone.wait())
        begin = asyncio.get_running_loop().call_later(_BEGIN_AFTER_S, _begin, reader)
        try:
            self._port.keep_alives.begin(sse)
            if keyed.given:
                reader.send([event.data for event in keyed.given])
            elif running.asked.background:
                reader.begin()
            client.attach(reader)
            if reader.fault is not None:  # A proxy before this one had the events.
                keyed.fail(undecodable(UndecodableError(reader.fault)))
            ends: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            outcome: Outcome = task.result() if task.done() else SUPERSEDED
            is_over = keyed.record.state.complete
            if isinstance(outcome, Failed) and not sse.has_begun:
                return refusal(outcome)
            if isinstance(outcome, Failed) and not is_over:
                return await sse.finish(framed(outcome.body))
            return await reader.end(_tokens(keyed.record))
        except asyncio.CancelledError:
            if not client.stays:
                task.cancel()
            raise
        except ClientGoneError:
            return _left(sse)
        finally:
            self._port.keep_alives.open.discard(sse)
            begin.cancel()
            gone.cancel()
            if client.reader is reader:
                client.reader = None

    async def _stored(self, request: Request, found: StoredRecord, after: int | None) -> Response:
        """Respond from a record alone: with the response, or with its events after
        number `after`.
        """
        record = found.record
        if after is None:
            return self._answer(record)
        stored = Stored.decode(record.header.request)
        sse = SseClient(request, dict)
        reader = ResponseReader(sse, self._translator(stored, _asked(stored)), after)
        try:
            reader.send([event.data for event in record.events])
            return await reader.end(_tokens(record))
        except ClientGoneError:
            return _left(sse)

    async def _new(self, request: Request, call: ClientCall) -> BegunResponse:
        await self._port.read_body(call)
        name = f"resp_{secrets.token_hex(24)}"
        stored = Stored(name, int(time.time()), call.body)
        asked = await self._parse(call, stored.body)
        call.resume = self._resume(request, stored.id, stored.encode())
        await self._port.admit(call)
        return BegunResponse(stored, asked)

    async def _again(self, request: Request, record: Record, call: ClientCall) -> BegunResponse:
        stored = Stored.decode(record.header.request)
        call.held.take(len(stored.body))
        asked = await self._parse(call, stored.body)
        resume = self._resume(request, stored.id, record.header.request)
        # Resume exactly the stream that the client knows, not a later stream of the same key.
        call.resume = replace(resume, stream=record.stream)
        await self._port.admit(call)
        return BegunResponse(stored, asked)

    async def _parse(self, call: ClientCall, body: bytes) -> ResponseRequest:
        asked = await self._port.parse(parse_response_request, body)
        read_chat = partial(read, CHAT, backend=self._port.driver.engine)
        call.parsed = await self._port.parse(read_chat, asked.chat)
        call.body = b""
        return asked

    def _resume(self, request: Request, name: str, kept: bytes) -> ResumeRequest:
        secret = self._port.tenants.secret_of(request, request.tenant)
        keys = tuple(secret.record_keys(f"response {name}"))
        digest = blake2b(f"{PATH}\0{name}".encode(), digest_size=32).digest()
        return ResumeRequest(keys, digest, tenant=secret.mark, request=kept)

    def _translator(self, stored: Stored, asked: ResponseRequest) -> Translator:
        served = self._port.control.instances.model
        return Translator(stored, asked, str(asked.fields.get("model") or served or ""))

    def _promise(self, journal: Journal) -> None:
        """Note that a reader is about to get the head of a stream, also of a response that began
        without one: the head's promise of exactness holds from now on.
        """
        if journal.exactness.is_promised is None:
            journal.exactness.commit()
            if (live := self._port.driver.streams.get(journal.stream)) is not None:
                self._port.driver.expect_token(live)  # The policy learns of the promise with it.

    def _answer(self, record: Record, head: Mapping[str, str] = _NO_HEADERS) -> Response:
        """Return the response as its record has it now."""
        stored = Stored.decode(record.header.request)
        translator = self._translator(stored, _asked(stored))
        for event in record.events:
            translator.take(event.data)
        tokens = _tokens(record) if record.state.complete else None
        if tokens is not None:
            translator.end(tokens)
        described = translator.response(tokens, is_queued=not record.events)
        return json_response(msgspec.json.encode(described), headers=head)


def _left(sse: SseClient) -> Response:
    return WRITTEN if sse.has_begun else Response(499)


def _begin(reader: ResponseReader) -> None:
    with suppress(ClientGoneError):  # The end of the client's connection ends its request.
        reader.begin()


def _asked(stored: Stored) -> ResponseRequest:
    return parse_response_request(stored.body)


def _tokens(record: Record) -> Tokens:
    prompt_bytes = len(record.prompt_ids or b"")
    output_bytes = sum(len(event.ids) for event in record.events)
    cached = record.state.cached_tokens or 0
    details = (record.state.facts or NO_FACTS).details
    return Tokens(
        prompt_bytes // BYTES_PER_ID,
        output_bytes // BYTES_PER_ID,
        cached,
        details.get("prompt_tokens_details", {}),
        details.get("completion_tokens_details", {}),
    )


def _position(request: Request) -> tuple[bool, int]:
    """Return whether the client wants events, and the number of the last event that it has."""
    query = request.query
    streams = query.get("stream", "false").lower()
    if streams not in ("true", "false"):
        raise RequestError(f"stream={streams!r:.20}; allowed: true, false", param="stream")
    given = query.get("starting_after", "-1")
    try:
        after = int(given)
    except ValueError:
        raise RequestError(
            f"starting_after={given!r:.20}; allowed: the sequence_number of an event",
            param="starting_after",
        ) from None
    return streams == "true" and request.method != "HEAD", after


def _error(failure: Failed) -> dict[str, object]:
    found = json.loads(failure.body)["error"]
    assert isinstance(found, dict)
    return found


def _unknown(name: str) -> RequestError:
    return RequestError(
        f"no response with id {name!r:.80} is known", status=404, param="id", code="not_found"
    )
