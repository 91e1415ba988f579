"""Bodies of clients' requests, counted before they are read."""

import asyncio

from kvrs.config.proxy import ProxySettings
from kvrs.direct import DirectRequest
from kvrs.errors import RequestError
from kvrs.proxy.api.tenants import Use
from kvrs.proxy.wire.budget import Held
from kvrs.proxy.wire.downstream import ClientRequest


async def read_body(request: ClientRequest, settings: ProxySettings, held: Held, use: Use) -> bytes:
    """The body of a request. What it declares is taken from the budget and from the tenant's limit
    at once, so that a body that was begun can be read to its end; one without a length is counted
    as it arrives.

    Raises:
        RequestError: it is compressed, too long or too slow, or there is no room for it.
    """
    if isinstance(request, DirectRequest):  # It is not compressed, and here.
        await _take(request.content_length, settings, held, use)
        return request.take_body()
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise RequestError(
            f"Content-Encoding {encoding!r:.80} is not supported; allowed: 'identity'", status=415
        )
    await _take(request.content_length or 0, settings, held, use)
    content = request.content
    if content.is_eof():  # All of it came with the head, or right behind it.
        whole = content.read_nowait()
        await _take(len(whole), settings, held, use)
        return whole
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while chunk := await content.readany():
                body += chunk
                await _take(len(body), settings, held, use)
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {settings.body_timeout_s} s", status=408
        ) from None
    return bytes(body)


async def _take(size_bytes: int, settings: ProxySettings, held: Held, use: Use) -> None:
    if size_bytes > settings.max_body_bytes:
        raise RequestError(f"the body must be at most {settings.max_body_bytes} bytes", status=413)
    await use.grow(size_bytes)
    if not held.grow(size_bytes):
        raise RequestError(
            "the requests that are open take up the memory for bodies", status=503, code="no_room"
        )
