"""The cluster's shared secret, and the keys derived from it: one derived key per use.

Values derived from the cluster's secret per tenant: the keys of its records and the salt of its
pages. No value of one tenant is valid for another. Pure.

A tenant is an owner's name, or without API keys the value of `Authorization`. Other proxies get
derived values only, never the name, the API key or the client's idempotency key.

Mutual proof at the start of a connection between processes of the cluster: before anything else
is sent, each end proves that it has the key of one scope of the server.

    client: HELLO   the id of its key, a nonce
    server: PROOF   a nonce, a MAC; or REFUSED and the end
    client: PROOF   a MAC; what it sends next follows at once

Each MAC is an HMAC-SHA256 over both nonces under the key of the scope, derived for this server; a
label differs between the two, so neither can be replayed as the other. A third HMAC is the secret
of the session, for connections whose messages have MACs. A message is a line of ASCII and an empty
line: a server without this protocol answers it as broken HTTP.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

from kvrs.errors import KvrsError

MIN_SECRET_BYTES = 16
KEY_ID_BYTES = 8


class Scope(StrEnum):
    """A kind of access to one process; a key gives access of one kind."""

    INSTANCE = "instance"  # Requests, load, leases and fences of an instance.
    AGENT = "agent"  # Holdings, leases and slots of an agent.
    ROWS = "rows"  # Rows in the host memory of engines, served by an agent.
    PAGES = "pages"  # The page port of an instance or agent.
    STAGES = "stages"  # The port of a stage host.
    PROXY = "proxy"  # The port of a proxy for the other proxies.
    ADMIN = "admin"  # Faults and cache of an instance, and faults of an agent.


@dataclass(frozen=True, slots=True)
class ScopedKey:
    """The key of one scope of one process; `id` distinguishes keys of several secrets."""

    scope: Scope
    key: bytes = field(repr=False)
    id: bytes


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key for one purpose, which reveals neither the secret nor other keys."""
    return hmac.digest(secret, purpose, sha256)


def scoped_key(secret: bytes, scope: Scope, name: str) -> ScopedKey:
    """Derive the key of a scope of the process `name`, the id of an instance, agent or proxy."""
    key = derive(derive(secret, f"kvrs-{scope}".encode()), name.encode())
    return ScopedKey(scope, key, derive(key, b"id")[:KEY_ID_BYTES])


def scoped_keys(secrets: Sequence[bytes], name: str, *scopes: Scope) -> list[ScopedKey]:
    """Derive the keys that the process `name` accepts for these scopes, one for each secret of the
    cluster and scope.
    """
    return [scoped_key(secret, scope, name) for secret in secrets for scope in scopes]


_MARK_BYTES = 8


class TenantSecret:
    """A tenant's derived values. `ring` has the cluster's secrets: the first makes new values; the
    others find records made before the secret was replaced.
    """

    __slots__ = ("_roots", "mark")

    def __init__(self, ring: Sequence[bytes], owner: bytes) -> None:
        self._roots = [derive(derive(secret, b"kvrs-tenants"), owner) for secret in ring]
        # Value that tells tenants apart without their names.
        self.mark = derive(self._roots[0], b"mark")[:_MARK_BYTES].hex()

    def record_keys(self, key: str) -> list[str]:
        """Return the keys of a stream's record for the client's idempotency key, one per secret of
        the cluster.
        """
        return [derive(root, b"record\0" + key.encode()).hex() for root in self._roots]

    def salt(self, cache_salt: str) -> str:
        """Return the salt of the tenant's pages; `cache_salt`, from the client, divides the pages
        further.
        """
        return derive(self._roots[0], b"salt\0" + cache_salt.encode()).hex()


NONCE_BYTES = 32
END = b"\r\n\r\n"
MAX_MESSAGE_BYTES = 256

_PREFIX = b"KVRS-PROOF/1 "
_MAC_HEX = 2 * sha256().digest_size
_HELLO_BYTES = len(_PREFIX) + 2 * KEY_ID_BYTES + 1 + 2 * NONCE_BYTES + len(END)
_REPLY_BYTES = len(_PREFIX) + 2 * NONCE_BYTES + 1 + _MAC_HEX + len(END)
_PROOF_BYTES = len(_PREFIX) + _MAC_HEX + len(END)
_REFUSED = (_PREFIX + b"refused").ljust(_REPLY_BYTES - len(END)) + END
# Message of the error about a server that speaks the protocol but refuses the key.
WRONG_DOOR = "it is another process, or was started with another secret"


class ProofError(KvrsError):
    """The other end failed to prove that it has the key."""


