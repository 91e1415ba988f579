"""The page port against peers that are not what they should be: strangers, impostors, and peers
that send nonsense.
"""

import asyncio
import gc
import logging
import re
import select
import socket
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import kvrs.transfer.server as server_module
from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol import frames
from kvrs.protocol.frames import SEALED_ANSWER_BYTES, SESSION_MAC_BYTES, AnswerHeader, FrameType
from kvrs.protocol.pages import TAG_BYTES, Identity, PullFrame, PullRequest, Tag
from kvrs.protocol.secrets import END, NONCE_BYTES, ScopedKey, ServerProof
from kvrs.transfer.connections import admit, introduce, key_of
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import Peer, PinnedPages, PullResult
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.server import PageServer
from kvrs.transfer.stream import SocketStream
from tests.protocol.questions import KV, question

pytestmark = pytest.mark.network

PAGE_BYTES = 1024
SECRET = b"only for the tests"
SERVER = Identity(InstanceId("p0"), NodeId("n0"), 7, "model", PAGE_BYTES)
CLIENT = Identity(InstanceId("d1"), NodeId("n1"), 3, "model", PAGE_BYTES)
SETTINGS = TransferSettings(stall_timeout_s=5.0)
PULL = PullRequest((Tag(bytes(TAG_BYTES)),))
PAGE = b"kvrs" * (PAGE_BYTES // 4)


class OnePage:
    """Holds every page that is asked for; they are all alike."""

    def identity(self) -> Identity:
        return SERVER

    @asynccontextmanager
    async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
        yield PinnedPages([memoryview(PAGE)] * len(request.tags))


def links() -> SendingLinks:
    return SendingLinks(SETTINGS, SendingFaults(), SERVER.node)


def peer_at(port: int) -> Peer:
    return Peer(SERVER.instance, SERVER.node, "127.0.0.1", port)


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    server = PageServer(OnePage(), SECRET, SETTINGS, links())
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.close()


@asynccontextmanager
async def pulling() -> AsyncIterator[PagePuller]:
    puller = PagePuller(lambda: CLIENT, SECRET, SETTINGS, time.monotonic)
    try:
        yield puller
    finally:
        await puller.close()


async def pull(puller: PagePuller, port: int) -> PullResult:
    return await puller.pull(peer_at(port), PULL, [memoryview(bytearray(PAGE_BYTES))], None)


async def connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def all_that_comes(sock: socket.socket) -> bytes:
    """Until the other end closes. A server that waits for more instead fails the test by the time
    limit.
    """
    received = b""
    async with asyncio.timeout(60):
        try:
            while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                received += data
        except ConnectionResetError:
            pass
    return received


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x80\x04\x95pickle me",
        KV + b"\x02\xff\xff\xff\xff" + bytes(8),  # A HELLO before the proof.
        b"KVRS-PROOF/1 " + b"f" * 300,
        b"KVRS-PROOF/1 " + b"g" * 81 + END,
        bytes(64),
    ],
)
async def test_nonsense_from_a_stranger_closes_its_connection_and_no_other(nonsense: bytes) -> None:
    """Nothing is allocated, awaited or answered for it; a pull on another connection goes on."""
    async with serving() as port, pulling() as puller:
        before = await pull(puller, port)
        sock = await connect(port)
        await asyncio.get_running_loop().sock_sendall(sock, nonsense)

        received = await all_that_comes(sock)
        after = await pull(puller, port)

        sock.close()
        assert received == b""
        assert (before.full_pages, after.full_pages, after.error) == (1, 1, None)


