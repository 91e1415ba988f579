"""Common parts of the HTTP faces of instances and agents."""

import asyncio
import gc
from weakref import ref

import aiohttp
import msgspec
import pytest

from kvrs.net import http
from kvrs.net.connections import ConnectionLimits
from kvrs.net.routes import Request, Response, Routes, retry_after
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs_testkit.ports import client_of, serving

SECRET = b"only for the tests"


class Report(msgspec.Struct):
    epoch: int = 1


async def watched(request: Request) -> Response:
    return await http.watch(request, Report)


@pytest.mark.network
async def test_a_face_that_shuts_down_waits_for_no_watcher() -> None:
    """A watch has no end of its own; waiting for it would take as long as a last answer may
    take.
    """
    routes = http.authenticated(Scope.AGENT)
    routes.add("GET", "/watched", watched)
    key = scoped_key(SECRET, Scope.AGENT, "agent-n0")
    face = http.inner_server(
        routes, ConnectionLimits.of_peers(), shutdown_timeout_s=3600, names=None, keys=[key]
    )
    port = await face.open("127.0.0.1", 0)
    async with (
        client_of(f"http://127.0.0.1:{port}", key) as client,
        client.get("/watched?watch=3600") as watching,
    ):
        first = await watching.content.readline()

        async with asyncio.timeout(60):
            await face.close()

    assert first == b'{"epoch":1}\n'


@pytest.mark.network
async def test_a_response_in_pieces_waits_for_a_client_that_does_not_read() -> None:
    """All of it would be in memory otherwise; once the client reads, it gets the rest."""
    piece, written = b"x" * (1 << 20), list[int]()

    async def serve(request: Request) -> Response:
        writer = http.PieceWriter(request, "text/plain")
        for number in range(32):
            await writer.write(piece)
            written.append(number)
        return writer.end()

    routes = Routes()
    routes.add("GET", "/", serve)
    async with (
        serving(routes) as url,
        aiohttp.ClientSession(url, read_bufsize=1024) as client,
        client.get("/") as answer,
    ):
        await asyncio.sleep(0.2)
        unread = len(written)
        got = await answer.read()

    assert unread < 32
    assert got == piece * 32


class Served:
    async def answer(self, request: Request) -> Response:
        return Response()


served: list[ref[Served]] = []


@pytest.mark.network
async def test_a_port_answers_by_an_object() -> None:
    """The next test looks for that object."""
    one = Served()
    served.append(ref(one))
    routes = http.authenticated(Scope.AGENT)
    routes.add("GET", "/", one.answer)
    key = scoped_key(SECRET, Scope.AGENT, "agent-n0")
    face = http.inner_server(
        routes, ConnectionLimits.of_peers(), shutdown_timeout_s=1, names=None, keys=[key]
    )
    port = await face.open("127.0.0.1", 0)

    async with client_of(f"http://127.0.0.1:{port}", key) as client, client.get("/") as answer:
        status = answer.status
    await face.close()

    assert status == 200


def test_what_another_test_served_is_not_in_memory_any_more() -> None:
    """Instances have weights and pages, tens of megabytes each."""
    gc.collect()

    assert [one for one in served if one() is not None] == []


@pytest.mark.parametrize(("wait_s", "values"), [(0.0, "123"), (1.0, "123"), (1.1, "234")])
def test_a_refusal_names_whole_seconds_up_to_2_beyond_the_wait(wait_s: float, values: str) -> None:
    """Clients that were refused together do not come back together, and none before its time."""
    assert {retry_after(wait_s) for _ in range(300)} == set(values)
