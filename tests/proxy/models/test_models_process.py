"""A proxy of several models as a process: reload, and peers with the same models."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any

import aiohttp
import pytest

from kvrs.config.file import parse_config
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError
from kvrs.protocol.instance import Role
from kvrs.proxy.models.process import ModelsProxy
from kvrs.proxy.wire import capacity
from kvrs.proxy.wire.capacity import capacity_of
from kvrs_testkit.free_ports import free_ports
from kvrs_testkit.models_cluster import ModelsCluster, open_models_cluster
from kvrs_testkit.proxy_cluster import WITHIN_S
from kvrs_testkit.scripted import SECRET, Scripted

pytestmark = pytest.mark.network


def policy_of(system: ModelsCluster, model: str) -> PolicyName:
    return system.proxy.by_name[model].reloads.config.policy.name


async def test_a_reload_reaches_the_models_that_it_concerns() -> None:
    """SIGHUP is for all; at an admin port it is for one model."""
    async with open_models_cluster("a", "b", pairs=1) as system:
        entries = system.document["models"]
        entries[1]["policy"] = {"name": "rom"}
        result = await system.proxy.reload()
        assert result.applied == ["policy.name"]
        assert [policy_of(system, name) for name in "ab"] == [PolicyName.AUTO, PolicyName.ROM]

        entries[0]["policy"] = entries[1]["policy"] = {"name": "always_migrate"}
        url = f"http://127.0.0.1:{system.proxy.admin_ports['a']}/kvrs/v1/reload"
        async with system.http.post(url) as response:
            assert response.status == 200
        assert [policy_of(system, name) for name in "ab"] == [
            PolicyName.ALWAYS_MIGRATE,
            PolicyName.ROM,
        ]


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "wrong"])
async def test_a_reload_of_other_models_is_refused(change: str) -> None:
    """Nothing has changed for any model, also where another part of the file would."""
    async with open_models_cluster("a", "b", pairs=1) as system:
        entries = system.document["models"]
        entries[0]["policy"] = {"name": "rom"}
        match change:
            case "added":
                added = deepcopy(entries[0])
                node = added["cluster"]["nodes"][0]
                node["id"] = "more"
                for instance in node["instances"]:
                    instance |= {"id": f"more-{instance['id']}", "port": 0}
                entries.append(added | {"name": "c"})
            case "removed":
                del entries[1]
            case "renamed":
                entries[1]["name"] = "c"
            case _:
                entries[1]["policy"] = {"name": "x"}
        with pytest.raises(ConfigError) as error:
            await system.proxy.reload()

        said = "models.1.policy.name: got 'x'" if change == "wrong" else "models: got a"
        assert said in str(error.value)
        assert policy_of(system, "a") is PolicyName.AUTO


async def test_a_port_that_is_taken_ends_the_start() -> None:
    """Nothing stays open: the same ports can be used at once."""
    (taken,) = free_ports(1)
    async with open_models_cluster("a", "b", pairs=1) as system:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", taken)
        document = deepcopy(system.document)
        document["models"][1]["proxy"] = {"admin_port": taken}
        document["proxy"] |= dict(zip(("port", "admin_port"), free_ports(2), strict=True))
        proxy = ModelsProxy(parse_config(document), SECRET)
        with pytest.raises(ConfigError, match=f"model 'b': proxy.admin_port: port .*:{taken} is"):
            await proxy.start()
        server.close()
        await server.wait_closed()
        again = ModelsProxy(parse_config(document), SECRET)
        await again.start()
        await again.close()


async def read_events(
    url: str, http: aiohttp.ClientSession, model: str, after: bytes | None, most: int
) -> list[tuple[bytes, bytes]]:
    """Ids and data of a stream with a key, from behind an event on; at most so many."""
    asked = {"model": model, "prompt": [1, 2], "max_tokens": 12, "temperature": 0, "stream": True}
    headers = {"Idempotency-Key": f"key-{model}"}
    if after is not None:
        headers["Last-Event-ID"] = after.decode()
    found: list[tuple[bytes, bytes]] = []
    async with http.post(f"{url}/v1/completions", json=asked, headers=headers) as response:
        assert response.status == 200, await response.text()
        while len(found) < most:
            raw = await response.content.readuntil(b"\n\n")
            if raw == b"data: [DONE]\n\n":
                break
            name, _, data = raw.partition(b"\n")
            found.append((name.removeprefix(b"id: "), data))
    return found


@asynccontextmanager
async def open_pair(**settings: Any) -> AsyncIterator[tuple[ModelsCluster, ModelsProxy]]:
    """Two proxies with the same models, each of which has one entry for the other."""
    first, second = free_ports(2), free_ports(2)
    of_first = {"peer_port": first[0], "peers": [{"id": "proxy-1", "peer_port": second[0]}]}
    async with open_models_cluster("a", "b", pairs=1, proxy=of_first, **settings) as system:
        document = deepcopy(system.document)
        document["proxy"] |= {
            "id": "proxy-1",
            "peer_port": second[0],
            "peers": [{"id": "proxy-0", "peer_port": first[0]}],
        }
        other = ModelsProxy(parse_config(document), SECRET)
        await other.start()
        try:
            async with asyncio.timeout(WITHIN_S):
                for proxy in (system.proxy, other):
                    for each in proxy.by_name.values():
                        instances = each.parts.driver.control.instances
                        while not (each.parts.mirror.peers.live_ids and instances.ready()):
                            await asyncio.sleep(0.005)
            yield system, other
        finally:
            await other.close()


async def test_a_stream_goes_on_at_a_peer_of_its_model() -> None:
    """Each model has peers and records of its own."""
    async with open_pair() as (system, other):
        for model in ("a", "b"):
            system.scripts[model].pause_s = 0.02
            begun = await read_events(system.url, system.http, model, None, 5)
            url = f"http://127.0.0.1:{other.port}"
            rest = await read_events(url, system.http, model, begun[-1][0], 99)
            whole = await read_events(url, system.http, model, None, 99)
            assert begun + rest == whole
            assert len(whole) >= 12
        records = [each.parts.mirror.describe()["records"] for each in other.by_name.values()]
        assert records == [1, 1]


async def order(
    proxy: ModelsProxy, http: aiohttp.ClientSession, model: str, method: str, path: str, body: Any
) -> int:
    url = f"http://127.0.0.1:{proxy.admin_ports[model]}/kvrs/v1/{path}"
    async with http.request(method, url, json=body) as answer:
        return answer.status


def known_to(proxy: ModelsProxy, model: str) -> set[str]:
    """The instances of a model that are up."""
    instances = proxy.by_name[model].parts.driver.control.instances
    return {name for name in instances.known if instances.is_up(name)}


async def test_an_order_about_the_fleet_is_for_one_model() -> None:
    """At the admin port of its model; the other proxy hears of it. An instance that is added gets
    streams of its model, and one that is removed hands its streams to it.
    """
    cluster = {"drain_s": 0.0}
    async with open_pair(models={"b": {"cluster": cluster}}) as (system, other):
        before, http = known_to(system.proxy, "a"), system.http
        asked = {"model": "b", "prompt": [1, 2], "max_tokens": 12, "temperature": 0}
        script = system.scripts["b"]
        script.gate, script.gate_at = asyncio.Event(), 3
        reading = asyncio.create_task(system.ask("/v1/completions", asked))
        await system.until_streams("b", 1)
        more = Scripted("db9", "nb9", role=Role.DECODE, script=script, model="b")
        await more.start()
        try:
            row = {"node": "nb9", "id": "db9", "role": "decode", "port": more.port}
            status = await order(system.proxy, http, "b", "POST", "instances", row)
            async with asyncio.timeout(WITHIN_S):
                while not all("db9" in known_to(each, "b") for each in (system.proxy, other)):
                    await asyncio.sleep(0.005)
            assert status == 200
            assert await order(other, http, "b", "DELETE", "instances/db0", None) == 200
            async with asyncio.timeout(WITHIN_S):
                while any("db0" in known_to(each, "b") for each in (system.proxy, other)):
                    await asyncio.sleep(0.005)
            script.gate.set()
            status, answer = await reading
        finally:
            await more.close()

        assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
        assert more.bodies
        assert [known_to(each, "a") for each in (system.proxy, other)] == [before, before]


async def test_an_order_cannot_take_an_id_of_another_model() -> None:
    """The id of an instance or of a node; the order names the model that has it."""
    async with open_models_cluster("a", "b", pairs=1) as system:
        url = f"http://127.0.0.1:{system.proxy.admin_ports['b']}/kvrs/v1/instances"
        for row, param in (
            ({"node": "more", "id": "da0"}, "id"),
            ({"node": "more", "id": "na0"}, "id"),
            ({"node": "na0", "id": "more"}, "node"),
        ):
            async with system.http.post(url, json=row | {"role": "decode", "port": 1}) as response:
                answer = await response.json()
            assert response.status == 409, answer
            assert answer["error"]["param"] == param
            assert f"{row[param]} is of the model 'a'" in answer["error"]["message"]
        assert "da0" not in known_to(system.proxy, "b")


def test_descriptors_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of all models fit into the quarter that there is; the port's clients are those
    of all.
    """
    monkeypatch.setattr(capacity, "descriptors_left", lambda own: 4000 - own)
    alone, beside = (
        parse_config({"proxy": {"max_streams": 1000}, "cluster": {"nodes": nodes}})
        for nodes in (demo_nodes("x"), demo_nodes("y"))
    )

    whole, shared = capacity_of(alone), capacity_of(alone, [beside])

    assert whole.settings.max_streams == (4000 - 6) // 4
    assert shared.settings.max_streams == (4000 - 12) // 8
    assert (whole.clients.total, shared.clients.total) == ((4000 - 6) // 2, (4000 - 12) // 2)


def demo_nodes(name: str) -> list[dict[str, Any]]:
    roles = ("prefill", "decode")
    return [{"id": name, "instances": [{"id": f"{role[0]}{name}", "role": role} for role in roles]}]
