"""Reports of a supervisor about processes of instances, at the admin port."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.protocol.instance import EPOCHS_PER_START
from kvrs_testkit.proxy_cluster import ProxyCluster
from kvrs_testkit.scripted import Scripted
from tests.proxy.conftest import ProxyClusterBuilder

KILLED: dict[str, Any] = {"start": 4, "cause": "SIGKILL", "is_external": True}


async def built(build: ProxyClusterBuilder, log: Path, **proxy: Any) -> ProxyCluster:
    """With d0 in its fourth start, which was fenced twice."""

    def prepare(instances: dict[str, Scripted]) -> None:
        instances["d0"].epoch = 4 * EPOCHS_PER_START + 2

    return await build(prepare=prepare, proxy={"event_log": str(log), **proxy})


async def post(system: ProxyCluster, instance: str, body: bytes) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{system.proxy.admin_port}/kvrs/v1/exits/{instance}"
    async with system.http.post(url, data=body) as answer:
        return answer.status, msgspec.json.decode(await answer.read())


def exits(log: Path) -> list[dict[str, Any]]:
    events = (json.loads(line).get("event", {}) for line in log.read_text().splitlines())
    return [event for event in events if event.get("kind") == "InstanceExited"]


async def test_a_report_belongs_to_the_epoch_of_that_start(
    build: ProxyClusterBuilder, tmp_path: Path
) -> None:
    """Before the loss is noticed, and when the next process is up already."""
    log = tmp_path / "events.jsonl"
    system = await built(build, log)
    d0 = system.instances["d0"]

    before = await post(system, "d0", json.dumps(KILLED).encode())
    await d0.kill()
    await system.until_health(d0="down")
    d0.epoch = 5 * EPOCHS_PER_START - 1
    await d0.restart()
    await system.until_health(d0="up")
    after = await post(system, "d0", json.dumps(KILLED | {"cause": "SIGSEGV"}).encode())
    await system.until(lambda: _logged(log, 2))

    assert before == after == (200, {"instance": "d0", "start": 4})
    assert [(each["epoch"], each["cause"]) for each in exits(log)] == [
        (4 * EPOCHS_PER_START + 2, "SIGKILL"),
        (4 * EPOCHS_PER_START + 2, "SIGSEGV"),
    ]
    (row,) = (each for each in (await system.state())["instances"] if each["id"] == "d0")
    assert (row["health"], row["starts"]) == ("up", 2)


async def _logged(log: Path, count: int) -> bool:
    return len(exits(log)) == count


@pytest.mark.parametrize(
    ("instance", "changes", "status", "words"),
    [
        ("d7", {}, 404, "no instance 'd7'; allowed: p0, d0, p1, d1"),
        ("d0", {"start": 5}, 409, "start: got 5; allowed: 4"),
        ("d0", {"start": -1}, 400, "Expected `int` >= 0"),
        ("d0", {"start": "4"}, 400, "Expected `int`, got `str`"),
        ("d0", {"cause": ""}, 400, "length >= 1"),
        ("d0", {"cause": "x" * 201}, 400, "length <= 200"),
        ("d0", {"is_external": 1}, 400, "Expected `bool`"),
    ],
)
async def test_a_report_that_fits_no_process_is_refused(
    build: ProxyClusterBuilder,
    tmp_path: Path,
    instance: str,
    changes: dict[str, Any],
    status: int,
    words: str,
) -> None:
    log = tmp_path / "events.jsonl"
    system = await built(build, log)

    refused = await post(system, instance, json.dumps(KILLED | changes).encode())

    assert refused[0] == status
    assert words in refused[1]["error"]["message"]
    assert (await system.health())["d0"] == "up"
    assert exits(log) == []


async def test_a_report_needs_the_admin_token(
    build: ProxyClusterBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can keep a request from being refused."""
    monkeypatch.setenv("KVRS_ADMIN_TOKEN", "a token of an operator")
    system = await build(wait=False)

    status, _ = await post(system, "d0", json.dumps(KILLED).encode())

    assert status == 401
