"""Member processes of one system, and the member changes in their logs."""

import base64
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from kvrs.cluster.ports import resolve_ports
from kvrs.config.file import ENV_NAME, dump_config, parse_config

START_TIMEOUT_S = 60.0
_LINE = re.compile(r"^(\S+ \S+) \w+ \S+ member changed member=(\S+) status=(\S+) epoch=(\d+)")


@dataclass(frozen=True, slots=True)
class Noticed:
    at_s: float  # Wall clock, which all processes of this machine share.
    by: str
    member: str
    status: str
    epoch: int


class Members(ABC):
    """Processes under `names`; ended with the block."""

    def __init__(self, count: int) -> None:
        self.names = [f"n{number}" for number in range(count)]
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._read: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        self.directory = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvrs-gossip-"))
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self._stack.close()

    @abstractmethod
    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """And what is added to the environment."""

    def start(self, name: str) -> None:
        arguments, environment = self.command(name)
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                arguments, stdout=log, stderr=log, env=os.environ | environment
            )

    def wait_ready(self) -> None:
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not all(b"ready" in self._log(name).read_bytes().splitlines() for name in self.names):
            for name, process in self._running.items():
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise RuntimeError(
                        f"{name} did not "
                        f"start\n{self._log(name).read_text(errors='replace')[-2000:]}"
                    )
            time.sleep(0.05)

    def signal(self, name: str, number: signal.Signals) -> float:
        """When it was sent."""
        at_s = time.time()
        self._running[name].send_signal(number)
        if number is signal.SIGKILL:
            self._running[name].wait()
        return at_s

    def noticed(self) -> Iterator[Noticed]:
        """Member changes in all logs since the last call."""
        for name in self.names:
            with self._log(name).open("rb") as log:
                log.seek(self._read.get(name, 0))
                *lines, rest = log.read().split(b"\n")
                self._read[name] = log.tell() - len(rest)
            for line in lines:
                if (found := _LINE.match(line.decode(errors="replace"))) is not None:
                    when, member, status, epoch = found.groups()
                    at_s = datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f").timestamp()
                    yield Noticed(at_s, name, member, status, int(epoch))

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


class KvrsAgents(Members):
    """`kvrs agent` as users run it, with gossip and no instances."""

    def __init__(self, count: int, profile: str) -> None:
        super().__init__(count)
        self._profile = profile

    def __enter__(self) -> Self:
        super().__enter__()
        roles = ["prefill", *["decode"] * (len(self.names) - 1)]
        named = zip(self.names, roles, strict=True)
        nodes = [
            {"id": name, "instances": [{"id": f"i-{name}", "role": role}]} for name, role in named
        ]
        document = {
            "proxy": {"port": 0, "admin_port": 0},
            "cluster": {"nodes": nodes},
            "gossip": {"enabled": True, "profile": self._profile},
            "backup": {"directory": str(self.directory)},
        }
        self._config = self.directory / "config.yaml"
        self._config.write_text(dump_config(resolve_ports(parse_config(document))))
        self._secret = os.urandom(32).hex()
        return self

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        arguments = [
            sys.executable,
            "-m",
            "kvrs.agent",
            "--config",
            str(self._config),
            "--node",
            name,
        ]
        return arguments, {ENV_NAME: self._secret}


class Kinship(Members):
    """The package's own defaults for a LAN."""

    def __init__(self, count: int, python: str) -> None:
        super().__init__(count)
        self._python = python
        instances = [{"id": name, "role": "both"} for name in self.names]
        document = {
            "cluster": {"nodes": [{"id": "n", "instances": instances}]},
            "proxy": {"port": 0, "admin_port": 0},
        }
        found = resolve_ports(parse_config(document)).cluster.instances()
        self._ports = {str(instance.id): str(instance.port) for _, instance in found}
        self._key = base64.b64encode(os.urandom(32)).decode()

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        script = str(Path(__file__).with_name("kinship_member.py"))
        seeds = [port for other, port in self._ports.items() if other != name]
        return [self._python, script, name, self._ports[name], self._key, *seeds], {}
