"""Common part of the backends for unmodified vLLM and SGLang, which replaces what the instance
protocol would do.
"""

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from typing import ClassVar

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.instance import (
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    RankAnswer,
    RankRequest,
)
from kvrs.proxy.backends.pd import OpenAiPeer


class StockPeer(OpenAiPeer):
    """An instance of a stock engine: its load is polled, and requests that need a capability are
    refused.
    """

    ENGINE: ClassVar[str]

    @abstractmethod
    def _reports(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AsyncGenerator[LoadReport]:
        """Yield load reports; the watcher limits the time between them."""

    def watch_load(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return aclosing(self._reports(interval_s, is_awaited))

    async def order_rank(self, order: RankRequest) -> RankAnswer:
        raise UpstreamError(f"{self.ENGINE}'s ranks do not leave one by one")

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        raise UpstreamError(f"{self.ENGINE} has no leases of proxies")

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        raise UpstreamError(f"{self.ENGINE} cannot be fenced")
