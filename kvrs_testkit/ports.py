"""Clients and servers of the ports on which processes of a cluster prove themselves."""

import asyncio
import http.client
import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import aiohttp

from kvrs.net.connections import ConnectionLimits
from kvrs.net.http import inner_server
from kvrs.net.proving import ProvingConnector, address_of
from kvrs.net.routes import Routes
from kvrs.protocol.secrets import (
    END,
    NONCE_BYTES,
    ClientProof,
    ProofError,
    Scope,
    ScopedKey,
    scoped_key,
    scoped_keys,
)


@asynccontextmanager
async def serving(
    routes: Routes, keys: Sequence[ScopedKey] = (), port: int = 0
) -> AsyncIterator[str]:
    """The URL of a port of its own for these routes."""
    served = inner_server(
        routes, ConnectionLimits.of_peers(), shutdown_timeout_s=0.05, names=None, keys=keys
    )
    try:
        yield f"http://127.0.0.1:{await served.open('127.0.0.1', port)}"
    finally:
        await served.close()


def client_of(url: str, key: ScopedKey, timeout_s: float | None = None) -> aiohttp.ClientSession:
    """A client that proves this key; its paths are relative to the URL."""
    return aiohttp.ClientSession(
        url,
        connector=ProvingConnector({address_of(url): key}),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


@asynccontextmanager
async def instance_client(
    routes: Routes, secret: bytes, name: str = "e0"
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an instance, which is served for as long as this lasts."""
    keys = scoped_keys([secret], name, Scope.INSTANCE, Scope.ADMIN)
    async with (
        serving(routes, keys) as url,
        client_of(url, scoped_key(secret, Scope.INSTANCE, name)) as client,
    ):
        yield client


def _prove_on(sock: socket.socket, key: ScopedKey) -> None:
    """Prove the key on a blocking socket.

    Raises:
        ProofError: the process at the far end did not prove itself.
        OSError: the connection was lost.
    """
    proof = ClientProof(key, secrets.token_bytes(NONCE_BYTES))
    sock.sendall(proof.hello)
    while not (data := sock.recv(proof.wanted_bytes)) or not (answer := proof.receive(data)):
        if not data:
            raise ConnectionResetError("closed without a proof")
    sock.sendall(answer)


class ProvenConnection(http.client.HTTPConnection):
    """A blocking client that proves this key."""

    def __init__(self, url: str, key: ScopedKey, timeout_s: float) -> None:
        parsed = urlsplit(url)
        super().__init__(parsed.hostname or "", parsed.port, timeout=timeout_s)
        self._key = key

    def connect(self) -> None:
        super().connect()
        _prove_on(self.sock, self._key)


@asynccontextmanager
async def tunnel(client: aiohttp.ClientSession, key: ScopedKey) -> AsyncIterator[str]:
    """The URL of a port before that of `client`, which proves connections for clients that cannot,
    such as SDKs.
    """
    pipes: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert client._base_url is not None
        assert client._base_url.port is not None
        there, to_there = await proven(client._base_url.port, key)
        pipes.update(
            (
                asyncio.create_task(carry(reader, to_there)),
                asyncio.create_task(carry(there, writer)),
            )
        )

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for pipe in pipes:
            pipe.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)


async def proven(port: int, key: ScopedKey) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the key was proved, for requests in raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    proof = ClientProof(key, secrets.token_bytes(NONCE_BYTES))
    writer.write(proof.hello)
    try:
        writer.write(proof.receive(await reader.readuntil(END)))
    except ProofError:
        writer.close()
        raise
    return reader, writer
