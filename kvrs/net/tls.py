"""TLS of the HTTP ports: certificate files that are reloaded when they change, accepted
connections, and connections to other processes of the cluster.

A port accepts its sockets itself, so that a hand-shake counts as a connection. A reload makes new
contexts: a context changed in place would still trust a removed CA, and resume its sessions.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kvrs.config.security import TlsSettings
from kvrs.config.settings import fault_of_mode
from kvrs.errors import ConfigError
from kvrs.net.connections import PortConnection

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0  # Interval at which the certificate files are checked for changes.
_HANDSHAKE = b"\x16"  # First byte of a connection over TLS; plain HTTP begins with a letter.
_PAUSE_S = 0.1
_CLOSING_S = 2.0
_FLUSH_S = 30.0  # Time in which the last bytes of a connection that is closed must be read.
_LOG_INTERVAL_S = 1.0


class ServerSide(ssl.SSLObject):
    """The server's end of a TLS connection, with the buffer of its encrypted outgoing bytes."""

    outgoing: ssl.MemoryBIO


class _ServerContext(ssl.SSLContext):
    sslobject_class = ServerSide

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, ServerSide)
        made.outgoing = outgoing
        return made


class Certificates:
    """TLS contexts for new connections, made of the files of one section of the configuration:
    `server` for accepted connections, and `client` for connections within the cluster, where both
    ends use one CA.
    """

    def __init__(self, section: str, files: TlsSettings) -> None:
        """Load the files. Raises ConfigError: a file cannot be used."""
        self._section = section
        self._files = files
        self._seen: object = None
        apply = self.prepare()
        assert apply is not None
        apply()

    def prepare(self) -> Callable[[], None] | None:
        """Load the files, and return a function that puts them in use for new connections; None:
        they have not changed.

        Raises:
            ConfigError: a file cannot be used; the contexts in use stay.
        """
        if (found := self._signature()) == self._seen:
            return None
        server, client, until = self._load()

        def apply() -> None:
            self.server, self.client, self._seen = server, client, found
            log.info("certificate loaded", extra={"file": self._files.cert, "until": until})

        return apply

    async def run(self) -> None:
        """Load changed files and put them in use, until cancelled. An unusable file is logged once,
        and the contexts in use stay.
        """
        refused: object = None
        while True:
            before = self._signature()
            await asyncio.sleep(LOOK_INTERVAL_S)
            # Files that have just changed are loaded at the next look, because certificate and key
            # are not replaced at the same moment.
            if (found := self._signature()) != before or found == refused:
                continue
            try:
                apply = await asyncio.to_thread(self.prepare)
            except ConfigError as error:
                refused = found
                for fault in error.faults:
                    log.error("certificate not loaded", extra={"cause": fault})
                continue
            if apply is not None:
                apply()

    def _signature(self) -> object:
        files = (self._files.cert, self._files.key, self._files.client_ca)
        return [None if file is None else _signature(file) for file in files]

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext, str]:
        cert, key, client_ca = self._files.cert, self._files.key, self._files.client_ca
        for name, file in (("cert", cert), ("key", key), ("client_ca", client_ca)):
            if file is not None:
                self._check_file(name, file)
        server = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.minimum_version = ssl.TLSVersion.TLSv1_3
        for context in (server, client):
            self._load_pair(context)
        until = self._rehearse(server)
        if client_ca is not None:
            for context in (server, client):
                self._trust(context, "client_ca", client_ca)
            server.verify_mode = ssl.CERT_REQUIRED
        return server, client, until

    def _check_file(self, name: str, file: str) -> None:
        try:
            with Path(file).open("rb") as opened:
                status = os.fstat(opened.fileno())
        except OSError as error:
            raise self._fault(name, file, str(error.strerror)) from None
        if name == "key" and (fault := fault_of_mode(status, os.geteuid())):
            raise self._fault(name, file, fault)

    def _load_pair(self, context: ssl.SSLContext) -> None:
        cert, key = self._files.cert, self._files.key
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self._fault("key", key, f"is not the key of {cert}") from None
            self._trust(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), "cert", cert)
            raise self._fault("key", key, "no private key in PEM") from None
        except _PasswordNeededError:
            raise self._fault("key", key, "needs a password; allowed: a key without one") from None

    def _trust(self, context: ssl.SSLContext, name: str, file: str) -> None:
        try:
            context.load_verify_locations(file)
        except ssl.SSLError:
            raise self._fault(name, file, "no certificate in PEM") from None

    def _rehearse(self, server: ssl.SSLContext) -> str:
        """Test the server's context by a hand-shake in memory; return the end of its certificate's
        validity.

        Raises:
            ConfigError: the certificate is not valid now.
        """
        cert = self._files.cert
        try:
            return hand_shake(pinned_context(cert), server)
        except ssl.SSLError as error:
            cause = getattr(error, "verify_message", None) or error.reason
            raise self._fault("cert", cert, str(cause)) from None

    def _fault(self, name: str, file: str, cause: str) -> ConfigError:
        return ConfigError(f"{self._section}.{name}: {file}: {cause}")


