"""A proxy of several workers: they share a port, take over each other's streams, end together, and
one that is killed comes back.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster, open_proxy_cluster
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.sse import events_of
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.workers_of_proxy import WorkersOfProxy, document_of, open_workers

pytestmark = [pytest.mark.process, pytest.mark.network]

SHARED = pytest.mark.asyncio(loop_scope="module")
REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0}
STREAM = REQUEST | {"stream": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[ProxyCluster, WorkersOfProxy]]:
    """Three workers for tests that leave all of them up."""
    directory = tmp_path_factory.mktemp("workers")
    async with open_proxy_cluster() as system, open_workers(system, directory, workers=3) as proxy:
        yield system, proxy


async def begin(
    proxy: WorkersOfProxy, headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    """The response, of which nothing is read yet."""
    return await proxy.http.post(f"{proxy.url}/v1/completions", json=STREAM, headers=headers)


async def resume(proxy: WorkersOfProxy, headers: dict[str, str]) -> aiohttp.ClientResponse:
    """The response, after a retry where the connection was accepted for the worker that died."""
    while True:
        try:
            return await begin(proxy, headers)
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.01)


async def until_each_has_a_stream(
    system: ProxyCluster, proxy: WorkersOfProxy
) -> list[aiohttp.ClientResponse]:
    """Begin streams, which stop before token 2, until each worker has one."""
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    begun: list[aiohttp.ClientResponse] = []
    while not all(await proxy.streams()):
        for _ in range(4):
            begun.append(await begin(proxy))
            await begun[-1].content.readuntil(b"\n\n")
    return begun


def go_on(system: ProxyCluster) -> None:
    assert system.script.gate is not None
    system.script.gate.set()


def numbered(body: bytes) -> list[tuple[bytes, bytes]]:
    """Id and data of each event of a keyed stream."""
    events = []
    for event in events_of(body)[:-1]:
        *head, data = event.split(b"\n")
        events.append((head[0].removeprefix(b"id: ") if head else b"", data))
    return events


def without_ids(data: bytes) -> Any:
    if data == b"data: [DONE]":
        return data
    event = msgspec.json.decode(data.removeprefix(b"data: "))
    return {name: value for name, value in event.items() if name not in ("id", "created")}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while any(map(is_alive, pids)):
            await asyncio.sleep(0.01)


async def until_holds(proxy: WorkersOfProxy, stream: str, tokens: int) -> int:
    """The worker of a stream, once it has so many tokens."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            for worker, state in enumerate(await proxy.states()):
                for row in state["streams"]:
                    if row["id"] == stream and row["output_tokens"] >= tokens:
                        return worker
            await asyncio.sleep(0.01)


