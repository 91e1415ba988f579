"""HTTP connections to processes of the cluster: the far end must prove that it is the configured
process before anything is sent.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp
from aiohttp.client_proto import ResponseHandler

from kvrs.config.cluster import InstanceSettings, NodeSettings
from kvrs.config.settings import netloc
from kvrs.net.tls import Certificates
from kvrs.process.eager_task import Signal
from kvrs.protocol.secrets import NONCE_BYTES, ClientProof, ProofError, Scope, ScopedKey, scoped_key

# Time limit of a server's proof: a process with a busy event loop proves itself late.
PROOF_TIMEOUT_S = 5.0
_NAME_S = 1  # Seconds for which the looked-up address of a host name is used for new connections.

Address = tuple[str | None, int | None]
Keys = Mapping[Address, ScopedKey]


class UnprovenError(aiohttp.ClientConnectorError):
    """The process at an address did not prove that it is the configured one."""

    def __init__(self, key: Any, cause: str) -> None:
        super().__init__(key, OSError(0, cause))
        self.cause = cause


def address_of(url: str) -> Address:
    parsed = urlsplit(url)
    return parsed.hostname, parsed.port


def instance_keys(
    secret: bytes, instances: Iterable[InstanceSettings], scope: Scope = Scope.INSTANCE
) -> Keys:
    """Return the keys of the instances' HTTP ports, by address."""
    return {
        address_of(f"http://{netloc(each.host, each.port)}"): scoped_key(secret, scope, each.id)
        for each in instances
    }


def agent_keys(secret: bytes, nodes: Iterable[NodeSettings]) -> Keys:
    return {
        address_of(node.agent.url): scoped_key(secret, Scope.AGENT, node.agent_id) for node in nodes
    }


class ProvingConnector(aiohttp.TCPConnector):
    """A connection pool in which both ends prove themselves once per connection, when it is made.
    Connections to https:// URLs use the certificate and CA that are loaded then.
    """

    def __init__(self, keys: Keys, tls: Certificates | None = None, **options: Any) -> None:
        super().__init__(ttl_dns_cache=_NAME_S, **options)
        self._keys, self._tls = keys, tls

    async def _wrap_create_connection(
        self,
        *args: Any,
        addr_infos: list[aiohttp.AddrInfoType],
        req: aiohttp.ClientRequest,
        timeout: aiohttp.ClientTimeout,
        client_error: type[Exception] = aiohttp.ClientConnectorError,
        **options: Any,
    ) -> tuple[asyncio.Transport, ResponseHandler]:
        factory, *args_left = args
        key = self._keys.get((req.url.host, req.url.port))
        if key is None:
            raise UnprovenError(req.connection_key, "no process of the cluster has this address")
        if options.get("ssl") is not None and self._tls is not None:
            options["ssl"] = self._tls.client
        transport, greeter = await super()._wrap_create_connection(
            partial(HandshakeProtocol, key),
            *args_left,
            addr_infos=addr_infos,
            req=req,
            timeout=timeout,
            client_error=client_error,
            **options,
        )
        try:
            await _prove(transport, cast(HandshakeProtocol, greeter))
        except ProofError as error:
            transport.abort()
            raise UnprovenError(req.connection_key, str(error)) from None
        except TimeoutError:
            transport.abort()
            raise aiohttp.ConnectionTimeoutError(f"no proof within {PROOF_TIMEOUT_S} s") from None
        except OSError as error:
            transport.abort()
            raise aiohttp.ClientConnectorError(req.connection_key, error) from None
        except BaseException:
            transport.abort()
            raise
        protocol: ResponseHandler = factory()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return transport, protocol


class HandshakeProtocol(asyncio.Protocol):
    """Protocol of a new connection until its server has proved itself. It is replaced before the
    first request, so responses cost nothing more.
    """

    def __init__(self, key: ScopedKey) -> None:
        self._proof = ClientProof(key, secrets.token_bytes(NONCE_BYTES))
        # Result: the client's proof, which is sent before its first request.
        self.proved: Signal[bytes] = Signal()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._proof.hello)

    def data_received(self, data: bytes) -> None:
        if self.proved.done():
            return
        try:
            if answer := self._proof.receive(data):
                self.proved.set_result(answer)
        except ProofError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.proved.done():
            lost = ConnectionResetError("closed without a proof")
            self._fail(exc if isinstance(exc, OSError) else lost)

    def _fail(self, error: Exception) -> None:
        self.proved.set_exception(error)
        # The error is marked as retrieved, because the waiting task may have been cancelled.
        self.proved.exception()


async def _prove(transport: asyncio.Transport, greeter: HandshakeProtocol) -> None:
    """Prove both ends of a new connection. The caller installs the protocol of its requests before
    the event loop runs again.

    Raises:
        ProofError: the process at the far end did not prove itself.
        OSError: the connection was lost, TimeoutError included.
    """
    reply = greeter.proved
    await asyncio.wait({reply}, timeout=PROOF_TIMEOUT_S)
    if not reply.done():
        # After a stall of the event loop the timeout may run before the reply is read, which waits
        # in the socket.
        await asyncio.sleep(0)
    if not reply.done():
        raise TimeoutError
    transport.write(reply.result())
