"""MACs on the messages of a page connection after its hand-shake, so that nothing can be replaced,
repeated or inserted between the peers.

Each connection and direction has a key and counts its messages. A MAC is the GMAC of a message (for
a page: the start of its answer and the page) with the message's number as the nonce. It follows a
question and each page of a STORE, and stands between the start of an answer and its payload. Probe
data has none.

GMAC message authentication codes: the tags of AES-GCM without its encryption.

Two messages under one key and number reveal the key. So each key has one counter: per direction of
a connection (`session.py`), or per maker of row tags (`transfer/rows/tags.py`).

On a processor with AES instructions GMAC takes a quarter of the time of keyed BLAKE3
(`experiments/row_pull`), and like BLAKE3 it lets other threads run.
"""

import hmac

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvrs.errors import DamagedPageError
from kvrs.protocol.frames import ANSWER_BYTES, AnswerHeader, Bytes
from kvrs.protocol.frames import encode_answer as encode_start
from kvrs.protocol.secrets import derive

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


SESSION_MAC_BYTES = GMAC_BYTES
SEALED_ANSWER_BYTES = ANSWER_BYTES + SESSION_MAC_BYTES


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._gmac = Gmac(key)
        self.count = 0

    def mac(self, start: bytes, message: Bytes) -> bytes:
        """Return the MAC of the next message, which consists of a short `start` and `message`;
        neither is copied.
        """
        number = self.count
        self.count += 1
        return self._gmac.mac(number, start, message)


class Session:
    """One end of a connection. `secret` is derived from the nonces and identities of both ends."""

    def __init__(self, secret: bytes, *, is_client: bool) -> None:
        keys = [derive(secret, b"client"), derive(secret, b"server")]
        own, other = keys if is_client else reversed(keys)
        self._sending, self._receiving = _Direction(own), _Direction(other)

    def seal(self, message: Bytes) -> bytes:
        """Return the MAC to send with the next message."""
        return self._sending.mac(b"", message)

    def answer(self, answer: AnswerHeader, payload: Bytes = b"") -> bytes:
        """Return the start of the next answer to send, with the MAC of start and payload."""
        start = encode_start(answer)
        return start + self._sending.mac(start, payload)

    def check(self, mac: Bytes, message: Bytes) -> None:
        """Verify the next received message. Raises DamagedPageError: the peer did not send it like
        this.
        """
        self._compare(mac, self._receiving.mac(b"", message))

    def check_answer(self, mac: Bytes, answer: AnswerHeader, payload: Bytes = b"") -> None:
        """Verify the next received answer. Raises DamagedPageError: the peer did not send it like
        this.
        """
        self._compare(mac, self._receiving.mac(encode_start(answer), payload))

    def skip(self) -> None:
        """Count a received message without verifying it, as its contents are not used."""
        self._receiving.count += 1

    def _compare(self, mac: Bytes, due: bytes) -> None:
        if not hmac.compare_digest(bytes(mac), due):
            raise DamagedPageError("a page or message is not authentic")
