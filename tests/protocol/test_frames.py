import gc
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import TransferError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol import frames
from kvrs.protocol.frames import AnswerHeader, FrameType
from kvrs.protocol.pages import (
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
from kvrs_testkit.examples import examples
from tests.protocol.questions import KV, sealed, unsealed

NAMES = st.text(max_size=60)
IDENTITIES = st.builds(
    Identity,
    instance=NAMES.map(InstanceId),
    node=NAMES.map(NodeId),
    epoch=st.integers(0, 2**64 - 1),
    fingerprint=NAMES,
    page_bytes=st.integers(1, frames.MAX_PAGE_BYTES),
)
TAGS = st.binary(min_size=TAG_BYTES, max_size=TAG_BYTES).map(Tag)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
TRAFFIC = st.sampled_from(TrafficClass)
SPANS = st.tuples(st.integers(0, 400), st.integers(1, 400), st.integers(0, 400)).map(
    lambda span: (range(span[0], span[0] + span[1]), sum(span))
)
PARTS = st.none() | st.tuples(SPANS, SPANS).map(
    lambda spans: PagePart(spans[0][1], spans[1][1], Part(spans[0][0], spans[1][0]))
)
REQUESTS = st.one_of(
    st.builds(PullRequest, st.lists(TAGS, max_size=20).map(tuple), traffic=TRAFFIC, part=PARTS),
    st.builds(
        PullRequest,
        st.lists(TAGS, max_size=20).map(tuple),
        st.text(min_size=1, max_size=60).map(StreamId),
        U32,
        TRAFFIC,
        PARTS,
    ),
)
CLAIMS = st.builds(CheckpointClaim, NAMES.map(StreamId), U64, U64)
RUNS = st.lists(st.tuples(TAGS, U64), min_size=1, max_size=8).flatmap(
    lambda pages: st.builds(
        StoredRange,
        CLAIMS,
        U32,
        st.just(tuple(tag for tag, _ in pages)),
        st.just(tuple(checksum for _, checksum in pages)),
    )
)
STORES = st.builds(StoreFrame, U32, st.lists(RUNS, min_size=1, max_size=5).map(tuple))

# what can be sent, its type, how it is encoded and how it is decoded
KINDS: list[
    tuple[st.SearchStrategy[Any], FrameType, Callable[[Any], bytes], Callable[[bytes], Any]]
] = [
    (IDENTITIES, FrameType.HELLO, frames.encode_hello, frames.decode_hello),
    (
        IDENTITIES,
        FrameType.WELCOME,
        frames.encode_welcome,
        frames.decode_welcome,
    ),
    (st.builds(PullFrame, U32, REQUESTS), FrameType.PULL, frames.encode_pull, frames.decode_pull),
    (
        st.builds(ProbeFrame, U32, st.integers(1, frames.MAX_PROBE_BYTES)),
        FrameType.PROBE,
        frames.encode_probe,
        frames.decode_probe,
    ),
    (
        st.builds(OfferFrame, U32, CLAIMS, U64, st.lists(TAGS, max_size=20).map(tuple)),
        FrameType.OFFER,
        frames.encode_offer,
        frames.decode_offer,
    ),
    (STORES, FrameType.STORE, frames.encode_store, frames.decode_store),
]
DECODERS = [decode for _, _, _, decode in KINDS]
QUESTIONS = (FrameType.PULL, FrameType.PROBE, FrameType.OFFER, FrameType.STORE)


@examples(150)
@given(st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), kind[0])))
def test_what_was_encoded_is_what_is_decoded(case: Any) -> None:
    """Every frame of a hand-shake and every question survives the wire."""
    (_, frame_type, encode, decode), value = case

    frame = encode(value)

    header, body = frame[: frames.HEADER_BYTES], frame[frames.HEADER_BYTES :]
    assert frames.decode_header(header, frame_type) == (frame_type, len(body))
    assert decode(body) == value


@examples(100)
@given(
    st.sampled_from(KINDS).flatmap(lambda kind: st.tuples(st.just(kind), kind[0])),
    st.data(),
)
def test_a_body_that_is_cut_off_or_too_long_is_refused(case: Any, data: st.DataObject) -> None:
    """A body has exactly the bytes that its own fields call for."""
    (_, frame_type, encode, decode), value = case
    body = encode(value)[frames.HEADER_BYTES :]
    fields, seal = (bytes(unsealed(body)), sealed) if frame_type in QUESTIONS else (body, bytes)
    cut = data.draw(st.integers(0, len(fields) - 1))

    with pytest.raises(TransferError):
        decode(seal(fields[:cut]))
    with pytest.raises(TransferError, match="too many"):
        decode(seal(fields + b"\0"))


