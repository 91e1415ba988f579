"""Ray actors: instances of the embedded engine, servers of DistServe, agents of the nodes.

Ray only starts, watches and restarts them. Requests, tokens and pages never pass through Ray.
"""

import asyncio
import os
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NoReturn

from kvrs.cluster.nursery import Keeper, forked, nursery_of
from kvrs.cluster.processes import processes_of
from kvrs.cluster.starts import next_start, report_fault
from kvrs.config.file import ENV_NAME, Config, load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError
from kvrs.garbage import collect_nothing_yet
from kvrs.ids import InstanceId
from kvrs.logs import log_to

# The exit status of a process with wrong options or configuration.
USER_ERRED = 2


class _Actor(ABC):
    """A process that serves from a thread of its own; the actor's main thread answers Ray."""

    def __init__(self, config_path: str, name: str, run_directory: str) -> None:
        # The log file in the run directory also marks this process as part of the run (see
        # guard.py).
        self._log = (Path(run_directory) / f"{name}.log").open("a", buffering=1)
        self._ready = threading.Event()
        # Drains and ends the server, once there is one.
        self._end_server: Callable[[], object] | None = None
        self._config_path = Path(config_path)
        self._name = InstanceId(name)
        self._run_directory = Path(run_directory)
        self._start = next_start(self._run_directory, self._name)
        threading.Thread(target=self._run, name="server", daemon=True).start()

    def wait_ready(self) -> int:
        """Block until requests are accepted; return the process id."""
        self._ready.wait()
        return os.getpid()

    def end(self) -> None:
        """Drain, then end; the process is started again."""
        if (end_server := self._end_server) is None:
            os._exit(1)
        end_server()

    # Not `async def`: Ray would run an actor that has such a method on an event loop of its own.
    @abstractmethod
    def _serve(self, config: Config, secret: bytes) -> None: ...

    def _run(self) -> None:
        try:
            config = load_config(self._config_path)
            log_to(self._log, **config.logs.options)
            secret, *self._older = read_secrets(config.security, os.environ)
            self._serve(config, secret)
        except KvrsError as error:
            print(error, file=self._log)
            if not self._ready.is_set():
                report_fault(self._run_directory, self._name, str(error))
        except BaseException:
            traceback.print_exc(file=self._log)
        finally:
            # A process that does not serve has to end; Ray restarts it.
            os._exit(1)


class InstanceActor(_Actor):
    """An instance; its epochs are the numbers of its starts."""

    def _serve(self, config: Config, secret: bytes) -> None:
        if not _has_ranks(config, self._name):
            self._keep([secret, *self._older], config.state_plane.enabled)
        collect_nothing_yet()
        from kvrs.engine.server import serve  # Loads torch, which only this process needs.

        async def run() -> None:
            stop = asyncio.Event()
            self._end_server = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
            await serve(
                config, self._name, self._start, secret, stop, self._ready.set, older=self._older
            )

        asyncio.run(run())

    def _keep(self, ring: list[bytes], with_spare: bool) -> NoReturn:
        """The processes of this instance are children of a nursery: this actor keeps one that
        serves, and a spare where the weights are in memory that they share.
        """
        nursery = nursery_of(self._config_path, self._name, ring, self._log)
        starts = chain([self._start], iter(partial(next_start, self._run_directory, self._name), 0))
        make, ready = partial(forked, nursery), self._ready.set
        keeper = Keeper(make, partial(next, starts), ready, with_spare)
        self._end_server = keeper.stop
        keeper.run()


class ServerActor(_Actor):
    """A DistServe server, as a process of its own with a user's command line; server and actor end
    together.
    """

    def _serve(self, config: Config, secret: bytes) -> None:
        import ray

        (node,) = (process.node for process in processes_of(config) if process.name == self._name)
        ours = ["--kvrs-config", str(self._config_path), "--kvrs-node", node]
        ours += ["--epoch", str(self._start), "--end-with", str(os.getpid())]
        # distserve_patches stands beside this package, installed or not.
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            ENV_NAME: b"\n".join([secret, *self._older]).decode(),
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
            "PYTHONPATH": os.pathsep.join(paths),
        }
        command = [
            sys.executable,
            "-m",
            "distserve_patches.api_server",
            *config.cluster.distserve.flags,
            *ours,
        ]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as server:
            assert server.stdout is not None
            self._end_server = server.terminate  # Its streams are recovered as after a death.
            last = ""
            for line in server.stdout:
                if line == "ready\n":
                    self._ready.set()
                else:
                    self._log.write(line)
                    last = line.strip()
        if server.returncode == USER_ERRED:
            raise ConfigError([last])


class AgentActor(_Actor):
    """The agent of a node; its epoch is stored beside its segments."""

    def _serve(self, config: Config, secret: bytes) -> None:
        collect_nothing_yet()
        import uvloop

        from kvrs.agent.server import serve

        (node,) = (node.id for node in config.cluster.nodes if node.agent_id == self._name)

        async def run() -> None:
            # Cancelled rather than stopped: its successor adopts the checkpoints.
            serving = asyncio.ensure_future(
                serve(config, node, secret, asyncio.Event(), self._ready.set, self._older)
            )
            self._end_server = partial(
                asyncio.get_running_loop().call_soon_threadsafe, serving.cancel
            )
            await asyncio.wait({serving})
            if not serving.cancelled():
                serving.result()

        uvloop.run(run())


def _has_ranks(config: Config, name: InstanceId) -> bool:
    """Whether the instance is divided among processes; their memory ends with them."""
    return any(
        settings.ranks > 1 for _, settings in config.cluster.instances() if settings.id == name
    )
