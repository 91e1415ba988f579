"""An instance that follows a script: it speaks the instance protocol over real sockets and fails where it is told to.

Token i is a hash of everything before it, so that a wrong continuation differs from its first token on, and a lost or
repeated token cannot hide.
"""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any, cast

import msgspec
from aiohttp import web

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    Capability,
    FenceRequest,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    MeasuredPrefill,
    Role,
)
from kvrs.protocol.openai import (
    DONE,
    Choice,
    Completion,
    CompletionRequest,
    Usage,
    error_body,
    parse_completion_request,
    sse,
)

SECRET = b"a secret of the tests"
VOCABULARY = 500
GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4, page_size_tokens=16)
_TEXTS = ("a", " b", "é", '"', ',"token_ids":[7],', "\n", " data: x\n\n", "]}", "\\", "[DONE]")
_PIDS = itertools.count(1000)


def token_after(history: list[int]) -> int:
    digest = blake2b(msgspec.json.encode(history), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def text_of(token_id: int) -> str:
    return _TEXTS[token_id % len(_TEXTS)] + str(token_id)


def expected_ids(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed stream produces."""
    history = list(prompt)
    for _ in range(count):
        history.append(token_after(history))
    return history[len(prompt) :]


def ids_of(prompt: str | list[int]) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


class Fault(StrEnum):
    """How a stream breaks before the output token it is set for."""

    RESET = "reset"
    CUT = "cut"  # The connection ends in the middle of an event.
    EOF = "eof"  # A clean end of the response, without finish or [DONE].
    DONE_ONLY = "done_only"
    ERROR = "error"  # An error event, then [DONE]: what vLLM does.
    HANG = "hang"
    GARBAGE = "garbage"
    UNAVAILABLE = "unavailable"  # HTTP 503, before any token.
    CONFLICT = "conflict"  # HTTP 409, likewise.


BREAKS = [Fault.RESET, Fault.CUT, Fault.EOF, Fault.DONE_ONLY, Fault.ERROR, Fault.GARBAGE]


@dataclass
class Script:
    """What all instances of a test share."""

    faults: dict[int, Fault] = field(default_factory=dict)  # By output position; each happens once.
    finish_faults: list[Fault] = field(default_factory=list)  # Between the last token's event and [DONE].
    prefill_faults: list[Fault] = field(default_factory=list)
    tokens_per_event: int = 1
    stop_after: int | None = None  # The position whose token ends the stream with "stop".
    separate_finish: bool = False  # The finish comes in an event of its own, after the last token's.
    pause_s: float = 0.0  # Between two events.
    gate: asyncio.Event | None = None  # Streams wait for it before position `gate_at`.
    gate_at: int = 0
    event_padding: int = 0  # Bytes of text added to every token, for clients that do not read.


@dataclass(eq=False)
class Scripted:
    """One instance. Everything that it was asked is kept for the test to look at."""

    id: str
    node: str
    role: Role
    script: Script
    epoch: int = 1
    pid: int = field(default_factory=lambda: next(_PIDS))
    fingerprint: str = "same"
    capabilities: list[Capability] = field(default_factory=lambda: list(Capability))
    port: int = 0
    completions: list[CompletionRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    lease_updates: list[LeaseUpdate] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)  # Streams whose lease is said to be unknown.
    fences: list[dict[str, int]] = field(default_factory=list)
    running: int = 0
    aborted: int = 0
    watches: int = 0
    refusal: tuple[int, bytes] | None = None
    created: int = 100
    deaf: bool = False  # It runs on, but does not say who it is.
    _runner: web.AppRunner | None = None
    _connections: set[asyncio.BaseTransport] = field(default_factory=set)
    _watching: set[asyncio.BaseTransport] = field(default_factory=set)

    async def start(self) -> None:
        app = web.Application(middlewares=[self._note])
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/kvrs/v1/instance", self._info)
        app.router.add_get("/kvrs/v1/load", self._load)
        app.router.add_post("/kvrs/v1/leases", self._leases)
        app.router.add_post("/kvrs/v1/fence", self._fence)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """As by SIGKILL: every connection is reset in the same instant, and nobody listens."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        for transport in list(self._connections):
            _abort(transport)
        await self._runner.cleanup()
        self._runner = None

    async def restart(self) -> None:
        self.epoch += 1
        self.pid = next(_PIDS)
        await self.start()

    async def close(self) -> None:
        if self._runner is not None:
            await self.kill()

    def cut_watch(self) -> None:
        """Only the proxy's watch connection breaks; the instance lives on."""
        for transport in list(self._watching):
            _abort(transport)

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            id=InstanceId(self.id),
            node=NodeId(self.node),
            role=self.role,
            epoch=self.epoch,
            pid=self.pid,
            model="scripted",
            fingerprint=self.fingerprint,
            geometry=GEOMETRY,
            max_model_len=4096,
            page_port=1,
            capabilities=self.capabilities,
            prefill=MeasuredPrefill("test", 256, [0.001, 0.01, 0.02]),
        )

    @web.middleware
    async def _note(self, request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
        assert request.transport is not None
        self._connections.add(request.transport)
        self.calls.append(f"{request.method} {request.path}")
        self.headers.append(dict(request.headers))
        response: web.StreamResponse = await handler(request)
        return response

    async def _info(self, _: web.Request) -> web.Response:
        if self.deaf:
            return web.Response(status=503)
        return _json(self.info())

    async def _load(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        assert request.transport is not None
        self._watching.add(request.transport)
        self.watches += 1
        try:
            while True:
                report = LoadReport(self.epoch, queued=0, running=self.running, free_pages=9, queue_delay_s=0.0, links=[])
                await response.write(msgspec.json.encode(report) + b"\n")
                await asyncio.sleep(float(request.query["watch"]))
        finally:
            self.watches -= 1

    async def _leases(self, request: web.Request) -> web.Response:
        update = msgspec.json.decode(await request.read(), type=LeaseUpdate)
        self.lease_updates.append(update)
        return _json(LeaseAnswer([stream for stream in update.renew if stream in self.forgotten]))

    async def _fence(self, request: web.Request) -> web.Response:
        asked = msgspec.json.decode(await request.read(), type=FenceRequest)
        self.fences.append({str(stream): attempt for stream, attempt in asked.attempts.items()})
        self.epoch += 1
        return _json(self.info())

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked = parse_completion_request(await request.read())
        self.completions.append(asked)
        if self.refusal is not None:
            return web.Response(status=self.refusal[0], body=self.refusal[1], content_type="application/json")
        if asked.kv_transfer_params is not None and asked.kv_transfer_params.do_remote_decode:
            return await self._prefill(request, asked)
        self.running += 1
        try:
            return await self._decode(request, asked)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _prefill(self, request: web.Request, asked: CompletionRequest) -> web.StreamResponse:
        if self.script.prefill_faults:
            match self.script.prefill_faults.pop(0):
                case Fault.UNAVAILABLE:
                    return web.Response(status=503, body=error_body("full"))
                case Fault.HANG:
                    await asyncio.sleep(60)
                case _:
                    assert request.transport is not None
                    _abort(request.transport)
        ids = ids_of(asked.prompt)
        assert asked.kvrs is not None
        choice = Choice(text="", finish_reason="length", prompt_token_ids=ids, token_ids=[])
        whole = msgspec.to_builtins(Completion(f"cmpl-{asked.kvrs.stream}", 1, "scripted", [choice]))
        # A field that the proxy does not know must reach decode all the same.
        whole["kv_transfer_params"] = {
            "do_remote_prefill": True,
            "remote_engine_id": self.id,
            "remote_request_id": asked.kvrs.stream,
            "tp_size": 1,
        }
        return web.Response(body=msgspec.json.encode(whole), content_type="application/json")

    async def _decode(self, request: web.Request, asked: CompletionRequest) -> web.StreamResponse:
        assert asked.kvrs is not None
        assert not isinstance(asked.prompt, str)
        history, prompt_tokens = list(asked.prompt), asked.kvrs.prompt_tokens
        position = len(history) - prompt_tokens
        if (first := self.script.faults.get(position)) in (Fault.UNAVAILABLE, Fault.CONFLICT):
            del self.script.faults[position]
            return web.Response(status=503 if first is Fault.UNAVAILABLE else 409, body=error_body("no"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = {"id": f"cmpl-{asked.kvrs.stream}", "created": self.created, "model": "scripted"}
        finish: str | None = None
        while finish is None:
            if self.script.gate is not None and position >= self.script.gate_at:
                await self.script.gate.wait()
            if (fault := self.script.faults.pop(position, None)) is not None:
                return await _break(request, response, fault)
            ids: list[int] = []
            while len(ids) < self.script.tokens_per_event and finish is None:
                ids.append(token_after(history))
                history.append(ids[-1])
                position += 1
                finish = self._finish_at(position, asked)
                if position in self.script.faults:
                    break
            text = "".join(text_of(token_id) + "x" * self.script.event_padding for token_id in ids)
            shown = None if self.script.separate_finish else finish
            await _write(response, head, Choice(text=text, finish_reason=shown, token_ids=ids))
            await asyncio.sleep(self.script.pause_s)
        return await self._finish(request, response, head, asked, finish, position, prompt_tokens)

    def _finish_at(self, position: int, asked: CompletionRequest) -> str | None:
        if position == self.script.stop_after:
            return "stop"
        return "length" if position >= asked.max_tokens else None

    async def _finish(
        self,
        request: web.Request,
        response: web.StreamResponse,
        head: dict[str, Any],
        asked: CompletionRequest,
        finish: str,
        position: int,
        prompt_tokens: int,
    ) -> web.StreamResponse:
        if self.script.finish_faults:
            return await _break(request, response, self.script.finish_faults.pop(0))
        if self.script.separate_finish:
            await _write(response, head, Choice(text="", finish_reason=finish, token_ids=[]))
        if asked.stream_options is not None and asked.stream_options.include_usage:
            usage = Usage(prompt_tokens, position, prompt_tokens + position)
            await response.write(sse(msgspec.json.encode(Completion(**head, choices=[], usage=usage))))
        await response.write(DONE)
        return response


async def _write(response: web.StreamResponse, head: dict[str, Any], choice: Choice) -> None:
    await response.write(sse(msgspec.json.encode(Completion(**head, choices=[choice]))))


async def _break(request: web.Request, response: web.StreamResponse, fault: Fault) -> web.StreamResponse:
    assert request.transport is not None
    match fault:
        case Fault.RESET:
            _abort(request.transport)
        case Fault.CUT:
            await response.write(b'data: {"id":"cmpl-x","created":1,"model":"scr')
            request.transport.close()
        case Fault.DONE_ONLY:
            await response.write(DONE)
        case Fault.ERROR:
            await response.write(sse(error_body("the engine died", kind="server_error")) + DONE)
        case Fault.GARBAGE:
            await response.write(sse(b"{not json") + DONE)
        case Fault.HANG:
            await asyncio.sleep(60)
        case _:
            pass
    return response


def _abort(transport: asyncio.BaseTransport) -> None:
    # uvloop's transports do what asyncio's do, and descend from none of them.
    cast(asyncio.Transport, transport).abort()


def _json(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")
