"""Responses that are no streams, and errors, in the form that OpenAI clients read."""

import logging
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import web

from kvrs.errors import RequestError
from kvrs.http import retry_after
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.streams.live import Failed

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def json_response(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)


def refusal(failure: Failed) -> web.Response:
    headers = None
    if failure.retry_after_s is not None:
        headers = {"Retry-After": retry_after(failure.retry_after_s)}
    return json_response(failure.body, failure.status, headers)


@web.middleware
async def errors_as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give every error of this port the body that OpenAI clients read."""
    try:
        return await handler(request)
    except RequestError as error:
        headers = {"Retry-After": retry_after(1.0)} if error.status == 503 else {}
        kind = error.kind or ("invalid_request_error" if error.status < 500 else "server_error")
        response = json_response(
            error_body(str(error), kind=kind, param=error.param, code=error.code),
            error.status,
            headers | dict(error.headers),
        )
        if not request.content.at_eof():  # The rest of the body is not read.
            response.force_close()
        return response
    except web.HTTPException:  # As at every port.
        raise
    except Exception:
        # An internal error. After the headers only the end of the connection can signal it.
        log.exception("request ended by a bug")
        if request.writer.output_size > 0:
            raise
        body = error_body("the proxy failed; its log says more", kind="server_error")
        return json_response(body, 500)
