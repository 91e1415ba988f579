"""The client of a response's stream, and the reader that gets the response's events from it, if
any.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvrs.errors import UndecodableError
from kvrs.net.routes import Response
from kvrs.protocol.openai.responses import ResponseRequest, Stored, Tokens, Translator, encoded
from kvrs.proxy.mirror.keyed import KeyedStream
from kvrs.proxy.streams.open_stream import ClientGoneError, Outcome, SseClient


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
