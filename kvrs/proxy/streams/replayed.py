"""Filter of a replay's output: it removes what the client already has."""

from collections import Counter
from typing import Any

import msgspec

from kvrs.errors import UpstreamError
from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import REASONING, TEXT, all_parts, arguments_of, name_of
from kvrs.proxy.wire.sse import PROMPT_TOKEN_IDS, prompt_ids_of

# Two names of the reasoning; engines send one or both, with the same text.
_REASONING = (REASONING, "reasoning_content")


class ReplayedOutput:
    """Removes from the events of a replaying attempt what the client already has."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known = journal.output_ids[:]
        self._at = 0
        # Number of characters that the replay has yet to repeat, by part of the message.
        self._owed = Counter(journal.parsed_sent or {})
        self._owed[TEXT] = journal.text_sent or 0

    @property
    def is_over(self) -> bool:
        return self._at == len(self._known) and not any(self._owed.values())

    def take(self, data: bytes, choice: ReceivedChoice) -> tuple[bytes, ReceivedChoice] | None:
        """Return the new part of an event; None: nothing is new.

        Raises:
            UpstreamError: the engine generates different output.
        """
        self._check_prompt(data)
        ids = choice.token_ids or []
        again = min(len(ids), len(self._known) - self._at)
        if ids[:again] != self._known[self._at : self._at + again].tolist():
            raise UpstreamError(f"replayed other tokens from token {self._at} on")
        self._at += again
        if choice.finish_reason is not None and self._at < len(self._known):
            raise UpstreamError(f"ended its replay at {self._at} of {len(self._known)} tokens")
        owes = any(self._owed[part] for part, size in all_parts(choice) if size)
        if not again and not owes:
            return data, choice
        event = msgspec.json.decode(data)
        self._cut(event["choices"][0], again)
        data = msgspec.json.encode(event)
        choices = CHUNK.decode(data).choices
        assert choices, data
        rest = choices[0]
        is_new = rest.token_ids or rest.plain_text or rest.is_parsed or rest.finish_reason
        return (data, rest) if is_new else None

    def _check_prompt(self, data: bytes) -> None:
        """Check that the replay has the stream's prompt: a template with the time of day renders
        another.
        """
        if PROMPT_TOKEN_IDS in data and prompt_ids_of(data) != self._journal.prompt_ids:
            raise UpstreamError("rendered another prompt")

    def _cut(self, choice: dict[str, Any], again: int) -> None:
        """Remove from a decoded choice the first `again` ids and the repeated characters."""
        if choice.get("token_ids"):
            choice["token_ids"] = choice["token_ids"][again:]
        if logprobs := choice.get("logprobs"):
            choice["logprobs"] = {
                name: values and values[again:] for name, values in logprobs.items()
            }
        if choice.get("text"):
            choice["text"] = self._rest(TEXT, choice["text"])
        delta = choice.get("delta") or {}
        if delta.get("content"):
            delta["content"] = self._rest(TEXT, delta["content"])
        # Both names, if present, have the same text.
        if names := [name for name in _REASONING if delta.get(name)]:
            rest = self._rest(_REASONING[0], delta[names[0]])
            delta.update(dict.fromkeys(names, rest))
        if delta.get("tool_calls"):
            calls = [call for call in delta["tool_calls"] if self._cut_call(call)]
            delta["tool_calls"] = calls
            if not calls:
                del delta["tool_calls"]

    def _cut_call(self, call: dict[str, Any]) -> bool:
        """Remove what the client has from a piece of a tool call; return whether any is left."""
        index, function = call.get("index", 0), call.get("function") or {}
        if name := function.get("name"):
            if self._rest(name_of(index), name):
                return True  # The client has not this call's name yet, so the whole piece is new.
            for each in ("id", "type"):
                call.pop(each, None)
            function["name"] = None
        arguments = function.get("arguments") or ""
        function["arguments"] = self._rest(arguments_of(index), arguments)
        return bool(function["arguments"])

    def _rest(self, part: str, text: str) -> str:
        again = min(len(text), self._owed[part])
        self._owed[part] -= again
        return text[again:]
