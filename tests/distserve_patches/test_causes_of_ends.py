"""Causes of workers' ends, as Ray tells them."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="the extra distserve is not installed")

from ray.exceptions import OutOfMemoryError, RayError

from distserve_patches.watch import OUT_OF_MEMORY, WorkerProcess, cause_of, memory_cause

# As Ray 2.60 writes it, shortened.
KILLED = OutOfMemoryError(
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
    "192.0.2.2, ID: 40f7) was 5.83GB used / 23.54GB limit (0.247646)\nOOM kill reason: ...\n"
    "To adjust the kill threshold, set the environment variable `RAY_memory_usage_threshold` when "
    "starting Ray."
)


def ended(pid: int, error: Exception) -> WorkerProcess:
    def remote(_: object) -> asyncio.Future[None]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(error)
        return answer

    return WorkerProcess(SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote)), pid, True)


async def test_an_end_by_rays_memory_monitor_has_a_cause_and_a_remedy() -> None:
    """Other ends are known by the process alone."""
    other = ended(1, RayError("The actor died unexpectedly"))

    assert await memory_cause([other]) is None
    found = await memory_cause([other, ended(2, KILLED)])
    assert found == f"worker process 2 died: {OUT_OF_MEMORY}"
    assert "RAY_memory_monitor_refresh_ms=0" in cause_of(KILLED)
