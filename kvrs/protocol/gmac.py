"""Macs by GMAC: AES-GCM of which nothing but the tag is used.

A number that is used for two messages under one key gives the key away. So a key has one counter:
that of a direction of a connection (`session.py`), or that of a maker of row tags
(`transfer/rows/tags.py`).

On a processor with AES instructions GMAC takes a quarter of the time of keyed BLAKE3
(`experiments/row_pull`), and like BLAKE3 it lets other threads run.
"""

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrs.protocol.frames import Bytes

GMAC_BYTES = 16
_NONCE_BYTES = 12


class Gmac:
    """Macs under one key of 16, 24 or 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def mac(self, number: int, head: bytes, body: Bytes) -> bytes:
        """The mac of a message in two parts. The head is short; the body, bytes without a gap, is
        read in place.
        """
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES), head, body)[-GMAC_BYTES:]
