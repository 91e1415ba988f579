"""A proxy of several workers: requests spread over them, they end together, and one that is killed
comes back.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvrs.ids import NodeId
from kvrs.protocol.instance import RankInfo
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.proxy_cluster import WITHIN_S, ProxyCluster
from tests.proxy.scripted import SECRET
from tests.proxy.workers_of_proxy import WorkersOfProxy, document_of, open_workers

pytestmark = [pytest.mark.process, pytest.mark.network]

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
STREAM = REQUEST | {"stream": True}


async def until_each_has_a_stream(
    system: ProxyCluster, proxy: WorkersOfProxy, workers: int
) -> list[aiohttp.ClientResponse]:
    """Begin streams, which stop before token 2, until each worker has one."""
    system.script.gate, system.script.gate_at = asyncio.Event(), 2
    begun: list[aiohttp.ClientResponse] = []
    while len({row["worker"] for row in (await proxy.state())["streams"]}) < workers:
        for _ in range(4):
            begun.append(await proxy.http.post(f"{proxy.url}/v1/completions", json=STREAM))
            await begun[-1].content.readuntil(b"\n\n")
    return begun


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


async def refusal(config: Path) -> tuple[int, bytes]:
    """Exit status and output of a proxy that does not start."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrs", "proxy", "--config", str(config)),
        env=os.environ | {"KVRS_SECRET": SECRET.decode()},
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


