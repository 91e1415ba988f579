"""Probes of the links into a simulated instance, of the sizes and at the times of a real one."""

import asyncio
from collections.abc import Sequence

from kvrs.protocol.frames import MAX_PROBE_BYTES
from kvrs.protocol.pages import TrafficClass
from kvrs.transfer.meter import PROBE_BYTES
from kvrs_lab.sim.engine import SimEngine
from kvrs_lab.sim.links import CHUNK_PAGES, SimTransfer
from kvrs_lab.sim.process import ask
from kvrs_lab.sim.site import LATENCY_S, SimHolder, Site

_PIECES = 2 * CHUNK_PAGES  # A link carries half of them at a time.


class Probing:
    """Probes the links from all other nodes, for one life of the instance."""

    def __init__(self, engine: SimEngine, peers: Sequence[SimHolder], site: Site) -> None:
        self._engine, self._site = engine, site
        self._peers = [peer for peer in peers if peer.id != engine.id]
        instances = [peer for peer in peers if isinstance(peer, SimEngine)]
        self._probers = [peer.node for peer in instances].count(engine.node)
        self._is_over = False

    def begin(self) -> None:
        self._engine.loop.create_task(self._run())

    def end(self) -> None:
        self._is_over = True

    async def _run(self) -> None:
        interval_s = self._site.config.transfer.probe_interval_s
        while not self._is_over:
            for peer in self._peers:
                await self._probe(peer)
            await asyncio.sleep(interval_s)

    async def _probe(self, peer: SimHolder) -> None:
        meter, interval_s = self._engine.meter, self._site.config.transfer.probe_interval_s
        size_bytes = meter.probe_bytes(peer.node, PROBE_BYTES, MAX_PROBE_BYTES)
        now_s = self._site.clock.now_s
        if self._is_over or not meter.may_probe(
            peer.node, size_bytes, interval_s, self._probers, now_s
        ):
            return
        follows = False
        more: int | None = size_bytes
        while more is not None and await self._measured(peer, more, follows=follows):
            follows = True
            more = meter.follow_up_bytes(peer.node, PROBE_BYTES, MAX_PROBE_BYTES)

    async def _measured(self, peer: SimHolder, size_bytes: int, *, follows: bool) -> bool:
        """Send one probe; False: the peer does not answer, or the probe ended early."""
        engine, meter, clock = self._engine, self._engine.meter, self._site.clock
        try:
            await ask(
                engine.loop,
                peer,
                lambda: None if peer.stalls else True,
                lambda: LATENCY_S,
                self._site.config.transfer.stall_timeout_s,
            )
        except (OSError, TimeoutError):
            return False
        if not peer.alive or self._is_over:
            return False
        over: asyncio.Future[bool] = engine.loop.create_future()
        piece_bytes = max(1, size_bytes // _PIECES)
        meter.probe_begins(peer.node, clock.now_s, size_bytes, follows=follows)

        def arrived(pieces: int) -> bool:
            meter.add(peer.node, pieces * piece_bytes, clock.now_s)
            if transfer.pages == _PIECES // 2:
                meter.restart(peer.node, clock.now_s)
            return True

        def ended(error: str | None) -> None:
            meter.end(peer.node, clock.now_s)
            if not over.done():
                over.set_result(error is None)

        transfer = SimTransfer(
            peer, engine, _PIECES, piece_bytes, TrafficClass.HANDOFF, arrived, ended
        )
        self._site.links.send(transfer)
        return await over
