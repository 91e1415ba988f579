"""The id of a request, and its trace: in, out, and to engines; its lines in the log."""

import asyncio
import logging
import time

import pytest
from multidict import CIMultiDict

from kvrs_testkit.proxy_cluster import WITHIN_S, ProxyCluster
from kvrs_testkit.scripted import Fault
from tests.proxy.conftest import ProxyClusterBuilder

ASKED = {"prompt": [5, 6, 7], "max_tokens": 4}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def calls_at(system: ProxyCluster, *names: str) -> list[CIMultiDict[str]]:
    """Headers of the calls of streams."""
    return [
        CIMultiDict(headers)
        for name in names
        for headers in system.instances[name].headers
        if "Content-Length" in headers
    ]


def ids_at_engines(system: ProxyCluster) -> list[str]:
    return [headers["X-Request-Id"] for headers in calls_at(system, *system.instances)]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_id_goes_in_and_out_and_to_engines(
    build: ProxyClusterBuilder, stream: bool
) -> None:
    """One text finds a request in the logs of client, proxy and engines."""
    system = await build()
    body, headers = ASKED | {"stream": stream}, {"X-Request-Id": "order/7-a"}

    async with system.http.post(
        f"{system.url}/v1/completions", json=body, headers=headers
    ) as response:
        assert response.status == 200
        assert response.headers.getall("X-Request-Id") == ["order/7-a"]

    sent = ids_at_engines(system)
    assert len(sent) == 2
    assert all(each.startswith("order/7-a-") for each in sent)


async def test_calls_of_one_request_have_ids_of_their_own(build: ProxyClusterBuilder) -> None:
    """vLLM takes the header for the id of its own request, of which it has one at a time: choices
    and attempts differ, prefill and decode of one attempt do not.
    """
    system = await build()
    system.script.faults[2] = Fault.RESET

    status, _ = await system.ask(ASKED | {"n": 2, "seed": 1}, {"X-Request-Id": "a"})

    assert status == 200
    decodes = [headers["X-Request-Id"] for headers in calls_at(system, "d0", "d1")]
    assert len(decodes) == 3
    assert len(set(decodes)) == 3


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "\u00e9", 'a"b', "a,b"])
async def test_an_id_that_logs_could_not_hold_is_replaced(
    build: ProxyClusterBuilder, given: str | None
) -> None:
    """The request is served all the same, under an id of the proxy's."""
    system = await build()
    headers = {} if given is None else {"X-Request-Id": given}

    async with system.http.post(
        f"{system.url}/v1/completions", json=ASKED, headers=headers
    ) as response:
        made = response.headers["X-Request-Id"]

    assert made != given
    assert len(made) == 32
    assert all(each.startswith(f"{made}-") for each in ids_at_engines(system))


async def test_refusals_have_an_id_too(build: ProxyClusterBuilder) -> None:
    """Failed requests are those that users ask about."""
    system = await build()
    headers = {"X-Request-Id": "mine"}
    for method, path, body, status in (
        ("POST", "/v1/completions", {"prompt": 7}, 400),
        ("POST", "/v1/none", {}, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/v1/models", None, 200),
    ):
        async with system.http.request(
            method, system.url + path, json=body, headers=headers
        ) as response:
            assert (response.status, response.headers["X-Request-Id"]) == (status, "mine")

    responses = "kvrs_http_responses_total"
    assert await system.count(responses, path="/v1/completions", code="400") == 1
    assert await system.count(responses, path="/v1/models", code="200") == 1
    # A path that a client makes up is no series of its own.
    assert await system.count(responses, path="other", code="404") == 1
    assert await system.count(responses, path="other", code="405") == 1


async def test_a_trace_is_carried_to_engines(build: ProxyClusterBuilder) -> None:
    """Spans of the engines join those of the client."""
    system = await build()

    await system.ask(ASKED, {"traceparent": TRACE})

    sent = calls_at(system, *system.instances)
    assert [headers["traceparent"] for headers in sent] == [TRACE, TRACE]


@pytest.mark.parametrize(
    "given", ["", "nonsense", TRACE.upper(), TRACE.replace("00-", "ff-"), f"{TRACE}-more"]
)
async def test_what_is_no_trace_is_dropped(build: ProxyClusterBuilder, given: str) -> None:
    """An engine would refuse it, or begin another trace under its name."""
    system = await build()

    status, _ = await system.ask(ASKED, {"traceparent": given})

    assert status == 200
    assert len(sent := calls_at(system, *system.instances)) == 2
    assert not any("traceparent" in headers for headers in sent)


async def test_a_recovery_is_one_line(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has the decision, its predicted cost beside the others, and the outcome."""
    system = await build(policy={"name": "always_recompute"})
    system.script.faults[2] = Fault.RESET
    caplog.set_level(logging.INFO)

    await system.ask(ASKED | {"stream": True}, {"X-Request-Id": "mine"})

    system.proxy.parts.driver.recoveries.close()
    (record,) = [record for record in caplog.records if record.message == "recovery"]
    ((_, line),) = vars(record)["rows"]
    assert (line["request_id"], line["option"], line["outcome"]) == ("mine", "recompute", "resumed")
    assert line["attempt"] == 2
    assert line["produced_tokens"] == 2
    assert {line["from"], line["to"]} <= {"d0", "d1"}
    assert line["predicted_s"] > 0
    assert line["real_s"] > 0
    assert "recompute" not in line["others_s"]
    assert line["cause"]


@pytest.mark.parametrize("access", [True, False])
async def test_the_access_log_has_a_line_for_each_request_where_it_is_on(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture, access: bool
) -> None:
    """Off by default: a line a request is the busiest log there is."""
    system = await build(logs={"access": access})
    caplog.set_level(logging.INFO, logger="kvrs.access")

    began_s = time.time()
    await system.ask(ASKED, {"X-Request-Id": "mine"})
    ended_s = time.time()
    await system.proxy.close()

    records = [record for record in caplog.records if record.name == "kvrs.access"]
    lines = [row for record in records for row in vars(record)["rows"]]
    assert len(lines) == access
    for at, line in lines:
        assert began_s <= at <= ended_s
        assert (line["request_id"], line["status"]) == ("mine", 200)
        assert (line["method"], line["path"]) == ("POST", "/v1/completions")
        assert line["seconds"] > 0


async def test_lines_of_the_access_log_are_written_together_soon_after(
    build: ProxyClusterBuilder, caplog: pytest.LogCaptureFixture
) -> None:
    """One write for the requests of a moment, while the proxy runs."""
    system = await build(logs={"access": True})
    caplog.set_level(logging.INFO, logger="kvrs.access")

    await asyncio.gather(*(system.ask(ASKED) for _ in range(5)))
    async with asyncio.timeout(WITHIN_S):
        while not [record for record in caplog.records if record.name == "kvrs.access"]:
            await asyncio.sleep(0.01)
    await system.proxy.close()

    records = [record for record in caplog.records if record.name == "kvrs.access"]
    assert sum(len(vars(record)["rows"]) for record in records) == 5
    assert len(records) < 5
