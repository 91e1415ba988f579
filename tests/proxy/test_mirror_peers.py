"""What a proxy asks another one, over a socket."""

import asyncio

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.mirror import Ack, BatchAnswer, Hello, Said, Standing, Update
from kvrs.protocol.secrets import http_token
from kvrs.proxy.backends.peer import new_session
from kvrs.proxy.mirror import peers
from kvrs.proxy.mirror.peers import PATH, ProxyPeer
from kvrs.transfer import http
from tests.proxy.scripted import SECRET


async def test_a_long_record_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who needs longer for much is not dead; else it would be sent all of it again and again."""
    monkeypatch.setattr(peers, "_PATIENCE_S", 0.1)

    async def take(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(0.4)
        return web.Response(body=msgspec.msgpack.encode(BatchAnswer("b-1", [Ack(1)])))

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post(PATH, take)
    async with TestServer(app) as server, new_session(None) as session:
        peer = ProxyPeer(session, Hello("a", "a-1"), "b", str(server.make_url("")).rstrip("/"))

        answer = await peer.mirror([_update(8 << 20)])
        with pytest.raises(UpstreamError, match="no answer"):
            await peer.mirror([_update(10)])

    assert answer.acks == [Ack(1)]


def _update(size_bytes: int) -> Update:
    return Update("k", StreamId("ab"), "a-1", 0, 1, 0, [Said(1, [1], b"x" * size_bytes)], Standing())


@pytest.mark.parametrize("watch", ["", "?watch=", "?watch=soon", "?watch=nan"])
async def test_a_watch_without_a_time_is_refused(watch: str) -> None:
    """What is no number of seconds is the caller's mistake, and no bug of ours."""

    async def report(request: web.Request) -> web.StreamResponse:
        return await http.watch(request, lambda: Hello("a", "a-1"))

    app = http.new_app(SECRET)
    app.router.add_get(PATH, report)
    async with (
        TestServer(app) as server,
        new_session(http_token(SECRET)) as session,
        session.get(server.make_url(PATH + watch)) as response,
    ):
        assert response.status == 400
