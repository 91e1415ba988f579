"""A proxy's requests to the agent of a node, which holds checkpoints and grants slots."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from kvrs.protocol.instance import AgentInfo, AgentReport, SlotAnswer, SlotUpdate
from kvrs.proxy.wire.peer import Peer


class AgentBackend(Peer):
    """Client of the agent at one URL; failures raise `UpstreamError`."""

    async def info(self) -> AgentInfo:
        return await self.control("GET", "/kvrs/v1/agent", None, AgentInfo)

    def watch_holdings(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[AgentReport]]:
        return self.watch("/kvrs/v1/holdings", interval_s, AgentReport)

    async def slots(self, update: SlotUpdate) -> SlotAnswer:
        return await self.control("POST", "/kvrs/v1/slots", update, SlotAnswer)
