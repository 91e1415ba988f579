"""Backend of unmodified SGLang, with separate prefill and decode or one server for both: identity,
load and the two legs of an attempt.

Prefill and decode get the same request at once, and meet in a room: a number drawn for this
attempt. Prefill pushes the KV into memory that decode has reserved; decode's answer is the stream.
A leg without its peer waits for minutes, so both are watched, and the end of one closes the other.
The end of an idle connection shows a server's death.
"""

import hashlib
import re
import secrets
import time
from array import array
from collections.abc import Coroutine, Sequence
from math import inf
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from kvrs.errors import ConfigError, UpstreamError
from kvrs.profiles.guess import guessed_prefill
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, WatchQuestion
from kvrs.protocol.openai.chunks import error_body
from kvrs.protocol.openai.requests import StreamOptions
from kvrs.proxy.backends.backend import Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call, limited
from kvrs.proxy.backends.configured_identity import ConfiguredIdentity
from kvrs.proxy.backends.counted_steps import CountedSteps
from kvrs.proxy.backends.listed_models import ListedModels
from kvrs.proxy.backends.questions import Asked
from kvrs.proxy.backends.rendering import TOKENIZE, tokenized_ids
from kvrs.proxy.backends.sglang_legs import DecodeLeg, Pair, PrefillLeg, Window
from kvrs.proxy.backends.sglang_replay import can_replay, take_replay
from kvrs.proxy.backends.stock_peer import StockPeer, Watched
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.requests import CHAT
from kvrs.proxy.wire.upstream import EngineLinks, Reader

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
