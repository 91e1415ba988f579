"""The cluster's shared secret, and what is derived from it. One secret, one derived key per use."""

import hmac
from hashlib import sha256

MIN_SECRET_BYTES = 16


def derive(secret: bytes, purpose: bytes) -> bytes:
    """A key for one purpose; knowing it tells nothing of the secret or of the other keys."""
    return hmac.digest(secret, purpose, sha256)


def http_token(secret: bytes) -> str:
    """The bearer token that instances ask of whoever speaks the instance protocol to them."""
    return derive(secret, b"kvrs-http").hex()
