"""The endpoint picker of a gateway in front: what it names, and what it is told."""

import json
from collections import Counter
from typing import Any

import pytest

from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Cut, Fault
from tests.proxy.conftest import ProxyClusterBuilder

PICKED, SERVED = "x-gateway-destination-endpoint", "x-gateway-destination-endpoint-served"
FORMAT, LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"
FIELDS = {"prompt": "hello", "max_tokens": 6, "temperature": 0}


async def ask(
    system: ProxyCluster, headers: dict[str, str], *, stream: bool = True, user: str = ""
) -> dict[str, str]:
    """The headers of a whole response."""
    fields: dict[str, Any] = FIELDS | {"stream": stream, "user": user}
    url = f"{system.url}/v1/completions"
    async with system.http.post(url, json=fields, headers=headers) as response:
        body = await response.read()
        assert response.status == 200, body
        return dict(response.headers)


def endpoint(system: ProxyCluster, name: str) -> str:
    return f"127.0.0.1:{system.instances[name].port}"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_goes_where_the_picker_sends_it(
    build: ProxyClusterBuilder, *, stream: bool
) -> None:
    """To the first endpoint of the list that is an instance; the answer names the one that
    decoded.
    """
    system = await build(pairs=3, proxy={"endpoint_picker": True})
    wanted = endpoint(system, "d2")
    picked = {PICKED: f"10.0.0.9:8000, {wanted}", "x-prefiller-host-port": endpoint(system, "p1")}

    heads = [await ask(system, picked, stream=stream) for _ in range(3)]

    assert [head[SERVED] for head in heads] == [wanted] * 3
    calls = Counter(name for name, each in system.instances.items() for _ in each.completions)
    assert calls == {"p1": 3, "d2": 3}


@pytest.mark.parametrize(("stream", "served"), [(True, "d1"), (False, "d0")])
async def test_a_stream_whose_picked_instance_dies_goes_on(
    build: ProxyClusterBuilder, *, stream: bool, served: str
) -> None:
    """A whole answer names the instance that ended it; the head of a stream was sent before."""
    system = await build(proxy={"endpoint_picker": True})
    system.script.cuts["cut"] = Cut(Fault.RESET, 2)

    head = await ask(system, {PICKED: endpoint(system, "d1")}, stream=stream, user="cut")

    assert not system.script.cuts  # It has happened.
    assert head[SERVED] == endpoint(system, served)


async def test_a_client_picks_nothing_unless_the_proxy_is_told_so(
    build: ProxyClusterBuilder,
) -> None:
    """Nor does it learn the load."""
    system = await build()

    head = await ask(system, {PICKED: endpoint(system, "d1"), FORMAT: "TEXT"})

    assert not system.instances["d1"].completions
    assert SERVED not in head
    assert LOAD not in head


async def test_the_load_is_reported_on_request(build: ProxyClusterBuilder) -> None:
    """The load is in the answer (ORCA) and in gauges, as the protocol asks of model servers."""
    system = await build(proxy={"endpoint_picker": True})
    for name, free in (("p0", 100), ("d0", 30), ("d1", 60)):
        instance = system.instances[name]
        instance.queued, instance.running = 2, 1
        instance.free_pages, instance.total_pages = free, 100

    async def is_told() -> bool:
        return await system.count("kvrs_queued_requests") == 6

    await system.until(is_told)

    text = (await ask(system, {FORMAT: "text"}))[LOAD]
    decoded = (await ask(system, {FORMAT: "JSON"}, stream=False))[LOAD]

    assert (
        text == "TEXT named_metrics.kv_cache_usage_perc=0.55, named_metrics.num_requests_waiting=6"
    )
    kind, _, values = decoded.partition(" ")
    assert (kind, json.loads(values)["named_metrics"]) == (
        "JSON",
        {"kv_cache_usage_perc": pytest.approx(0.55), "num_requests_waiting": 6},
    )
    assert LOAD not in await ask(system, {FORMAT: "BIN"})
    assert await system.count("kvrs_running_requests") == 3
    assert await system.count("kvrs_kv_usage_ratio") == pytest.approx(0.55)
