"""Open-loop load: every request is sent when it is due, however slow the server is, and every one leaves a record.

The client is a plain HTTP one on purpose: it sees what an application would see, and judges it. A stream is complete only
with a finish reason and the terminal event; bytes that merely end are an error.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvrs.replay.records import ErrorKind, ReplayRequest, StreamRecord

_ERROR_BODY_MAX_BYTES = 1 << 16


@dataclass(slots=True)
class Progress:
    """How far the run is; one object for the whole run, always current."""

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
    model: str | None = None,
    start_s: float | None = None,
    timeout_s: float = 300.0,
) -> list[StreamRecord]:
    """Send all requests to `url`/v1/completions and wait until each has ended, well or badly.

    Args:
        url: base of an OpenAI-compatible server that knows `return_token_ids` and `ignore_eos`.
        requests: in any order; record i is that of request i.
        on_progress: called at every send and every end.
        model: name to ask for; none: the server's only one.
        start_s: `time.monotonic()` of the run's start, for callers that act on the same clock; default: now.
        timeout_s: after this long a stream is given up with an error of kind `timeout`.
    """
    # Encoding is done before the clock runs: it must not delay what is due.
    bodies = [_body(request, model) for request in requests]
    run = _Run(url, on_progress, Progress(len(requests)), time.monotonic() if start_s is None else start_s)
    # A connection of its own for each stream: an error is then the server's doing, never that of a stale connection.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(run.stream(session, index, request, body))
            for index, (request, body) in enumerate(zip(requests, bodies, strict=True))
        ]
    return [stream.result() for stream in streams]


def _body(request: ReplayRequest, model: str | None) -> bytes:
    fields: dict[str, Any] = {
        "prompt": request.prompt_ids,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if model is not None:
        fields["model"] = model
    if request.seed is not None:
        fields["seed"] = request.seed
    return msgspec.json.encode(fields)


class _Run:
    def __init__(self, url: str, on_progress: Callable[[Progress], None] | None, progress: Progress, start_s: float) -> None:
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._on_progress = on_progress
        self._progress = progress
        self._start_s = start_s

    async def stream(self, session: aiohttp.ClientSession, index: int, request: ReplayRequest, body: bytes) -> StreamRecord:
        record = StreamRecord(index, request.arrival_s, len(request.prompt_ids), request.max_tokens)
        await asyncio.sleep(request.arrival_s - self._now_s())
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
        self._report()
        return record

    async def _exchange(self, session: aiohttp.ClientSession, record: StreamRecord, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with session.post(self._url, data=body, headers=headers) as response:
            record.status = response.status
            if response.status != 200:
                record.fail(ErrorKind.HTTP, _error_message(await response.content.read(_ERROR_BODY_MAX_BYTES)))
                return
            lines = _Lines()
            async for data in response.content.iter_any():
                now_s = self._now_s()
                for event in lines.feed(data):
                    if event == b"[DONE]":
                        if record.finish_reason is None:
                            record.fail(ErrorKind.TRUNCATED, "the terminal event came without a finish reason")
                        return
                    self._take(record, _CHUNKS.decode(event), now_s)
        record.fail(ErrorKind.TRUNCATED, f"the bytes ended after {len(record.token_ids)} tokens without the terminal event")

    def _take(self, record: StreamRecord, chunk: _Chunk, now_s: float) -> None:
        if chunk.error is not None:
            message = chunk.error.get("message") if isinstance(chunk.error, dict) else None
            record.fail(ErrorKind.EVENT, str(message or chunk.error))
            return
        if chunk.id is not None:
            stream = chunk.id.removeprefix("cmpl-")
            if record.stream and stream != record.stream:
                record.fail(ErrorKind.PROTOCOL, f"the chunk id changed from {record.stream!r} to {stream!r}")
            record.stream = record.stream or stream
        if chunk.usage is not None:
            record.usage_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            token_ids = choice.token_ids or []
            record.token_ids += token_ids
            record.token_times_s += [now_s] * len(token_ids)
            record.text += choice.text or ""
            record.finish_reason = choice.finish_reason or record.finish_reason
            self._progress.tokens += len(token_ids)

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress)


class _Lines:
    """Cuts a byte stream into the data of its server-sent events (one line each, as OpenAI servers send them)."""

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
    return str(chunk.error.get("message")) if isinstance(chunk.error, dict) else body[:200].decode(errors="replace")
