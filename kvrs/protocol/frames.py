"""Frames of the page port: instances exchange KV pages and send checkpoints to agents.

The rules of a connection:

    Both ends prove the key of the server (`secrets.py`), then
    client: HELLO, server: WELCOME, or REFUSED and the end.
    Then the client asks and the server answers, one question at a time:

    question   answer
    PULL       PAGE and one page's bytes, or those of the part that is asked for, for every page in
               order; then END, or GONE at the first page that is not held
    PROBE      PROBE_DATA and that many bytes
    MAP        MAPPED: where the pages lie in files, whose descriptors come with it (agents only,
               over a UNIX socket). They stay there until UNMAP, which has no answer
    OFFER      HELD and one `HeldPages` (agents only)
    STORE and the bytes of all its pages in order
               HELD and one `HeldPages` for each range (agents only)

A frame is a header of 8 bytes (magic, version, type, length of the body) and a body; the body of a
question ends with a checksum, because a flipped bit in a tag would ask for another page. Each
message has a MAC besides (`Session`). No field is an address, and every length
is compared with a bound before memory is allocated for it or its bytes are awaited. Any mistake
raises `TransferError` that names it; the connection is then closed, since what follows cannot be
trusted to be a frame.

Checksums of the cells of a page, by which part of a stored page is checked without reading the
rest.

MACs on the messages of a page connection after its hand-shake, so that nothing can be replaced,
repeated or inserted between the peers.

Each connection and direction has a key and counts its messages. A MAC is the GMAC of a message (for
a page: the start of its answer and the page) with the message's number as the nonce. It follows a
question and each page of a STORE, and stands between the start of an answer and its payload. Probe
data has none.

GMAC message authentication codes: the tags of AES-GCM without its encryption.

Two messages under one key and number reveal the key. So each key has one counter: per direction of
a connection (`Session`), or per maker of row tags (`transfer/rows/tags.py`).

On a processor with AES instructions GMAC takes a quarter of the time of keyed BLAKE3
(`experiments/row_pull`), and like BLAKE3 it lets other threads run.
"""

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from kvrs.errors import DamagedPageError, TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.pages import (
    HEAD_BYTES,
    PLACE_BYTES,
    TAG_BYTES,
    CheckpointClaim,
    HeldPages,
    Identity,
    OfferFrame,
    PagePart,
    Part,
    ProbeFrame,
    PullFrame,
    PullRequest,
    StoreCode,
    StoredRange,
    StoreFrame,
    Tag,
    TrafficClass,
)
from kvrs.protocol.secrets import derive

VERSION = 9
MAX_NAME_BYTES = 255
MAX_REASON_BYTES = 512
MAX_TAGS = 1 << 16  # Most tags of one frame: a million tokens in pages of 16.
MAX_PAGE_BYTES = 1 << 30
MAX_CELLS = 1 << 16  # Most cells in one page.
MAX_PROBE_BYTES = 1 << 24
MAX_RANGES = 1 << 12  # Most ranges in one STORE; all together have at most MAX_TAGS pages.
CHECKSUM_BYTES = 8

Bytes = bytes | bytearray | memoryview

_MAGIC = b"KV"
_HEADER = struct.Struct("!2sBBI")
_ANSWER = struct.Struct("!IIQ")  # request id, index or size, checksum
_PROLOGUE = struct.Struct(_HEADER.format + _ANSWER.format[1:])
_PULL = struct.Struct("!IIBBI")  # request id, number of tags, traffic class, has a tail, tail index
# Layers and heads of a page; then the part: its first layer, first head, and the layer and head
# behind its last. Six zeros: whole pages.
_PART = struct.Struct("!6H")
_PROBE = struct.Struct("!II")  # request id, bytes
_IDENTITY = struct.Struct("!QII")  # epoch, bytes in a page, number of cells in a page
_CLAIM = struct.Struct("!QQ")  # owner epoch, attempt
_OFFER = struct.Struct("!IQI")  # request id, reserved bytes, number of tags
_STORE = struct.Struct("!II")  # request id, number of ranges
_RANGE = struct.Struct("!II")  # index of the first page in the history, number of pages
# value of `StoreCode`, number of the stream's leading pages that the agent holds
_HELD = struct.Struct("!BI")

HEADER_BYTES = _HEADER.size
# Bytes of the start of an answer, equal for all types, so that a reader knows how much to read
# next.
ANSWER_BYTES = HEADER_BYTES + _ANSWER.size


