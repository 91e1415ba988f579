"""An instance that follows a script: it speaks the instance protocol over real sockets and fails
where it is told to.

With EXACT_RESUME among its capabilities it continues a stream as engines of ours do. Without, it is
a plain P/D engine, which takes the history for a prompt and knows nothing of the object `kvrs`.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.net.http import PieceWriter, answer
from kvrs.net.routes import JSON, Request, Response, Routes
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import (
    NO_OTHER_NAMES,
    Capability,
    ExpertReport,
    FenceRequest,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    MeasuredPrefill,
    ModelNames,
    RankAnswer,
    RankInfo,
    RankRequest,
    ReformingReport,
    RestartReport,
    Role,
    SpeculationReport,
    StageInfo,
    StageLent,
)
from kvrs.protocol.openai.chunks import (
    DONE,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Choice,
    Completion,
    Usage,
    error_body,
    sse,
    usage_of,
)
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from kvrs_testkit.scripted_agent import ScriptedAgent
from kvrs_testkit.scripted_model import (
    Arithmetic,
    Step,
    Writer,
    choice_of,
    finish_of,
    ids_of,
    rendered,
)
from kvrs_testkit.scripted_server import SECRET as SECRET
from kvrs_testkit.scripted_server import ScriptedServer

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
    """Breaks one stream before it sends its event number `event`, [DONE] included; its first
    attempt only.
    """

    fault: Fault
    event: int
    seed: int | None = None  # Of several choices only the one with this seed.


@dataclass
class Script:
    """The script that all instances of a test share."""

    faults: dict[int, Fault] = field(default_factory=dict)  # By output position; each happens once.
    finish_faults: list[Fault] = field(
        default_factory=list
    )  # Between the last token's event and [DONE].
    cuts: dict[str, Cut] = field(
        default_factory=dict
    )  # By the `user` of the request; each happens once.
    lengths: dict[int | None, int] = field(
        default_factory=dict
    )  # Events of complete streams, by seed.
    prefill_faults: list[Fault] = field(default_factory=list)
    tokens_per_event: int = 1
    stop_after: int | None = None  # The position whose token ends the stream with "stop".
    separate_finish: bool = (
        False  # The finish comes in an event of its own, after the last token's.
    )
    # What the events of a chat add to its message, from the first token on, in place of the text;
    # undecoded JSON, as a parser may write it.
    deltas: Sequence[Any] = ()
    pause_s: float = 0.0  # Between two events.
    gate: asyncio.Event | None = None  # Streams wait for it before position `gate_at`.
    gate_at: int = 0
    prefill_gate: asyncio.Event | None = None  # Prefill calls wait for it.
    prefill_s: float = 0.0  # They take so long.
    fetch_s: float = 0.0  # What a decode call fetches or computes before its first event.
    # By the `user` of the request: the output position before which it kills its decode instance,
    # or -1, its prefill instance.
    poisons: dict[str, int] = field(default_factory=dict)
    poisoned: list[tuple[str, str]] = field(default_factory=list)  # Deaths: user, instance.
    event_padding: int = 0  # Bytes of text added to every token, for clients that do not read.


@dataclass(eq=False)
class Scripted(ScriptedServer):
    """One instance."""

    role: Role = Role.BOTH
    script: Script = field(default_factory=Script)
    fingerprint: str = "same"
    model: str = "scripted"
    capabilities: list[Capability] = field(default_factory=lambda: list(Capability))
    completions: list[CompletionRequest | ChatRequest] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)  # The same, undecoded.
    parses: bool = False  # A plain engine with a parser, which takes all of a chat for reasoning.
    lease_updates: list[LeaseUpdate] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)  # Streams whose lease is reported as unknown.
    fences: list[dict[str, int]] = field(default_factory=list)
    running: int = 0
    queued: int = 0
    free_pages: int = 9
    total_pages: int = 0
    queue_delay_s: float = 0.0
    checkpoint_lag_pages: int = 0
    damaged_pages: int = 0
    speculation: SpeculationReport | None = None
    kv_bytes: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    reforming: ReformingReport | None = None
    layout_number: int = 0
    degree: int = 0
    full_degree: int = 0
    rank_deaths: int = 0
    ranks: list[RankInfo] = field(default_factory=list)
    stages: list[StageInfo] = field(default_factory=list)
    experts: ExpertReport | None = None
    lends: list[StageLent] = field(default_factory=list)
    restarts: list[RestartReport] = field(default_factory=list)
    adopted_pages: int = 0
    rank_orders: list[RankRequest] = field(default_factory=list)
    aborted: int = 0
    watches: int = 0
    reports: int = 0  # That it has sent there.
    refusal: tuple[int, bytes] | None = None  # The answer to every completion.
    retry_after: str | None = None  # Its header.
    dying: asyncio.Task[None] | None = None  # Of a poisoned request.
    hangs: bool = False  # It answers no completion, and all else.
    created: int = 100
    cached_tokens: int | None = None  # What it says of the prompts that it computes.
    deaf: bool = False  # It runs, but does not answer with its identity.
    own_prefill: str | None = (
        # It is the decode instance of a server, and sends the prompt's ids in the first event.
        None
    )
    names_prompt: bool = True
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    draws: bool = True  # Else it refuses a temperature, as DistServe.
    moves_kv: bool = True  # Else what it should fetch does not come, and it computes that.
    fetched_pages: int | None = 0
    names: ModelNames = NO_OTHER_NAMES
    hangs_on: str = ""  # Streams whose ids begin so get no answer.
    gpus: list[str] | None = None
    # They get the pages of checkpoints, as soon as these are full.
    agents: Mapping[str, ScriptedAgent] = field(default_factory=dict)

    def add_routes(self, routes: Routes) -> None:
        routes.add("POST", "/v1/completions", self._completions)
        routes.add("POST", "/v1/chat/completions", self._completions)
        routes.add("GET", "/kvrs/v1/instance", self._info)
        routes.add("GET", "/kvrs/v1/load", self._load)
        routes.add("POST", "/kvrs/v1/leases", self._leases)
        routes.add("POST", "/kvrs/v1/fence", self._fence)
        routes.add("POST", "/kvrs/v1/ranks", self._order_rank)

    def info(self) -> InstanceInfo:
        return InstanceInfo(
            id=InstanceId(self.id),
            node=NodeId(self.node),
            role=self.role,
            epoch=self.epoch,
            pid=self.pid,
            model=self.model,
            fingerprint=self.fingerprint,
            geometry=GEOMETRY,
            max_model_len=4096,
            page_port=1,
            capabilities=self.capabilities,
            prefill=MeasuredPrefill("test", 256, [0.001, 0.01, 0.02]),
            own_prefill=None if self.own_prefill is None else InstanceId(self.own_prefill),
            ranks=self.ranks,
            names=self.names,
            gpus=self.gpus,
        )

    async def _info(self, _: Request) -> Response:
        if self.deaf:
            return Response(503)
        return _json(self.info())

    async def _load(self, request: Request) -> Response:
        if "watch" not in request.query:
            return _json(self._report())
        writer = PieceWriter(request, "application/x-ndjson")
        self._watching.add(request.connection)
        self.watches += 1
        try:
            while True:
                await writer.write(msgspec.json.encode(self._report()) + b"\n")
                self.reports += 1
                await asyncio.sleep(float(request.query["watch"]))
                await self.awake.wait()
        finally:
            self.watches -= 1

    def _report(self) -> LoadReport:
        return LoadReport(
            self.epoch,
            queued=self.queued,
            running=self.running,
            free_pages=self.free_pages,
            total_pages=self.total_pages,
            queue_delay_s=self.queue_delay_s,
            links=[],
            checkpoint_lag_pages=self.checkpoint_lag_pages,
            damaged_pages=self.damaged_pages,
            speculation=self.speculation,
            fetched_pages=self.fetched_pages,
            kv_bytes=self.kv_bytes,
            draining=self.draining,
            reforming=self.reforming,
            layout_number=self.layout_number,
            degree=self.degree,
            full_degree=self.full_degree,
            rank_deaths=self.rank_deaths,
            stages=self.stages,
            experts=self.experts,
            lends=self.lends,
            restarts=self.restarts,
            adopted_pages=self.adopted_pages,
        )

    async def _leases(self, request: Request) -> Response:
        update = msgspec.json.decode(await request.read(), type=LeaseUpdate)
        self.lease_updates.append(update)
        return _json(LeaseAnswer([stream for stream in update.renew if stream in self.forgotten]))

    async def _fence(self, request: Request) -> Response:
        parsed = msgspec.json.decode(await request.read(), type=FenceRequest)
        self.fences.append({str(stream): attempt for stream, attempt in parsed.attempts.items()})
        self.epoch += 1
        return _json(self.info())

    async def _order_rank(self, request: Request) -> Response:
        """Orders for ranks that it shows are carried out."""
        parsed = msgspec.json.decode(await request.read(), type=RankRequest)
        self.rank_orders.append(parsed)
        there = [each.rank for each in self.ranks]
        refused = None if parsed.rank in there else f"rank: got {parsed.rank}; allowed: {there}"
        return _json(RankAnswer(refused))

    async def _completions(self, request: Request) -> Response:
        body = await request.read()
        parsed = (
            parse_completion_request(body)
            if request.path == "/v1/completions"
            else parse_chat_request(body)
        )
        assert parsed.n == 1
        assert not getattr(parsed, "echo", False)
        self.completions.append(parsed)
        self.bodies.append(msgspec.json.decode(body))
        name = "" if parsed.kvrs is None else parsed.kvrs.stream
        if self.hangs or (self.hangs_on and name.startswith(self.hangs_on)):
            await asyncio.sleep(60)
        if self.refusal is not None:
            later = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return Response(*self.refusal, {"Content-Type": JSON, **later})
        if parsed.given_temperature and not self.draws:
            return Response(400, error_body("temperature"))
        if parsed.kv_transfer_params is not None and parsed.kv_transfer_params.do_remote_decode:
            return await self._prefill(request, parsed)
        self.running += 1
        try:
            return await self._decode(request, parsed)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    def _history(self, parsed: CompletionRequest | ChatRequest) -> list[int]:
        if isinstance(parsed, CompletionRequest):
            return ids_of(parsed.prompt)
        given = parsed.kvrs.token_ids if parsed.kvrs is not None and self.exact else None
        return rendered(parsed) if given is None else list(given)

    @property
    def exact(self) -> bool:
        return Capability.EXACT_RESUME in self.capabilities

    async def _prefill(self, request: Request, parsed: CompletionRequest | ChatRequest) -> Response:
        if self.script.prefill_faults:
            match self.script.prefill_faults.pop(0):
                case Fault.UNAVAILABLE:
                    return Response(503, error_body("full"))
                case Fault.EMPTY:
                    return Response(200, b"")
                case Fault.HANG:
                    await asyncio.sleep(60)
                case _:
                    request.connection.abort()
        if self.script.poisons.get(parsed.user or "") == -1:
            await self._die_of(parsed)
        if self.script.prefill_gate is not None:
            await self.script.prefill_gate.wait()
        if self.script.prefill_s:
            await asyncio.sleep(self.script.prefill_s)
            await self.awake.wait()
        assert parsed.kvrs is not None
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": []}
        ids = {"prompt_token_ids": self._history(parsed)}
        is_chat = isinstance(parsed, ChatRequest)
        # A field that the proxy does not know must reach decode all the same.
        transfer = {
            "do_remote_prefill": True,
            "remote_engine_id": self.id,
            "remote_request_id": parsed.kvrs.stream,
            "tp_size": 1,
        }
        whole = {
            "id": "cmpl-1",
            "choices": [choice if is_chat else choice | ids],
            "usage": usage_of(len(ids["prompt_token_ids"]), 0, self.cached_tokens),
            "kv_transfer_params": transfer,
        }
        return answer(whole | ids if is_chat else whole)

    async def _decode(self, request: Request, parsed: CompletionRequest | ChatRequest) -> Response:
        assert parsed.kvrs is not None
        history = self._history(parsed)
        if self.moves_kv and self.fetched_pages is not None:
            self.fetched_pages += sum(run.pages for run in parsed.kvrs.sources)
        prompt_tokens = (parsed.kvrs.prompt_tokens or len(history)) if self.exact else len(history)
        if (first := self.script.faults.get(len(history) - prompt_tokens)) in _INSTEAD:
            del self.script.faults[len(history) - prompt_tokens]
            return Response(_INSTEAD[first], b"" if first is Fault.EMPTY else error_body("no"))
        writer = PieceWriter(request, "text/event-stream")
        await asyncio.sleep(self.script.fetch_s)
        sent = 0
        position = len(history) - prompt_tokens
        poisoned_at = self.script.poisons.get(parsed.user or "", -1)
        if 0 <= poisoned_at <= position:
            await self._die_of(parsed)
        async for event in self._events(parsed, history, prompt_tokens):
            await self.awake.wait()
            if poisoned_at >= 0 and position + sent >= poisoned_at:
                await self._die_of(parsed)
            if isinstance(event, Fault):
                return await _break(request, writer, event)
            if (cut := self._cut_before(parsed, sent)) is not None:
                return await _break(request, writer, cut)
            await writer.write(self._parsed(event, sent - 1))
            sent += 1
            for place in parsed.kvrs.checkpoints:
                if (agent := self.agents.get(place.agent)) is not None:
                    agent.pages[parsed.kvrs.stream] = len(history) // GEOMETRY.page_size_tokens
        self.script.lengths[parsed.seed] = sent
        return writer.end()

    def _parsed(self, event: bytes, place: int) -> bytes:
        """The event with the delta that the script has for its place."""
        if not 0 <= place < len(self.script.deltas) or event == DONE:
            return event
        made = msgspec.json.decode(event.removeprefix(b"data: "))
        for choice in made["choices"]:
            choice["delta"] = self.script.deltas[place]
        return sse(msgspec.json.encode(made))

    async def _die_of(self, parsed: CompletionRequest | ChatRequest) -> None:
        """The process ends, as by a fault of its GPU; nothing more comes."""
        if self.dying is None or self.dying.done():
            self.script.poisoned.append((parsed.user or "", self.id))
            self.dying = asyncio.create_task(self.kill())
        await asyncio.Event().wait()

    def _cut_before(self, parsed: CompletionRequest | ChatRequest, event: int) -> Fault | None:
        cut = self.script.cuts.get(parsed.user or "")
        if cut is None or cut.event != event or cut.seed not in (None, parsed.seed):
            return None
        del self.script.cuts[parsed.user or ""]
        return cut.fault

    async def _events(
        self, parsed: CompletionRequest | ChatRequest, history: list[int], prompt_tokens: int
    ) -> AsyncIterator[bytes | Fault]:
        """All of a stream's events, with [DONE], or the fault that ends it."""
        assert parsed.kvrs is not None
        script, position = self.script, len(history) - prompt_tokens
        begun_with = len(history)
        head = _Head(
            parsed,
            f"{'chat' if isinstance(parsed, ChatRequest) else ''}cmpl-{parsed.kvrs.stream}",
            self.created,
        )
        writer = Writer(parsed, self.exact)
        steps = [writer.write(token_id) for token_id in history[prompt_tokens:]]
        prompt = history[:prompt_tokens] if self._names_prompt(parsed) and position == 0 else None
        if isinstance(parsed, ChatRequest) and position == 0:
            yield head.event(
                ChatChunkChoice(delta=ChatDelta(role="assistant", content="")), prompt=prompt
            )
        made = False
        while not steps or steps[-1].finish_reason is None:
            if script.gate is not None and position >= script.gate_at:
                await script.gate.wait()
            if (fault := script.faults.pop(position, None)) is not None:
                yield fault
                return
            fresh: list[Step] = []
            while len(fresh) < script.tokens_per_event and (
                not fresh or fresh[-1].finish_reason is None
            ):
                fresh.append(self._step(writer, parsed, history, begun_with))
                position += 1
                if position in script.faults:
                    break
            steps, made = steps + fresh, True
            choice = choice_of(
                parsed, fresh, fresh[-1].finish_reason is not None and not script.separate_finish
            )
            if isinstance(choice, Choice) and prompt is not None:
                choice.prompt_token_ids, prompt = prompt, None
            if isinstance(choice, Choice):
                choice.text += "x" * script.event_padding * len(fresh)
            elif self.parses:
                # The first tokens are a marker, of which a parser shows nothing.
                text = choice.delta.content if position > len(fresh) else None
                choice.delta = ChatDelta(reasoning_content=text)
            yield head.event(choice)
            await asyncio.sleep(script.pause_s)
        if script.finish_faults:
            yield script.finish_faults.pop(0)
            return
        # With a complete history only this is left to send.
        if script.separate_finish or not made:
            yield head.event(finish_of(parsed, steps[-1]))
        if parsed.stream_options is not None and parsed.stream_options.include_usage:
            yield head.event(None, usage_of(prompt_tokens, position, self.cached_tokens))
        yield DONE

    def _names_prompt(self, parsed: CompletionRequest | ChatRequest) -> bool:
        return (
            self.own_prefill is not None and self.names_prompt and parsed.kv_transfer_params is None
        )

    def _step(
        self,
        writer: Writer,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        begun_with: int,
    ) -> Step:
        seed = parsed.seed if parsed.temperature > 0 else None
        token_id = self.arithmetic.next_token(history, begun_with, seed)
        history.append(token_id)
        step = writer.write(token_id)
        assert parsed.kvrs is not None
        if len(history) - parsed.kvrs.prompt_tokens == self.script.stop_after:
            return replace(step, finish_reason="stop", rest=writer.finish())
        return step


