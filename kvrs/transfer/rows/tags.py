"""Tags of rows: macs by which a server knows a row that came from another node.

The tag of a row is GMAC over its namespace, key and bytes, beside the salt and the number of the
tag: each process that makes tags derives a key of its own from that of the cluster by a random
salt, and counts. The agent of the row's engine makes the tag once, as the row first leaves the
node, behind the ledger's word that the bytes are those of the key, and a server that loads the row
verifies it, whichever agents and networks the row came by.
"""

import hmac
import itertools
import struct
from collections.abc import Sequence

from kvrs.protocol.gmac import GMAC_BYTES, Gmac
from kvrs.protocol.rows import TAG_BYTES, Space, encode_space
from kvrs.protocol.secrets import derive

SALT_BYTES = 16
_TAG = struct.Struct(f"!{SALT_BYTES}sQ{GMAC_BYTES}s")
assert _TAG.size == TAG_BYTES


class RowTagger:
    """Makes tags of rows. May be used by several threads, not by a forked child."""

    def __init__(self, secret: bytes, salt: bytes) -> None:
        """`secret`: the cluster's; `salt`: random bytes that no other object has."""
        self._salt = salt
        self._gmac = _gmac(secret, salt)
        self._numbers = itertools.count()

    def make(self, space: Space, key: bytes, row: bytearray | memoryview) -> bytes:
        number = next(self._numbers)
        return _TAG.pack(self._salt, number, self._gmac.mac(number, _meaning(space, key), row))


class RowTags:
    """Verifies tags of rows."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """A tag is right by any of the cluster's secrets."""
        self._secrets = secrets

    def is_right(self, tag: bytes, space: Space, key: bytes, row: bytearray | memoryview) -> bool:
        if len(tag) != TAG_BYTES:
            return False
        salt, number, mac = _TAG.unpack(tag)
        meaning = _meaning(space, key)
        return any(
            hmac.compare_digest(mac, _gmac(each, salt).mac(number, meaning, row))
            for each in self._secrets
        )


def _gmac(secret: bytes, salt: bytes) -> Gmac:
    return Gmac(derive(derive(secret, b"kvrs-row-tags"), salt))


def _meaning(space: Space, key: bytes) -> bytes:
    """Return what a row's bytes stand for; no other space and key have the same."""
    return encode_space(space) + key
