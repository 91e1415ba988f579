"""Backend of unmodified SGLang, with separate prefill and decode or one server for both: identity,
load and the two legs of an attempt.

Prefill and decode get the same request at once, and meet in a room: a number drawn for this
attempt. Prefill pushes the KV into memory that decode has reserved; decode's answer is the stream.
A leg without its peer waits for minutes, so both are watched, and the end of one closes the other.
The end of an idle connection shows a server's death.

The two calls of one attempt at SGLang, prefill and decode: when one call ends early, the other
is of no use and is closed, but not while KV may be moving between them.

| the attempt ends                                    | the legs that are left             |
| --------------------------------------------------- | ---------------------------------- |
| after decode's first event: all KV is there         | are closed at once                 |
| before both calls were sent, or one was not accepted | are closed at once: nothing moves |
| in between, for whatever reason                     | are detached                       |

A detached pair is read on and dropped until decode's first event, the end of both calls, or
TRANSFER_S: SGLang gives the pages of an aborted request to others, and prefill may still write.
"""

import asyncio
import hashlib
import math
import re
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from math import inf
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from kvrs.core.model.member import TRANSFER_S
from kvrs.errors import ConfigError, KvrsError, UpstreamError
from kvrs.profiles.guess import guessed_prefill
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, WatchQuestion
from kvrs.protocol.openai.chunks import CHUNK, error_body
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import StreamOptions
from kvrs.proxy.backends.backend import Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call, Detached, Keeper, limited
from kvrs.proxy.backends.rendering import TOKENIZE, tokenized_ids
from kvrs.proxy.backends.sglang_replay import can_replay, take_replay
from kvrs.proxy.backends.stock_facts import ConfiguredIdentity, CountedSteps, ListedModels
from kvrs.proxy.backends.stock_peer import Asked, StockPeer, Watched
from kvrs.proxy.wire.errors import BusyError, ConnectionLostError, DeniedError, UnusableError
from kvrs.proxy.wire.events import EventSplitter
from kvrs.proxy.wire.requests import CHAT
from kvrs.proxy.wire.upstream import EngineLinks, Need, Reader, Shortcut, Upstream

_ENDS = ("length", "stop")
# Errors of calls that the server has not accepted, so that no KV moves.
_NOT_ACCEPTED = (RefusedError, BusyError, DeniedError)


class PrefillLeg:
    """Reader of prefill's answer. The answer's one token is ignored, since decode sends it too. At
    the end `found` is called with the prompt tokens that prefill had in its cache.
    """

    shortcut = None

    def __init__(self, found: Callable[[int], None] | None = None) -> None:
        self.flow: Upstream | None = None
        self._found = found
        self.is_over = False
        self._splitter = EventSplitter()
        self._finish: str | None = None
        self._cached_tokens: int | None = None

    def feed(self, data: bytes) -> Need:
        """Read a part of the answer. Raises UpstreamError: prefill gave up, or sent no answer."""
        for payload in self._splitter.feed(data):
            if payload == b"[DONE]":
                if self._finish not in _ENDS:
                    raise UpstreamError(f"prefill ended with {self._finish!r}")
                self.is_over = True
                if self._found is not None and self._cached_tokens is not None:
                    self._found(self._cached_tokens)
                return Need.END
            try:
                event = CHUNK.decode(payload)
            except UNREADABLE:
                raise UpstreamError("prefill sent an event that is not a completion") from None
            if event.error is not None:
                raise UpstreamError("prefill sent an error event")
            if event.usage is not None:
                self._cached_tokens = event.usage.cached_tokens
            for choice in event.choices or ():
                self._finish = choice.finish_reason or self._finish
        return Need.MORE

    def check_end(self) -> None:
        """Check that prefill's answer was complete. Raises UpstreamError: the answer was cut."""
        if not self.is_over:
            raise UpstreamError("prefill ended without a finish reason and [DONE]")

    def detach(self) -> None:
        """Drop the function that would learn how many tokens the cache had."""
        self._found = None


