"""`kvrs top` before a proxy that runs."""

import asyncio
import fcntl
import os
import pty
import struct
import sys
import termios

import pytest

from kvrs_testkit.awaited import forked
from kvrs_testkit.proxy_cluster import WITHIN_S
from tests.proxy.conftest import ProxyClusterBuilder

pytestmark = [pytest.mark.network, pytest.mark.process]


def command(port: int, *more: str) -> tuple[str, ...]:
    return ("kvrs", "top", "--admin-url", f"http://127.0.0.1:{port}", *more)


async def test_it_prints_the_cluster_once_for_scripts(build: ProxyClusterBuilder) -> None:
    """The overview, as a table."""
    system = await build(pairs=1)

    running = await forked(
        *command(system.proxy.admin_port, "--once"),
        environment=os.environ,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await running.communicate()

    assert running.returncode == 0
    assert b"2 of 2 instances up" in output


async def test_it_follows_the_cluster_in_a_small_terminal_until_q(
    build: ProxyClusterBuilder,
) -> None:
    """80 columns and 24 rows: no line is longer, and a death shows. A proxy that is gone may be
    restarted, and is asked again.
    """
    system = await build()
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    running = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command(system.proxy.admin_port)),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
    )
    shown = bytearray()
    asyncio.get_running_loop().add_reader(controller, lambda: shown.extend(read(controller)))
    try:
        await until(shown, b"4 of 4 instances up")
        await system.instances["d1"].kill()
        await until(shown, b"3 of 4 instances up")
        await system.proxy.close()
        await until(shown, b"asked again every second")
        os.write(controller, b"q")
        async with asyncio.timeout(WITHIN_S):
            status = await running.wait()
    finally:
        asyncio.get_running_loop().remove_reader(controller)
        if running.returncode is None:
            running.kill()
            await running.wait()
        after = termios.tcgetattr(terminal)
        os.close(terminal)
        os.close(controller)

    assert status == 0
    assert after == before  # The terminal is as it was.


def read(controller: int) -> bytes:
    try:
        return os.read(controller, 65536)
    except OSError:
        return b""


async def until(shown: bytearray, words: bytes) -> None:
    async with asyncio.timeout(WITHIN_S):
        while words not in shown:
            await asyncio.sleep(0.02)
