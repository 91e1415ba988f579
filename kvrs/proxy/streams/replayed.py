"""Filter of a second run's output: it compares the output with what the client has, and removes it.

The ids that the client has must come again, and the same texts: one sequence of ids can be packed
into events in several ways, and a parser may make other texts of them. Engines that send no ids are
compared by the texts alone. Nothing reaches the client before all that it has has come again.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.proxy.wire.errors import DifferentOutputError
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import (
    NAME,
    REASONING,
    TEXT,
    all_parts,
    arguments_of,
    name_of,
)
from kvrs.proxy.wire.sse import PROMPT_TOKEN_IDS, prompt_ids_of

# Two names of the reasoning; engines send one or both, with the same text.
_REASONING = (REASONING, "reasoning_content")
# Most new ids that may come before the last known text: a parser holds text back for a few tokens.
_MOST_LATE = 64

_Event = tuple[bytes, ReceivedChoice]


class ReplayedOutput:
    """Removes from the events of a second run what the client already has."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._known = journal.output_ids[:]
        self._at = 0  # Known ids that have come again.
        self._late = 0  # New ids that have come since.
        # Text that the run has yet to repeat, by part of the message. A completion's text follows
        # from its ids, and only its length is kept.
        self._owed: dict[str, str] = {}
        self._owed_characters = 0
        if (parts := journal.parts) is not None:
            self._owed = {name: parts.text(name) for name in parts.names()}
        else:
            self._owed_characters = journal.text_sent or 0
        self._parts = frozenset(self._owed)  # Parts that the client has, the last of them open.
        self._last = "" if journal.parts is None else journal.parts.last
        self._held: list[_Event] = []  # New parts of events, until all known output has come.

    @property
    def is_over(self) -> bool:
        is_repeated = self._at == len(self._known) and not self._owed_characters
        return is_repeated and not any(self._owed.values())

    def take(self, data: bytes, choice: ReceivedChoice) -> Sequence[_Event]:
        """Return the events, or their new parts, that the client may get now.

        Raises:
            DifferentOutputError: the engine generates different output.
        """
        self._check_prompt(data)
        ids = choice.token_ids or []
        again = min(len(ids), len(self._known) - self._at)
        for at, token in enumerate(ids[:again], self._at):
            if token != self._known[at]:
                raise self._different(f"replayed other tokens from token {at} on", at)
        self._at += again
        self._late += len(ids) - again
        added: dict[str, str] = {}
        try:
            for part, text in all_parts(choice):
                added[part] = added.get(part, "") + text
        except UNREADABLE:
            raise self._different("replayed a malformed tool call") from None
        owes = False
        for part, text in added.items():
            owes |= bool(text) and self._compare(part, text, has_new=len(ids) > again)
        if again or owes:
            data, choice = self._rest_of(data, again)
        if choice.token_ids or choice.plain_text or choice.is_parsed or choice.finish_reason:
            self._held.append((data, choice))
        if not self.is_over:
            if choice.finish_reason is not None or self._late > _MOST_LATE:
                known = len(self._known)
                raise self._different(f"ended its replay at {self._at} of {known} tokens")
            return ()
        held, self._held = self._held, []
        return held

    def _compare(self, part: str, text: str, *, has_new: bool) -> bool:
        """Compare a text with the one that the client has; return whether it has any of it.
        `has_new`: the text may be that of new ids.
        """
        if self._journal.parts is None:
            return bool(self._owed_characters)
        owed = self._owed.get(part, "")
        # More of a part than the client has belongs before what it has since; names come whole.
        is_passed = part != self._last and not has_new
        is_closed = part in self._parts and (is_passed or part.startswith(NAME))
        if not owed.startswith(text) and not (text.startswith(owed) and not is_closed):
            raise self._different(f"replayed another text in part {part!r}")
        return bool(owed)

    def _different(self, cause: str, at: int | None = None) -> DifferentOutputError:
        return DifferentOutputError(cause, same_tokens=self._at if at is None else at)

    def _check_prompt(self, data: bytes) -> None:
        """Check that the replay has the stream's prompt: a template with the time of day renders
        another.
        """
        if PROMPT_TOKEN_IDS in data and prompt_ids_of(data) != self._journal.prompt_ids:
            raise self._different("rendered another prompt")

    def _rest_of(self, data: bytes, again: int) -> _Event:
        """Return the event without its first `again` ids and the repeated text."""
        event = msgspec.json.decode(data)
        self._cut(event["choices"][0], again)
        data = msgspec.json.encode(event)
        choices = CHUNK.decode(data).choices
        assert choices, data
        return data, choices[0]

    def _cut(self, choice: dict[str, Any], again: int) -> None:
        """Remove from a decoded choice the first `again` ids and the repeated text."""
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
        index, function = call.get("index") or 0, call.get("function") or {}
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
        """Return the part of a text that the client lacks, and count the rest as repeated."""
        if self._journal.parts is None:
            again = min(len(text), self._owed_characters)
            self._owed_characters -= again
            return text[again:]
        owed = self._owed.get(part, "")
        self._owed[part] = owed[len(text) :]
        return text[len(owed) :]
