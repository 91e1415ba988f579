"""Python modules as processes that one nursery of this process forks
(`kvrs_engine.engine.nursery`), as `kvrs lab up` has its engines forked: what a module imports takes
a processor up to three seconds, in every process that `python -m` runs.

    process = ForkedProcess("kvrs_engine.engine", "--config", path, environment=os.environ, ...)

    with starts_forked(), Cluster(config, print) as cluster:  # Its processes are forked, too.
"""

import argparse
import atexit
import ctypes
import fcntl
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import msgspec

from kvrs.process.memory import collect_nothing_yet
from kvrs_engine.engine.nursery import Nursery, tend

_MAX_MESSAGE_BYTES = 1 << 18  # The environment is in it.
_MAX_FILES = 16
_CLONE_NEWNET = 0x40000000
_PACKAGES = ("kvrs", "kvrs_engine", "kvrs_lab")
_HAS_RANKS = "kvrs_engine.engine.ranks.host"
_SET_DEATH_SIGNAL = 1  # Of prctl(2).
# A process that is forked has the mask of its starter before one of them can end it.
_ENDING_AT_FIRST = (signal.SIGHUP, signal.SIGUSR1)
_library = ctypes.CDLL(None, use_errno=True)

_nursery = Nursery(["kvrs_testkit.forked"])
atexit.register(_nursery.close)


class _Order(msgspec.Struct):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]  # The numbers that the process has its descriptors under.
    blocked: list[int]  # Signals.
    leads_group: bool
    leads_session: bool
    dies_with_parent: bool
    forks: bool  # What it starts is forked, too.


class ForkingPopen(subprocess.Popen[Any]):
    """A process that is forked if the command is this Python with `-m` and a module of kvrs; any
    other is started as it is.
    """

    _namespace: Path | None = None
    _dies_with_parent = _forks = False

    def _module_in(self, command: Any) -> str | None:
        match command:
            case [sys.executable, "-m", str(module), *_] if module.partition(".")[0] in _PACKAGES:
                return module
        return None

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Mapping[str, str] | None,
        *others: Any,
    ) -> None:
        module = self._module_in(args)
        if module is None or preexec_fn is not None:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)
            super()._execute_child(*given)  # type: ignore[misc]
            return
        _, _, _, *pipes, _, _, _, _, _, is_session, group = others
        stdin, _, _, stdout, _, stderr = pipes
        sys.audit("subprocess.Popen", args[0], args, cwd, env)
        order = _Order(
            module,
            [*map(os.fspath, args[3:])],
            {**(os.environ if env is None else env)},
            os.path.abspath(cwd or os.curdir),
            [0, 1, 2, *pass_fds],
            [*signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            leads_group=group == 0,
            leads_session=is_session,
            dies_with_parent=self._dies_with_parent,
            forks=self._forks,
        )
        files = [own if own >= 0 else n for n, own in enumerate((stdin, stdout, stderr))]
        try:
            self.pid = _forked(order, [*files, *pass_fds], self._namespace)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


class _WithForkedChildren(ForkingPopen):
    _forks = True


class ForkedProcess(ForkingPopen):
    """Any module; it is killed when this process ends."""

    _dies_with_parent = True

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
        self.arguments, self._namespace = arguments, network
        command = [sys.executable, "-m", module, *arguments]
        super().__init__(command, env=environment, stdout=stdout, stderr=stderr)

    def _module_in(self, command: Any) -> str:
        return str(command[2])


@contextmanager
def starts_forked(*, with_children: bool = False) -> Iterator[None]:
    """Modules of kvrs that this process starts meanwhile are forked. `with_children`: those that
    they start, too.
    """
    former = subprocess.Popen
    subprocess.Popen = _WithForkedChildren if with_children else ForkingPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = former  # type: ignore[misc]


def _forked(order: _Order, files: Sequence[int], namespace: Path | None) -> int:
    """The id of a process that carries the order out: a child of this one."""
    inside = os.open(namespace or "/proc/thread-self/ns/net", os.O_RDONLY)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with ours:
            with theirs:
                child = _nursery.fork(theirs, order.module.rpartition(".")[2])
            os.close(child._handle)  # `subprocess` waits for it by its id.
            socket.send_fds(ours, [msgspec.json.encode(order)], [inside, *files])
    finally:
        os.close(inside)
    return child.pid


def _run(line: socket.socket, name: str) -> NoReturn:
    status = 1
    try:
        message, (network, *files), _, _ = socket.recv_fds(line, _MAX_MESSAGE_BYTES, _MAX_FILES)
        line.close()
        order = msgspec.json.decode(message, type=_Order)
        signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)
        if not order.dies_with_parent:
            _library.prctl(_SET_DEATH_SIGNAL, 0, 0, 0, 0)  # As a nursery has set it.
        if order.leads_session:
            os.setsid()
        elif order.leads_group:
            os.setpgid(0, 0)
        _enter(network)
        _place(files, order.files)
        os.chdir(order.directory)
        os.environ.clear()
        os.environ.update(order.environment)
        sys.argv = [order.module, *order.arguments]
        if order.module == _HAS_RANKS:
            from kvrs_engine.engine.ranks.processes import RANKS
            from kvrs_engine.engine.ranks.rank import obey

            RANKS.begin_here(obey)  # As a host does that is supervised.
        if order.forks:
            _fork_from_here()
        forget(order.module)
        runpy.run_module(order.module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for output in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # A module may have closed it.
                output.flush()
        os._exit(status)


def forget(module: str) -> None:
    """`runpy` warns of a module that is imported already, which `-m` would not find so."""
    for name in (module, f"{module}.__main__"):
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)


def _fork_from_here() -> None:
    """Fork what this process starts, by a nursery that is a copy of it as it is now."""
    global _nursery
    _nursery = Nursery([])
    own = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_AT_FIRST)
    _nursery.begin_here(_run)
    signal.pthread_sigmask(signal.SIG_SETMASK, own)
    subprocess.Popen = ForkingPopen  # type: ignore[misc]


def _place(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, which others of them may have."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, above) for each in files]
    for each in files:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def _enter(network: int) -> None:
    """Enter a namespace, which needs no privilege where this process is in it already."""
    is_inside = os.fstat(network).st_ino == os.stat("/proc/self/ns/net").st_ino
    if not is_inside and _library.setns(network, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--line", type=int, required=True)
    given = parser.parse_args()
    os.set_inheritable(given.line, False)
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_AT_FIRST)
    collect_nothing_yet()
    # What forked processes need.
    import kvrs.agent.__main__
    import kvrs.cli
    import kvrs.proxy.server  # noqa: F401
    import kvrs_engine.engine.__main__
    import kvrs_engine.engine.ranks.host
    import kvrs_engine.engine.ranks.rank
    import kvrs_engine.engine.server
    import kvrs_engine.engine.tiny  # noqa: F401
    import kvrs_lab.cli
    import kvrs_lab.cluster.hosted
    import kvrs_lab.cluster.upkeep  # noqa: F401

    tend(given.parent, socket.socket(fileno=given.line), _run)


if __name__ == "__main__":
    _main()
