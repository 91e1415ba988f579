"""Requests that one engine answers whole: they ask for a result of the prompt, or of several
outputs at once, which a stream of tokens that goes from prefill to decode could not give.
"""

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.openai.fields import whole
from kvrs.protocol.openai.requests import ECHOED_BY_ENGINE, Fields
from kvrs.proxy.wire.requests import ParsedRequest


def asks_for_whole(parsed: ParsedRequest) -> str | None:
    """The field because of which a request is such a one; None: it is not."""
    fields, names = parsed.fields, whole(parsed.endpoint.api)
    if not names.isdisjoint(fields):
        return next(name for name in fields if name in names)
    echoes = parsed.echo and (
        parsed.request.max_tokens == 0 or any(name in fields for name in ECHOED_BY_ENGINE)
    )
    return "echo" if echoes else None


def check_whole(parsed: ParsedRequest, *, has_key: bool) -> None:
    """Raises RequestError: it is such a request, and to be streamed or resumed."""
    name = asks_for_whole(parsed)
    if name is not None and (parsed.request.stream or has_key):
        raise RequestError(
            f"{name} is answered in one piece by one engine; allowed: without stream and without "
            "Idempotency-Key",
            param=name,
        )


def whole_fields(parsed: ParsedRequest) -> Fields | None:
    """The body for the engine; None: it is no such request."""
    if asks_for_whole(parsed) is None:
        return None
    fields = dict(parsed.fields)
    if "messages" in fields:
        return fields
    prompts = [
        one.fields.get("prompt") or msgspec.Raw(msgspec.json.encode([*(one.prompt_ids or ())]))
        for one in parsed.prompts
    ]
    together = msgspec.Raw(b"[" + b",".join(map(bytes, prompts)) + b"]")
    return fields | {"prompt": together if parsed.more else prompts[0]}