class ServerProof:
    """The server's side of the proof on one connection. `scope` is set once the client has proved
    its key.
    """

    def __init__(self, keys: Sequence[ScopedKey], nonce: bytes) -> None:
        self._keys = {key.id: key for key in keys}
        self._nonce = nonce
        self._buffer = b""
        self._claimed: ScopedKey | None = None
        self._expected = b""  # MAC that the client must send.
        self.session_secret = b""
        self.is_over = False
        self.scope: ScopedKey | None = None

    @property
    def wanted_bytes(self) -> int:
        """Most bytes that the caller may read now without reading past the client's proof."""
        return _wanted(self._buffer, _HELLO_BYTES if self._claimed is None else _PROOF_BYTES)

    def receive(self, data: bytes) -> tuple[bytes, bytes]:
        """Parse received bytes; return the answer to send and, once the hand-shake is over, the
        bytes behind it. A connection that does not begin with HELLO has proved nothing.

        Raises:
            ProofError: a malformed message or a wrong MAC; the caller ends the connection.
        """
        self._buffer += data
        if not self._buffer.startswith(_PREFIX[: len(self._buffer)]):
            if self._claimed is not None:
                raise ProofError("no proof follows")
            self.is_over = True
            return b"", self._buffer
        message, end, rest = self._buffer.partition(END)
        # The last three bytes may be the beginning of the message's end.
        if len(message) > (MAX_MESSAGE_BYTES if end else MAX_MESSAGE_BYTES + len(END) - 1):
            raise ProofError("a message without an end")
        if not end:
            return b"", b""
        self._buffer = rest
        fields = _fields(message)
        if self._claimed is None:
            return self._answer(fields), b""
        if len(fields) != 1 or not hmac.compare_digest(fields[0], self._expected):
            raise ProofError("wrong mac")
        self.is_over, self.scope = True, self._claimed
        return b"", rest

    def _answer(self, fields: list[bytes]) -> bytes:
        if len(fields) != 2 or len(fields[1]) != NONCE_BYTES:
            raise ProofError("HELLO is a key id and a nonce")
        if (key := self._keys.get(fields[0])) is None:
            self.is_over = True
            return _REFUSED
        self._claimed = key
        nonces = fields[1] + self._nonce
        self._expected = _mac(key, b"client", nonces)
        self.session_secret = _mac(key, b"session", nonces)
        return _message(self._nonce, _mac(key, b"server", nonces))


class ClientProof:
    """The client's side of the proof: the caller sends `hello` first, and then what `receive`
    returns.
    """

    def __init__(self, key: ScopedKey, nonce: bytes) -> None:
        self._key = key
        self._nonce = nonce
        self._buffer = b""
        self.session_secret = b""
        self.hello = _message(key.id, nonce)

    @property
    def wanted_bytes(self) -> int:
        """Most bytes that the caller may read now without reading past the server's proof."""
        return _wanted(self._buffer, _REPLY_BYTES)

    def receive(self, data: bytes) -> bytes:
        """Take received bytes; return the client's proof once the server's message is complete, and
        until then nothing.

        Raises:
            ProofError: the server did not prove its key; the message names what it is instead.
        """
        self._buffer += data
        reply = self._buffer
        if not reply.startswith(_PREFIX[: len(reply)]):
            is_http = reply.startswith(b"HTTP/")
            raise ProofError("another server answers there" if is_http else "its proof is nonsense")
        message, end, rest = reply.partition(END)
        if not end and len(reply) <= MAX_MESSAGE_BYTES:
            return b""
        if reply == _REFUSED:
            raise ProofError(WRONG_DOOR)
        fields = _fields(message) if end and not rest else []
        if len(fields) != 2 or len(fields[0]) != NONCE_BYTES:
            raise ProofError("its proof is nonsense")
        nonces = self._nonce + fields[0]
        if not hmac.compare_digest(fields[1], _mac(self._key, b"server", nonces)):
            raise ProofError("its proof is wrong")
        self.session_secret = _mac(self._key, b"session", nonces)
        return _message(_mac(self._key, b"client", nonces))


def _wanted(received: bytes, message_bytes: int) -> int:
    # Do not wait for the end of bytes that do not begin like a message.
    whole = message_bytes if len(received) >= len(_PREFIX) else len(_PREFIX)
    return max(1, whole - len(received))


def _mac(key: ScopedKey, label: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key.key, label + nonces, sha256)


def _message(*fields: bytes) -> bytes:
    return _PREFIX + b" ".join(field.hex().encode() for field in fields) + END


def _fields(message: bytes) -> list[bytes]:
    """Split a message into its fields. Raises ProofError."""
    try:
        return [bytes.fromhex(each) for each in message[len(_PREFIX) :].decode("ascii").split(" ")]
    except ValueError:  # UnicodeDecodeError is a ValueError too.
        raise ProofError("a field is not hexadecimal") from None
