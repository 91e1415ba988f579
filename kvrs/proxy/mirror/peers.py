"""The other proxies, as far as this one can tell: what they are asked, and whether they are there."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

import aiohttp
import msgspec

from kvrs.errors import RequestError, UpstreamError
from kvrs.protocol.mirror import Batch, BatchAnswer, Claim, ClaimAnswer, Hello, Look, LookAnswer, Update
from kvrs.proxy.backends.peer import Peer, UnusableError, body_of

log = logging.getLogger(__name__)

PATH = "/kvrs/v1/mirror"
_PATIENCE_S = 1.0
_SLOWEST_BYTES_PER_S = 4 << 20  # A long record takes its time on a slow link, and nobody is dead for that.
_AGAIN_S = 0.5
_REPORT_S = 0.25  # One that is killed is missed at once, because its connection ends; one that only stands still, by its silence.
_SILENT_S = 0.75

Answer = TypeVar("Answer")


class ProxyPeer(Peer):
    """One of them; `me` is who asks."""

    def __init__(self, session: aiohttp.ClientSession, me: Hello, name: str, url: str) -> None:
        super().__init__(session, url)
        self.id = name
        self.run: str | None = None  # Of its process; none while it does not answer.
        self._me = me

    async def hello(self) -> str:
        """Say who we are, and hear in which run it is."""
        return self._checked(await self._ask("POST", f"{PATH}/hello", self._me, Hello))

    def _checked(self, said: Hello) -> str:
        if said.id != self.id:
            raise UnusableError(f"it is proxy {said.id!r}, the configuration says {self.id!r}")
        return said.run

    async def listen(self, heard: Callable[[str], None]) -> None:
        """Hear again and again in which run it is, until it is silent.

        Raises:
            UpstreamError: the connection is gone.
        """
        async with self.watch(PATH, _REPORT_S, Hello) as reports:
            with suppress(TimeoutError):
                while True:
                    async with asyncio.timeout(_SILENT_S):
                        said = await anext(reports)
                    heard(self._checked(said))

    async def mirror(self, updates: list[Update]) -> BatchAnswer:
        answer = await self._ask("POST", PATH, Batch(self._me.id, updates), BatchAnswer)
        if len(answer.acks) != len(updates):
            raise UpstreamError(f"acknowledges {len(answer.acks)} of {len(updates)} streams")
        return answer

    async def look(self, key: str) -> LookAnswer:
        return await self._ask("POST", f"{PATH}/look", Look(key), LookAnswer)

    async def claim(self, claim: Claim) -> ClaimAnswer:
        return await self._ask("POST", f"{PATH}/claim", claim, ClaimAnswer, again=False)

    async def _ask(self, method: str, path: str, message: msgspec.Struct, kind: type[Answer], *, again: bool = True) -> Answer:
        body, asked_s = msgspec.msgpack.encode(message), time.monotonic()
        patience_s = _PATIENCE_S + len(body) / _SLOWEST_BYTES_PER_S
        try:
            async with asyncio.timeout(patience_s), self.call(method, path, body) as response:
                raw = await body_of(response)
        except TimeoutError:
            # If much more time has passed, it is this process that stood still, and not the other one that did not answer.
            if again and time.monotonic() > asked_s + patience_s + _PATIENCE_S:
                return await self._ask(method, path, message, kind, again=False)
            raise UpstreamError(f"no answer to {path} within {patience_s:.1f} s") from None
        if response.status != 200:
            raise UpstreamError(f"HTTP {response.status} for {path}: {raw[:200].decode(errors='replace')}")
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None


class Peers:
    """`lost` hears of each run of a peer that is over, or out of reach; `up` of each that begins."""

    def __init__(self, me: Hello, peers: Mapping[str, ProxyPeer], lost: Callable[[str], None], up: Callable[[], None]) -> None:
        self.me = me
        self.known = dict(peers)
        self._lost = lost
        self._up = up

    @property
    def live(self) -> list[ProxyPeer]:
        return [peer for peer in self.known.values() if peer.run is not None]

    def check(self, name: str) -> ProxyPeer:
        """Raises RequestError: no peer of ours has that name."""
        if name not in self.known:
            allowed = ", ".join(map(repr, self.known)) or "none"
            raise RequestError(f"proxy {name!r} is not among proxy.peers of {self.me.id!r}; allowed: {allowed}")
        return self.known[name]

    def met(self, said: Hello) -> None:
        """It has said itself that it is there."""
        self.note(self.check(said.id), said.run)

    def note(self, peer: ProxyPeer, run: str) -> None:
        """It has answered."""
        if peer.run == run:
            return
        if peer.run is not None:
            self.fail(peer, "it is another process now")
        log.info("proxy up", extra={"proxy": peer.id})
        peer.run = run
        self._up()

    def fail(self, peer: ProxyPeer, cause: str) -> None:
        if peer.run is not None:
            log.warning("proxy lost", extra={"proxy": peer.id, "cause": cause})
            peer.run = None
            self._lost(peer.id)

    async def run(self) -> None:
        """Know of each of them whether it is there, until cancelled."""
        await asyncio.gather(*map(self._watch, self.known.values()))

    async def _watch(self, peer: ProxyPeer) -> None:
        said = None
        while True:
            try:
                self.note(peer, await peer.hello())
                await peer.listen(lambda run: self.note(peer, run))
                continue  # It is silent, or we were: ask it.
            except UpstreamError as error:
                cause = str(error)
            self.fail(peer, cause)
            if cause != said:
                log.warning("proxy not reached", extra={"proxy": peer.id, "cause": cause})
            said = cause
            await asyncio.sleep(_AGAIN_S)

    async def meet(self) -> None:
        """Once, at the start: who is there already is known before the first request, and knows that we are another run."""
        await asyncio.gather(*map(self._meet, self.known.values()))

    async def _meet(self, peer: ProxyPeer) -> None:
        try:
            self.note(peer, await peer.hello())
        except UpstreamError as error:
            log.warning("proxy not reached", extra={"proxy": peer.id, "cause": str(error)})
