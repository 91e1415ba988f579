"""The handmade tokenizer of the recordings: single bytes, the pieces of all scripts, and the
markers of all formats, each of which is one token.
"""

import functools
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from kvrs_testkit.engine_streams.scripts import MARKERS, SCRIPTS, SPECIAL_MARKERS

END = "<|im_end|>"
# Text of a token that no script has.
OTHER_TEXT = " otherwise"
# Words with the space before them, and up to three characters of punctuation, which often hold
# the end of one JSON value and the start of the next one, as those of real vocabularies do.
# Characters that are not ASCII are spelled in bytes.
_PIECE = r" ?[A-Za-z]{1,12}| ?[!-/:-@\[-`{-~]{1,3}|[0-9]|\s|[^\x00-\x7f]"


@functools.cache
def tokenizer(*, shows_special: bool = False) -> Tokenizer:
    """Build the tokenizer, which is the same in every environment; with `shows_special` no token
    is a special one, as for requests that want the text of these too.
    """
    symbols = _byte_symbols()
    pieces = {bytes([value]): None for value in range(256)}
    for piece in sorted(_pieces()):
        pieces.setdefault(piece.encode(), None)
    vocab = {"".join(symbols[value] for value in piece): n for n, piece in enumerate(pieces)}
    built = Tokenizer(BPE(vocab=vocab, merges=[], ignore_merges=True))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = ByteLevel()
    built.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    special = [
        AddedToken(marker, special=not shows_special, normalized=False)
        for marker in (*SPECIAL_MARKERS, END)
    ]
    if shows_special:
        built.add_tokens(special)
    else:
        built.add_special_tokens(special)
    return built


def save_tokenizer(directory: Path) -> None:
    """Make it a model directory of the recordings, as far as a proxy reads it."""
    tokenizer().save(str(directory / "tokenizer.json"))


def other_id() -> int:
    """The id that stands for a near-tie which has gone the other way."""
    found = tokenizer().encode(OTHER_TEXT, add_special_tokens=False).ids
    assert len(found) == 1
    return int(found[0])


@functools.cache
def end_id() -> int:
    """The id that ends every output."""
    found = tokenizer().token_to_id(END)
    assert found is not None
    return found


# Pieces that vLLM's `olmo3` looks for in the vocabulary.
_LOOKED_FOR = {" </", "</"}


def _pieces() -> set[str]:
    markers = "|".join(re.escape(each) for each in (*MARKERS, *SPECIAL_MARKERS))
    texts = [text for script in SCRIPTS for text in (script.text, script.prompt)]
    found = {
        piece
        for text in texts
        for part in re.split(markers, text)
        for piece in re.findall(_PIECE, part)
    }
    return {piece for piece in found if piece.isascii()} | _LOOKED_FOR | {OTHER_TEXT}


def _byte_symbols() -> list[str]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the others from code
    point 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]
