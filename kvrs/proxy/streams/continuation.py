"""Text of a stream that goes on at a plain engine, which lacks the state of the text before the
cut: the proxy makes the text from the ids or, without a tokenizer, takes the engine's.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from tokenizers import Tokenizer

from kvrs.protocol.openai.requests import ChatRequest
from kvrs.proxy.wire.errors import DifferentOutputError
from kvrs.proxy.wire.journal import Journal
from kvrs.proxy.wire.message_parts import TEXT
from kvrs.text.output import OutputText, StopStrings, TextDelta

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
        if name not in journal.inexact:
            journal.inexact = (*journal.inexact, name)
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
