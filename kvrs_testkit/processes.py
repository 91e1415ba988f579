"""Real engine, agent and proxy processes for tests and experiments: started from one configuration,
killed on purpose, ended at the end.

    with Processes(config) as processes:
        processes.start("p0", "d0", "agent-n0")
        processes.wait_ready("p0", "d0", "agent-n0")

Everything of one run lives in one private directory, and agents' segments in another; the guard of
`kvrs_lab.cluster` ends and removes what is left when this process is gone.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from kvrs.config.file import ENV_NAME, Config, dump_config
from kvrs.errors import KvrsError
from kvrs_lab.cluster.guard import start_guard
from kvrs_lab.cluster.ports import resolve_ports
from kvrs_lab.cluster.run_directory import segments_of, with_segments
from kvrs_testkit.forked import ForkedProcess

START_TIMEOUT_S = 120.0  # As all of these: without the time in which others had the CPUs.
STOP_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.05
_COUNT_S = 1.0  # Between looks at what a process that is waited for has run.


class ProcessFailedError(KvrsError):
    """A process ended, or was not ready in time; the message ends with its last log lines."""


def nodes_with_pairs(count: int = 2) -> list[dict[str, Any]]:
    """Nodes n0, n1 ... of a configuration, each with a prefill instance and a decode instance of
    its number: p0 and d0 on n0.
    """
    return [
        {
            "id": f"n{n}",
            "instances": [{"id": f"p{n}", "role": "prefill"}, {"id": f"d{n}", "role": "decode"}],
        }
        for n in range(count)
    ]


class Processes:
    """Instances and agents by id, each start in a higher epoch than the one before; and at most one
    proxy, as "proxy".
    """

    def __init__(self, config: Config) -> None:
        self.config = self._resolved(config)
        self.secret = secrets.token_hex(32).encode()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._starts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        # A short name: below it DistServe's Ray has sockets with long ones.
        self.directory = Path(tempfile.mkdtemp(prefix="kvrs-run-"))
        self._guard = start_guard(self.directory, segments_of(self.config, self.directory))
        self.config = with_segments(self.config, self.directory)
        # One thread per engine: several share the cores, and one order of additions is what makes
        # KV exact.
        self._environment = os.environ | {ENV_NAME: self.secret.decode(), "OMP_NUM_THREADS": "1"}
        cluster = self.config.cluster
        if cluster.model is None:
            model = str(self.directory / "tiny-llama")
            subprocess.run(
                [sys.executable, "-m", "kvrs_engine.engine.tiny", model, str(cluster.engine.seed)],
                check=True,
            )
            self.config = self.config.model_copy(
                update={"cluster": cluster.model_copy(update={"model": model})}
            )
        self._config_path = self._write("config", self.config)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            # Two different signals, because two of a kind may arrive as one: nothing drains.
            process.terminate()
            process.send_signal(signal.SIGINT)
        give_up_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up_s - time.monotonic()))
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        # Processes that were too slow have been killed by the guard.
        for process in self._running.values():
            process.wait()

    def start(self, *names: str) -> None:
        """Start these instances, hosts of stages and agents, or start them again after a kill;
        returns before they are ready.
        """
        nodes = {str(node.agent_id): node.id for node in self.config.cluster.nodes}
        hosts = {
            str(instance.stage_host_id(stage)): (instance.id, stage)
            for _, instance in self.config.cluster.instances()
            for stage in instance.remote_stages
        }
        for name in names:
            if (former := self._running.get(name)) is not None:
                former.wait()
            if name in hosts:
                instance, stage = hosts[name]
                self._spawn(
                    name,
                    "kvrs_engine.engine.ranks.host",
                    "--config",
                    str(self._config_path),
                    "--instance",
                    instance,
                    "--stage",
                    str(stage),
                )
                continue
            if name in nodes:
                # Its epoch is kept beside its segments.
                self._spawn(
                    name, "kvrs.agent", "--config", str(self._config_path), "--node", nodes[name]
                )
                continue
            epoch = str(self._starts[name] + 1)
            self._spawn(
                name,
                "kvrs_engine.engine",
                "--config",
                str(self._config_path),
                "--instance",
                name,
                "--epoch",
                epoch,
            )

    def start_proxy(self, config: Config | None = None, name: str = "proxy") -> None:
        """Start a proxy and wait until it can take a stream; another `config` may name other
        addresses of the instances.
        """
        config = self.config if config is None else config
        if (former := self._running.get(name)) is not None:
            former.wait()
        self._spawn(name, "kvrs", "proxy", "--config", str(self._write(name, config)))
        url = f"http://{config.proxy.host}:{config.proxy.port}/readyz"
        self._wait(name, lambda: _answers(url))

    def wait_ready(self, *names: str) -> None:
        """Wait until these take requests.

        Raises:
            ProcessFailedError: one ended, or took too long.
        """
        for name in names:
            self._wait(name, partial(says_ready, self._log(name)))

    def pid(self, name: str) -> int:
        return self._running[name].pid

    def kill(self, name: str) -> None:
        self._running[name].send_signal(signal.SIGKILL)

    def _spawn(
        self, name: str, *arguments: str, python: str = sys.executable, **environment: str
    ) -> None:
        self._starts[name] += 1
        with self._log(name).open("wb") as log:
            command = self._placed(name, [python, "-m", *arguments])
            self._running[name] = self._begun(name, command, log, self._environment | environment)

    def _begun(
        self, name: str, command: list[str], log: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def _resolved(self, config: Config) -> Config:
        """With all ports given."""
        return resolve_ports(config)

    def _placed(self, name: str, command: list[str]) -> list[str]:
        """The same command, where the process is to run."""
        return command

    def _wait(
        self, name: str, ready: Callable[[], bool], timeout_s: float = START_TIMEOUT_S
    ) -> None:
        process, waited_s, looked_s = self._running[name], 0.0, time.monotonic()
        threads: dict[int, Spent] = {}
        while not ready():
            if (now_s := time.monotonic()) - looked_s >= _COUNT_S:
                before, threads = threads, threads_of(process.pid, *below(process.pid))
                waited_s += own_s(now_s - looked_s, before, threads)
                looked_s = now_s
            status = process.poll()
            if status is not None or waited_s > timeout_s:
                how = (
                    f"was not ready after {timeout_s:.0f} s of its own"
                    if status is None
                    else f"ended with status {status}"
                )
                last = self._log(name).read_text(errors="replace").splitlines()[-20:]
                raise ProcessFailedError("\n".join([f"{name} {how}", *last]))
            time.sleep(_LOOK_AGAIN_S)

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}-{self._starts[name]}.log"

    def _write(self, name: str, config: Config) -> Path:
        path = self.directory / f"{name}.yaml"
        path.write_text(dump_config(config))
        return path


class ForkedProcesses(Processes):
    """The same, forked by a nursery of this process: starts that are not measured are quicker."""

    def _begun(
        self, name: str, command: list[str], log: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        _, _, module, *arguments = command
        return ForkedProcess(
            module,
            *arguments,
            environment=environment,
            stdout=log,
            stderr=log,
            network=self._network(name),
        )

    def _network(self, name: str) -> Path | None:
        """The namespace of the network that it is in; None: that of this thread."""
        return None


class Spent(NamedTuple):
    """The time that a thread has spent since it began, in seconds."""

    running_s: float
    queued_s: float  # It could run, and others had the CPUs.


def threads_of(*pids: int) -> dict[int, Spent]:
    """By id of the thread, of all threads of these processes (`/proc/PID/task/TID/schedstat`)."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            # It may end meanwhile.
            with contextlib.suppress(OSError):
                running_ns, queued_ns, _ = map(int, path.read_text().split())
                found[int(path.parent.name)] = Spent(running_ns * 1e-9, queued_ns * 1e-9)
    return found


