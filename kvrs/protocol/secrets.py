"""The cluster's shared secret, and what is derived from it. One secret, one derived key per use."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256

MIN_SECRET_BYTES = 16
KEY_ID_BYTES = 8


class Door(StrEnum):
    """The kind of access that a key gives, at the process that it was derived for."""

    INSTANCE = "instance"  # Requests, load, leases and fences of an instance.
    AGENT = "agent"  # Holdings, leases and slots of an agent.
    PROXY = "proxy"  # The port of a proxy for the other proxies.
    ADMIN = "admin"  # Faults and the cache of an instance, faults of an agent.


@dataclass(frozen=True, slots=True)
class DoorKey:
    """The key of one door of one process; `id` tells keys of several secrets apart."""

    door: Door
    key: bytes = field(repr=False)
    id: bytes


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key for one purpose, which reveals nothing of the secret or of the other keys."""
    return hmac.digest(secret, purpose, sha256)


def door_key(secret: bytes, door: Door, name: str) -> DoorKey:
    """The key of a door of the process `name`: the id of an instance, an agent or a proxy."""
    key = derive(derive(secret, f"kvrs-{door}".encode()), name.encode())
    return DoorKey(door, key, derive(key, b"id")[:KEY_ID_BYTES])


def door_keys(secrets: Sequence[bytes], name: str, *doors: Door) -> list[DoorKey]:
    """Keys that a process accepts at its doors: one key for each secret of the cluster."""
    return [door_key(secret, door, name) for secret in secrets for door in doors]