@dataclass(frozen=True, slots=True)
class _Head:
    parsed: CompletionRequest | ChatRequest
    id: str
    created: int

    def event(
        self,
        choice: Choice | ChatChunkChoice | None,
        usage: Usage | None = None,
        prompt: list[int] | None = None,
    ) -> bytes:
        kind: Any = ChatChunk if isinstance(self.parsed, ChatRequest) else Completion
        made = kind(self.id, self.created, "scripted", [] if choice is None else [choice])
        if usage is not None:
            made.usage = usage
        if prompt is not None:
            made.prompt_token_ids = prompt
        return sse(msgspec.json.encode(made))


async def _break(request: Request, writer: PieceWriter, fault: Fault) -> Response:
    match fault:
        case Fault.RESET:
            request.connection.abort()
        case Fault.CUT:
            await writer.write(b'data: {"id":"cmpl-x","created":1,"model":"scr')
            writer.transport.close()
        case Fault.DONE_ONLY:
            await writer.write(DONE)
        case Fault.ERROR:
            await writer.write(sse(error_body("the engine died", kind="server_error")) + DONE)
        case Fault.GARBAGE:
            await writer.write(sse(b"{not json") + DONE)
        case Fault.HANG:
            await asyncio.sleep(60)
        case _:
            pass
    return writer.end()


def _json(message: msgspec.Struct) -> Response:
    return answer(message)
