"""Real engines and agents whose event loops stall, and one that is stopped whole."""

import asyncio
import json
import os
import signal
from collections import Counter
from typing import Any

import aiohttp
import pytest

from kvrs_testkit.processes import Processes
from kvrs_testkit.sse import events_of

pytestmark = [pytest.mark.process, pytest.mark.network, pytest.mark.xdist_group("systems")]

STREAM = {"prompt": "ka lo mi", "max_tokens": 600, "temperature": 0, "ignore_eos": True}


class Watched:
    """A stream, the instance that decodes it, and what the proxy has made of that."""

    def __init__(self, processes: Processes, http: aiohttp.ClientSession) -> None:
        proxy = processes.config.proxy
        self._url, self._admin = (
            f"http://{proxy.host}:{port}" for port in (proxy.port, proxy.admin_port)
        )
        self._http = http

    async def state(self) -> Any:
        async with self._http.get(f"{self._admin}/kvrs/v1/state") as answer:
            return await answer.json()

    async def text(self) -> str:
        body = STREAM | {"stream": True}
        async with self._http.post(f"{self._url}/v1/completions", json=body) as response:
            *events, done, nothing = events_of(await response.read())
        assert (done, nothing) == (b"data: [DONE]", b"")
        return "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)

    async def decoding(self) -> str:
        """The decode instance of the one stream that has tokens."""
        async with asyncio.timeout(60):
            while True:
                rows = (await self.state())["streams"]
                if rows and rows[0]["output_tokens"] > 20:
                    return str(rows[0]["decode"])
                await asyncio.sleep(0.01)

    async def recoveries(self) -> list[str]:
        return [row["from"] for row in (await self.state())["recoveries"]]

    async def epochs(self) -> dict[str, tuple[str, int]]:
        state = await self.state()
        rows = [*state["instances"], *state["agents"]]
        return {row["id"]: (row["health"], row["epoch"]) for row in rows}


@pytest.mark.nightly
async def test_a_stalled_event_loop_is_not_a_death(processes: Processes) -> None:
    """The instance and the agent are neither lost nor fenced; the stream waits, and is exact."""
    async with aiohttp.ClientSession() as http:
        watched = Watched(processes, http)
        expected = await watched.text()
        before, recovered = await watched.epochs(), await watched.recoveries()
        streaming = asyncio.create_task(watched.text())

        for name in (await watched.decoding(), "agent-n0"):
            os.kill(processes.pid(name), signal.SIGUSR2)

        assert await streaming == expected
        assert await watched.recoveries() == recovered
        assert await watched.epochs() == before


async def test_a_stopped_process_is_a_loss(processes: Processes) -> None:
    """No heartbeat comes from it: its streams go on elsewhere, and it is fenced when it wakes."""
    async with aiohttp.ClientSession() as http:
        watched = Watched(processes, http)
        expected, before = await watched.text(), await watched.epochs()
        recovered = await watched.recoveries()
        streaming = asyncio.create_task(watched.text())
        stopped = await watched.decoding()

        os.kill(processes.pid(stopped), signal.SIGSTOP)
        try:
            text = await streaming
        finally:
            os.kill(processes.pid(stopped), signal.SIGCONT)

        assert text == expected
        assert Counter(await watched.recoveries()) == Counter([*recovered, stopped])
        async with asyncio.timeout(60):
            while (await watched.epochs())[stopped] != ("up", before[stopped][1] + 1):
                await asyncio.sleep(0.05)
