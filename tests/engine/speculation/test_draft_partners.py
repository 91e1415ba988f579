"""A helper and the instances that it may help, from outside: real processes, signals, streams."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvrs.ids import InstanceId
from kvrs.protocol.instance import ReloadState
from kvrs_engine.engine.random_model import random_tokenizer, random_weights, write_model
from kvrs_testkit.blocked_load import blocked_load
from kvrs_testkit.processes import ForkedProcesses, Processes
from tests.engine.speculation.restarts import PATIENCE_S, Cluster, asking, instances_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.process,
    pytest.mark.network,
    pytest.mark.xdist_group("drafts"),
    pytest.mark.nightly,
]

D0, D1, D2 = map(InstanceId, ("d0", "d1", "d2"))
PAGES = 1024
PROMPT = [3 + at * 7 % 500 for at in range(40)]
SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 40, "maxItems": 60}
JSON = {"type": "json_schema", "json_schema": {"name": "list", "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 0.8, "seed": 5, "top_p": 0.95},
    "penalties": {"frequency_penalty": 0.3, "presence_penalty": 0.2},
    "JSON": {"response_format": JSON},
}


@pytest.fixture(scope="module")
def processes(pair: Path) -> Iterator[Processes]:
    speculation = {"source": "draft", "draft": str(pair / "draft")}
    engine = {"pages": PAGES}
    config = instances_of(speculation, count=3, model=str(pair / "target"), engine=engine)
    with ForkedProcesses(config) as running:
        running.start("d0", "d1", "d2")
        running.wait_ready("d0", "d1", "d2")
        yield running


@asynccontextmanager
async def loaded(cluster: Cluster, name: str) -> AsyncIterator[None]:
    """Three streams at that instance all the time, each with the tokens of the first one."""
    calm = await cluster.answer(PROMPT, 200, name)

    async def again() -> None:
        while True:
            assert await cluster.answer(PROMPT, 200, name) == calm

    streams = [asyncio.create_task(again()) for _ in range(3)]
    try:
        yield
        assert not any(stream.done() for stream in streams)
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)


async def until_helped(cluster: Cluster) -> str:
    """The instance that d1 helps."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            for name in ("d0", "d2"):
                if (await cluster.report(name)).helper == D1:
                    return name
            await asyncio.sleep(0.02)


async def until_free(cluster: Cluster, name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await cluster.load(name)).free_pages != PAGES:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def restarting(processes: Processes, draft: Path | None = None) -> AsyncIterator[None]:
    """d1 is started again, and its model, and `draft`, do not come until the end."""
    processes.kill("d1")
    with (
        blocked_load(processes),
        nullcontext() if draft is None else blocked_load(processes, draft),
    ):
        processes.start("d1")
        yield
        processes.kill("d1")
    processes.start("d1")
    processes.wait_ready("d1")


async def test_the_most_congested_is_helped_and_then_another_one(processes: Processes) -> None:
    """The partner stops, which closes no connection, and its next one dies."""
    async with asking(processes) as cluster:
        async with loaded(cluster, "d2"):
            async with asyncio.timeout(PATIENCE_S):
                while (await cluster.load("d2")).running < 3:
                    await asyncio.sleep(0.01)
            async with restarting(processes):
                await cluster.until(lambda report: report.helper == D1, "d2")
                assert (await cluster.report("d0")).helper is None
                told = await cluster.until(
                    lambda report: D1 in report.reloads and report.reloads[D1].paired_with == D2
                )
                assert told.reloads[D1].state is ReloadState.ASSIST

                os.kill(processes.pid("d2"), signal.SIGSTOP)
                await cluster.until(lambda report: report.helper == D1, "d0")
                os.kill(processes.pid("d2"), signal.SIGCONT)
                await cluster.until(lambda report: report.helper is None, "d2")

                processes.kill("d0")
                await cluster.until(lambda report: report.helper == D1, "d2")
        processes.start("d0")
        processes.wait_ready("d0")
        await until_free(cluster, "d2")


@pytest.mark.parametrize("kind", KINDS)
async def test_streams_of_each_kind_have_drafts_and_leave_no_page(
    processes: Processes, kind: str
) -> None:
    asked = {"ignore_eos": False, **KINDS[kind]}
    async with asking(processes) as cluster:
        calm = await cluster.answer(PROMPT, 150, **asked)
        async with restarting(processes):
            accepted = 0
            async with asyncio.timeout(PATIENCE_S):
                while not accepted:
                    helped = await until_helped(cluster)  # Whichever it is by now.
                    before = (await cluster.report(helped)).accepted
                    assert await cluster.answer(PROMPT, 150, helped, **asked) == calm
                    accepted = (await cluster.report(helped)).accepted - before
        assert len(calm) > 20
        await until_free(cluster, helped)


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_helper_may_vanish_while_its_draft_loads(
    processes: Processes, fault: signal.Signals
) -> None:
    """Its last notice counts for three seconds."""
    draft = Path(processes.config.speculation.draft or "")
    async with asking(processes) as cluster:
        calm = await cluster.answer(PROMPT, 100)
        async with restarting(processes, draft):
            await cluster.until(
                lambda report: (
                    D1 in report.reloads and report.reloads[D1].state is ReloadState.LOADING_DRAFT
                )
            )
            os.kill(processes.pid("d1"), fault)
            assert await cluster.answer(PROMPT, 100) == calm
            await cluster.until(lambda report: not report.reloads)
            assert await cluster.answer(PROMPT, 100) == calm


async def test_a_helper_that_stops_is_left_and_may_come_back(processes: Processes) -> None:
    """A stopped process keeps its connection, as one does that is cut off."""
    async with asking(processes) as cluster, restarting(processes):
        calm = await cluster.answer(PROMPT, 100, "d2")
        helped = await until_helped(cluster)
        os.kill(processes.pid("d1"), signal.SIGSTOP)
        await cluster.until(lambda report: report.helper is None, helped)
        assert await cluster.answer(PROMPT, 100, "d2") == calm
        os.kill(processes.pid("d1"), signal.SIGCONT)
        await until_helped(cluster)


async def test_drafts_of_random_weights_are_proposed_and_refused(
    pair: Path, tmp_path: Path
) -> None:
    """Counters tell a draft model from the target itself."""
    tokenizer = random_tokenizer(0)
    write_model(tmp_path / "random", tokenizer, random_weights(99, tokenizer, layers=1))
    speculation = {"source": "draft", "draft": str(tmp_path / "random")}
    config = instances_of(speculation, model=str(pair / "target"))
    with ForkedProcesses(config) as processes:
        processes.start("d0", "d1")
        processes.wait_ready("d0", "d1")
        async with asking(processes) as cluster:
            calm = await cluster.answer(PROMPT, 150)
            processes.kill("d1")
            with blocked_load(processes):
                processes.start("d1")
                await cluster.until(lambda report: report.helper == D1)
                async with asyncio.timeout(PATIENCE_S):
                    while (report := await cluster.report()).proposed < 20:
                        assert await cluster.answer(PROMPT, 150) == calm
    assert report.accepted < report.proposed / 10
