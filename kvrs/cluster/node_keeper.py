"""The processes of one node of the configuration, kept on a machine of a Ray cluster.

It is an actor of Ray. The machine's own directories hold its files, and the secret is read there:
Ray carries the configuration, which has none, and no request, token or page.
"""

import contextlib
import os
import time
from pathlib import Path
from queue import SimpleQueue

from kvrs.cluster.exits import Exit
from kvrs.cluster.guard import PATIENCE_S, start_guard
from kvrs.cluster.keepers import Keepers, ProcessStatus
from kvrs.cluster.processes import processes_of
from kvrs.cluster.run_directory import RunDirectory
from kvrs.cluster.segments import make_segments, own_segments
from kvrs.config.file import Config, parse_config, read_secret
from kvrs.config.settings import parse_yaml
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.secrets import derive


class NodeKeeper:
    """One per node. Its calls come one after another; `next_exit` has a thread of its own."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._run = RunDirectory()
        self._exits: SimpleQueue[Exit | None] = SimpleQueue()
        self._keepers = Keepers(self._run, {"OMP_NUM_THREADS": "1"}, self._exits.put)
        self._segments: Path | None = None
        self._model: str | None = None

    def start(self, document: str, starts: int, secret_mark: str) -> str | None:
        """Start the node's processes; why not, or None. `starts`: how many there have been before,
        at any machine.
        """
        try:
            return self._start(parse_config(parse_yaml(document)), starts, secret_mark)
        except KvrsError as error:
            return str(error)

    def _start(self, config: Config, starts: int, secret_mark: str) -> str | None:
        own, directories = own_segments(config, self._run.path)
        # Beyond this process, which Ray ends with all its children.
        self._guard = start_guard(self._run.path, *directories, apart=True)
        if mark_of(read_secret(config.security, os.environ)) != secret_mark:
            return "the secret there is another one; allowed: the same at all machines"
        make_segments(directories)
        self._segments = next(iter(directories), None)
        if config.cluster.model is None:
            model, seed = self._run.path / "tiny-llama", str(config.cluster.engine.seed)
            status = self._run.spawn("tiny", "-m", "kvrs.engine.tiny", str(model), seed).wait()
            if status != 0:
                log = self._run.log_tail("tiny")
                return f"no model could be generated: status {status}\n{log}"
            self._model = str(model)
        self._keepers.learn(self._of_machine(config))
        processes = [each for each in processes_of(own) if each.node == self._node]
        self._keepers.start(processes, own, starts)
        return None

    def _of_machine(self, config: Config) -> Config:
        """With what is this machine's own."""
        if self._model is not None:
            cluster = config.cluster.model_copy(update={"model": self._model})
            config = config.model_copy(update={"cluster": cluster})
        if self._segments is not None:
            backup = config.backup.model_copy(update={"directory": str(self._segments)})
            config = config.model_copy(update={"backup": backup})
        return config

    def status(self) -> dict[InstanceId, ProcessStatus]:
        return self._keepers.status()

    def next_exit(self) -> Exit | None:
        """Wait for the end of a process of an instance; None: `stop` was called."""
        return self._exits.get()

    def log_tail(self, name: InstanceId) -> str:
        return self._run.log_tail(name)

    def end(self, name: InstanceId) -> None:
        """Have a process drain and end. It is started again."""
        self._keepers.end(name)

    def learn(self, document: str) -> None:
        """Have all processes read this configuration."""
        self._keepers.learn(self._of_machine(parse_config(parse_yaml(document))))

    def stop(self) -> None:
        """End all processes, and leave nothing behind."""
        self._exits.put(None)
        self._keepers.stop()
        assert self._guard.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._guard.stdin.close()
        self._guard.wait()  # Of the shell that has started it.
        give_up_s = time.monotonic() + PATIENCE_S
        while self._run.path.exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)


def mark_of(secret: bytes) -> str:
    """Equal for equal secrets, and tells nothing else of one."""
    return derive(secret, b"kvrs-ray")[:16].hex()
