"""Instances that fail what they are sent while their reports are healthy."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted_model import expected_ids, text_of
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}
TEXT = "".join(map(text_of, expected_ids([1, 2, 3], 3)))
REQUESTS = 90


def sicken(system: ProxyCluster, name: str, how: int | str) -> None:
    if isinstance(how, int):
        system.instances[name].refusal = (how, error_body("no"))
    else:
        system.instances[name].hangs = True


async def ask_many(system: ProxyCluster, count: int) -> list[tuple[int, bytes]]:
    """In rows of three at a time."""
    answers = []
    for _ in range(0, count, 3):
        answers += await asyncio.gather(*(system.complete(**REQUEST) for _ in range(3)))
    return answers


async def answers_of(system: ProxyCluster, name: str) -> Any:
    rows = (await system.state())["instances"]
    return next(row["answers"] for row in rows if row["id"] == name)


@pytest.mark.parametrize("name", ["p0", "d0"])
@pytest.mark.parametrize("how", [404, 413, 422, 429, 500, 503, "hang"])
async def test_one_sick_instance_of_three_fails_no_request(
    build: ProxyClusterBuilder, name: str, how: int | str
) -> None:
    """Others do the work, and the sick one gets only a probe now and then."""
    system = await build(pairs=3, proxy={"token_gap_s": 1.0 if how == "hang" else 10.0})
    sicken(system, name, how)

    answers = await ask_many(system, REQUESTS)

    assert {status for status, _ in answers} == {200}
    assert {msgspec.json.decode(body)["choices"][0]["text"] for _, body in answers} == {TEXT}
    assert len(system.instances[name].completions) <= REQUESTS / 5


@pytest.mark.parametrize("name", ["p0", "d0"])
async def test_an_instance_that_fails_all_is_ejected_and_comes_back_when_it_answers(
    build: ProxyClusterBuilder, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """State, metric and log tell."""
    caplog.set_level(logging.INFO)
    system = await build(pairs=3)
    assert await system.count("kvrs_worker_ejected", worker=name) == 0
    sicken(system, name, 500)

    async def is_ejected() -> bool:
        await system.complete(**REQUEST)
        return bool((await answers_of(system, name))["ejected"])

    await system.until(is_ejected)
    assert (await answers_of(system, name))["cause"].startswith("HTTP 500")
    assert await system.count("kvrs_worker_ejected", worker=name) == 1
    assert await system.count("kvrs_worker_ejected") == 1

    system.instances[name].refusal = None

    async def is_back() -> bool:
        return not await is_ejected()

    await system.until(is_back)
    assert await system.count("kvrs_worker_ejected") == 0
    logged = [record.message for record in caplog.records if "jected" in record.message]
    assert logged == ["instance ejected"]
    assert "instance readmitted" in [record.message for record in caplog.records]


async def test_none_is_ejected_where_all_fail_alike(build: ProxyClusterBuilder) -> None:
    """None of them is better than the others, and all are used once they work."""
    system = await build(pairs=3, policy={"recovery": {"max_attempts": 3}})
    for n in range(3):
        sicken(system, f"p{n}", 500)

    for _ in range(4):
        assert (await system.complete(**REQUEST))[0] == 500
        assert await system.count("kvrs_worker_ejected") == 0
    for n in range(3):
        system.instances[f"p{n}"].refusal = None

    assert (await system.complete(**REQUEST))[0] == 200


async def test_busy_instances_are_not_ejected(build: ProxyClusterBuilder) -> None:
    """503 says that there is no room, not that anything is broken."""
    system = await build(pairs=3)
    sicken(system, "p0", 503)

    await ask_many(system, REQUESTS)

    assert await system.count("kvrs_worker_ejected") == 0