class FrameType(IntEnum):
    HELLO = 2
    WELCOME = 3
    REFUSED = 4
    PULL = 5
    PAGE = 6
    GONE = 7
    END = 8
    PROBE = 9
    PROBE_DATA = 10
    OFFER = 11
    STORE = 12
    HELD = 13
    MAP = 14
    MAPPED = 15
    UNMAP = 16


_TYPES = {int(frame_type): frame_type for frame_type in FrameType}
_TRAFFIC = {int(traffic): traffic for traffic in TrafficClass}
_CODES = {int(code): code for code in StoreCode}

_MAX_IDENTITY_BYTES = _IDENTITY.size + 3 * (1 + MAX_NAME_BYTES)
_MAX_CLAIM_BYTES = _CLAIM.size + 1 + MAX_NAME_BYTES
# Most bytes of a range in a STORE, without its tags and checksums.
_MAX_RANGE_BYTES = _MAX_CLAIM_BYTES + _RANGE.size
_MAX_BODY_BYTES = {
    FrameType.HELLO: _MAX_IDENTITY_BYTES,
    FrameType.WELCOME: _MAX_IDENTITY_BYTES,
    FrameType.REFUSED: MAX_REASON_BYTES,
    FrameType.PULL: _PULL.size
    + MAX_TAGS * TAG_BYTES
    + 1
    + MAX_NAME_BYTES
    + _PART.size
    + CHECKSUM_BYTES,
    FrameType.PAGE: _ANSWER.size + MAX_PAGE_BYTES,
    FrameType.GONE: _ANSWER.size,
    FrameType.END: _ANSWER.size,
    FrameType.PROBE: _PROBE.size + CHECKSUM_BYTES,
    FrameType.PROBE_DATA: _ANSWER.size + MAX_PROBE_BYTES,
    FrameType.OFFER: _OFFER.size + _MAX_CLAIM_BYTES + MAX_TAGS * TAG_BYTES + CHECKSUM_BYTES,
    FrameType.STORE: _STORE.size
    + MAX_RANGES * _MAX_RANGE_BYTES
    + MAX_TAGS * (TAG_BYTES + CHECKSUM_BYTES)
    + CHECKSUM_BYTES,
    FrameType.HELD: _ANSWER.size + MAX_RANGES * _HELD.size,
    FrameType.MAPPED: _ANSWER.size + HEAD_BYTES + MAX_TAGS * PLACE_BYTES,
    FrameType.UNMAP: CHECKSUM_BYTES,
}
_MAX_BODY_BYTES[FrameType.MAP] = _MAX_BODY_BYTES[FrameType.PULL]


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """The start of every answer; `payload_bytes` bytes follow it.

    `index` is the page's index in the request (its tail comes after the tags); for GONE the first
    missing page, for HELD the number of `HeldPages`; unused for PROBE_DATA and END.
    """

    type: FrameType
    request_id: int
    index: int
    checksum: int
    payload_bytes: int


def checksum(guarded: Bytes) -> int:
    """Return the xxh3-64 of a page or a question, which detects corruption; the MACs of
    `Session` detect forgery.
    """
    return xxh3_64_intdigest(guarded)


def decode_header(header: Bytes, *expected: FrameType) -> tuple[FrameType, int]:
    """Return the type of a frame, which must be one of `expected`, and the length of its body in
    bytes.

    Raises: TransferError: another type, or a body longer than that type allows.
    """
    if len(header) != HEADER_BYTES:
        raise TransferError(f"frame header of {len(header)} bytes instead of {HEADER_BYTES}")
    return _checked(expected, *_HEADER.unpack(header))


def _checked(
    expected: tuple[FrameType, ...], magic: bytes, version: int, type_: int, length: int
) -> tuple[FrameType, int]:
    if magic != _MAGIC:
        raise TransferError(f"not a frame: starts with {magic!r}")
    if version != VERSION:
        raise TransferError(f"frame version {version}, this end has {VERSION}")
    frame_type = _TYPES.get(type_)
    if frame_type is None or frame_type not in expected:
        raise TransferError(
            f"frame type {type_} where {' or '.join(wanted.name for wanted in expected)} is due"
        )
    if length > _MAX_BODY_BYTES[frame_type]:
        raise TransferError(
            f"{frame_type.name} of {length} bytes, at most {_MAX_BODY_BYTES[frame_type]} "
            f"are allowed"
        )
    return frame_type, length


def encode_hello(client: Identity) -> bytes:
    return _frame(FrameType.HELLO, _identity(client))


