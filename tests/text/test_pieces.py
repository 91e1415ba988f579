"""The text of single tokens, for log probabilities."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvrs.text.output import TokenPieces
from kvrs_testkit.examples import examples


@examples(50)
@given(text=st.text(max_size=30))
def test_the_bytes_of_all_tokens_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    """Also where a character is spread over tokens: then none of them has its text, but each has
    its bytes.
    """
    pieces = TokenPieces(tokenizer)

    token_ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert b"".join(pieces.raw(token_id) for token_id in token_ids) == text.encode()


def test_part_of_a_character_shows_as_a_replacement(tokenizer: Tokenizer) -> None:
    """And special tokens show as they are written."""
    pieces = TokenPieces(tokenizer)
    first = tokenizer.token_to_id("ð")  # The byte 0xf0.
    assert first is not None

    assert (pieces.text(first), pieces.raw(first)) == ("\ufffd", b"\xf0")
    assert pieces.text(0) == "<|begin|>"
    assert pieces.text(1 << 30) == ""


def test_spaces_and_bytes_of_sentencepiece_style_tokens() -> None:
    """Such a decoder drops the space of a token that stands alone."""
    vocab = {"▁the": 0, "s": 1, "<0xE2>": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pieces = TokenPieces(tokenizer)

    assert [pieces.text(token_id) for token_id in range(3)] == [" the", "s", "\ufffd"]
    assert pieces.raw(2) == b"\xe2"
