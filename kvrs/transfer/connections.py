"""Connections to the peers' page ports, reused where that is safe.

The hand-shake of page ports and stages: both ends prove the key of the server (`secrets.py`),
and then compare their pages.

The key is of one scope, and of the server's instance and node, so a server cannot pass a proof on
to another one. HELLO, and WELCOME or REFUSED, have macs of the session already, so a client gets
the reason of a refusal only after it has proved the key.
"""

import asyncio
import mmap
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.net.names import first_address
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, FrameType, Session
from kvrs.protocol.secrets import (
    NONCE_BYTES,
    ClientProof,
    ProofError,
    Scope,
    ScopedKey,
    ServerProof,
    scoped_key,
)
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.shared_memory import connect_in, foreign_user
from kvrs.transfer.stream import SocketStream, StalledError, page_socket


class PeerRefusedError(TransferError):
    """The two ends do not belong together, so that another attempt would fail as well."""


def key_of(secret: bytes, server: Identity | Peer, scope: Scope = Scope.PAGES) -> ScopedKey:
    return scoped_key(secret, scope, f"{server.instance}\n{server.node}")


async def admit(
    stream: SocketStream,
    ring: Sequence[bytes],
    identity: Callable[[], Identity],
    adopt: Callable[[Identity], None] = lambda client: None,
    scope: Scope = Scope.PAGES,
) -> tuple[Identity, Identity]:
    """Carry out the server's part of the hand-shake. `ring`: the cluster's secrets, of which a
    client may prove any.

    `adopt` is called with a client that has proved the key; it may change what `identity` returns.

    Returns:
        the identity that the client was given, and the client's.

    Raises:
        TransferError: the client was refused.
    """
    keys = [key_of(each, identity(), scope) for each in ring]
    proof = ServerProof(keys, secrets.token_bytes(NONCE_BYTES))
    try:
        while not proof.is_over:
            answer, _ = proof.receive(await stream.receive(proof.wanted_bytes))
            await stream.send(answer)
    except ProofError as error:
        raise TransferError(f"refused: {error}") from None
    if proof.scope is None:
        raise TransferError("refused: the client has proved nothing")
    stream.begin(Session(proof.session_secret, is_client=False))
    _, body = await stream.receive_question(FrameType.HELLO)
    client = frames.decode_hello(body)
    adopt(client)
    own = identity()
    reason = _mismatch(client, own)
    answer = frames.encode_welcome(own) if reason is None else frames.encode_refused(reason)
    await stream.send(answer, stream.session.seal(answer))
    if reason is not None:
        raise TransferError(f"refused {client.instance!r}: {reason}")
    return own, client


async def introduce(
    stream: SocketStream, secret: bytes, own: Identity, peer: Peer, scope: Scope = Scope.PAGES
) -> Identity:
    """Carry out the client's part of the hand-shake. Returns the identity of the server, which is
    `peer` and has pages like those of `own`.

    Raises:
        PeerRefusedError: the server refused, does not have the secret, or is another one than
            `peer`.
        TransferError: the connection was lost.
    """
    proof, answer = ClientProof(key_of(secret, peer, scope), secrets.token_bytes(NONCE_BYTES)), b""
    await stream.send(proof.hello)
    try:
        while not answer:
            answer = proof.receive(await stream.receive(proof.wanted_bytes))
    except ProofError as error:
        raise PeerRefusedError(f"refused by the peer, or no peer: {error}") from None
    stream.begin(Session(proof.session_secret, is_client=True))
    hello = frames.encode_hello(own)
    await stream.send(answer, hello, stream.session.seal(hello))
    frame, body = await stream.receive_question(FrameType.WELCOME, FrameType.REFUSED)
    if frame is FrameType.REFUSED:
        raise PeerRefusedError(f"refused by the peer: {frames.decode_refused(body)}")
    server = frames.decode_welcome(body)
    if reason := _mismatch(server, own):
        raise PeerRefusedError(reason)
    return server


def _mismatch(other: Identity, own: Identity) -> str | None:
    if other.fingerprint != own.fingerprint:
        return f"fingerprints differ: {other.fingerprint!r} and {own.fingerprint!r}"
    if other.page_bytes != own.page_bytes:
        return f"page_bytes differ: {other.page_bytes} and {own.page_bytes}"
    if other.page_cells != own.page_cells:
        return f"page_cells differ: {other.page_cells} and {own.page_cells}"
    return None


_MAX_IDLE_PER_PEER = 4


@dataclass(slots=True, eq=False)
class PageConnection:
    """A connection between two processes in their present epochs: it is closed once an end has
    another epoch.
    """

    stream: SocketStream
    peer: Peer
    own: Identity
    server: Identity
    request_id: int = 0  # Id of the last question, which an answer must carry.
    mac: bytes = b""  # MAC of the last question's first answer, to be checked with the payload.
    # Mapping of the peer's file with its pages; None: the peer has sent no descriptor.
    memory: mmap.mmap | None = None

    async def ask(self, question: "Question", *expected: FrameType) -> AnswerHeader:
        """Send a question under a new request id; return the start of the answer, whose MAC is
        still unchecked.
        """
        self.request_id = (self.request_id + 1) & 0xFFFFFFFF
        await question(self)
        answer, self.mac = await self.stream.receive_answer(*expected)
        return answer


