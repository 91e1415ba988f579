"""Tags of rows: MACs by which a server recognises rows of other nodes.

The tag of a row is the GMAC of its namespace, key and bytes, plus the salt and the number of the
tag: each process that makes tags derives a key of its own from the cluster's by a random salt, and
counts. The agent of the row's engine makes the tag once, when the row first leaves the node, after
the ledger has confirmed that the bytes belong to the key. A server that loads the row verifies the
tag, whichever agents and networks passed the row on.
"""

import hmac
import itertools
import struct
from collections.abc import Sequence

from kvrs.protocol.frames import GMAC_BYTES, Gmac
from kvrs.protocol.rows import TAG_BYTES, Space, encode_space
from kvrs.protocol.secrets import derive

SALT_BYTES = 16
_TAG = struct.Struct(f"!{SALT_BYTES}sQ{GMAC_BYTES}s")
assert _TAG.size == TAG_BYTES


class RowTagger:
    """Makes tags of rows. Threads may share it; a forked child must not."""

    def __init__(self, secret: bytes, salt: bytes) -> None:
        """`secret` is the cluster's; `salt` is random bytes that no other tagger has."""
        self._salt = salt
        self._gmac = _gmac(secret, salt)
        self._numbers = itertools.count()

    def make(self, space: Space, key: bytes, row: bytearray | memoryview) -> bytes:
        number = next(self._numbers)
        return _TAG.pack(self._salt, number, self._gmac.mac(number, _meaning(space, key), row))


class RowTags:
    """Verifies tags of rows."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        """`secrets`: the cluster's; a tag made under any of them is valid."""
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
    """Return bytes that identify a row: no two pairs of space and key have the same."""
    return encode_space(space) + key
