"""Run of a proxy as a process, from its start to its end by signals."""

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from kvrs.errors import ConfigError
from kvrs.process.descriptors import raise_descriptor_limit
from kvrs.proxy.reload import ReloadResult

log = logging.getLogger(__name__)

_LOOK_AT_FILE_S = 1.0


class Service(Protocol):
    async def start(self) -> None: ...
    async def run(self) -> None: ...  # Runs until cancelled.
    def told_to_end(self) -> None: ...  # Note a signal: asking peers learn of the end from now on.
    async def leave(self) -> None: ...  # Stop being ready; serve on for a delay, if any.
    async def drain(self) -> None: ...
    async def close(self) -> None: ...
    async def reload(self) -> ReloadResult: ...  # Raises ConfigError.


class Stop:
    """Requests for a service to end. SIGTERM calls `asked`: the first begins the delay, if any, the
    second ends it, and the next skips draining. SIGINT skips the delay.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.first = asyncio.Event()
        self.no_delay = asyncio.Event()
        self.at_once = asyncio.Event()
        if not delay_s:
            self.no_delay.set()

    def asked(self) -> None:
        for step in (self.first, self.no_delay, self.at_once):
            if not step.is_set():
                step.set()
                return

    def interrupted(self) -> None:
        self.no_delay.set()
        self.asked()


async def run_service(
    service: Service, ready: Callable[[], None], stop: Stop, watched: Path | None = None
) -> None:
    """Run until SIGINT or SIGTERM; a repeated signal hastens the end. SIGHUP, or a change of the
    `watched` file, reloads the configuration.
    """
    asked_to_reload = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end(by: Callable[[], None]) -> None:
        by()
        service.told_to_end()

    loop.add_signal_handler(signal.SIGTERM, end, stop.asked)
    loop.add_signal_handler(signal.SIGINT, end, stop.interrupted)
    loop.add_signal_handler(signal.SIGHUP, asked_to_reload.set)
    # The default action of SIGUSR1 would end this process.
    loop.add_signal_handler(signal.SIGUSR1, log.warning, "SIGUSR1 is ignored")
    # These signals are blocked from the process's start until now (`kvrs/__main__.py`).
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP, signal.SIGUSR1})
    raise_descriptor_limit()
    await service.start()
    ready()
    running = asyncio.ensure_future(service.run())
    stopping = asyncio.ensure_future(stop.first.wait())
    reloading = asyncio.ensure_future(_reload_when(asked_to_reload, service))
    watching = asyncio.ensure_future(_watch(watched, asked_to_reload))
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
        await _leave(service, stop, running)
        draining, hurried = (
            asyncio.ensure_future(service.drain()),
            asyncio.ensure_future(stop.at_once.wait()),
        )
        done, _ = await asyncio.wait(
            {draining, hurried, running}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (draining, hurried):
            task.cancel()
        for ended in done - {hurried}:
            await ended  # Re-raise internal errors: the exit status must not be 0.
    finally:
        for task in (running, stopping, reloading, watching):
            task.cancel()
        await service.close()


async def _leave(service: Service, stop: Stop, running: asyncio.Future[None]) -> None:
    """Serve on until the delay is over, or is ended."""
    if not stop.no_delay.is_set():
        log.info("leaving")
    leaving = asyncio.ensure_future(service.leave())
    ended = asyncio.ensure_future(stop.no_delay.wait())
    waited: set[asyncio.Future[Any]] = {leaving, ended, running}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stop.no_delay.set()
    for task in (leaving, ended):
        task.cancel()
    await asyncio.gather(leaving, ended, return_exceptions=True)
    if not leaving.cancelled():
        await leaving


async def _watch(path: Path | None, changed: asyncio.Event) -> None:
    """Watch a file's status, which also shows a link's new target. A file that is missing for a
    moment is being replaced.
    """
    if path is None:
        return
    before = _status(path)
    while True:
        await asyncio.sleep(_LOOK_AT_FILE_S)
        now = _status(path)
        if now is not None and now != before:
            before = now
            changed.set()


def _status(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


async def _reload_when(asked: asyncio.Event, service: Service) -> None:
    while True:
        await asked.wait()
        asked.clear()
        try:
            await service.reload()
        except ConfigError:
            pass  # The fault is logged; the present configuration stays.
        except Exception:
            log.exception("not reloaded because of a bug")  # The next request reloads again.
