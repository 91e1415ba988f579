"""Instances that are pods with labels, as the API of Kubernetes lists them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvrs.config.cluster import ServiceSettings
from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.protocol.instance import Role
from kvrs.proxy.fleet import discovery
from kvrs.proxy.fleet.discovery import address_of, check_pods, fault_of
from kvrs.proxy.server import Proxy
from kvrs_testkit.kubernetes_api import PodsApi
from kvrs_testkit.scripted import SECRET, Script
from kvrs_testkit.scripted_model import expected_ids
from kvrs_testkit.vllm_cluster import PROMPT, TOKENS, Vllms, document
from tests.proxy.backends.at_addresses import D2, D3, P2, three_servers

pytest.importorskip("kubernetes_asyncio", reason="the extra kubernetes is not installed")


class _Pods(Vllms):
    """Servers at addresses of loopback, and pods that the API tells of."""

    api: PodsApi

    async def until_there(self, *names: str) -> None:
        async def is_so() -> bool:
            return {row["id"] for row in (await self.state())["instances"]} == {*names}

        await self.until(is_so)

    async def drain(self) -> dict[str, Any]:
        """That of the decode instance which all tests have; empty: none."""
        rows = {row["id"]: row["drain"] or {} for row in (await self.state())["instances"]}
        return dict(rows[D2])

    async def until_drained_by(self, cause: str | None) -> None:
        async def is_so() -> bool:
            return (await self.drain()).get("cause") == cause

        await self.until(is_so)


@pytest.fixture
async def labelled(
    vllm_model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[_Pods]:
    """One prefill and two decode servers."""
    monkeypatch.setattr(discovery, "LOOK_UP_S", 0.5)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with AsyncExitStack() as stack:
        shared, servers, ports = await three_servers(stack)
        rows = [
            {
                "id": role,
                "pods": f"kvrs.io/role={role},kvrs.io/model=m",
                "port": port,
                "role": role,
                "follow_nodes": role == "decode",
            }
            for role, port in ports.items()
        ]
        whole: dict[str, Any] = document(vllm_model, {"p0": 0, "d0": 0, "d1": 0})
        whole["cluster"] |= {"nodes": [], "services": rows, "drain_s": 0.0}
        api = PodsApi()
        await api.start()
        stack.push_async_callback(api.close)
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
        api.put("p-0", "127.0.0.2", role="prefill", model="m")
        api.put("d-0", "127.0.0.2", node="m-0", role="decode", model="m")
        api.put("d-9", "127.0.0.9", role="decode", model="other")
        http = await stack.enter_async_context(aiohttp.ClientSession())
        proxy = Proxy(parse_config(whole), SECRET)
        system = _Pods(proxy, Script(), {}, {}, http)
        system.api, system.shared, system.servers = api, shared, servers
        await proxy.start()
        stack.push_async_callback(proxy.close)
        yield system


async def test_a_pod_comes_and_another_is_drained_without_a_lost_token(labelled: _Pods) -> None:
    """One that is ordered to end leaves while it still runs; those of another model are none of
    ours.
    """
    system, api = labelled, labelled.api
    await system.until_there(P2, D2)
    await system.until_health(**{P2: "up", D2: "up"})
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(system.ids()) for _ in range(3)]
    await system.until_streams_hold(3, count=3)

    api.put("d-1", None, role="decode", model="m")
    api.put("d-1", "127.0.0.3", role="decode", model="m")
    await system.until_there(P2, D2, D3)
    await system.until_health(**{D3: "up"})
    api.put("d-8", "127.0.0.8", role="decode", model="other")
    api.end("d-0")
    await system.until_there(P2, D3)
    system.shared.gate.set()

    assert await asyncio.gather(*asked) == [expected_ids(PROMPT, TOKENS)] * 3
    assert {(of, to) for _, of, to in await system.causes()} == {(D2, D3)}
    assert system.shared.violations == []


async def test_streams_leave_a_node_before_it_takes_them_along(
    labelled: _Pods, caplog: pytest.LogCaptureFixture
) -> None:
    """A node with a fault is left while its instance still runs, and used again when it is well. An
    API that says nothing about a node changes nothing.
    """
    system, api = labelled, labelled.api
    api.put("d-1", "127.0.0.3", node="m-1", role="decode", model="m")
    await system.until_there(P2, D2, D3)
    await system.until_health(**{P2: "up", D2: "up", D3: "up"})
    system.shared.gate, system.shared.gate_at = asyncio.Event(), 3
    asked = [asyncio.create_task(system.ids()) for _ in range(4)]
    await system.until_streams_hold(3, count=4)

    api.report("m-0", Ready="True", MemoryPressure="True")
    await system.until_drained_by("its node m-0 reports MemoryPressure=True")
    api.nodes.pop("m-0")
    await system.until(lambda: _is_told(caplog, "nodes: HTTP 403"))
    moved = {row["cause"] for row in (await system.state())["recoveries"]}
    causes = {(of, to) for _, of, to in await system.causes()}
    is_left = (await system.drain())["moves_in_s"] == 0.0
    api.nodes["m-0"] = {"metadata": {"name": "m-0"}}
    await system.until_drained_by(None)
    system.shared.gate.set()

    assert is_left
    assert moved == {"moved: its node m-0 reports MemoryPressure=True"}
    assert causes == {(D2, D3)}
    assert await asyncio.gather(*asked) == [expected_ids(PROMPT, TOKENS)] * 4
    assert system.shared.violations == []


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (403, '{"kind": "Status"}', "HTTP 403"),
        (200, '{"kind": "Status"}', "none of the API"),
        (200, "[]", "none of the API"),
        (200, "no JSON", "none of the API"),
        (200, '{"items": [{"metadata": "d-1"}, "d-1"]}', "none of the API"),
    ],
)
async def test_an_api_that_fails_takes_no_instance_away(
    labelled: _Pods, caplog: pytest.LogCaptureFixture, status: int, body: str, said: str
) -> None:
    """The log has the cause, and the next list is followed."""
    system, api = labelled, labelled.api
    await system.until_there(P2, D2)

    api.other = status, body
    api.put("d-1", "127.0.0.3", role="decode", model="m")
    await system.until(lambda: _is_told(caplog, said))
    assert {row["id"] for row in (await system.state())["instances"]} == {P2, D2}
    api.other = None

    await system.until_there(P2, D2, D3)


async def _is_told(caplog: pytest.LogCaptureFixture, said: str) -> bool:
    causes = [record.__dict__.get("cause", "") for record in caplog.records]
    return any(said in cause for cause in causes)


@pytest.mark.parametrize(
    ("status", "metadata", "address"),
    [
        ({"phase": "Running", "podIP": "10.0.0.7"}, {}, "10.0.0.7"),
        ({"phase": "Running", "podIP": "fd00::0:7"}, {}, "fd00::7"),
        ({"phase": "Pending", "podIP": "10.0.0.7"}, {}, "10.0.0.7"),  # Its port will listen.
        ({"phase": "Failed", "podIP": "10.0.0.7"}, {}, None),
        ({"phase": "Succeeded", "podIP": "10.0.0.7"}, {}, None),
        ({"phase": "Running", "podIP": "10.0.0.7"}, {"deletionTimestamp": "2026"}, None),
        ({"phase": "Running", "podIP": ""}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_pod_counts_from_its_address_to_the_order_to_end(
    status: dict[str, str], metadata: dict[str, str], address: str | None
) -> None:
    """So it is drained while it still runs."""
    assert address_of({"metadata": metadata, "status": status}) == address


@pytest.mark.parametrize(
    ("node", "found"),
    [
        ({}, None),
        ({"spec": {"unschedulable": True}}, ("its node m is cordoned", 30.0)),
        ({"metadata": {"deletionTimestamp": "2026"}}, ("its node m is cordoned", 30.0)),
        ({"Ready": "False"}, ("its node m reports Ready=False", 0.0)),
        ({"Ready": "Unknown"}, ("its node m reports Ready=Unknown", 0.0)),
        ({"Ready": "True", "DiskPressure": "True"}, ("its node m reports DiskPressure=True", 0.0)),
        ({"DiskPressure": "Unknown", "EtcdIsVoter": "True", "DiskOnFire": "True"}, None),
    ],
)
def test_a_node_is_left_for_what_ends_its_pods(
    node: dict[str, Any], found: tuple[str, float] | None
) -> None:
    """A cordoned one serves on for a while. Conditions that others have made up mean nothing."""
    keys = ("spec", "metadata")
    listed = [{"type": each, "status": node[each]} for each in node if each not in keys]
    whole = {
        "metadata": {"name": "m", **node.get("metadata", {})},
        "spec": node.get("spec", {}),
        "status": {"conditions": listed},
    }

    assert fault_of(whole, 30.0) == found


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ({"host": "a.test", "follow_nodes": True}, "follow_nodes: allowed with pods"),
        ({}, "one of host and pods"),
        ({"host": "a.test", "pods": "a=b"}, "one of host and pods"),
        ({"pods": "kvrs.io/role"}, "pods: got 'kvrs.io/role'"),
        ({"pods": "a=b", "namespace": ""}, "namespace"),
    ],
)
def test_a_service_is_a_name_or_pods(service: dict[str, Any], said: str) -> None:
    row = {"id": "a", "port": 1, "role": "decode"} | service

    with pytest.raises(ConfigError, match=said):
        parse_config({"cluster": {"backend": "vllm", "services": [row]}})


def test_pods_without_their_client_are_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the check of the file, and at the start of the proxy."""
    monkeypatch.setattr("kvrs.errors.find_spec", lambda module: None)
    row = ServiceSettings(id="a", pods="a=b", port=1, role=Role.DECODE)

    with pytest.raises(ConfigError, match=r"pip install 'kvrs\[kubernetes\]'"):
        check_pods([row])
    check_pods([])
