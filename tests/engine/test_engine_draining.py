"""Draining: when an instance that should end does so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_engine.engine.server import serve
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.ports import client_of
from tests.engine.serving import SECRET

pytestmark = [pytest.mark.engine, pytest.mark.network]


class Told:
    """One instance, served as its process does, and the signals that it gets."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        ended: "asyncio.Task[None]",
        stop: asyncio.Event,
        at_once: asyncio.Event,
    ):
        self.http = http
        self.ended = ended
        self.stop = stop
        self.at_once = at_once

    async def begin(self, stream: str, max_tokens: int, **fields: Any) -> aiohttp.ClientResponse:
        kvrs = {"stream": stream, "attempt": 1, "prompt_tokens": 40}
        body = {
            "prompt": list(range(10, 50)),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "kvrs": kvrs,
        }
        answer = await self.http.post("/v1/completions", json=body | fields)
        assert answer.status == 200, await answer.text()
        await answer.content.readuntil(b"\n\n")
        return answer

    async def lease(self, **update: list[str]) -> list[str]:
        async with self.http.post("/kvrs/v1/leases", json={"lease_s": 3600.0} | update) as answer:
            return list((await answer.json())["unknown"])

    async def retain(self, stream: str) -> None:
        """Pages with a lease that ends after every test."""
        body = {
            "prompt": list(range(10, 50)),
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        kvrs = {"stream": stream, "attempt": 1, "prompt_tokens": 40}
        async with self.http.post("/v1/completions", json=body | {"kvrs": kvrs}) as answer:
            assert answer.status == 200, await answer.text()
        assert await self.lease(renew=[stream]) == []

    async def load(self) -> LoadReport:
        async with self.http.get("/kvrs/v1/load") as answer:
            return msgspec.json.decode(await answer.read(), type=LoadReport)

    async def until_draining(self) -> None:
        while not (await self.load()).draining:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def told(model: Path, drain_s: float = 60.0) -> AsyncIterator[Told]:
    ports = free_ports(2)
    nodes = [
        {
            "id": "n0",
            "instances": [{"id": "e0", "role": "both", "port": ports[0], "page_port": ports[1]}],
        }
    ]
    config = parse_config(
        {
            "cluster": {
                "model": str(model),
                "nodes": nodes,
                "drain_s": drain_s,
                "engine": {"max_model_len": 2048},
            }
        }
    )
    stop, at_once, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended = asyncio.create_task(
        serve(config, InstanceId("e0"), 1, SECRET, stop, ready.set, at_once)
    )
    key = scoped_key(SECRET, Scope.INSTANCE, "e0")
    async with asyncio.timeout(180), client_of(f"http://127.0.0.1:{ports[0]}", key) as http:
        await ready.wait()
        try:
            yield Told(http, ended, stop, at_once)
        finally:
            stop.set()
            at_once.set()
            await ended


async def test_an_idle_instance_ends_at_once(tiny_model: Path) -> None:
    """No proxy would move streams or fetch pages."""
    async with told(tiny_model) as one, one.http.get("/kvrs/v1/load?watch=0.05"):
        one.stop.set()

        await one.ended


async def test_it_says_that_it_is_about_to_end_and_lets_its_streams_come_to_theirs(
    tiny_model: Path,
) -> None:
    """Watching proxies move their streams; for the others it stays."""
    async with told(tiny_model) as one:
        answer = await one.begin("s", max_tokens=300)
        before = (await one.load()).draining

        one.stop.set()
        await one.until_draining()
        output = await answer.read()
        await one.ended

    assert not before
    assert output.endswith(b"data: [DONE]\n\n")


async def test_what_was_taken_away_is_kept_until_it_is_fetched(tiny_model: Path) -> None:
    """A moment, and only as long as a proxy watches: else there is none that could have
    taken it.
    """
    async with told(tiny_model) as one:
        watch = await one.http.get("/kvrs/v1/load?watch=0.05")
        answer = await one.begin("s", max_tokens=1500)
        one.stop.set()
        await one.until_draining()

        answer.close()
        while (await one.load()).running:
            await asyncio.sleep(0.005)
        unknown = await one.lease(renew=["s", "other"])
        output = [await watch.content.readline() for _ in range(40)]
        watch.close()
        await one.ended

    assert unknown == ["other"]
    assert b"" not in output, "it ended though its pages had a lease"


async def test_its_patience_has_an_end(tiny_model: Path) -> None:
    """The time is over; streams that are left are recovered as after a death."""
    async with told(tiny_model, drain_s=0.0) as one, one.http.get("/kvrs/v1/load?watch=0.05"):
        await one.retain("s")

        one.stop.set()

        await one.ended


async def test_told_twice_it_ends_at_once(tiny_model: Path) -> None:
    """Ctrl-C pressed again is meant."""
    async with told(tiny_model) as one, one.http.get("/kvrs/v1/load?watch=0.05"):
        await one.retain("s")
        one.stop.set()
        await one.until_draining()

        one.at_once.set()

        await one.ended
