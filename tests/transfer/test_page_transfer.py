"""Pages over real sockets between a real server and a real puller, with a relay between them that
can do harm.
"""

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kvrs.config.sections import TransferSettings
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.frames import HEADER_BYTES, SEALED_ANSWER_BYTES, SESSION_MAC_BYTES, encode_pull
from kvrs.protocol.pages import TAG_BYTES, PullFrame, Tag, TrafficClass
from kvrs.protocol.secrets import END
from kvrs.transfer import connections
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest, PullResult
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer
from tests.transfer.storing import until

pytestmark = pytest.mark.network

PAGE_BYTES = 4096
SECRET = b"only for the tests"
SERVER = Identity(
    InstanceId("p0"), NodeId("n0"), epoch=7, fingerprint="model", page_bytes=PAGE_BYTES
)
CLIENT = Identity(
    InstanceId("d1"), NodeId("n1"), epoch=3, fingerprint="model", page_bytes=PAGE_BYTES
)
STREAM = StreamId("s1")
SETTINGS = TransferSettings(stall_timeout_s=10.0)
START_BYTES = SEALED_ANSWER_BYTES
FRAME_BYTES = START_BYTES + PAGE_BYTES
TAG_AT = HEADER_BYTES + 14  # Where in a PULL its first tag begins; its tail index ends there.


def tag(index: int) -> Tag:
    return Tag(index.to_bytes(TAG_BYTES))


def tags(count: int) -> tuple[Tag, ...]:
    return tuple(tag(index) for index in range(count))


def content(index: int) -> bytes:
    """The bytes of page `index`; no two pages are alike."""
    return (index + 1).to_bytes(4) * (PAGE_BYTES // 4)


@dataclass
class Pages:
    """An engine's pages, as far as a page server is concerned."""

    held: dict[Tag, bytearray] = field(default_factory=dict)
    tails: dict[tuple[StreamId, int], bytearray] = field(default_factory=dict)
    own: Identity = SERVER
    in_use: int = 0
    requests: int = 0

    def identity(self) -> Identity:
        return self.own

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        self.in_use += 1
        self.requests += 1
        run: list[memoryview] = []
        for wanted in request.tags:
            if wanted not in self.held:
                break
            run.append(memoryview(self.held[wanted]))
        tail = None
        if request.handoff is not None and request.tail_index is not None:
            tail = self.tails.get((request.handoff, request.tail_index))
        try:
            yield PinnedPages(run, None if tail is None else memoryview(tail))
        finally:
            self.in_use -= 1


def holding(count: int) -> Pages:
    return Pages({tag(index): bytearray(content(index)) for index in range(count)})


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(PAGE_BYTES)) for _ in range(count)]


