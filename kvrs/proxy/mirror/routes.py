"""HTTP routes of the port for other proxies. All of them need the proxy's key."""

from typing import TypeVar

import msgspec
from aiohttp import web

from kvrs.errors import RequestError
from kvrs.net import http
from kvrs.protocol.mirror import Batch, BatchAnswer, Claim, DrainOrder, Hello, Lookup, LookupAnswer
from kvrs.protocol.secrets import Scope
from kvrs.proxy.mirror.peers import PATH
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.mirror.stored import drop_own, own_record

Body = TypeVar("Body")


def make_app(mirror: Mirror) -> web.Application:
    async def watch(request: web.Request) -> web.StreamResponse:
        return await http.watch(request, mirror.peers.hello, mirror.peers.news)

    async def hello(request: web.Request) -> web.Response:
        mirror.peers.on_hello(_decode(await request.read(), Hello))
        return _answer(mirror.peers.hello())

    async def take(request: web.Request) -> web.Response:
        batch = _decode(await request.read(), Batch)
        mirror.peers.check(batch.sender)
        mirror.sent.heard(batch.sent)
        return _answer(
            BatchAnswer(
                mirror.name, [mirror.take(update, batch.sender) for update in batch.updates]
            )
        )

    async def lookup(request: web.Request) -> web.Response:
        key = _decode(await request.read(), Lookup).key
        return _answer(LookupAnswer(mirror.book.version(key)))

    async def claim(request: web.Request) -> web.Response:
        return _answer(mirror.grant(_decode(await request.read(), Claim)))

    async def read(request: web.Request) -> web.Response:
        return _answer(own_record(mirror, _decode(await request.read(), Lookup).key))

    async def drop(request: web.Request) -> web.Response:
        return _answer(drop_own(mirror, _decode(await request.read(), Lookup).key))

    async def drain(request: web.Request) -> web.Response:
        mirror.peers.drains.obey(_decode(await request.read(), DrainOrder))
        return _answer(mirror.peers.hello())

    app = http.new_app(Scope.PROXY)
    app.add_routes([web.get(PATH, watch), web.post(PATH, take), web.post(f"{PATH}/hello", hello)])
    app.add_routes([web.post(f"{PATH}/lookup", lookup), web.post(f"{PATH}/claim", claim)])
    app.add_routes([web.post(f"{PATH}/read", read), web.post(f"{PATH}/drop", drop)])
    app.add_routes([web.post(f"{PATH}/drain", drain)])
    return app


def _answer(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.msgpack.encode(message), content_type="application/msgpack")


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(str(error)) from None
