"""Errors of keyed streams that clients get."""

from kvrs.errors import RequestError
from kvrs.protocol.mirror import Refusal
from kvrs.protocol.openai.chunks import error_body
from kvrs.proxy.streams.open_stream import Failed


def _ended(status: int, code: str, message: str, retry_after_s: float | None = None) -> Failed:
    return Failed(status, error_body(message, kind="server_error", code=code), retry_after_s)


SUPERSEDED = _ended(409, "superseded", "the stream goes on elsewhere: its client has resumed it")
HANDED_OVER = _ended(
    503,
    "handed_over",
    "the proxy is shutting down: resume at another one, with the same key",
    retry_after_s=1.0,
)
CUT = _ended(409, "inexact", "what the client has ends within a piece that cannot be cut")
BROKEN = Failed(500, error_body("internal error of the proxy; see its log", kind="server_error"))

_REFUSALS = {
    Refusal.BUSY: (409, "resume_conflict", "the stream has just been resumed by another request"),
    Refusal.OTHER_BODY: (
        422,
        "idempotency_mismatch",
        "the key belongs to a request with another body",
    ),
    Refusal.OTHER_STREAM: (
        404,
        "unknown_stream",
        "the key belongs to another stream than Last-Event-ID",
    ),
    Refusal.INEXACT: (
        409,
        "inexact",
        "what the client has beyond the mirror cannot be regenerated exactly",
    ),
    Refusal.BEYOND: (400, "beyond_end", "Last-Event-ID lies behind the end of the stream"),
}


def refused(refusal: Refusal | None) -> RequestError | None:
    """Return the error for a refused claim; None: the proxy has lost the record, which must be
    looked up again.
    """
    return _error(*_REFUSALS[refusal]) if refusal in _REFUSALS else None


def inexact() -> RequestError:
    return _error(*_REFUSALS[Refusal.INEXACT])


def unknown_stream() -> RequestError:
    return _error(404, "unknown_stream", "no proxy has a record of the stream")


def unreachable(cause: str) -> RequestError:
    return _error(503, "mirror_unreachable", cause)


def _error(status: int, code: str, message: str) -> RequestError:
    return RequestError(message, status=status, code=code)
