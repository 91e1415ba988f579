"""The cluster's shared secret, and the keys derived from it: one derived key per use."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

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
