"""Requests of a proxy to another one, over a socket."""

import asyncio

import msgspec
import pytest

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.net import http
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.mirror import (
    AckStatus,
    BatchAnswer,
    Hello,
    StreamEvent,
    StreamState,
    Update,
    UpdateAck,
    pack_ids,
)
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.proxy.mirror import peers
from kvrs.proxy.mirror.peers import PATH, ProxyPeer
from kvrs.proxy.wire.upstream import Access, EngineLinks
from kvrs_testkit.ports import client_of, serving
from kvrs_testkit.scripted import SECRET
from kvrs_testkit.virtual_time import virtual_loop


async def test_a_long_record_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the peer would count as dead, and get the whole record again and again."""
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.1)

    async def take(request: Request) -> Response:
        await request.read()
        await asyncio.sleep(0.4)
        acks = [UpdateAck(AckStatus.STORED, 1)]
        return Response(body=msgspec.msgpack.encode(BatchAnswer("b-1", acks)))

    routes = Routes()
    routes.add("POST", PATH, take)
    async with serving(routes) as url, EngineLinks(Access()) as links:
        peer = ProxyPeer(links, "a", "b", url)

        answer = await peer.mirror([_update(8 << 20)], [])
        with pytest.raises(UpstreamError, match="no answer"):
            await peer.mirror([_update(10)], [])

    assert answer.acks == [UpdateAck(AckStatus.STORED, 1)]


async def test_time_in_which_this_process_was_late_does_not_count_against_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy without a CPU would take all its peers for lost, and their streams over."""
    monkeypatch.setattr(peers, "_TIMEOUT_S", 0.2)

    async def take(_: Request) -> Response:
        virtual_loop().stall(0.35)
        await asyncio.sleep(0.01)
        return Response(body=msgspec.msgpack.encode(BatchAnswer("b-1", [])))

    routes = Routes()
    routes.add("POST", PATH, take)
    async with serving(routes) as url, EngineLinks(Access()) as links:
        answer = await ProxyPeer(links, "a", "b", url).mirror([], [])

    assert answer.run == "b-1"


def _update(size_bytes: int) -> Update:
    return Update(
        "k",
        StreamId("ab"),
        "a-1",
        0,
        1,
        0,
        [StreamEvent(1, pack_ids([1]), b"x" * size_bytes)],
        StreamState(),
    )


@pytest.mark.parametrize("watch", ["", "?watch=", "?watch=soon", "?watch=nan"])
async def test_a_watch_without_an_interval_is_rejected(watch: str) -> None:
    """The error is the caller's, not an internal one."""

    async def report(request: Request) -> Response:
        return await http.watch(request, lambda: Hello("a", "a-1"))

    routes = http.authenticated(Scope.PROXY)
    routes.add("GET", PATH, report)
    key = scoped_key(SECRET, Scope.PROXY, "a")
    async with (
        serving(routes, [key]) as url,
        client_of(url, key) as client,
        client.get(PATH + watch) as response,
    ):
        assert response.status == 400