def decode_hello(body: bytes) -> Identity:
    return _decoded_identity(body, "HELLO")


def encode_welcome(server: Identity) -> bytes:
    return _frame(FrameType.WELCOME, _identity(server))


def decode_welcome(body: bytes) -> Identity:
    return _decoded_identity(body, "WELCOME")


def _decoded_identity(body: bytes, what: str) -> Identity:
    reader = _Reader(body, what)
    identity = reader.identity()
    reader.finish()
    return identity


def encode_refused(reason: str) -> bytes:
    return _frame(FrameType.REFUSED, reason.encode()[:MAX_REASON_BYTES])


def decode_refused(body: bytes) -> str:
    """Return the reason of a refusal as printable text."""
    text = body.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def encode_pull(pull: PullFrame, type_: FrameType = FrameType.PULL) -> bytes:
    """Encode a PULL, or a MAP of the same pages."""
    request = pull.request
    has_tail = request.tail_index is not None
    head = _PULL.pack(
        pull.request_id, _count(request.tags), request.traffic, has_tail, request.tail_index or 0
    )
    handoff, part = _name(request.handoff or ""), _PART.pack(*_part(request.part))
    return _question(type_, b"".join((head, *request.tags, handoff, part)))


def decode_pull(body: bytes) -> PullFrame:
    reader = _unsealed(body, "PULL")
    request_id, count, traffic, has_tail, tail_index = _PULL.unpack(reader.take(_PULL.size))
    tags = reader.tags(count)
    handoff = reader.name()
    part = _decoded_part(*_PART.unpack(reader.take(_PART.size)))
    reader.finish()
    if has_tail > 1 or (has_tail and not handoff) or (tail_index and not has_tail):
        raise TransferError(
            "PULL asks for a tail page without naming its hand-off, or names it twice"
        )
    if traffic not in _TRAFFIC:
        raise TransferError(f"PULL of traffic class {traffic}, allowed: 0 to {max(_TRAFFIC)}")
    stream, tail = StreamId(handoff) if handoff else None, tail_index if has_tail else None
    request = PullRequest(tags, stream, tail, _TRAFFIC[traffic], part)
    return PullFrame(request_id, request)


def _part(part: PagePart | None) -> tuple[int, ...]:
    if part is None:
        return (0,) * 6
    layers, heads = part.part.layers, part.part.heads
    return part.layers, part.heads, layers.start, layers.stop, heads.start, heads.stop


def _decoded_part(
    layers: int, heads: int, layer: int, last_layer: int, head: int, last_head: int
) -> PagePart | None:
    if not any((layers, heads, layer, last_layer, head, last_head)):
        return None
    if not (layer < last_layer <= layers and head < last_head <= heads):
        raise TransferError(
            f"PULL of layers [{layer}, {last_layer}) and heads [{head}, {last_head}) of pages with "
            f"{layers} layers and {heads} heads"
        )
    return PagePart(layers, heads, Part(range(layer, last_layer), range(head, last_head)))


def encode_unmap() -> bytes:
    return _question(FrameType.UNMAP, b"")


def encode_probe(probe: ProbeFrame) -> bytes:
    assert 0 < probe.size_bytes <= MAX_PROBE_BYTES, f"a probe of {probe.size_bytes} bytes"
    return _question(FrameType.PROBE, _PROBE.pack(probe.request_id, probe.size_bytes))


def decode_probe(body: bytes) -> ProbeFrame:
    reader = _unsealed(body, "PROBE")
    request_id, size_bytes = _PROBE.unpack(reader.take(_PROBE.size))
    reader.finish()
    if not 0 < size_bytes <= MAX_PROBE_BYTES:
        raise TransferError(f"PROBE for {size_bytes} bytes, allowed: 1 to {MAX_PROBE_BYTES}")
    return ProbeFrame(request_id, size_bytes)


def encode_offer(offer: OfferFrame) -> bytes:
    head = _OFFER.pack(offer.request_id, offer.reserved_bytes, _count(offer.tags))
    return _question(FrameType.OFFER, b"".join((head, _claim(offer.claim), *offer.tags)))


def decode_offer(body: bytes) -> OfferFrame:
    reader = _unsealed(body, "OFFER")
    request_id, reserved_bytes, count = _OFFER.unpack(reader.take(_OFFER.size))
    offer = OfferFrame(request_id, reader.claim(), reserved_bytes, reader.tags(count))
    reader.finish()
    return offer


