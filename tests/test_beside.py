"""The comparisons of experiments/beside and experiments/dynamo_cascade: how they count tokens, ends
of streams, and failures.
"""

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from experiments.beside.streams import Difference, End, Stream, difference, read, wanted_of
from experiments.beside.subjects import Front, Place, Servers
from experiments.dynamo_cascade.run import Asked, Run, Served
from kvrs_testkit.scripted_model import text_of

WANTED = wanted_of(7, 6)


def event(*ids: int, finish: str | None = None) -> bytes:
    text = "".join(map(text_of, ids))
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish}]}).encode()


WHOLE = [event(*WANTED[:3]), event(*WANTED[3:], finish="length"), b"data: [DONE]"]


@pytest.mark.parametrize(
    ("got", "counted"),
    [
        pytest.param(WANTED, Difference(0, 0, 0), id="the same"),
        pytest.param(WANTED[:4], Difference(2, 0, 0), id="an end that is missing"),
        pytest.param([*WANTED[:2], *WANTED[3:]], Difference(1, 0, 0), id="one is lost"),
        pytest.param([*WANTED[:3], *WANTED[2:]], Difference(0, 1, 0), id="one comes twice"),
        pytest.param([*WANTED[:3], 999, *WANTED[4:]], Difference(0, 0, 1), id="another one"),
    ],
)
def test_tokens_are_aligned_before_they_are_counted(got: list[int], counted: Difference) -> None:
    """A lost token makes no other one wrong, and a repeated one none lost."""
    assert difference(got, WANTED) == counted


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        pytest.param(WHOLE, End.COMPLETE, id="whole"),
        pytest.param(WHOLE[:2], End.NO_DONE, id="without [DONE]"),
        pytest.param([WHOLE[0], WHOLE[2]], End.NO_FINISH, id="without a finish"),
        pytest.param(WHOLE[1:], End.WRONG, id="tokens are missing"),
        pytest.param([b'data: {"choi', *WHOLE], End.MALFORMED, id="malformed"),
        pytest.param(
            [WHOLE[0], b'data: {"error": {"code": 502}}', b"data: [DONE]"],
            End.ERROR_EVENT,
            id="an error event",
        ),
    ],
)
async def test_an_end_is_what_the_client_learns(lines: list[bytes], end: End) -> None:
    """A stream is complete with every token, its finish and its terminal event, and with less it
    is not.
    """
    stream = Stream(WANTED, status=200)

    for line in lines:
        stream.take(line)

    assert stream.end is end


@pytest.mark.network
async def test_comments_do_not_hide_the_silence_of_a_stream() -> None:
    """A proxy that keeps a connection open by comments, behind a server that stands still, leaves
    its client without tokens.
    """

    async def comments(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            while True:
                await answer.write(b": still here\n\n")
                await asyncio.sleep(0.01)
        return answer

    app = web.Application()
    app.router.add_post("/", comments)
    stream = Stream(WANTED)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        await read(session, str(server.make_url("/")), {}, stream, silence_s=0.2)

    assert stream.end is End.SILENCE


async def test_goodput_has_the_tokens_of_whole_requests_only(tmp_path: Path) -> None:
    """A request that ends in an error is a failure, and its tokens serve nobody."""
    front = Front("", Servers(Place(tmp_path, tmp_path, 0.0), [], {}))
    run = Run("kvrs", front, [], share=1 / 300)
    for lines in (WHOLE, [WHOLE[0], b'data: {"error": {"code": 502}}', b"data: [DONE]"]):
        served = Served(Asked([1], WANTED), Stream(WANTED, status=200), sent_s=0.0)
        for line in lines:
            served.stream.take(line)
        run.served.append(served)

    figures = run.figures()

    assert (figures["requests"], figures["failures"]) == (2, 1)
    assert figures["goodput_tokens_per_s"] == len(WANTED) * 8
