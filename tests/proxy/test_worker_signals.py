"""Signals that reach the supervisor of a proxy's workers while one of them starts."""

import asyncio
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.origin import WorkerPlan
from kvrs.proxy.process.workers import _Workers
from kvrs_testkit.proxy_cluster import WITHIN_S

pytestmark = pytest.mark.process

# It blocks no signal by itself, as a process of `kvrs proxy` does once it has begun its imports.
WORKER = """
import signal, sys, time
out = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGHUP, lambda *_: out.write("reloads\\n"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
out.write("has read its file\\n")
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
while True:
    time.sleep(60)
"""

Start = Callable[..., Any]


async def until_written(written: Path, last: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not written.exists() or not written.read_text().endswith(f"{last}\n"):
            await asyncio.sleep(0.01)


def signalled_late(start: Start, written: Path) -> Start:
    """The signal comes when the worker is up, and its supervisor has not been given its process."""

    async def make(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process: asyncio.subprocess.Process = await start(*arguments, **options)
        await until_written(written, "has read its file")
        signal.raise_signal(signal.SIGHUP)
        for _ in range(3):
            await asyncio.sleep(0.01)
        return process

    return make


def signalled_early(start: Start, written: Path) -> Start:
    """The signal is passed on when the worker has just begun to run."""

    async def make(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        process: asyncio.subprocess.Process = await start(*arguments, **options)
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGHUP)
        return process

    return make


@pytest.mark.parametrize("signalled", [signalled_late, signalled_early])
def test_a_worker_that_starts_takes_a_signal_to_its_supervisor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signalled: Callable[[Start, Path], Start],
) -> None:
    """It reloads, and is not ended by a signal that it has no handler for yet."""
    written = tmp_path / "written"
    start = asyncio.create_subprocess_exec
    monkeypatch.setattr(asyncio, "create_subprocess_exec", signalled(start, written))
    command = (sys.executable, "-c", WORKER, str(written))
    workers = _Workers(["w0"], command, [WorkerPlan(0, 0, 0, [])])

    async def run() -> int:
        running = asyncio.create_task(workers.run())
        try:
            await until_written(written, "reloads")
        finally:
            signal.raise_signal(signal.SIGTERM)
        return await running

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        status = runner.run(run())

    assert status == 0
    assert written.read_text().splitlines() == ["has read its file", "reloads"]
