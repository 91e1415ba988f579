"""`Player` answers as the engine of a recording did, from any position of the output."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from kvrs.protocol.openai.chunks import sse
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.engine_streams import HEAD, Recording
from kvrs_testkit.engine_streams.vocabulary import OTHER_TEXT, end_id, other_id, tokenizer
from kvrs_testkit.scripted_model import Writer

_IDS = re.compile(r'"((?:prompt_)?token_ids)":\[[^]]*\]')
_NOTHING = '"delta":{},"logprobs":null,"finish_reason":null,'


@dataclass(frozen=True, slots=True)
class Played:
    """One event, and the positions of the ids that it covers."""

    data: bytes
    first: int
    behind: int


@dataclass(frozen=True, slots=True)
class Player:
    """A recording, as one server plays it."""

    recording: Recording
    differs_at: int | None = None  # Position at which this server generates another id.

    def __post_init__(self) -> None:
        assert self.differs_at is None or self.differs_at < len(self.recording.ids) - 1

    def plays(self, parsed: CompletionRequest | ChatRequest) -> TypeGuard[ChatRequest]:
        """True for a chat whose limit the recording does not reach; others are generated."""
        return isinstance(parsed, ChatRequest) and (
            parsed.max_tokens is None or parsed.max_tokens >= len(self.recording.ids)
        )

    @property
    def usage(self) -> dict[str, int]:
        """The token counts of the whole answer."""
        prompt, made = len(self.recording.prompt_ids), len(self.recording.ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}

    def place(self, history: Sequence[int]) -> int | None:
        """Number of output ids that a history has behind the recording's prompt; None: it is
        another prompt, or another output.
        """
        prompt, ids = self.recording.prompt_ids, self.recording.ids
        made = list(history[len(prompt) :])
        if list(history[: len(prompt)]) != prompt or len(made) >= len(ids):
            return None
        if any(one not in (meant, other_id()) for one, meant in zip(made, ids, strict=False)):
            return None
        return len(made)

    def next_token(self, history: Sequence[int]) -> int | None:
        """The id behind a history; None: the recording says nothing about that."""
        place = self.place(history)
        if place is None:
            return None
        return other_id() if place == self.differs_at else self.recording.ids[place]

    def writer(self, parsed: CompletionRequest | ChatRequest, *, shows_special: bool) -> Writer:
        """Make what turns ids of the recording into text of a completion."""
        return Writer(parsed, False, tokenizer(shows_special=shows_special), end_id())

    def events(
        self, *, model: str, returns_ids: bool, number: int = 0, known: Sequence[int] = ()
    ) -> Iterator[Played]:
        """The events of a chat but for `[DONE]`, as recorded but for id, model and, if they were
        not asked for, token ids. The output begins with the `known` ids.
        """
        changes = self._changes(known)
        first = 0
        for text, behind in zip(self.recording.data, self.recording.covered, strict=True):
            due = {at: change for at, change in changes.items() if at < behind}
            if due:
                text = self._changed(text, first, due)
                changes = {at: change for at, change in changes.items() if at not in due}
            if returns_ids or _NOTHING not in text:
                if not returns_ids:
                    text = _IDS.sub(r'"\1":null', text)
                text = _head(model, number) + text.removeprefix(HEAD)
                yield Played(sse(text.encode()), first, behind)
            first = behind

    def whole(self, *, model: str, returns_ids: bool, number: int = 0) -> dict[str, Any]:
        """The whole answer to a chat."""
        choice = msgspec.json.decode(self.recording.whole)
        answer = msgspec.json.decode(_head(model, number).rstrip(",") + "}")
        answer["object"] = "chat.completion"
        if "token_ids" in choice:  # That of vLLM.
            choice["token_ids"] = self._ids() if returns_ids else None
            answer["prompt_token_ids"] = self.recording.prompt_ids if returns_ids else None
        return dict(answer) | {"choices": [choice], "usage": self.usage}

    def _ids(self) -> list[int]:
        changes = self._changes(())
        return [changes.get(at, each) for at, each in enumerate(self.recording.ids)]

    def _changes(self, known: Sequence[int]) -> dict[int, int]:
        """The ids that differ from the recorded ones, by position."""
        changes = {
            at: one
            for at, (one, meant) in enumerate(zip(known, self.recording.ids, strict=False))
            if one != meant
        }
        if self.differs_at is not None and self.differs_at >= len(known):
            changes[self.differs_at] = other_id()
        return changes

    def _changed(self, text: str, first: int, changes: dict[int, int]) -> str:
        """The event with other ids, and with another text if the event has that of the id."""
        event = json.loads(text)
        (choice,) = event["choices"]
        for at, one in changes.items():
            if choice.get("token_ids"):
                choice["token_ids"][at - first] = one
            _replace(choice["delta"], self.recording.texts[at])
        return json.dumps(event, ensure_ascii=False, separators=(",", ":"))


def _replace(delta: dict[str, Any], text: str) -> None:
    """Put another text in the place of the last occurrence of `text` in a delta."""
    calls = [piece["function"] for piece in delta.get("tool_calls") or ()]
    for leaves in (delta, *calls):
        for name in ("content", "reasoning", "reasoning_content", "arguments"):
            if text and text in (leaves.get(name) or ""):
                before, _, behind = leaves[name].rpartition(text)
                leaves[name] = before + OTHER_TEXT + behind
                return


def _head(model: str, number: int) -> str:
    fields = {
        "id": f"chatcmpl-played-{number}",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000 + number,
        "model": model,
    }
    return msgspec.json.encode(fields).decode()[:-1] + ","
