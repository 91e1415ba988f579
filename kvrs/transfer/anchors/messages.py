"""Messages between an agent, which owns memory, and the processes of its node that attach it.

One request and one answer on each connection of a UNIX socket; descriptors of the memory come with
the answer. Both ends prove that they have the cluster's secret.

    agent:    a nonce
    process:  a nonce, a mac, the request
    agent:    a mac, the answer

Each mac is an HMAC-SHA256 over both nonces and the message under a key that serves nothing else;
the two differ in a label, so that neither can be replayed as the other.
"""

import hmac
from hashlib import sha256
from typing import Annotated

import msgspec

from kvrs.errors import KvrsError
from kvrs.protocol.secrets import derive

NONCE_BYTES = 32
MAC_BYTES = 32
MAX_MESSAGE_BYTES = 1 << 16
SOCKET = "anchors"  # In the agent's directory.

_MOST = (1 << 63) - 1
Size = Annotated[int, msgspec.Meta(ge=1 << 12, le=1 << 48)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
# 32 hexadecimal digits, so that a name of a file can be made of it.
Key = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class AnchorError(KvrsError):
    """Memory cannot be attached; the message names its owner and the cause."""


class AttachMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="memory"):
    """The memory of an instance: its ledger, then its pages."""

    instance: Name
    epoch: Natural  # Of this start of the instance.
    kind: Key  # Of model and layout: memory of another kind is not adopted.
    size: Size


class AttachWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="weights"):
    """An arena of weights, to be read; or to be written, where there is none yet."""

    key: Key
    size: Size


class CommitWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="commit"):
    """The arena is whole, and its writer has it mapped no more."""

    key: Key


Request = AttachMemory | AttachWeights | CommitWeights


class AnchorAnswer(msgspec.Struct, frozen=True):
    """Comes with the descriptors of what was attached."""

    is_new: bool = False  # Memory: it is zero. Weights: they are to be written.
    is_busy: bool = False  # Another process writes them: ask again.
    refused: str = ""  # Why.


_ENCODER = msgspec.msgpack.Encoder()
_REQUESTS = msgspec.msgpack.Decoder(Request)
_ANSWERS = msgspec.msgpack.Decoder(AnchorAnswer)


def anchor_key(secret: bytes) -> bytes:
    return derive(secret, b"kvrs-anchors")


def encode_request(key: bytes, server_nonce: bytes, nonce: bytes, request: Request) -> bytes:
    body = _ENCODER.encode(request)
    return nonce + _mac(key, b"client", server_nonce + nonce + body) + body


def decode_request(
    keys: list[bytes], server_nonce: bytes, message: bytes
) -> tuple[Request, bytes, bytes]:
    """The request, its nonce, and the key that it proves.

    Raises:
        AnchorError: it proves none, or is none.
    """
    nonce, mac = message[:NONCE_BYTES], message[NONCE_BYTES : NONCE_BYTES + MAC_BYTES]
    body = message[NONCE_BYTES + MAC_BYTES :]
    for key in keys:
        if hmac.compare_digest(mac, _mac(key, b"client", server_nonce + nonce + body)):
            try:
                request: Request = _REQUESTS.decode(body)
                return request, nonce, key
            except msgspec.DecodeError as error:
                raise AnchorError(f"no request: {error}") from None
    raise AnchorError("authentication failed")


def encode_answer(key: bytes, server_nonce: bytes, nonce: bytes, answer: AnchorAnswer) -> bytes:
    body = _ENCODER.encode(answer)
    return _mac(key, b"server", server_nonce + nonce + body) + body


def decode_answer(key: bytes, server_nonce: bytes, nonce: bytes, message: bytes) -> AnchorAnswer:
    """Raises AnchorError: the other end is no agent of this cluster, or refuses."""
    mac, body = message[:MAC_BYTES], message[MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(key, b"server", server_nonce + nonce + body)):
        raise AnchorError("the agent does not know the secret, or refuses ours")
    try:
        answer: AnchorAnswer = _ANSWERS.decode(body)
    except msgspec.DecodeError as error:
        raise AnchorError(f"no answer: {error}") from None
    if answer.refused:
        raise AnchorError(answer.refused)
    return answer


def _mac(key: bytes, label: bytes, claims: bytes) -> bytes:
    return hmac.digest(key, label + claims, sha256)
