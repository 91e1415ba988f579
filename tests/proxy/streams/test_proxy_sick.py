"""Instances that fail what they are sent while their reports are healthy."""

import logging
from typing import Any

import pytest

from kvrs.protocol.openai.chunks import error_body
from kvrs_testkit.proxy_cluster import ProxyCluster
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = pytest.mark.network

REQUEST: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}


def sicken(system: ProxyCluster, name: str, how: int | str) -> None:
    if isinstance(how, int):
        system.instances[name].refusal = (how, error_body("no"))
    else:
        system.instances[name].hangs = True


async def answers_of(system: ProxyCluster, name: str) -> Any:
    rows = (await system.state())["instances"]
    return next(row["answers"] for row in rows if row["id"] == name)


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
