"""The requests of the experiment: recordings of many parsers, in three APIs."""

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.parsed_deaths.oracle import CHAT, MESSAGES, RESPONSES
from kvrs_testkit.engine_streams import Recording, recordings
from kvrs_testkit.engine_streams.scripts import DIFFERS, TOOLS

APIS = (CHAT, MESSAGES, RESPONSES)
TEXT = "Tidy up."


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, without its death."""

    recording: str
    api: str
    is_stream: bool
    is_seeded: bool

    @property
    def played(self) -> Recording:
        return recordings()[self.recording]

    def body(self, model: str = "tiny") -> dict[str, Any]:
        """The request as the client of the API sends it."""
        recording = self.played
        sampled = {"temperature": 1.0, "seed": 7} if self.is_seeded else {"temperature": 0}
        kept = {
            name: value
            for name, value in recording.request.items()
            if name in ("chat_template_kwargs", "reasoning_effort")
        }
        body = {"model": model, "stream": self.is_stream} | sampled | kept
        body |= _ASKED[self.api](recording.tool_choice)
        if self.api != CHAT and (effort := body.pop("reasoning_effort", None)):
            body["reasoning" if self.api == RESPONSES else "output_config"] = {"effort": effort}
        if self.api == CHAT and self.is_stream:
            body["stream_options"] = {"include_usage": True}
        return body


def _chat(choice: str) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": TEXT}]}
    if choice == "none":
        return messages
    named = {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}
    return messages | {"tools": TOOLS, "tool_choice": named if choice == "named" else choice}


def _message(choice: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4096}
    if choice == "none":
        return asked
    named = {"type": "tool", "name": TOOLS[0]["function"]["name"]}
    choices = {"auto": {"type": "auto"}, "required": {"type": "any"}, "named": named}
    tools = [
        {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
        for each in TOOLS
    ]
    return asked | {"tools": tools, "tool_choice": choices[choice]}


def _response(choice: str) -> dict[str, Any]:
    asked: dict[str, Any] = {"input": TEXT, "store": False}
    if choice == "none":
        return asked
    named = {"type": "function", "name": TOOLS[0]["function"]["name"]}
    tools = [{"type": "function"} | each["function"] for each in TOOLS]
    return asked | {"tools": tools, "tool_choice": named if choice == "named" else choice}


_ASKED = {CHAT: _chat, MESSAGES: _message, RESPONSES: _response}


@functools.cache
def usable(engine: str) -> list[str]:
    """Names of the recordings of an engine whose calls have arguments that are JSON objects.

    Those of `DIFFERS` are faults of the engine's parsers. They stay where all APIs can show them.
    """
    return [
        name
        for name, recording in recordings(engine).items()  # type: ignore[arg-type]
        if _is_whole(recording) and "twice" not in DIFFERS.get(name, "")
    ]


def _is_whole(recording: Recording) -> bool:
    whole = json.loads(bytes(recording.whole))["message"].get("tool_calls") or []
    told = [each["function"]["arguments"] for each in whole]
    try:
        told = [json.loads(each) for each in told]
    except ValueError:
        return False
    return all(isinstance(each, dict) for _, each in recording.calls) and all(
        isinstance(each, dict) for each in told
    )


def drawn(rng: random.Random, names: Sequence[str]) -> Asked:
    """Draw a request: two of three are streamed, each second one has a seed."""
    return Asked(rng.choice(names), rng.choice(APIS), rng.random() < 2 / 3, rng.random() < 0.5)
