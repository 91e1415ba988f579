"""Anthropic's Messages API. Each message is a chat, whose events are translated on their way to the
client.
"""

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec.structs import replace

from kvrs.errors import UndecodableError
from kvrs.net.routes import Request, Response
from kvrs.protocol.anthropic import (
    MessageTranslator,
    chat_of,
    count_of,
    message_of,
    prompt_of,
)
from kvrs.protocol.openai.decoding import MAX_ELEMENTS
from kvrs.protocol.openai.fields import VLLM
from kvrs.protocol.openai.translated import Event
from kvrs.proxy.api.client_port import ClientCall, ClientPort, refusal
from kvrs.proxy.api.passed import TOKENIZE, Passed
from kvrs.proxy.streams.open_stream import SseClient, undecodable
from kvrs.proxy.wire.requests import CHAT, ParsedRequest, read

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_DATA, _DONE = b"data: ", b"[DONE]"
# Fields by which a chat of any engine does little more than count its prompt.
_SHORTEST = {"max_tokens": 1, "temperature": 0}


class MessageClient:
    """Translates the events of a chat to those of a message, and sends them. The ids of a resumable
    message's events are their numbers.
    """

    direct = None
    take_token = None
    numbers_events = True

    def __init__(self, call: ClientCall) -> None:
        assert isinstance(call.client, SseClient)
        self._sse = call.client
        (self._journal,) = call.journals
        self._translator = MessageTranslator()
        self._is_resumable = call.resume is not None
        self._number = 0  # Number of the next event.
        self._after = -1  # Number of the last event that the client has.
        if call.resume is not None:
            # The translator needs the chat's events from the first one on.
            self._after, call.resume = call.resume.after, replace(call.resume, after=-1)

    @property
    def blocked(self) -> bool:
        return self._sse.blocked

    @property
    def has_begun(self) -> bool:
        return self._sse.has_begun

    def when_free(self, resume: Callable[[], None]) -> None:
        self._sse.when_free(resume)

    def break_silence(self) -> None:
        if self._translator.has_begun:
            self._sse.break_silence(_PING)
        else:
            self._sse.break_silence()

    def send(self, events: Sequence[bytes]) -> None:
        """Send what the events can be translated to. Raises UndecodableError: not all of them
        can.
        """
        if data := self._translated(events):
            self._sse.send_framed(data)
        if (fault := self._translator.fault) is not None:
            raise UndecodableError(fault)

    async def finish(self, data: bytes) -> Response:
        events = [event.removeprefix(_DATA) for event in data.split(b"\n\n") if event]
        return await self._sse.finish(self._translated(events))

    def _translated(self, events: Iterable[bytes]) -> bytes:
        translator, journal, made = self._translator, self._journal, list[Event]()
        for event in events:
            if not translator.has_begun and journal.head is not None:
                made += translator.begin(journal.head, journal.prompt_tokens)
            made += translator.end() if event == _DONE else translator.take(event)
        return b"".join(map(self._framed, made))

    def _framed(self, event: Event) -> bytes:
        kind, prefix = event["type"], b""
        # An error ends the connection, not the message, so its event has no number.
        if self._is_resumable and kind != "error":
            number, self._number = self._number, self._number + 1
            if number <= self._after:
                return b""
            prefix = b"id: %b:%d\n" % (self._journal.stream.encode(), number)
        return b"%bevent: %b\ndata: %b\n\n" % (prefix, kind.encode(), msgspec.json.encode(event))


class MessagesApi:
    """Serves the routes of the Messages API."""

    def __init__(self, port: ClientPort, passed: Passed) -> None:
        self._port = port
        self._passed = passed
        self._engine = port.driver.engine

    async def create(self, request: Request) -> Response:
        response = await self._port.serve(self._read, request, MessageClient)
        return _translated(response, message_of)

    async def count(self, request: Request) -> Response:
        if self._engine == VLLM:
            response = await self._passed.serve(TOKENIZE, request, prompt_of)
        else:
            response = await self._port.serve(self._read_shortest, request)
        return _translated(response, count_of)

    def _read(self, body: bytes, max_elements: int = MAX_ELEMENTS) -> ParsedRequest:
        return read(CHAT, chat_of(body, max_elements), self._engine, max_elements)

    def _read_shortest(self, body: bytes, max_elements: int = MAX_ELEMENTS) -> ParsedRequest:
        chat = prompt_of(body, max_elements, **_SHORTEST)
        return read(CHAT, chat, self._engine, max_elements)


def _translated(response: Response, translate: Callable[[bytes], bytes]) -> Response:
    if response.status != 200 or response.body is None:
        return response
    try:
        response.body = translate(response.body)
    except UndecodableError as error:
        return refusal(undecodable(error))
    return response
