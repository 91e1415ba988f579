"""Requests that one engine answers whole: a field asks for a result of the prompt, or of several
outputs at once, which a stream of tokens that goes from prefill to decode could not give.
"""

import msgspec

from kvrs.errors import RequestError
from kvrs.protocol.openai.fields import WHOLE
from kvrs.protocol.openai.requests import Fields
from kvrs.proxy.wire.requests import ParsedRequest


def check_whole(parsed: ParsedRequest, *, has_key: bool) -> None:
    """Raises RequestError: it has such a field, and is to be streamed or resumed."""
    name = next((name for name in parsed.fields if name in WHOLE), None)
    if name is not None and (parsed.request.stream or has_key):
        raise RequestError(
            f"{name} is answered in one piece by one engine; allowed: without stream and without "
            "Idempotency-Key",
            param=name,
        )


def whole_fields(parsed: ParsedRequest) -> Fields | None:
    """The body for the engine; None: it has no such field."""
    if WHOLE.isdisjoint(parsed.fields):
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
