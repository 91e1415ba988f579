"""GMAC message authentication codes: the tags of AES-GCM without its encryption.

Two messages under one key and number reveal the key. So each key has one counter: per direction of
a connection (`session.py`), or per maker of row tags (`transfer/rows/tags.py`).

On a processor with AES instructions GMAC takes a quarter of the time of keyed BLAKE3
(`experiments/row_pull`), and like BLAKE3 it lets other threads run.
"""

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrs.protocol.frames import Bytes

GMAC_BYTES = 16
_NONCE_BYTES = 12


class Gmac:
    """Computes MACs under one key of 16, 24 or 32 bytes."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def mac(self, number: int, head: bytes, body: Bytes) -> bytes:
        """Return the MAC of message `number`, which consists of a short head and a contiguous body;
        the body is not copied.
        """
        return self._cipher.encrypt(number.to_bytes(_NONCE_BYTES), head, body)[-GMAC_BYTES:]
