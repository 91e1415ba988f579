"""Puts the events of a chat stream together, as a client of OpenAI's API does."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Call:
    """A tool call, as far as it has been streamed."""

    id: str | None = None
    name: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """The answer that a client has at the end of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    finish_reason: str | None = None
    ids: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[str | bytes]) -> "Answer":
        """Read the data of a stream's events."""
        answer = cls()
        for event in events:
            for choice in json.loads(event)["choices"]:
                answer._add(choice)
        return answer

    def parsed_calls(self) -> list[tuple[str, Any]]:
        """The calls with their arguments as objects, or as text where that is no JSON."""
        return [(call.name, _parsed(call.arguments)) for call in self.calls]

    def _add(self, choice: dict[str, Any]) -> None:
        delta = choice["delta"]
        self.content += delta.get("content") or ""
        self.reasoning += delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.ids += choice.get("token_ids") or []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for piece in delta.get("tool_calls") or ():
            while len(self.calls) <= piece["index"]:
                self.calls.append(Call())
            call, function = self.calls[piece["index"]], piece.get("function") or {}
            call.id = piece.get("id") or call.id
            call.name += function.get("name") or ""
            call.arguments += function.get("arguments") or ""


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
