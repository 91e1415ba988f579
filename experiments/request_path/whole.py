"""A whole request through the proxy's own server, its client and its engines in memory, without any
socket.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from kvrs.config.file import Config
from kvrs.net.connections import ConnectionLimits
from kvrs.net.server import HttpConnection, HttpServer
from kvrs.process.memory import keep_what_is_there
from kvrs.protocol.instance import InstanceInfo
from kvrs.protocol.openai.chunks import sse, usage_of
from kvrs.proxy.api.client_port import ClientPort, RequestObserver
from kvrs.proxy.api.tenants import Tenants
from kvrs.proxy.backends.cluster import open_backends
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.process.parts import OtherApis, client_routes
from kvrs.proxy.streams.driver import Driver
from kvrs.proxy.streams.metrics import Metrics
from kvrs.proxy.wire.upstream import Access, EngineLinks, Lost, Pool, Upstream

TOKENS = 4
PROMPT_TOKENS = 128
WARM_UP = 50
PAUSE_S = 0.001
MEANWHILE_BYTES = 4 << 20

_SECRET = b"request-path-0123456789"
_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_LAST_CHUNK = b"0\r\n\r\n"


class _Written(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: Any = None
        self.begin()

    def begin(self) -> None:
        self.data: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.data.append(bytes(data))

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        pass


class _Engine(_Written):
    """The engine's end of a connection."""

    def answer(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.protocol.data_received(piece)


class _Pool(Pool):
    """Connections to an engine in memory."""

    def __init__(self, url: str, engines: list[_Engine]) -> None:
        super().__init__(Access(), url)
        self._engines = engines

    async def _connect(self, lost: Lost) -> Upstream:
        upstream, engine = Upstream(asyncio.get_running_loop(), lost), _Engine()
        engine.set_protocol(upstream)
        upstream.connection_made(engine)
        self._engines.append(engine)
        return upstream


class _Links(EngineLinks):
    def __init__(self) -> None:
        super().__init__(Access({}))
        self.engines: list[_Engine] = []

    def pool(self, url: str) -> Pool:
        self._pools.append(made := _Pool(url, self.engines))
        return made


class Proxy:
    """A proxy as its process composes it, but for its ports, its watches and its peers."""

    def __init__(self, config: Config, infos: Sequence[InstanceInfo]) -> None:
        clock, metrics = time.monotonic, Metrics({})
        self.links = links = _Links()
        backends = open_backends(config, links, b"")
        self.driver = driver = Driver(config, backends, {}, metrics, clock, time.time)
        control, mirror = driver.control, Mirror(config.proxy, driver, metrics, {})
        tenants = Tenants(config, [_SECRET], clock)
        api = ClientPort(config.proxy, driver, mirror, metrics, tenants, links.large)
        observer = RequestObserver(metrics.registry, clock, tenants, logs_access=False)
        self.server = HttpServer(
            client_routes(api, OtherApis(api)),
            observer.answer,
            observer.note_refusal,
            ConnectionLimits(10, 10),
            idle_s=100.0,
            shutdown_timeout_s=1.0,
        )
        for info in infos:
            control.instance_up(control.instances.known[info.id], info, clock())

    def connect(self, client: _Written) -> HttpConnection:
        made = HttpConnection(self.server)
        made.connection_made(client)
        return made

    async def called(self) -> _Engine:
        """The engine that gets the next call."""
        while True:
            for engine in self.links.engines:
                if engine.data:
                    return engine
            await asyncio.sleep(0)


def request() -> bytes:
    fields = {"model": "model", "prompt": "word " * PROMPT_TOKENS, "max_tokens": TOKENS}
    body = msgspec.json.encode({**fields, "stream": True, "temperature": 0})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: proxy\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def prefilled() -> bytes:
    body = msgspec.json.encode(
        {
            "choices": [{"text": "a", "prompt_token_ids": list(range(1000, 1000 + PROMPT_TOKENS))}],
            "usage": usage_of(PROMPT_TOKENS, 1, None),
            "kv_transfer_params": {"do_remote_prefill": True, "remote": "p0", "tags": "ab" * 128},
        }
    )
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def decoded() -> Iterator[tuple[bytes, ...]]:
    """The bytes that each step of the engine sends for the stream."""
    for token in range(TOKENS):
        is_last = token == TOKENS - 1
        choice = {
            "index": 0,
            "text": f"{token} ",
            "logprobs": None,
            "finish_reason": "length" if is_last else None,
            "token_ids": [token],
        }
        head = {"id": "cmpl-1", "created": 1, "model": "model", "choices": [choice]}
        event = sse(msgspec.json.encode({**head, "object": "text_completion"}))
        if is_last:
            event += b"data: [DONE]\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        yield (_STREAM, chunk) if token == 0 else (chunk + _LAST_CHUNK * is_last,)


async def exchanges(
    config: Config, infos: Sequence[InstanceInfo], *, is_idle: bool
) -> AsyncGenerator[int]:
    """Run requests one after the other; of each the nanoseconds of CPU. `is_idle`: before each of
    its parts the process slept, and what the machine did meanwhile has passed through its caches.
    """
    proxy, client = Proxy(config, infos), _Written()
    connection = proxy.connect(client)
    asked, answer, (first, *steps) = request(), prefilled(), decoded()

    def begin() -> int:
        for each in (client, *proxy.links.engines):
            each.begin()
        if is_idle:
            time.sleep(PAUSE_S)
            bytes(MEANWHILE_BYTES)
        return time.thread_time_ns()

    try:
        while True:
            begun_ns = begin()
            connection.data_received(asked)
            prefill = await proxy.called()
            cpu_ns = time.thread_time_ns() - begun_ns
            begun_ns = begin()
            prefill.answer(answer)
            decode = await proxy.called()
            cpu_ns += time.thread_time_ns() - begun_ns
            begun_ns = begin()
            decode.answer(*first)
            cpu_ns += time.thread_time_ns() - begun_ns
            begun_ns = begin()
            for step in steps:
                decode.answer(*step)
            while not client.data[-1].endswith(_LAST_CHUNK):
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            cpu_ns += time.thread_time_ns() - begun_ns
            yield cpu_ns
    finally:
        proxy.links.close()


async def cpu_us(
    config: Config, infos: Sequence[InstanceInfo], rounds: int, *, is_idle: bool
) -> float:
    """Median microseconds of CPU of a request with `TOKENS` tokens."""
    samples: list[int] = []
    async with aclosing(exchanges(config, infos, is_idle=is_idle)) as made:
        async for cpu_ns in made:
            samples.append(cpu_ns)
            if len(samples) == WARM_UP:
                keep_what_is_there()
            if len(samples) == WARM_UP + rounds:
                break
    return round(statistics.median(samples[WARM_UP:]) / 1e3, 1)
