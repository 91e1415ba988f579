"""Requests to the other proxies, and the knowledge of which proxies are up."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from kvrs.config.proxy import are_workers_of_one, proxy_of_worker
from kvrs.errors import RequestError, UpstreamError
from kvrs.net.http import News
from kvrs.net.routes import MAX_BODY_BYTES
from kvrs.protocol.mirror import (
    Batch,
    BatchAnswer,
    Claim,
    ClaimAnswer,
    DrainOrder,
    Hello,
    Lookup,
    LookupAnswer,
    ReadAnswer,
    RecordVersion,
    SentPrompt,
    Update,
)
from kvrs.protocol.secrets import WRONG_DOOR
from kvrs.proxy.fleet.orders import ProxyOrders
from kvrs.proxy.mirror.records import PresentPeers
from kvrs.proxy.wire.errors import UnusableError
from kvrs.proxy.wire.peer import Peer
from kvrs.proxy.wire.upstream import EngineLinks, WholeReader
from kvrs.proxy.wire.watchdog import SilentError, Watchdog

log = logging.getLogger(__name__)

PATH = "/kvrs/v1/mirror"
_TIMEOUT_S = 1.0
# Rate in bytes per second that a request's time limit allows for, beside its fixed part.
_SLOWEST_BYTES_PER_S = 4 << 20
_RECONNECT_S = 0.5
# Interval of peers' reports: a killed peer shows by the end of its connection, a paused peer by its
# silence.
_REPORT_S = 0.25
_SILENT_S = 0.75

Answer = TypeVar("Answer")


class ProxyPeer(Peer):
    """Client of another proxy; `me` is the id of this proxy."""

    def __init__(self, links: EngineLinks, me: str, name: str, url: str) -> None:
        super().__init__(links.pool(url))
        self.id = name
        self.run: str | None = None  # Id of the peer's run; None while the peer does not answer.
        # Id of the last run of the peer that was told to end; None: no run was.
        self.ending: str | None = None
        self._me = me

    @property
    def leaving(self) -> bool:
        """Return whether the peer is about to end."""
        return self.run is not None and self.run == self.ending

    @property
    def is_own_worker(self) -> bool:
        """Return whether the peer is another worker of this proxy."""
        return are_workers_of_one(self.id, self._me)

    async def hello(self, hello: Hello) -> Hello:
        """Announce this proxy; return the peer's announcement."""
        return self._checked(await self._ask(f"{PATH}/hello", hello, Hello))

    def _checked(self, hello: Hello) -> Hello:
        if hello.id != self.id:
            raise UnusableError(f"it is proxy {hello.id!r}, the configuration says {self.id!r}")
        return hello

    async def listen(self, heard: Callable[[Hello], None]) -> None:
        """Call `heard` with every report of the peer.

        Raises:
            UpstreamError: the connection has ended, or the peer is silent.
        """
        async with self.watch(PATH, _REPORT_S, Hello) as reports:
            with suppress(SilentError), Watchdog(lambda *_: _SILENT_S) as watchdog:
                async for hello in reports:
                    watchdog.heard()
                    heard(self._checked(hello))

    async def mirror(self, updates: list[Update], sent: list[SentPrompt]) -> BatchAnswer:
        answer = await self._ask(PATH, Batch(self._me, updates, sent), BatchAnswer)
        if len(answer.acks) != len(updates):
            raise UpstreamError(f"acknowledges {len(answer.acks)} of {len(updates)} streams")
        return answer

    async def lookup(self, key: str) -> LookupAnswer:
        return await self._ask(f"{PATH}/lookup", Lookup(key), LookupAnswer)

    async def read(self, key: str) -> ReadAnswer:
        return await self._ask(f"{PATH}/read", Lookup(key), ReadAnswer)

    async def drop(self, key: str) -> LookupAnswer:
        return await self._ask(f"{PATH}/drop", Lookup(key), LookupAnswer)

    async def drain(self, order: DrainOrder) -> Hello:
        return await self._ask(f"{PATH}/drain", order, Hello)

    async def claim(self, claim: Claim) -> ClaimAnswer:
        return await self._ask(f"{PATH}/claim", claim, ClaimAnswer)

    async def _ask(self, path: str, message: msgspec.Struct, kind: type[Answer]) -> Answer:
        body = msgspec.msgpack.encode(message)
        timeout_s = _TIMEOUT_S + len(body) / _SLOWEST_BYTES_PER_S
        try:
            # Time in which this process itself was late says nothing about the peer.
            with Watchdog(lambda *_: timeout_s):
                status, raw = await self._post(path, body)
        except SilentError:
            raise UpstreamError(f"no answer to {path} within {timeout_s:.1f} s") from None
        if status != 200:
            raise UpstreamError(f"HTTP {status} for {path}: {raw[:200].decode(errors='replace')}")
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        reader = WholeReader(MAX_BODY_BYTES)
        upstream = await self.pool.take()
        try:
            ended = await upstream.send(self.pool.head(path, len(body)), body, reader)
            await ended
            status = upstream.status
            return status, reader.body if status == 200 else upstream.refusal
        finally:
            self.pool.give_back(upstream)