@dataclass
class Relay:
    """Passes bytes on between puller and server, and does harm to them."""

    server_port: int = 0
    port: int = 0
    connections: int = 0
    # Offset of a byte to damage among those that the server sends after the hand-shake ...
    flip_at: int | None = None
    flip_asked_at: int | None = None  # ... and among those that the puller sends.
    cut_at: int | None = None  # After so many bytes after the hand-shake the connection ends.
    # After so many bytes after the hand-shake nothing passes until `release` is set.
    hold_at: int | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    asked: bytearray = field(default_factory=bytearray)
    handlers: list[asyncio.Task[None] | None] = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.handlers.append(asyncio.current_task())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
        try:
            up, down = (reader, up_writer), (up_reader, writer)
            for source, target in (up, down, up):
                await put(target, await source.readuntil(END))
            # Both ends send in turns, so the sizes are known.
            for source, target in (up, down):
                header = await source.readexactly(8)
                size = int.from_bytes(header[4:]) + SESSION_MAC_BYTES
                await put(target, header + await source.readexactly(size))
            upwards = asyncio.create_task(self._pass(reader, up_writer))
            try:
                await self._tamper(up_reader, writer)
            finally:
                upwards.cancel()
                await asyncio.gather(upwards, return_exceptions=True)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            up_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offset = 0
        while data := bytearray(await reader.read(1 << 16)):
            if self.flip_asked_at is not None and offset <= self.flip_asked_at < offset + len(data):
                data[self.flip_asked_at - offset] ^= 1
            self.asked += data
            await put(writer, data)
            offset += len(data)
        writer.close()

    async def _tamper(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        offset = 0
        while data := bytearray(await reader.read(1 << 12)):
            end = offset + len(data)
            if self.flip_at is not None and offset <= self.flip_at < end:
                data[self.flip_at - offset] ^= 0x10
            if self.cut_at is not None and end >= self.cut_at:
                await put(writer, data[: self.cut_at - offset])
                return
            if self.hold_at is not None and end >= self.hold_at and not self.release.is_set():
                await put(writer, data[: self.hold_at - offset])
                del data[: self.hold_at - offset]
                self.held.set()
                await self.release.wait()
            await put(writer, data)
            offset = end


async def put(writer: asyncio.StreamWriter, data: bytes | bytearray) -> None:
    if writer.is_closing():  # The event loops differ in what they raise for this.
        raise ConnectionResetError
    writer.write(data)
    await writer.drain()


@dataclass
class World:
    pages: Pages
    server: PageServer
    puller: PagePuller
    relay: Relay

    @property
    def peer(self) -> Peer:
        return Peer(SERVER.instance, SERVER.node, "127.0.0.1", self.relay.port)

    @property
    def direct(self) -> Peer:
        return replace(self.peer, port=self.relay.server_port)

    async def pull(
        self, count: int, into: list[memoryview] | None = None, epoch: int | None = None
    ) -> PullResult:
        return await self.puller.pull(
            self.peer, PullRequest(tags(count)), into or buffers(count), None, epoch
        )


@asynccontextmanager
async def world(
    pages: Pages,
    settings: TransferSettings = SETTINGS,
    client: Identity = CLIENT,
    secret: bytes = SECRET,
) -> AsyncIterator[World]:
    server = PageServer(
        pages,
        SECRET,
        settings,
        SendingLinks(settings, SendingFaults(), SERVER.node),
    )
    puller = PagePuller(lambda: client, secret, settings, time.monotonic)
    relay = Relay(server_port=await server.start("127.0.0.1", 0))
    listener = await asyncio.start_server(relay.handle, "127.0.0.1", 0)
    relay.port = listener.sockets[0].getsockname()[1]
    try:
        yield World(pages, server, puller, relay)
    finally:
        relay.release.set()
        await puller.close()
        await server.close()
        listener.close()
        # Both ends are closed, so the relay's connections end by themselves.
        await asyncio.wait_for(
            asyncio.gather(*(handler for handler in relay.handlers if handler)), timeout=60
        )
        assert pages.in_use == 0


async def test_pages_that_came_are_counted_by_kind() -> None:
    """Bytes for recoveries are told from hand-offs; pages that were missing count nowhere."""
    async with world(holding(3)) as w:
        await w.pull(5)
        await w.puller.pull(
            w.peer, PullRequest(tags(2), traffic=TrafficClass.RECOVERY), buffers(2), None
        )

        assert w.puller.pulled_bytes[TrafficClass.HANDOFF] == 3 * PAGE_BYTES
        assert w.puller.pulled_bytes[TrafficClass.RECOVERY] == 2 * PAGE_BYTES


@pytest.mark.parametrize(
    ("held", "asked", "has_tail", "full_pages", "tail_comes"),
    [
        pytest.param(0, 0, True, 0, True, id="a prompt shorter than a page is its tail alone"),
        pytest.param(2, 2, False, 2, False, id="without its tail the full pages come"),
        pytest.param(1, 2, True, 1, False, id="behind missing pages a tail is of no use"),
    ],
)
async def test_a_tail_comes_last_and_only_behind_all_pages(
    held: int, asked: int, has_tail: bool, full_pages: int, tail_comes: bool
) -> None:
    """So its loss costs less than a page of computing."""
    pages = holding(held)
    if has_tail:
        pages.tails[STREAM, asked] = bytearray(content(9))
    tail = memoryview(bytearray(PAGE_BYTES))
    async with world(pages) as w:
        request = PullRequest(tags(asked), STREAM, tail_index=asked)
        result = await w.puller.pull(w.peer, request, buffers(asked), tail)

    assert (result.full_pages, result.tail, result.error) == (full_pages, tail_comes, None)
    assert result.gone is not tail_comes
    assert bytes(tail) == (content(9) if tail_comes else bytes(PAGE_BYTES))


async def test_pulls_one_after_another_use_one_connection() -> None:
    """The hand-shake is paid once per peer."""
    async with world(holding(3)) as w:
        results = [await w.pull(3) for _ in range(4)]

        assert all(result.full_pages == 3 and result.error is None for result in results)
        assert w.relay.connections == 1


async def test_pulls_at_the_same_time_do_not_mix() -> None:
    """Each has a connection of its own while it lasts."""
    async with world(holding(40)) as w:
        into = [buffers(40) for _ in range(3)]
        results = await asyncio.gather(*(w.pull(40, own) for own in into))

        assert all(result.full_pages == 40 for result in results)
        assert all(bytes(page) == content(index) for own in into for index, page in enumerate(own))
        assert w.relay.connections == 3


async def test_a_connection_does_not_outlive_the_epoch_it_was_made_in() -> None:
    """A fenced instance is met again by a new hand-shake; the pull does not notice."""
    async with world(holding(2)) as w:
        await w.pull(2)
        w.pages.own = replace(SERVER, epoch=8)

        old = await w.pull(2, epoch=7)
        new = await w.pull(2, epoch=8)
        any_epoch = await w.pull(2)

        assert (old.full_pages, new.full_pages, any_epoch.full_pages) == (0, 2, 2)
        assert w.relay.connections == 3


@pytest.mark.parametrize(
    ("client", "secret", "instance", "epoch", "reason"),
    [
        pytest.param(
            {"fingerprint": "another"}, SECRET, "p0", None, "fingerprints differ", id="model"
        ),
        pytest.param(
            {"page_bytes": 2 * PAGE_BYTES}, SECRET, "p0", None, "page_bytes differ", id="page size"
        ),
        pytest.param({"page_cells": 2}, SECRET, "p0", None, "page_cells differ", id="cells"),
        # A port may have been given to another instance since the registry was read.
        pytest.param({}, SECRET, "p9", None, "another process", id="another instance"),
        # Pages of an epoch that is over may differ from what the registry names.
        pytest.param({}, SECRET, "p0", SERVER.epoch - 1, "epoch 7", id="another epoch"),
        # A stranger learns that it is one, not what the cluster runs.
        pytest.param(
            {"fingerprint": "another"},
            b"another secret, as long",
            "p0",
            None,
            "it is another process, or was started with another secret",
            id="a stranger",
        ),
    ],
)
async def test_what_does_not_fit_is_refused_before_any_page_is_named(
    client: dict[str, Any], secret: bytes, instance: str, epoch: int | None, reason: str
) -> None:
    """By the end that sees it, with the reason."""
    own = replace(CLIENT, **client)
    async with world(holding(2), client=own, secret=secret) as w:
        peer = replace(w.peer, instance=InstanceId(instance))
        into = [memoryview(bytearray(own.page_bytes))]
        result = await w.puller.pull(peer, PullRequest(tags(1)), into, None, epoch)

        assert (result.full_pages, result.bytes, w.pages.requests) == (0, 0, 0)
        assert result.error is not None
        assert reason in result.error
        assert "fingerprint" in reason or "fingerprint" not in result.error


@pytest.mark.parametrize(
    ("harm", "verified", "error"),
    [
        pytest.param({"flip_at": START_BYTES + 17}, 0, "checksum", id="a bit of the first page"),
        pytest.param(
            {"flip_at": 2 * FRAME_BYTES + START_BYTES + 17}, 2, "checksum", id="a bit of the third"
        ),
        pytest.param({"cut_at": 0}, 0, "connection closed", id="cut before anything came"),
        pytest.param({"cut_at": START_BYTES - 1}, 0, "connection closed", id="in a header"),
        pytest.param({"cut_at": FRAME_BYTES - 1}, 0, "connection closed", id="in a page"),
        pytest.param({"cut_at": FRAME_BYTES}, 1, "connection closed", id="at the end of a page"),
        pytest.param(
            {"cut_at": 2 * FRAME_BYTES + START_BYTES}, 2, "connection closed", id="behind a header"
        ),
        pytest.param({"cut_at": 3 * FRAME_BYTES + 7}, 3, "connection closed", id="in the last"),
        # An open connection does not prove that its peer works.
        pytest.param({"hold_at": 2 * FRAME_BYTES + 100}, 2, "stalled", id="silence"),
    ],
)
async def test_harm_on_the_way_leaves_the_pages_that_came_whole(
    harm: dict[str, int], verified: int, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only pages whose checksum is right count, and the connection is not used again. Damage is
    logged and counted.
    """
    is_damage = error == "checksum"
    into = buffers(4)
    async with world(holding(4), TransferSettings(stall_timeout_s=1.0)) as w:
        for what, at in harm.items():
            setattr(w.relay, what, at)
        result = await w.pull(4, into)
        w.relay.flip_at = w.relay.cut_at = w.relay.hold_at = None
        again = await w.pull(4)

        assert (result.full_pages, result.gone) == (verified, False)
        assert result.error is not None
        assert error in result.error
        assert [bytes(page) for page in into[:verified]] == list(map(content, range(verified)))
        assert (again.full_pages, w.relay.connections) == (4, 2)
        assert w.puller.damaged_pages == is_damage
        own = [each.levelname for each in caplog.records if each.name == "kvrs.transfer.puller"]
        assert own == ["WARNING"] * is_damage


@pytest.mark.parametrize(
    "flip_at",
    [
        pytest.param(TAG_AT - 1, id="page 4 of the hand-off instead of page 5"),
        pytest.param(TAG_AT + TAG_BYTES - 1, id="page 1 of the run instead of page 0"),
        pytest.param(TAG_AT + 2 * TAG_BYTES, id="a page that is not there"),
    ],
)
async def test_a_question_with_a_flipped_bit_is_not_answered(flip_at: int) -> None:
    """Any page has a right checksum, also one that was not asked for: what is asked needs one of
    its own.
    """
    pages = holding(5)
    pages.tails = {(STREAM, 4): bytearray(content(98)), (STREAM, 5): bytearray(content(99))}
    request = PullRequest(tags(5), STREAM, tail_index=5)
    into, again = buffers(6), buffers(6)
    async with world(pages) as w:
        w.relay.flip_asked_at = flip_at

        damaged = await w.puller.pull(w.peer, request, into[:5], into[5])
        requests = w.pages.requests
        w.relay.flip_asked_at = None
        whole = await w.puller.pull(w.peer, request, again[:5], again[5])

    assert (damaged.full_pages, damaged.tail, damaged.bytes, damaged.gone) == (0, False, 0, False)
    assert damaged.error == "connection closed by the peer"
    assert requests == 0
    assert all(bytes(page) == bytes(PAGE_BYTES) for page in into)
    assert (whole.full_pages, whole.tail, whole.error) == (5, True, None)
    assert [bytes(page) for page in again] == [content(index) for index in (*range(5), 99)]


FIRST_QUESTION_BYTES = len(encode_pull(PullFrame(1, PullRequest(tags(1))))) + SESSION_MAC_BYTES


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param({"flip_asked_at": FIRST_QUESTION_BYTES + TAG_AT + TAG_BYTES - 1}, id="damage"),
        pytest.param({"cut_at": FRAME_BYTES + START_BYTES}, id="closed"),
    ],
)
async def test_harm_to_an_idle_connection_costs_a_new_one_and_no_pages(
    harm: dict[str, int],
) -> None:
    """The peer may be fine: the connection is replaced, and the pull does not notice."""
    into = buffers(1)
    async with world(holding(2)) as w:
        for what, at in harm.items():
            setattr(w.relay, what, at)
        await w.pull(1)
        w.relay.cut_at = None

        result = await w.pull(1, into)

        assert (result.full_pages, result.error, w.relay.connections) == (1, None, 2)
        assert bytes(into[0]) == content(0)


async def test_no_listener_is_an_error_and_not_an_exception() -> None:
    """The caller recomputes; there is nothing to catch."""
    async with world(holding(1)) as w:
        await w.server.close()

        result = await w.puller.pull(w.direct, PullRequest(tags(1)), buffers(1), None)

        assert result.full_pages == 0
        assert result.error is not None
        assert "cannot connect" in result.error


async def test_without_a_descriptor_to_connect_with_nothing_is_pulled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any error but a `TransferError` is taken for a bug and ends the whole instance, with all of
    its streams.
    """

    def refuse(host: str) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with world(holding(1)) as w:
        with monkeypatch.context() as patched:
            patched.setattr(connections, "page_socket", refuse)
            without = await w.pull(1)
            await w.puller.probe(w.peer)
        again = await w.pull(1)

    assert (without.full_pages, without.error) == (0, "cannot connect to 'p0': Too many open files")
    assert again.full_pages == 1


async def test_after_a_cancelled_pull_nothing_writes_into_its_buffers() -> None:
    """The pages are given to another request the moment the coroutine has ended."""
    into = buffers(8)
    async with world(holding(8)) as w:
        w.relay.hold_at = 3 * FRAME_BYTES + 100
        pulling = asyncio.create_task(w.pull(8, into))
        await w.relay.held.wait()
        await until(lambda: bytes(into[3][:4]) == content(3)[:4])

        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)
        for page in into:
            page[:] = b"\xee" * PAGE_BYTES
        w.relay.release.set()
        await until(lambda: w.pages.in_use == 0)
        again = await w.pull(8)

        assert pulling.cancelled()
        assert all(bytes(page) == b"\xee" * PAGE_BYTES for page in into)
        assert (again.full_pages, w.relay.connections) == (8, 2)


async def test_a_server_that_closes_unpins_and_ends_its_pulls() -> None:
    """`world` checks the pins; the receiver keeps what it has."""
    settings = TransferSettings(link_bytes_per_s=200_000.0)
    into = buffers(400)
    async with world(holding(400), settings) as w:
        pulling = asyncio.create_task(w.pull(400, into))
        await until(lambda: bytes(into[2]) == content(2))

        await w.server.close()
        pins_left = w.pages.in_use
        result = await pulling

        assert pins_left == 0
        assert 3 <= result.full_pages < 400
        assert result.error is not None


async def test_a_puller_that_closes_ends_its_pulls() -> None:
    """The engine shuts down without waiting for a slow peer."""
    settings = TransferSettings(link_bytes_per_s=200_000.0)
    into = buffers(400)
    async with world(holding(400), settings) as w:
        pulling = asyncio.create_task(w.pull(400, into))
        await until(lambda: bytes(into[2]) == content(2))

        await w.puller.close()
        result = await pulling
        afterwards = await w.pull(1)

        assert result.error is not None
        assert afterwards.error == "this end is closed"


async def test_a_limited_link_is_measured_as_what_it_is() -> None:
    """Pulls and probes find the limit, as they would find a slow network's rate."""
    settings = TransferSettings(link_bytes_per_s=1_000_000.0, probe_interval_s=0.01)
    async with world(holding(30), settings) as w:
        await w.puller.probe(w.peer)
        by_probe = w.puller.links()[SERVER.node].bytes_per_s
        await w.pull(30)
        by_pull = w.puller.links()[SERVER.node].bytes_per_s

    # Wide enough for a machine that stalls; a meter blind to the limit would find a thousand times
    # as much.
    assert 0.2 < by_probe / 1_000_000 < 2
    assert 0.2 < by_pull / 1_000_000 < 2


async def test_a_link_with_traffic_is_not_probed() -> None:
    """Probes are for links without measurements by traffic."""
    settings = TransferSettings(probe_interval_s=3600.0)
    async with world(holding(20), settings) as w:
        await w.puller.probe(w.peer)
        first = len(w.relay.asked)
        await w.puller.probe(w.peer)
        assert len(w.relay.asked) == first
        assert w.puller.links()[SERVER.node].bytes_per_s > 0

    async with world(holding(800), settings) as w:  # So many that a rate is seen.
        await w.pull(800)
        first = len(w.relay.asked)
        await w.puller.probe(w.peer)
        assert len(w.relay.asked) == first


async def test_a_probe_of_a_dead_peer_changes_nothing() -> None:
    """Noticing death is not the prober's business."""
    async with world(holding(1)) as w:
        await w.server.close()

        await w.puller.probe(w.direct)

        assert w.puller.links() == {}


SERVER_PROCESS = """
import asyncio
from tests.transfer.test_page_transfer import SECRET, SERVER, holding
from kvrs.config.sections import TransferSettings
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.server import PageServer

async def main():
    settings = TransferSettings(link_bytes_per_s=1e6)
    links = SendingLinks(settings, SendingFaults(), SERVER.node)
    server = PageServer(holding(2000), SECRET, settings, links)
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.process
async def test_a_killed_server_leaves_the_verified_leading_pages() -> None:
    """SIGKILL in the middle of a transfer: the pull returns by itself with what had come."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER_PROCESS], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        puller = PagePuller(lambda: CLIENT, SECRET, SETTINGS, time.monotonic)
        try:
            port = int(await asyncio.to_thread(process.stdout.readline))
            into = buffers(2000)
            peer = Peer(SERVER.instance, SERVER.node, "127.0.0.1", port)
            pulling = asyncio.create_task(puller.pull(peer, PullRequest(tags(2000)), into, None))
            await until(lambda: bytes(into[9]) == content(9))

            process.send_signal(signal.SIGKILL)
            result = await pulling
        finally:
            process.kill()
            await puller.close()

    assert 10 <= result.full_pages < 2000
    assert result.error is not None
    assert [bytes(page) for page in into[: result.full_pages]] == [
        content(index) for index in range(result.full_pages)
    ]
