"""A mirror whose updates wait on their way to the peers."""

import asyncio
from collections.abc import Callable

import pytest

from kvrs.protocol.mirror import BatchAnswer, SentPrompt, Update
from kvrs.proxy.mirror.peers import ProxyPeer


def hold_mirror(
    monkeypatch: pytest.MonkeyPatch, arrived: Callable[[list[Update]], object] = lambda _: None
) -> asyncio.Event:
    """Hold the updates of all proxies back until the event is set. `arrived` is called with each
    batch that a peer has answered.
    """
    mirror, answers = ProxyPeer.mirror, asyncio.Event()

    async def mirror_late(
        self: ProxyPeer, updates: list[Update], sent: list[SentPrompt]
    ) -> BatchAnswer:
        await answers.wait()
        answer = await mirror(self, updates, sent)
        arrived(updates)
        return answer

    monkeypatch.setattr(ProxyPeer, "mirror", mirror_late)
    return answers
