"""An instance that is started again makes drafts for the other one: real processes and signals."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import Reload, ReloadState
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.processes import ForkedProcesses, Processes
from tests.engine.speculation.restarts import (
    PATIENCE_S,
    Cluster,
    asking,
    instances_of,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("drafts"),
]

D1 = InstanceId("d1")
PROMPT = [3 + at * 7 % 500 for at in range(40)]
TOKENS = 200


@pytest.fixture(scope="module")
def processes(pair: Path) -> Iterator[Processes]:
    speculation = {"source": "draft", "draft": str(pair / "draft")}
    with ForkedProcesses(instances_of(speculation, model=str(pair / "target"))) as running:
        running.start("d0", "d1")
        running.wait_ready("d0", "d1")
        yield running


async def accepted_in(cluster: Cluster, work: Callable[[], Awaitable[None]]) -> int:
    before = (await cluster.report()).accepted
    await work()
    return (await cluster.report()).accepted - before


async def test_a_helper_speeds_a_survivor_up_and_may_vanish_at_any_time(
    processes: Processes,
) -> None:
    async with asking(processes) as cluster:
        calm = await cluster.answer(PROMPT, TOKENS)

        async def again() -> None:
            assert await cluster.answer(PROMPT, TOKENS) == calm

        assert await accepted_in(cluster, again) == 0
        processes.kill("d1")
        with blocked_load(processes):
            processes.start("d1")
            await cluster.until(lambda report: report.helper == D1)
            assisting = Reload(ReloadState.ASSIST, InstanceId("d0"))
            await cluster.until(lambda report: report.reloads[D1] == assisting)
            async with asyncio.timeout(PATIENCE_S):  # On a busy machine drafts come too late.
                while not await accepted_in(cluster, again):
                    pass

            os.kill(processes.pid("d1"), signal.SIGSTOP)
            assert await accepted_in(cluster, again) < TOKENS // 4
            assert await accepted_in(cluster, again) == 0, "what had come is used up"
            os.kill(processes.pid("d1"), signal.SIGCONT)
            asked = asyncio.create_task(again())
            processes.kill("d1")
            await asked
            await cluster.until(lambda report: report.helper is None)
            processes.start("d1")
            await cluster.until(lambda report: report.helper == D1)
        # Its load has failed.
        await cluster.until(lambda report: report.helper is None and not report.reloads)
        await again()
        processes.start("d1")
        processes.wait_ready("d1")
        await cluster.until(lambda report: report.helper is None and not report.reloads)
        await again()


@pytest.mark.nightly
async def test_an_instance_that_dies_once_its_model_is_there_takes_nothing_along(
    processes: Processes,
) -> None:
    """It has dropped its draft then, and does not serve yet."""
    async with asking(processes) as cluster:
        calm = await cluster.answer(PROMPT, TOKENS)
        processes.kill("d1")
        for _ in range(20):  # That state may pass unseen.
            processes.start("d1")
            came = await cluster.until(lambda report: D1 in report.reloads)
            while D1 in came.reloads and came.reloads[D1].state is not ReloadState.HOTSWAP:
                came = await cluster.report()
            asked = asyncio.create_task(cluster.answer(PROMPT, TOKENS))
            processes.kill("d1")
            assert await asked == calm
            await cluster.until(lambda report: report.helper is None and not report.reloads)
            if D1 in came.reloads:
                break
        else:
            pytest.fail("it was never seen")
        processes.start("d1")
        processes.wait_ready("d1")


@pytest.mark.nightly
async def test_a_broken_draft_keeps_no_instance_from_starting(
    processes: Processes, tmp_path: Path
) -> None:
    draft = Path(processes.config.speculation.draft or "")
    kept = draft.rename(tmp_path / "kept")
    try:
        async with asking(processes) as cluster:
            processes.kill("d1")
            processes.start("d1")
            processes.wait_ready("d1")
            await cluster.until(lambda report: report.helper is None and not report.reloads)
    finally:
        kept.rename(draft)
