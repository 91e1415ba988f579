"""Both ends prove that they know the cluster's secret, and agree that their pages are alike.

Each proof is an HMAC-SHA256 over both nonces, both identities and the fingerprint, under a key that serves nothing else;
the two differ in a label, so neither can be played back as the other. The client names the server that it means, so a
server cannot pass on its proof to another one. A peer is told why it is refused only after it has proved the secret.
"""

import hmac
import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import FrameType, Hello, Identity, Welcome
from kvrs.protocol.secrets import MIN_SECRET_BYTES, derive
from kvrs.transfer.peers import Peer
from kvrs.transfer.stream import SocketStream


def page_key(secret: bytes) -> bytes:
    assert len(secret) >= MIN_SECRET_BYTES, f"a secret of {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed"
    return derive(secret, b"kvrs-pages")


async def admit(
    stream: SocketStream,
    key: bytes,
    identity: Callable[[], Identity],
    adopt: Callable[[Identity], None] = lambda client: None,
    older: Sequence[bytes] = (),
) -> tuple[Identity, Identity]:
    """The server's part: who we said that we are, and who the client is. A client that is refused is told why, if it may know.
    One that knows an `older` key is answered with that.

    `adopt` is called with a client that knows the secret and means this server; it may change what `identity` says.
    """
    nonce = secrets.token_bytes(frames.NONCE_BYTES)
    await stream.send(frames.encode_challenge(nonce))
    _, body = await stream.receive_frame(FrameType.HELLO)
    hello = frames.decode_hello(body)
    proven = [each for each in (key, *older) if hmac.compare_digest(hello.mac, _client_mac(each, nonce, hello))]
    reason = _refusal(hello, identity()) if proven else "authentication failed"
    if reason is None:
        adopt(hello.client)
        reason = _mismatch(hello.client, identity())
    if reason is not None:
        await stream.send(frames.encode_refused(reason))
        raise TransferError(f"refused {hello.client.instance!r}: {reason}")
    own = identity()
    await stream.send(frames.encode_welcome(Welcome(own, _server_mac(proven[0], nonce, hello, own))))
    return own, hello.client


async def introduce(stream: SocketStream, key: bytes, own: Identity, peer: Peer) -> Identity:
    """The client's part: who the server is, which is `peer`, with pages like `own`."""
    _, body = await stream.receive_frame(FrameType.CHALLENGE)
    nonce = frames.decode_challenge(body)
    hello = Hello(secrets.token_bytes(frames.NONCE_BYTES), own, peer.instance, peer.node, mac=b"")
    hello = Hello(hello.nonce, own, peer.instance, peer.node, _client_mac(key, nonce, hello))
    await stream.send(frames.encode_hello(hello))
    answer, body = await stream.receive_frame(FrameType.WELCOME, FrameType.REFUSED)
    if answer is FrameType.REFUSED:
        raise TransferError(f"refused by the peer: {frames.decode_refused(body)}")
    welcome = frames.decode_welcome(body)
    if not hmac.compare_digest(welcome.mac, _server_mac(key, nonce, hello, welcome.server)):
        raise TransferError("the peer does not know the secret")
    server = welcome.server
    if (server.instance, server.node) != (peer.instance, peer.node):
        raise TransferError(f"the peer is {server.instance!r} on {server.node!r}, not {peer.instance!r} on {peer.node!r}")
    if reason := _mismatch(server, own):
        raise TransferError(reason)
    return server


def _refusal(hello: Hello, own: Identity) -> str | None:
    if (hello.server_instance, hello.server_node) != (own.instance, own.node):
        return f"this is {own.instance!r} on {own.node!r}, not {hello.server_instance!r} on {hello.server_node!r}"
    return None


def _mismatch(other: Identity, own: Identity) -> str | None:
    if other.fingerprint != own.fingerprint:
        return f"fingerprints differ: {other.fingerprint!r} and {own.fingerprint!r}"
    if other.page_bytes != own.page_bytes:
        return f"page_bytes differ: {other.page_bytes} and {own.page_bytes}"
    return None


def _client_mac(key: bytes, server_nonce: bytes, hello: Hello) -> bytes:
    return hmac.digest(key, b"client" + server_nonce + frames.hello_claims(hello), sha256)


def _server_mac(key: bytes, server_nonce: bytes, hello: Hello, server: Identity) -> bytes:
    claims = frames.hello_claims(hello) + frames.identity_bytes(server)
    return hmac.digest(key, b"server" + server_nonce + claims, sha256)
