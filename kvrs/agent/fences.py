"""Fences of transfers whose slot leases have expired, because the stream's proxy died or did not
renew for a whole lease.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable, KeysView, Mapping

import aiohttp
import msgspec

from kvrs.ids import InstanceId
from kvrs.protocol.instance import FenceRequest, SlotRequest

log = logging.getLogger(__name__)

_TIMEOUT = aiohttp.ClientTimeout(total=1.0)
_RETRY_S = 0.5
# Number of times that a fence request is sent to an instance that does not answer: then the
# instance is dead, or gets a complete fence when it runs again.
_TRIES = 5


class FenceSender:
    """Sends fence requests to the instances of one node."""

    def __init__(self, *, can_fence: bool) -> None:
        """`can_fence`: the instances have fences. vLLM has none and needs none: a late load fills
        only pages of its own request, by keys of their contents.
        """
        self._can_fence = can_fence
        self._urls: dict[InstanceId, str] = {}
        self._waiting: asyncio.Queue[dict[InstanceId, list[SlotRequest]]] = asyncio.Queue()

    @property
    def targets(self) -> KeysView[InstanceId]:
        return self._urls.keys()

    def learn(self, urls: Mapping[InstanceId, str]) -> None:
        """Add instances of the node, or update their URLs."""
        self._urls.update(urls)

    def end(self, transfers: Iterable[SlotRequest]) -> None:
        by_target: defaultdict[InstanceId, list[SlotRequest]] = defaultdict(list)
        for each in transfers:
            by_target[each.target].append(each)
        if by_target and self._can_fence:
            self._waiting.put_nowait(by_target)

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send the fence requests that `end` has queued, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                for target, transfers in (await self._waiting.get()).items():
                    group.create_task(self._send(http, target, transfers))

    async def _send(
        self, http: aiohttp.ClientSession, target: InstanceId, transfers: list[SlotRequest]
    ) -> None:
        request = FenceRequest(
            {each.stream: each.attempt + 1 for each in transfers},
            {each.stream: each.owner_epoch for each in transfers},
            slots_only=True,
        )
        log.warning("slot leases expired", extra={"instance": target, "streams": len(transfers)})
        for _ in range(_TRIES):
            try:
                async with http.post(
                    f"{self._urls[target]}/kvrs/v1/fence",
                    data=msgspec.json.encode(request),
                    timeout=_TIMEOUT,
                ) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(_RETRY_S)
        log.warning("transfers not fenced", extra={"instance": target, "streams": len(transfers)})
