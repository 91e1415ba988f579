"""Open-loop load: every request is sent when it is due, however slow the server, and has a record.

The client is a plain HTTP client, on purpose: it sees and judges what an application would see. A
complete stream has a finish reason and the terminal event; an early end of the bytes is an error.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvrs_lab.traces.records import ErrorKind, ReplayRequest, StreamRecord

_ERROR_BODY_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of requests that the endpoint expects."""

    model: str | None = None  # Name; None: the server's only model.
    # Only fields that every OpenAI server supports, without `return_token_ids`, which the oracle
    # needs, and without `ignore_eos`, which prevents early ends.
    plain: bool = False
    api_key: str | None = None
    cache_salt: str | None = None  # Requests share a prefix cache only with the same salt.


@dataclass(slots=True)
class Progress:
    """Progress of the run, in one object that is always current."""

    total: int
    sent: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0

    @property
    def inflight(self) -> int:
        return self.sent - self.ended


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    id: str | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


async def replay(
    url: str,
    requests: Sequence[ReplayRequest],
    on_progress: Callable[[Progress], None] | None = None,
    *,
    dialect: Dialect | None = None,
    start_s: float | None = None,
    timeout_s: float = 300.0,
    progress: Progress | None = None,
    bodies: Sequence[bytes] | None = None,
    ended: list[StreamRecord] | None = None,
) -> list[StreamRecord]:
    """Send all requests to `url`/v1/completions, and wait until each has ended, complete or not.

    Args:
        url: base of an OpenAI-compatible server; a final `/v1` may be there or not.
        requests: in any order; record i is that of request i.
        on_progress: called at every send and every end.
        dialect: the form of requests that the server expects.
        start_s: `time.monotonic()` of the run's start, for callers that act on the same clock;
            default: now.
        timeout_s: limit of a stream, which then ends with an error of kind `timeout`.
        progress: object to keep current, for callers that read it themselves.
        bodies: bodies of the requests, from `encode`, for callers with a running clock.
        ended: gets each record as its stream ends, for callers that cancel the rest.
    """
    dialect = dialect or Dialect()
    # Encoding comes before the clock starts, so that it delays no request.
    bodies = encode(requests, dialect) if bodies is None else bodies
    assert len(bodies) == len(requests)
    if start_s is None:
        start_s = time.monotonic()
    run = _Run(url, dialect, on_progress, progress or Progress(len(requests)), start_s)
    run.records = [] if ended is None else ended
    # Each stream has its own connection, so that no error is due to a stale connection.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        streams = {}
        for index in sorted(range(len(requests)), key=lambda index: requests[index].arrival_s):
            # Each task starts when due: thousands of sleeping tasks would delay the first ones.
            await asyncio.sleep(requests[index].arrival_s - (time.monotonic() - start_s))
            streams[index] = tasks.create_task(
                run.stream(session, index, requests[index], bodies[index])
            )
    return [streams[index].result() for index in range(len(requests))]


def encode(requests: Sequence[ReplayRequest], dialect: Dialect) -> list[bytes]:
    return [_body(request, dialect) for request in requests]


