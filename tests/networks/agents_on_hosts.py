"""`kvrs agent` processes, each on a host of its own, and their states of each other."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Self

import yaml

from kvrs.config.file import ENV_NAME
from kvrs_testkit.forked import ForkedProcess
from kvrs_testkit.networks import DESK, Network
from tests.networks.members import Members, Watch

PORT, PAGE_PORT, GOSSIP_PORT = 7001, 7002, 7946
PATIENCE_S = 60.0
SECRET = "a secret of the tests, long enough"


class AgentsOnHosts(Members):
    """One agent per name, with gossip and no instances."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.network = Network(*self.names)

    def __enter__(self) -> Self:
        self.network.__enter__()
        try:
            super().__enter__()
            self._config = self.directory / "config.yaml"
            self._config.write_text(yaml.safe_dump(self._document(self.directory)))
        except BaseException:
            self.network.__exit__()
            raise
        self.watch = Watch(self)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            self.network.__exit__(*error)

    def _document(self, directory: Path) -> dict[str, Any]:
        return {
            "proxy": {"gossip_host": self.network.addresses[DESK]},
            "cluster": {
                "nodes": [self._node(number, name) for number, name in enumerate(self.names)]
            },
            "gossip": {"enabled": True},
            "backup": {"directory": str(directory)},
        }

    def _node(self, number: int, name: str) -> dict[str, Any]:
        host = self.network.addresses[name]
        # No instance runs: the tests are about the agents.
        instance = {
            "id": f"i-{name}",
            "role": "decode" if number else "prefill",
            "host": host,
            "port": 8001,
            "page_port": 9001,
        }
        agent = {"host": host, "port": PORT, "page_port": PAGE_PORT, "gossip_port": GOSSIP_PORT}
        return {"id": name, "instances": [instance], "agent": agent}

    def begun(self, name: str, log: IO[bytes]) -> ForkedProcess:
        return ForkedProcess(
            *("kvrs.agent", "--config", str(self._config), "--node", name),
            environment=os.environ | {ENV_NAME: SECRET},
            stdout=log,
            stderr=log,
            network=self.network.path(name),
        )

    def start_all(self) -> None:
        for name in self.names:
            self.start(name)
        self.wait_ready()
        self.settle()

    def settle(self) -> None:
        """Wait until each of them has all of them alive."""
        self.watch.settle(self.names)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition on the events in their logs."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_s, self.statuses()
            self.watch.look()
            time.sleep(0.02)

    def hold(self, by: Iterable[str], about: Iterable[str], status: str) -> bool:
        """True if each of `by` has each of `about` in this status."""
        about = list(about)
        return all(
            self.statuses().get((one, other)) == status
            for one in by
            for other in about
            if one != other
        )

    def statuses(self) -> dict[tuple[str, str], str]:
        return {key: noticed.status for key, noticed in self.watch.held.items()}

    def deaths_within(self, seconds: float) -> list[tuple[str, str]]:
        """Deaths declared in the coming seconds: (suspector, dead member)."""
        self.watch.look()
        before = len(self.watch.deaths)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.watch.look()
            time.sleep(0.1)
        return [(death.by, death.member) for death in self.watch.deaths[before:]]

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.watch.forget(name)
