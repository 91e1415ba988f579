"""Looks up the names of `proxy.numbered_peers`, and has the proxy's peers follow them."""

import asyncio
import logging
import socket
from collections.abc import Callable, Collection

from kvrs.config.proxy import PeerSettings
from kvrs.core.fleet.numbered_peers import NameStatus, followed
from kvrs.errors import ConfigError
from kvrs.net.names import all_addresses
from kvrs.proxy.reload import Reloads

log = logging.getLogger(__name__)

LOOK_UP_S = 5.0  # Between look-ups, and the longest time that one is waited for.
_ABSENT = (socket.EAI_NONAME, socket.EAI_NODATA)


class PeerNames:
    """`live`: the ids of the peers that are up."""

    def __init__(self, reloads: Reloads, live: Callable[[], Collection[str]]) -> None:
        self._reloads = reloads
        self._live = live

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_UP_S)
            await self.look_up()

    async def look_up(self) -> None:
        """Once, and follow what is found."""
        proxy = self._reloads.config.proxy
        if (numbered := proxy.numbered_peers) is None:
            return
        possible = numbered.others(proxy.id)
        found = await asyncio.gather(*map(_status, possible))
        answers = {peer.id: each for peer, each in zip(possible, found, strict=True)}
        held = self._reloads.found_peers
        wanted = followed(possible, held, answers, self._live())
        if wanted == held:
            return
        try:
            await self._reloads.follow_peers(wanted)
        except ConfigError as error:
            log.warning("peers not followed", extra={"cause": str(error)})


async def _status(peer: PeerSettings) -> NameStatus:
    try:
        async with asyncio.timeout(LOOK_UP_S):
            found = await all_addresses(peer.host)
    except socket.gaierror as error:
        return NameStatus.ABSENT if error.errno in _ABSENT else NameStatus.NO_ANSWER
    except OSError:  # TimeoutError is one.
        return NameStatus.NO_ANSWER
    return NameStatus.FOUND if found else NameStatus.ABSENT
