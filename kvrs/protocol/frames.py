"""Frames of the page port: how KV pages cross from one instance to another, and to the agents that keep checkpoints.

The laws of a connection:

    server: CHALLENGE, client: HELLO, server: WELCOME or REFUSED and the end.
    Then the client asks and the server answers, one question at a time:
    PULL  -> PAGE (followed by one page's bytes) for every page in order, then END, or GONE where the run breaks off
    PROBE -> PROBE_DATA (followed by that many bytes)
    OFFER -> HELD (followed by one `Held`); agents only, as is
    STORE, followed by the bytes of all its pages in order -> HELD (followed by one `Held` for each run)

A frame is a header of 8 bytes (magic, version, type, length of the body) and a body; that of a question ends with its
checksum, or a bit that turned over on the way might ask for another page than is meant. Nothing in it is an address, and
every length is compared with a bound before anybody waits for, or makes room for, that many bytes. Whatever is wrong raises
`TransferError` with what was wrong; the connection is then closed, since nothing that follows can be trusted to be a frame.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.tags import TAG_BYTES, Tag

VERSION = 3
NONCE_BYTES = 32
MAC_BYTES = 32
MAX_NAME_BYTES = 255
MAX_REASON_BYTES = 512
MAX_TAGS = 1 << 16  # Of one frame: a million tokens in pages of 16.
MAX_PAGE_BYTES = 1 << 30
MAX_PROBE_BYTES = 1 << 24
MAX_RUNS = 1 << 12  # Of one STORE; together they have at most MAX_TAGS pages.
CHECKSUM_BYTES = 8

Bytes = bytes | bytearray | memoryview

_MAGIC = b"KV"
_HEADER = struct.Struct("!2sBBI")
_ANSWER = struct.Struct("!IIQ")  # request id, index or size, checksum
_PROLOGUE = struct.Struct(_HEADER.format + _ANSWER.format[1:])
_PULL = struct.Struct("!IIBBI")  # request id, number of tags, traffic class, has a tail, tail index
_PROBE = struct.Struct("!II")  # request id, bytes
_IDENTITY = struct.Struct("!QI")  # epoch, bytes of a page
_CLAIM = struct.Struct("!QQ")  # owner epoch, attempt
_OFFER = struct.Struct("!IQI")  # request id, reserved bytes, number of tags
_STORE = struct.Struct("!II")  # request id, number of runs
_RUN = struct.Struct("!II")  # first page, number of pages
_HELD = struct.Struct("!BI")  # code, pages

HEADER_BYTES = _HEADER.size
ANSWER_BYTES = HEADER_BYTES + _ANSWER.size  # Answers start alike, so that their receiver always knows how much to read next.


class FrameType(IntEnum):
    CHALLENGE = 1
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


class TrafficClass(IntEnum):
    """What goes first on a link: the lower, the earlier."""

    HANDOFF = 0
    RECOVERY = 1
    CHECKPOINT = 2


class StoreCode(IntEnum):
    """What an agent says to who wants to keep pages there."""

    OK = 0
    FENCED = 1  # A later owner or attempt writes this stream's checkpoint.
    FULL = 2  # No room to reserve what the stream may come to.


_TYPES = {int(frame_type): frame_type for frame_type in FrameType}
_TRAFFIC = {int(traffic): traffic for traffic in TrafficClass}
_CODES = {int(code): code for code in StoreCode}

_MAX_IDENTITY_BYTES = _IDENTITY.size + 3 * (1 + MAX_NAME_BYTES)
_MAX_CLAIM_BYTES = _CLAIM.size + 1 + MAX_NAME_BYTES
_MAX_RUN_BYTES = _MAX_CLAIM_BYTES + _RUN.size  # Without its tags and checksums.
_MAX_BODY_BYTES = {
    FrameType.CHALLENGE: NONCE_BYTES,
    FrameType.HELLO: NONCE_BYTES + _MAX_IDENTITY_BYTES + 2 * (1 + MAX_NAME_BYTES) + MAC_BYTES,
    FrameType.WELCOME: _MAX_IDENTITY_BYTES + MAC_BYTES,
    FrameType.REFUSED: MAX_REASON_BYTES,
    FrameType.PULL: _PULL.size + MAX_TAGS * TAG_BYTES + 1 + MAX_NAME_BYTES + CHECKSUM_BYTES,
    FrameType.PAGE: _ANSWER.size + MAX_PAGE_BYTES,
    FrameType.GONE: _ANSWER.size,
    FrameType.END: _ANSWER.size,
    FrameType.PROBE: _PROBE.size + CHECKSUM_BYTES,
    FrameType.PROBE_DATA: _ANSWER.size + MAX_PROBE_BYTES,
    FrameType.OFFER: _OFFER.size + _MAX_CLAIM_BYTES + MAX_TAGS * TAG_BYTES + CHECKSUM_BYTES,
    FrameType.STORE: _STORE.size + MAX_RUNS * _MAX_RUN_BYTES + MAX_TAGS * (TAG_BYTES + CHECKSUM_BYTES) + CHECKSUM_BYTES,
    FrameType.HELD: _ANSWER.size + MAX_RUNS * _HELD.size,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who stands at one end of a connection. Pages move only between equal fingerprints and page sizes."""

    instance: InstanceId
    node: NodeId
    epoch: int
    fingerprint: str
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Hello:
    """The client says who it is and whom it means, so that its proof is worth nothing at another server."""

    nonce: bytes
    client: Identity
    server_instance: InstanceId
    server_node: NodeId
    mac: bytes


