"""Requests whose time of prefill follows from their tokens."""

from typing import Any

import msgspec
import pytest

from kvrs.protocol.openai.fields import VLLM
from kvrs.proxy.wire.exactness import is_predictable
from kvrs.proxy.wire.requests import CHAT, read

PICTURE = {"type": "image_url", "image_url": {"url": "https://pictures.example/cat.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


def predictable(content: Any) -> bool:
    fields = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return is_predictable(read(CHAT, msgspec.json.encode(fields), VLLM))


@pytest.mark.parametrize("part", [PICTURE, SOUND], ids=["picture", "sound"])
def test_what_an_engine_fetches_or_decodes_first_is_not(part: dict[str, Any]) -> None:
    assert not predictable([{"type": "text", "text": "hello"}, part])


@pytest.mark.parametrize(
    "content",
    [
        "hello",
        'the key "input_ids" and the key "image_url" of a body',
        [{"type": "text", "text": 'the key "input_ids" of a body'}],
    ],
)
def test_texts_are(content: Any) -> None:
    assert predictable(content)