async def refusal(config: Path) -> tuple[int, bytes]:
    """Exit status and output of a proxy that does not start."""
    process = await forked(
        *("kvrs", "proxy", "--config", str(config)),
        environment=os.environ | {"KVRS_SECRET": SECRET.decode()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            _, output = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output


@SHARED
async def test_a_keyed_stream_goes_on_at_another_worker_when_its_own_is_killed(
    shared: tuple[ProxyCluster, WorkersOfProxy],
) -> None:
    """No token is missing or comes twice."""
    system, proxy = shared
    whole = await begin(proxy, {"Idempotency-Key": "quiet"})
    expected = [data for _, data in numbered(await whole.read())]
    for turn in range(3):
        system.script.gate, system.script.gate_at = asyncio.Event(), 4
        named = {"Idempotency-Key": f"k{turn}"}
        response = await begin(proxy, named)
        had = b"".join([await response.content.readuntil(b"\n\n") for _ in range(3)])
        last = numbered(had)[-1][0].decode()
        worker = await until_holds(proxy, last.partition(":")[0], 4)
        pid = (await proxy.rows())[worker]["pid"]

        os.kill(pid, signal.SIGKILL)
        go_on(system)
        resumed = await resume(proxy, named | {"Last-Event-ID": last})
        rest = await resumed.read()

        assert resumed.status == 200, rest
        ids = [name.partition(b":")[0] for name, _ in numbered(had + rest) if name]
        assert len({*ids}) == 1
        found = [data for _, data in numbered(had + rest)]
        assert list(map(without_ids, found)) == list(map(without_ids, expected))
        await proxy.until_up(pid)


@SHARED
async def test_a_killed_worker_comes_back_and_the_others_go_on(
    shared: tuple[ProxyCluster, WorkersOfProxy],
) -> None:
    """Requests spread over all; clients of the others notice nothing, and new ones find another."""
    system, proxy = shared
    _, expected = await system.ask(REQUEST)
    begun = await until_each_has_a_stream(system, proxy)
    of_others = sum((await proxy.streams())[1:])
    lost, *others = [row["pid"] for row in await proxy.rows()]

    os.kill(lost, signal.SIGKILL)
    await until_gone(lost)
    go_on(system)
    reading = [asyncio.create_task(each.read()) for each in begun]
    answers = [await proxy.ask(REQUEST) for _ in range(10)]
    ended = await asyncio.gather(*reading, return_exceptions=True)
    await proxy.until_up(lost)

    assert {status for status, _ in answers} == {200}
    assert {body.partition(b'"choices"')[2] for _, body in answers} == {
        expected.partition(b'"choices"')[2]
    }
    whole = [body for body in ended if isinstance(body, bytes)]
    assert len(whole) == of_others
    assert all(body.endswith(b"data: [DONE]\n\n") for body in whole)
    assert [row["pid"] for row in await proxy.rows()][1:] == others


async def test_every_worker_obeys_an_order_to_drain_also_one_that_comes_back(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It is given to any of them, as to one of several proxies."""
    system = await build()

    async def until_drained(*wanted: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while any(
                {row["id"] for row in state["instances"] if row["drain"]} != {*wanted}
                for state in await proxy.states()
            ):
                await asyncio.sleep(0.01)

    async with open_workers(system, tmp_path) as proxy:
        first = (await proxy.rows())[0]["pid"]
        given, _ = await proxy.admin("/kvrs/v1/drain/d0", "POST", worker=1)
        await until_drained("d0")
        os.kill(first, signal.SIGKILL)
        await proxy.until_up(first)
        await until_drained("d0")
        d0 = system.instances["d0"]
        before = len(d0.calls)
        answers = [await proxy.ask(REQUEST) for _ in range(10)]
        reached = "POST /v1/completions" in d0.calls[before:]
        ended, _ = await proxy.admin("/kvrs/v1/drain/d0", "DELETE")
        await until_drained()

    assert (given, ended) == (200, 200)
    assert {status for status, _ in answers} == {200}
    assert not reached


async def test_workers_end_with_their_supervisor(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """A supervisor that is started again finds its ports free."""
    system = await build()
    async with open_workers(system, tmp_path, is_forked=False) as proxy:
        pids = [row["pid"] for row in await proxy.rows()]

        proxy.process.kill()

        await until_gone(*pids)


async def test_a_signalled_proxy_drains_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Streams with a key too: no other worker will go on with them."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        begun = await until_each_has_a_stream(system, proxy)
        keyed = await begin(proxy, {"Idempotency-Key": "k"})
        await keyed.content.readuntil(b"\n\n")
        pids = [row["pid"] for row in await proxy.rows()]

        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"draining", b"worker=proxy-0.0")
        await proxy.until_logged(b"draining", b"worker=proxy-0.1")
        go_on(system)
        ended = [await each.read() for each in (*begun, keyed)]

        assert await proxy.process.wait() == 0
        assert not any(map(is_alive, pids))
    assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)


async def test_a_second_signal_ends_all_workers_at_once(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Their streams end with an error that says why."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        begun = await until_each_has_a_stream(system, proxy)

        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"draining", b"worker=proxy-0.0")
        await proxy.until_logged(b"draining", b"worker=proxy-0.1")
        proxy.process.send_signal(signal.SIGTERM)
        ended = [await each.read() for each in begun]

        assert await proxy.process.wait() == 0
    assert all(b"shutting_down" in body for body in ended)


@SHARED
async def test_a_worker_that_is_signalled_alone_leaves_its_clients_to_the_others(
    shared: tuple[ProxyCluster, WorkersOfProxy],
) -> None:
    """It lets its streams end, takes no new clients, and another process takes its place."""
    system, proxy = shared
    begun = await until_each_has_a_stream(system, proxy)
    first = (await proxy.rows())[0]["pid"]

    os.kill(first, signal.SIGTERM)
    await proxy.until_logged(b"draining")
    answers = [await proxy.ask(REQUEST | {"max_tokens": 1}) for _ in range(20)]
    go_on(system)
    ended = [await each.read() for each in begun]
    await proxy.until_up(first)

    assert {status for status, _ in answers} == {200}
    assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)


@SHARED
@pytest.mark.parametrize(
    ("by_signal", "policy"), [(False, "always_recompute"), (True, "always_migrate")]
)
async def test_a_reload_reaches_all_workers(
    shared: tuple[ProxyCluster, WorkersOfProxy], by_signal: bool, policy: str
) -> None:
    """A signal to their supervisor does it, and a request at any of their admin ports."""
    system, proxy = shared
    document = document_of(system, policy={"name": policy}, proxy={"workers": 3})
    # In one step: a worker that was asked by request reads the file once more for its supervisor.
    beside = proxy.config.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(document))
    beside.replace(proxy.config)

    if by_signal:
        proxy.process.send_signal(signal.SIGHUP)
    else:
        status, answer = await proxy.admin("/kvrs/v1/reload", "POST")
        assert status == 200
        assert msgspec.json.decode(answer) == {
            "applied": ["policy.name"],
            "restart_needed": [],
            "file": str(proxy.config),
        }

    await proxy.until_policy(policy)


@SHARED
async def test_a_second_proxy_at_the_port_is_refused(
    shared: tuple[ProxyCluster, WorkersOfProxy], tmp_path: Path
) -> None:
    """The workers of one proxy share a port; another proxy would take requests of it unnoticed."""
    system, proxy = shared
    document = document_of(system, proxy={"port": proxy.port, "workers": 2})
    config = tmp_path / "second.yaml"
    config.write_bytes(msgspec.json.encode(document))

    status, output = await refusal(config)

    assert status == 2
    assert f"proxy.port: port 127.0.0.1:{proxy.port} is already in use".encode() in output
    assert (await proxy.ask(REQUEST))[0] == 200


async def test_a_worker_that_cannot_start_ends_the_proxy(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Its fault is named."""
    system = await build()
    (tmp_path / "events.0.jsonl").mkdir()
    document = document_of(
        system, proxy={"workers": 2, "event_log": str(tmp_path / "events.jsonl")}
    )
    config = tmp_path / "workers.yaml"
    config.write_bytes(msgspec.json.encode(document))

    status, output = await refusal(config)

    assert status == 2
    assert b"events.0.jsonl" in output
