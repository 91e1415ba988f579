"""Unstreamed responses and errors, in the form that clients of OpenAI or Anthropic read."""

import logging
from collections.abc import Mapping

from kvrs.errors import RequestError
from kvrs.net.routes import JSON, Request, Response, retry_after
from kvrs.protocol.anthropic import PATH, error_of
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.streams.open_stream import Failed

log = logging.getLogger(__name__)

_NO_HEADERS: Mapping[str, str] = {}


def json_response(
    body: bytes, status: int = 200, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    return Response(status, body, {"Content-Type": JSON, **headers})


def refusal(failure: Failed) -> Response:
    headers = _NO_HEADERS
    if failure.retry_after_s is not None:
        headers = {"Retry-After": retry_after(failure.retry_after_s)}
    elif failure.status >= 500 and (failure.rejected or failure.is_final):
        # OpenAI's clients would repeat the request after a 5xx without this header.
        headers = {"X-Should-Retry": "false"}
    return json_response(failure.body, failure.status, headers)


def error_response(error: RequestError) -> Response:
    headers = {"Retry-After": retry_after(1.0)} if error.status == 503 else {}
    kind = error.kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return json_response(
        error_body(str(error), kind=kind, param=error.param, code=error.code),
        error.status,
        headers | dict(error.headers),
    )


def bug_response() -> Response:
    """Make the response to a request that ended by the exception being handled."""
    log.exception("request ended by a bug")
    return json_response(
        error_body("the proxy failed; its log says more", kind="server_error"), 500
    )


def in_the_form_of(request: Request, response: Response) -> Response:
    """Return an error in the form of the API that the request is for."""
    if response.status >= 400 and response.body and request.path.startswith(PATH):
        status, body = error_of(response.body, response.status, request.id)
        return Response(status, body, response.headers)
    return response