def encode_store(store: StoreFrame) -> bytes:
    """Encode a STORE frame; the bytes of its pages are sent behind it."""
    assert 0 < len(store.ranges) <= MAX_RANGES, (
        f"{len(store.ranges)} ranges in one store, at most {MAX_RANGES}"
    )
    assert sum(_count(each.tags) for each in store.ranges) <= MAX_TAGS, (
        f"more than {MAX_TAGS} pages in one store"
    )
    parts = [_STORE.pack(store.request_id, len(store.ranges))]
    for each in store.ranges:
        assert len(each.tags) == len(each.checksums) > 0, (
            "a range has a checksum for each of its pages"
        )
        parts += (_claim(each.claim), _RANGE.pack(each.first_page, len(each.tags)), *each.tags)
        parts.append(struct.pack(f"!{len(each.checksums)}Q", *each.checksums))
    return _question(FrameType.STORE, b"".join(parts))


def decode_store(body: bytes) -> StoreFrame:
    reader = _unsealed(body, "STORE")
    request_id, count = _STORE.unpack(reader.take(_STORE.size))
    if not 0 < count <= MAX_RANGES:
        raise TransferError(f"STORE of {count} ranges, allowed: 1 to {MAX_RANGES}")
    ranges = tuple([_range(reader) for _ in range(count)])
    reader.finish()
    if (pages := sum(len(each.tags) for each in ranges)) > MAX_TAGS:
        raise TransferError(f"STORE of {pages} pages, at most {MAX_TAGS} are allowed")
    return StoreFrame(request_id, ranges)


def _range(reader: "_Reader") -> StoredRange:
    claim = reader.claim()
    first_page, pages = _RANGE.unpack(reader.take(_RANGE.size))
    if pages == 0:
        raise TransferError("STORE of a range without pages")
    tags = reader.tags(pages)
    return StoredRange(
        claim, first_page, tags, struct.unpack(f"!{pages}Q", reader.take(pages * CHECKSUM_BYTES))
    )


def encode_held(request_id: int, held: Sequence[HeldPages]) -> tuple[AnswerHeader, bytes]:
    """Encode `held`, one `HeldPages` per range, as a HELD answer: its start and its payload."""
    records = b"".join(_HELD.pack(one.code, one.pages) for one in held)
    return AnswerHeader(FrameType.HELD, request_id, len(held), 0, len(records)), records


def held_bytes(count: int) -> int:
    """Return the length in bytes of the payload of a HELD answer with `count` `HeldPages`."""
    return count * _HELD.size


def decode_held(payload: Bytes) -> list[HeldPages]:
    if len(payload) % _HELD.size:
        raise TransferError(f"HELD of {len(payload)} bytes, not a multiple of {_HELD.size}")
    records = list(_HELD.iter_unpack(payload))
    if unknown := {code for code, _ in records} - _CODES.keys():
        raise TransferError(f"HELD with code {min(unknown)}, allowed: 0 to {max(_CODES)}")
    return [HeldPages(_CODES[code], pages) for code, pages in records]


def encode_answer(answer: AnswerHeader) -> bytes:
    """Encode the start of an answer, `ANSWER_BYTES` long; the payload is sent behind it."""
    length = _ANSWER.size + answer.payload_bytes
    return _PROLOGUE.pack(
        _MAGIC, VERSION, answer.type, length, answer.request_id, answer.index, answer.checksum
    )


def decode_answer(prologue: Bytes, *expected: FrameType) -> AnswerHeader:
    """Decode the start of an answer, whose type must be one of `expected`."""
    if len(prologue) != ANSWER_BYTES:
        raise TransferError(
            f"start of an answer of {len(prologue)} bytes instead of {ANSWER_BYTES}"
        )
    magic, version, type_, length, request_id, index, checksum = _PROLOGUE.unpack(prologue)
    frame_type, _ = _checked(expected, magic, version, type_, length)
    if length < _ANSWER.size:
        raise TransferError(f"{frame_type.name} of {length} bytes is too short")
    return AnswerHeader(frame_type, request_id, index, checksum, length - _ANSWER.size)


def _identity(identity: Identity) -> bytes:
    assert 0 < identity.page_bytes <= MAX_PAGE_BYTES, f"pages of {identity.page_bytes} bytes"
    names = _name(identity.instance) + _name(identity.node) + _name(identity.fingerprint)
    return _IDENTITY.pack(identity.epoch, identity.page_bytes, identity.page_cells) + names


def _name(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) <= MAX_NAME_BYTES, f"name of {len(encoded)} bytes: {text[:40]!r}"
    return bytes((len(encoded),)) + encoded