class DecodeLeg:
    """Reader of decode's answer, which passes it on to the attempt's reader. Once it is detached,
    it needs nothing but the first event.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader: Reader | None = reader  # None: detached.
        self._first: EventSplitter | None = EventSplitter()  # None: an event has come.
        self.is_sent = False

    @property
    def has_begun(self) -> bool:
        """True if an event has come, and so all KV is there."""
        return self._first is None

    @property
    def flow(self) -> Upstream | None:
        return None if self._reader is None else self._reader.flow

    @flow.setter
    def flow(self, flow: Upstream | None) -> None:
        self.is_sent = True
        if self._reader is not None:
            self._reader.flow = flow

    @property
    def shortcut(self) -> Shortcut | None:
        return None if self._reader is None else self._reader.shortcut

    def feed(self, data: bytes) -> Need:
        if self._first is not None and self._first.feed(data):
            self._first = None
        if self._reader is not None:
            return self._reader.feed(data)
        return Need.NOTHING if self.has_begun else Need.MORE

    def detach(self) -> None:
        self._reader = None


class Window:
    """A first-in, first-out limit on the pairs that run at one decode server. Without it, a prefill
    would wait for its decode in SGLang until its timeout.
    """

    def __init__(self) -> None:
        self.most: float = math.inf
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return sum(not turn.done() for turn in self._waiting)

    async def enter(self) -> None:
        """Wait for a place, which `leave` frees."""
        if self._running < self.most and not self._waiting:
            self._running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        self._running -= 1
        while self._waiting and self._running < self.most:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)


class Pair:
    """The two calls of an attempt. `left` is called when both are over."""

    def __init__(self, decode: DecodeLeg, prefill: PrefillLeg, left: Callable[[], None]) -> None:
        self._decode, self._prefill, self._left = decode, prefill, left
        self._keeper: Keeper | None = None

    async def run(
        self,
        decode: Coroutine[Any, Any, None],
        prefill: Coroutine[Any, Any, None],
        keeper: Keeper | None,
    ) -> None:
        """Run both calls until decode ends. When either call fails or decode ends, the other call
        is closed, or left to the keeper while KV may be moving.

        Raises:
            KvrsError: the error of decode, or of prefill with `is_of_prefill` set.
        """
        self._keeper = keeper
        if keeper is not None:
            keeper.begin()
        self._decoding, self._prefilling = legs = tuple(map(asyncio.create_task, (decode, prefill)))
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if not self._decoding.done():
                try:
                    self._prefilling.result()
                    self._prefill.check_end()
                except KvrsError as error:
                    error.is_of_prefill = True
                    raise
                await asyncio.wait((self._decoding,))
            self._decoding.result()
        finally:
            if keeper is None or not self._is_in_flight():
                self._close()
            else:
                self._detach(keeper)

    def _is_in_flight(self) -> bool:
        """Return whether KV may be moving from prefill to decode."""
        is_sent = self._decode.is_sent and self._prefill.flow is not None
        if not is_sent or self._decode.has_begun:
            return False
        return not any(isinstance(error, _NOT_ACCEPTED) for error in self._errors())

    def _detach(self, keeper: Keeper) -> None:
        self._decode.detach()
        self._prefill.detach()
        if self._is_lost():
            keeper.doubt()
        if self._decoding.done() and self._prefilling.done():
            self._close()
            return
        end = self._end(keeper)
        if not keeper.keep(end):
            end.close()
            self._close()

    def _errors(self) -> list[BaseException]:
        """Return the errors of the legs that are over."""
        done = [leg for leg in (self._decoding, self._prefilling) if leg.done()]
        return [error for leg in done if not leg.cancelled() and (error := leg.exception())]

    def _is_lost(self) -> bool:
        return any(isinstance(error, ConnectionLostError) for error in self._errors())

    def _close(self) -> None:
        for leg in (self._decoding, self._prefilling):
            if not leg.cancel() and not leg.cancelled():
                # Read the error, so that asyncio does not log it as never retrieved.
                leg.exception()
        self._left()
        if self._keeper is not None:
            self._keeper.end()

    async def _end(self, keeper: Keeper) -> Detached:
        """Wait until no KV moves any more, and close both calls."""
        was_lost, outcome = self._is_lost(), Detached.CLOSED
        try:
            async with asyncio.timeout(TRANSFER_S):
                await asyncio.wait((self._decoding,))
                if not self._decode.has_begun:
                    await asyncio.wait((self._prefilling,))
            outcome = Detached.FAILED
            if self._decode.has_begun:
                outcome = Detached.BEGAN
            elif self._is_lost():
                outcome = Detached.LOST
        except TimeoutError:
            outcome = Detached.HUNG
        finally:
            self._close()
        if outcome is Detached.HUNG or (outcome is Detached.LOST and not was_lost):
            keeper.doubt()
        return outcome


_LOADS = "/v1/loads?include=core"
_SENT_KV = re.compile(rb"^sglang:kv_transfer_total_mb_sum(?:\{.*\})? ([0-9.e+]+)$", re.MULTILINE)
_LATE_S = 2.0  # Age in seconds at which a request of the watch counts as late.


class _ServerInfo(msgspec.Struct):
    """The fields of `/server_info` that kvrs reads."""

    version: str
    page_size: int
    model_path: str = ""
    weight_version: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    disaggregation_mode: str = "null"
    disaggregation_transfer_backend: str = ""
    disaggregation_bootstrap_port: int = 0
    disable_radix_cache: bool = False
    reasoning_parser: str | None = None
    # "model": a chat's default values come from the model's files.
    sampling_defaults: str = "model"
    chat_template: str | None = None
    enable_custom_logit_processor: bool = False
    hicache_storage_backend_extra_config: str | None = None
    speculative_algorithm: str | None = None
    random_seed: int = 0  # SGLang draws the seed at its start unless it is configured.
    internal_states: list["_Scheduler"] = []

    @property
    def start(self) -> bytes:
        """Mark of one start of the server: its seed and the durations of its start, which no other
        start has.
        """
        return msgspec.json.encode((self.random_seed, self.internal_states))

    @property
    def has_plain_chats(self) -> bool:
        """True if the text of a chat's answer is the text of its ids: no parser runs, and no
        built-in conversation template adds stop strings.
        """
        template = self.chat_template
        return self.reasoning_parser is None and (template is None or template.endswith(".jinja"))

    @property
    def replays(self) -> bool:
        return can_replay(
            takes_processors=self.enable_custom_logit_processor,
            storage_options=self.hicache_storage_backend_extra_config,
            speculates=self.speculative_algorithm is not None,
        )

    @property
    def most_running(self) -> float:
        """Most requests that run at a time, over all schedulers of the server; infinite: not
        reported.
        """
        return sum(s.effective_max_running_requests_per_dp for s in self.internal_states) or inf


class _Scheduler(msgspec.Struct):
    startup_time: Any = None  # Seconds that each step of the start took, by its name.
    effective_max_running_requests_per_dp: int = 0


class _Loads(msgspec.Struct):
    loads: list["_Load"]
    accelerator: str | None = None  # Name of the GPUs; None: not reported.
    # Number of GPUs of each scheduler; 0: not reported.
    num_accelerators: Annotated[int, msgspec.Meta(ge=0)] = 0


class _Load(msgspec.Struct):
    """The load of one scheduler."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_waiting_uncached_tokens: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    # Prompt tokens computed, and not found in the cache, since the start.
    total_prefill_uncached_tokens: int = 0
    total_prefill_busy_us: int = 0
    # Counters of steps without prompts since the start: the steps, their requests, their
    # microseconds, and three more; None: no step yet, or not reported. A step behind one with
    # prompts, or behind a pause, does not count.
    decode_moments: list[float] | None = None


