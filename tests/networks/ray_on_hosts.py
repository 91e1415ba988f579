"""A Ray cluster, each machine of it a host with a network, /tmp and shared memory of its own."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvrs_testkit.networks import Network

PORT = 6379
_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 120.0
# Ray notices a machine that is gone within some seconds.
_HEALTH = (
    '{"health_check_initial_delay_ms": 5000, "health_check_period_ms": 1000, '
    '"health_check_timeout_ms": 2000, "health_check_failure_threshold": 8}'
)


class RayOnHosts:
    """`resources`: of each host, as JSON; the first one is the head. From `with` to its end."""

    def __init__(self, directory: Path, resources: dict[str, str]) -> None:
        self.network = Network(*resources)
        self._directory = directory
        self._resources = resources
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
            "TMPDIR": "/tmp",
        }

    @property
    def address(self) -> str:
        return f"{self.network.addresses[next(iter(self._resources))]}:{PORT}"

    def __enter__(self) -> Self:
        self.network.__enter__()
        try:
            for host in self._resources:
                self._hold(host)
                self.start(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._resources:
            self.kill(host)
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()
        self.network.__exit__()

    def files(self, host: str) -> Path:
        """The directory that is /tmp there."""
        return self._directory / host

    def at(self, host: str, *command: str) -> list[str]:
        """The command line that runs a command at a host."""
        return ["nsenter", "-t", str(self._holders[host].pid), "-m", "-n", *command]

    def spawn(self, host: str, log: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                self.at(host, *command), env=self._environment, stdout=output, stderr=output
            )

    def start(self, host: str) -> None:
        """Start Ray there, or start it again."""
        is_head = host == next(iter(self._resources))
        join = (
            ["--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={_HEALTH}"]
            if is_head
            else [f"--address={self.address}"]
        )
        own = [
            f"--node-ip-address={self.network.addresses[host]}",
            f"--resources={self._resources[host]}",
            "--num-cpus=1",
            f"--object-store-memory={80 << 20}",
        ]
        ray = str(Path(sys.executable).parent / "ray")
        done = subprocess.run(
            self.at(host, ray, "start", *join, *own, "--disable-usage-stats"),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def kill(self, host: str) -> None:
        """All processes there, at once."""
        if host in self._holders:
            spared = {self._holders[host].pid}
            for pid in {*self.pids(host)} - spared:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def pids(self, host: str) -> list[int]:
        found = subprocess.run(
            ["ip", "netns", "pids", self.network.namespace(host)],
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(pid) for pid in found.stdout.split()]

    def _hold(self, host: str) -> None:
        """Make the mounts of a host; they stay while this process runs."""
        self.files(host).mkdir(parents=True)
        mounts = f"mount --rbind '{self.files(host)}' /tmp && mount -t tmpfs tmpfs /dev/shm"
        if _ROOT.is_relative_to("/tmp"):  # Where the code is, it is at every host.
            there = self.files(host) / _ROOT.relative_to("/tmp")
            mounts = f"mkdir -p '{there}' && mount --bind '{_ROOT}' '{there}' && {mounts}"
        holder = subprocess.Popen(
            self.network.command_at(
                host, "unshare", "-m", "sh", "-c", f"{mounts} && echo made && exec sleep 3600"
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._holders[host] = holder
        assert holder.stdout is not None
        assert holder.stdout.readline() == "made\n"
