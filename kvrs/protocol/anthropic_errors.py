"""Errors in the form of Anthropic's API."""

from typing import Any

import msgspec

from kvrs.protocol.openai.calls import Event, read_error
from kvrs.protocol.openai.chunks import NOT_A_NUMBER, UNDECODABLE

OVERLOADED = 529  # Status of Anthropic's API for what is 503 elsewhere.
# Code of an error by which Anthropic's SDK knows that it has to hold the conversation itself.
NO_THREADS = "thread_unsupported_request"

# Type of an error with a status; others are `invalid_request_error` below 500, else `api_error`.
_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Type of an error that ends a stream: by the code of the chat's error, else by the chat's type,
# else `invalid_request_error`. Agents repeat a message after `overloaded_error`, so an error that
# would come again has another type.
_OF_CODE = {
    "denied": "api_error",
    "superseded": "api_error",  # The client itself goes on with the stream, at another proxy.
    "poison": "api_error",
    NOT_A_NUMBER: "api_error",
    UNDECODABLE: "api_error",
}
_OF_KIND = {"rate_limit_error": "overloaded_error", "server_error": "overloaded_error"}

_OBJECT = msgspec.json.Decoder(dict[str, Any])


def error_of(body: bytes, status: int, request_id: str) -> tuple[int, bytes]:
    """Return status and body of an error in Anthropic's form, from those of OpenAI's."""
    error = _OBJECT.decode(body)["error"]
    kind = _OF_STATUS.get(status, "invalid_request_error" if status < 500 else "api_error")
    made = {"type": kind, "message": error["message"]}
    if error.get("code") == NO_THREADS:
        made["details"] = {"error_code": NO_THREADS, "unsupported": ["thread"]}
    encoded = msgspec.json.encode({"type": "error", "error": made, "request_id": request_id})
    return OVERLOADED if status == 503 else status, encoded


def error_event(error: Any) -> Event:
    """Return the event with which a message's stream ends, from the error of the chat's stream."""
    message, kind, code = read_error(error)
    ended = _OF_CODE.get(code) or _OF_KIND.get(kind, "invalid_request_error")
    return {"type": "error", "error": {"type": ended, "message": message}}


def fault_event(fault: str) -> Event:
    """Return the event with which a stream ends whose chat cannot be translated."""
    return error_event({"message": fault, "type": "server_error", "code": UNDECODABLE})