def load_certificates(section: str, files: TlsSettings | None) -> Certificates | None:
    """Load a section's files; None: it has none. Raises ConfigError: a file cannot be used."""
    return None if files is None else Certificates(section, files)


class _PasswordNeededError(Exception):
    pass


def _no_password() -> NoReturn:
    # Without the error OpenSSL would ask for the password at the terminal.
    raise _PasswordNeededError


def _signature(file: str) -> object:
    try:
        found = Path(file).stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def pinned_context(cert: str) -> ssl.SSLContext:
    """Make a context for connections to the server with exactly this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context


def pinned_client(files: TlsSettings) -> ssl.SSLContext:
    """Make a context for connections to a server that uses these files. The client presents the
    server's own certificate if the server requires one.

    Raises:
        OSError: a file cannot be used; ssl.SSLError is a subclass.
    """
    context = pinned_context(files.cert)
    if files.client_ca is not None:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    return context


def hand_shake(client_context: ssl.SSLContext, server_context: ssl.SSLContext) -> str:
    """Carry out a hand-shake of two contexts in memory; return the end of the server certificate's
    validity.

    Raises:
        ssl.SSLError: an end refuses the other.
    """
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    found = client.getpeercert()
    return str(found["notAfter"]) if found else ""


class TlsServer:
    """Accepts connections over TLS at listening sockets; each hand-shake has a time limit. A client
    that speaks plain HTTP gets an answer that tells it to use TLS.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        certificates: Certificates,
        make: Callable[[], PortConnection],
        timeout_s: float,
        in_plain: Callable[[], bytes],
    ) -> None:
        """`in_plain` makes the answer to a client without TLS; `make` makes the protocol of a
        connection.
        """
        self._in_plain = in_plain
        self.sockets = sockets
        self._certificates = certificates
        self._make = make
        self._timeout_s = timeout_s
        self._logged_s = 0.0
        self._greetings: set[asyncio.Task[None]] = set()
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets]

    def close(self) -> None:
        for task in (*self._accepting, *self._greetings):
            task.cancel()
        for each in self.sockets:
            each.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except OSError:  # The process has no free descriptor, or the client has left.
                await asyncio.sleep(_PAUSE_S)
                continue
            greeting = asyncio.create_task(self._greet(sock, str(address[0])))
            self._greetings.add(greeting)
            greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket, address: str) -> None:
        guest = self._make()
        task = asyncio.current_task()
        assert task is not None
        if not guest.reserve(address, task.cancel):
            sock.close()
            return
        try:
            if await self._hand_shake(sock, guest):
                return
        except OSError as error:  # OSError includes TLS errors and timeouts.
            self._note(address, error)
        except BaseException:
            guest.connection_lost(None)
            sock.close()
            raise
        guest.connection_lost(None)
        sock.close()

    async def _hand_shake(self, sock: socket.socket, guest: PortConnection) -> bool:
        """Carry out the hand-shake. Returns False if the client does not speak TLS; it was then
        answered in plain HTTP.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._timeout_s):
            first = await _first_byte(sock)
            if first == _HANDSHAKE:
                await loop.connect_accepted_socket(
                    lambda: guest,
                    sock,
                    ssl=self._certificates.server,
                    ssl_handshake_timeout=self._timeout_s,
                    ssl_shutdown_timeout=_FLUSH_S,
                )
                return True
        if first:
            async with asyncio.timeout(_CLOSING_S):
                await loop.sock_sendall(sock, self._in_plain())
                sock.shutdown(socket.SHUT_WR)
                # Closing a socket with unread bytes would reset it, and lose the answer.
                while await loop.sock_recv(sock, 1 << 16):
                    pass
        return False

    def _note(self, address: str, error: OSError) -> None:
        if (now_s := time.monotonic()) - self._logged_s < _LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        cause = error.reason if isinstance(error, ssl.SSLError) else type(error).__name__
        cause = getattr(error, "verify_message", None) or cause
        log.warning("no TLS connection", extra={"client": address, "cause": cause})


async def bind(host: str, port: int, backlog: int, *, shared: bool) -> list[socket.socket]:
    """Bind listening sockets at all addresses of a host. `shared`: other processes of this user may
    listen there too.

    Raises:
        OSError: the port cannot be bound.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(found):
            sockets.append(made := socket.socket(family, socket.SOCK_STREAM))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shared:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.setblocking(False)
            made.bind(address)
            made.listen(backlog)
    except BaseException:
        for each in sockets:
            each.close()
        raise
    return sockets


async def _first_byte(sock: socket.socket) -> bytes:
    """Return the first byte without taking it from the socket; empty if the client closes
    before.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)