@dataclass(frozen=True, slots=True)
class Welcome:
    server: Identity
    mac: bytes


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Pages by tag, in order; then perhaps page `tail_index` of the run that is retained for the hand-off `handoff`."""

    tags: tuple[Tag, ...]
    handoff: StreamId | None = None
    tail_index: int | None = None
    traffic: TrafficClass = TrafficClass.HANDOFF

    def __post_init__(self) -> None:
        assert self.tail_index is None or self.handoff is not None, "a tail page belongs to a hand-off"


@dataclass(frozen=True, slots=True)
class Pull:
    request_id: int
    request: PullRequest


@dataclass(frozen=True, slots=True)
class Probe:
    request_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes which stream's checkpoint: whoever has the highest (owner_epoch, attempt)."""

    stream: StreamId
    owner_epoch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Offer:
    """Asks for room for all that the stream may come to. `tags`: of all its full pages so far, from page 0 on."""

    request_id: int
    claim: Claim
    reserved_bytes: int
    tags: tuple[Tag, ...]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Pages `[first_page, first_page + len(tags))` of a stream, at least one; `checksums[i]` guards the page of `tags[i]`."""

    claim: Claim
    first_page: int
    tags: tuple[Tag, ...]
    checksums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Store:
    request_id: int
    runs: tuple[StoredRun, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Answers an offer, or one run of a store: how many leading pages of the stream the agent has."""

    code: StoreCode
    pages: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The start of every answer. `index` is the page's place in the request (its tail comes after the tags); for GONE the
    first page that is not to be had; for HELD how many; for PROBE_DATA and END nothing. `payload_bytes` follow it.
    """

    type: FrameType
    request_id: int
    index: int
    checksum: int
    payload_bytes: int


def checksum(guarded: Bytes) -> int:
    """Guards a page or a question against corruption on its way, not against forgers: those fail at the hand-shake."""
    return xxh3_64_intdigest(guarded)


def decode_header(header: Bytes, *expected: FrameType) -> tuple[FrameType, int]:
    """The frame's type, which must be one of `expected`, and the length of its body, which is within that type's bound."""
    if len(header) != HEADER_BYTES:
        raise TransferError(f"frame header of {len(header)} bytes instead of {HEADER_BYTES}")
    return _checked(expected, *_HEADER.unpack(header))


def _checked(expected: tuple[FrameType, ...], magic: bytes, version: int, type_: int, length: int) -> tuple[FrameType, int]:
    if magic != _MAGIC:
        raise TransferError(f"not a frame: starts with {magic!r}")
    if version != VERSION:
        raise TransferError(f"frame version {version}, this end speaks {VERSION}")
    frame_type = _TYPES.get(type_)
    if frame_type is None or frame_type not in expected:
        raise TransferError(f"frame type {type_} where {' or '.join(wanted.name for wanted in expected)} is due")
    if length > _MAX_BODY_BYTES[frame_type]:
        raise TransferError(f"{frame_type.name} of {length} bytes, at most {_MAX_BODY_BYTES[frame_type]} are allowed")
    return frame_type, length


def encode_challenge(nonce: bytes) -> bytes:
    return _frame(FrameType.CHALLENGE, nonce)


def decode_challenge(body: bytes) -> bytes:
    reader = _Reader(body, "CHALLENGE")
    nonce = reader.take(NONCE_BYTES)
    reader.finish()
    return nonce


def hello_claims(hello: Hello) -> bytes:
    """What the client's mac covers, besides the server's nonce."""
    names = _name(hello.server_instance) + _name(hello.server_node)
    return hello.nonce + identity_bytes(hello.client) + names


def encode_hello(hello: Hello) -> bytes:
    return _frame(FrameType.HELLO, hello_claims(hello) + hello.mac)


def decode_hello(body: bytes) -> Hello:
    reader = _Reader(body, "HELLO")
    hello = Hello(
        nonce=reader.take(NONCE_BYTES),
        client=reader.identity(),
        server_instance=InstanceId(reader.name()),
        server_node=NodeId(reader.name()),
        mac=reader.take(MAC_BYTES),
    )
    reader.finish()
    return hello


def encode_welcome(welcome: Welcome) -> bytes:
    return _frame(FrameType.WELCOME, identity_bytes(welcome.server) + welcome.mac)


def decode_welcome(body: bytes) -> Welcome:
    reader = _Reader(body, "WELCOME")
    welcome = Welcome(server=reader.identity(), mac=reader.take(MAC_BYTES))
    reader.finish()
    return welcome


def encode_refused(reason: str) -> bytes:
    return _frame(FrameType.REFUSED, reason.encode()[:MAX_REASON_BYTES])


def decode_refused(body: bytes) -> str:
    """The reason, fit for a log: the one who refuses has not proved who it is."""
    text = body.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else "?" for character in text)


def encode_pull(pull: Pull) -> bytes:
    request = pull.request
    has_tail = request.tail_index is not None
    head = _PULL.pack(pull.request_id, _count(request.tags), request.traffic, has_tail, request.tail_index or 0)
    return _question(FrameType.PULL, b"".join((head, *request.tags, _name(request.handoff or ""))))


def decode_pull(body: bytes) -> Pull:
    reader = _unsealed(body, "PULL")
    request_id, count, traffic, has_tail, tail_index = _PULL.unpack(reader.take(_PULL.size))
    tags = reader.tags(count)
    handoff = reader.name()
    reader.finish()
    if has_tail > 1 or (has_tail and not handoff) or (tail_index and not has_tail):
        raise TransferError("PULL asks for a tail page without naming its hand-off, or names it twice")
    if traffic not in _TRAFFIC:
        raise TransferError(f"PULL of traffic class {traffic}, allowed: 0 to {max(_TRAFFIC)}")
    stream, tail = StreamId(handoff) if handoff else None, tail_index if has_tail else None
    return Pull(request_id, PullRequest(tags, stream, tail, _TRAFFIC[traffic]))


def encode_probe(probe: Probe) -> bytes:
    assert 0 < probe.size_bytes <= MAX_PROBE_BYTES, f"a probe of {probe.size_bytes} bytes"
    return _question(FrameType.PROBE, _PROBE.pack(probe.request_id, probe.size_bytes))


def decode_probe(body: bytes) -> Probe:
    reader = _unsealed(body, "PROBE")
    request_id, size_bytes = _PROBE.unpack(reader.take(_PROBE.size))
    reader.finish()
    if not 0 < size_bytes <= MAX_PROBE_BYTES:
        raise TransferError(f"PROBE for {size_bytes} bytes, allowed: 1 to {MAX_PROBE_BYTES}")
    return Probe(request_id, size_bytes)


def encode_offer(offer: Offer) -> bytes:
    head = _OFFER.pack(offer.request_id, offer.reserved_bytes, _count(offer.tags))
    return _question(FrameType.OFFER, b"".join((head, _claim(offer.claim), *offer.tags)))


def decode_offer(body: bytes) -> Offer:
    reader = _unsealed(body, "OFFER")
    request_id, reserved_bytes, count = _OFFER.unpack(reader.take(_OFFER.size))
    offer = Offer(request_id, reader.claim(), reserved_bytes, reader.tags(count))
    reader.finish()
    return offer


def encode_store(store: Store) -> bytes:
    """The frame; the bytes of its pages are sent after it, straight from where they lie."""
    assert 0 < len(store.runs) <= MAX_RUNS, f"{len(store.runs)} runs in one store, at most {MAX_RUNS}"
    assert sum(_count(run.tags) for run in store.runs) <= MAX_TAGS, f"more than {MAX_TAGS} pages in one store"
    parts = [_STORE.pack(store.request_id, len(store.runs))]
    for run in store.runs:
        assert len(run.tags) == len(run.checksums) > 0, "a run has a checksum for each of its pages"
        parts += (_claim(run.claim), _RUN.pack(run.first_page, len(run.tags)), *run.tags)
        parts.append(struct.pack(f"!{len(run.checksums)}Q", *run.checksums))
    return _question(FrameType.STORE, b"".join(parts))


def decode_store(body: bytes) -> Store:
    reader = _unsealed(body, "STORE")
    request_id, count = _STORE.unpack(reader.take(_STORE.size))
    if not 0 < count <= MAX_RUNS:
        raise TransferError(f"STORE of {count} runs, allowed: 1 to {MAX_RUNS}")
    runs = tuple(_run(reader) for _ in range(count))
    reader.finish()
    if (pages := sum(len(run.tags) for run in runs)) > MAX_TAGS:
        raise TransferError(f"STORE of {pages} pages, at most {MAX_TAGS} are allowed")
    return Store(request_id, runs)


def _run(reader: "_Reader") -> StoredRun:
    claim = reader.claim()
    first_page, pages = _RUN.unpack(reader.take(_RUN.size))
    if pages == 0:
        raise TransferError("STORE of a run without pages")
    tags = reader.tags(pages)
    return StoredRun(claim, first_page, tags, struct.unpack(f"!{pages}Q", reader.take(pages * CHECKSUM_BYTES)))


def encode_held(request_id: int, held: Sequence[Held]) -> bytes:
    records = b"".join(_HELD.pack(one.code, one.pages) for one in held)
    return encode_answer(Answer(FrameType.HELD, request_id, len(held), 0, len(records))) + records


def held_bytes(count: int) -> int:
    """How many bytes follow an answer that is HELD `count` times."""
    return count * _HELD.size


def decode_held(payload: Bytes) -> list[Held]:
    if len(payload) % _HELD.size:
        raise TransferError(f"HELD of {len(payload)} bytes, not a multiple of {_HELD.size}")
    records = list(_HELD.iter_unpack(payload))
    if unknown := {code for code, _ in records} - _CODES.keys():
        raise TransferError(f"HELD with code {min(unknown)}, allowed: 0 to {max(_CODES)}")
    return [Held(_CODES[code], pages) for code, pages in records]


def encode_answer(answer: Answer) -> bytes:
    """The first `ANSWER_BYTES` of an answer; its payload is sent after it, straight from where it lies."""
    length = _ANSWER.size + answer.payload_bytes
    return _PROLOGUE.pack(_MAGIC, VERSION, answer.type, length, answer.request_id, answer.index, answer.checksum)


def decode_answer(prologue: Bytes, *expected: FrameType) -> Answer:
    """The start of an answer, whose type must be one of `expected`."""
    if len(prologue) != ANSWER_BYTES:
        raise TransferError(f"start of an answer of {len(prologue)} bytes instead of {ANSWER_BYTES}")
    magic, version, type_, length, request_id, index, checksum = _PROLOGUE.unpack(prologue)
    frame_type, _ = _checked(expected, magic, version, type_, length)
    if length < _ANSWER.size:
        raise TransferError(f"{frame_type.name} of {length} bytes is too short")
    return Answer(frame_type, request_id, index, checksum, length - _ANSWER.size)


def identity_bytes(identity: Identity) -> bytes:
    assert 0 < identity.page_bytes <= MAX_PAGE_BYTES, f"pages of {identity.page_bytes} bytes"
    names = _name(identity.instance) + _name(identity.node) + _name(identity.fingerprint)
    return _IDENTITY.pack(identity.epoch, identity.page_bytes) + names


def _name(text: str) -> bytes:
    encoded = text.encode()
    assert len(encoded) <= MAX_NAME_BYTES, f"name of {len(encoded)} bytes: {text[:40]!r}"
    return bytes((len(encoded),)) + encoded


def _claim(claim: Claim) -> bytes:
    return _CLAIM.pack(claim.owner_epoch, claim.attempt) + _name(claim.stream)


def _count(tags: Sequence[Tag]) -> int:
    assert len(tags) <= MAX_TAGS, f"{len(tags)} tags in one frame, at most {MAX_TAGS}"
    return len(tags)


def _question(type_: FrameType, body: bytes) -> bytes:
    return _frame(type_, body + checksum(body).to_bytes(CHECKSUM_BYTES))


def _unsealed(body: bytes, what: str) -> "_Reader":
    asked, told = body[:-CHECKSUM_BYTES], body[-CHECKSUM_BYTES:]
    if checksum(asked).to_bytes(CHECKSUM_BYTES) != told:
        raise TransferError(f"checksum of {what} is wrong")
    return _Reader(asked, what)


def _frame(type_: FrameType, body: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, type_, len(body)) + body


class _Reader:
    """Takes a body apart from its start and never reads past its end."""

    def __init__(self, body: bytes, what: str) -> None:
        self._body = body
        self._what = what
        self._offset = 0

    def take(self, size: int) -> bytes:
        end = self._offset + size
        if end > len(self._body):
            raise TransferError(f"{self._what} cut off: {len(self._body)} bytes, at least {end} are needed")
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
        epoch, page_bytes = _IDENTITY.unpack(self.take(_IDENTITY.size))
        if not 0 < page_bytes <= MAX_PAGE_BYTES:
            raise TransferError(f"{self._what} names pages of {page_bytes} bytes, allowed: 1 to {MAX_PAGE_BYTES}")
        names = self.name(), self.name(), self.name()
        return Identity(InstanceId(names[0]), NodeId(names[1]), epoch, names[2], page_bytes)

    def claim(self) -> Claim:
        owner_epoch, attempt = _CLAIM.unpack(self.take(_CLAIM.size))
        return Claim(StreamId(self.name()), owner_epoch, attempt)

    def tags(self, count: int) -> tuple[Tag, ...]:
        if count > MAX_TAGS:
            raise TransferError(f"{self._what} of {count} tags, at most {MAX_TAGS} are allowed")
        joined = self.take(count * TAG_BYTES)
        return tuple(Tag(joined[start : start + TAG_BYTES]) for start in range(0, len(joined), TAG_BYTES))

    def finish(self) -> None:
        if self._offset != len(self._body):
            raise TransferError(f"{self._what} has {len(self._body) - self._offset} bytes too many")
