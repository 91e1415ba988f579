"""Errors of a call to another process that got no usable answer; each is an `UpstreamError`."""

import os
import re
import socket
import ssl

import msgspec

from kvrs.errors import UpstreamError

# Words by which the type or the message of an engine's error names what the client has sent.
_OF_INPUT = re.compile(
    r"BadRequest|Invalid|Validation|ValueError|TypeError|Unprocessable|unsupported|not supported"
    r"|\b(?:prompt|input|image|audio|video|url|field|parameter|schema|grammar|regex|template"
    r"|tool|token|logprob|lora|adapter|length|max_tokens|temperature)s?\b",
    re.IGNORECASE,
)


class ConnectionLostError(UpstreamError):
    """The connection was lost or refused; the process may be dead."""

    # The call failed only after a wait, in which the other calls that the same death ends were lost
    # too.
    has_waited = False


class NotConnectedError(ConnectionLostError):
    """The process took no connection: it is dead or has no room, and has seen no request."""


class BusyError(UpstreamError):
    """The process answers that it has no room for the request now."""

    def __init__(self, message: str, status: int, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class EngineError(UpstreamError):
    """The engine answers the request with an error, by its status or by an event of the stream.
    `body`: the engine's message in OpenAI's form, for the client if the request is the cause.
    """

    def __init__(self, cause: str, status: int, body: bytes) -> None:
        super().__init__(cause)
        self.status = status
        self.body = body

    @property
    def names_input(self) -> bool:
        """True if the error names the request's input as its cause, by its type, a parameter
        or a word. Other errors may have a cause that passes.
        """
        error = msgspec.json.decode(self.body)["error"]
        texts = str(self), str(error.get("message"))
        return bool(error.get("param")) or any(map(_OF_INPUT.search, texts))


class NotANumberError(UpstreamError):
    """The engine finds that the logits of this stream are not numbers (NaN)."""


class DifferentOutputError(UpstreamError):
    """The engine generates other output than the client has, or the client's text is not that of
    its tokens. `same_tokens`: known tokens that came again before.
    """

    def __init__(self, message: str, *, same_tokens: int = 0) -> None:
        super().__init__(message)
        self.same_tokens = same_tokens


class UnusableError(UpstreamError):
    """The process answers, but must not be used: it is another server, or has another version or
    secret.
    """


class DeniedError(UnusableError):
    """A request of a stream got 401 or 403: the process, or a gateway in front of it, does not
    accept this proxy's key, or forbids this one request.
    """

    def __init__(self, status: int, cause: str, body: bytes) -> None:
        super().__init__(
            f"HTTP {status} to a completion, by itself or a gateway in front of it: {cause}"
        )
        self.status = status
        self.body = body  # Body of the engine's or gateway's answer, in OpenAI's form.


def unproven(cause: str) -> UnusableError:
    return UnusableError(f"it did not prove its identity: {cause}")


def unreached(error: OSError) -> UpstreamError:
    """Return the error of a connection that was not made. Its message lacks the address, because
    clients read why their streams ended.
    """
    if isinstance(error, TimeoutError) and error.errno is None:
        return ConnectionLostError("connection lost: no connection in time")
    match error:
        case ssl.SSLCertVerificationError():
            cause = f"its certificate is refused: {_reason_of(error)}"
        case ssl.SSLError():
            cause = f"no TLS: {_reason_of(error)}"
        case socket.gaierror():
            cause = "its host name has no address"
        case OSError(errno=int(number)) if number > 0:
            cause = os.strerror(number)
        case _:
            cause = type(error).__name__
    return NotConnectedError(f"connection lost: {cause}")


def _reason_of(error: ssl.SSLError) -> str:
    """Return the reason of a TLS error, without OpenSSL's file names and line numbers."""
    return str(getattr(error, "verify_message", None) or error.reason or error)
