"""The row port of an agent in the test's own process, over a UNIX socket and over TCP."""

import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from secrets import token_bytes

from kvrs.agent.regions import Regions, RowSummer
from kvrs.agent.row_port import RowCopier, RowCopies, RowPort
from kvrs.protocol import rows
from kvrs.protocol.rows import RowFrame, Space
from kvrs.protocol.secrets import (
    NONCE_BYTES,
    Scope,
    ScopedKey,
    ServerProof,
    scoped_key,
    scoped_keys,
)
from kvrs.transfer.rows.client import RowClient
from kvrs.transfer.rows.connections import (
    RowStream,
    dial_tcp,
    dial_unix,
    listen_tcp,
    listen_unix,
    remove_unix,
)
from kvrs.transfer.rows.tags import SALT_BYTES, RowTagger, RowTags
from kvrs_testkit.row_engine import AGENT, DIAL_S, RowEngine

SECRET = bytes(range(32))
TIMEOUT_S = 20.0


class RowAgent:
    """Regions, copies and their port. `copies_of` starts the copying of another agent's rows,
    `sum_rows` the making of checksums.
    """

    def __init__(
        self, path: Path, secrets: Sequence[bytes] = (SECRET,), room_bytes: int = 1 << 30
    ) -> None:
        self.path, self.room_bytes = str(path), room_bytes
        self._secret = secrets[0]
        self.key = scoped_key(self._secret, Scope.ROWS, AGENT)
        self.tags = RowTags(secrets)
        self.regions, self.copies = Regions(), RowCopies(lambda: self.room_bytes)
        keys = scoped_keys(secrets, AGENT, Scope.ROWS)
        tagger = RowTagger(self._secret, token_bytes(SALT_BYTES))
        self.port = RowPort(self.regions, self.copies, keys, tagger)
        self._streams: list[RowStream] = []
        self._copiers: list[RowCopier] = []
        self.port.listen(listen_unix(path))
        self._summers: list[RowSummer] = []

    @cached_property
    def tcp(self) -> int:
        """The port of loopback where it listens from the first look on."""
        listener = listen_tcp("127.0.0.1", 0)
        number: int = listener.getsockname()[1]
        self.port.listen(listener)
        return number

    def engine(self, space: Space, rows: int) -> RowEngine:
        """Start an engine with this agent, whose rows hold the keys from 1 on."""
        engine = RowEngine(self.path, SECRET, space.namespace, rows, space.row_bytes)
        for row in range(rows):
            engine.write(row, row + 1)
        engine.link.start()
        until(lambda: bool(self.regions.of(space)))
        return engine

    def sum_rows(self, share: float = 1.0) -> None:
        """Make checksums of all rows from here on."""
        self._summers.append(RowSummer(self.regions, share))
        self._summers[-1].start()

    def copies_of(
        self, port: int, bytes_per_s: float | None = None, key: bytes | None = None
    ) -> RowCopier:
        """Copy the rows of the agent at a port of loopback."""
        copier = RowCopier(
            self.copies,
            partial(dial_tcp, "127.0.0.1", port),
            scoped_key(key or self._secret, Scope.ROWS, AGENT),
            bytes_per_s,
            self.port.wait_idle,
        )
        copier.start()
        self._copiers.append(copier)
        return copier

    def client(self, space: Space, port: int | None = None) -> RowClient:
        """A client over UNIX, or over TCP at a port."""
        over = (
            partial(dial_unix, Path(self.path))
            if port is None
            else partial(dial_tcp, "127.0.0.1", port)
        )
        return RowClient("a", over, self.key, space, self.tags, is_local=port is None)

    def connected(self) -> RowStream:
        self._streams.append(RowStream(dial_unix(Path(self.path), DIAL_S)))
        return self._streams[-1]

    def proven(self) -> RowStream:
        stream = self.connected()
        stream.prove(self.key)
        return stream

    def stream(self, space: Space) -> RowStream:
        stream = self.proven()
        stream.choose(space)
        return stream

    def close(self) -> None:
        for summer in self._summers:
            summer.close()
        for copier in self._copiers:
            copier.close()
        self.port.close()
        remove_unix(Path(self.path))
        for stream in self._streams:
            stream.close()


def until(reached: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < give_up_s
        time.sleep(0.005)


def admit(stream: RowStream, keys: Sequence[ScopedKey]) -> None:
    """Carry out an agent's part of the proof. Raises ProofError, TransferError."""
    stream.until(TIMEOUT_S)
    proof = ServerProof(keys, token_bytes(NONCE_BYTES))
    while not proof.is_over:
        stream.send(proof.receive(stream.receive_exactly(proof.wanted_bytes))[0])


def look_up(stream: RowStream, keys: list[bytes]) -> list[bool]:
    stream.send(rows.encode(RowFrame.LOOKUP, keys))
    return [bool(each) for each in stream.receive_exactly(stream.expect(RowFrame.FOUND).body_bytes)]


def load(stream: RowStream, space: Space, keys: list[bytes]) -> list[bytes | None]:
    """The rows of keys, each verified. None: it is gone."""
    stream.send(rows.encode(RowFrame.LOAD, keys))
    tags, loaded = RowTags([SECRET]), list[bytes | None]()
    for key in keys:
        row = bytearray(space.row_bytes)
        if (found := stream.receive_row(memoryview(row))) is None:
            loaded.append(None)
            continue
        frame, tag = found
        is_checked = frame is RowFrame.CHECKED and tag == rows.checksum(row)
        assert is_checked or tags.is_right(tag, space, key, row)
        loaded.append(bytes(row))
    return loaded
