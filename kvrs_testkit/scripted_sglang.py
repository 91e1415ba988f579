"""A server with SGLang's interfaces, as far as a proxy uses them, whose legs meet in rooms and die
as those of SGLang die: a prefill without its decode waits, and a decode without its prefill hangs.

It notes as violations what the real one answers with a hang: a room that is used twice, and one leg
that comes with another body than the other.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrs.net.http import PieceWriter, answer
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.instance import REPLAY_KEY
from kvrs.protocol.openai.chunks import DONE, sse, usage_of
from kvrs.protocol.openai.fields import SGLANG
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from kvrs_testkit.engine_streams import Recording
from kvrs_testkit.engine_streams.playing import Player
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import Step, Writer, choice_of, ids_of, rendered, token_after
from kvrs_testkit.scripted_server import DyingWriter, ScriptedServer

PAGE = 16
_STARTS = itertools.count(1)
_ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(eq=False)
class Room:
    """The meeting of two legs."""

    bodies: dict[str, Any] = field(default_factory=dict)  # By role.
    legs: dict[str, Request] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)  # On the clock of the event loop.
    # Legs that were closed by the other end, by role: whether decode had sent an event by then.
    aborted: dict[str, bool] = field(default_factory=dict)
    has_begun: bool = False  # Decode has sent an event.
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # Decode has reserved memory.
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # All KV is there.
    prefill_ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class SglangScript:
    """The script that the servers of one cluster share."""

    rooms: dict[int, Room] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    faults: dict[int, Fault] = field(default_factory=dict)  # By output position; each happens once.
    # What happens, once, when a prefill has computed.
    prefill_fault: Fault | None = None
    prompt_tokens: int = 3
    compute_s: float = 0.0  # What a prefill takes.
    transfer_s: float = 0.0  # What its KV takes after that.
    # Time in which decode notices the loss of its prefill, and gives up; None: it waits on.
    notice_s: float | None = None
    pause_s: float = 0.0  # Between two events.
    gate: asyncio.Event | None = None  # Streams wait for it before position `gate_at`.
    gate_at: int = 0
    starts: dict[int, int] = field(default_factory=dict)  # Of prefill servers, by bootstrap port.


@dataclass(eq=False)
class ScriptedSglang(ScriptedServer):
    role: str = "decode"
    mode: str | None = None  # Its --disaggregation-mode; None: as its role.
    script: SglangScript = field(default_factory=SglangScript)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    start_number: int = 0
    model: str = "tiny"
    root: str = "/models/tiny"
    version: str = "0.5.23"
    transfer_backend: str = "mooncake"
    reasoning_parser: str | None = None
    max_running: int = 64
    # Paths that it does not have: without --enable-metrics that of those.
    lacks: set[str] = field(default_factory=lambda: {"/metrics"})
    sent_mb: float = 0.0  # Of KV.
    hides_kv: bool = False  # It counts none of it.
    legs: int = 0  # Open ones.
    refuses_with: int = 0  # Status of its answer to each completion; 0: it serves them.
    is_leaving: bool = False  # SIGTERM has come: it serves on until its last stream has ended.
    fails_loads: bool = False  # Its `/v1/loads` are HTTP 500.
    computed: float = 0.0
    step_s: float = 0.0  # Time of the decode steps, of which it counts ten more at each read.
    steps: int = 0
    accelerator: str | None = None  # Name of its GPU; None: it names none.
    replays: bool = False  # Its flags say that it has `kvrs/sglang/replay.py`.
    reused_tokens: int = 0  # Of each prompt, that its prefix cache is to have had.
    # Outputs that it was to generate again.
    replayed: list[list[int]] = field(default_factory=list)
    # The answer to each streamed or whole chat, and to completions that continue it.
    recording: Recording | None = None
    differs_at: int | None = None  # Position in that at which it generates another token.
    # By bootstrap address, the start of the prefill server that decode has met there first.
    met: dict[str, int] = field(default_factory=dict)

    def add_routes(self, routes: Routes) -> None:
        for path, handler in (
            ("/server_info", self._server_info),
            ("/v1/models", self._models),
            ("/v1/loads", self._loads),
            ("/ready", self._ready),
            ("/metrics", self._metrics),
        ):
            if path not in self.lacks:
                routes.add("GET", path, handler)
        if "/tokenize" not in self.lacks:
            routes.add("POST", "/tokenize", self._tokenize)
        routes.add("POST", "/v1/completions", self._completions)
        routes.add("POST", "/v1/chat/completions", self._completions)

    async def start(self) -> None:
        self.start_number, self.legs = next(_STARTS), 0
        self.met.clear()
        await super().start()
        self.script.starts[self.port] = self.start_number

    async def _server_info(self, _: Request) -> Response:
        return _json(
            {
                "version": self.version,
                "page_size": PAGE,
                "model_path": self.root,
                "weight_version": "default",
                "dtype": "float32",
                "kv_cache_dtype": "auto",
                "disaggregation_mode": self.mode or self.role,
                "disaggregation_transfer_backend": self.transfer_backend,
                "disaggregation_bootstrap_port": self.port if self.role == "prefill" else 0,
                "disable_radix_cache": False,
                "reasoning_parser": self.recording.reasoning_parser
                if self.recording is not None
                else self.reasoning_parser,
                "enable_custom_logit_processor": self.replays,
                "hicache_storage_backend_extra_config": '{"module_path": "kvrs.sglang.storage"}',
                "max_running_requests": self.max_running,
                "random_seed": 7,
                "internal_states": [
                    {
                        "startup_time": {"scheduler_e2e": self.start_number + 0.25},
                        "effective_max_running_requests_per_dp": self.max_running,
                    }
                ],
            }
        )

    async def _models(self, _: Request) -> Response:
        model = {"id": self.model, "root": self.root, "parent": None, "max_model_len": 4096}
        return _json({"data": [model]})

    async def _loads(self, _: Request) -> Response:
        if self.fails_loads:
            return Response(500)
        self.steps += 10 if self.step_s else 0
        moments = [self.steps, 2 * self.steps, 1e6 * self.step_s * self.steps, 0.0, 0.0, 0.0]
        load = {
            "num_running_reqs": self.legs,
            "num_waiting_reqs": 0,
            "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 16 * self.legs,
            "max_total_num_tokens": 16_384,
            "total_prefill_uncached_tokens": round(self.computed),
            "total_prefill_busy_us": 1000 * round(self.computed),
            "decode_moments": moments if self.steps else None,
        }
        named = {"accelerator": self.accelerator, "num_accelerators": 1}
        return _json({"loads": [load]} | (named if self.accelerator else {}))

    async def _metrics(self, _: Request) -> Response:
        labels = f'engine_type="{self.role}",tp_rank="0"'
        text = f"sglang:kv_transfer_total_mb_sum{{{labels}}} {self.sent_mb}\n"
        return Response(200, text.encode())

    async def _ready(self, _: Request) -> Response:
        return Response(503 if self.is_leaving else 200)

    async def _tokenize(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.read())
        self.bodies.append(body)
        if "messages" in body:
            chat = parse_chat_request(msgspec.json.encode({"messages": body["messages"]}))
            tokens = self._history(chat)
        else:
            tokens = ids_of(body["prompt"])
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": 4096})

    async def _completions(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.read())
        self.bodies.append(body)
        if self.refuses_with:
            return _refusal("refused by the test", self.refuses_with)
        is_chat = request.path.startswith("/v1/chat")
        if is_chat and body.get("return_token_ids"):
            return _refusal("return_token_ids is not supported with streaming")
        room = {name: body.pop(name) for name in _ROOM if name in body}
        if body.pop("custom_logit_processor", None) is not None:
            if not self.replays:
                return _refusal("The server is not configured to enable custom logit processor.")
            self.replayed.append(body.pop("custom_params")[REPLAY_KEY])
        parse = parse_chat_request if is_chat else parse_completion_request
        parsed = parse(msgspec.json.encode(body), SGLANG)
        self.legs += 1
        try:
            mode = self.mode or self.role
            if mode == "null":
                return await self._decode(request, parsed, None)
            if len(room) != len(_ROOM):
                return _refusal("a request of a pair needs bootstrap_host, _port and _room")
            met = self._enter(mode, room, body)
            met.legs[mode] = request
            try:
                if mode == "prefill":
                    return await self._prefill(request, parsed, met)
                return await self._decode(request, parsed, met)
            except (asyncio.CancelledError, ConnectionError):
                met.aborted[mode] = met.has_begun
                raise
            finally:
                met.ended_s[mode] = asyncio.get_running_loop().time()
                if mode == "prefill":
                    met.prefill_ended.set()
        finally:
            self.legs -= 1

    def _enter(self, mode: str, fields: dict[str, Any], body: dict[str, Any]) -> Room:
        host, port, number = (fields[name] for name in _ROOM)
        room = self.script.rooms.setdefault(number, Room())
        if mode in room.bodies:
            self.script.violations.append(f"room {number} has two legs of {mode}")
        room.bodies[mode] = body
        asked = [{**body, "stream_options": None} for body in room.bodies.values()]
        if len(asked) == 2 and asked[0] != asked[1]:
            self.script.violations.append(f"the legs of room {number} have different bodies")
        if mode == "decode":
            start = self.script.starts[port]
            if self.met.setdefault(f"{host}:{port}", start) == start:
                room.joined.set()  # Otherwise it joins a process that is no more.
        return room

    async def _prefill(
        self, request: Request, parsed: CompletionRequest | ChatRequest, room: Room
    ) -> Response:
        history = self._history(parsed)
        writer = PieceWriter(request, "text/event-stream; charset=utf-8")
        await room.joined.wait()
        await self._paused(self.script.compute_s)
        self.computed += len(history)
        if self.script.prefill_fault is not None:
            fault, self.script.prefill_fault = self.script.prefill_fault, None
            return await _break(request, writer, fault, self.model)
        await self._paused(self.script.transfer_s)
        room.sent.set()
        self.sent_mb += 0.0 if self.hides_kv else len(history) / 1024
        choice = {"index": 0, "text": "", "token_ids": [token_after(history)]}
        event = _event(self.model, choice | {"finish_reason": "length"})
        if parsed.wants_usage:
            event += _usage(self.model, len(history), self.reused_tokens)
        await writer.write(event + DONE)
        return writer.end()

    async def _decode(
        self,
        request: Request,
        parsed: CompletionRequest | ChatRequest,
        room: Room | None,
    ) -> Response:
        history = self._history(parsed)
        player = None if self.recording is None else Player(self.recording, self.differs_at)
        place = None if player is None else player.place(history)
        if player is not None and player.plays(parsed) and not parsed.stream:
            if room is not None:
                await room.sent.wait()
            return _json(player.whole(model=self.model, returns_ids=False))
        prompt, position = list(history), len(history) - self.script.prompt_tokens
        writer = DyingWriter(request, "text/event-stream; charset=utf-8", self)
        if room is not None and not await self._has_kv(room):
            return await _break(request, writer, Fault.ERROR, self.model)
        text, is_over = Writer(parsed, exact=False), False
        if player is not None and place is not None:
            if player.plays(parsed):
                return await self._play(request, writer, player, parsed)
            position = place
            shows_special = self.bodies[-1].get("skip_special_tokens") is False
            text = player.writer(parsed, shows_special=shows_special)
        while not is_over:
            if self.script.gate is not None and position >= self.script.gate_at:
                await self.script.gate.wait()
            if (fault := self.script.faults.pop(position, None)) is not None:
                return await _break(request, writer, fault, self.model)
            token = None if player is None else player.next_token(history)
            step = text.write(token_after(history) if token is None else token)
            history.append(step.token_id)
            position += 1
            is_over = step.finish_reason is not None
            await self._paused(self.script.pause_s)
            if room is not None:
                room.has_begun = True
            first = {"prompt_token_ids": prompt} if len(history) == len(prompt) + 1 else {}
            await writer.write(_event(self.model, _choice(parsed, step, is_over) | first))
        await writer.write(DONE)
        return writer.end()

    async def _has_kv(self, room: Room) -> bool:
        """Wait until all KV is there; return False if decode gives up."""
        if self.script.notice_s is None:
            await room.sent.wait()
            return True
        waits = [asyncio.create_task(each.wait()) for each in (room.sent, room.prefill_ended)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not room.sent.is_set():
            await asyncio.sleep(self.script.notice_s)
        return room.sent.is_set()

    def _history(self, parsed: CompletionRequest | ChatRequest) -> list[int]:
        if self.recording is not None and isinstance(parsed, ChatRequest):
            return list(self.recording.prompt_ids)
        return _history(parsed)

    async def _play(
        self, request: Request, writer: PieceWriter, player: Player, parsed: ChatRequest
    ) -> Response:
        for event in player.events(model=self.model, returns_ids=True, number=len(self.bodies)):
            if self.script.gate is not None and event.behind > self.script.gate_at:
                await self.script.gate.wait()
            for at in range(event.first, event.behind):
                if (fault := self.script.faults.pop(at, None)) is not None:
                    return await _break(request, writer, fault, self.model)
            await self._paused(self.script.pause_s)
            await writer.write(event.data)
        if parsed.wants_usage:
            counts = player.usage
            await writer.write(
                _usage(self.model, counts["prompt_tokens"], 0, counts["completion_tokens"])
            )
        await writer.write(DONE)
        return writer.end()

    async def _paused(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.awake.wait()


def _history(parsed: CompletionRequest | ChatRequest) -> list[int]:
    return ids_of(parsed.prompt) if isinstance(parsed, CompletionRequest) else rendered(parsed)


def _choice(parsed: CompletionRequest | ChatRequest, step: Step, is_over: bool) -> dict[str, Any]:
    """The choice as SGLang has it: none of chats has ids, and a stop is named otherwise."""
    choice: dict[str, Any] = msgspec.to_builtins(choice_of(parsed, [step], is_over))
    choice["matched_stop"] = choice.pop("stop_reason", None)
    if isinstance(parsed, ChatRequest) or not parsed.return_token_ids:
        choice.pop("token_ids", None)
    return choice


async def _break(request: Request, writer: PieceWriter, fault: Fault, model: str) -> Response:
    match fault:
        case Fault.RESET:
            request.connection.abort()
        case Fault.ERROR:  # Prefill was lost, or the scheduler gave up.
            error = {"message": "Decode transfer failed", "type": "Internal", "code": 500}
            await writer.write(sse(msgspec.json.encode({"error": error})) + DONE)
        case Fault.DONE_ONLY:  # An abort without a status ends like a finish.
            choice = {"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}
            await writer.write(_event(model, choice) + DONE)
        case Fault.HANG:
            await asyncio.sleep(60)
        case _:
            pass
    return writer.end()


def _event(model: str, choice: dict[str, Any]) -> bytes:
    event = {"id": "c0ffee", "object": "text_completion", "created": 7, "model": model}
    return sse(msgspec.json.encode(event | {"choices": [choice], "usage": None}))


def _usage(model: str, tokens: int, cached: int, made: int = 1) -> bytes:
    usage = usage_of(tokens, made, cached)
    event = {"id": "c0ffee", "object": "text_completion", "created": 7, "model": model}
    return sse(msgspec.json.encode(event | {"choices": [], "usage": usage}))


def _refusal(message: str, status: int = 400) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    return answer({"error": error}, status)


def _json(said: Any) -> Response:
    return answer(said, 200)