@pytest.mark.parametrize(
    "nonsense",
    [
        KV + b"\x05\xff\xff\xff\xff",  # A PULL of four gigabytes.
        question(FrameType.PULL, bytes(4) + b"\xff\xff\xff\xff" + bytes(8)),  # More tags than fit.
        question(FrameType.PROBE, bytes(4) + b"\xff\xff\xff\xff"),  # A probe of four gigabytes.
        KV + b"\x06\x00\x00\x00\x10" + bytes(16),  # An answer instead of a question.
        KV + b"\x02\x00\x00\x00\x00",  # A second HELLO.
        KV + b"\x0b\x00\x00\x00\x00",  # An OFFER, where nothing can be stored.
        KV + b"\x0c\x00\x00\x00\x00",  # A STORE.
        KV + b"\x05\x00\x00\x00\x00",  # A PULL without even a checksum.
        b"\xff" * 100,
    ],
)
async def test_nonsense_from_a_peer_closes_its_connection_and_no_other(nonsense: bytes) -> None:
    """A peer that knows the secret may still be broken."""
    async with serving() as port, pulling() as puller:
        await pull(puller, port)
        sock = await connect(port)
        stream = SocketStream(sock, 5.0)
        await introduce(stream, SECRET, CLIENT, peer_at(port))

        await stream.send(nonsense, stream.session.seal(nonsense))
        received = await all_that_comes(sock)
        after = await pull(puller, port)

        stream.close()
        assert received == b""
        assert (after.full_pages, after.error) == (1, None)


async def test_a_stranger_that_says_nothing_is_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unauthenticated connection lasts as long as a hand-shake may."""
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with serving() as port:
        silent, dripping = await connect(port), await connect(port)
        await asyncio.get_running_loop().sock_sendall(dripping, b"KVRS")

        received = tuple(await asyncio.gather(all_that_comes(silent), all_that_comes(dripping)))

        silent.close()
        dripping.close()
        assert received == (b"", b"")


async def test_handshakes_take_a_bounded_number_of_connections_and_none_of_the_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For one more connection the oldest is closed that is in its hand-shake; established peers are
    served all the same.
    """
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 8)
    loop = asyncio.get_running_loop()
    async with serving() as port, pulling() as puller:
        await pull(puller, port)
        strangers = [await connect(port) for _ in range(8)]
        one_more = await connect(port)

        served = await pull(puller, port)
        async with asyncio.timeout(60):
            closed = await loop.sock_recv(strangers[0], 1)
        others = [each for each in (*strangers[1:], one_more) if is_readable(each)]

        assert (served.full_pages, closed, others) == (1, b"", [])
        for sock in (*strangers, one_more):
            sock.close()


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


@pytest.mark.parametrize("count", [64, 300])
async def test_silent_connections_keep_no_peer_out(count: int) -> None:
    """Far fewer than the proxy of a node opens when it starts."""
    async with serving() as port:
        strangers = [socket.socket() for _ in range(count)]
        for stranger in strangers:
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
        async with pulling() as puller:
            results = await asyncio.gather(*(pull(puller, port) for _ in range(4)))
        for stranger in strangers:
            stranger.close()

    assert {(result.full_pages, result.error) for result in results} == {(1, None)}


async def test_silent_connections_make_room_before_those_that_have_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many come, and although the one that has begun is the oldest."""
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 8)
    loop = asyncio.get_running_loop()
    async with serving() as port:
        begun = await connect(port)
        await loop.sock_sendall(begun, b"KVRS-PROOF/1 ")
        await asyncio.sleep(0.05)
        silent = [await connect(port) for _ in range(24)]
        async with asyncio.timeout(60):
            closed = [await loop.sock_recv(each, 1) for each in silent[:16]]

        assert closed == [b""] * 16
        assert not is_readable(begun)
        for each in (begun, *silent):
            each.close()


async def test_peers_that_come_in_the_same_moment_are_all_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failure every victim fetches its pages from one agent: more than may be in their
    hand-shake at a time.
    """
    monkeypatch.setattr(server_module, "MAX_STRANGERS", 32)
    async with serving() as port, pulling() as puller:
        results = await asyncio.gather(
            *(pull(puller, port) for _ in range(3 * server_module.MAX_STRANGERS))
        )

    assert {(result.full_pages, result.error) for result in results} == {(1, None)}


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_comes_while_the_server_closes_is_closed_too(turns: int) -> None:
    """Whatever the loop was doing about it just then, no socket is left to the garbage
    collector.
    """
    server = PageServer(OnePage(), SECRET, SETTINGS, links())
    port = await server.start("127.0.0.1", 0)
    await asyncio.sleep(0.01)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setblocking(False)
        for _ in range(turns):
            await asyncio.sleep(0)

        await server.close()

        gc.collect()
    received = await all_that_comes(sock)
    sock.close()
    assert [str(warning.message) for warning in warned] == []
    assert received == b""


