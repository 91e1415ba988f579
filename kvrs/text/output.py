"""`OutputText` turns output ids into the text that a client sees, one token at a time.

A deterministic function of the ids fed: another engine that is fed the history of a stream and
throws the text away continues it exactly where the first one stopped, in the middle of a character
or of a possible stop string too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError

_REPLACEMENT = "\ufffd"  # What a decoder shows for bytes that are no character, or not yet.
_WINDOW_TOKENS = 32  # Held-back tokens after which a place to cut is looked for.
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The addition of some output ids to the text that the client sees."""

    text: str
    stopped: str | None = None  # The stop string that ended the text, itself not in it.

    def then(self, later: "TextDelta") -> "TextDelta":
        """Both in one."""
        return TextDelta(self.text + later.text, later.stopped or self.stopped)


class OutputText:
    """Detokeniser and stop-string watch of one stream. Special tokens have no text."""

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._characters = _Characters(tokenizer)
        self._stops = StopStrings(stop_strings)

    @property
    def characters(self) -> int:
        """How many characters the ids fed so far have completed, those included that are held back
        for a stop string.
        """
        return self._characters.emitted

    def feed(self, token_id: int) -> TextDelta:
        """Take one output id; not to be called after a stop string was found."""
        return self._stops.feed(self._characters.feed(token_id))

    def finish(self) -> TextDelta:
        """Return the text that was held back; nothing after a stop string was found."""
        return TextDelta(self._stops.finish(self._characters.finish()))


def load_tokenizer(model_directory: Path) -> Tokenizer:
    """Read `tokenizer.json`.

    Raises:
        ConfigError: it is missing or broken.
    """
    path = model_directory / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except Exception as error:  # The library raises nothing more specific.
        raise ConfigError(f"{path}: not a tokenizer: {error}") from None


class _Characters:
    """Whole characters out of tokens that may end in the middle of one.

    `_window` holds the tokens since the last two cuts. Its first `_emitted` tokens have been
    emitted already; they stay because a decoder may treat the first token of a text differently (a
    leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._silent = {token for token, one in added.items() if one.special}
        self._window: list[int] = []
        self._emitted = 0
        self._emitted_text = ""
        self.emitted = 0  # Characters.

    def feed(self, token_id: int) -> str:
        delta = self._feed(token_id)
        self.emitted += len(delta)
        return delta

    def _feed(self, token_id: int) -> str:
        # Decoding skips special and unknown tokens; here they would only make the window grow.
        if token_id in self._silent or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):
            return self._cut_inside(text)
        if len(text) <= len(self._emitted_text):
            return ""
        delta = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return delta

    def finish(self) -> str:
        delta = self._decode(self._window)[len(self._emitted_text) :]
        self._window, self._emitted, self._emitted_text = [], 0, ""
        return delta

    def _cut_inside(self, text: str) -> str:
        """Keep the window short when broken bytes follow each other without end, by emitting its
        older part.

        A cut is right when its sides decode to the same as the whole: with enough bytes behind it
        no character can still span it.
        """
        if len(self._window) - self._emitted < _WINDOW_TOKENS:
            return ""
        for cut in range(len(self._window) - _CHARACTER_BYTES, self._emitted, -1):
            before = self._decode(self._window[:cut])
            if before + self._decode(self._window[cut:]) == text:
                delta = before[len(self._emitted_text) :]
                self._window, self._emitted, self._emitted_text = self._window[cut:], 0, ""
                return delta
        return ""

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids)


class StopStrings:
    """Cuts a text at the first stop string that completes in it, however the text arrives in
    pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings), "an empty stop string is refused on arrival"
        self._stops = list(stop_strings)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> TextDelta:
        assert not self._stopped, "a stopped stream takes no more tokens"
        text = self._held + text
        if (stop := self._first_complete(text)) is not None:
            self._stopped, self._held = True, ""
            return TextDelta(text[: text.index(stop)], stop)
        keep = possible_beginning(text, self._stops)
        self._held = text[len(text) - keep :]
        return TextDelta(text[: len(text) - keep], None)

    def finish(self, text: str) -> str:
        if self._stopped:
            return ""
        rest = self._held + text
        self._held = ""
        return rest

    def _first_complete(self, text: str) -> str | None:
        """The stop string whose end comes first; of those that end together the longest, since it
        began first.
        """
        found = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        return min(found)[2] if found else None


def possible_beginning(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that some marker starts with, without being all of it."""
    longest = max(map(len, markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
