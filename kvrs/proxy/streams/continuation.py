"""Text of a stream that goes on at a plain engine, which lacks the state of the text before the
cut: the proxy makes the text from the ids or, without a tokenizer, takes the engine's.

Filter of a second run's output: it compares the output with what the client has, and removes it.

The ids that the client has must come again, and the same texts: one sequence of ids can be packed
into events in several ways, and a parser may make other texts of them. Engines that send no ids are
compared by the texts alone. Nothing reaches the client before all that it has has come again.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from tokenizers import Tokenizer

from kvrs.protocol.openai.chunks import CHUNK, ReceivedChoice
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.errors import DifferentOutputError
from kvrs.proxy.wire.events import PROMPT_TOKEN_IDS, prompt_ids_of
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import NAME, REASONING, TEXT, all_parts, arguments_of, name_of
from kvrs.text.output import OutputText, StopStrings, TextDelta

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


# Most characters by which an engine's detokeniser may differ from kvrs's, beyond text held back for
# a stop string.
_MOST_CHARACTERS_HELD = 8

# Stands for an unknown number of characters that the client has: more than any output, so that
# another proxy's text machine skips nothing.
_UNKNOWN_SENT = 1 << 40


class Piece(msgspec.Struct, frozen=True):
    """Ids that an engine adds to the stream, up to the stream's end, and the text that they add."""

    token_ids: list[int]
    delta: TextDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offsets: Sequence[int] = ()  # Number of characters of the whole output that precede each id.


class Continuation:
    """The text machine of one stream, positioned at the end of the client's text.

    A plain engine may hold back more or less than this machine at the same id. So characters are
    counted: those that the client has are skipped, and missing ones of the ids before the cut come
    first. Behind a thought the text begins with the ids of the answer.

    Raises:
        DifferentOutputError: the ids have more text than the client, or another answer, so an
            engine has parsed them.
    """

    def __init__(self, journal: Journal, tokenizer: Tokenizer) -> None:
        held_back = (
            max(map(len, journal.parsed.request.stop_strings), default=0) + _MOST_CHARACTERS_HELD
        )
        begins = [0]
        if journal.parts is not None and journal.parts.is_parsed:
            begins = [*range(*(journal.answer_from or (0, 0)))]
        for begin in begins:
            self._text = OutputText(tokenizer, journal.parsed.request.stop_strings)
            self._feed(journal.output_ids[:begin], is_end=False)
            replayed = self._feed(journal.output_ids[begin:], is_end=False)
            if journal.parts is None or is_text_of(
                journal, replayed.delta.text, held_back, tokenizer
            ):
                break
        else:
            raise DifferentOutputError("the client's text is not that of the output's ids")
        written = len(replayed.delta.text)
        sent = written if journal.text_sent is None else journal.text_sent
        # Number of characters sent before the cut. If an engine has sent text that does not belong
        # to these ids (vLLM sends the prompt's last character, if the prompt ends within it),
        # nothing is skipped: wrong text is better than missing text.
        self.sent = sent if sent <= written + held_back else written
        self._lacks = replayed.delta.text[self.sent :]
        self._skips = max(0, self.sent - written)
        # The former engine has generated the end, and died before sending it.
        self.ended = replayed.finish_reason is not None
        self._ended_by = replayed.stop_reason

    def take(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
        text: str = "",
    ) -> Piece:
        """Continue with the next ids of an engine, and its reasons if these are the last. The
        engine's `text` is not used, because the ids determine the text.
        """
        piece = self._feed(token_ids, is_end=finish_reason == "stop")
        if piece.finish_reason is None and finish_reason is not None:
            # The token that ends a stream has no text, but belongs to the output.
            delta = piece.delta.then(self._text.finish())
            piece = msgspec.structs.replace(
                piece,
                delta=delta,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
            )
        return msgspec.structs.replace(piece, delta=self._unsent(piece.delta))

    def end(self) -> Piece:
        """Return the end of a stream that has all its ids: text held back, and the reason of the
        end.
        """
        if self.ended:
            return Piece([], self._unsent(TextDelta("")), "stop", self._ended_by)
        return Piece([], self._unsent(self._text.finish()), "length")

    def _feed(self, token_ids: Sequence[int], *, is_end: bool) -> Piece:
        delta, offsets = TextDelta(""), list[int]()
        for count, token_id in enumerate(token_ids, 1):
            offsets.append(self._text.characters)
            if is_end and count == len(token_ids):
                break
            delta = delta.then(self._text.feed(token_id))
            if delta.stopped is not None:
                return Piece(list(token_ids[:count]), delta, "stop", delta.stopped, offsets)
        return Piece(list(token_ids), delta, offsets=offsets)

    def _unsent(self, delta: TextDelta) -> TextDelta:
        text, self._lacks = self._lacks + delta.text, ""
        skipped = min(self._skips, len(text))
        self._skips -= skipped
        return replace(delta, text=text[skipped:])


