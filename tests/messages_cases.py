"""Requests to Anthropic's Messages API in words of the test model, and what two answers to one of
them must have in common.
"""

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK = {"role": "user", "content": "ka lo mi ren sta"}
LOOK = {
    "name": "look",
    "description": "Look.",
    "strict": True,  # Else vLLM does not guide the arguments.
    "input_schema": {
        "type": "object",
        "properties": {
            "where": {"type": "string", "enum": ["an", "dra"]},
            "often": {"type": "boolean"},
        },
        "required": ["where", "often"],
        "additionalProperties": False,
    },
}
TURNS = [
    ASK,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "vor ti"},
            {"type": "tool_use", "id": "a", "name": "look", "input": {"where": "an"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "el"}]}
        ],
    },
]
ANY = {"tools": [LOOK], "tool_choice": {"type": "any"}}
NAMED = {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "look"}}
# A call of a thousand tokens, or of the most that are allowed.
WALK = {
    "tools": [
        {
            "name": "walk",
            "strict": True,
            "input_schema": {
                "type": "object",
                "properties": {
                    "path": {
                        "type": "array",
                        "items": {"type": "string", "enum": ["an", "dra", "el"]},
                        "minItems": 60,
                        "maxItems": 60,
                    }
                },
                "required": ["path"],
                "additionalProperties": False,
            },
        }
    ],
    "tool_choice": {"type": "any"},
    "max_tokens": 1000,
}
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    # One block: vLLM joins several without a line feed.
    "system": {"system": [{"type": "text", "text": "vor ti"}]},
    "turns": {"messages": TURNS, "tools": [LOOK], "tool_choice": {"type": "none"}},
    "any tool": ANY,
    "tool by name": NAMED,
    "stop": {"stop_sequences": ["an", "q"]},
}


@dataclass(frozen=True)
class Message:
    """A whole message, or the events of a stream put together."""

    # Type; text, or name and input of a call: of a stream as it came, since the limit may cut it.
    blocks: list[tuple[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    input_tokens: int  # Those of the prefix cache too.
    output_tokens: int


def body_of(name: str, stream: bool) -> dict[str, Any]:
    fixed = {"messages": [ASK], "max_tokens": 64, "temperature": 0, "stream": stream}
    return fixed | CASES[name]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Message:
    async with http.post(url + MESSAGES, json=body) as response:
        raw = await response.read()
    assert response.status == 200, raw
    return _whole([json.loads(raw)] if not body["stream"] else _events(raw))


async def count(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> int:
    asked = {key: body[key] for key in ("model", "messages", "system", "tools") if key in body}
    async with http.post(url + COUNT, json=asked) as response:
        assert response.status == 200, await response.read()
        found: int = (await response.json())["input_tokens"]
        return found


def _events(raw: bytes) -> list[Any]:
    events = []
    for frame in raw.decode().split("\n\n"):
        lines = [line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":")]
        if data := dict(lines).get("data"):
            events.append(json.loads(data))
    assert events[-1] == {"type": "message_stop"}, events[-1]
    return events


def _whole(events: list[Any]) -> Message:
    message: dict[str, Any] = {"content": [], "usage": {}}
    parts: list[str] = []
    for event in events:
        match event["type"]:
            case "message":
                message = event
            case "message_start":
                message["usage"] |= event["message"]["usage"]
            case "content_block_start":
                assert event["index"] == len(parts)
                message["content"].append(event["content_block"])
                parts.append("")
            case "content_block_delta":
                delta = event["delta"]
                parts[event["index"]] += delta.get("text", "") + delta.get("partial_json", "")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case _:
                pass
    for block, part in zip(message["content"], parts, strict=False):
        block["text" if block["type"] == "text" else "input"] = part
    usage = message["usage"]
    return Message(
        [
            (block["type"], block["text"] if "text" in block else (block["name"], block["input"]))
            for block in message["content"]
        ],
        message["stop_reason"],
        message.get("stop_sequence"),
        usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0),
        usage["output_tokens"],
    )
