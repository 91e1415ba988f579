"""Instances and agents that come and go while a proxy serves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.file import Config, load_config
from kvrs.protocol.instance import Role
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Scripted
from kvrs_testkit.scripted_agent import ScriptedAgent
from tests.proxy.conftest import ProxyClusterBuilder
from tests.proxy.streams.test_proxy_deaths import all_exact, held_open, release

pytestmark = [pytest.mark.network, pytest.mark.process]

REQUEST = {"prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}


@asynccontextmanager
async def further(system: ProxyCluster, *names: str) -> AsyncIterator[list[dict[str, Any]]]:
    """Scripted instances that the proxy does not know yet; as an operator would add them."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    async with AsyncExitStack() as stack:
        asked = []
        for name in names:
            node = f"n{name[1:]}"
            one = Scripted(name, node, role=roles[name[0]], script=system.script)
            await one.start()
            stack.push_async_callback(one.close)
            system.instances[name] = one
            row = {"node": node, "id": name, "role": one.role.value, "port": one.port}
            asked.append(row)
        yield asked


async def ask(
    system: ProxyCluster, method: str, path: str, body: object = None
) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/{path}"
    async with system.http.request(method, url, json=body) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


async def names_in(system: ProxyCluster) -> list[str]:
    return [row["id"] for row in (await system.state())["instances"]]


async def all_on(system: ProxyCluster, name: str) -> bool:
    return {row["decode"] for row in (await system.state())["streams"]} == {name}


async def until_gone(system: ProxyCluster, name: str) -> None:
    async def is_gone() -> bool:
        return name not in await names_in(system)

    await system.until(is_gone)


async def reloaded(
    system: ProxyCluster,
    path: Path,
    *,
    added: Sequence[dict[str, Any]] = (),
    removed: Collection[str] = (),
) -> tuple[int, dict[str, Any]]:
    """The answer to a reload of a file with other instances than are in use."""
    document = system.proxy.reloads.config.model_dump(mode="json")
    nodes = {node["id"]: node for node in document["cluster"]["nodes"]}
    for node in nodes.values():
        node["instances"] = [each for each in node["instances"] if each["id"] not in removed]
    for row in added:
        node = nodes.setdefault(row["node"], {"id": row["node"], "instances": []})
        node["instances"].append({key: row[key] for key in row if key != "node"})
    document["cluster"]["nodes"] = [node for node in nodes.values() if node["instances"]]
    path.write_bytes(msgspec.json.encode(document))
    return await ask(system, "POST", "reload")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvrs.yaml"


@pytest.fixture
def read(path: Path) -> Callable[[], Config]:
    return partial(load_config, path)