def _claim(claim: CheckpointClaim) -> bytes:
    return _CLAIM.pack(claim.owner_epoch, claim.attempt) + _name(claim.stream)


def _count(tags: Sequence[Tag]) -> int:
    assert len(tags) <= MAX_TAGS, f"{len(tags)} tags in one frame, at most {MAX_TAGS}"
    return len(tags)


def _question(type_: FrameType, body: bytes) -> bytes:
    return _frame(type_, body + checksum(body).to_bytes(CHECKSUM_BYTES))


def _unsealed(body: bytes, what: str) -> "_Reader":
    question, sent = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
    if checksum(question).to_bytes(CHECKSUM_BYTES) != sent:
        raise TransferError(f"checksum of {what} is wrong")
    return _Reader(question, what)


def _frame(type_: FrameType, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, type_, len(body)) + body


class _Reader:
    """Reads the fields of a frame's body in order. Raises TransferError before it would read past
    the end.
    """

    def __init__(self, body: bytes, what: str) -> None:
        self._body = body
        self._what = what
        self._offset = 0

    def take(self, size: int) -> bytes:
        end = self._offset + size
        if end > len(self._body):
            raise TransferError(
                f"{self._what} cut off: {len(self._body)} bytes, at least {end} are needed"
            )
        part = self._body[self._offset : end]
        self._offset = end
        return part

    def name(self) -> str:
        (size,) = self.take(1)
        try:
            return self.take(size).decode()
        except UnicodeDecodeError:
            raise TransferError(f"{self._what} holds a name that is not UTF-8") from None

    def identity(self) -> Identity:
        epoch, page_bytes, cells = _IDENTITY.unpack(self.take(_IDENTITY.size))
        known = 0 < page_bytes <= MAX_PAGE_BYTES and 0 < cells <= MAX_CELLS
        if not known or page_bytes % cells:
            raise TransferError(
                f"{self._what} names pages of {page_bytes} bytes in {cells} cells, allowed: 1 to "
                f"{MAX_PAGE_BYTES}, in 1 to {MAX_CELLS} of the same size"
            )
        names = self.name(), self.name(), self.name()
        return Identity(InstanceId(names[0]), NodeId(names[1]), epoch, names[2], page_bytes, cells)

    def claim(self) -> CheckpointClaim:
        owner_epoch, attempt = _CLAIM.unpack(self.take(_CLAIM.size))
        return CheckpointClaim(StreamId(self.name()), owner_epoch, attempt)

    def tags(self, count: int) -> tuple[Tag, ...]:
        if count > MAX_TAGS:
            raise TransferError(f"{self._what} of {count} tags, at most {MAX_TAGS} are allowed")
        joined = self.take(count * TAG_BYTES)
        # Build a list first: a tuple that grows from a generator is taken from one of Python's free
        # lists of tuples and returned to another, and those lists would fill for hours.
        starts = range(0, len(joined), TAG_BYTES)
        return tuple([Tag(joined[start : start + TAG_BYTES]) for start in starts])

    def finish(self) -> None:
        if self._offset != len(self._body):
            raise TransferError(f"{self._what} has {len(self._body) - self._offset} bytes too many")


def cell_checksums(guarded: Bytes, cells: int) -> bytes:
    """Return the `checksum` (8 bytes) of each of the `cells` equal runs of bytes of a page, joined
    in order.
    """
    view = memoryview(guarded)
    size = len(view) // cells
    starts = range(0, len(view), size)
    return b"".join([xxh3_64_digest(view[start : start + size]) for start in starts])


def part_checksum(checksums: Bytes) -> int:
    """Return the checksum of a part of a page, given the joined checksums of its cells, by layer
    and then by head.
    """
    return checksum(checksums)


def checksum_of(sent: Bytes, part: PagePart | None) -> int:
    """Return the checksum for the bytes that are sent of a page: the page's own (`part` is None),
    or that of a part, computed from its cells.
    """
    if part is None:
        return checksum(sent)
    return part_checksum(cell_checksums(sent, part.part.cells))


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
        start = encode_answer(answer)
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
        self._compare(mac, self._receiving.mac(encode_answer(answer), payload))

    def skip(self) -> None:
        """Count a received message without verifying it, as its contents are not used."""
        self._receiving.count += 1

    def _compare(self, mac: Bytes, due: bytes) -> None:
        if not hmac.compare_digest(bytes(mac), due):
            raise DamagedPageError("a page or message is not authentic")