async def test_requests_spread_over_the_workers_and_add_up(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Each has some of them; state and metrics are those of one proxy."""
    system = await build()
    _, expected = await system.ask(REQUEST)
    async with open_workers(system, tmp_path, workers=3) as proxy:
        answers = await asyncio.gather(*(proxy.ask(REQUEST) for _ in range(30)))
        begun = await until_each_has_a_stream(system, proxy, 3)
        state = await proxy.state()
        active = await proxy.count("kvrs_streams_active")
        assert system.script.gate is not None
        system.script.gate.set()
        ended = await asyncio.gather(*(each.read() for each in begun))

        total = 30 + len(begun)
        assert {status for status, _ in answers} == {200}
        assert {body.partition(b'"choices"')[2] for _, body in answers} == {
            expected.partition(b'"choices"')[2]
        }
        assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)
        assert len(state["streams"]) == active == len(begun)
        assert {row["worker"] for row in state["streams"]} == {0, 1, 2}
        assert [row["id"] for row in state["instances"]] == [*system.instances]
        assert await proxy.count("kvrs_requests_total", outcome="complete") == total
        assert await proxy.count("kvrs_tokens_relayed_total") == 5 * total
        assert await proxy.count("kvrs_ttft_seconds_count") == total
        assert await proxy.count("kvrs_worker_up", worker="d0") == 1
        assert await proxy.count("kvrs_build_info") == 1
        assert await proxy.count("kvrs_model_info") == 1
        # Of the supervisor and three workers.
        assert await proxy.count("process_resident_memory_bytes") > 4 * (20 << 20)


async def test_a_killed_worker_comes_back_and_the_others_go_on(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Clients of the others notice nothing, new ones find another worker, and no total falls."""
    system = await build()
    async with open_workers(system, tmp_path, workers=2) as proxy:
        await asyncio.gather(*(proxy.ask(REQUEST) for _ in range(10)))
        begun = await until_each_has_a_stream(system, proxy, 2)
        complete = await proxy.count("kvrs_requests_total", outcome="complete")
        lost, other = await proxy.workers()
        of_other = sum(row["worker"] == 1 for row in (await proxy.state())["streams"])

        os.kill(lost["pid"], signal.SIGKILL)
        await until_gone(lost["pid"])
        assert system.script.gate is not None
        system.script.gate.set()
        reading = [asyncio.create_task(each.read()) for each in begun]
        status, _ = await proxy.ask(REQUEST)
        ended = await asyncio.gather(*reading, return_exceptions=True)
        await proxy.until_up()

        assert status == 200
        assert sum(isinstance(body, bytes) for body in ended) == of_other
        now = await proxy.workers()
        assert [row["restarts"] for row in now] == [1, 0]
        assert now[0]["pid"] != lost["pid"]
        assert now[1]["pid"] == other["pid"]
        assert await proxy.count("kvrs_proxy_worker_restarts_total", proxy_worker="0") == 1
        assert complete == 10
        assert await proxy.count("kvrs_requests_total", outcome="complete") == 10 + of_other + 1


async def test_every_worker_obeys_an_order_to_drain_also_one_that_comes_back(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """An order is the proxy's, not that of the worker that takes it. One to a rank is passed on
    once, and its instance answers.
    """
    system = await build()
    d0 = system.instances["d0"]
    d0.ranks = [RankInfo(rank, 0, 100 + rank, NodeId("n0"), 4, [rank]) for rank in range(2)]

    async def reached(proxy: WorkersOfProxy) -> set[str]:
        before = {name: len(one.calls) for name, one in system.instances.items()}
        answers = await asyncio.gather(*(proxy.ask(REQUEST) for _ in range(20)))
        assert {status for status, _ in answers} == {200}
        return {
            name for name, one in system.instances.items() if _decodes(one.calls[before[name] :])
        }

    async with open_workers(system, tmp_path, workers=2) as proxy:
        unknown, _ = await proxy.admin("/kvrs/v1/drain/d7", "POST")
        leaving = [
            (await proxy.admin(f"/kvrs/v1/leave/{name}", "POST"))[0]
            for name in ("d7/0", "d0/7", "d0/1")
        ]
        alone = [(await proxy.admin(f"/kvrs/v1/drain/{name}", "POST"))[0] for name in ("d0", "d1")]
        drained = await reached(proxy)
        os.kill((await proxy.workers())[0]["pid"], signal.SIGKILL)
        await proxy.until_logged(b"worker lost")
        await proxy.until_up()
        later = await reached(proxy)
        state = await proxy.state()
        ended, _ = await proxy.admin("/kvrs/v1/drain/d0", "DELETE")
        after = await reached(proxy)

    assert (unknown, alone, ended) == (404, [200, 409], 200)
    assert leaving == [404, 409, 200]
    assert [order.rank for order in d0.rank_orders] == [7, 1]
    assert drained == later == {"p0", "p1", "d1"}
    assert [row["id"] for row in state["instances"] if row["drain"]] == ["d0"]
    assert after == {*system.instances}


def _decodes(calls: list[str]) -> bool:
    return "POST /v1/completions" in calls


async def test_workers_end_with_their_supervisor(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """A supervisor that is started again finds its ports free."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        pids = [row["pid"] for row in await proxy.workers()]

        proxy.process.kill()

        await until_gone(*pids)


async def test_a_worker_that_does_not_answer_is_named(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """What it has counted stays counted, and nothing waits for it."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        await asyncio.gather(*(proxy.ask(REQUEST) for _ in range(10)))
        complete = await proxy.count("kvrs_requests_total", outcome="complete")
        first, _ = await proxy.workers()

        os.kill(first["pid"], signal.SIGSTOP)
        try:
            rows = await proxy.workers()
            up = [await proxy.count("kvrs_proxy_worker_up", proxy_worker=str(n)) for n in (0, 1)]
            still = await proxy.count("kvrs_requests_total", outcome="complete")
            status, refused = await proxy.admin("/kvrs/v1/reload", "POST")
        finally:
            os.kill(first["pid"], signal.SIGCONT)

        assert [row.get("answers", True) for row in rows] == [False, True]
        assert up == [0, 1]
        assert complete == still == 10
        assert status == 400
        assert (
            "proxy-0.0: no answer to a reload" in msgspec.json.decode(refused)["error"]["message"]
        )


async def test_a_signalled_proxy_drains_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Streams with a key too: no other worker will go on with them."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        begun = await until_each_has_a_stream(system, proxy, 2)
        keyed = await proxy.http.post(
            f"{proxy.url}/v1/completions", json=STREAM, headers={"Idempotency-Key": "k"}
        )
        await keyed.content.readuntil(b"\n\n")
        pids = [row["pid"] for row in await proxy.workers()]

        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"draining")
        assert system.script.gate is not None
        system.script.gate.set()
        ended = [await each.read() for each in (*begun, keyed)]

        assert await proxy.process.wait() == 0
        assert not any(map(is_alive, pids))
    assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)


async def test_workers_that_leave_serve_until_a_second_signal(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """All of them wait for `proxy.drain_delay_s`, and drain when that is ended."""
    system = await build()
    async with open_workers(system, tmp_path, proxy={"drain_delay_s": 300.0}) as proxy:
        ready = f"{proxy.url}/readyz"
        while (await proxy.http.get(ready)).status != 200:
            await asyncio.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"leaving")
        while (await proxy.http.get(ready)).status != 503:
            await asyncio.sleep(0.01)
        begun = await until_each_has_a_stream(system, proxy, 2)

        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"draining")
        assert system.script.gate is not None
        system.script.gate.set()
        ended = [await each.read() for each in begun]

        assert await proxy.process.wait() == 0
    assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)


async def test_a_second_signal_ends_all_workers_at_once(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Their streams end with an error that says why."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        begun = await until_each_has_a_stream(system, proxy, 2)

        proxy.process.send_signal(signal.SIGTERM)
        await proxy.until_logged(b"draining")
        proxy.process.send_signal(signal.SIGTERM)
        ended = [await each.read() for each in begun]

        assert await proxy.process.wait() == 0
    assert all(b"shutting_down" in body for body in ended)


async def test_a_worker_that_is_signalled_alone_hands_its_clients_to_the_others(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """It lets its streams end, takes no new clients, and another process takes its place."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        begun = await until_each_has_a_stream(system, proxy, 2)
        first, _ = await proxy.workers()

        os.kill(first["pid"], signal.SIGTERM)
        await proxy.until_logged(b"draining")
        answers = [await proxy.ask(REQUEST | {"max_tokens": 1}) for _ in range(20)]
        assert system.script.gate is not None
        system.script.gate.set()
        ended = [await each.read() for each in begun]
        await until_gone(first["pid"])
        await proxy.until_up()

        assert {status for status, _ in answers} == {200}
        assert all(body.endswith(b"data: [DONE]\n\n") for body in ended)
        assert [row["restarts"] for row in await proxy.workers()] == [1, 0]


@pytest.mark.parametrize("by_signal", [False, True])
async def test_a_reload_reaches_all_workers(
    build: ProxyClusterBuilder, tmp_path: Path, by_signal: bool
) -> None:
    """Its answer names a changed setting once."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        document = document_of(system, policy={"name": "always_recompute"})
        document["proxy"] |= {"workers": 3}
        if not by_signal:
            document["proxy"]["peers"] = [{"id": "another", "peer_port": 9}]
        proxy.config.write_bytes(msgspec.json.encode(document))

        if by_signal:
            proxy.process.send_signal(signal.SIGHUP)
            await proxy.until_logged(b"kvrs.proxy.reload reloaded applied=policy.name")
            async with asyncio.timeout(WITHIN_S):
                while (await proxy.proxy_row())["policy"] != "always_recompute":
                    await asyncio.sleep(0.01)
        else:
            status, answer = await proxy.admin("/kvrs/v1/reload", "POST")
            assert status == 200
            assert msgspec.json.decode(answer) == {
                "applied": ["proxy.peers", "policy.name"],
                "restart_needed": ["proxy.workers"],
                "file": str(proxy.config),
            }
            assert (await proxy.proxy_row())["peers"]["another"] == "down"

        policies = [row["policy"] for row in (await proxy.state())["policy"]["workers"]]
        assert policies == ["always_recompute", "always_recompute"]
        assert (await proxy.proxy_row())["policy"] == "always_recompute"


async def test_a_reload_with_a_fault_changes_no_worker(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """And its fault is named once, as that of the file."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
        before = (await proxy.proxy_row())["config_digest"]
        document = document_of(system, policy={"name": "rom", "slots_max": 0})
        proxy.config.write_bytes(msgspec.json.encode(document))

        status, answer = await proxy.admin("/kvrs/v1/reload", "POST")

        faults = msgspec.json.decode(answer)["error"]["faults"]
        assert status == 400
        assert len(faults) == 1
        assert "policy.slots_max: got 0" in faults[0]
        policies = [row["policy"] for row in (await proxy.state())["policy"]["workers"]]
        assert policies == ["auto", "auto"]
        assert (await proxy.proxy_row())["config_digest"] == before


async def test_a_second_proxy_at_the_port_is_refused(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """The workers of one proxy share a port; another proxy would take requests of it unnoticed."""
    system = await build()
    async with open_workers(system, tmp_path) as proxy:
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
    """With the fault, and the name of the worker."""
    system = await build()
    document = document_of(
        system, proxy={"workers": 2, "event_log": str(tmp_path / "absent" / "events.jsonl")}
    )
    config = tmp_path / "workers.yaml"
    config.write_bytes(msgspec.json.encode(document))

    status, output = await refusal(config)

    assert status == 2
    assert b"absent/events.0.jsonl" in output or b"absent/events.1.jsonl" in output
    assert b"ended with status 2 before it was ready" in output


async def test_each_worker_has_an_event_log_of_its_own(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """The events of two policies in one file could not be replayed."""
    system = await build()
    events = tmp_path / "events.jsonl"
    async with open_workers(system, tmp_path, proxy={"event_log": str(events)}) as proxy:
        await asyncio.gather(*(proxy.ask(REQUEST) for _ in range(10)))
        proxy.process.send_signal(signal.SIGTERM)
        assert await proxy.process.wait() == 0

    lines = [
        line
        for worker in (0, 1)
        for line in (tmp_path / f"events.{worker}.jsonl").read_text().splitlines()
    ]
    assert sum('"StreamArrived"' in line for line in lines) == 10
    assert not events.exists()
