"""Drafts while another instance is being started again: real processes, of which one hears of the
other's load.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrs.config.speculation import SpeculationSettings
from kvrs.ids import InstanceId
from kvrs.protocol.speculation import Reload, ReloadNotice, ReloadState
from kvrs_engine.engine.speculation.drafts import LookupDrafts, ReloadNotices
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.processes import ForkedProcesses, Processes
from tests.engine.speculation.restarts import asking, instances_of

pytestmark = pytest.mark.xdist_group("drafts")

D1, D2 = InstanceId("d1"), InstanceId("d2")


def test_drafts_are_made_while_any_other_instance_is_started() -> None:
    now_s = [100.0]
    reloads = ReloadNotices(lambda: now_s[0])
    sometimes, always = (
        LookupDrafts(
            SpeculationSettings.model_validate({"source": "lookup", "when": when}), reloads
        )
        for when in ("reload", "always")
    )
    assert (sometimes.active, always.active) == (False, True)
    reloads.note(ReloadNotice(D1, 3.0))
    reloads.note(ReloadNotice(D2, 5.0, Reload(ReloadState.ASSIST, D1)))
    assert sometimes.active
    assert reloads.now()[D2] == Reload(ReloadState.ASSIST, D1)
    reloads.note(ReloadNotice(D2, 0.0))
    assert sometimes.active
    now_s[0] += 3.0
    assert not sometimes.active
    assert reloads.now() == {}


@pytest.fixture(scope="module")
def processes(tiny_model: Path) -> Iterator[Processes]:
    config = instances_of({"source": "lookup", "when": "reload"}, model=str(tiny_model))
    with ForkedProcesses(config) as running:
        running.start("d0", "d1")
        running.wait_ready("d0", "d1")
        yield running


@pytest.mark.process
@pytest.mark.network
async def test_a_survivor_makes_drafts_until_the_other_one_is_there(processes: Processes) -> None:
    """The load of the other one blocks in a file of its model, and then fails: a process that is
    gone is not awaited.
    """
    async with asking(processes) as cluster:
        assert not (await cluster.report()).active, "a first start is no reload"
        processes.kill("d1")
        with blocked_load(processes):
            processes.start("d1")
            await cluster.until_active(True)
        await cluster.until_active(False)
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
