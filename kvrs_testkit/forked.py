"""Python modules as processes that one nursery of this process forks (`kvrs.engine.nursery`), as
`kvrs up` has its engines forked: the import of what an engine needs takes two seconds of a
processor, in every process that `python -m` runs.

    process = ForkedProcess("kvrs.engine", "--config", path, environment=os.environ, ...)
"""

import argparse
import atexit
import ctypes
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from kvrs.engine.nursery import Nursery, tend
from kvrs.garbage import collect_nothing_yet

_MAX_MESSAGE_BYTES = 1 << 18  # The environment is in it.
_CLONE_NEWNET = 0x40000000
_HAS_RANKS = "kvrs.engine.ranks.host"

_nursery = Nursery(["kvrs_testkit.forked"])
atexit.register(_nursery.close)


class _Order(msgspec.Struct):
    module: str
    arguments: list[str]
    environment: dict[str, str]


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        stdout: IO[Any],
        stderr: IO[Any],
        network: Path | None = None,
    ) -> None:
        """`network`: the namespace that it is in; None: that of this thread."""
        inside = os.open(network or "/proc/thread-self/ns/net", os.O_RDONLY)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                self._child = _nursery.fork(theirs, module.rpartition(".")[2])
            order = _Order(module, [*arguments], {**environment})
            files = [stdout.fileno(), stderr.fileno(), inside]
            socket.send_fds(ours, [msgspec.json.encode(order)], files)
        os.close(inside)
        self.args = [module, *arguments]
        self.pid = self._child.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(self._child.poll())

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired: it still runs."""
        if self.returncode is None and self._ended(self._child.wait(timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, has_ended: bool) -> int | None:
        if has_ended and self.returncode is None:
            assert self._child.status is not None
            self.returncode = self._child.status
            self._child.close()
        return self.returncode


def _run(line: socket.socket, name: str) -> NoReturn:
    status = 1
    try:
        message, (*outputs, network), _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, 3)
        line.close()
        for output, own in zip(outputs, (sys.stdout, sys.stderr), strict=True):
            os.dup2(output, own.fileno())
            os.close(output)
        _enter(network)
        order = msgspec.json.decode(message, type=_Order)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = [order.module, *order.arguments]
        if order.module == _HAS_RANKS:
            from kvrs.engine.ranks.processes import RANKS
            from kvrs.engine.ranks.rank import obey

            RANKS.begin_here(obey)  # As a host does that is supervised.
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _enter(network: int) -> None:
    """Enter a namespace, which needs no privilege where this process is in it already."""
    is_inside = os.fstat(network).st_ino == os.stat("/proc/self/ns/net").st_ino
    library = ctypes.CDLL(None, use_errno=True)
    if not is_inside and library.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    os.set_inheritable(given.line, False)
    collect_nothing_yet()
    # What forked processes need.
    import kvrs.agent.__main__
    import kvrs.cli
    import kvrs.engine.__main__
    import kvrs.engine.ranks.host
    import kvrs.engine.ranks.rank
    import kvrs.engine.server
    import kvrs.proxy.server  # noqa: F401

    tend(given.parent, socket.socket(fileno=given.line), _run)


if __name__ == "__main__":
    _main()
