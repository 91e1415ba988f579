"""Members on loopback, in the test's own event loop, with short intervals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvrs.gossip.facts import Event, MemberChanged
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId

HOST = "127.0.0.1"
RING = (b"a secret of the tests",)
PROBE_INTERVAL_S = 0.05
QUICK = {"probe_interval_s": PROBE_INTERVAL_S}


class Gathering:
    def __init__(self) -> None:
        self.seeds: dict[NodeId, str] = {}
        self.received: dict[NodeId, list[Event]] = {}
        self._members: list[Membership] = []

    async def add(
        self,
        name: str,
        ring: tuple[bytes, ...] = RING,
        epoch: int | None = None,
        port: int = 0,
        host: str = HOST,
    ) -> Membership:
        me = NodeId(name)
        received = self.received.setdefault(me, [])
        member = Membership(me, PROBE_INTERVAL_S, ring, received.append, epoch=epoch)
        bound = await member.start(
            host, port, {node: where for node, where in self.seeds.items() if node != me}
        )
        self.seeds[me] = f"{host}:{bound}"
        self._members.append(member)
        return member

    def port_of(self, member: Membership) -> int:
        return int(self.seeds[member.id].rpartition(":")[2])

    def deaths(self) -> set[NodeId]:
        """Members that any other one has held dead."""
        events = [event for received in self.received.values() for event in received]
        return {
            event.id
            for event in events
            if isinstance(event, MemberChanged) and event.status is Status.DEAD
        }

    async def leave(self, member: Membership) -> None:
        self._members.remove(member)
        await member.close()

    async def kill(self, member: Membership) -> None:
        """End the member without an announcement, like SIGKILL."""
        self._members.remove(member)
        member._gossip = None
        if member._timer is not None:
            member._timer.cancel()
        member._transport.close()

    async def close(self) -> None:
        for member in self._members.copy():
            await self.leave(member)


@asynccontextmanager
async def gathering() -> AsyncIterator[Gathering]:
    opened = Gathering()
    try:
        yield opened
    finally:
        await opened.close()


async def until(holds: Callable[[], bool]) -> None:
    """Wait for a condition; the limit fails a test that waits in vain."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)
