"""What workers of one proxy share: streams with a key, tenants' limits, slots."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.config.tenants import key_hash
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.proxy_cluster import WITHIN_S
from tests.proxy.scripted_model import expected_ids, text_of
from tests.proxy.workers_of_proxy import WorkersOfProxy, open_workers
from tests.sse import events_of

pytestmark = [pytest.mark.process, pytest.mark.network]

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
PROMPT = list(range(40))
STREAM = REQUEST | {"stream": True}
KEY = {"Authorization": "Bearer key-of-a"}
# A stream of this pace may be silent for twenty times as long, while it waits at a gate.
PACE_S = 3.0
PATIENT = {"token_gap_s": 60.0}


def key_file(directory: Path, **limits: Any) -> str:
    path = directory / "keys"
    path.write_bytes(msgspec.json.encode({"a": {"keys": [key_hash(b"key-of-a").hex()], **limits}}))
    path.chmod(0o600)
    return str(path)


def numbered(body: bytes) -> list[tuple[bytes, bytes]]:
    """Id and data of each event of a keyed stream."""
    events = []
    for event in events_of(body)[:-1]:
        *head, data = event.split(b"\n")
        events.append((head[0].removeprefix(b"id: ") if head else b"", data))
    return events


async def begin(
    proxy: WorkersOfProxy, headers: dict[str, str] | None = None, **fields: Any
) -> aiohttp.ClientResponse:
    """The response, of which nothing is read yet."""
    return await proxy.http.post(
        f"{proxy.url}/v1/completions", json=STREAM | fields, headers=headers
    )


async def resume(proxy: WorkersOfProxy, headers: dict[str, str]) -> aiohttp.ClientResponse:
    """As clients do: again, where the connection had been accepted for the worker that died."""
    while True:
        try:
            return await begin(proxy, headers)
        except aiohttp.ClientOSError:
            await asyncio.sleep(0.01)


async def until_holds(proxy: WorkersOfProxy, stream: str, tokens: int) -> int:
    """The worker of a stream, once it has so many tokens."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for row in (await proxy.state())["streams"]:
                if row["id"] == stream and row["output_tokens"] >= tokens:
                    return int(row["worker"])
            await asyncio.sleep(0.01)


