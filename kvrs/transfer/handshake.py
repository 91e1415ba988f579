"""The hand-shake: both ends prove that they have the cluster's secret, and compare their pages.

Each proof is an HMAC-SHA256 over both nonces, both identities and the fingerprint, under a key that
serves nothing else; the two differ in a label, so neither can be replayed as the other. The client
names the server that it addresses, so a server cannot pass on its proof to another one. A client
gets the reason of a refusal only after it has proved the secret. A third HMAC is the secret of the
session, whose macs guard what follows.
"""

import hmac
import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import FrameType
from kvrs.protocol.page_messages import ClientHello, Identity, ServerWelcome
from kvrs.protocol.secrets import MIN_SECRET_BYTES, derive
from kvrs.protocol.session import Session
from kvrs.transfer.peers import Peer
from kvrs.transfer.stream import SocketStream


class PeerRefusedError(TransferError):
    """The two ends do not belong together, and a further attempt would end in the same way."""


def page_key(secret: bytes) -> bytes:
    assert len(secret) >= MIN_SECRET_BYTES, (
        f"a secret of {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
    )
    return derive(secret, b"kvrs-pages")


async def admit(
    stream: SocketStream,
    key: bytes,
    identity: Callable[[], Identity],
    adopt: Callable[[Identity], None] = lambda client: None,
    older: Sequence[bytes] = (),
) -> tuple[Identity, Identity]:
    """The server's part. A client that proves an `older` key is answered with that key.

    `adopt` is called with a client that has the secret and addresses this server; it may change
    what `identity` returns.

    Returns:
        the identity that the client was given, and the client's.

    Raises:
        TransferError: the client was refused.
    """
    nonce = secrets.token_bytes(frames.NONCE_BYTES)
    await stream.send(frames.encode_challenge(nonce))
    _, body = await stream.receive_frame(FrameType.HELLO)
    hello = frames.decode_hello(body)
    proven = [
        each
        for each in (key, *older)
        if hmac.compare_digest(hello.mac, _client_mac(each, nonce, hello))
    ]
    reason = _refusal(hello, identity()) if proven else "authentication failed"
    if reason is None:
        adopt(hello.client)
        reason = _mismatch(hello.client, identity())
    if reason is not None:
        await stream.send(frames.encode_refused(reason))
        raise TransferError(f"refused {hello.client.instance!r}: {reason}")
    own = identity()
    await stream.send(
        frames.encode_welcome(ServerWelcome(own, _server_mac(proven[0], nonce, hello, own)))
    )
    stream.begin(Session(_session_secret(proven[0], nonce, hello, own), is_client=False))
    return own, hello.client


async def introduce(stream: SocketStream, key: bytes, own: Identity, peer: Peer) -> Identity:
    """The client's part. Returns the identity of the server: `peer`, with pages like `own`.

    Raises:
        PeerRefusedError: it refused, does not have the secret, or is another one.
        TransferError: the connection was lost.
    """
    _, body = await stream.receive_frame(FrameType.CHALLENGE)
    nonce = frames.decode_challenge(body)
    hello = ClientHello(
        secrets.token_bytes(frames.NONCE_BYTES), own, peer.instance, peer.node, mac=b""
    )
    hello = ClientHello(hello.nonce, own, peer.instance, peer.node, _client_mac(key, nonce, hello))
    await stream.send(frames.encode_hello(hello))
    answer, body = await stream.receive_frame(FrameType.WELCOME, FrameType.REFUSED)
    if answer is FrameType.REFUSED:
        raise PeerRefusedError(f"refused by the peer: {frames.decode_refused(body)}")
    welcome = frames.decode_welcome(body)
    if not hmac.compare_digest(welcome.mac, _server_mac(key, nonce, hello, welcome.server)):
        raise PeerRefusedError("the peer does not know the secret")
    server = welcome.server
    if (server.instance, server.node) != (peer.instance, peer.node):
        raise PeerRefusedError(
            f"the peer is {server.instance!r} on {server.node!r}, not {peer.instance!r} "
            f"on {peer.node!r}"
        )
    if reason := _mismatch(server, own):
        raise PeerRefusedError(reason)
    stream.begin(Session(_session_secret(key, nonce, hello, server), is_client=True))
    return server


def _refusal(hello: ClientHello, own: Identity) -> str | None:
    if (hello.server_instance, hello.server_node) != (own.instance, own.node):
        return (
            f"this is {own.instance!r} on {own.node!r}, not {hello.server_instance!r} on "
            f"{hello.server_node!r}"
        )
    return None


def _mismatch(other: Identity, own: Identity) -> str | None:
    if other.fingerprint != own.fingerprint:
        return f"fingerprints differ: {other.fingerprint!r} and {own.fingerprint!r}"
    if other.page_bytes != own.page_bytes:
        return f"page_bytes differ: {other.page_bytes} and {own.page_bytes}"
    if other.page_cells != own.page_cells:
        return f"page_cells differ: {other.page_cells} and {own.page_cells}"
    return None


def _client_mac(key: bytes, server_nonce: bytes, hello: ClientHello) -> bytes:
    return hmac.digest(key, b"client" + server_nonce + frames.hello_claims(hello), sha256)


def _server_mac(key: bytes, server_nonce: bytes, hello: ClientHello, server: Identity) -> bytes:
    return _claims_mac(key, b"server", server_nonce, hello, server)


def _session_secret(key: bytes, server_nonce: bytes, hello: ClientHello, server: Identity) -> bytes:
    return _claims_mac(key, b"session", server_nonce, hello, server)


def _claims_mac(
    key: bytes, label: bytes, server_nonce: bytes, hello: ClientHello, server: Identity
) -> bytes:
    claims = frames.hello_claims(hello) + frames.identity_bytes(server)
    return hmac.digest(key, label + server_nonce + claims, sha256)
