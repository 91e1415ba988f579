"""The port that the other proxies talk to. Everything wants the cluster's bearer token."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from kvrs.errors import RequestError
from kvrs.protocol.mirror import Batch, BatchAnswer, Claim, Hello, Look, LookAnswer
from kvrs.proxy.mirror.mirroring import Mirror
from kvrs.proxy.mirror.peers import PATH
from kvrs.transfer import http

Asked = TypeVar("Asked")


def make_app(mirror: Mirror, ring: Sequence[bytes]) -> web.Application:
    async def watch(request: web.Request) -> web.StreamResponse:
        return await http.watch(request, lambda: mirror.peers.me)

    async def hello(request: web.Request) -> web.Response:
        mirror.peers.met(_decode(await request.read(), Hello))
        return _answer(mirror.peers.me)

    async def take(request: web.Request) -> web.Response:
        batch = _decode(await request.read(), Batch)
        mirror.peers.check(batch.sender)
        return _answer(BatchAnswer(mirror.name, [mirror.take(update, batch.sender) for update in batch.updates]))

    async def look(request: web.Request) -> web.Response:
        return _answer(LookAnswer(mirror.book.look(_decode(await request.read(), Look).key)))

    async def claim(request: web.Request) -> web.Response:
        return _answer(mirror.grant(_decode(await request.read(), Claim)))

    app = http.new_app(ring[0], older=ring[1:])
    app.add_routes([web.get(PATH, watch), web.post(PATH, take), web.post(f"{PATH}/hello", hello)])
    app.add_routes([web.post(f"{PATH}/look", look), web.post(f"{PATH}/claim", claim)])
    return app


def _answer(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type="application/msgpack")


def _decode(body: bytes, kind: type[Asked]) -> Asked:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(str(error)) from None