async def test_instances_are_added_and_the_old_ones_removed_without_a_lost_stream(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """A cluster moves to other machines under load: every stream has every token once."""
    system = await build(pairs=1, cluster_drain_s=0.0, read=read)
    asked = await held_open(system, count=3)
    async with further(system, "p1", "d1") as rows:
        added, answer = await reloaded(system, path, added=rows)
        await system.until_health(p1="up", d1="up")
        removed, _ = await reloaded(system, path, removed=("p0", "d0"))
        await system.until(lambda: all_on(system, "d1"))
        release(system)
        exact = await all_exact(asked)
        for name in ("d0", "p0"):
            await until_gone(system, name)
            await system.instances[name].close()
        status, _ = await system.ask(REQUEST)
        metrics = await system.metrics()

    assert (added, answer) == (200, {"applied": ["cluster.nodes"], "restart_needed": []})
    assert removed == 200
    assert exact
    assert status == 200
    assert {row["to"] for row in (await system.state())["recoveries"]} == {"d1"}
    assert 'kvrs_worker_up{worker="d1"} 1.0' in metrics
    assert 'kvrs_worker_up{worker="d0"}' not in metrics


async def test_a_removed_instance_that_is_added_again_is_a_new_one(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """Its name may come back at another address."""
    system = await build(cluster_drain_s=0.0, read=read)
    await reloaded(system, path, removed=("d0",))
    await until_gone(system, "d0")
    await system.instances["d0"].close()
    async with further(system, "d0") as rows:
        status, _ = await reloaded(system, path, added=rows)
        await system.until_health(d0="up")
        await asyncio.gather(*(system.ask(REQUEST) for _ in range(8)))

        assert status == 200
        assert "POST /v1/completions" in system.instances["d0"].calls


async def test_what_never_came_up_is_gone_at_once(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """Nothing is to be drained there, so that its id is free for the next reload."""
    system = await build(pairs=1, read=read)
    (port,) = free_ports(1)
    row = {"node": "n1", "id": "d9", "role": "decode", "port": port}
    statuses = []
    for _ in range(3):
        statuses += [(await reloaded(system, path, added=[row]))[0]]
        statuses += [(await reloaded(system, path, removed=("d9",)))[0]]
        assert "d9" not in await names_in(system)

    status, body = await system.ask(REQUEST)

    assert statuses == [200] * 6
    assert (status, b"error" in body) == (200, False)


@pytest.mark.parametrize(
    ("added", "removed", "says"),
    [
        ([], ("d0",), "no instance of role 'decode'"),
        ([{"node": "n1", "id": "d1", "role": "decode"}], (), "has no port"),
    ],
)
async def test_a_change_that_cannot_be_made_changes_nothing(
    build: ProxyClusterBuilder,
    path: Path,
    read: Callable[[], Config],
    added: list[dict[str, Any]],
    removed: tuple[str, ...],
    says: str,
) -> None:
    """And says what was wrong and what is allowed."""
    system = await build(pairs=1, read=read)

    found, answer = await reloaded(system, path, added=added, removed=removed)

    assert (found, says in answer["error"]["message"]) == (400, True), answer
    assert await names_in(system) == ["p0", "d0"]
    assert (await system.ask(REQUEST))[0] == 200


async def test_the_last_instance_of_a_role_that_is_up_is_not_removed(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """The other one of the configuration may never come back."""
    system = await build(read=read)
    await system.instances["d1"].kill()
    await system.until_health(d1="down")

    status, answer = await reloaded(system, path, removed=("d0",))

    assert status == 400
    assert "without d0 no instance that is up can do decode" in answer["error"]["message"]
    assert (await system.ask(REQUEST))[0] == 200


async def test_a_reload_takes_over_nodes_with_their_agents(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """The file is the whole truth: what it does not have any more goes, with its node's agent."""
    system = await build(read=read, backup={"mode": "remote"}, cluster_drain_s=0.0)
    document = system.proxy._config.model_dump(mode="json")
    asked = await held_open(system, count=4)
    agent = ScriptedAgent("agent-n2", "n2")
    await agent.start()
    try:
        async with further(system, "p2", "d2") as rows:
            instances = [{key: row[key] for key in ("id", "role", "port")} for row in rows]
            new = {"id": "n2", "agent": {"port": agent.port}, "instances": instances}
            document["cluster"]["nodes"].append(new)
            path.write_bytes(msgspec.json.encode(document))
            added, _ = await ask(system, "POST", "reload")
            wanted = {"p2": "up", "d2": "up", "agent-n2": "up"}

            async def all_up() -> bool:
                return wanted.items() <= (await system.health()).items()

            await system.until(all_up)
            del document["cluster"]["nodes"][0]
            path.write_bytes(msgspec.json.encode(document))
            removed, _ = await ask(system, "POST", "reload")
            release(system)
            await until_gone(system, "d0")
            document["cluster"]["nodes"][0]["instances"][1]["port"] += 1
            path.write_bytes(msgspec.json.encode(document))
            moved, answer = await ask(system, "POST", "reload")

            assert (added, removed, moved) == (200, 200, 400)
            assert "instance 'd1' is up and has another address" in str(answer)
            assert await all_exact(asked)
            health = await system.health()
            assert "agent-n0" not in health
            assert health["agent-n1"] == health["agent-n2"] == "up"
    finally:
        await agent.close()


async def test_what_is_down_comes_back_at_another_address(
    build: ProxyClusterBuilder, path: Path, read: Callable[[], Config]
) -> None:
    """Its machine is gone, and another one has its place: it serves again under its id."""
    system = await build(read=read, backup={"mode": "remote"})
    document = system.proxy._config.model_dump(mode="json")
    await system.instances["d1"].kill()
    await system.agents["agent-n1"].close()
    await system.until_health(**{"d1": "down", "agent-n1": "down"})
    agent = ScriptedAgent("agent-n1", "n1")
    await agent.start()
    try:
        async with further(system, "d1") as (row,):
            node = document["cluster"]["nodes"][1]
            (one,) = (each for each in node["instances"] if each["id"] == "d1")
            one["port"], node["agent"]["port"] = row["port"], agent.port
            path.write_bytes(msgspec.json.encode(document))
            status, _ = await ask(system, "POST", "reload")
            await system.until_health(**{"d1": "up", "agent-n1": "up"})
            await asyncio.gather(*(system.ask(REQUEST) for _ in range(8)))

            assert status == 200
            assert "POST /v1/completions" in system.instances["d1"].calls
    finally:
        await agent.close()