# Function that sends a question; it is called again with a new connection if an idle connection
# turns out to be closed.
Question = Callable[[PageConnection], Awaitable[None]]


class ConnectionPool:
    """Connections to all peers. A connection is kept only after a whole answer: otherwise its next
    bytes are unknown.
    """

    def __init__(
        self, identity: Callable[[], Identity], secret: bytes, stall_timeout_s: float
    ) -> None:
        self._identity = identity
        self._secret = secret
        self._stall_timeout_s = stall_timeout_s
        self._idle: dict[InstanceId, list[PageConnection]] = {}
        self._streams: set[SocketStream] = set()
        self._closed = False

    async def ask(
        self, peer: Peer, expected_epoch: int | None, question: Question, *expected: FrameType
    ) -> tuple[PageConnection, AnswerHeader]:
        """Put a question to `peer`; the caller receives the rest of the answer in
        `using(connection)`.

        Raises:
            TransferError: the peer cannot be reached, refuses, is of another epoch, or answers out
                of turn.
        """
        if (idle := self._take_idle(peer, expected_epoch)) is not None:
            try:
                return idle, await self._ask(idle, question, *expected)
            except StalledError:
                raise
            except TransferError:
                # The peer may have closed the idle connection; only a new connection's failure is a
                # failure of the peer.
                pass
        connection = await self._connect(peer)
        if expected_epoch is not None and connection.server.epoch != expected_epoch:
            self._discard(connection.stream)
            raise TransferError(
                f"{peer.instance!r} is in epoch {connection.server.epoch}, pages of "
                f"epoch {expected_epoch} are wanted"
            )
        return connection, await self._ask(connection, question, *expected)

    @contextmanager
    def using(self, connection: PageConnection) -> Iterator[None]:
        """Keep the connection for later questions if the block ends without an exception; close it
        otherwise.
        """
        try:
            yield
        except BaseException:
            self._discard(connection.stream)
            raise
        idle = self._idle.setdefault(connection.peer.instance, [])
        if self._closed or len(idle) >= _MAX_IDLE_PER_PEER:
            self._discard(connection.stream)
        else:
            idle.append(connection)

    def close(self) -> None:
        """Close idle connections, and shut down used ones, whose tasks then fail with a
        `TransferError`.
        """
        self._closed = True
        self.drop_idle()
        for stream in self._streams:
            stream.shut()

    def drop_idle(self) -> None:
        """Close unused connections."""
        for connection in [connection for idle in self._idle.values() for connection in idle]:
            self._discard(connection.stream)
        self._idle.clear()

    async def _ask(
        self, connection: PageConnection, question: Question, *expected: FrameType
    ) -> AnswerHeader:
        try:
            return await connection.ask(question, *expected)
        except BaseException:
            self._discard(connection.stream)
            raise

    def _take_idle(self, peer: Peer, expected_epoch: int | None) -> PageConnection | None:
        own = self._identity()
        idle = self._idle.get(peer.instance, [])
        while idle:
            connection = idle.pop()
            current = connection.peer == peer and connection.own == own
            if current and expected_epoch in (None, connection.server.epoch):
                return connection
            self._discard(connection.stream)
        return None

    async def _connect(self, peer: Peer) -> PageConnection:
        if self._closed:
            raise TransferError("this end is closed")
        own = self._identity()
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                at = await self._located(peer)
            sock = self._socket(at)
        except TimeoutError:
            raise StalledError(
                f"no address of {peer.instance!r} within {self._stall_timeout_s} s"
            ) from None
        except OSError as error:  # The name has no address, or no descriptor is free.
            raise TransferError(
                f"cannot connect to {peer.instance!r}: {error.strerror or error}"
            ) from None
        stream = SocketStream(sock, self._stall_timeout_s)
        self._streams.add(stream)
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._reach(sock, at)
                server = await introduce(stream, self._secret, own, peer)
        except TimeoutError:
            self._discard(stream)
            raise StalledError(
                f"no hand-shake with {peer.instance!r} within {self._stall_timeout_s} s"
            ) from None
        except OSError as error:
            self._discard(stream)
            raise TransferError(
                f"cannot connect to {peer.instance!r}: {error.strerror or error}"
            ) from None
        except BaseException:
            self._discard(stream)
            raise
        return PageConnection(stream, peer, own, server)

    async def _located(self, peer: Peer) -> Peer:
        """Return the peer with the present numeric address of its host name."""
        return replace(peer, host=await first_address(peer.host))

    def _socket(self, peer: Peer) -> socket.socket:
        return page_socket(peer.host)

    async def _reach(self, sock: socket.socket, peer: Peer) -> None:
        await asyncio.get_running_loop().sock_connect(sock, (peer.host, peer.port))

    def _discard(self, stream: SocketStream) -> None:
        self._streams.discard(stream)
        stream.close()


class LocalConnectionPool(ConnectionPool):
    """Connections to processes of this host over their UNIX sockets, which lend pages."""

    async def _located(self, peer: Peer) -> Peer:
        return peer

    def _socket(self, peer: Peer) -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    async def _reach(self, sock: socket.socket, peer: Peer) -> None:
        assert peer.directory is not None
        connect_in(peer.directory, peer.socket, sock)
        if reason := foreign_user(sock):
            raise TransferError(reason)
