"""Forked processes for tests whose event loop is uvloop, which starts processes by itself."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import IO, Any

from kvrs_testkit.forked import starts_forked

_MAX_BYTES = 1 << 16  # Of one read.


class AwaitedProcess(asyncio.subprocess.Process):
    """A process that `subprocess` has started; its loop need not know of it."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdout: asyncio.StreamReader | None,
        stderr: asyncio.StreamReader | None,
    ) -> None:
        self._process = process
        self.stdin, self.stdout, self.stderr = None, stdout, stderr
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    def send_signal(self, signal: int) -> None:
        self._process.send_signal(signal)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def communicate(self, input: Any = None) -> tuple[bytes, bytes]:  # noqa: A002
        stdout, stderr = [
            b"" if each is None else await each.read() for each in (self.stdout, self.stderr)
        ]
        await self.wait()
        return stdout, stderr


async def forked(
    *arguments: str,
    environment: Mapping[str, str],
    stdout: int | None = None,
    stderr: int | None = None,
    with_children: bool = False,
) -> AwaitedProcess:
    """A process of `python -m`, followed by these arguments. `with_children`: what it starts is
    forked, too.
    """
    with starts_forked(with_children=with_children):
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], env=environment, stdout=stdout, stderr=stderr
        )
    return AwaitedProcess(process, _reader(process.stdout), _reader(process.stderr))


def _reader(pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
    """The bytes of a pipe, until its other end is closed."""
    if pipe is None:
        return None
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()

    def read() -> None:
        if data := os.read(pipe.fileno(), _MAX_BYTES):
            reader.feed_data(data)
        else:
            loop.remove_reader(pipe.fileno())
            pipe.close()
            reader.feed_eof()

    loop.add_reader(pipe.fileno(), read)
    return reader