ASKED = [
    frames.encode_pull(
        PullFrame(7, PullRequest((Tag(bytes(TAG_BYTES)),), StreamId("s1"), tail_index=5))
    ),
    frames.encode_pull(
        PullFrame(
            7,
            PullRequest((Tag(bytes(TAG_BYTES)),), part=PagePart(4, 8, Part(range(1, 3), range(8)))),
        )
    ),
    frames.encode_probe(ProbeFrame(7, 1 << 16)),
    frames.encode_offer(
        OfferFrame(7, CheckpointClaim(StreamId("s1"), 3, 1), 1 << 20, (Tag(bytes(TAG_BYTES)),))
    ),
    frames.encode_store(
        StoreFrame(
            7,
            (
                StoredRange(
                    CheckpointClaim(StreamId("s1"), 3, 1), 0, (Tag(bytes(TAG_BYTES)),), (9,)
                ),
            ),
        )
    ),
]


def answered(wire: bytes) -> object:
    """The message that a server decodes from these bytes; None: it waits for more."""
    frame_type, length = frames.decode_header(wire[: frames.HEADER_BYTES], *QUESTIONS)
    body = wire[frames.HEADER_BYTES :][:length]
    (decode,) = (decode for _, own_type, _, decode in KINDS if own_type is frame_type)
    return decode(body) if len(body) == length else None


@pytest.mark.parametrize("frame", ASKED, ids=lambda frame: FrameType(frame[3]).name)
def test_a_question_with_any_bit_flipped_is_never_answered(frame: bytes) -> None:
    """Exhaustively, header and all: one other bit may name another page, whose bytes would then be
    quite right.
    """
    wire = frame + bytes(
        300
    )  # A STORE is followed by its pages: with a longer length they are taken for its body.
    assert answered(wire) is not None

    for bit in range(8 * len(frame)):
        damaged = bytearray(wire)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert answered(bytes(damaged)) is None, f"bit {bit} is not guarded"
        except TransferError:
            continue


@pytest.mark.parametrize("frame", ASKED, ids=lambda frame: FrameType(frame[3]).name)
def test_a_question_that_is_cut_off_or_goes_on_has_a_wrong_checksum(frame: bytes) -> None:
    """Also one that is shorter than its checksum."""
    (decode,) = (decode for _, frame_type, _, decode in KINDS if frame_type == frame[3])
    body = frame[frames.HEADER_BYTES :]

    for wrong in (*(body[:cut] for cut in range(len(body))), body + b"\0"):
        with pytest.raises(TransferError, match="checksum"):
            decode(wrong)


def test_the_largest_questions_are_within_their_bounds_and_nothing_above_them_is() -> None:
    """The largest question can be sent, and no length beyond it is accepted."""
    stream, all_tags = (
        StreamId("s" * frames.MAX_NAME_BYTES),
        (Tag(bytes(TAG_BYTES)),) * frames.MAX_TAGS,
    )
    claim, pages = (
        CheckpointClaim(stream, 2**64 - 1, 2**64 - 1),
        frames.MAX_TAGS // frames.MAX_RANGES,
    )
    largest = (
        frames.encode_pull(PullFrame(1, PullRequest(all_tags, stream, 2**32 - 1))),
        frames.encode_probe(ProbeFrame(1, frames.MAX_PROBE_BYTES)),
        frames.encode_offer(OfferFrame(1, claim, 2**64 - 1, all_tags)),
        frames.encode_store(
            StoreFrame(
                1, (StoredRange(claim, 0, all_tags[:pages], (0,) * pages),) * frames.MAX_RANGES
            )
        ),
    )

    for frame in largest:
        assert answered(frame) is not None
        longer = frame[:4] + (int.from_bytes(frame[4:8]) + 1).to_bytes(4)
        with pytest.raises(TransferError, match="at most"):
            frames.decode_header(longer, *QUESTIONS)


