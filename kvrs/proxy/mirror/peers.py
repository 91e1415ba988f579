"""The other proxies, as far as this one can tell: what they are asked, and whether they are there."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import aiohttp
import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.mirror import Batch, BatchAnswer, Claim, ClaimAnswer, Hello, Look, LookAnswer, Update
from kvrs.proxy.backends.peer import Peer, UnusableError, body_of

log = logging.getLogger(__name__)

PATH = "/kvrs/v1/mirror"
_PATIENCE_S = 1.0
_PROBE_S = 0.5

Answer = TypeVar("Answer")


class ProxyPeer(Peer):
    """One of them."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str) -> None:
        super().__init__(session, url)
        self.id = name
        self.run: str | None = None  # Of its process; none while it does not answer.

    async def hello(self) -> Hello:
        answer = await self._ask("GET", PATH, None, Hello)
        if answer.id != self.id:
            raise UnusableError(f"it is proxy {answer.id!r}, the configuration says {self.id!r}")
        return answer

    async def mirror(self, updates: list[Update]) -> BatchAnswer:
        answer = await self._ask("POST", PATH, Batch(updates), BatchAnswer)
        if len(answer.acks) != len(updates):
            raise UpstreamError(f"acknowledges {len(answer.acks)} of {len(updates)} streams")
        return answer

    async def look(self, key: str) -> LookAnswer:
        return await self._ask("POST", f"{PATH}/look", Look(key), LookAnswer)

    async def claim(self, claim: Claim) -> ClaimAnswer:
        return await self._ask("POST", f"{PATH}/claim", claim, ClaimAnswer)

    async def _ask(self, method: str, path: str, message: msgspec.Struct | None, kind: type[Answer]) -> Answer:
        body = None if message is None else msgspec.msgpack.encode(message)
        try:
            async with asyncio.timeout(_PATIENCE_S), self.call(method, path, body) as response:
                raw = await body_of(response)
        except TimeoutError:
            raise UpstreamError(f"no answer to {path} within {_PATIENCE_S} s") from None
        if response.status != 200:
            raise UpstreamError(f"HTTP {response.status} for {path}")
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnusableError(f"unexpected answer to {path}: {error}") from None


class Peers:
    """`lost` hears of each run of a peer that is over, or out of reach; `up` of each that begins."""

    def __init__(self, peers: Mapping[str, ProxyPeer], lost: Callable[[str], None], up: Callable[[], None]) -> None:
        self.known = dict(peers)
        self._lost = lost
        self._up = up

    @property
    def live(self) -> list[ProxyPeer]:
        return [peer for peer in self.known.values() if peer.run is not None]

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
        """Ask all of them who they are, again and again."""
        await asyncio.gather(*map(self._watch, self.known.values()))

    async def _watch(self, peer: ProxyPeer) -> None:
        said = None
        while True:
            if (cause := await self._probe(peer)) is not None and cause != said:
                log.warning("proxy not reached", extra={"proxy": peer.id, "cause": cause})
            said = cause
            await asyncio.sleep(_PROBE_S)

    async def _probe(self, peer: ProxyPeer) -> str | None:
        try:
            self.note(peer, (await peer.hello()).run)
        except UpstreamError as error:
            self.fail(peer, str(error))
            return str(error)
        return None

    async def meet(self) -> None:
        """Once, at the start: whoever is there already is known before the first request."""
        await asyncio.gather(*map(self._probe, self.known.values()))