async def test_a_keyed_stream_goes_on_at_another_worker_when_its_own_is_killed(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """At once, without a token that is missing or comes twice."""
    system = await build()
    async with open_workers(system, tmp_path, workers=2) as proxy:
        whole = await begin(proxy, {"Idempotency-Key": "quiet"})
        expected = [data for _, data in numbered(await whole.read())]
        for turn in range(3):
            system.script.gate, system.script.gate_at = asyncio.Event(), 4
            named = {"Idempotency-Key": f"k{turn}"}
            response = await begin(proxy, named)
            had = b"".join([await response.content.readuntil(b"\n\n") for _ in range(3)])
            last = numbered(had)[-1][0].decode()
            worker = await until_holds(proxy, last.partition(":")[0], 4)
            pid = (await proxy.workers())[worker]["pid"]

            os.kill(pid, signal.SIGKILL)
            system.script.gate.set()
            resumed = await resume(proxy, named | {"Last-Event-ID": last})
            rest = await resumed.read()

            assert resumed.status == 200, rest
            ids = [name.partition(b":")[0] for name, _ in numbered(had + rest) if name]
            assert len({*ids}) == 1
            found = [data for _, data in numbered(had + rest)]
            assert list(map(without_ids, found)) == list(map(without_ids, expected))
            await proxy.until_up()


def without_ids(data: bytes) -> Any:
    if data == b"data: [DONE]":
        return data
    event = msgspec.json.decode(data.removeprefix(b"data: "))
    return {name: value for name, value in event.items() if name not in ("id", "created")}


async def test_one_key_at_many_workers_at_once_is_one_stream(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Of requests that come together one begins it; the others find it."""
    system = await build()
    async with open_workers(system, tmp_path, workers=3) as proxy:
        for turn in range(5):
            named = {"Idempotency-Key": f"k{turn}"}
            asked = [begin(proxy, named) for _ in range(9)]
            bodies = [(each.status, await each.read()) for each in await asyncio.gather(*asked)]

            streams = {
                name.partition(b":")[0]
                for status, body in bodies
                if status == 200
                for name, _ in numbered(body)
                if name
            }
            codes = {
                msgspec.json.decode(body)["error"]["code"]
                for status, body in bodies
                if status != 200
            }
            assert len(streams) == 1
            assert codes <= {"resume_conflict", "superseded"}
            assert any(body.endswith(b"data: [DONE]\n\n") for _, body in bodies)


async def test_a_tenants_streams_are_limited_over_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Exactly: as many are open as the limit says, whichever workers have them; a killed worker
    frees what it had.
    """
    system = await build()
    security = {"key_file": key_file(tmp_path, streams=12)}
    async with open_workers(system, tmp_path, workers=3, security=security) as proxy:
        workers = set()
        for _ in range(3):
            system.script.gate, system.script.gate_at = asyncio.Event(), 2
            begun = await asyncio.gather(*(begin(proxy, KEY) for _ in range(20)))
            taken = [each for each in begun if each.status == 200]
            refused = [each for each in begun if each.status == 429]
            (row,) = (await proxy.proxy_row())["tenants"]
            assert (len(taken), len(refused), row["open_streams"]) == (12, 8, 12)

            workers |= {each["worker"] for each in (await proxy.state())["streams"]}
            system.script.gate.set()
            for each in begun:
                await each.read()
            async with asyncio.timeout(WITHIN_S):
                while (await proxy.proxy_row())["tenants"][0]["open_streams"]:
                    await asyncio.sleep(0.01)
        assert row["refused"] == 24
        assert len(workers) > 1

        system.script.gate = asyncio.Event()
        begun = await asyncio.gather(*(begin(proxy, KEY) for _ in range(12)))
        rows = (await proxy.state())["streams"]
        worker = rows[0]["worker"]
        lost = sum(each["worker"] == worker for each in rows)
        os.kill((await proxy.workers())[worker]["pid"], signal.SIGKILL)
        await proxy.until_up()

        again = [(await begin(proxy, KEY)).status for _ in range(12)]

        assert again == [200] * lost + [429] * (12 - lost)
        system.script.gate.set()


async def test_bytes_that_are_open_are_limited_over_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """A body is counted before it is read, and given back when its client goes."""
    system = await build()
    security = {"key_file": key_file(tmp_path, open_bytes=64 << 10)}
    async with open_workers(system, tmp_path, workers=3, security=security) as proxy:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-a\r\n"
            b"Content-Type: application/json\r\nContent-Length: 16384\r\n\r\n"
        )
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            writer.write(head)
            writers.append(writer)
        async with asyncio.timeout(WITHIN_S):
            while (await proxy.proxy_row())["tenants"][0]["open_bytes"] < 64 << 10:
                await asyncio.sleep(0.01)

        status, body = await proxy.ask(REQUEST, KEY)
        for writer in writers:
            writer.close()
        async with asyncio.timeout(WITHIN_S):
            while (await proxy.proxy_row())["tenants"][0]["open_bytes"]:
                await asyncio.sleep(0.01)
        after, _ = await proxy.ask(REQUEST, KEY)

        assert status == 429, body
        assert after == 200


async def test_streams_of_all_workers_are_spread_evenly_over_instances(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Each counts what the others have sent; by itself each would begin with the same instance."""
    system = await build()
    async with open_workers(system, tmp_path, workers=3, proxy=PATIENT) as proxy:
        system.script.gate, system.script.gate_at = asyncio.Event(), 2
        system.script.pause_s = PACE_S
        begun = []
        for count in range(1, 13):
            begun.append(await begin(proxy))
            async with asyncio.timeout(WITHIN_S):
                while {
                    sum(row["decode_streams"] for row in each["instances"])
                    for each in (await proxy.state())["policy"]["workers"]
                } != {count}:
                    await asyncio.sleep(0.01)
            running = [system.instances[name].running for name in ("d0", "d1")]
            assert max(running) - min(running) <= 1, running
        workers = {row["worker"] for row in (await proxy.state())["streams"]}
        system.script.pause_s = 0.0
        system.script.gate.set()
        for each in begun:
            await each.read()

        assert len(workers) > 1


async def test_targets_have_no_more_transfers_than_slots_over_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Where no agent arbitrates, each worker has its share of them."""
    system = await build()
    target = system.instances["d1"]
    policy = {"name": "always_migrate", "slots_max": 4}
    async with open_workers(system, tmp_path, 2, policy=policy, proxy=PATIENT) as proxy:
        await target.kill()
        await until_health(proxy, "d1", "down")
        system.script.gate, system.script.gate_at = asyncio.Event(), 3
        system.script.pause_s = PACE_S
        asked = [asyncio.create_task(proxy.ask(REQUEST | {"prompt": PROMPT})) for _ in range(16)]
        async with asyncio.timeout(WITHIN_S):
            while sum(row["output_tokens"] >= 3 for row in (await proxy.state())["streams"]) < 16:
                await asyncio.sleep(0.01)
        system.script.pause_s = 0.0
        victims = [row["worker"] for row in (await proxy.state())["streams"]]
        await target.restart()
        await until_health(proxy, "d1", "up")

        await system.instances["d0"].kill()
        most = 0
        async with asyncio.timeout(WITHIN_S):
            while (slots := (await proxy.state())["slots"].get("d1", {})).get("held", 0) < min(
                4, sum(min(2, victims.count(worker)) for worker in (0, 1))
            ):
                most = max(most, slots.get("held", 0), target.running)
                await asyncio.sleep(0.01)
        for _ in range(20):
            slots = (await proxy.state())["slots"]["d1"]
            most = max(most, slots["held"], target.running)
        system.script.gate.set()
        answers = await asyncio.gather(*asked)

        assert slots["max"] == 4
        assert 0 < most <= 4
        wanted = "".join(map(text_of, expected_ids(PROMPT, 8)))
        assert {status for status, _ in answers} == {200}
        assert {msgspec.json.decode(body)["choices"][0]["text"] for _, body in answers} == {wanted}
        recoveries = (await proxy.state())["recoveries"]
        assert len(recoveries) == 16
        assert {row["option"] for row in recoveries} == {"migrate"}
        assert {row["worker"] for row in recoveries} == {*victims}
        assert await proxy.count("kvrs_recoveries_total", option="migrate") == 16


async def until_health(proxy: WorkersOfProxy, name: str, health: str) -> None:
    """As all workers see it."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            rows = {row["id"]: row for row in (await proxy.state())["instances"]}
            if rows[name]["health"] == health and "health_by_worker" not in rows[name]:
                return
            await asyncio.sleep(0.01)
