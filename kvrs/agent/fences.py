"""Ends transfers whose slots have ended: the owner of such a stream is gone, or has been silent for a whole lease."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable

import aiohttp
import msgspec

from kvrs.config import NodeSettings
from kvrs.ids import InstanceId
from kvrs.protocol.instance import FenceRequest, SlotAsked
from kvrs.protocol.secrets import http_token

log = logging.getLogger(__name__)

_TIMEOUT_S = 1.0
_PAUSE_S = 0.5
_TRIES = 5  # An instance that does not answer by then is dead, or is fenced as a whole when it wakes.


class Fences:
    """Tells the instances of one node."""

    def __init__(self, node: NodeSettings, secret: bytes) -> None:
        self._urls = {instance.id: instance.url for instance in node.instances}
        self._headers = {"Authorization": f"Bearer {http_token(secret)}"}
        self._waiting: asyncio.Queue[dict[InstanceId, list[SlotAsked]]] = asyncio.Queue()

    @property
    def targets(self) -> list[InstanceId]:
        return list(self._urls)

    def end(self, transfers: Iterable[SlotAsked]) -> None:
        by_target: defaultdict[InstanceId, list[SlotAsked]] = defaultdict(list)
        for each in transfers:
            by_target[each.target].append(each)
        if by_target:
            self._waiting.put_nowait(by_target)

    async def run(self) -> None:
        """Tell them until cancelled."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session, asyncio.TaskGroup() as group:
            while True:
                for target, transfers in (await self._waiting.get()).items():
                    group.create_task(self._tell(session, target, transfers))

    async def _tell(self, session: aiohttp.ClientSession, target: InstanceId, transfers: list[SlotAsked]) -> None:
        request = FenceRequest(
            {each.stream: each.attempt + 1 for each in transfers},
            {each.stream: each.owner_epoch for each in transfers},
            slots_only=True,
        )
        log.warning("slots ended by themselves", extra={"instance": target, "streams": len(transfers)})
        for _ in range(_TRIES):
            try:
                async with session.post(f"{self._urls[target]}/kvrs/v1/fence", data=msgspec.json.encode(request)) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(_PAUSE_S)
        log.warning("transfers not ended", extra={"instance": target, "streams": len(transfers)})
