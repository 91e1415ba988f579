"""Notices of instances that are being started again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import Reload, ReloadNotice, ReloadState
from kvrs_engine.engine.speculation.paired import ReloadNotices
from kvrs_testkit.processes import ForkedProcesses, Processes
from tests.engine.speculation.restarts import asking, instances_of

pytestmark = pytest.mark.xdist_group("drafts")

D1, D2 = InstanceId("d1"), InstanceId("d2")


def test_a_notice_counts_for_its_time_or_until_the_next() -> None:
    now_s = [100.0]
    reloads = ReloadNotices(lambda: now_s[0])
    reloads.note(ReloadNotice(D1, 3.0))
    reloads.note(ReloadNotice(D2, 5.0, Reload(ReloadState.ASSIST, D1)))
    assert reloads.now() == {D1: Reload(), D2: Reload(ReloadState.ASSIST, D1)}
    reloads.note(ReloadNotice(D2, 0.0))
    assert reloads.now() == {D1: Reload()}
    now_s[0] += 3.0
    assert reloads.now() == {}


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[Processes]:
    speculation = {"source": "draft", "draft": str(tiny_model)}
    config = instances_of(speculation, model=str(tiny_model))
    with ForkedProcesses(config) as running:
        running.start("d0")
        running.wait_ready("d0")
        yield running


@pytest.mark.process
@pytest.mark.network
@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"instance": "d1"}', 400),
        (b'{"instance": "d1", "for_s": -1}', 400),
        (b'{"instance": "d1", "for_s": 1e300}', 400),
        (b'{"instance": "d1", "for_s": NaN}', 400),
        (b'{"instance": "d1", "for_s": 3, "reload": {"ready_in_s": -1}}', 400),
        (b'{"instance": "d1", "for_s": 3, "reload": {"state": "?"}}', 400),
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
