"""vLLM as its project ships it: its P/D convention (NixlConnector), and what it tells of itself without being asked kindly.

It knows nothing of the instance protocol. Who it is comes from the configuration, `/v1/models`, `/version` and `/metrics`; how
it is, from `/health` and `/metrics`, polled; that it is gone, from a connection on which nothing is ever said.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvrs.errors import ConfigError, UpstreamError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import (
    Capability,
    InstanceInfo,
    KvTransferParams,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    MeasuredPrefill,
    Role,
)
from kvrs.proxy.backends.backend import Prefilled, RefusedError
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.model_geometry import read_geometry
from kvrs.proxy.backends.pd import OpenAiPeer
from kvrs.proxy.backends.peer import UNREADABLE, ConnectionLostError, UnusableError, body_of
from kvrs.proxy.backends.vllm_metrics import VllmMetrics
from kvrs.proxy.backends.vllm_transfer import checked
from kvrs.proxy.sse import EventSplitter

# `/metrics` is 60 kB of text and takes the server milliseconds: the load is as old as this, `/health` is asked more often.
_METRICS_INTERVAL_S = 1.0
# Of the one tiny request when an instance comes up: what vLLM does for the first time may take it half a minute.
_PROBE_TIMEOUT_S = 60.0
_PROBE_IDS = [1]
_COMPLETIONS = "/v1/completions"
# Of the error event with which vLLM ends a request whose KV it could not load. When its own engine is dead it says more.
_LOAD_FAILED = "Internal server error"
# Of `kv_lease_duration` (30 s, 10 s at least): until decode has asked. Later prefill's blocks may be another stream's, and nobody
# would notice.
_HAND_OFF_S = 6.0
_TICK_S = 0.5
_NO_MEASURED_TABLE = MeasuredPrefill("profiles.prefill", 1, [])


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None  # Of an adapter: the model that it changes.
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


@dataclass(frozen=True, slots=True)
class Named:
    """What the configuration says of an instance that cannot say it itself."""

    id: InstanceId
    node: NodeId
    role: Role
    model: str  # `cluster.model`: a directory.


class VllmBackend(OpenAiPeer):
    """The server at one URL."""

    UNAUTHORISED = "its --api-key is not what the proxy's environment has in KVRS_VLLM_API_KEY"

    def __init__(self, session: aiohttp.ClientSession, url: str, named: Named) -> None:
        super().__init__(session, url)
        self._named = named
        self._info: InstanceInfo | None = None  # Of the process that was probed last.

    # Who it is, and how it is.

    async def info(self) -> InstanceInfo:
        await self._read("/health")
        metrics = VllmMetrics((await self._read("/metrics")).decode(errors="replace"))
        epoch = round(metrics.started_s * 100)
        if self._info is None or self._info.epoch != epoch:
            info = await self._meet(epoch, metrics)
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._probe(info)
            except TimeoutError:
                raise UpstreamError(f"did not answer one token's request within {_PROBE_TIMEOUT_S:g} s") from None
            except RefusedError as error:
                raise UnusableError(f"it refuses one token's request: {error.body.decode(errors='replace')}") from None
            self._info = info
        return self._info

    async def _meet(self, epoch: int, metrics: VllmMetrics) -> InstanceInfo:
        named = self._named
        version = await self.control("GET", "/version", None, _Version)
        listed = await self.control("GET", "/v1/models", None, _Models)
        model = next((model for model in listed.data if model.parent is None), None)
        if model is None:
            raise UnusableError("its /v1/models names no model")
        if not metrics.has_connector:
            raise UnusableError(
                f"it was started without a NixlConnector, which role {named.role.value!r} needs (--kv-transfer-config): "
                "its /metrics have no vllm:nixl_ counters"
            )
        try:
            geometry = read_geometry(named.model, metrics.page_size_tokens)
        except ConfigError as error:
            raise UnusableError(str(error)) from None
        return InstanceInfo(
            id=named.id,
            node=named.node,
            role=named.role,
            epoch=epoch,
            pid=0,  # It says so nowhere.
            model=model.id,
            fingerprint=f"vLLM {version.version}, {model.root or model.id}",
            geometry=geometry,
            max_model_len=model.max_model_len or 0,
            page_port=0,
            capabilities=[Capability.PREFIX_CACHE] if metrics.cache.get("enable_prefix_caching") == "True" else [],
            prefill=_NO_MEASURED_TABLE,
        )

    async def _probe(self, info: InstanceInfo) -> None:
        """One token, as streams will have theirs: a version that lacks a field is found now."""
        fields = {"model": info.model, "prompt": _PROBE_IDS, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        if info.role is Role.PREFILL:
            asked = fields | {"stream": False, "kv_transfer_params": KvTransferParams(do_remote_decode=True)}
            await self._prefilled(Call(_COMPLETIONS, asked), info.geometry.page_size_tokens)
            return
        splitter, seen = EventSplitter(), _Choice()
        async with super().decode(Call(_COMPLETIONS, fields | {"stream": True})) as chunks:
            async for chunk in chunks:
                for payload in splitter.feed(chunk):
                    seen = _seen(seen, payload)
        for name in ("prompt_token_ids", "token_ids"):
            if not getattr(seen, name):
                raise UnusableError(f"its version does not know return_token_ids: a stream came without {name}")

    def watch_load(self, interval_s: float) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return aclosing(self._reports(interval_s))

    async def _reports(self, interval_s: float) -> AsyncGenerator[LoadReport]:
        """No time limits here: whoever watches has one."""
        clock = asyncio.get_running_loop().time
        read_s, report = 0.0, None
        async with _Tether(self.url) as tether:
            while True:
                # Alive while its engine is not: then it ends by itself a moment later.
                await self._read("/health")
                if report is None or clock() - read_s >= _METRICS_INTERVAL_S:
                    read_s, report = clock(), self._load((await self._read("/metrics")).decode(errors="replace"))
                yield report
                await tether.wait(interval_s)

    def _load(self, text: str) -> LoadReport:
        metrics = VllmMetrics(text)
        waiting = metrics.waiting
        return LoadReport(
            epoch=round(metrics.started_s * 100),
            queued=waiting,
            running=metrics.running,
            free_pages=metrics.free_pages,
            queue_delay_s=waiting * metrics.prefill_s,
            links=[],
        )

    async def _read(self, path: str) -> bytes:
        async with self.call("GET", path, None) as response:
            if response.status == 200:
                return await body_of(response)
            if response.status >= 500:
                # Unread, so that the connection is closed: a server without an engine stays for as long as any is open.
                raise UpstreamError(f"HTTP {response.status} for {path}: its engine is dead")
            raise UnusableError(f"it is no vLLM that speaks there: HTTP {response.status} for {path}")

    # The calls of a stream.

    async def prefill(self, call: Call) -> Prefilled:
        info = self._info
        assert info is not None
        return await self._prefilled(_plain(call), info.geometry.page_size_tokens)

    async def _prefilled(self, call: Call, page_size_tokens: int) -> Prefilled:
        with _Pulse() as pulse:
            answer = await super().prefill(call)
            heard_s = pulse.awake_since_s()
        if answer.transfer is None:
            raise UnusableError("prefill answered without kv_transfer_params: it has no connector, or one of another kind")
        transfer = checked(bytes(answer.transfer), len(answer.prompt_ids), page_size_tokens)
        return replace(answer, transfer=transfer, good_until_s=heard_s + _HAND_OFF_S)

    @asynccontextmanager
    async def decode(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        info = self._info
        assert info is not None
        async with super().decode(_limited(_plain(call), info.max_model_len)) as chunks:
            yield chunks

    def blames_prefill(self, said: Any) -> bool:
        match said:
            case {"code": 500, "message": str(message)}:
                return message == _LOAD_FAILED
            case _:
                return False

    # What it cannot do.

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        raise UpstreamError("vLLM knows no leases of a proxy")

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        raise UpstreamError("vLLM cannot be fenced")


def _plain(call: Call) -> Call:
    """What vLLM would not understand is none of its business."""
    return Call(call.path, {name: value for name, value in call.fields.items() if name != "kvrs"})


def _limited(call: Call, max_model_len: int) -> Call:
    """A completion without a limit, as a chat goes on: vLLM fails at a null, and takes no word for 16 tokens."""
    fields, history = call.fields, call.fields.get("prompt")
    if not isinstance(history, list) or fields.get("max_tokens", 0) is not None:
        return call
    return Call(call.path, fields | {"max_tokens": max(1, max_model_len - len(history))})


def _seen(before: _Choice, payload: bytes) -> _Choice:
    if payload == b"[DONE]":
        return before
    try:
        event = msgspec.json.decode(payload, type=_Event)
    except UNREADABLE as error:
        raise UnusableError(f"it streams what is no completion: {error}") from None
    for choice in event.choices:
        before = _Choice(before.prompt_token_ids or choice.prompt_token_ids, before.token_ids or choice.token_ids)
    return before


class _Pulse:
    """Since when this process has been running: what it reads right after a stop may have come at the stop's beginning."""

    def __init__(self) -> None:
        self._beat_s = time.monotonic()
        self._stop: tuple[float, float] | None = None  # The last one: from, to.

    def __enter__(self) -> "_Pulse":
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._beat)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _beat(self) -> None:
        self._note()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._beat)

    def _note(self) -> None:
        before_s, self._beat_s = self._beat_s, time.monotonic()
        if self._beat_s - before_s > 2 * _TICK_S:
            self._stop = before_s, self._beat_s

    def awake_since_s(self) -> float:
        """Now; or when the stop began that has only just ended."""
        self._note()
        if self._stop is not None and self._beat_s - self._stop[1] < 2 * _TICK_S:
            return self._stop[0]
        return self._beat_s


class _Tether:
    """A connection on which nothing is said. The kernel ends it in the moment in which the process dies."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._gone: asyncio.Task[None] | None = None
        self._rests = False  # Whoever ends such connections at once must not be asked without a pause.

    async def __aenter__(self) -> "_Tether":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._gone is not None:
            self._gone.cancel()
            # How it ended must not take the place of why this block ends.
            await asyncio.gather(self._gone, return_exceptions=True)

    async def wait(self, seconds: float) -> None:
        """That long, or until the connection ends. Then the process may be gone, or may only have had enough of the silence."""
        if self._rests:
            self._rests = False
            await asyncio.sleep(seconds)
            return
        if self._gone is None:
            self._gone = asyncio.create_task(self._hold())
        done, _ = await asyncio.wait({self._gone}, timeout=seconds)
        if done:
            self._gone, self._rests = None, True
            done.pop().result()

    async def _hold(self) -> None:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise ConnectionLostError(f"connection lost: {error}") from None
        try:
            with suppress(ConnectionError):
                await reader.read(1)
        finally:
            writer.transport.abort()
