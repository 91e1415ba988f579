"""Servers whose answers to the watch fail or are late while they serve."""

import asyncio

import pytest

from kvrs_testkit.vllm_cluster import PROMPT, Builder, Servers, Vllms

Fails = int | float | str
NEVER = 1e6
TOKENS = 150  # At a token each 0.1 s the streams go on for longer than any silence lasts.


def tolerant(servers: Servers) -> None:
    for server in servers.values():
        server.engines = ["healthy"]


async def running(vllms: Builder, count: int = 6) -> tuple[Vllms, list[asyncio.Task[list[int]]]]:
    """A cluster with streams that have begun."""
    system = await vllms(prepare=tolerant)
    expected = await system.ids(max_tokens=TOKENS)
    assert len(expected) == TOKENS
    system.shared.pause_s = 0.1
    streams = [asyncio.create_task(system.ids(max_tokens=TOKENS)) for _ in range(count)]
    await system.until_streams_hold(2, count)
    return system, streams


def fail(system: Vllms, at: tuple[str, ...], how: Fails, *paths: str) -> None:
    for name in at:
        system.servers[name].fails = dict.fromkeys(paths, how)


ALL = ("p0", "d0", "d1")


@pytest.mark.parametrize("at", [("d0",), ALL])
@pytest.mark.parametrize("how", [500, 404, 12.0, NEVER, "closes"])
async def test_no_stream_is_cut_where_metrics_fail(
    vllms: Builder, at: tuple[str, ...], how: Fails
) -> None:
    """Load figures are missing then, and nothing else: new requests are served, too."""
    system, streams = await running(vllms)

    fail(system, at, how, "/metrics")
    await asyncio.sleep(7.0)
    rows = {row["id"]: row for row in (await system.state())["instances"]}
    new = await system.ids(PROMPT, max_tokens=2)

    assert len(new) == 2
    assert {name for name, row in rows.items() if "/metrics" in row["failing"]} == {*at}
    assert len({tuple(each) for each in await asyncio.gather(*streams)}) == 1
    assert await system.causes() == []
    assert {row["health"] for row in (await system.state())["instances"]} == {"up"}


@pytest.mark.parametrize("how", [500, 404, NEVER, "closes"])
async def test_other_questions_that_fail_cut_no_stream_either(vllms: Builder, how: Fails) -> None:
    """Names stay as they were, and nothing is known of single engines."""
    system, streams = await running(vllms)

    fail(system, ALL, how, "/v1/models", "/fault_tolerance/status")
    await asyncio.sleep(7.0)
    found = [row["failing"].keys() for row in (await system.state())["instances"]]

    assert found == [{"/v1/models", "/fault_tolerance/status"}] * 3
    assert await system.count("kvrs_worker_question_failing", question="/v1/models") == 3
    assert len({tuple(each) for each in await asyncio.gather(*streams)}) == 1
    assert await system.causes() == []
    assert {row["health"] for row in (await system.state())["instances"]} == {"up"}


@pytest.mark.parametrize("how", [500, 404, NEVER, "closes"])
async def test_an_instance_that_is_unwell_keeps_its_streams_and_gets_no_new_ones(
    vllms: Builder, how: Fails
) -> None:
    """Its tokens arrive, so it lives; whether it takes more is in doubt."""
    system, streams = await running(vllms)

    fail(system, ("d0",), how, "/health")
    await asyncio.sleep(3.5)
    for server in system.servers.values():
        server.bodies.clear()
    for _ in range(4):
        await system.ids(PROMPT, max_tokens=2)

    assert not system.servers["d0"].bodies
    assert len({tuple(each) for each in await asyncio.gather(*streams)}) == 1
    assert await system.causes() == []
    # Without tokens it is dead, or silent.
    await system.until_health(d0="refused" if how == 404 else "down")


async def test_new_requests_go_to_unwell_instances_where_all_are(vllms: Builder) -> None:
    """Another choice would be no service at all."""
    system, streams = await running(vllms)

    fail(system, ("d0", "d1"), 500, "/health")
    await asyncio.sleep(1.0)

    assert len(await system.ids(PROMPT, max_tokens=2)) == 2
    assert len({tuple(each) for each in await asyncio.gather(*streams)}) == 1


@pytest.mark.parametrize("how", [500, NEVER, "closes"])
async def test_an_idle_instance_whose_health_fails_is_lost(vllms: Builder, how: Fails) -> None:
    """No tokens show that it lives. A server that answers nothing at all is found so, too."""
    system = await vllms(prepare=tolerant)

    fail(system, ("d0",), how, "/health", "/metrics")

    await system.until_health(d0="down", d1="up")


async def test_an_instance_comes_back_while_its_metrics_fail(vllms: Builder) -> None:
    """Its identity is known from before but for its process, which counts as a new one."""
    system = await vllms(prepare=tolerant)
    before = {row["id"]: row["epoch"] for row in (await system.state())["instances"]}

    fail(system, ("d0",), 500, "/metrics")
    await system.servers["d0"].kill()
    await system.until_health(d0="down")
    await system.servers["d0"].start()
    await system.until_health(d0="up")

    after = {row["id"]: row["epoch"] for row in (await system.state())["instances"]}
    assert after["d0"] > before["d0"]


async def test_a_dead_server_is_lost_at_once_whatever_failed_before(vllms: Builder) -> None:
    """Its kernel ends the idle connection and refuses the next one."""
    system, streams = await running(vllms, 2)
    fail(system, ("d0",), 500, "/metrics", "/health")
    await asyncio.sleep(0.5)

    await system.servers["d0"].kill()
    await system.until_health(d0="down")

    assert len({tuple(each) for each in await asyncio.gather(*streams)}) == 1
