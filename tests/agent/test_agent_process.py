"""An agent as a process: pages that survive its death, its clean end, and rejected starts."""

import asyncio
import signal
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import checksum_of
from kvrs.protocol.instance import MEMORY, AgentInfo
from kvrs.protocol.pages import HeldPages, PagePart, StoreCode, Tag
from kvrs.transfer import puller
from kvrs.transfer.store.directory import store_directory
from tests.agent.agents import (
    N0,
    SECRET,
    AgentProcess,
    Engine,
    ask,
    document,
    flip_a_byte,
    page,
    processes,
    session,
    tags,
)

pytestmark = [pytest.mark.process, pytest.mark.network]

OK = StoreCode.OK


async def epoch_of(agent: AgentProcess) -> int:
    async with session(agent.config) as client:
        return (await ask(client, "/kvrs/v1/agent", AgentInfo)).epoch


async def test_checkpoints_survive_a_kill(tmp_path: Path) -> None:
    """From an engine to the agent, through SIGKILL and restart, and back: the same bytes, except a
    torn page.
    """
    agent = AgentProcess(tmp_path, document(tmp_path))
    mine, other = tags(1, 12), tags(2, 4)
    with processes(agent):
        async with Engine(agent.config) as engine:
            assert await engine.offer("s", 12) == HeldPages(OK, 0)
            assert await engine.store("s", 0, mine[:8]) == HeldPages(OK, 8)
            assert await engine.store("s", 8, mine[8:]) == HeldPages(OK, 12)
            assert await engine.offer("t", 4) == HeldPages(OK, 0)
            assert await engine.store("t", 0, other) == HeldPages(OK, 4)
            epoch = await epoch_of(agent)
            assert (await engine.fetch(mine, epoch=epoch)).full_pages == 12

        agent.end(signal.SIGKILL)
        flip_a_byte(tmp_path, page(other[2]))
        agent.start()

        async with Engine(agent.config) as engine:
            assert (await engine.fetch(mine)).full_pages == 12
            damaged = await engine.fetch(other)
            assert (damaged.full_pages, damaged.gone, damaged.error) == (2, True, None)
            later = await epoch_of(agent)
            assert later > epoch
            assert f"is in epoch {later}" in str((await engine.fetch(mine, epoch=epoch)).error)
            # The writer continues: it offers all pages, and sends those that are missing.
            assert await engine.offer("t", 4, other) == HeldPages(OK, 2)
            assert await engine.store("t", 2, other[2:]) == HeldPages(OK, 4)
            assert (await engine.fetch(other)).full_pages == 4

        status, output = agent.end(signal.SIGTERM)

    assert status == 0, output
    assert [path.suffix for path in tmp_path.iterdir()] == [".yaml"]


async def test_a_kill_while_pages_arrive_leaves_whole_pages(tmp_path: Path) -> None:
    """Pages are overwritten all the time; what is found under a tag afterwards is that page."""
    agent = AgentProcess(tmp_path, document(tmp_path, capacity_pages=48))
    sent: list[tuple[Tag, ...]] = []

    async def send(engine: Engine) -> None:
        for family in count():
            stream = f"s{family}"
            sent.append(tags(family, 32))
            await engine.offer(stream, 32)
            await engine.store(stream, 0, sent[-1])
            await engine.release(stream)

    with processes(agent):
        async with Engine(agent.config) as engine:
            sending = asyncio.create_task(send(engine))
            while len(sent) < 6:
                await asyncio.sleep(0)
            agent.end(signal.SIGKILL)
            with pytest.raises((TransferError, aiohttp.ClientError)):
                await sending
        agent.start()
        async with Engine(agent.config) as engine:
            found = [(await engine.fetch((tag,))).full_pages for run in sent for tag in run]

    assert 0 < sum(found) <= 48


async def test_a_kill_while_pages_are_copied_leaves_right_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory outlives the agent: the pages that it had are whole. The next agent of the node
    lends the same pages.
    """
    agent = AgentProcess(tmp_path, document(tmp_path))
    mine = tags(1, 32)
    left = count(-3)

    def kill(page: frames.Bytes, part: PagePart | None) -> int:
        if threading.current_thread() is not threading.main_thread() and next(left) == 0:
            agent.end(signal.SIGKILL)
        return checksum_of(page, part)

    with processes(agent):
        async with Engine(agent.config, at=N0) as engine:
            await engine.offer("s", 32)
            await engine.store("s", 0, mine)
            monkeypatch.setattr(puller, "checksum_of", kill)
            cut = await engine.fetch(mine)
            assert agent.process is None
            agent.start()
            again = await engine.fetch(mine)
            links = engine.links
        agent.end(signal.SIGTERM)

    assert (cut.full_pages, cut.error) == (32, None)
    assert (again.full_pages, again.error) == (32, None)
    assert links == {MEMORY}
    assert [path.suffix for path in tmp_path.iterdir()] == [".yaml"]


async def test_two_clusters_on_a_host_are_separate(tmp_path: Path) -> None:
    """Same directory, node and names: only their secrets differ."""
    theirs = b"the secret of another cluster"
    agents = [AgentProcess(tmp_path, document(tmp_path), secret) for secret in (SECRET, theirs)]
    with processes(*agents):
        async with Engine(agents[0].config) as mine, Engine(agents[1].config, theirs) as other:
            await mine.offer("s", 2)
            await mine.store("s", 0, tags(1, 2))
            assert (await other.fetch(tags(1, 2))).gone
            agents[0].end(signal.SIGKILL)
            agents[0].start()
            assert (await mine.fetch(tags(1, 2))).full_pages == 2
        async with Engine(agents[1].config) as lost:
            with pytest.raises(TransferError, match="another secret"):
                await lost.offer("s", 2)

        assert store_directory(str(tmp_path), SECRET, N0).exists()
        agents[1].end(signal.SIGTERM)
        assert store_directory(str(tmp_path), SECRET, N0).exists()
        assert not store_directory(str(tmp_path), theirs, N0).exists()


def test_a_failed_start_reports_its_cause(tmp_path: Path) -> None:
    """In one line, with exit status 2; files of others stay."""
    store_directory(str(tmp_path), SECRET, N0).mkdir(0o755)
    agent = AgentProcess(tmp_path, document(tmp_path))

    with pytest.raises(AssertionError) as caught:
        agent.start()

    assert "others may use it (mode bits 055); allowed: a directory of this user, mode 0700" in str(
        caught.value
    )
    assert "Traceback" not in str(caught.value)
    assert store_directory(str(tmp_path), SECRET, N0).exists()


def test_no_collection_passes_through_the_objects_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does their number put collections off."""
    told = "import atexit, gc, sys\n"
    told += "atexit.register(lambda: print('kept:', gc.get_freeze_count(), file=sys.stderr))\n"
    (tmp_path / "sitecustomize.py").write_text(told)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    agent = AgentProcess(tmp_path, document(tmp_path), forked=False)

    with processes(agent):
        _, output = agent.end(signal.SIGTERM)

    assert int(output.rpartition("kept:")[2]) > 10_000


def test_an_agent_loads_no_torch() -> None:
    """So it starts in a fraction of a second."""
    script = "import sys, kvrs.agent.__main__; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
