"""The link of a profile: pages pulled over loopback from another process, as an instance on another
node would pull them.

Loads no torch. Run as a program, it is that other process: it reads one line of JSON from its
standard input (size and number of pages, secret), prints the port of its page server, and serves
until its input ends.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from kvrs.config.transfer import TransferSettings
from kvrs.errors import KvrsError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer

HOST = "127.0.0.1"


class _Numbered:
    """Pages of one region; the tag of a page is its number."""

    def __init__(self, region: memoryview, page_bytes: int) -> None:
        self._region = region
        self._page_bytes = page_bytes

    async def pin(self, request: PullRequest) -> PinnedPages:
        starts = [int.from_bytes(tag, "big") * self._page_bytes for tag in request.tags]
        return PinnedPages(
            [self._region[start : start + self._page_bytes] for start in starts], None, None
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert pinned.token is None


def measure_link(
    page_bytes: int, counts: Sequence[int], repeats: int, done: Callable[[], None]
) -> list[tuple[int, float]]:
    """Median time to pull so many pages, as (bytes, seconds); `done` is called after each count.

    Raises:
        KvrsError: the other process or the transfer failed.
    """
    with _other_process(page_bytes, max(counts)) as (port, secret):
        return asyncio.run(_pull_all(port, secret, page_bytes, counts, repeats, done))


@contextmanager
def _other_process(page_bytes: int, pages: int) -> Iterator[tuple[int, bytes]]:
    secret = secrets.token_hex(32)
    command = [sys.executable, "-m", "kvrs_engine.engine.profiler_links"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        # The end of its input ends the process, however this one ends.
        process.stdin.write(
            json.dumps({"page_bytes": page_bytes, "pages": pages, "secret": secret}).encode()
            + b"\n"
        )
        process.stdin.flush()
        port = process.stdout.readline()
        if not port.strip().isdigit():
            raise KvrsError("the sending process for the link measurement did not start")
        try:
            yield int(port), secret.encode()
        finally:
            process.stdin.close()


async def _pull_all(
    port: int,
    secret: bytes,
    page_bytes: int,
    counts: Sequence[int],
    repeats: int,
    done: Callable[[], None],
) -> list[tuple[int, float]]:
    puller = PagePuller(
        lambda: _identity("receiver", "n1", page_bytes), secret, TransferSettings(), time.monotonic
    )
    peer = Peer(instance=InstanceId("sender"), node=NodeId("n0"), host=HOST, port=port)
    views = [memoryview(bytearray(page_bytes)) for _ in range(max(counts))]
    points = []
    try:
        await _pull(puller, peer, views[:1])  # Connects and authenticates, once for all.
        for count in counts:
            times = [await _pull(puller, peer, views[:count]) for _ in range(repeats)]
            points.append((count * page_bytes, median(times)))
            done()
    finally:
        await puller.close()
    return points


async def _pull(puller: PagePuller, peer: Peer, views: list[memoryview]) -> float:
    tags = tuple(Tag(number.to_bytes(TAG_BYTES, "big")) for number in range(len(views)))
    result = await puller.pull(peer, PullRequest(tags), views, None)
    if result.full_pages != len(views):
        raise KvrsError(f"a page transfer over loopback failed: {result.error or 'pages are gone'}")
    return result.seconds


def _identity(instance: str, node: str, page_bytes: int) -> Identity:
    return Identity(
        InstanceId(instance), NodeId(node), epoch=1, fingerprint="profile", page_bytes=page_bytes
    )


async def _serve() -> None:
    loop = asyncio.get_running_loop()
    asked = json.loads(await loop.run_in_executor(None, sys.stdin.readline))
    page_bytes = int(asked["page_bytes"])
    source = _Numbered(memoryview(os.urandom(page_bytes * int(asked["pages"]))), page_bytes)
    secret = str(asked["secret"]).encode()
    settings = TransferSettings()
    links = SendingLinks(settings, SendingFaults(), NodeId("n0"))
    server = PageServer(
        lambda: _identity("sender", "n0", page_bytes), source, secret, settings, links
    )
    print(await server.start(HOST, 0), flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_serve())
