"""Features of requests that a plain P/D engine cannot continue exactly. (An engine with
EXACT_RESUME continues all of them.)

A plain engine takes the history as a new prompt: it counts output, draws random numbers and matches
stop strings from its end. The proxy itself corrects text, stop strings, token limits and usage, for
which token ids suffice. Fields that are inexact by themselves are marked in
kvrs/protocol/openai/fields.py.
"""

from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from kvrs.core.fleet.tested import Continues
from kvrs.protocol.openai.fields import ONLY_AGAIN, inexact_fields
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.message_parts import REASONING
from kvrs.proxy.wire.requests import ParsedRequest


class _Message(msgspec.Struct):
    content: Any = None


# Reason of a stream at an instance whose weights are not known to be the cluster's.
WEIGHTS = "weights"

_MESSAGES = msgspec.json.Decoder(list[_Message])
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def tokens_at_risk(parsed: ParsedRequest, continues: Continues) -> tuple[str, ...]:
    """Return the fields of a request that could change the tokens of a cut stream, if instances
    continue the stream as `continues` says.
    """
    match continues:
        case Continues.SEEDED:
            return ()
        case Continues.GREEDY:
            # The engine's random generator starts anew, with or without a seed: its position in the
            # stream is lost.
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
    parses_reasoning: bool = False,
) -> tuple[str, ...]:
    """Return the fields of the request that could make a stream cut at a plain engine differ from
    an uncut stream. `penalises_prompt`: the engine's repetition_penalty also counts the prompt, and
    so the history, which is sent as a prompt. `parses_reasoning`: engines were seen to parse the
    thoughts of chats, which is among the reasons then, as "reasoning".
    """
    request = parsed.request
    is_chat = isinstance(request, ChatRequest)
    found = {
        # After a cut, a plain engine counts only its own output for these penalties, not the
        # history.
        "repetition_penalty": request.repetition_penalty != 1 and not penalises_prompt,
        "presence_penalty": request.presence_penalty != 0,
        "frequency_penalty": request.frequency_penalty != 0,
        # A chat is continued as a completion, whose log probabilities have another form.
        "logprobs": is_chat and request.wanted_logprobs is not None,
        # The engine's parser of tool calls loses its state at a cut.
        "tools": isinstance(request, ChatRequest) and request.may_call_tools,
        REASONING: is_chat and parses_reasoning,
        # Engines ignore stop strings within min_tokens; the proxy does not.
        "min_tokens": request.min_tokens > 0 and bool(request.stop_strings),
        **dict.fromkeys(inexact_fields(parsed.fields, parsed.endpoint.api), True),
        # A stream continues from ids alone, in which pictures and sounds are only placeholders.
        "messages" if is_chat else "prompt": not has_tokenizer
        or (isinstance(request, ChatRequest) and _has_media(request)),
    }
    at_risk = tokens_at_risk(parsed, continues)
    return (*at_risk, *(name for name, holds in found.items() if holds))


def replayable(
    inexact: Sequence[str], parsed: ParsedRequest, *, has_generator: bool = True
) -> tuple[str, ...]:
    """Return the inexact features that become exact at an engine that generates the output again
    from the unchanged request. `has_generator`: each request at the engine has a random generator
    of its own.

    Sampling without a seed alone is not among them, because it is not worth a replay.
    """
    if "temperature" in inexact and not has_generator:
        return ()
    found = tuple(each for each in inexact if each not in ("tokens", "temperature"))
    is_seeded = found or parsed.request.seed is not None
    return ("temperature", *found) if "temperature" in inexact and is_seeded else found


def is_never_text(parsed: ParsedRequest) -> bool:
    """Return whether a plain engine must not continue the output from its ids: a tool call would
    begin in its middle, and the rest would not follow the grammar.
    """
    request = parsed.request
    may_call = isinstance(request, ChatRequest) and request.may_call_tools
    return may_call or not ONLY_AGAIN.isdisjoint(parsed.fields)


def is_plain_chat(parsed: ParsedRequest) -> bool:
    """Return whether the request is a chat whose answer is only text, determined by the ids of its
    messages.
    """
    request = parsed.request
    return (
        isinstance(request, ChatRequest)
        and not request.may_call_tools
        and request.wanted_logprobs is None
        and not inexact_fields(parsed.fields, parsed.endpoint.api)
        and is_predictable(parsed)
    )


# Names of fields for media in messages, which an engine fetches or decodes before prefill; texts
# may contain the names, too.
_MARKS_OF_MEDIA = (b'_url"', b'"input_', b'_embeds"', b'_pil"')


def is_predictable(parsed: ParsedRequest) -> bool:
    """Return whether the number of the prompt's tokens determines the time of prefill; False if a
    message may hold more than text.
    """
    request = parsed.request
    if not isinstance(request, ChatRequest):
        return True
    messages = bytes(request.messages)
    return not (any(mark in messages for mark in _MARKS_OF_MEDIA) and _has_media(request))


def _has_media(request: ChatRequest) -> bool:
    """Return whether a message holds more than text; True if the messages cannot be decoded."""
    try:
        messages = _MESSAGES.decode(request.messages)
    # A number is out of msgspec's range; the engine accepts or refuses the request.
    except msgspec.DecodeError:
        return True
    contents = (message.content for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(
        isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS for part in parts
    )