@pytest.mark.parametrize(
    "part",
    [
        (4, 8, 0, 5, 0, 8),
        (4, 8, 0, 4, 0, 9),
        (4, 8, 2, 2, 0, 8),
        (4, 8, 3, 2, 0, 8),
        (4, 8, 0, 4, 5, 5),
        (0, 0, 0, 4, 0, 8),
        (4, 8, 0, 0, 0, 0),
        (4, 0, 0, 4, 0, 0),
    ],
)
def test_parts_that_are_empty_or_reach_beyond_the_page_are_refused(part: tuple[int, ...]) -> None:
    """Layers and heads are compared with those of the pages before anything is read."""
    body = bytes(unsealed(frames.encode_pull(PullFrame(7, PullRequest(())))[frames.HEADER_BYTES :]))

    with pytest.raises(TransferError, match=r"PULL of layers \[.* heads \[.* of pages with"):
        frames.decode_pull(sealed(body[:-12] + struct.pack("!6H", *part)))


@examples(300)
@given(st.sampled_from(DECODERS), st.binary(max_size=300))
def test_random_bodies_are_decoded_or_refused_and_nothing_else(
    decode: Callable[[bytes], object], body: bytes
) -> None:
    """Whatever a peer sends, with a right checksum or a wrong one, the only error it can cause is a
    TransferError.
    """
    for sent in (body, sealed(body)):
        try:
            decode(sent)
        except TransferError:
            continue


@examples(300)
@given(st.binary(max_size=40), st.sampled_from(FrameType))
def test_random_headers_are_decoded_or_refused_and_nothing_else(
    header: bytes, expected: FrameType
) -> None:
    """Headers follow the same rule as bodies."""
    for decode in (frames.decode_header, frames.decode_answer):
        try:
            decode(header, expected)
        except TransferError:
            continue


@examples(100)
@given(STORES, st.data())
def test_a_store_with_wrong_bytes_under_a_right_checksum_is_decoded_or_refused_and_nothing_else(
    store: StoreFrame, data: st.DataObject
) -> None:
    """Bodies that are nearly right reach deeper than random ones; what comes out has a checksum for
    each page, and pages.
    """
    body = unsealed(frames.encode_store(store)[frames.HEADER_BYTES :])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))

    try:
        decoded = frames.decode_store(sealed(body))
    except TransferError:
        return
    assert all(len(each.tags) == len(each.checksums) > 0 for each in decoded.ranges)


@given(U32, st.lists(st.builds(HeldPages, st.sampled_from(StoreCode), U32), max_size=20))
def test_what_is_held_has_its_number_in_its_start(request_id: int, held: list[HeldPages]) -> None:
    """The receiver knows from its own question how many bytes to expect."""
    start, payload = frames.encode_held(request_id, held)

    assert start == AnswerHeader(
        FrameType.HELD, request_id, len(held), 0, frames.held_bytes(len(held))
    )
    assert len(payload) == frames.held_bytes(len(held))
    assert frames.decode_held(payload) == held


@given(st.binary(max_size=60))
def test_random_records_of_what_is_held_are_decoded_or_refused_and_nothing_else(
    payload: bytes,
) -> None:
    """Records follow the same rule as bodies."""
    try:
        frames.decode_held(payload)
    except TransferError:
        return


@given(
    st.builds(
        AnswerHeader,
        type=st.sampled_from([FrameType.PAGE, FrameType.PROBE_DATA]),
        request_id=U32,
        index=U32,
        checksum=st.integers(0, 2**64 - 1),
        payload_bytes=st.integers(0, frames.MAX_PROBE_BYTES),
    )
)
def test_the_start_of_an_answer_has_one_size(answer: AnswerHeader) -> None:
    """A receiver reads a fixed number of bytes and then knows what follows."""
    prologue = frames.encode_answer(answer)

    assert len(prologue) == frames.ANSWER_BYTES
    assert frames.decode_answer(prologue, answer.type) == answer


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (b"PK\x01\x05\0\0\0\0", "not a frame"),
        (b"KV\x05\x05\0\0\0\0", "frame version 5, this end has 9"),
        (b"KV\x09\x63\0\0\0\0", "type 99"),
        (b"KV\x09\x02\0\0\0\0", "type 2"),
        (b"KV\x09\x05\xff\xff\xff\xff", "at most"),
    ],
)
def test_a_wrong_header_is_refused_with_what_is_wrong(header: bytes, fault: str) -> None:
    """Magic, version, type and length are checked before a body is read."""
    with pytest.raises(TransferError, match=fault):
        frames.decode_header(header, FrameType.PULL)


