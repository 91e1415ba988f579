"""Supervision of several workers as one proxy. The workers share the clients' port (SO_REUSEPORT);
each is a process, and is restarted when it ends.

The supervisor serves nothing. It keeps its workers' ports bound, forwards signals to them, and
holds the other end of their standard input, whose closing ends a worker.
"""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import msgspec

from kvrs.config.file import Config
from kvrs.config.origin import WorkerPlan
from kvrs.errors import ConfigError

log = logging.getLogger(__name__)

_FREED_WITHIN_S = 3.0  # Longest time until the workers of a killed supervisor have ended.
_LOOK_AGAIN_S = 0.05
# First pause in seconds before the restart of a worker that ended within _SOON_S; each further
# pause is twice as long.
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0
_SOON_S = 10.0
# Signals passed on to workers that would end a new worker, which has no handlers for them yet.
_PASSED_ON = frozenset((signal.SIGHUP, signal.SIGUSR1))


def check_shared_ports(config: Config) -> None:
    """Check that this system supports several workers. Raises ConfigError: it does not, and several
    are configured.
    """
    if config.proxy.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            f"proxy.workers: got {config.proxy.workers}, and this system has no SO_REUSEPORT, "
            f"by which they share a port; allowed: 1"
        )


def supervise(config: Config, command: Sequence[str]) -> int:
    """Run all workers until SIGTERM or SIGINT has ended them, or one cannot start; return the exit
    status. `command` starts a worker, with the worker's plan in JSON as one more argument.
    """
    check_shared_ports(config)
    with ExitStack() as kept:
        return asyncio.run(_Workers(config.proxy.names, command, _plans(config, kept)).run())


class Supervisor:
    """The process that started this worker, as the worker sees it."""

    def __init__(self) -> None:
        self._pid = os.getppid()

    def end_with_it(self) -> None:
        """End this worker at once when the supervisor ends: another supervisor may be starting
        workers at the same ports.
        """
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), os._exit, 1)

    def reload_all(self) -> None:
        """Tell all workers of this proxy to reload their configuration."""
        if os.getppid() == self._pid:
            os.kill(self._pid, signal.SIGHUP)


class _Workers:
    def __init__(
        self, names: Sequence[str], command: Sequence[str], plans: Sequence[WorkerPlan]
    ) -> None:
        self._names = names
        self._command = command
        self._plans = plans
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._starting = asyncio.Lock()
        self._ending = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        for number in _PASSED_ON:
            loop.add_signal_handler(number, self._pass_on, number)
        # These signals are blocked from the process's start until now (`kvrs/__main__.py`).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        await asyncio.gather(*map(self._keep, self._plans))
        return self._status

    def _end(self, *numbers: signal.Signals) -> None:
        self._ending.set()
        for number in numbers:
            self._pass_on(number)

    def _pass_on(self, number: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, plan: WorkerPlan) -> None:
        """Keep a worker running by restarts. If its first process cannot start, all workers end."""
        pause_s, is_first = 0.0, True
        while not self._ending.is_set():
            started_s = time.monotonic()
            status = await self._run_one(plan)
            if self._ending.is_set():
                return
            is_soon = time.monotonic() < started_s + _SOON_S
            if is_first and is_soon and status > 0:
                self._status = status
                # A second signal skips the draining that the first began.
                self._end(signal.SIGTERM, signal.SIGINT)
                return
            is_first = False
            pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s)) if is_soon else 0.0
            name = self._names[plan.worker]
            extra = {"worker": name, "status": status, "again_in_s": pause_s}
            log.error("worker lost", extra=extra)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause_s)

    async def _run_one(self, plan: WorkerPlan) -> int:
        process = await self._start(plan)
        if self._ending.is_set():
            process.send_signal(signal.SIGTERM)
        status = await process.wait()
        del self._running[plan.worker]
        return status

    async def _start(self, plan: WorkerPlan) -> asyncio.subprocess.Process:
        """Start a worker's process. Signals that arrive before the process is known here are
        forwarded too: it starts with signals blocked, and receives them once it has handlers.
        """
        async with self._starting:
            signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*self._command, msgspec.json.encode(plan).decode()),
                    stdin=asyncio.subprocess.PIPE,
                    # Ctrl-C at a terminal then reaches the supervisor alone, which tells the
                    # workers.
                    start_new_session=True,
                )
                self._running[plan.worker] = process
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        return process


def _plans(config: Config, kept: ExitStack) -> list[WorkerPlan]:
    """Bind the ports of all workers, and return the workers' plans; port 0 means any free port.

    Raises:
        ConfigError: a port is in use, or cannot be bound.
    """
    proxy = config.proxy
    port = _keep(kept, "port", proxy.host, proxy.port)
    peer_ports, admin_ports = (
        [_keep(kept, key, host, wanted) for wanted in proxy.ports_of(key)]
        for key, host in (("peer_port", proxy.peer_host), ("admin_port", proxy.admin_host))
    )
    return [
        WorkerPlan(worker, port, admin_port, peer_ports)
        for worker, admin_port in enumerate(admin_ports)
    ]


def _keep(kept: ExitStack, key: str, host: str, port: int) -> int:
    until_s = time.monotonic() + _FREED_WITHIN_S
    while True:
        try:
            return _bind(kept, host, port)
        except OSError as error:
            is_used = error.errno == errno.EADDRINUSE
            if is_used and time.monotonic() < until_s:
                time.sleep(_LOOK_AGAIN_S)
                continue
            why = "is already in use" if is_used else f"cannot be bound: {error.strerror}"
            raise ConfigError(
                f"proxy.{key}: port {host}:{port} {why}; allowed: a free port, or 0 for any"
            ) from None


def _bind(kept: ExitStack, host: str, port: int) -> int:
    """Bind sockets without listening, at each address of the host; return their port."""
    for family, address in _addresses(host, port):
        at = (address[0], port, *address[2:])
        if port:
            # The probe has no SO_REUSEPORT: with it, another proxy of this user would share the
            # port unnoticed.
            with _made(family) as probe:
                probe.bind(at)
        one = kept.enter_context(_made(family))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind(at)
        port = one.getsockname()[1]
    return port


def _addresses(host: str, port: int) -> Iterator[tuple[int, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        yield family, address  # type: ignore[misc]  # That of IPv6 has two more numbers.


def _made(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    # Connections of a proxy that has ended may still occupy the port.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
