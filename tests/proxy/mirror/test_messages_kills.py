"""Messages whose proxy is killed: every other proxy goes on with them, with the same events."""

import asyncio
import json
from typing import Any

import pytest

from kvrs_testkit.multi_proxy_cluster import MultiProxyCluster, open_proxy_group
from tests.proxy.mirror.late_mirror import hold_mirror

REQUEST: dict[str, Any] = {
    "model": "scripted",
    "messages": [{"role": "user", "content": "play all/tokens."}],
    "max_tokens": 90,
    "temperature": 0,
    "stream": True,
}


class Reader:
    """A client of one message. `events`: all that it received, from any proxy, each with its id;
    `error`: that which has ended its connection.
    """

    def __init__(self, group: MultiProxyCluster, key: str) -> None:
        self._group = group
        self._key = key
        self.events: list[tuple[str, Any]] = []
        self.error: Any = None

    @property
    def is_done(self) -> bool:
        ended = bool(self.events) and self.events[-1][1]["type"] == "message_stop"
        return ended or self.error is not None

    async def read(self, proxy: int, most: int = 1000) -> None:
        """Read to the end, or until there are so many events."""
        url = self._group.url(proxy) + "/v1/messages"
        while not self.is_done and len(self.events) < most:
            last = {"Last-Event-ID": self.events[-1][0]} if self.events else {}
            headers = {"Idempotency-Key": self._key} | last
            async with self._group.http.post(url, json=REQUEST, headers=headers) as response:
                if response.status == 409:  # Another proxy has only just taken the stream over.
                    await asyncio.sleep(0.05)
                    continue
                assert response.status == 200, await response.read()
                while not self.is_done and len(self.events) < most:
                    self._take(await response.content.readuntil(b"\n\n"))

    def _take(self, frame: bytes) -> None:
        *names, kind, data = frame.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if names:
            self.events.append((names[0].removeprefix("id: "), event))
        else:
            self.error = event["error"]


async def test_a_message_goes_on_at_any_proxy_behind_the_last_event() -> None:
    """No event is missing or comes twice, and each is that of the undisturbed message."""
    async with open_proxy_group(3) as group:
        group.system.script.pause_s = 0.01
        calm, killed = Reader(group, "calm"), Reader(group, "killed")
        await calm.read(0)
        proxy = 0
        await killed.read(proxy, 3)
        while not killed.is_done:
            await group.kill(proxy)
            await group.start(proxy)
            await group.know_each_other()
            proxy = (proxy + 1) % 3
            await killed.read(proxy, len(killed.events) + 7)

    names = [name.partition(":") for name, _ in killed.events]
    assert len({stream for stream, _, _ in names}) == 1
    assert [int(number) for _, _, number in names] == list(range(len(names)))
    for reader in (calm, killed):  # The id differs from message to message.
        del reader.events[0][1]["message"]["id"]
    assert [event for _, event in killed.events] == [event for _, event in calm.events]


async def test_a_client_gets_only_events_that_the_mirror_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise another proxy could number other events like those that the client has."""
    async with open_proxy_group(2) as group:
        answers = hold_mirror(monkeypatch)
        reader = Reader(group, "k")
        reading = asyncio.create_task(reader.read(0))
        await group.until(
            lambda: any(len(keyed.record.events) > 3 for keyed in group.mirror(0).streams.values())
        )
        (keyed,) = group.mirror(0).streams.values()
        given = list(keyed.given)
        answers.set()
        await reading

    assert given == []
    assert reader.is_done


async def test_a_client_that_loses_its_message_to_another_one_gets_an_error_without_id() -> None:
    """The last id that it has stays that of an event of the message."""
    async with open_proxy_group(2) as group:
        group.system.script.gate, group.system.script.gate_at = asyncio.Event(), 5
        first, second = Reader(group, "k"), Reader(group, "k")
        reading = asyncio.create_task(first.read(0))
        await group.until(lambda: len(first.events) > 3)
        second.events = first.events[:2]
        resuming = asyncio.create_task(second.read(1))
        await reading
        group.system.script.gate.set()
        await resuming

    assert first.error["type"] == "api_error"
    assert second.events[-1][1]["type"] == "message_stop"
    assert first.events == second.events[: len(first.events)]
