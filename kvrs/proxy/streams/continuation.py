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

# Most tokens of markup before an answer that is plain text: those around the thought. Formats with
# more of them (channels, roles) have some behind the answer too, which only a parser removes.
_MOST_MARKERS = 2

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
        self._tokenizer = tokenizer
        longest_stop = max(map(len, journal.parsed.request.stop_strings), default=0)
        held_back = longest_stop + _MOST_CHARACTERS_HELD
        if journal.parts is not None and journal.parts.is_parsed:
            replayed = self._behind_thought(journal, journal.parts.text(TEXT), held_back)
        else:
            self._text = OutputText(tokenizer, journal.parsed.request.stop_strings)
            replayed = self._feed(journal.output_ids, is_end=False)
            # A parser may add text (`<think>`) or remove some without making parts of its own.
            has, text = (
                "" if journal.parts is None else journal.parts.text(TEXT),
                replayed.delta.text,
            )
            if not has.startswith(text) and not text.startswith(has):
                raise DifferentOutputError("the ids have another text than the client")
        written = len(replayed.delta.text)
        sent = written if journal.text_sent is None else journal.text_sent
        if journal.parts is not None and self._hides(journal, written - sent, longest_stop):
            raise DifferentOutputError("the client has less text than the ids of the output")
        # Number of characters sent before the cut. If an engine has sent text that does not belong
        # to these ids (vLLM sends the prompt's last character, if the prompt ends within it),
        # nothing is skipped: wrong text is better than missing text.
        self.sent = sent if sent <= written + held_back else written
        self._lacks = replayed.delta.text[self.sent :]
        self._skips = max(0, self.sent - written)
        # The former engine has generated the end, and died before sending it.
        self.ended = replayed.finish_reason is not None
        self._ended_by = replayed.stop_reason

    def _behind_thought(self, journal: Journal, answer: str, held_back: int) -> Piece:
        """Position the text machine behind an answer that began within the event of known ids."""
        first, last = journal.answer_from or (0, 0)
        added = self._tokenizer.get_added_tokens_decoder()
        if sum(token in added for token in journal.output_ids[:first]) > _MOST_MARKERS:
            raise DifferentOutputError("the answer is one of several parts, whose ends are parsed")
        for begin in range(first, last):
            self._text = OutputText(self._tokenizer, journal.parsed.request.stop_strings)
            self._feed(journal.output_ids[:begin], is_end=False)
            found = self._feed(journal.output_ids[begin:], is_end=False)
            text = found.delta.text
            if text.startswith(answer) or (
                answer.startswith(text) and len(answer) - len(text) <= held_back
            ):
                return found
        raise DifferentOutputError("the ids of the answer have another text than the client")

    def _hides(self, journal: Journal, lacking: int, longest_stop: int) -> bool:
        """Return whether the engine's parser has taken a part of the text: the client lacks more
        than an engine holds back for a stop string, or has nothing of ids that begin with a special
        token.
        """
        if lacking > longest_stop:
            return True
        if journal.text_sent or not journal.output_ids:
            return False
        added = self._tokenizer.get_added_tokens_decoder()
        return any(token in added and added[token].special for token in journal.output_ids)

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
