"""Text made by the proxy, where a plain engine takes over: it cannot know how the text before went on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from kvrs.protocol.openai import ChatRequest
from kvrs.proxy.journal import Journal
from kvrs.text.chat import ChatOutput
from kvrs.text.output import OutputText, TextDelta

# More than an engine's detokeniser and ours can differ by, beside what either holds back for a stop string.
_MOST_CHARACTERS_HELD = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """What some output ids add to the stream. `token_ids` are those up to its end, if it ends."""

    token_ids: list[int]
    delta: TextDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    offsets: Sequence[int] = ()  # Of each id: how many characters of the whole output are before it.


class Continuation:
    """The text machine of one stream, standing where the client's text stands.

    A plain engine may hold back more or less than our machine at the same id. So characters are counted: what the client has
    already is skipped, what it still lacks of the ids before the cut comes first.
    """

    def __init__(self, journal: Journal, tokenizer: Tokenizer) -> None:
        self._text = _machine(journal, tokenizer)
        replayed = self._feed(journal.output_ids, is_end=False)
        written = len(replayed.delta.text)
        held_back = max(map(len, journal.asked.request.stop_strings), default=0) + _MOST_CHARACTERS_HELD
        sent = written if journal.text_sent is None else journal.text_sent
        # Where an engine has shown what is no text of these ids (vLLM the prompt's, if that ends within a character), nothing is
        # skipped: better a piece that is strange than one that is missing.
        self.sent = sent if sent <= written + held_back else written  # Characters, before the cut.
        self._lacks = replayed.delta.text[self.sent :]
        self._skips = max(0, self.sent - written)
        # The engine that died had found the end, and could not say so any more.
        self.ended = replayed.finish_reason is not None
        self._ended_by = replayed.stop_reason

    def take(self, token_ids: Sequence[int], finish_reason: str | None, stop_reason: str | int | None) -> Piece:
        """Continue with an engine's next ids, and what it says of their end."""
        piece = self._feed(token_ids, is_end=finish_reason == "stop")
        if piece.finish_reason is None and finish_reason is not None:
            # The token that ends a stream has no text, and belongs to the output all the same.
            delta = piece.delta.then(self._text.finish())
            piece = replace(piece, delta=delta, finish_reason=self._reason(finish_reason), stop_reason=stop_reason)
        return replace(piece, delta=self._unsent(piece.delta))

    def end(self) -> Piece:
        """The end of a stream that has all its ids: what was held back, and why it ends."""
        if self.ended:
            return Piece([], self._unsent(TextDelta("")), self._reason("stop"), self._ended_by)
        return Piece([], self._unsent(self._text.finish()), "length")

    def _feed(self, token_ids: Sequence[int], *, is_end: bool) -> Piece:
        delta, offsets = TextDelta(""), list[int]()
        for count, token_id in enumerate(token_ids, 1):
            offsets.append(self._text.characters)
            if is_end and count == len(token_ids):
                break
            delta = delta.then(self._text.feed(token_id))
            if delta.stopped is not None:
                return Piece(list(token_ids[:count]), delta, self._reason("stop"), delta.stopped, offsets)
        return Piece(list(token_ids), delta, offsets=offsets)

    def _reason(self, finish_reason: str) -> str:
        called = isinstance(self._text, ChatOutput) and self._text.called
        return "tool_calls" if called and finish_reason == "stop" else finish_reason

    def _unsent(self, delta: TextDelta) -> TextDelta:
        text, self._lacks = self._lacks + delta.text, ""
        skipped = min(self._skips, len(text))
        self._skips -= skipped
        return replace(delta, text=text[skipped:])


def _machine(journal: Journal, tokenizer: Tokenizer) -> OutputText | ChatOutput:
    request = journal.asked.request
    # A plain engine's chat is taken for plain text; one of ours has used this very machine.
    if not isinstance(request, ChatRequest) or journal.text_sent is not None:
        return OutputText(tokenizer, request.stop_strings)
    return ChatOutput(
        tokenizer,
        request.stop_strings,
        stream=journal.stream,
        prompt_ids=journal.prompt_ids or [],
        tools=request.may_call_tools,
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )
