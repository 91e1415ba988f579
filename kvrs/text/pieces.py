"""Text and bytes of single tokens, for log probabilities."""

import re

from tokenizers import Tokenizer

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