class SglangBackend(StockPeer):
    """Requests to one SGLang server."""

    ENGINE = "SGLang"
    UNAUTHORISED = "its --api-key is not what the proxy's environment has in KVRS_SGLANG_API_KEY"

    def __init__(self, links: EngineLinks, url: str, identity: ConfiguredIdentity) -> None:
        super().__init__(links, url)
        self._identity = identity
        self._server: _ServerInfo | None = None  # Latest answer of `/server_info`; None: none yet.
        self._info: InstanceInfo | None = None
        self._epoch = 0
        # True: the idle connection has ended, so the process may be another one.
        self._is_doubted = False
        self._vocabulary: int | None = None
        self._window = Window()
        self._steps = CountedSteps()
        # Default values that the server uses for absent fields of a chat.
        self._of_chats: dict[str, float] = {}

    # Requests for the identity and the load.

    async def info(self) -> InstanceInfo:
        server = await self.control("GET", "/server_info", None, _ServerInfo)
        if self._info is None or self._server is None or self._server.start != server.start:
            self._epoch = max(self._epoch + 1, round(100 * time.time()))
            self._info = await self._meet(self._epoch, server)
            self._server = server
        return self._info

    async def _meet(self, epoch: int, server: _ServerInfo) -> InstanceInfo:
        identity, mode = self._identity, server.disaggregation_mode
        self.engine_version = server.version
        allowed = identity.role.value if identity.hands_off else "null"
        if mode != allowed:
            raise UnusableError(
                f"it runs with --disaggregation-mode {mode!r}; allowed for role "
                f"{identity.role.value!r} of this cluster: {allowed!r}"
            )
        listed = await self.control("GET", "/v1/models", None, ListedModels)
        model = listed.named(identity.served_name)
        if model is None:
            raise UnusableError(f"its /v1/models does not name {identity.served_name or 'a model'}")
        try:
            files = identity.files.of(server.model_path)
            geometry = files.geometry(server.page_size)
        except ConfigError as error:
            raise UnusableError(str(error)) from None
        self._vocabulary = files.vocabulary
        self._window.most = server.most_running
        self._of_chats = files.default_sampling if server.sampling_defaults == "model" else {}
        capabilities = [Capability.REPLAY] if server.replays else []
        if mode != "decode" and not server.disable_radix_cache:
            capabilities.append(Capability.PREFIX_CACHE)
        gpus = await self._asked_loads()
        guess = guessed_prefill(files.size(), gpus.accelerator or "", gpus.num_accelerators)
        kv = (server.page_size, server.dtype, server.kv_cache_dtype)
        backend = server.disaggregation_transfer_backend
        return InstanceInfo(
            id=identity.id,
            node=identity.node,
            role=identity.role,
            epoch=epoch,
            pid=0,  # Unknown, since SGLang does not report its process id.
            model=model.id,
            fingerprint=f"SGLang, {server.model_path} {server.weight_version}",
            geometry=geometry,
            max_model_len=model.max_model_len or 0,
            page_port=0,
            capabilities=capabilities,
            prefill=guess,
            computes_prompts=mode == "null",
            joins_prefill=mode == "decode",
            chats_by_ids=server.has_plain_chats and await self._renders(model.id),
            names=listed.beside(model),
            hand_off_format=f"sglang {'/'.join(map(str, (*kv, backend)))}",
            root=server.model_path,
            engine=server.version,
        )

    async def _renders(self, model: str) -> bool:
        """Ask whether the server can render the messages of a chat and return their token ids."""
        fields = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        status, answer = await self.pool.ask(TOKENIZE, msgspec.json.encode(fields))
        try:
            return status == 200 and bool(tokenized_ids(answer))
        except UnusableError:
            return False

    def _ask_watched(self) -> Watched:
        loads = Asked(WatchQuestion.LOADS, self._load_of_process, 0.0, _LATE_S)
        ready = Asked(WatchQuestion.READY, self._is_ready, 0.0, _LATE_S)
        return Watched(life=loads, figures=loads, others=[ready], life_every_s=0.0)

    def _beside(self, asked: Watched) -> dict[str, Any]:
        # A draining server finishes its requests before it ends.
        return {"draining": asked.others[0].answer is False}

    def _connection_ended(self) -> None:
        self._is_doubted = True

    @property
    def _epoch_now(self) -> int:
        return self._epoch

    async def _load_of_process(self) -> LoadReport:
        """Ask for the load, and first for the identity if the process may be another one."""
        if self._is_doubted:
            await self.info()
            self._is_doubted = False
        return await self.load()

    async def _is_ready(self) -> bool:
        status, _ = await self.pool.ask("/ready", None)
        return status != 503

    async def load(self) -> LoadReport:
        assert self._server is not None
        loads, page_size = await self._loads(), self._server.page_size
        return LoadReport(
            epoch=self._epoch,
            queued=sum(each.num_waiting_reqs for each in loads) + self._window.waiting,
            running=sum(each.num_running_reqs for each in loads),
            free_pages=sum(_free_tokens(each) for each in loads) // page_size,
            total_pages=sum(each.max_total_num_tokens for each in loads) // page_size,
            queue_delay_s=max(map(_queue_s, loads), default=0.0),
            links=[],
            progress=_progress(loads),
            step_s=self._steps.read(self._epoch, *_decode_steps(loads)),
        )

    async def _loads(self) -> list[_Load]:
        return (await self._asked_loads()).loads

    async def _asked_loads(self) -> _Loads:
        return await self.control("GET", _LOADS, None, _Loads)

    async def kv_received(self) -> float | None:
        """Megabytes of KV that this prefill server has sent since its start. None: not counted, as
        at a decode server or without --enable-metrics.
        """
        _, answer = await self.pool.ask("/metrics", None)
        return sum(map(float, _SENT_KV.findall(answer))) or None

    # Calls that serve a stream.

    async def prefill(self, call: Call) -> Prefilled:
        raise UpstreamError("SGLang's prefill is called together with its decode")

    async def decode(self, call: Call, reader: Reader) -> None:
        call.fields.pop("kvrs", None)
        if call.path == CHAT.path:  # SGLang's decode server refuses this field in chats.
            call.fields.pop("return_token_ids", None)
        info = self._info
        assert info is not None
        if call.is_chat:  # Sent as a completion, whose default values differ from a chat's.
            call.fields = self._of_chats | call.fields
        call = limited(call, info.max_model_len)
        self._check_ids(call.fields.get("prompt"))
        replays = take_replay(call.fields)
        if not info.joins_prefill:
            await super().decode(call, reader)
            return
        assert isinstance(call.beside, SglangBackend), "a decode server computes nothing"
        if replays and not call.beside.replays:
            raise UpstreamError(f"its prefill server {call.beside.url} generates nothing again")
        await self._window.enter()
        prefill, leg, own = call.beside, PrefillLeg(call.found), DecodeLeg(reader)
        call.fields |= prefill.room()
        counted = {"stream_options": StreamOptions(include_usage=True)}
        beside = Call(call.path, call.fields | counted, call.headers, call.size_bytes)
        pair, keeper = Pair(own, leg, self._window.leave), call.keeper
        await pair.run(super().decode(call, own), prefill.join(beside, leg), keeper)

    def _check_ids(self, prompt: Any) -> None:
        """Check that every id is in the vocabulary: any other id would end SGLang's scheduler
        (0.5.23). Raises RefusedError.
        """
        if self._vocabulary is None or not isinstance(prompt, list | array) or not prompt:
            return
        if (largest := max(prompt)) >= self._vocabulary:
            message = f"prompt: got the token id {largest}; allowed: below {self._vocabulary}"
            raise RefusedError(400, error_body(message, param="prompt"))

    def join(self, call: Call, leg: PrefillLeg) -> Coroutine[Any, Any, None]:
        """Return the prefill call that runs together with a decode call; `leg` reads the answer."""
        return super().decode(call, leg)

    @property
    def replays(self) -> bool:
        """True if the server has the logits processor that replays known output; in a pair, prefill
        then replays the first token.
        """
        return self._server is not None and self._server.replays

    def room(self) -> dict[str, Any]:
        """Return the fields by which the prefill and the decode call of an attempt meet, drawn anew
        for each attempt.

        Decode servers cache a prefill server's ports by its address until two heartbeats fail; none
        fails if the next process answers in time. So the address has a user name that differs for
        each process.
        """
        assert self._server is not None
        mark = hashlib.blake2b(self._server.start, digest_size=8).hexdigest()
        host, _, _ = urlsplit(self.url).netloc.rpartition(":")
        return {
            "bootstrap_host": f"{mark}@{host}",
            "bootstrap_port": self._server.disaggregation_bootstrap_port,
            "bootstrap_room": secrets.randbits(63),
        }

    async def free_hand_off(self, transfer: msgspec.Raw, history: Sequence[int]) -> None:
        raise UpstreamError("its hand-offs end with their calls")

    def blames_load(self, error: Any) -> bool:
        return False


def _progress(loads: Sequence[_Load]) -> float:
    """Return the work done since the start by all schedulers: prompt tokens plus decode steps."""
    return sum(
        each.total_prefill_uncached_tokens + (each.decode_moments or (0.0,))[0] for each in loads
    )


def _decode_steps(loads: Sequence[_Load]) -> tuple[float, float]:
    """Return the number of all schedulers' steps without prompts, and their seconds."""
    found = [each.decode_moments for each in loads if len(each.decode_moments or ()) > 2]
    return sum(each[0] for each in found if each), sum(each[2] for each in found if each) / 1e6


def _free_tokens(load: _Load) -> int:
    return max(0, load.max_total_num_tokens - load.num_used_tokens)


def _queue_s(load: _Load) -> float:
    """Return the predicted seconds until the waiting prompts are computed, at the mean rate since
    the start; 0: no rate known.
    """
    if not load.total_prefill_uncached_tokens:
        return 0.0
    token_s = load.total_prefill_busy_us / 1e6 / load.total_prefill_uncached_tokens
    return load.num_waiting_uncached_tokens * token_s
