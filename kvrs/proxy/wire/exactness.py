"""Features of requests that a plain P/D engine cannot continue exactly. (An engine with the
capability EXACT_RESUME continues all of them itself.)

A plain engine takes the history as a new prompt: it counts output, draws random numbers and matches
stop strings from there. The proxy corrects text, stop strings, token limits and usage itself, for
which token ids are enough. Fields that are inexact by themselves are marked in
kvrs/protocol/openai/fields.py.
"""

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from kvrs.core.fleet.tested import Continues
from kvrs.protocol.openai.fields import inexact_fields
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.requests import ParsedRequest


class _Message(msgspec.Struct):
    content: Any = None


_MESSAGES = msgspec.json.Decoder(list[_Message])
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def tokens_at_risk(parsed: ParsedRequest, continues: Continues) -> tuple[str, ...]:
    """Parts of a request that could make the tokens of a cut stream differ, where instances
    continue it so.
    """
    match continues:
        case Continues.SEEDED:
            return ()
        case Continues.GREEDY:
            # The engine's generator starts anew, seeded or not: its key lacks the position in the
            # stream.
            return ("temperature",) if parsed.request.temperature > 0 else ()
        case Continues.TEXT | Continues.NONE:
            return ("tokens", "temperature") if parsed.request.temperature > 0 else ("tokens",)
        case _:
            assert_never(continues)


def inexact_features(
    parsed: ParsedRequest,
    *,
    has_tokenizer: bool,
    continues: Continues = Continues.GREEDY,
    penalises_prompt: bool = True,
) -> tuple[str, ...]:
    """The fields of the request that could make a stream that is cut at a plain engine differ from
    an uninterrupted one. `penalises_prompt`: its repetition_penalty counts the prompt as well,
    which the history is.
    """
    request = parsed.request
    is_chat = isinstance(request, ChatRequest)
    found = {
        # Penalties on the engine's own output.
        "repetition_penalty": request.repetition_penalty != 1 and not penalises_prompt,
        "presence_penalty": request.presence_penalty != 0,
        "frequency_penalty": request.frequency_penalty != 0,
        # A chat is continued as a completion, whose log probabilities have another form.
        "logprobs": is_chat and request.wanted_logprobs is not None,
        # The state of the engine's parser of calls is lost with the engine.
        "tools": isinstance(request, ChatRequest) and request.may_call_tools,
        # Engines ignore stop strings within min_tokens; the proxy does not.
        "min_tokens": request.min_tokens > 0 and bool(request.stop_strings),
        **dict.fromkeys(inexact_fields(parsed.fields, parsed.endpoint.api), True),
        # A stream is continued from ids alone, which hold the places of pictures and sounds only.
        "messages" if is_chat else "prompt": not has_tokenizer
        or (isinstance(request, ChatRequest) and _has_media(request)),
    }
    at_risk = tokens_at_risk(parsed, continues)
    return (*at_risk, *(name for name, holds in found.items() if holds))


def replayable(
    inexact: Sequence[str], parsed: ParsedRequest, *, has_generator: bool = True
) -> tuple[str, ...]:
    """Those of the inexact features that an engine continues exactly which generates the output
    again, from the request as it was. `has_generator`: each of its requests has random numbers of
    its own.

    Sampling without a seed is none of them by itself, for which the time of a replay is not spent.
    """
    if "temperature" in inexact and not has_generator:
        return ()
    found = tuple(each for each in inexact if each not in ("tokens", "temperature"))
    is_seeded = found or parsed.request.seed is not None
    return ("temperature", *found) if "temperature" in inexact and is_seeded else found


def is_plain_chat(parsed: ParsedRequest) -> bool:
    """A chat whose answer is text, all of which follows from the ids of the messages."""
    request = parsed.request
    return (
        isinstance(request, ChatRequest)
        and not request.may_call_tools
        and request.wanted_logprobs is None
        and not inexact_fields(parsed.fields, parsed.endpoint.api)
        and is_predictable(parsed)
    )


# Names in keys and types of parts of messages that an engine fetches or decodes first; texts may
# have them, too.
_MARKS_OF_MEDIA = (b'_url"', b'"input_', b'_embeds"', b'_pil"')


def is_predictable(parsed: ParsedRequest) -> bool:
    """The time of the request's prefill follows from its tokens. False where a message may hold
    more than text.
    """
    request = parsed.request
    if not isinstance(request, ChatRequest):
        return True
    messages = bytes(request.messages)
    return not (any(mark in messages for mark in _MARKS_OF_MEDIA) and _has_media(request))


def _has_media(request: ChatRequest) -> bool:
    """A message holds more than text."""
    try:
        messages = _MESSAGES.decode(request.messages)
    except msgspec.DecodeError:  # A number that is out of range: what an engine makes of it, shows.
        return True
    contents = (message.content for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(
        isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS for part in parts
    )
