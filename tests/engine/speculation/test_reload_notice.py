"""Drafts while another instance is being started again: real processes, of which one hears of the
other's load.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kvrs.config.file import parse_config
from kvrs.config.speculation import SpeculationSettings
from kvrs.engine.speculation.drafts import LookupDrafts
from kvrs.ids import InstanceId
from kvrs.protocol.instance import LoadReport
from kvrs.protocol.speculation import ReloadNotice, SpeculationReport
from kvrs.proving import ProvingConnector, instance_keys
from kvrs_testkit.processes import Processes

PATIENCE_S = 60.0
D1, D2 = InstanceId("d1"), InstanceId("d2")


def drafts(when: str) -> tuple[LookupDrafts, list[float]]:
    """With the time that its clock shows."""
    now_s = [100.0]
    settings = SpeculationSettings.model_validate({"source": "lookup", "when": when})
    return LookupDrafts(settings, lambda: now_s[0]), now_s


def test_they_are_made_while_any_other_instance_is_started() -> None:
    source, now_s = drafts("reload")
    assert not source.active
    source.reloading(ReloadNotice(D1, 3.0))
    source.reloading(ReloadNotice(D2, 5.0))
    assert source.active
    source.reloading(ReloadNotice(D2, 0.0))
    assert source.active
    now_s[0] += 3.0
    assert not source.active


def test_they_are_made_always_if_that_was_asked_for() -> None:
    source, _ = drafts("always")
    assert source.active


class Cluster:
    def __init__(self, processes: Processes, http: aiohttp.ClientSession) -> None:
        self.processes, self._http = processes, http
        self._url = processes.config.url_of(processes.config.cluster.find(InstanceId("d0"))[1])

    async def report(self) -> SpeculationReport:
        async with self._http.get(f"{self._url}/kvrs/v1/load") as answer:
            report = msgspec.json.decode(await answer.read(), type=LoadReport).speculation
        assert report is not None
        return report

    async def notice(self, body: bytes) -> int:
        async with self._http.post(f"{self._url}/kvrs/v1/reload", data=body) as answer:
            return answer.status

    async def until_active(self, active: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.report()).active is not active:
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    nodes = [{"id": f"n{n}", "instances": [{"id": f"d{n}", "role": "both"}]} for n in range(2)]
    config = parse_config(
        {
            "cluster": {"nodes": nodes},
            "gossip": {"enabled": False},
            "speculation": {"source": "lookup", "when": "reload"},
        }
    )
    with Processes(config) as running:
        running.start("d0", "d1")
        running.wait_ready("d0", "d1")
        yield running


@asynccontextmanager
async def asking(processes: Processes) -> AsyncIterator[Cluster]:
    instances = [one for _, one in processes.config.cluster.instances()]
    connector = ProvingConnector(instance_keys(processes.secret, instances), None)
    async with aiohttp.ClientSession(connector=connector) as http:
        yield Cluster(processes, http)


@pytest.mark.process
@pytest.mark.network
async def test_a_survivor_makes_drafts_until_the_other_one_is_there(processes: Processes) -> None:
    """The load of the other one blocks in a file of its model, and then fails: a process that is
    gone is not awaited.
    """
    async with asking(processes) as cluster:
        assert not (await cluster.report()).active, "a first start is no reload"
        model = Path(processes.config.cluster.model or "")
        read = model / "config.json"
        kept = read.rename(model / "kept")
        os.mkfifo(read)
        processes.kill("d1")
        processes.start("d1")

        await cluster.until_active(True)

        os.close(os.open(read, os.O_WRONLY))  # It reads nothing.
        await cluster.until_active(False)
        kept.replace(read)
        processes.start("d1")
        processes.wait_ready("d1")
        await cluster.until_active(False)


@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"instance": "d1"}', 400),
        (b'{"instance": "d1", "for_s": -1}', 400),
        (b'{"instance": "d1", "for_s": 1e300}', 400),
        (b'{"instance": "d1", "for_s": NaN}', 400),
        (b"[]", 400),
        (b'{"instance": "d9", "for_s": 3}', 204),
    ],
)
async def test_a_wrong_notice_changes_nothing(
    processes: Processes, body: bytes, status: int
) -> None:
    async with asking(processes) as cluster:
        assert await cluster.notice(body) == status
        assert not (await cluster.report()).active