async def test_a_clients_proof_that_was_overheard_is_worth_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server's nonce is in the proof, and never the same."""
    caplog.set_level(logging.INFO)
    async with serving() as port:
        between = Between(port, "nothing")
        async with impostor(between) as between_port, pulling() as puller:
            passed_on = await pull(puller, between_port)
        sock = await connect(port)
        loop = asyncio.get_running_loop()
        hello, _, proof = between.passed[:3]
        await loop.sock_sendall(sock, hello)
        await loop.sock_recv(sock, 1 << 10)
        await loop.sock_sendall(sock, proof)

        received = await all_that_comes(sock)

        sock.close()
        assert (passed_on.full_pages, received) == (1, b"")
        assert "refused: wrong mac" in caplog.text


async def test_a_proof_for_another_server_is_worth_nothing() -> None:
    """The key is of the server's instance and node, so no server can pass proofs on."""
    async with serving() as port, pulling() as puller:
        elsewhere = replace(peer_at(port), instance=InstanceId("p1"))

        result = await puller.pull(elsewhere, PULL, [memoryview(bytearray(PAGE_BYTES))], None)

    assert result.full_pages == 0
    assert result.error is not None
    assert "another process" in result.error


@asynccontextmanager
async def impostor(
    behave: Callable[[SocketStream], Coroutine[Any, Any, None]],
) -> AsyncIterator[int]:
    """A server that does to each connection what `behave` does, then closes it."""
    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)

    async def accept() -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            stream = SocketStream(sock, 5.0)
            try:
                await behave(stream)
            finally:
                stream.close()

    accepting = asyncio.create_task(accept())
    try:
        yield listener.getsockname()[1]
    finally:
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        listener.close()


async def test_a_server_without_the_secret_is_refused() -> None:
    """Both ends prove themselves: pages of an impostor would become tokens."""

    async def pretend(stream: SocketStream) -> None:
        key = key_of(SECRET, SERVER)
        unlike = ScopedKey(key.scope, bytes(32), key.id)
        proof = ServerProof([unlike], bytes(NONCE_BYTES))
        answer, _ = proof.receive(await stream.receive(proof.wanted_bytes))
        answer, _ = proof.receive(await stream.receive(proof.wanted_bytes))
        await stream.send(answer)

    async with impostor(pretend) as port, pulling() as puller:
        result = await pull(puller, port)

    assert result.full_pages == 0
    assert result.error is not None
    assert "its proof is wrong" in result.error


async def test_a_servers_proof_from_another_meeting_is_not_believed() -> None:
    """The client's nonce is in the proof, and never the same."""
    async with serving() as port, pulling() as puller:
        between = Between(port, "nothing")
        async with impostor(between) as between_port:
            honest = await pull(puller, between_port)

        async def play_back(stream: SocketStream) -> None:
            await stream.receive(len(between.passed[0]))
            await stream.send(between.passed[1])

        async with impostor(play_back) as impostor_port:
            played_back = await pull(puller, impostor_port)

    assert (honest.full_pages, played_back.full_pages) == (1, 0)
    assert played_back.error is not None
    assert "its proof is wrong" in played_back.error


GOOD_PAGE = AnswerHeader(FrameType.PAGE, 1, 0, frames.checksum(PAGE), PAGE_BYTES)


