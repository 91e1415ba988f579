"""HTTP routes of the port for other proxies. All of them need the proxy's key."""

from typing import TypeVar

import msgspec

from kvrs.errors import RequestError
from kvrs.net import http
from kvrs.net.routes import Request, Response, Routes
from kvrs.protocol.mirror import Batch, BatchAnswer, Claim, DrainOrder, Hello, Lookup, LookupAnswer
from kvrs.protocol.secrets import Scope
from kvrs.proxy.mirror.peers import PATH
from kvrs.proxy.mirror.replication import Mirror
from kvrs.proxy.mirror.stored import drop_own, own_record

Body = TypeVar("Body")


def make_routes(mirror: Mirror) -> Routes:
    async def watch(request: Request) -> Response:
        return await http.watch(request, mirror.peers.hello, mirror.peers.news)

    async def hello(request: Request) -> Response:
        mirror.peers.on_hello(_decode(await request.read(), Hello))
        return _answer(mirror.peers.hello())

    async def take(request: Request) -> Response:
        batch = _decode(await request.read(), Batch)
        mirror.peers.check(batch.sender)
        mirror.sent.heard(batch.sent)
        return _answer(
            BatchAnswer(
                mirror.name, [mirror.take(update, batch.sender) for update in batch.updates]
            )
        )

    async def lookup(request: Request) -> Response:
        key = _decode(await request.read(), Lookup).key
        return _answer(LookupAnswer(mirror.book.version(key)))

    async def claim(request: Request) -> Response:
        return _answer(mirror.grant(_decode(await request.read(), Claim)))

    async def read(request: Request) -> Response:
        return _answer(own_record(mirror, _decode(await request.read(), Lookup).key))

    async def drop(request: Request) -> Response:
        return _answer(drop_own(mirror, _decode(await request.read(), Lookup).key))

    async def drain(request: Request) -> Response:
        mirror.peers.orders.obey(_decode(await request.read(), DrainOrder))
        return _answer(mirror.peers.hello())

    routes = http.authenticated(Scope.PROXY)
    routes.add("GET", PATH, watch)
    for path, handler in (
        *(("", take), ("/hello", hello), ("/lookup", lookup), ("/claim", claim)),
        *(("/read", read), ("/drop", drop), ("/drain", drain)),
    ):
        routes.add("POST", f"{PATH}{path}", handler)
    return routes


def _answer(message: msgspec.Struct) -> Response:
    return Response(200, msgspec.msgpack.encode(message), {"Content-Type": "application/msgpack"})


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(str(error)) from None
