"""Detection of a worker's death: at once on this node, within a ping elsewhere."""

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

PING_INTERVAL_S = 0.5
OUT_OF_MEMORY = (
    "Ray's memory monitor ended it: the memory in use on its machine was above "
    "RAY_memory_usage_threshold (0.95 unless set); RAY_memory_monitor_refresh_ms=0 in the "
    "environment of Ray turns the monitor off"
)
# Variable that Ray names in its message about such an end.
_THRESHOLD = "RAY_memory_usage_threshold"


@dataclass(frozen=True)
class WorkerProcess:
    actor: Any
    pid: int
    here: bool  # The worker runs on the node of this process.


async def locate(actors: list[Any]) -> list[WorkerProcess]:
    """Find the process and node of every worker. Raises RayError: a worker is dead."""

    def whereabouts(_: object) -> tuple[int, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id()

    own_node = ray.get_runtime_context().get_node_id()
    places = await asyncio.gather(*(actor.__ray_call__.remote(whereabouts) for actor in actors))
    return [
        WorkerProcess(actor, pid, node == own_node)
        for actor, (pid, node) in zip(actors, places, strict=True)
    ]


async def first_death(workers: list[WorkerProcess]) -> str:
    """Wait until a worker dies; return a message about the death."""
    tasks = [
        asyncio.create_task(_end_of(worker.pid) if worker.here else _end_of_actor(worker))
        for worker in workers
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def _end_of(pid: int) -> str:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return f"worker process {pid} died"
    try:
        loop.add_reader(handle, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return f"worker process {pid} died"


async def _end_of_actor(worker: WorkerProcess) -> str:
    # A ping waits behind the worker's steps, so a busy worker has no cost. Ray fails the ping at
    # the worker's death.
    while True:
        try:
            await worker.actor.__ray_call__.remote(lambda _: None)
        except RayError as error:
            return f"worker process {worker.pid} is gone: {cause_of(error)}"
        await asyncio.sleep(PING_INTERVAL_S)


async def memory_cause(workers: list[WorkerProcess]) -> str | None:
    """Return the cause of the end of these workers if Ray's memory monitor ended one of them; None:
    it did not. Ray knows the cause some time after the end.
    """
    pings = [worker.actor.__ray_call__.remote(lambda _: None) for worker in workers]
    for worker, answer in zip(
        workers, await asyncio.gather(*pings, return_exceptions=True), strict=True
    ):
        if isinstance(answer, RayError) and cause_of(answer) == OUT_OF_MEMORY:
            return f"worker process {worker.pid} died: {OUT_OF_MEMORY}"
    return None


def cause_of(error: BaseException) -> str:
    """The cause of an error in one line. Ray's messages are paragraphs, and end with the cause
    after a remote traceback.
    """
    if _THRESHOLD in str(error):
        return OUT_OF_MEMORY
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if "ray::" in lines[0] else lines[0]