@pytest.mark.parametrize(
    "answers",
    [
        [replace(GOOD_PAGE, index=1)],
        [replace(GOOD_PAGE, request_id=2)],
        [replace(GOOD_PAGE, payload_bytes=PAGE_BYTES + 1)],
        [replace(GOOD_PAGE, payload_bytes=PAGE_BYTES - 1)],
        [replace(GOOD_PAGE, payload_bytes=0)],
        [AnswerHeader(FrameType.END, 1, 0, 0, 0)],
        [AnswerHeader(FrameType.GONE, 1, 1, 0, 0)],
        [GOOD_PAGE, GOOD_PAGE],
        [GOOD_PAGE, AnswerHeader(FrameType.GONE, 1, 1, 0, 0)],
        [AnswerHeader(FrameType.PROBE_DATA, 1, 0, 0, PAGE_BYTES)],
    ],
)
async def test_answers_out_of_turn_end_the_pull(answers: list[AnswerHeader]) -> None:
    """Wrong page, wrong request, wrong length, an early or a false end: an error, and the pages
    before it.
    """

    async def answer_wrongly(stream: SocketStream) -> None:
        await admit(stream, [SECRET], lambda: SERVER)
        await stream.receive_question(FrameType.PULL)
        for answer in answers:
            payload = PAGE if answer.payload_bytes else b""
            await stream.send(stream.session.answer(answer, payload), payload)
        await stream.wait_for_data()

    async with impostor(answer_wrongly) as port, pulling() as puller:
        result = await pull(puller, port)

    assert result.full_pages == len(answers) - 1
    assert result.error is not None
    assert not result.gone


async def test_pages_may_be_more_than_one_system_call_takes() -> None:
    """The kernel takes a bounded number of buffers at a time; a long history of small pages has
    more.
    """
    views = [memoryview(bytearray(PAGE_BYTES)) for _ in range(3000)]
    async with serving() as port, pulling() as puller:
        result = await puller.pull(peer_at(port), PullRequest(PULL.tags * 3000), views, None)

    assert (result.full_pages, result.error) == (3000, None)
    assert all(view == PAGE for view in views)


async def test_a_page_that_is_not_of_the_agreed_size_never_leaves_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A source that hands out wrong views is our bug, and is loud; its peer only sees the end."""

    class WrongSize(OnePage):
        @asynccontextmanager
        async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
            yield PinnedPages([memoryview(PAGE)[1:]])

    server = PageServer(WrongSize(), SECRET, SETTINGS, links())
    async with pulling() as puller:
        result = await pull(puller, await server.start("127.0.0.1", 0))
    await server.close()

    assert (result.full_pages, result.gone) == (0, False)
    assert result.error is not None
    assert "closed by a bug" in caplog.text


@pytest.mark.parametrize("how", ["fails", "never comes"])
async def test_pages_that_do_not_come_end_the_connection_and_nothing_else(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Their holder is another process that may die, or be on its way when the server is closed."""
    asked = asyncio.Event()

    class Elsewhere(OnePage):
        @asynccontextmanager
        async def pinned(self, request: PullRequest) -> AsyncIterator[PinnedPages]:
            asked.set()
            if how == "never comes":
                await asyncio.get_running_loop().create_future()
            if how == "fails":
                raise TransferError("the worker died")
            yield PinnedPages([])

    server = PageServer(Elsewhere(), SECRET, SETTINGS, links())
    async with pulling() as puller, asyncio.timeout(60):
        pulled = asyncio.create_task(pull(puller, await server.start("127.0.0.1", 0)))
        await asked.wait()
        if how == "never comes":
            await server.close()
        result = await pulled
    await server.close()

    assert (result.full_pages, result.gone) == (0, False)
    assert "bug" not in caplog.text


async def test_a_pull_encodes_what_its_server_decodes() -> None:
    """The raw exchange, byte for byte: question, page, end."""
    async with serving() as port:
        sock = await connect(port)
        stream = SocketStream(sock, 5.0)
        await introduce(stream, SECRET, CLIENT, peer_at(port))
        pull = frames.encode_pull(PullFrame(41, PULL))
        await stream.send(pull, stream.session.seal(pull))
        page = memoryview(bytearray(PAGE_BYTES))

        start, mac = await stream.receive_answer(FrameType.PAGE)
        await stream.receive_into(page)
        end, end_mac = await stream.receive_answer(FrameType.END)

        stream.close()
        assert (start, bytes(page)) == (replace(GOOD_PAGE, request_id=41), PAGE)
        assert end == AnswerHeader(FrameType.END, 41, 1, 0, 0)
        stream.session.check_answer(mac, start, page)
        stream.session.check_answer(end_mac, end)