def is_answer_plain(journal: Journal, tokenizer: Tokenizer) -> bool:
    """Return whether the text behind the thought of a complete message is that of its ids to the
    end. (Some parsers take marks of the answer's end away, or show them.)
    """
    assert journal.parts is not None
    answer, is_end = journal.parts.text(TEXT), journal.finish_reason == "stop"
    for begin in range(*(journal.answer_from or (0, 0))):
        text = OutputText(tokenizer, journal.parsed.request.stop_strings)
        for token_id in journal.output_ids[:begin]:
            text.feed(token_id)
        ids = journal.output_ids[begin : len(journal.output_ids) - is_end]
        if "".join([text.feed(token_id).text for token_id in ids]) + text.finish().text == answer:
            return True
    return False


def is_text_of(journal: Journal, text: str, held_back: int, tokenizer: Tokenizer) -> bool:
    """Return whether the client's text is that of the ids, up to what an engine or this machine may
    hold back; if not, a parser has taken a part of it, or added one. A client that has no text yet
    may lack all of it: text or a special token then begins something which a parser takes.
    """
    assert journal.parts is not None
    sent = journal.parts.text(TEXT)
    is_near = abs(len(sent) - len(text)) <= held_back
    if not is_near or not (text.startswith(sent) or sent.startswith(text)):
        return False
    if sent or not journal.output_ids:
        return True
    if text:
        return False
    added = tokenizer.get_added_tokens_decoder()
    return not any(token in added and added[token].special for token in journal.output_ids)


class EngineText:
    """A continuation without a tokenizer: the engine's own text follows the text that the client
    has. Inexact: text that the former engine held back is lost, and a stop string across the cut is
    not seen.
    """

    ended = False

    def __init__(self, journal: Journal) -> None:
        if journal.parts is not None and journal.parts.is_parsed:
            raise DifferentOutputError("without a tokenizer the answer's ids are not known")
        name = "messages" if isinstance(journal.parsed.request, ChatRequest) else "prompt"
        journal.exactness.mark(name)
        self.sent = _UNKNOWN_SENT if journal.text_sent is None else journal.text_sent
        self._stops = StopStrings(journal.parsed.request.stop_strings)
        self._characters = self.sent

    def take(
        self,
        token_ids: Sequence[int],
        finish_reason: str | None,
        stop_reason: str | int | None,
        text: str = "",
    ) -> Piece:
        """Pass `text` on, up to a stop string. (The engine gets no stop strings, because it would
        look for them only from the cut on.)
        """
        offsets = [self._characters] * len(token_ids)
        self._characters += len(text)
        delta = self._stops.feed(text)
        if delta.stopped is not None:
            return Piece(list(token_ids), delta, "stop", delta.stopped, offsets)
        if finish_reason is not None:
            delta = delta.then(TextDelta(self._stops.finish("")))
        return Piece(list(token_ids), delta, finish_reason, stop_reason, offsets)

    def end(self) -> Piece:
        """Return the end of a stream that has all its ids: no text, and the reason of the end."""
        return Piece([], TextDelta(self._stops.finish("")), "length")
