r"""Virtual hosts on one machine: network namespaces around a switch, whose links a test can slow
down, cut or make lossy.

    n0 [eth0 10.77.0.1]---\
    n1 [eth0 10.77.0.2]----[switch: bridge br0]---[eth0 10.77.0.254] desk: the test itself
    n2 [eth0 10.77.0.3]---/

The machine's own network is not changed. Names have the process id of the test; networks of a
killed test are removed by the next one. The kernel may lack netem, so the relay
(`tests/networks/page_relay.py`) delays, reorders and damages packets.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Self

PREFIX = "kvrs"
DESK = "desk"
_SWITCH = "switch"
_DESK_NUMBER = 254
_CLONE_NEWNET = 0x40000000
_END_S = 5.0
_serial = count()


class NetworkError(Exception):
    """A command that makes or changes a network failed."""


def missing() -> str | None:
    """The reason why no network can be made here; None: one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if lacking := [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(lacking)}"
    try:
        with Network("n0", "n1") as network:
            network.throttle("n0", 1e6)
            network.lose(1, "n0")
            network.block("n0", "n1")
            network.redirect("n0", 7, 17)
    except NetworkError as error:
        return f"the kernel lacks a feature: {error}"
    return None


def isolate() -> None:
    """Move this thread, and all processes that it starts, into a network that has loopback only."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise NetworkError(f"unshare: {os.strerror(ctypes.get_errno())}")
    _command("ip", "link", "set", "lo", "up")


def slow_loopback(bytes_per_s: float, fast_ports: Sequence[int]) -> None:
    """Limit the rate of loopback, in a network that `isolate` has made, but not to and from
    these ports.
    """
    on_root = ("dev", "lo", "parent", "1:")
    rate = ("rate", f"{int(8 * bytes_per_s)}bit", "burst", "131072", "quantum", "65536")
    _command("tc", "qdisc", "replace", "dev", "lo", "root", "handle", "1:", "htb", "default", "2")
    unlimited = ("rate", "10gbit", "quantum", "65536")
    _command("tc", "class", "replace", *on_root, "classid", "1:1", "htb", *unlimited)
    _command("tc", "class", "replace", *on_root, "classid", "1:2", "htb", *rate)
    for port in fast_ports:
        for end in ("sport", "dport"):
            match = ("u32", "match", "ip", end, str(port), "0xffff", "flowid", "1:1")
            _command("tc", "filter", "add", *on_root, "protocol", "ip", "prio", "1", *match)


class Network:
    """A network from `with` to its end. While it is open, sockets of this thread are at the
    desk.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)} | {
            DESK: f"10.77.0.{_DESK_NUMBER}"
        }
        self._run = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
        self._blocked: set[tuple[str, str, str]] = set()
        self._loss: dict[str, int] = {}
        self._redirects: dict[str, list[tuple[int, int]]] = {}

    def __enter__(self) -> Self:
        sweep()
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self._make()
            self.enter(DESK)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        _setns(self._home)
        os.close(self._home)
        for name in _namespaces():
            if name.startswith(f"{self._run}-"):
                _remove(name)

    def _make(self) -> None:
        switch = self.namespace(_SWITCH)
        _command("ip", "netns", "add", switch)
        _command("ip", "-n", switch, "link", "add", "name", "br0", "type", "bridge")
        _command("ip", "-n", switch, "link", "set", "br0", "up")
        for name, address in self.addresses.items():
            host = self.namespace(name)
            _command("ip", "netns", "add", host)
            _command("ip", "-n", host, "link", "set", "lo", "up")
            _command(
                "ip",
                "-n",
                switch,
                "link",
                "add",
                "name",
                name,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                host,
            )
            _command("ip", "-n", switch, "link", "set", name, "master", "br0", "up")
            _command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            _command("ip", "-n", host, "link", "set", "eth0", "up")

    def namespace(self, name: str) -> str:
        return f"{self._run}-{name}"

    def path(self, name: str) -> Path:
        """The file of its namespace."""
        return Path("/run/netns") / self.namespace(name)

    def enter(self, name: str) -> None:
        """From now on this thread opens its sockets at that host."""
        inside = os.open(self.path(name), os.O_RDONLY)
        try:
            _setns(inside)
        finally:
            os.close(inside)

    @contextlib.contextmanager
    def at(self, name: str) -> Iterator[str]:
        """Open sockets at that host in this block; yields its address."""
        self.enter(name)
        try:
            yield self.addresses[name]
        finally:
            self.enter(DESK)

    def command_at(self, name: str, *command: str) -> list[str]:
        """The command line that runs a command at a host, without a shell, so that signals
        reach it.
        """
        return ["ip", "netns", "exec", self.namespace(name), *command]

    # Faults of links. The desk is not affected, unless it is named.

    def block(self, source: str, target: str, what: str = "") -> None:
        """Drop packets in this direction, silently: all, or those that match `what` (nft)."""
        self._blocked.add((source, target, what))
        self._filter(target)

    def sever(self, ones: Sequence[str], others: Sequence[str]) -> None:
        """Drop all packets between these and those hosts."""
        for one in ones:
            for other in others:
                self.block(one, other)
                self.block(other, one)

    def lose(self, percent: int, *hosts: str) -> None:
        """Drop a random percentage of the packets that come to these hosts."""
        for host in hosts:
            self._loss[host] = percent
            self._filter(host)

    def heal(self) -> None:
        self._blocked.clear()
        self._loss.clear()
        for name in self.addresses:
            self._filter(name)

    def redirect(self, host: str, port: int, to_port: int) -> None:
        """Redirect TCP to this port to another one. Open connections stay as they are."""
        self._redirects.setdefault(host, []).append((port, to_port))
        self._filter(host)

    def _filter(self, host: str) -> None:
        rules = [
            f"ip saddr {self.addresses[source]} {what} drop"
            for source, target, what in sorted(self._blocked)
            if target == host
        ]
        if percent := self._loss.get(host):
            rules.append(
                f'iifname "eth0" ip saddr != {self.addresses[DESK]} numgen random mod '
                f"100 < {percent} drop"
            )
        nat = [
            f'iifname "eth0" tcp dport {port} redirect to :{to}'
            for port, to in self._redirects.get(host, ())
        ]
        chains = [_chain("input", "filter hook input priority 0", rules)]
        if nat:
            chains.append(_chain("pre", "nat hook prerouting priority -100", nat))
        # In one transaction: at no time are there no rules.
        text = "table ip kvrs\ndelete table ip kvrs\ntable ip kvrs { " + "\n".join(chains) + "\n}"
        _command(*self.command_at(host, "nft", "-f", "-"), text=text)

    def throttle(self, host: str, bytes_per_s: float, burst_bytes: int = 4096) -> None:
        """Limit the rate at which this host sends; the queue holds a fifth of a second."""
        rate = ("rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst_bytes), "latency", "200ms")
        _command(
            "tc",
            "-n",
            self.namespace(host),
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            "tbf",
            *rate,
        )

    def sent_bytes(self, host: str) -> int:
        """By the counter of its interface."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return int(_command(*self.command_at(host, "cat", path)))


def sweep() -> None:
    """Remove networks of test processes that have ended."""
    for name in _namespaces():
        prefix, *rest = name.split("-")
        if (
            prefix == PREFIX
            and len(rest) > 1
            and rest[0].isdigit()
            and not Path(f"/proc/{rest[0]}").exists()
        ):
            _remove(name)


def _remove(namespace: str) -> None:
    """Remove a namespace, and end the processes in it."""
    give_up_s = time.monotonic() + _END_S
    while (
        pids := _command("ip", "netns", "pids", namespace).split()
    ) and time.monotonic() < give_up_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.02)
    # Another test may remove it at the same time.
    with contextlib.suppress(NetworkError):
        _command("ip", "netns", "del", namespace)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _command("ip", "netns", "list").splitlines() if line]


def _chain(name: str, kind: str, rules: list[str]) -> str:
    return "\n".join([f"chain {name} {{", f"type {kind};", *rules, "}"])


def _command(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _setns(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise NetworkError(f"setns: {os.strerror(ctypes.get_errno())}")