class Found(msgspec.Struct, frozen=True):
    """Versions of a record by peer, and the peers that did not answer."""

    versions: dict[str, RecordVersion]
    unreachable: list[str]


class Peers:
    """Knows all other proxies, and which are up. `lost` is called when a peer's run has ended or is
    unreachable, `changed` when a run begins or is about to end.
    """

    def __init__(
        self,
        me: Hello,
        peers: Mapping[str, ProxyPeer],
        lost: Callable[[str], None],
        changed: Callable[[], None],
        orders: ProxyOrders,
    ) -> None:
        self.me = me
        self.known = dict(peers)
        # Signalled when this proxy's hello has changed, so that the peers get it at once.
        self.news = News()
        self._lost = lost
        self._changed = changed
        self.orders = orders
        self._send: Callable[[ProxyPeer], Coroutine[Any, Any, None]] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    def add(self, peer: ProxyPeer) -> None:
        """Add a proxy as a peer."""
        self.known[peer.id] = peer
        if self._group is not None:
            self._start(peer)

    def remove(self, name: str) -> None:
        """Remove a proxy: it counts as lost, and is no longer asked or heard."""
        self.fail(self.known[name], "removed from proxy.peers")
        for task in self._tasks.pop(name, []):
            task.cancel()
        del self.known[name]

    def leave(self) -> None:
        """Tell the peers that this proxy is about to end."""
        self.me = msgspec.structs.replace(self.me, leaving=True)
        self.news.tell()

    def hello(self) -> Hello:
        """Make the hello of this proxy, with the orders that are in force."""
        return self.orders.shown(self.me)

    @property
    def live(self) -> list[ProxyPeer]:
        return [peer for peer in self.known.values() if peer.run is not None]

    @property
    def live_ids(self) -> set[str]:
        return {peer.id for peer in self.live}

    @property
    def staying(self) -> set[str]:
        """Return the ids of live peers that go on when this proxy ends; its own workers end with
        it.
        """
        return {peer.id for peer in self.live if not peer.leaving and not peer.is_own_worker}

    @property
    def present(self) -> PresentPeers:
        """Return the live peers, and the peers that get records. Peers that end with this proxy get
        records only if there is no other.
        """
        live = frozenset(self.live_ids)
        return PresentPeers(live, frozenset(self.staying) or live)

    def check(self, name: str) -> ProxyPeer:
        """Return the peer of this name. Raises RequestError: no such peer."""
        if name not in self.known:
            allowed = ", ".join(map(repr, self.known)) or "none"
            raise RequestError(
                f"proxy {name!r} is not among proxy.peers of {self.me.id!r}; allowed: {allowed}"
            )
        return self.known[name]

    async def answer(self, peer: ProxyPeer, asked: Awaitable[Answer]) -> Answer | None:
        """Await the answer to a request; None: the peer did not answer, and counts as lost."""
        try:
            return await asked
        except UpstreamError as error:
            self.fail(peer, str(error))
            return None

    async def lookup(self, key: str, *, live_only: bool) -> Found:
        """Ask the peers for their versions of a record; `live_only`: only peers that are up."""
        found = Found({}, [])

        async def ask(peer: ProxyPeer) -> None:
            answer = await self.answer(peer, peer.lookup(key))
            if answer is None:
                found.unreachable.append(peer.id)
            elif answer.version is not None and peer.id in self.known:
                found.versions[peer.id] = answer.version

        await asyncio.gather(*map(ask, self.live if live_only else self.known.values()))
        return found

    async def claim(self, name: str, claim: Claim) -> ClaimAnswer | None:
        """Claim a stream at a peer; None: no answer, or the peer was removed."""
        peer = self.known.get(name)
        return None if peer is None else await self.answer(peer, peer.claim(claim))

    def on_hello(self, hello: Hello) -> None:
        """Note from a peer's hello that the peer is up, or about to end. Raises RequestError: the
        sender is no peer.
        """
        self._heard(self.check(hello.id), hello)

    def _heard(self, peer: ProxyPeer, hello: Hello) -> None:
        self.on_answer(peer, hello.run)
        self.orders.heard(hello)
        if hello.leaving and not peer.leaving:
            log.info("proxy leaves", extra={"proxy": peer.id})
            peer.ending = hello.run
            self._changed()

    def on_answer(self, peer: ProxyPeer, run: str) -> None:
        if peer.run == run:
            return
        if peer.run is not None:
            self.fail(peer, "it is another process now")
        log.info("proxy up", extra={"proxy": peer.id})
        peer.run = run
        self._changed()

    def fail(self, peer: ProxyPeer, cause: str) -> None:
        if peer.run is not None:
            log.warning("proxy lost", extra={"proxy": peer.id, "cause": cause})
            peer.run = None
            self._lost(peer.id)

    async def run(self, send: Callable[[ProxyPeer], Coroutine[Any, Any, None]]) -> None:
        """Watch every peer and run `send` for it, until cancelled."""
        self._send = send
        try:
            async with asyncio.TaskGroup() as self._group:
                for peer in self.known.values():
                    self._start(peer)
                # Keep the group open: the first peer may be added later.
                await asyncio.Event().wait()
        finally:
            # Release the tasks: CPython 3.11 never collects a cancelled task that refers to itself.
            self._group = None
            self._tasks.clear()

    def _start(self, peer: ProxyPeer) -> None:
        assert self._group is not None
        assert self._send is not None
        work = self._watch(peer), self._send(peer)
        self._tasks[peer.id] = [self._group.create_task(each) for each in work]

    async def _watch(self, peer: ProxyPeer) -> None:
        logged = None
        while True:
            try:
                self._heard(peer, await peer.hello(self.hello()))
                await peer.listen(partial(self._heard, peer))
                continue  # The peer was silent, or this process was paused: ask again.
            except UpstreamError as error:
                cause = _cause(peer, error)
            self.fail(peer, cause)
            if cause != logged:
                log.warning("proxy not reached", extra={"proxy": peer.id, "cause": cause})
            logged = cause
            await asyncio.sleep(_RECONNECT_S)

    async def meet_first(self) -> None:
        """Exchange hellos before the first request, to learn which peers are up, and begin the
        drains of other workers of this proxy.
        """
        found = await self.meet()
        own = (hello for peer, hello in found.items() if self.known[peer].is_own_worker)
        if (hello := next(own, None)) is not None:
            self.orders.begin(hello.drains)

    async def meet(self) -> dict[str, Hello]:
        """Exchange hellos with every peer once, and return the hellos of peers that answered. The
        peers learn of this run, and an ending proxy learns which peers are ending too.
        """
        peers = [*self.known.values()]
        found = zip(peers, await asyncio.gather(*map(self._meet, peers)), strict=True)
        return {peer.id: hello for peer, hello in found if hello is not None}

    async def pass_on(self, order: DrainOrder) -> None:
        """Pass a drain order on to the other workers of this proxy."""
        own = [peer for peer in self.live if peer.is_own_worker]
        for answer in await asyncio.gather(
            *(peer.drain(order) for peer in own), return_exceptions=True
        ):
            if isinstance(answer, UpstreamError):
                log.warning("order not passed on", extra={"cause": str(answer)})
            elif isinstance(answer, BaseException):
                raise answer

    async def _meet(self, peer: ProxyPeer) -> Hello | None:
        try:
            hello = await peer.hello(self.hello())
        except UpstreamError as error:
            cause = _cause(peer, error)
            self.fail(peer, cause)
            log.warning("proxy not reached", extra={"proxy": peer.id, "cause": cause})
            return None
        self._heard(peer, hello)
        return hello


def _cause(peer: ProxyPeer, error: UpstreamError) -> str:
    """Return the error's text, with the likely mistake in the configuration if another process than
    this peer answers.
    """
    cause = str(error)
    if WRONG_DOOR not in cause:
        return cause
    if (whole := proxy_of_worker(peer.id)) is not None:
        return f"{cause}; is `workers` of {whole!r} in proxy.peers its proxy.workers?"
    return f"{cause}; does the entry of {peer.id!r} in proxy.peers lack its `workers: N`?"
