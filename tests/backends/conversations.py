"""Streams of a proxy at the backends themselves: the calls of attempts, without a proxy."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from kvrs.core.model import actions as act
from kvrs.core.model.member import Member
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport
from kvrs.protocol.openai.chunks import CHUNK
from kvrs.protocol.openai.requests import packed
from kvrs.proxy.backends.backend import Backend, Prefilled
from kvrs.proxy.backends.bodies import Call, decode_call, prefill_call
from kvrs.proxy.wire.events import PROMPT_TOKEN_IDS, EventSplitter, prompt_ids_of
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.requests import COMPLETIONS, read
from kvrs.proxy.wire.upstream import Need, Upstream
from tests.backends.clusters import Cluster

PATIENCE_S = 120.0  # Nothing here is measured: a test that waits in vain fails by this.
P0, D0, D1 = (InstanceId(name) for name in ("p0", "d0", "d1"))


class Reader:
    """Takes a stream's events apart; what is no complete stream is an UpstreamError, as it is to a
    proxy.
    """

    shortcut = None
    flow: Upstream | None = None

    def __init__(self) -> None:
        self._chunks = asyncio.Queue[bytes]()
        self._call: asyncio.Task[None] | None = None
        self._splitter = EventSplitter()
        self._payloads: list[bytes] = []
        self.ids: list[int] = []
        self.prompt_ids: list[int] | None = None
        self.finish_reason: str | None = None
        self.done = False

    def run(self, call: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self._call = asyncio.ensure_future(call)
        # An empty chunk is the end.
        self._call.add_done_callback(lambda _: self._chunks.put_nowait(b""))
        return self._call

    def feed(self, data: bytes) -> Need:
        self._chunks.put_nowait(data)
        return Need.MORE

    async def read(self, count: int | None = None) -> list[int]:
        """All ids so far, at least `count` of them; None: to the end."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.done and (count is None or len(self.ids) < count):
                if not self._payloads:
                    if chunk := await self._chunks.get():
                        self._payloads = self._splitter.feed(chunk)
                        continue
                    assert self._call is not None
                    await self._call
                    raise UpstreamError("ended without a finish reason and [DONE]")
                self._take(self._payloads.pop(0))
        return self.ids

    def _take(self, payload: bytes) -> None:
        if payload == b"[DONE]":
            if self.finish_reason is None:
                raise UpstreamError("sent [DONE] without a finish reason")
            self.done = True
            return
        event = CHUNK.decode(payload)
        if event.error is not None:
            raise UpstreamError(f"sent an error event: {event.error}")
        if self.prompt_ids is None and PROMPT_TOKEN_IDS in payload:
            self.prompt_ids = list(prompt_ids_of(payload))
        for choice in event.choices or ():
            self.ids += choice.token_ids or []
            self.finish_reason = choice.finish_reason or self.finish_reason


class BackendCluster:
    """The instances of one cluster."""

    def __init__(self, cluster: Cluster, backends: Mapping[InstanceId, Backend]) -> None:
        self.cluster = cluster
        self.backends = backends
        self.infos: dict[InstanceId, InstanceInfo] = {}

    async def meet(self) -> None:
        for name in self.backends:
            self.infos[name] = await self.back(name)

    async def back(self, name: InstanceId, above_epoch: int = -1) -> InstanceInfo:
        """Wait until the instance answers, in an epoch above this one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    self.infos[name] = info = await self.backends[name].info()
                    if info.epoch > above_epoch:
                        return info
                except UpstreamError:
                    pass
                await asyncio.sleep(0.05)

    def can(self, name: InstanceId, capability: Capability) -> bool:
        return capability in self.infos[name].capabilities

    @property
    def joins(self) -> bool:
        """Prefill is called together with decode."""
        return self.infos[D0].joins_prefill

    def talk(
        self,
        prompt: Sequence[int] | str,
        max_tokens: int,
        produced: Sequence[int] = (),
        **fields: Any,
    ) -> "Conversation":
        return Conversation(self, prompt, max_tokens, produced, fields)

    async def load(self, name: InstanceId, holds: Callable[[LoadReport], bool]) -> LoadReport:
        """The first report of which something is true."""
        async with (
            asyncio.timeout(PATIENCE_S),
            self.backends[name].watch_load(0.05, bool) as reports,
        ):
            async for report in reports:
                if holds(report):
                    return report
        raise AssertionError("a watch does not end by itself")


class Conversation:
    """One stream, and the calls that its attempts make."""

    def __init__(
        self,
        system: BackendCluster,
        prompt: Sequence[int] | str,
        max_tokens: int,
        produced: Sequence[int],
        fields: Any,
    ) -> None:
        body = {
            "model": system.infos[D0].model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        } | fields
        self._cluster = system
        self.attempt = 1
        self.found: list[int] = []  # What the cache of a prefill that is called beside decode had.
        self.journal = Journal(
            StreamId(secrets.token_hex(16)), read(COMPLETIONS, msgspec.json.encode(body)), 0.0
        )
        self.journal.prompt_ids = self.journal.parsed.prompt_ids
        self.journal.output_ids = packed(produced)

    async def prefill(self, at: InstanceId = P0) -> Prefilled:
        member = Member.of(self._cluster.infos[at])
        answer = await self._cluster.backends[at].prefill(
            prefill_call(self.journal, self.attempt, act.Plan(at), member)
        )
        self.journal.prompt_ids = self.journal.prompt_ids or list(answer.prompt_ids)
        return answer

    def call(
        self,
        at: InstanceId,
        transfer: msgspec.Raw | None = None,
        runs: Sequence[act.PageRange] = (),
        **changes: Any,
    ) -> Call:
        plan, member = act.Plan(at, runs=tuple(runs)), Member.of(self._cluster.infos[at])
        call = decode_call(self.journal, self.attempt, plan, member, transfer)
        call.rows = None
        if self._cluster.joins:
            call.beside, call.found = self._cluster.backends[P0], self.found.append
        call.fields.update(changes)
        return call

    @asynccontextmanager
    async def decode(
        self, at: InstanceId, *arguments: Any, **changes: Any
    ) -> AsyncIterator[Reader]:
        call, reader = self.call(at, *arguments, **changes), Reader()
        running = reader.run(self._cluster.backends[at].decode(call, reader))
        try:
            yield reader
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def begun(self) -> list[int]:
        """The whole stream: prefill, then decode; or both together."""
        transfer = None if self._cluster.joins else (await self.prefill()).transfer
        return await self.ids(D0, transfer)

    async def ids(self, at: InstanceId, *arguments: Any) -> list[int]:
        """The whole stream, or its tail where something was produced before."""
        async with self.decode(at, *arguments) as reader:
            return await reader.read()
