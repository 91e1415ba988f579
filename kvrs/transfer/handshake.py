"""The hand-shake of page ports and stages: both ends prove the key of the server (`secrets.py`),
and then compare their pages.

The key is of one scope, and of the server's instance and node, so a server cannot pass a proof on
to another one. HELLO, and WELCOME or REFUSED, have macs of the session already, so a client gets
the reason of a refusal only after it has proved the key.
"""

import secrets
from collections.abc import Callable, Sequence

from kvrs.errors import TransferError
from kvrs.protocol import frames
from kvrs.protocol.frames import FrameType
from kvrs.protocol.secrets import (
    NONCE_BYTES,
    ClientProof,
    ProofError,
    Scope,
    ScopedKey,
    ServerProof,
    scoped_key,
)
from kvrs.protocol.session import Session
from kvrs.transfer.peers import Identity, Peer
from kvrs.transfer.stream import SocketStream


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