def own_s(passed_s: float, before: Mapping[int, Spent], after: Mapping[int, Spent]) -> float:
    """How much of a time counts for these threads: all but that in which they were queued for a
    CPU, and no smaller share than they got of the CPU time that they wanted.
    """
    running_s = queued_s = 0.0
    for thread, spent in after.items():
        then = before.get(thread, Spent(0.0, 0.0))
        running_s += spent.running_s - then.running_s
        queued_s += spent.queued_s - then.queued_s
    if queued_s <= 0.0:
        return passed_s
    return max(passed_s - queued_s, passed_s * running_s / (running_s + queued_s))


def below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    # Threads and child processes may end meanwhile.
    with contextlib.suppress(OSError):
        for children in list(Path(f"/proc/{pid}/task").glob("*/children")):
            for child in map(int, children.read_text().split()):
                yield child
                yield from below(child)


def says_ready(log: Path) -> bool:
    return b"ready" in log.read_bytes().splitlines()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):  # noqa: S310 - our own URL
            return True
    except OSError:  # Refused, silent, or not ready yet by its status.
        return False


@contextlib.contextmanager
def spinning(count: int) -> Iterator[None]:
    """Processes beside the rest that want a processor each."""
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def cpu_ticks() -> tuple[int, int]:
    """Idle and all CPU time of this machine since it started."""
    counts = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return counts[3], sum(counts)


def share_used(before: tuple[int, int], after: tuple[int, int]) -> float:
    return 1 - (after[0] - before[0]) / max(1, after[1] - before[1])
