"""What the HTTP faces of all processes of a cluster have in common: who may ask, how errors are told, and endless reports."""

import asyncio
import errno
import hmac
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from kvrs.errors import ConfigError, RequestError
from kvrs.protocol.openai import error_body
from kvrs.protocol.secrets import http_token

T = TypeVar("T")

MAX_BODY_BYTES = 64 << 20
SHORTEST_WATCH_S = 0.02

_WATCHES = web.AppKey("watches", set[asyncio.Task[None]])


def new_app(secret: bytes, *middlewares: Middleware, older: Sequence[bytes] = ()) -> web.Application:
    """Everything but `/healthz` wants the cluster's bearer token, and errors of the caller's making become bodies. `older`: the
    cluster's other secrets, whose tokens are taken too.
    """
    authenticate = _authenticate([http_token(each) for each in (secret, *older)])
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[authenticate, _explain, *middlewares])
    app[_WATCHES] = set()
    app.on_shutdown.append(_end)
    return app


async def _end(app: web.Application) -> None:
    # Watches never end by themselves, and would be waited for, twice as long as a client's last answer may take.
    cut_watches(app)


def cut_watches(app: web.Application) -> None:
    """Let whoever watches know that what served here is gone, though the process may live on."""
    for watch in app[_WATCHES]:
        watch.cancel()


def watches(app: web.Application) -> int:
    """How many watch."""
    return len(app[_WATCHES])


def _authenticate(tokens: Sequence[str]) -> Middleware:
    expected = [f"Bearer {token}".encode() for token in tokens]

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if request.path != "/healthz" and not any(hmac.compare_digest(given, each) for each in expected):
            return error(401, "this endpoint wants the cluster's bearer token", kind="authentication_error")
        return await handler(request)

    return middleware


@web.middleware
async def _explain(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as fault:
        return error(fault.status, str(fault), param=fault.param)


def error(status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None) -> web.Response:
    """An error as the OpenAI API tells it."""
    body = error_body(message, kind=kind, param=param)
    return web.Response(status=status, body=body, content_type="application/json")


def answer(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def decode(body: bytes, what: type[T]) -> T:
    """Raises RequestError."""
    try:
        return msgspec.json.decode(body, type=what)
    except msgspec.DecodeError as fault:
        raise RequestError(str(fault)) from None


@contextmanager
def naming_port(who: str, key: str, host: str, port: int) -> Iterator[None]:
    """Say which port it is that cannot be had.

    Raises:
        ConfigError: it cannot.
    """
    try:
        yield
    except OSError as fault:
        why = "in use" if fault.errno == errno.EADDRINUSE else fault.strerror or str(fault)
        raise ConfigError([f"{who}: {key}: {host}:{port} is {why}; allowed: a free port"]) from None


async def watch(request: web.Request, report: Callable[[], msgspec.Struct]) -> web.StreamResponse:
    """A line of JSON every `?watch=SECONDS`, endlessly: the end of it tells the watcher that this process is gone."""
    said = request.query.get("watch", "")
    try:
        interval_s = max(float(said), SHORTEST_WATCH_S)
    except ValueError:
        interval_s = math.nan
    if not math.isfinite(interval_s):
        raise RequestError(f"watch must be seconds, got {said!r:.80}", param="watch")
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    task, watches = asyncio.current_task(), request.app[_WATCHES]
    assert task is not None
    watches.add(task)
    try:
        while True:
            await response.write(msgspec.json.encode(report()) + b"\n")
            await asyncio.sleep(interval_s)
    finally:
        watches.discard(task)
