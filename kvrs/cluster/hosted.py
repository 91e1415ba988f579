"""Runs one process of a cluster for its keeper: `python -m kvrs.cluster.hosted --config FILE --name
ID --line FD`; an instance of several ranks, the host of a stage of one, a server of DistServe, or
the agent of a node.

What it hears and says on its line is in `keeper.py`. Instances of one process are forked by a
nursery instead (`kvrs.engine.nursery`).
"""

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from kvrs.cluster.processes import Kind, Process, processes_of
from kvrs.config.file import ENV_NAME, Config, load_config, read_secrets
from kvrs.errors import ConfigError, KvrsError, RanksLostError
from kvrs.garbage import collect_nothing_yet
from kvrs.ids import InstanceId
from kvrs.logs import log_to_stderr

# The exit status of a process with wrong options or configuration.
USER_ERRED = 2
_MAX_MESSAGE_BYTES = 1 << 16


class _Hosted:
    """`serve` runs until the process is to end."""

    def __init__(self, config_path: Path, process: Process, line: socket.socket) -> None:
        self._config_path, self._process, self._line = config_path, process, line
        word, _, number = line.recv(_MAX_MESSAGE_BYTES).decode().partition(" ")
        if word != "start":
            raise KvrsError("the keeper of this process has ended")
        self._start = int(number)

    def serve(self) -> None:
        """Raises KvrsError: it cannot serve."""
        config = self._read()
        log_to_stderr(**config.logs.options)
        secrets = read_secrets(config.security, os.environ)
        match self._process.kind:
            case Kind.INSTANCE:
                collect_nothing_yet()
                asyncio.run(self._serve_instance(config, secrets))
            case Kind.STAGE:
                collect_nothing_yet()
                asyncio.run(self._serve_stage(config, secrets))
            case Kind.AGENT:
                collect_nothing_yet()
                import uvloop

                uvloop.run(self._serve_agent(config, secrets))
            case Kind.SERVER:
                self._serve_distserve(config, secrets)

    def report_fault(self, fault: str) -> None:
        self._tell(f"fault {fault}")

    def report_exit(self, status: int | None) -> None:
        """Tell the status of the process whose end ends this one; None: it is not known."""
        self._tell("exit" if status is None else f"exit {status}")

    def _read(self) -> Config:
        return load_config(self._config_path)

    def _ready(self) -> None:
        self._tell("ready")

    def _tell(self, message: str) -> None:
        self._line.send(message.encode()[:_MAX_MESSAGE_BYTES])

    def _heard(self, stop: Callable[[], object]) -> None:
        """Obey the next message, which may be waited for."""
        word = self._line.recv(_MAX_MESSAGE_BYTES)
        if not word:
            os._exit(1)  # As if it had been killed: its memory stays as it is.
        if word == b"learn":
            signal.raise_signal(signal.SIGHUP)
        else:
            stop()

    async def _serve_instance(self, config: Config, secrets: list[bytes]) -> None:
        """Its epochs are the numbers of its starts."""
        from kvrs.engine.server import serve  # Loads torch.

        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._line, self._heard, stop.set)
        name, (secret, *older) = self._process.name, secrets
        await serve(
            config, name, self._start, secret, stop, self._ready, older=older, read=self._read
        )

    async def _serve_stage(self, config: Config, secrets: list[bytes]) -> None:
        """It ends with the process of the instance that it serves."""
        from kvrs.engine.ranks.host import StageHost, find_stage  # Loads torch.

        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It reads its file at its start only.
        stop, (secret, *older) = asyncio.Event(), secrets
        asyncio.get_running_loop().add_reader(self._line, self._heard, stop.set)
        host = StageHost(config, *find_stage(config, self._process.name), secret, older)
        await host.serve(self._ready, stop)

    async def _serve_agent(self, config: Config, secrets: list[bytes]) -> None:
        """Its epoch is stored beside its segments."""
        from kvrs.agent.server import serve

        # Cancelled rather than stopped: its successor adopts the checkpoints.
        node, (secret, *older) = self._process.node, secrets
        serving = asyncio.ensure_future(
            serve(config, node, secret, asyncio.Event(), self._ready, older, read=self._read)
        )
        asyncio.get_running_loop().add_reader(self._line, self._heard, serving.cancel)
        await asyncio.wait({serving})
        if not serving.cancelled():
            serving.result()

    def _serve_distserve(self, config: Config, secrets: list[bytes]) -> None:
        """A server of DistServe, with a user's command line; it ends with this process."""
        ours = ["--kvrs-config", str(self._config_path), "--kvrs-node", self._process.node]
        ours += ["--epoch", str(self._start), "--end-with", str(os.getpid())]
        # distserve_patches stands beside this package, installed or not.
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
                    self._heard(server.terminate)  # Its streams are recovered as after a death.

            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It reads its file at its start only.
            threading.Thread(target=listen, name="line", daemon=True).start()
            last = ""
            for line in server.stdout:
                if line == "ready\n":
                    self._ready()
                else:
                    print(line, end="", file=sys.stderr, flush=True)
                    last = line.strip()
        if server.returncode == USER_ERRED:
            raise ConfigError([last])
        self.report_exit(server.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvrs.cluster.hosted", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", type=InstanceId, required=True)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    os.set_inheritable(given.line, False)  # Open in a child, it would hide the end of this process.
    line, status = socket.socket(fileno=given.line), 1
    try:
        processes = processes_of(load_config(given.config))
        (process,) = (each for each in processes if each.name == given.name)
        hosted = _Hosted(given.config, process, line)
        try:
            hosted.serve()
            status = 0
        except KvrsError as error:
            print(error, file=sys.stderr)
            hosted.report_fault(str(error))
            if isinstance(error, RanksLostError):
                hosted.report_exit(error.status)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