class Between:
    """A man in the middle: passes the hand-shake on, and then changes what `attack` says."""

    def __init__(self, port: int, attack: str) -> None:
        self._port = port
        self._attack = attack
        self.stolen = b""
        self.passed: list[bytes] = []  # HELLO, the server's proof, the client's.

    async def __call__(self, client: SocketStream) -> None:
        server = SocketStream(await connect(self._port), 5.0)
        try:
            for sender, receiver in ((client, server), (server, client), (client, server)):
                self.passed.append(await whole_message(sender))
                await receiver.send(self.passed[-1])
            for sender, receiver in ((client, server), (server, client)):
                frame = await whole_frame(sender)
                await receiver.send(*frame, await server_bytes(sender, SESSION_MAC_BYTES))
            await self._answer(client, server)
        finally:
            server.close()

    async def _answer(self, client: SocketStream, server: SocketStream) -> None:
        head, body = await whole_frame(client)
        mac = await server_bytes(client, SESSION_MAC_BYTES)
        if self._attack == "question":
            other = frames.encode_pull(PullFrame(1, PullRequest((Tag(b"x" * TAG_BYTES),))))
            await server.send(other, mac)
        elif self._attack == "repeat":
            await server.send(head, body, mac, head, body, mac)
        else:
            await server.send(head, body, mac)
        start = await server_bytes(server, SEALED_ANSWER_BYTES)
        page = await server_bytes(server, PAGE_BYTES)
        end = await server_bytes(server, SEALED_ANSWER_BYTES)
        if self._attack == "repeat":
            self.stolen = await server_bytes(server, PAGE_BYTES)
        if self._attack == "page":
            page = bytes(PAGE_BYTES)
            answer = frames.decode_answer(start[: frames.ANSWER_BYTES], FrameType.PAGE)
            forged = replace(answer, checksum=frames.checksum(page))
            start = frames.encode_answer(forged) + start[frames.ANSWER_BYTES :]
        if self._attack == "end":
            gone = frames.encode_answer(AnswerHeader(FrameType.GONE, 1, 0, 0, 0))
            start, page, end = gone + start[frames.ANSWER_BYTES :], b"", b""
        await client.send(start, page, end)
        await client.wait_for_data()


async def server_bytes(stream: SocketStream, size: int) -> bytes:
    view = memoryview(bytearray(size))
    await stream.receive_into(view)
    return bytes(view)


async def whole_message(stream: SocketStream) -> bytes:
    """Receive one message of a proof."""
    message = b""
    while not message.endswith(END):
        message += await server_bytes(stream, 1)
    return message


async def whole_frame(stream: SocketStream) -> tuple[bytes, bytes]:
    head = await server_bytes(stream, frames.HEADER_BYTES)
    return head, await server_bytes(stream, int.from_bytes(head[4:8]))


@pytest.mark.parametrize(
    ("attack", "error"),
    [
        ("page", "not authentic"),  # Another page, with a right checksum.
        ("end", "not authentic"),  # The holder seems to have nothing.
        ("question", "closed|reset"),  # Pages of others are asked for.
        ("repeat", "closed|reset"),  # A question is asked twice.
    ],
)
async def test_a_man_in_the_middle_can_only_cut_the_connection(attack: str, error: str) -> None:
    """He passed the hand-shake on, and knows no key of this connection."""
    async with serving() as port:
        between = Between(port, attack)
        async with impostor(between) as between_port, pulling() as puller:
            result = await pull(puller, between_port)

    assert (result.full_pages, result.gone, between.stolen) == (0, False, b"")
    assert result.error is not None
    assert re.search(error, result.error)