def _body(request: ReplayRequest, dialect: Dialect) -> bytes:
    fields: dict[str, Any] = {} if dialect.model is None else {"model": dialect.model}
    fields |= {
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if not dialect.plain:
        fields |= {"ignore_eos": True, "return_token_ids": True}
    if request.seed is not None:
        fields["seed"] = request.seed
    if dialect.cache_salt is not None:
        fields["cache_salt"] = dialect.cache_salt
    return msgspec.json.encode(fields)


class _Run:
    def __init__(
        self,
        url: str,
        dialect: Dialect,
        on_progress: Callable[[Progress], None] | None,
        progress: Progress,
        start_s: float,
    ) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self._headers = {"Content-Type": "application/json"}
        if dialect.api_key is not None:
            self._headers["Authorization"] = f"Bearer {dialect.api_key}"
        self._on_progress = on_progress
        self._progress = progress
        self._start_s = start_s
        self.records: list[StreamRecord] = []  # Records of streams that have ended.

    async def stream(
        self, session: aiohttp.ClientSession, index: int, request: ReplayRequest, body: bytes
    ) -> StreamRecord:
        record = StreamRecord(index, request.arrival_s, len(request.prompt_ids), request.max_tokens)
        record.sent_s = self._now_s()
        self._progress.sent += 1
        self._report()
        try:
            await self._exchange(session, record, body)
        except aiohttp.ClientConnectorError as error:
            record.fail(ErrorKind.CONNECT, str(error))
        except TimeoutError:
            record.fail(ErrorKind.TIMEOUT, f"not ended after {self._now_s() - record.sent_s:.1f} s")
        except aiohttp.ClientPayloadError as error:
            record.fail(ErrorKind.TRUNCATED, str(error))
        except OSError as error:  # Includes aiohttp's own connection errors.
            record.fail(ErrorKind.RESET, str(error) or type(error).__name__)
        except aiohttp.ServerDisconnectedError as error:
            record.fail(ErrorKind.RESET, str(error))
        except (aiohttp.ClientError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            record.fail(ErrorKind.PROTOCOL, str(error))
        record.ended_s = self._now_s()
        self._progress.ended += 1
        self._progress.failed += record.error is not None
        self.records.append(record)
        self._report()
        return record

    async def _exchange(
        self, session: aiohttp.ClientSession, record: StreamRecord, body: bytes
    ) -> None:
        async with session.post(self._url, data=body, headers=self._headers) as response:
            record.status = response.status
            if response.status != 200:
                record.fail(
                    ErrorKind.HTTP,
                    _error_message(await response.content.read(_ERROR_BODY_MAX_BYTES)),
                )
                return
            lines = _Lines()
            async for data in response.content.iter_any():
                now_s = self._now_s()
                for event in lines.feed(data):
                    if event == b"[DONE]":
                        if record.finish_reason is None:
                            record.fail(
                                ErrorKind.TRUNCATED,
                                "the terminal event came without a finish reason",
                            )
                        return
                    self._take(record, _CHUNKS.decode(event), now_s)
        record.fail(
            ErrorKind.TRUNCATED,
            f"the bytes ended after {len(record.token_ids)} tokens without the terminal event",
        )

    def _take(self, record: StreamRecord, chunk: _Chunk, now_s: float) -> None:
        if chunk.error is not None:
            message = chunk.error.get("message") if isinstance(chunk.error, dict) else None
            record.fail(ErrorKind.EVENT, str(message or chunk.error))
            return
        if chunk.id is not None:
            stream = chunk.id.removeprefix("cmpl-")
            if record.stream and stream != record.stream:
                record.fail(
                    ErrorKind.PROTOCOL, f"the chunk id changed from {record.stream!r} to {stream!r}"
                )
            record.stream = record.stream or stream
        if chunk.usage is not None:
            record.usage_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            token_ids, text = choice.token_ids or [], choice.text or ""
            # A server without ids sends text, usually a token at a time.
            received = len(token_ids) or (1 if text and not record.token_ids else 0)
            record.token_ids += token_ids
            record.token_times_s += [now_s] * received
            record.text += text
            record.finish_reason = choice.finish_reason or record.finish_reason
            self._progress.tokens += received

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress)


class _Lines:
    """Splits a byte stream into the data of its server-sent events, one line each, as OpenAI
    servers send them.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return (line[5:].strip() for line in lines if line.startswith(b"data:"))


def _error_message(body: bytes) -> str:
    try:
        chunk = _CHUNKS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return body[:200].decode(errors="replace")
    return (
        str(chunk.error.get("message"))
        if isinstance(chunk.error, dict)
        else body[:200].decode(errors="replace")
    )
