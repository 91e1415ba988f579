"""Parts of a message that an event adds to."""

from typing import Any

import msgspec
import pytest

from kvrs.protocol.openai.chunks import CHUNK
from kvrs.proxy.wire.message_parts import parsed_parts


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({"function": {"name": "f", "arguments": None}}, {"name 0": "f", "arguments 0": ""}),
        (
            {"index": 2, "id": None, "type": None, "function": {"name": None, "arguments": "{}"}},
            {"name 2": "", "arguments 2": "{}"},
        ),
        ({"index": None, "function": None}, {"name 0": "", "arguments 0": ""}),
        ({"index": 1, "id": 7}, {"name 1": "", "arguments 1": ""}),
    ],
)
def test_a_null_in_a_piece_of_a_call_adds_nothing(call: Any, expected: dict[str, str]) -> None:
    """Later pieces of vLLM and SGLang have nulls, and fields that are not counted any form."""
    event = msgspec.json.encode({"choices": [{"delta": {"tool_calls": [call]}}]})
    choices = CHUNK.decode(event).choices

    assert choices is not None
    assert dict(parsed_parts(choices[0])) == expected
