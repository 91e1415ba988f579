"""Runs one process of a cluster for its supervisor: an instance, the host of a stage, a server of
DistServe, or the agent of a node.

`python -m kvrs_lab.cluster.hosted --config FILE --name NAME --line FD`; with `--parent PID` in
place of the name the process is a nursery (`kvrs_engine.engine.nursery`) for all processes with an
engine, whose modules it has imported. A spare instance loads its model before the start message.
Messages on lines are those of `kvrs_lab.cluster.supervised`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvrs.config.file import ENV_NAME, Config, load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError, RanksLostError
from kvrs.ids import InstanceId, NodeId
from kvrs.process.logs import log_to_stderr
from kvrs.process.memory import collect_nothing_yet
from kvrs_engine.engine.nursery import MAX_MESSAGE_BYTES, tend
from kvrs_lab.cluster.processes import Kind, has_ranks, has_spare, processes_of

if TYPE_CHECKING:
    from kvrs_engine.engine.instance import LoadedModel

log = logging.getLogger("kvrs_lab.cluster.hosted")  # The module runs as `__main__`.

# The exit status of a process with wrong options or configuration.
USER_ERRED = 2


class Hosted:
    """One process of a cluster; `serve` runs until the end of the process."""

    def __init__(self, config_path: Path, name: InstanceId, line: socket.socket) -> None:
        self._config_path, self._name, self._line = config_path, name, line
        self._document: bytes | None = None

    def serve(self) -> None:
        """Serve until the end. Raises KvrsError: the process cannot serve."""
        config = self.config()
        log_to_stderr(**config.logs.options)
        (process,) = (each for each in processes_of(config) if each.name == self._name)
        if process.kind is not Kind.SERVER:
            collect_nothing_yet()
        if has_ranks(config, process):
            from kvrs_engine.engine.ranks.processes import RANKS
            from kvrs_engine.engine.ranks.rank import obey

            RANKS.begin_here(obey, self._line)
        loaded = self._load(config) if has_spare(config, process) else None
        word, _, number = self._line.recv(MAX_MESSAGE_BYTES).decode().partition(" ")
        if word != "start":
            return  # The supervisor has ended.
        # The settings of a running cluster may have changed.
        config, start = self.config(), int(number)
        secrets = read_secrets(config.security, os.environ)
        match process.kind:
            case Kind.INSTANCE:
                asyncio.run(self._serve_instance(config, start, secrets, loaded))
            case Kind.STAGE:
                asyncio.run(self._serve_stage(config, secrets))
            case Kind.AGENT:
                import uvloop

                uvloop.run(self._serve_agent(config, process.node, secrets))
            case Kind.SERVER:
                self._serve_distserve(config, process.node, start, secrets)

    def report_fault(self, error: KvrsError) -> None:
        self._tell(f"fault {error}")
        if isinstance(error, RanksLostError):
            self._report_exit(error.status)

    def config(self) -> Config:
        """The configuration of the file, parsed again only after a change.

        Raises:
            ConfigError: the file cannot be read, or has faults.
        """
        document = b""
        with suppress(OSError):  # The parser reports the error.
            document = self._config_path.read_bytes()
        if document != self._document:
            self._config, self._document = load_config(self._config_path), document
        return self._config

    def _report_exit(self, status: int | None) -> None:
        self._tell("exit" if status is None else f"exit {status}")

    def _ready(self) -> None:
        self._tell("ready")

    def _tell(self, message: str) -> None:
        self._line.send(message.encode()[:MAX_MESSAGE_BYTES])

    def _heard(self) -> None:
        """Wait for the next message of the supervisor, and obey."""
        if not self._line.recv(MAX_MESSAGE_BYTES):
            os._exit(1)  # An end like that of a kill: the memory stays as it is.
        signal.raise_signal(signal.SIGHUP)  # "learn"

    def _load(self, config: Config) -> "LoadedModel":
        from kvrs_engine.engine.instance import LoadedModel

        secret, *_ = read_secrets(config.security, os.environ)
        loaded = LoadedModel.load(config, self._name, secret)
        log.info("loaded", extra={"instance": self._name, "pid": os.getpid()})
        return loaded

    async def _serve_instance(
        self, config: Config, start: int, secrets: list[bytes], loaded: "LoadedModel | None"
    ) -> None:
        """Serve an instance, whose epochs are the numbers of its starts."""
        from kvrs_engine.engine.server import serve  # Loads torch.

        secret, *older = secrets
        asyncio.get_running_loop().add_reader(self._line, self._heard)
        await serve(
            config,
            self._name,
            start,
            secret,
            asyncio.Event(),
            self._ready,
            older=older,
            loaded=loaded,
            read=self.config,
        )

    async def _serve_stage(self, config: Config, secrets: list[bytes]) -> None:
        """Serve a stage host, which outlives the processes of the instance."""
        from kvrs_engine.engine.ranks.host import StageHost, find_stage  # Loads torch.

        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The file is read only at the start.
        secret, *older = secrets
        asyncio.get_running_loop().add_reader(self._line, self._heard)
        host = StageHost(config, *find_stage(config, self._name), secret, older)
        await host.serve(self._ready, asyncio.Event())

    async def _serve_agent(self, config: Config, node: NodeId, secrets: list[bytes]) -> None:
        """Serve an agent, whose epoch is stored beside its segments."""
        from kvrs.agent.server import serve

        secret, *older = secrets
        asyncio.get_running_loop().add_reader(self._line, self._heard)
        await serve(config, node, secret, asyncio.Event(), self._ready, older, read=self.config)

    def _serve_distserve(
        self, config: Config, node: NodeId, start: int, secrets: list[bytes]
    ) -> None:
        """Run a DistServe server by its command line; the server ends with this process."""
        ours = ["--kvrs-config", str(self._config_path), "--kvrs-node", node]
        ours += ["--epoch", str(start), "--end-with", str(os.getpid())]
        # The package distserve_patches stands beside this package, installed or not.
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            ENV_NAME: b"\n".join(secrets).decode(),
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

            def listen() -> None:
                while True:
                    self._heard()

            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The file is read only at the start.
            threading.Thread(target=listen, name="line", daemon=True).start()
            last = ""
            for line in server.stdout:
                if line == "ready\n":
                    self._ready()
                else:
                    print(line, end="", file=sys.stderr, flush=True)
                    last = line.strip()
        if server.returncode == USER_ERRED:
            raise ConfigError(last)
        self._report_exit(server.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvrs_lab.cluster.hosted", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", type=InstanceId)
    parser.add_argument("--line", type=int, required=True)
    parser.add_argument("--parent", type=int)
    given = parser.parse_args()
    os.set_inheritable(given.line, False)  # A child must not keep the line open.

    def run(line: socket.socket, name: str) -> NoReturn:
        status = 1
        try:
            hosted = Hosted(given.config, InstanceId(name), line)
            try:
                hosted.serve()
                status = 0
            except KvrsError as error:
                print(error, file=sys.stderr)
                hosted.report_fault(error)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    line = socket.socket(fileno=given.line)
    if given.parent is None:
        run(line, given.name)
    collect_nothing_yet()
    # Imports for forked processes.
    import kvrs_engine.engine.ranks.host
    import kvrs_engine.engine.ranks.rank
    import kvrs_engine.engine.server  # noqa: F401

    tend(given.parent, line, run)


if __name__ == "__main__":
    main()
