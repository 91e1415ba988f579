"""Checkpoints over real sockets: from an engine's pusher into an agent's store, and back."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.sections import TransferSettings
from kvrs.errors import TransferError
from kvrs.ids import InstanceId
from kvrs.protocol import frames
from kvrs.protocol.frames import SESSION_MAC_BYTES, AnswerHeader, FrameType
from kvrs.protocol.pages import StoredRange, StoreFrame
from kvrs.transfer.checkpoint_sender import PagePusher
from kvrs.transfer.connections import admit, introduce
from kvrs.transfer.limiter import SendingFaults
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.peers import HeldPages, StoreCode
from kvrs.transfer.server import PageServer
from kvrs.transfer.stream import SocketStream
from kvrs_testkit.examples import examples
from tests.protocol.questions import KV, question
from tests.transfer.storing import (
    AGENT,
    ENGINE,
    N0,
    N1,
    PAGE_BYTES,
    SECRET,
    SETTINGS,
    A,
    B,
    Sink,
    StoringAgent,
    agent_store,
    claim,
    content,
    range_of,
    tags,
    until,
)
from tests.transfer.test_page_port import all_that_comes, connect, impostor

pytestmark = pytest.mark.network


async def test_runs_of_many_streams_travel_in_one_frame() -> None:
    """Each is answered by itself; pages that are not stored are skipped without harm to those
    that follow.
    """
    streams = [replace(range_of(A, 0, 1), claim=claim(type(A)(f"s{n}"))) for n in range(3)]
    ranges = [range_of(each.claim.stream, 0, 20) for each in streams]
    async with agent_store() as h:
        h.sink.refused[ranges[1].claim.stream] = StoreCode.FENCED
        await h.pusher.store(h.peer, [range_of(B, 0, 2)])

        held = await h.pusher.store(
            h.peer, [ranges[0], ranges[1], range_of(B, 0, 4), range_of(A, 7, 3), ranges[2]]
        )

        # The second is fenced, the third has two pages already, the fourth would leave a gap.
        assert held == [
            HeldPages(StoreCode.OK, 20),
            HeldPages(StoreCode.FENCED, 0),
            HeldPages(StoreCode.OK, 4),
            HeldPages(StoreCode.OK, 0),
            HeldPages(StoreCode.OK, 20),
        ]
        assert len(h.sink.visible) == 44


@pytest.mark.parametrize("code", [StoreCode.FENCED, StoreCode.FULL])
async def test_an_offer_that_is_refused_says_why(code: StoreCode) -> None:
    """And the connection stays good for others."""
    async with agent_store() as h:
        h.sink.refused[A] = code

        assert await h.offer(A) == HeldPages(code, 0)
        assert await h.offer(B) == HeldPages(StoreCode.OK, 0)


async def test_without_the_secret_nothing_is_offered_and_nothing_adopted() -> None:
    """A stranger cannot make an agent drop what it holds."""
    async with agent_store(secret=b"another secret, as long") as h:
        with pytest.raises(TransferError, match="another secret"):
            await h.offer(A)

        assert h.sink.own == AGENT


async def test_a_connection_for_another_agent_is_not_adopted() -> None:
    """Its port may have been given to this one."""
    async with agent_store() as h:
        with pytest.raises(TransferError, match="another process"):
            await h.pusher.offer(replace(h.peer, instance=InstanceId("agent-n7")), claim(A), 1, ())

        assert h.sink.own == AGENT


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (replace(ENGINE, fingerprint="another"), "fingerprints"),
        (replace(ENGINE, page_bytes=8192), "page_bytes"),
    ],
)
async def test_an_agent_takes_the_pages_of_its_first_engine_and_of_no_other(
    engine: Any, reason: str
) -> None:
    """Others are refused at the hand-shake while anything is reserved; then they are taken on, and
    the first is met anew.
    """
    async with agent_store() as h:
        await h.offer(A)
        other = PagePusher(lambda: engine, SECRET, SETTINGS, h.links)
        try:
            with pytest.raises(TransferError, match=reason):
                await other.offer(h.peer, claim(B), 1, ())
            h.sink.reserved.clear()
            taken = await other.offer(h.peer, claim(B), 1, ())
        finally:
            await other.close()
        with pytest.raises(TransferError, match=reason):
            # Over its old connection, whose hand-shake named the first engine's pages.
            await h.pusher.store(h.peer, [range_of(A, 0, 1)])

        assert taken == HeldPages(StoreCode.OK, 0)
        assert h.sink.begun == 0


async def test_an_instance_takes_no_checkpoints(caplog: pytest.LogCaptureFixture) -> None:
    """It has no place for them: the connection ends."""
    sink = Sink(own=replace(AGENT, fingerprint=ENGINE.fingerprint, page_bytes=PAGE_BYTES))
    server = PageServer(sink, SECRET, SETTINGS, SendingLinks(SETTINGS, SendingFaults(), N1))
    async with agent_store() as h:
        peer = replace(h.peer, port=await server.start("127.0.0.1", 0))
        for question in (
            h.pusher.offer(peer, claim(A), 1, ()),
            h.pusher.store(peer, [range_of(A, 0, 1)]),
        ):
            with pytest.raises(TransferError, match="connection"):
                await question
        await server.close()

    assert (sink.begun, sink.reserved) == (0, {})
    assert "bug" not in caplog.text


async def test_a_page_damaged_over_an_old_connection_is_sent_again_at_once() -> None:
    """The connection is closed like one that died while it was idle, and that costs a new one and
    no pages.
    """
    async with agent_store() as h:
        await h.offer(A)
        h.links.faults.corrupt(1)

        assert await h.pusher.store(h.peer, [range_of(A, 0, 3)]) == [HeldPages(StoreCode.OK, 3)]
        assert (h.sink.begun, h.sink.arriving) == (2, 0)


async def test_pages_without_a_place_are_not_even_checked() -> None:
    """Pages that are dropped cannot be wrong."""
    async with agent_store() as h:
        h.sink.refused[A] = StoreCode.FULL
        h.links.faults.corrupt(2)

        assert await h.pusher.store(h.peer, [range_of(A, 0, 2), range_of(B, 0, 1)]) == [
            HeldPages(StoreCode.FULL, 0),
            HeldPages(StoreCode.OK, 1),
        ]


async def test_an_agent_that_closes_ends_what_is_being_stored() -> None:
    """`agent_store` checks that every run was ended; the whole pages stay."""
    async with agent_store(settings=TransferSettings(link_bytes_per_s=400_000.0)) as h:
        storing = asyncio.create_task(
            h.pusher.store(h.peer, [range_of(A, 0, 400), range_of(B, 0, 400)])
        )
        await until(lambda: len(h.sink.visible) >= 3)

        await h.server.close()

        assert h.sink.arriving == 0
        with pytest.raises(TransferError):
            await storing


def answer(
    count: int = 1,
    request_id: int = 1,
    payload: bytes = b"\0" * 5,
    type_: FrameType = FrameType.HELD,
) -> tuple[AnswerHeader, bytes]:
    return AnswerHeader(type_, request_id, count, 0, len(payload)), payload


@pytest.mark.parametrize(
    "reply",
    [
        answer(request_id=2),
        answer(count=2),
        answer(count=2, payload=b"\0" * 10),
        answer(count=0, payload=b""),
        answer(payload=b"\0" * 4),
        answer(payload=b"\x07" + b"\0" * 4),
        answer(type_=FrameType.PAGE),
        answer(type_=FrameType.END, payload=b""),
        (AnswerHeader(FrameType.HELD, 1, 1, 0, 1 << 24), b""),
    ],
)
async def test_an_answer_out_of_turn_is_an_error(reply: tuple[AnswerHeader, bytes]) -> None:
    """Wrong question, wrong number, unknown code, another kind of answer: nothing counts as
    held.
    """

    async def answer_wrongly(stream: SocketStream) -> None:
        await admit(
            stream,
            [SECRET],
            lambda: replace(AGENT, fingerprint="model", page_bytes=PAGE_BYTES),
        )
        await stream.receive_question(FrameType.OFFER)
        await stream.send(stream.session.answer(*reply), reply[1])
        await stream.wait_for_data()

    async with agent_store() as h, impostor(answer_wrongly) as port:
        with pytest.raises(TransferError, match=r"answer out of turn|HELD|frame type"):
            await h.pusher.offer(replace(h.peer, port=port), claim(A), 1, ())


async def test_a_cut_link_carries_no_checkpoints() -> None:
    """Neither an offer nor a page, until the sender gives up; other links are not meant."""
    async with agent_store(settings=TransferSettings(stall_timeout_s=0.8)) as h:
        await h.offer(A)
        h.links.faults.hold(N0, 0, asyncio.get_running_loop().time() + 60)
        before = await h.pusher.store(h.peer, [range_of(A, 0, 1)])
        h.links.faults.hold(N1, 0, asyncio.get_running_loop().time() + 60)

        for question in (h.offer(B), h.pusher.store(h.peer, [range_of(A, 1, 1)])):
            with pytest.raises(TransferError, match="cut by an injected fault"):
                await question
        h.links.faults.clear()

        assert before == [HeldPages(StoreCode.OK, 1)]
        assert (h.sink.begun, B in h.sink.streams) == (1, False)
        assert await h.pusher.store(h.peer, [range_of(A, 1, 1)]) == [HeldPages(StoreCode.OK, 2)]


STORE = frames.encode_store(
    StoreFrame(
        1,
        tuple(
            StoredRange(
                claim(stream),
                0,
                tags(stream, 0, 2),
                tuple(frames.checksum(content(stream, index)) for index in range(2)),
            )
            for stream in (A, B)
        ),
    )
)
PAGES = [content(stream, index) for stream in (A, B) for index in range(2)]
STORE_BYTES = len(STORE) + SESSION_MAC_BYTES
SENT_PAGE_BYTES = PAGE_BYTES + SESSION_MAC_BYTES


async def send_raw(
    h: StoringAgent,
    *messages: bytes,
    cut_at: int | None = None,
    ends: bool = True,
    flips: Sequence[tuple[int, int]] = (),
) -> bytes:
    """An agent's answer to these messages after the hand-shake, each with its mac; empty if the
    connection ends first.
    """
    sock = await connect(h.peer.port)
    try:
        stream = SocketStream(sock, 5.0)
        await introduce(stream, SECRET, ENGINE, h.peer)
        data = bytearray().join(message + stream.session.seal(message) for message in messages)
        for at, bits in flips:
            data[at] ^= bits
        try:
            await stream.send(data[:cut_at])
        except TransferError:
            return b""  # It was closed before all was sent.
        if ends:
            sock.shutdown(socket.SHUT_WR)
        return await all_that_comes(sock)
    finally:
        sock.close()


async def test_a_store_encodes_what_its_agent_decodes() -> None:
    """The raw exchange, byte for byte: ranges, pages, what is held."""
    async with agent_store() as h:
        answered = await send_raw(h, STORE, *PAGES)
        start, payload = frames.encode_held(1, [HeldPages(StoreCode.OK, 2)] * 2)
        assert answered[: frames.ANSWER_BYTES] == frames.encode_answer(start)
        assert answered[frames.ANSWER_BYTES + SESSION_MAC_BYTES :] == payload
        assert sorted(h.sink.visible) == sorted(tags(A, 0, 2) + tags(B, 0, 2))


@pytest.mark.parametrize(
    "cut_at",
    [
        1,
        len(STORE) - 1,
        len(STORE),
        STORE_BYTES,
        STORE_BYTES + PAGE_BYTES,
        STORE_BYTES + SENT_PAGE_BYTES + 7,
        STORE_BYTES + 4 * SENT_PAGE_BYTES - 1,
    ],
)
async def test_a_store_that_breaks_off_ends_every_run(cut_at: int) -> None:
    """A sender that was killed: what had come whole and right stays, and nothing waits for the
    rest.
    """
    async with agent_store() as h:
        assert await send_raw(h, STORE, *PAGES, cut_at=cut_at) == b""

        await until(lambda: h.sink.arriving == 0)
        assert len(h.sink.visible) == max(0, cut_at - STORE_BYTES) // SENT_PAGE_BYTES


async def test_a_sender_that_falls_silent_in_a_store_is_given_up() -> None:
    """Its slots are wanted by others."""
    async with agent_store(agent_settings=TransferSettings(stall_timeout_s=0.6)) as h:
        assert await send_raw(h, STORE, *PAGES, cut_at=-1, ends=False) == b""

        assert (h.sink.arriving, len(h.sink.visible)) == (0, 3)


@pytest.mark.parametrize(
    "nonsense",
    [
        KV + b"\x0c\xff\xff\xff\xff",  # A STORE of four gigabytes.
        question(FrameType.STORE, bytes(4) + b"\xff\xff\xff\xff"),  # With four billion ranges.
        question(FrameType.STORE, bytes(8)),  # With none.
        STORE[:-8]
        + b"".join(PAGES),  # Its checksum is a piece of a page, and nothing is where it should be.
        KV + b"\x0b\xff\xff\xff\xff",  # An OFFER of four gigabytes.
        KV + b"\x0b\x00\x00\x00\x00",
        KV + b"\x0d\x00\x00\x00\x10" + bytes(16),  # A HELD, which is an answer.
    ],
)
async def test_nonsense_to_an_agent_closes_its_connection_and_no_other(nonsense: bytes) -> None:
    """Even from an engine that knows the secret."""
    async with agent_store() as h:
        await h.offer(A)

        assert await send_raw(h, nonsense) == b""
        assert await h.pusher.store(h.peer, [range_of(A, 0, 2)]) == [HeldPages(StoreCode.OK, 2)]


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STORE) + 2 * PAGE_BYTES), st.integers(1, 255)), max_size=3
    ),
    st.data(),
)
def test_damaged_or_cut_stores_harm_nothing(
    flips: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Whatever the bytes: every run is ended, and what is visible is what its sender wanted
    kept.
    """
    size = STORE_BYTES + 4 * SENT_PAGE_BYTES
    cut_at = data.draw(st.one_of(st.just(size), st.integers(0, size)))

    async def send() -> None:
        async with agent_store() as h:
            await send_raw(h, STORE, *PAGES, cut_at=cut_at, flips=flips)
            await until(lambda: h.sink.arriving == 0)
            assert h.sink.visible.keys() <= {*tags(A, 0, 2), *tags(B, 0, 2)}

    asyncio.run(send())