def test_every_type_has_a_bound_on_its_length() -> None:
    """No announced length is trusted."""
    for frame_type in FrameType:
        header = KV + bytes((frame_type,)) + b"\xff\xff\xff\xff"

        with pytest.raises(TransferError, match="at most"):
            frames.decode_header(header, frame_type)


def test_a_pull_that_claims_more_tags_than_it_holds_is_refused() -> None:
    """The number of tags is compared with the bound and with the bytes that are there."""
    body = unsealed(
        frames.encode_pull(PullFrame(1, PullRequest((Tag(bytes(TAG_BYTES)),))))[
            frames.HEADER_BYTES :
        ]
    )

    body[4:8] = (2).to_bytes(4)
    with pytest.raises(TransferError, match="cut off"):
        frames.decode_pull(sealed(body))
    body[4:8] = (1 << 31).to_bytes(4)
    with pytest.raises(TransferError, match="tags"):
        frames.decode_pull(sealed(body))


def test_a_pull_of_an_unknown_class_is_refused() -> None:
    """An unknown traffic class gets no priority."""
    body = unsealed(
        frames.encode_pull(PullFrame(1, PullRequest((), traffic=TrafficClass.CHECKPOINT)))[
            frames.HEADER_BYTES :
        ]
    )
    body[8] += 1

    with pytest.raises(TransferError, match="traffic class 3"):
        frames.decode_pull(sealed(body))


def store_body(*ranges: int) -> bytearray:
    """The body of a STORE with ranges of so many pages, without its checksum."""
    claim = CheckpointClaim(StreamId("s"), 0, 1)
    all_ranges = (
        StoredRange(claim, 0, (Tag(bytes(TAG_BYTES)),) * pages, (0,) * pages) for pages in ranges
    )
    return unsealed(frames.encode_store(StoreFrame(1, tuple(all_ranges)))[frames.HEADER_BYTES :])


@pytest.mark.parametrize(
    ("at", "value", "fault"),
    [
        (4, 0, "0 ranges"),
        (4, frames.MAX_RANGES + 1, "ranges, allowed"),
        (4, 2**32 - 1, "ranges, allowed"),
        (4, 2, "cut off"),
        (30, 0, "without pages"),
        (30, 2, "cut off"),
        (30, frames.MAX_TAGS + 1, "tags, at most"),
        (30, 2**32 - 1, "tags, at most"),
    ],
)
def test_a_store_that_claims_what_it_does_not_hold_is_refused(
    at: int, value: int, fault: str
) -> None:
    """Every number is compared with its bound and with the bytes that are there, before anything is
    made of it.
    """
    body = store_body(1)
    assert int.from_bytes(body[at : at + 4]) == 1  # Number of ranges, or of the pages of the first.
    body[at : at + 4] = value.to_bytes(4)

    with pytest.raises(TransferError, match=fault):
        frames.decode_store(sealed(body))


def test_the_pages_of_a_store_are_bounded_over_all_its_runs() -> None:
    """Or a few ranges could have any number."""
    half = frames.MAX_TAGS // 2 + 1
    body = store_body(half)
    both = (1).to_bytes(4) + (2).to_bytes(4) + body[8:] + body[8:]

    with pytest.raises(TransferError, match="pages, at most"):
        frames.decode_store(sealed(both))


def test_a_reason_is_bounded_and_fit_for_a_log() -> None:
    """The peer that refuses has not proved its identity, so it must not write lines or control
    characters into a log.
    """
    frame = frames.encode_refused("no\nway\x1b[31m" + "é" * 1000)

    reason = frames.decode_refused(frame[frames.HEADER_BYTES :])

    assert reason.startswith("no?way?[31m")
    assert len(frame) <= frames.HEADER_BYTES + frames.MAX_REASON_BYTES


def test_no_memory_is_kept_of_questions_that_were_read() -> None:
    """Whatever their lengths: CPython keeps up to 2,000 free tuples of each."""
    claim = CheckpointClaim(StreamId("s"), 0, 1)
    offers = [
        frames.encode_offer(OfferFrame(1, claim, 0, (Tag(bytes(TAG_BYTES)),) * pages))[
            len(KV) + 5 :
        ]
        for pages in range(1, 19)
    ]
    gc.collect()  # Empties the lists of free tuples.
    before = sys.getallocatedblocks()

    for offer in offers * 200:
        frames.decode_offer(offer)

    assert sys.getallocatedblocks() - before < 500
