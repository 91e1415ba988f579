"""An instance that follows a script: it speaks the instance protocol over real sockets and fails where it is told to.

With EXACT_RESUME among its capabilities it continues a stream as engines of ours do. Without, it is a plain P/D engine, which
takes the history for a prompt and knows nothing of the object `kvrs`.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

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
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    Usage,
    error_body,
    parse_chat_request,
    parse_completion_request,
    sse,
)
from tests.proxy.scripted_model import Step, Writer, choice_of, finish_of, ids_of, rendered, token_after
from tests.proxy.scripted_server import ScriptedServer, abort

SECRET = b"a secret of the tests"
GEOMETRY = KvGeometry(layers=2, kv_heads=2, head_dim=8, dtype_bytes=4, page_size_tokens=16)


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
    EMPTY = "empty"  # HTTP 200 with nothing in it.
    CONFLICT = "conflict"  # HTTP 409, likewise.


# What comes in place of a whole answer, as the status.
_INSTEAD = {Fault.UNAVAILABLE: 503, Fault.CONFLICT: 409, Fault.EMPTY: 200}
BREAKS = [Fault.RESET, Fault.CUT, Fault.EOF, Fault.DONE_ONLY, Fault.ERROR, Fault.GARBAGE]


@dataclass(frozen=True, slots=True)
class Cut:
    """Breaks one stream before it sends its event number `event`, [DONE] included; its first attempt only."""

    fault: Fault
    event: int
    seed: int | None = None  # Of several choices only the one with this seed.


@dataclass
class Script:
    """What all instances of a test share."""

    faults: dict[int, Fault] = field(default_factory=dict)  # By output position; each happens once.
    finish_faults: list[Fault] = field(default_factory=list)  # Between the last token's event and [DONE].
    cuts: dict[str, Cut] = field(default_factory=dict)  # By the `user` of the request; each happens once.
    lengths: dict[int | None, int] = field(default_factory=dict)  # Events of the streams that ended well, by seed.
    prefill_faults: list[Fault] = field(default_factory=list)
    tokens_per_event: int = 1
    stop_after: int | None = None  # The position whose token ends the stream with "stop".
    separate_finish: bool = False  # The finish comes in an event of its own, after the last token's.
    pause_s: float = 0.0  # Between two events.
    gate: asyncio.Event | None = None  # Streams wait for it before position `gate_at`.
    gate_at: int = 0
    prefill_gate: asyncio.Event | None = None  # Prefill calls wait for it.
    event_padding: int = 0  # Bytes of text added to every token, for clients that do not read.


@dataclass(eq=False)
class Scripted(ScriptedServer):
    """One instance."""

    role: Role = Role.BOTH
    script: Script = field(default_factory=Script)
    fingerprint: str = "same"
    capabilities: list[Capability] = field(default_factory=lambda: list(Capability))
    completions: list[CompletionRequest | ChatRequest] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # The same, undecoded.
    parses: bool = False  # A plain engine with a parser for reasoning.
    lease_updates: list[LeaseUpdate] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)  # Streams whose lease is said to be unknown.
    fences: list[dict[str, int]] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    queue_delay_s: float = 0.0
    checkpoint_lag_pages: int = 0
    damaged_pages: int = 0
    draining: bool = False
    aborted: int = 0
    watches: int = 0
    refusal: tuple[int, bytes] | None = None
    created: int = 100
    deaf: bool = False  # It runs on, but does not say who it is.
    own_prefill: str | None = None  # It is the decode instance of a server, and says the prompt's ids in the first event.
    names_prompt: bool = True

    def routes(self, router: web.UrlDispatcher) -> None:
        router.add_post("/v1/completions", self._completions)
        router.add_post("/v1/chat/completions", self._completions)
        router.add_get("/kvrs/v1/instance", self._info)
        router.add_get("/kvrs/v1/load", self._load)
        router.add_post("/kvrs/v1/leases", self._leases)
        router.add_post("/kvrs/v1/fence", self._fence)

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
            own_prefill=None if self.own_prefill is None else InstanceId(self.own_prefill),
        )

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
                report = LoadReport(
                    self.epoch,
                    queued=self.queued,
                    running=self.running,
                    free_pages=9,
                    queue_delay_s=self.queue_delay_s,
                    links=[],
                    checkpoint_lag_pages=self.checkpoint_lag_pages,
                    damaged_pages=self.damaged_pages,
                    draining=self.draining,
                )
                await response.write(msgspec.json.encode(report) + b"\n")
                await asyncio.sleep(float(request.query["watch"]))
                await self.awake.wait()
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
        body = await request.read()
        asked = parse_completion_request(body) if request.path == "/v1/completions" else parse_chat_request(body)
        assert asked.n == 1
        assert not getattr(asked, "echo", False)
        self.completions.append(asked)
        self.bodies.append(msgspec.json.decode(body))
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

    def _history(self, asked: CompletionRequest | ChatRequest) -> list[int]:
        if isinstance(asked, CompletionRequest):
            return ids_of(asked.prompt)
        given = asked.kvrs.token_ids if asked.kvrs is not None and self.exact else None
        return rendered(asked) if given is None else list(given)

    @property
    def exact(self) -> bool:
        return Capability.EXACT_RESUME in self.capabilities

    async def _prefill(self, request: web.Request, asked: CompletionRequest | ChatRequest) -> web.StreamResponse:
        if self.script.prefill_faults:
            match self.script.prefill_faults.pop(0):
                case Fault.UNAVAILABLE:
                    return web.Response(status=503, body=error_body("full"))
                case Fault.EMPTY:
                    return web.Response(body=b"")
                case Fault.HANG:
                    await asyncio.sleep(60)
                case _:
                    assert request.transport is not None
                    abort(request.transport)
        if self.script.prefill_gate is not None:
            await self.script.prefill_gate.wait()
        assert asked.kvrs is not None
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": []}
        ids = {"prompt_token_ids": self._history(asked)}
        is_chat = isinstance(asked, ChatRequest)
        # A field that the proxy does not know must reach decode all the same.
        transfer = {
            "do_remote_prefill": True,
            "remote_engine_id": self.id,
            "remote_request_id": asked.kvrs.stream,
            "tp_size": 1,
        }
        whole = {"id": "cmpl-1", "choices": [choice if is_chat else choice | ids], "kv_transfer_params": transfer}
        return web.Response(body=msgspec.json.encode(whole | ids if is_chat else whole), content_type="application/json")

    async def _decode(self, request: web.Request, asked: CompletionRequest | ChatRequest) -> web.StreamResponse:
        assert asked.kvrs is not None
        history = self._history(asked)
        prompt_tokens = (asked.kvrs.prompt_tokens or len(history)) if self.exact else len(history)
        if (first := self.script.faults.get(len(history) - prompt_tokens)) in _INSTEAD:
            del self.script.faults[len(history) - prompt_tokens]
            return web.Response(status=_INSTEAD[first], body=b"" if first is Fault.EMPTY else error_body("no"))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        async for event in self._events(asked, history, prompt_tokens):
            await self.awake.wait()
            if isinstance(event, Fault):
                return await _break(request, response, event)
            if (cut := self._cut_before(asked, sent)) is not None:
                return await _break(request, response, cut)
            await response.write(event)
            sent += 1
        self.script.lengths[asked.seed] = sent
        return response

    def _cut_before(self, asked: CompletionRequest | ChatRequest, event: int) -> Fault | None:
        cut = self.script.cuts.get(asked.user or "")
        if cut is None or cut.event != event or cut.seed not in (None, asked.seed):
            return None
        del self.script.cuts[asked.user or ""]
        return cut.fault

    async def _events(
        self, asked: CompletionRequest | ChatRequest, history: list[int], prompt_tokens: int
    ) -> AsyncIterator[bytes | Fault]:
        """All of a stream's events, with [DONE], or the fault that ends it."""
        assert asked.kvrs is not None
        script, position = self.script, len(history) - prompt_tokens
        head = _Head(asked, f"{'chat' if isinstance(asked, ChatRequest) else ''}cmpl-{asked.kvrs.stream}", self.created)
        writer = Writer(asked, history[:prompt_tokens], self.exact or self.parses)
        steps = [writer.write(token_id) for token_id in history[prompt_tokens:]]
        prompt = history[:prompt_tokens] if self._names_prompt(asked) and position == 0 else None
        if isinstance(asked, ChatRequest) and position == 0:
            yield head.event(ChatChunkChoice(delta=Delta(role="assistant", content="")), prompt=prompt)
        made = False
        while not steps or steps[-1].finish_reason is None:
            if script.gate is not None and position >= script.gate_at:
                await script.gate.wait()
            if (fault := script.faults.pop(position, None)) is not None:
                yield fault
                return
            fresh: list[Step] = []
            while len(fresh) < script.tokens_per_event and (not fresh or fresh[-1].finish_reason is None):
                fresh.append(self._step(writer, asked, history))
                position += 1
                if position in script.faults:
                    break
            steps, made = steps + fresh, True
            choice = choice_of(asked, fresh, fresh[-1].finish_reason is not None and not script.separate_finish)
            if isinstance(choice, Choice) and prompt is not None:
                choice.prompt_token_ids, prompt = prompt, None
            if isinstance(choice, Choice):
                choice.text += "x" * script.event_padding * len(fresh)
            yield head.event(choice)
            await asyncio.sleep(script.pause_s)
        if script.finish_faults:
            yield script.finish_faults.pop(0)
            return
        # Where the history was complete already, this is all that is left to say.
        if script.separate_finish or not made:
            yield head.event(finish_of(asked, steps[-1]))
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield head.event(None, Usage(prompt_tokens, position, prompt_tokens + position))
        yield DONE

    def _names_prompt(self, asked: CompletionRequest | ChatRequest) -> bool:
        return self.own_prefill is not None and self.names_prompt and asked.kv_transfer_params is None

    def _step(self, writer: Writer, asked: CompletionRequest | ChatRequest, history: list[int]) -> Step:
        token_id = token_after(history, asked.seed if asked.temperature > 0 else None)
        history.append(token_id)
        step = writer.write(token_id)
        assert asked.kvrs is not None
        if len(history) - asked.kvrs.prompt_tokens == self.script.stop_after:
            return replace(step, finish_reason="stop", rest=writer.finish())
        return step


@dataclass(frozen=True, slots=True)
class _Head:
    asked: CompletionRequest | ChatRequest
    id: str
    created: int

    def event(
        self, choice: Choice | ChatChunkChoice | None, usage: Usage | None = None, prompt: list[int] | None = None
    ) -> bytes:
        kind: Any = ChatChunk if isinstance(self.asked, ChatRequest) else Completion
        made = kind(self.id, self.created, "scripted", [] if choice is None else [choice])
        if usage is not None:
            made.usage = usage
        if prompt is not None:
            made.prompt_token_ids = prompt
        return sse(msgspec.json.encode(made))


async def _break(request: web.Request, response: web.StreamResponse, fault: Fault) -> web.StreamResponse:
    assert request.transport is not None
    match fault:
        case Fault.RESET:
            abort(request.transport)
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


def _json(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")
