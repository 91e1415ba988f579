"""Members that the configuration names by a host name: looked up beside the event loop, never for a
packet.

A running member publishes a numeric address, which counts as long as it runs. So only seeds that
are no members, or are dead or have left, are looked up, again and again, because a name can get
another address before its process is up (a pod of a headless service). Names in packets are never
looked up.
"""

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from kvrs.config.settings import is_numeric
from kvrs.gossip.rates import Address
from kvrs.ids import NodeId
from kvrs.names import first_address

_FIRST_S = 2.0  # Of the start; later answers count when they come.


class SeedNames:
    """`seeds`: `host:port` of each; those with an address are left out."""

    def __init__(self, seeds: Mapping[NodeId, str], family: socket.AddressFamily) -> None:
        self._family = family
        self._named = {
            seed: (host, int(port))
            for seed, (host, _, port) in ((s, text.rpartition(":")) for s, text in seeds.items())
            if not is_numeric(host)
        }
        self._found: dict[NodeId, Address] = {}

    def address_of(self, seed: NodeId) -> Address | None:
        """Address of a seed, from the last look-up that had an answer."""
        return self._found.get(seed)

    async def look_up_first(self) -> None:
        """Wait for all answers, but not long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_S):
                await self._look_up(self._named)

    async def run(self, wanted: Callable[[NodeId], bool], interval_s: float) -> None:
        """Look up those that are wanted, until cancelled or none is left."""
        while self._named:
            await asyncio.sleep(interval_s)
            await self._look_up([seed for seed in self._named if wanted(seed)])

    async def _look_up(self, seeds: Iterable[NodeId]) -> None:
        await asyncio.gather(*map(self._look_up_one, seeds))

    async def _look_up_one(self, seed: NodeId) -> None:
        host, port = self._named[seed]
        with suppress(OSError):  # The last answer stays.
            self._found[seed] = await first_address(host, self._family), port
