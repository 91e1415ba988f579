"""Questions of the page wire made by hand, as no client of ours asks them."""

from kvrs.protocol import frames
from kvrs.protocol.frames import FrameType

# How every frame begins. Of another version it would be refused for that alone, whatever else is
# wrong with it.
KV = b"KV" + bytes((frames.VERSION,))


def sealed(fields: bytes | bytearray) -> bytes:
    """A body with the checksum that is right for it, so that nothing but its fields can be
    wrong.
    """
    return bytes(fields) + frames.checksum(fields).to_bytes(frames.CHECKSUM_BYTES)


def unsealed(body: bytes) -> bytearray:
    return bytearray(body[: -frames.CHECKSUM_BYTES])


def question(frame_type: FrameType, fields: bytes) -> bytes:
    body = sealed(fields)
    return KV + bytes((frame_type,)) + len(body).to_bytes(4) + body
