"""One side: processes kept by threads, or as actors of Ray. Prints what it cost as JSON.

`python -m experiments.supervision.side threads|ray COUNT`; with `--line FD` it is one of the
processes that the threads keep.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from kvrs.cluster.guard import members

READY = "KVRS_SIDE_READY"  # A directory of files that ready processes have made.
_LOOK_S = 0.02
_PATIENCE_S = 120.0


def main() -> None:
    if sys.argv[1] == "--line":
        serve(int(sys.argv[2]))
        return
    directory = Path(tempfile.mkdtemp(prefix="side-"))
    begun_s = time.monotonic()
    keep = {"threads": kept_by_threads, "ray": kept_by_ray}[sys.argv[1]]
    pids, end = keep(int(sys.argv[2]), directory)
    first = pids()[0]
    started_s, cost = time.monotonic() - begun_s, _cost(directory)
    killed_s = time.monotonic()
    os.kill(first, signal.SIGKILL)
    _until(lambda: first not in pids())
    back_s = time.monotonic() - killed_s
    print(json.dumps({"started_s": started_s, "back_s": back_s, **cost}))
    sys.stdout.flush()
    end()
    shutil.rmtree(directory, ignore_errors=True)


def serve(descriptor: int) -> None:
    """A process with what one of kvrs imports before its own work; it is told to start, says that
    it is ready, and ends with its line.
    """
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as line:
        if line.recv(100):
            import kvrs.config.file  # noqa: F401 - for its cost

            line.send(b"ready")
            Path(os.environ[READY], str(os.getpid())).touch()
            line.recv(100)


def kept_by_threads(
    count: int, directory: Path
) -> tuple[Callable[[], list[int]], Callable[[], None]]:
    from kvrs.cluster.supervised import WithLine
    from kvrs.engine.nursery import spawn

    running: dict[int, subprocess.Popen[bytes]] = {}
    os.environ[READY] = str(directory)

    def make(number: int, line: socket.socket) -> subprocess.Popen[bytes]:
        running[number] = spawn(["experiments.supervision.side"], {}, None, line)
        return running[number]

    supervised = [WithLine(f"side-{number}", partial(make, number)) for number in range(count)]
    for each in supervised:
        each.start()

    def pids() -> list[int]:
        """Once all are ready."""
        _until(lambda: len(running) == count and all(map(is_ready, running.values())))
        return [running[number].pid for number in range(count)]

    def is_ready(process: subprocess.Popen[bytes]) -> bool:
        return (directory / str(process.pid)).exists() and process.poll() is None

    def end() -> None:
        for each in supervised:
            each.close()
            each.join(_PATIENCE_S)

    return pids, end


def kept_by_ray(count: int, directory: Path) -> tuple[Callable[[], list[int]], Callable[[], None]]:
    """With the options that `kvrs up` had on one machine."""
    from kvrs.cluster.loopback_ray import ENVIRONMENT, OBJECT_STORE_BYTES, ray_token

    os.environ.update(RAY_AUTH_TOKEN=ray_token(), **ENVIRONMENT)
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=50,
        _temp_dir=str(directory),
    )

    class Process:
        def __init__(self) -> None:
            import kvrs.config.file  # noqa: F401 - for its cost

        def pid(self) -> int:
            return os.getpid()

    make = ray.remote(Process).options(num_cpus=0, max_restarts=-1, max_task_retries=-1)
    actors: list[Any] = [make.remote() for _ in range(count)]

    def pids() -> list[int]:
        return [int(pid) for pid in ray.get([actor.pid.remote() for actor in actors])]

    return pids, ray.shutdown


def _cost(directory: Path) -> dict[str, float]:
    """CPU seconds and proportional memory of all processes of this side, and their number."""
    own = psutil.Process()
    # Those of Ray are not all children, and have log files in the directory open.
    pids = {own.pid, *members(directory)} | {each.pid for each in own.children(recursive=True)}
    cpu_s, pss_bytes, count = 0.0, 0, 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            cpu_s += sum(process.cpu_times()[:4])
            pss_bytes += process.memory_full_info().pss
            count += 1
        except psutil.Error:
            continue
    return {"cpu_s": cpu_s, "pss_bytes": pss_bytes, "processes": count}


def _until(holds: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    main()
