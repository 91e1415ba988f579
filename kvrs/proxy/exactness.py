"""What a plain P/D engine cannot continue exactly. (One that says EXACT_RESUME continues everything itself.)

Such an engine takes the history as a new prompt: it counts output, draws random numbers and reads stop strings from there.
The proxy makes up for text, stop strings, token limits and usage, because ids are enough for those.
"""

from typing import Any

import msgspec

from kvrs.protocol.openai import ChatRequest
from kvrs.proxy.forms import Asked


class _Message(msgspec.Struct):
    content: Any = None


_MESSAGES = msgspec.json.Decoder(list[_Message])
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")


def inexact_features(asked: Asked, *, has_tokenizer: bool) -> tuple[str, ...]:
    """The fields of the request because of which a cut stream would differ from an uninterrupted one."""
    request = asked.request
    is_chat = isinstance(request, ChatRequest)
    found = {
        # Its generator starts anew, seeded or not: the position in the stream is no part of its key.
        "temperature": request.temperature > 0,
        # They count the tokens of its own output. (repetition_penalty counts the prompt too, which the history is.)
        "presence_penalty": request.presence_penalty != 0,
        "frequency_penalty": request.frequency_penalty != 0,
        # It goes on as a completion, whose log probabilities have another form.
        "logprobs": is_chat and request.wanted_logprobs is not None,
        # What the engine's parser had seen of a call before the cut is gone with it.
        "tools": isinstance(request, ChatRequest) and request.may_call_tools,
        # Stop strings within min_tokens are no stop strings, to engines only.
        "min_tokens": request.min_tokens > 0 and bool(request.stop_strings),
        # Ids are all that there is to continue from, and of pictures and sounds they are only the places.
        "messages" if is_chat else "prompt": not has_tokenizer or (isinstance(request, ChatRequest) and _has_media(request)),
    }
    return tuple(name for name, holds in found.items() if holds)


def _has_media(request: ChatRequest) -> bool:
    """Whether a message holds more than text."""
    contents = (message.content for message in _MESSAGES.decode(request.messages))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS for part in parts)
