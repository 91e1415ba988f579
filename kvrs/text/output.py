"""`OutputText` turns output ids into the text that a client sees, one token at a time.

The text depends on the ids alone: another engine that feeds a stream's history and drops the text
continues exactly where the first engine stopped, even within a character or a possible stop string.

Text and bytes of single tokens, for log probabilities.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvrs.errors import ConfigError

# Character that a decoder gives for bytes that are not, or not yet, a character.
_REPLACEMENT = "\ufffd"
# Tokens held back for an incomplete character. From this number on the older part is emitted.
_WINDOW_TOKENS = 32
_CHARACTER_BYTES = 4


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that the client gets for some output ids."""

    text: str
    # The stop string that ended the output, which is not part of `text`; None: none was found.
    stopped: str | None = None

    def then(self, later: "TextDelta") -> "TextDelta":
        """Return this delta and the later one as one delta."""
        return TextDelta(self.text + later.text, later.stopped or self.stopped)


class OutputText:
    """Turns the output ids of a stream into text, which ends at the first stop string. Special
    tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = ()) -> None:
        self._characters = _Characters(tokenizer)
        self._stops = StopStrings(stop_strings)

    @property
    def characters(self) -> int:
        """Number of characters completed by the ids fed so far, including characters held back for
        a stop string.
        """
        return self._characters.emitted

    def feed(self, token_id: int) -> TextDelta:
        """Return the text that one more output id adds. Not to be called after a stop string was
        found.
        """
        return self._stops.feed(self._characters.feed(token_id))

    def finish(self) -> TextDelta:
        """Return the text that was held back, at the end of the output; after a stop string,
        nothing.
        """
        return TextDelta(self._stops.finish(self._characters.finish()))


def load_tokenizer(model_directory: Path) -> Tokenizer:
    """Read `tokenizer.json`.

    Raises:
        ConfigError: the file is missing or broken.
    """
    path = model_directory / "tokenizer.json"
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except Exception as error:  # All errors, since the library raises no more specific class.
        raise ConfigError(f"{path}: not a tokenizer: {error}") from None


class _Characters:
    """Joins tokens, which may end within a character, to whole characters.

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
        self.emitted = 0  # Number of characters that were emitted.

    def feed(self, token_id: int) -> str:
        delta = self._feed(token_id)
        self.emitted += len(delta)
        return delta

    def _feed(self, token_id: int) -> str:
        # Special and unknown tokens have no text, and would only make the window grow.
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
        """Emit the older part of a window that has grown too long: it holds bytes that never become
        a character.

        A cut is correct if both sides decode to the same text as the whole; with enough bytes
        behind a cut, no character can span it.
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
    """Cuts a text at the first complete stop string, however the text is divided into pieces."""

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
        """Return the stop string that ends first in `text`; of several with the same end the
        longest, which began first. None: the text has no stop string.
        """
        found = [
            (start + len(stop), -len(stop), stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        return min(found)[2] if found else None


def possible_beginning(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` with which a marker may begin; 0: none."""
    longest = max(map(len, markers), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


class TokenPieces:
    """The tokens of a vocabulary. A token that ends within a character has bytes and no text of its
    own.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()
        }
        # Searched as serialised, the only form in which the library shows the parts of a decoder.
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b""
        self._bytes_of_symbol = _byte_symbols() if b'"ByteLevel"' in decoder else {}
        self._known: dict[int, bytes] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text; bytes that are no whole character become replacement
        characters.
        """
        return self.raw(token_id).decode(errors="replace")

    def raw(self, token_id: int) -> bytes:
        if (piece := self._known.get(token_id)) is None:
            piece = self._known[token_id] = self._look_up(token_id)
        return piece

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        symbols = self._tokenizer.id_to_token(token_id)
        if symbols is None:
            return b""
        if self._bytes_of_symbol and all(symbol in self._bytes_of_symbol for symbol in symbols):
            return bytes(self._bytes_of_symbol[symbol] for symbol in symbols)
        if (fallback := _BYTE_FALLBACK.fullmatch(symbols)) is not None:
            return bytes.fromhex(fallback[1])
        # A decoder may drop the space before the first token, so the token is decoded twice in a
        # row.
        alone = self._tokenizer.decode([token_id])
        return self._tokenizer.decode([token_id, token_id])[len(alone) :].encode()


def _byte_symbols() -> dict[str, int]:
    """Return the byte of each character in the vocabularies of byte-level tokenizers: printable
    Latin-1 stands for itself, and other bytes are characters from code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + index): value for index, value in enumerate(others)
    }
