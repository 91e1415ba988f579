"""A server with vLLM's interfaces, as far as a proxy uses them, that dies in the ways in which vLLM
dies.

It is as particular about `kv_transfer_params` as the real one is careless: where that one would go
wrong in silence (the same hand-off pulled twice), or take its engine along (no blocks), this one
notes a violation.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from kvrs.net.http import PieceWriter
from kvrs.net.routes import JSON, WRITTEN, Handler, Request, Response, Routes
from kvrs.protocol.instance import REPLAY_KEY
from kvrs.protocol.openai.chunks import DONE, sse
from kvrs.protocol.openai.fields import VLLM, ApiKind, whole
from kvrs.protocol.openai.requests import (
    ChatRequest,
    CompletionRequest,
    parse_chat_request,
    parse_completion_request,
)
from kvrs_testkit.engine_streams import Recording
from kvrs_testkit.engine_streams.playing import Player
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_model import (
    Arithmetic,
    Step,
    Writer,
    choice_of,
    ids_of,
    rendered,
    token_after,
)
from kvrs_testkit.scripted_server import DyingWriter, ScriptedServer
from kvrs_testkit.scripted_store import StoreClient

PAGE = 16
_ENGINES = itertools.count(1)
_STARTS = itertools.count(1_700_000_000)
REFUSED = {
    "message": "Token id 600 is out of vocabulary",
    "type": "BadRequestError",
    "param": "prompt",
    "code": 400,
}
# Fields of an event that has a usage.
BESIDE_USAGE: dict[str, Any] = {
    "system_fingerprint": "vllm-0.32",
    "metrics": {"queue_s": 0.1},
    "kv_transfer_params": {"remote_host": "a host"},
}
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@dataclass
class VllmScript:
    """The script that the servers of one cluster share."""

    engines: set[str] = field(default_factory=set)  # That live, by id.
    hand_offs: dict[str, list[int]] = field(
        default_factory=dict
    )  # Not pulled yet: histories by request id.
    faults: dict[int, Fault] = field(
        default_factory=dict
    )  # By output position of the whole stream; each happens once.
    prompt_tokens: int = 3
    violations: list[str] = field(default_factory=list)
    gate: asyncio.Event | None = None  # Streams wait for it before position `gate_at`.
    gate_at: int = 0
    tokens_per_event: int = 1
    pause_s: float = 0.0  # Between two events.


@dataclass(eq=False)
class ScriptedVllm(ScriptedServer):
    role: str = "decode"
    script: VllmScript = field(default_factory=VllmScript)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    engine: str = ""
    started_s: int = 0
    # Each read of `/metrics` is answered by another one of so many processes; 0: by a new one.
    processes: int = 1
    reads: int = 0  # Of `/metrics`.
    model: str = "tiny"
    root: str = "/models/tiny"
    aliases: list[str] = field(default_factory=list)
    # By name: where their weights lie.
    adapters: dict[str, str] = field(default_factory=lambda: {"adapter": "/adapters/a"})
    version: str = "0.32.0"
    connector: bool = True
    has_tier: bool = False  # It has its own CPU tier, with kvrs in that.
    row_bytes: float = 0.0  # That a request which names agents loads, in `row_s`.
    row_s: float = 0.001
    row_loads: int = 0
    spoils_rows: bool = False  # What it loads is another prompt's.
    store: StoreClient | None = None
    lacks: set[str] = field(default_factory=set)  # Fields, metrics and paths that it does not know.
    transfer: dict[str, Any] = field(
        default_factory=dict
    )  # Changes to what prefill hands over; ... removes a field.
    default_tokens: int | None = None  # Of a chat that names no limit.
    says_more: bool = False  # Its usage has details.
    # Prompts whose first token ends the output: nothing is handed over of them.
    ends_at_once: tuple[list[int], ...] = ()
    api_key: str | None = None
    # Status with which a gateway answers completions: all, or those of longer prompts.
    denies: int | None = None
    denies_beyond_tokens: int = 0
    queue: asyncio.Event | None = None  # What it decodes waits for it, and may be aborted before.
    pull: asyncio.Event | None = None  # What it has begun to fetch comes with this.
    fetching: int = 0  # Requests whose KV it fetches.
    aborted_pulls: int = 0
    running: int = 0
    waiting: int = 0
    pulled: int = 0
    drafts: tuple[int, ...] = ()  # Of its speculative decoding: steps, proposed, accepted.
    drafts_each: tuple[int, ...] = (0, 0, 0)  # That a completion adds to these.
    # With which log probabilities list its own token and all others; None: it lists none.
    tie_gap: float | None = None
    arithmetic: Arithmetic | None = None  # None: every request is a greedy one.
    replays: bool = False  # It has the logits processor of `kvrs/vllm/replay.py`.
    moves_kv: bool = True  # Else what it should pull does not come, and it computes that.
    received_bytes: float = 0.0
    bytes_per_token: float = 1.0
    pull_s: float = 0.0  # What each token of a hand-off takes.
    pulled_s: float = 0.0
    # NIXL's other counters, by name, and its hash as newer versions show it.
    nixl: dict[str, float] = field(default_factory=dict)
    hash: str | None = None
    cache_dtype: str = "auto"
    # Status of its engines, where it runs with fault tolerance.
    engines: list[str] | None = None
    ft_path: str = "/fault_tolerance/status"
    # By path of a question: the status with which it fails, the seconds after which it answers, or
    # "closes", which ends the connection.
    fails: dict[str, int | float | str] = field(default_factory=dict)
    prefix_caching: bool = True
    cached: dict[tuple[str | None, tuple[int, ...]], None] = field(default_factory=dict)
    cold: bool = False  # Its first seeded request has to wait for kernels to be compiled.
    waited: list[dict[str, Any]] = field(default_factory=list)  # Requests that had to.
    in_one_piece: bool = False  # It answers with one token where no stream is asked for.
    # The message of whole answers to chats, by its parser of these, and how such answers end.
    message: dict[str, Any] | None = None
    finish_reason: str | None = None  # None: as a stream.
    hides_ids: bool = False  # Those of such answers.
    reasons: bool = False  # Streams of chats have reasoning in them.
    tokens: int | None = None  # That it has made, as it counts them.
    # Name and seconds of the intervals between tokens of which it counts ten more at each read.
    step: tuple[str, float] | None = None
    passed: tuple[str, ...] = ()  # Paths that it answers with what it got.
    count: int | None = None  # Of tokens, which such an answer has beside that.
    dies_passing: bool = False  # Once: the process ends with the request.
    # The answer to each streamed or whole chat, and to completions that continue it.
    recording: Recording | None = None
    differs_at: int | None = None  # Position in that at which it generates another token.

    def add_routes(self, routes: Routes) -> None:
        asked = {"/health": self._health, "/metrics": self._metrics, "/v1/models": self._models}
        if self.engines is not None:
            asked[self.ft_path] = self._fault_tolerance
        for path, handler in asked.items():
            routes.add("GET", path, partial(self._unless_it_fails, path, handler))
        routes.add("GET", "/version", self._version)
        routes.add("POST", "/v1/completions", self._completions)
        routes.add("POST", "/v1/chat/completions", self._completions)
        for path in self.passed:
            routes.add("POST", path, self._pass)

    async def _unless_it_fails(self, path: str, handler: Handler, request: Request) -> Response:
        match self.fails.get(path):
            case None:
                return await handler(request)
            case int(status):
                return Response(status)
            case float(seconds):
                await asyncio.sleep(seconds)
                return await handler(request)
            case _:
                request.connection.abort()
                return WRITTEN

    async def start(self) -> None:
        self.engine, self.started_s = f"engine-{next(_ENGINES)}", next(_STARTS)
        self.script.engines.add(self.engine)
        if self.store is not None:
            self.store.restart()
        await super().start()

    async def kill(self) -> None:
        self.script.engines.discard(self.engine)
        await super().kill()

    def kill_engine(self) -> None:
        """Kill the process that computes; the server runs on for a moment."""
        self.script.engines.discard(self.engine)

    @property
    def names(self) -> list[str]:
        return [self.model, *self.aliases, *self.adapters]

    @property
    def is_dead(self) -> bool:
        return self.engine not in self.script.engines

    async def _health(self, _: Request) -> Response:
        return Response(503 if self.is_dead else 200)

    async def _fault_tolerance(self, _: Request) -> Response:
        engines = [{"id": n, "status": status} for n, status in enumerate(self.engines or [])]
        return _json({"total_engines": len(engines), "engines": engines})

    async def _pass(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.read())
        self.bodies.append(body)
        if self.dies_passing:
            self.dies_passing = False
            request.connection.abort()
        counted = {} if self.count is None else {"count": self.count}
        return _json({"path": request.path, "got": body} | counted)

    async def _version(self, _: Request) -> Response:
        return _json({"version": self.version})

    async def _models(self, request: Request) -> Response:
        if (
            self.api_key is not None
            and request.headers.get("Authorization") != f"Bearer {self.api_key}"
        ):
            return _json({"error": "Unauthorized"}, 401)
        adapters = [
            {"id": name, "root": root, "parent": self.model, "max_model_len": None}
            for name, root in self.adapters.items()
        ]
        models = [
            {"id": name, "root": self.root, "parent": None, "max_model_len": 4096}
            for name in (self.model, *self.aliases)
        ]
        return _json({"data": [*adapters, *models]})

    async def _metrics(self, _: Request) -> Response:
        self.reads += 1
        process = self.reads % self.processes if self.processes else self.reads
        labels = f'engine="0",model_name="{self.model}"'
        lines = [
            "# HELP process_start_time_seconds Start time of the process since unix "
            "epoch in seconds.",
            f"process_start_time_seconds {self.started_s + process / 100!r}",
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}",
            f"vllm:num_requests_waiting{{{labels}}} {float(self.waiting)}",
            f"vllm:kv_cache_usage_perc{{{labels}}} 0.25",
            f'vllm:num_requests_kv_fetch_by_stage{{{labels},stage="waiting_to_start"}} 1.0',
            f'vllm:num_requests_kv_fetch_by_stage{{{labels},stage="in_progress"}} {self.fetching}',
            f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} {self.fetching}',
            f'vllm:cache_config_info{{block_size="{PAGE}",num_gpu_blocks="100",'
            f'enable_prefix_caching="{self.prefix_caching}",cache_dtype="{self.cache_dtype}",'
            'x="a\\"b"} 1.0',
            f"vllm:request_prefill_time_seconds_sum{{{labels}}} 1.0",
            f"vllm:request_prefill_time_seconds_count{{{labels}}} 4.0",
        ]
        if self.step is not None:
            name, step_s = self.step
            lines.append(f"vllm:{name}_seconds_count{{{labels}}} {10.0 * self.reads}")
            lines.append(f"vllm:{name}_seconds_sum{{{labels}}} {10 * self.reads * step_s}")
        if self.tokens is not None:
            lines.append(f"vllm:generation_tokens_total{{{labels}}} {float(self.tokens)}")
        for name, count in zip(
            ("drafts", "draft_tokens", "accepted_tokens"), self.drafts, strict=False
        ):
            lines.append(f"vllm:spec_decode_num_{name}_total{{{labels}}} {float(count)}")
        if self.connector:
            counts = {
                "num_failed_transfers_total": 0.0,
                "bytes_transferred_sum": self.received_bytes,
                "xfer_time_seconds_sum": self.pulled_s,
                "xfer_time_seconds_count": float(self.pulled),
            } | self.nixl
            lines += [f"vllm:nixl_{name}{{{labels}}} {count}" for name, count in counts.items()]
        if self.has_tier:
            for tier, loads in (("1:KvrsTier", self.row_loads), ("2:fs", 99)):
                for name, each in (("bytes", self.row_bytes), ("time", self.row_s)):
                    lines.append(
                        f"vllm:kv_offload_tiering_read_{name}_total"
                        f'{{{labels},tier="{tier}"}} {loads * each}'
                    )
        if self.store is not None:
            lines += self.store.metrics(labels)
        if self.hash is not None:
            lines.append(f'vllm:nixl_config_info{{{labels},compatibility_hash="{self.hash}"}} 1.0')
        kept = [line for line in lines if not any(name in line for name in self.lacks)]
        return Response(200, ("\n".join(kept) + "\n").encode(), {"Content-Type": "text/plain"})

    async def _completions(self, request: Request) -> Response:
        body = await request.read()
        fields = msgspec.json.decode(body)
        api = ApiKind.CHAT if "messages" in fields else ApiKind.COMPLETIONS
        if "echo" in fields or not whole(api).isdisjoint(fields):
            return await self._pass(request)
        self.bodies.append(msgspec.json.decode(body))
        known = self.bodies[-1].get("vllm_xargs", {}).get(REPLAY_KEY, []) if self.replays else []
        fields = {
            name: value
            for name, value in self.bodies[-1].items()
            if name not in ("kv_transfer_params", "vllm_xargs")
        }
        parse = parse_chat_request if "messages" in fields else parse_completion_request
        parsed = parse(msgspec.json.encode(fields), VLLM)
        if self.denies is not None and len(self._history(parsed)) > self.denies_beyond_tokens:
            return _json({"detail": "not for you"}, self.denies)
        transfer = self.bodies[-1].get("kv_transfer_params")
        salt = self.bodies[-1].get("cache_salt")
        if (asked := self.bodies[-1].get("model", self.model)) not in self.names:
            error = {"message": f"The model `{asked}` does not exist.", "type": "NotFoundError"}
            return _json({"error": error | {"param": "model", "code": 404}}, 404)
        if "kvrs" in self.bodies[-1]:
            self.script.violations.append("the object kvrs was sent")
        if self.is_dead:
            return _json(
                {
                    "error": {
                        "message": ENGINE_DEAD,
                        "type": "InternalServerError",
                        "param": None,
                        "code": 500,
                    }
                },
                500,
            )
        if self.cold and parsed.seed is not None and parsed.temperature > 0:
            self.cold = False
            self.waited.append(self.bodies[-1])
            await asyncio.sleep(0.3)
        if any(status != "healthy" for status in self.engines or []):
            return _json({"error": {"message": "unhealthy", "code": 503}}, 503)
        if transfer is not None:
            parsed = self._as_loaded(transfer, parsed)
            if transfer.get("do_remote_decode"):
                return self._prefill(parsed)
            if not transfer.get("do_remote_prefill"):
                transfer = None
        self.running += 1
        self.drafts = tuple(map(sum, zip(self.drafts, self.drafts_each, strict=False)))
        try:
            return await self._decode(request, parsed, transfer, known, salt)
        finally:
            self.running -= 1

    def _as_loaded(
        self, transfer: dict[str, Any], parsed: CompletionRequest | ChatRequest
    ) -> CompletionRequest | ChatRequest:
        """The request as it is computed behind what kvrs loads for it."""
        if self.has_tier:
            loads = bool(transfer.get("kvrs", {}).get("agents"))
            self.row_loads += loads
            if loads and self.spoils_rows:
                return _spoilt(parsed)
        elif "kvrs" in transfer:
            self.script.violations.append("parameters for a tier that is not there")
        return parsed

    def _from_store(
        self, parsed: CompletionRequest | ChatRequest, salt: str | None
    ) -> tuple[CompletionRequest | ChatRequest, bool]:
        """The request as it is computed behind what the store has, and whether that can be
        loaded.
        """
        if self.store is None:
            return parsed, True
        found, is_right = self.store.load(salt, self._history(parsed))
        return parsed if is_right else _spoilt(parsed), not (found and self.store.fails)

    def _one_token(self, parsed: CompletionRequest | ChatRequest, salt: str | None) -> Response:
        history = self._history(parsed)
        self.cached[salt, tuple(history)] = None
        choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": [1]}
        usage = {"prompt_tokens": len(history), "completion_tokens": 1}
        return _json({"choices": [choice | {"prompt_token_ids": history}], "usage": usage})

    def _prefill(self, parsed: CompletionRequest | ChatRequest) -> Response:
        history = self._history(parsed)
        name = f"cmpl-{len(self.bodies)}-{self.engine}"
        self.script.hand_offs[name] = history
        transfer: dict[str, Any] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 - (-len(history) // PAGE)))],
            "remote_engine_id": self.engine,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 5801,
            "tp_size": 1,
            "remote_num_tokens": len(history),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        } | self.transfer
        choice = {
            "index": 0,
            "text": "x",
            "finish_reason": "length",
            "token_ids": [1],
            "prompt_token_ids": history,
        }
        whole: dict[str, Any] = {
            "choices": [{key: value for key, value in choice.items() if key not in self.lacks}],
            "kv_transfer_params": {
                key: value for key, value in transfer.items() if value is not ...
            },
        }
        if history in self.ends_at_once:
            del self.script.hand_offs[name]
            whole |= {"choices": [choice | {"finish_reason": "stop"}], "kv_transfer_params": None}
        return _json({key: value for key, value in whole.items() if key not in self.lacks})

    async def _decode(
        self,
        request: Request,
        parsed: CompletionRequest | ChatRequest,
        transfer: Any,
        known: list[int],
        salt: str | None,
    ) -> Response:
        if self.in_one_piece and not parsed.stream:
            return self._one_token(parsed, salt)
        parsed, is_loaded = self._from_store(parsed, salt)
        history = self._history(parsed)
        if self.queue is not None:
            await self._wait_in_queue(self.queue, transfer)
        if self.pull is not None and transfer is not None:
            await self._fetch(self.pull)
        script, position = self.script, self._position(history)
        if script.faults.get(position) is Fault.EMPTY:
            del script.faults[position]
            return Response(200, b"")
        if not self.bodies[-1].get("stream", True) and isinstance(parsed, ChatRequest):
            return await self._whole(request, parsed, history, position, transfer)
        writer = DyingWriter(request, "text/event-stream; charset=utf-8", self)
        if not is_loaded or (transfer is not None and not self._pull(history, transfer)):
            await writer.write(_error("Internal server error") + DONE)
            return writer.end()
        async for event in self._events(parsed, history, position, known):
            if self.is_dead:
                await writer.write(_error(ENGINE_DEAD) + DONE)
                return writer.end()
            if isinstance(event, Fault):
                return await _break(request, writer, event)
            self.cached[salt, tuple(history)] = None
            if self.store is not None:
                self.store.save(salt, history)
            await asyncio.sleep(script.pause_s)
            await self.awake.wait()
            await writer.write(event)
        return writer.end()

    async def _whole(
        self,
        request: Request,
        parsed: ChatRequest,
        history: list[int],
        position: int,
        transfer: Any,
    ) -> Response:
        """A chat's answer in one piece: its parser of these has another message than a stream."""
        assert transfer is None or self._pull(history, transfer)
        if (player := self._player) is not None and player.plays(parsed):
            return await self._whole_played(request, parsed, player)
        prompt, texts, ids, finish_reason = [*history], [], [], None
        async for event in self._events(parsed, history, position, []):
            if isinstance(event, Fault):
                request.connection.abort()
                return Response()
            if event == DONE:
                break
            await asyncio.sleep(self.script.pause_s)
            for choice in msgspec.json.decode(event[6:])["choices"]:
                texts.append(choice["delta"].get("content") or "")
                ids += choice["token_ids"]
                finish_reason = choice["finish_reason"]
        message = self.message or {"role": "assistant", "content": "".join(texts)}
        made = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self.finish_reason or finish_reason,
            "stop_reason": None,
            "token_ids": None if self.hides_ids else ids,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "total_tokens": len(prompt) + len(ids),
            "completion_tokens": len(ids),
        }
        head = {"id": "chatcmpl-x", "created": 7, "model": parsed.model or self.model}
        if self.says_more:
            usage, head = usage | said_of(len(ids)), head | BESIDE_USAGE
        return _json(head | {"choices": [made], "usage": usage, "prompt_token_ids": prompt})

    async def _wait_in_queue(self, queue: asyncio.Event, transfer: Any) -> None:
        try:
            await queue.wait()
        except asyncio.CancelledError:  # Its caller has left: prefill is told.
            if transfer is not None:
                self.script.hand_offs.pop(transfer["remote_request_id"], None)
            raise

    async def _fetch(self, pull: asyncio.Event) -> None:
        self.fetching += 1
        try:
            await pull.wait()
        except asyncio.CancelledError:
            self.aborted_pulls += 1
            raise
        finally:
            self.fetching -= 1

    def _next_token(
        self, parsed: CompletionRequest | ChatRequest, history: list[int], begun_with: int
    ) -> int:
        if self._player is not None and (token := self._player.next_token(history)) is not None:
            return token
        if self.arithmetic is None:
            return token_after(history)
        seed = None
        if parsed.temperature > 0:
            seed = random.getrandbits(60) if parsed.seed is None else parsed.seed
        return self.arithmetic.next_token(history, begun_with, seed)

    def _pull(self, history: list[int], transfer: dict[str, Any]) -> bool:
        if not transfer["remote_block_ids"] or not transfer["remote_block_ids"][0]:
            self.script.violations.append("no blocks")
        if transfer["remote_engine_id"] not in self.script.engines:
            return False
        if self.script.hand_offs.pop(transfer["remote_request_id"], None) != history:
            self.script.violations.append("a hand-off of another history, or pulled twice")
        self.pulled += 1
        self.received_bytes += len(history) * self.bytes_per_token * self.moves_kv
        self.pulled_s += len(history) * self.pull_s
        return True

    async def _events(
        self,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        position: int,
        known: list[int],
    ) -> AsyncIterator[bytes | Fault]:
        if isinstance(parsed, ChatRequest) and parsed.max_tokens is None:
            parsed = msgspec.structs.replace(parsed, max_tokens=self.default_tokens)
        if (player := self._player) is not None and player.plays(parsed):
            async for played in self._played(parsed, player, known):
                yield played
            return
        script, writer, prompt = self.script, self._writer(parsed, history), list(history)
        begun_with = len(history)
        made: list[Step] = []
        while not made or made[-1].finish_reason is None:
            if self.tokens is not None:
                self.tokens += 1
            if script.gate is not None and position >= script.gate_at:
                await script.gate.wait()
            if (fault := script.faults.pop(position, None)) is not None:
                yield fault
                return
            made = []
            while len(made) < script.tokens_per_event and (
                not made or made[-1].finish_reason is None
            ):
                made_before = len(history) - begun_with
                if made_before < len(known):
                    history.append(known[made_before])
                else:
                    history.append(self._next_token(parsed, history, begun_with))
                made.append(writer.write(history[-1]))
                position += 1
                if position in script.faults:
                    break
            choice = msgspec.to_builtins(choice_of(parsed, made, finished=True))
            token_ids = choice.pop("token_ids")
            choice |= {"prompt_token_ids": prompt or None, "token_ids": token_ids}
            prompt = []
            yield _event([self._as_made(parsed, choice)], model=parsed.model or self.model)
        if parsed.stream_options is not None and parsed.stream_options.include_usage:
            usage: dict[str, Any] = {"prompt_tokens": 1, "total_tokens": 2, "completion_tokens": 1}
            if self.says_more:
                made_here = len(history) - begun_with
                usage |= said_of(made_here)
            beside = BESIDE_USAGE if self.says_more else {}
            yield _event([], usage, model=parsed.model or self.model, **beside)
        yield DONE

    # Recordings.

    @property
    def _player(self) -> Player | None:
        return None if self.recording is None else Player(self.recording, self.differs_at)

    def _history(self, parsed: CompletionRequest | ChatRequest) -> list[int]:
        if self.recording is not None and isinstance(parsed, ChatRequest):
            return list(self.recording.prompt_ids)
        return _history(parsed)

    def _position(self, history: list[int]) -> int:
        """Number of output tokens in a history."""
        place = None if self._player is None else self._player.place(history)
        return len(history) - self.script.prompt_tokens if place is None else place

    def _writer(self, parsed: CompletionRequest | ChatRequest, history: list[int]) -> Writer:
        if self._player is None or self._player.place(history) is None:
            return Writer(parsed, False)
        shows_special = self.bodies[-1].get("skip_special_tokens") is False
        return self._player.writer(parsed, shows_special=shows_special)

    async def _played(
        self, parsed: ChatRequest, player: Player, known: list[int]
    ) -> AsyncIterator[bytes | Fault]:
        returns_ids, model = parsed.return_token_ids, parsed.model or self.model
        for event in player.events(
            model=model, returns_ids=returns_ids, number=len(self.bodies), known=known
        ):
            if self.tokens is not None:
                self.tokens += event.behind - event.first
            if self.script.gate is not None and event.behind > self.script.gate_at:
                await self.script.gate.wait()
            for at in range(event.first, event.behind):
                if (fault := self.script.faults.pop(at, None)) is not None:
                    yield fault
                    return
            yield event.data
        if parsed.wants_usage:
            yield _event([], player.usage, model=model)
        yield DONE

    async def _whole_played(
        self, request: Request, parsed: ChatRequest, player: Player
    ) -> Response:
        async for event in self._played(parsed, player, []):
            if isinstance(event, Fault):
                request.connection.abort()
                return Response()
            await asyncio.sleep(self.script.pause_s)
        return _json(
            player.whole(
                model=parsed.model or self.model,
                returns_ids=parsed.return_token_ids,
                number=len(self.bodies),
            )
        )

    def _as_made(
        self, parsed: CompletionRequest | ChatRequest, choice: dict[str, Any]
    ) -> dict[str, Any]:
        """The choice with what this server adds to it, without what it lacks."""
        if self.tie_gap is not None and isinstance(parsed, CompletionRequest):
            listed = [
                {f"token_id:{each}": -0.7, "token_id:0": -0.7 - self.tie_gap}
                for each in choice["token_ids"]
            ]
            choice["logprobs"] = {"top_logprobs": listed} if parsed.logprobs else None
        if self.reasons and "delta" in choice:
            choice["delta"]["reasoning"] = "hm"
        return {key: value for key, value in choice.items() if key not in self.lacks}


def _history(parsed: CompletionRequest | ChatRequest) -> list[int]:
    return ids_of(parsed.prompt) if isinstance(parsed, CompletionRequest) else rendered(parsed)


def _spoilt(parsed: CompletionRequest | ChatRequest) -> CompletionRequest:
    """The request as one behind KV of another prompt."""
    assert isinstance(parsed, CompletionRequest)
    history = _history(parsed)
    return msgspec.structs.replace(parsed, prompt=[history[0] + 1, *history[1:]])


def _event(
    choices: list[dict[str, Any]],
    usage: dict[str, Any] | None = None,
    *,
    model: str,
    **beside: Any,
) -> bytes:
    event: dict[str, Any] = {
        "id": "cmpl-x",
        "object": "text_completion",
        "created": 7,
        "model": model,
        "choices": choices,
    }
    event |= beside
    return sse(msgspec.json.encode(event if usage is None else event | {"usage": usage}))


def said_of(produced: int) -> dict[str, Any]:
    """Details of the usage of a request that has produced so many tokens."""
    return {
        "prompt_tokens_details": {"cached_tokens": 999, "multimodal_tokens": {"image": 2}},
        "completion_tokens_details": {"reasoning_tokens": produced, "drafted": {"tokens": 1}},
        "units": 3,
    }


def _error(message: str) -> bytes:
    kind = "InternalServerError"
    return sse(
        msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": None, "code": 500}}
        )
    )


async def _break(request: Request, writer: PieceWriter, fault: Fault) -> Response:
    match fault:
        case Fault.RESET:
            request.connection.abort()
        case Fault.ERROR:
            await writer.write(_error(ENGINE_DEAD) + DONE)
        case Fault.GARBAGE:
            await writer.write(sse(msgspec.json.encode({"error": REFUSED})) + DONE)
        case Fault.HANG:
            await asyncio.sleep(60)
        case _:
            pass
    return writer.end()


def _json(said: Any, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(said), {"Content-Type": JSON})
