"""Text comes out whole, once, and the same however it is resumed."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from kvrs.errors import ConfigError
from kvrs.text.output import OutputText, load_tokenizer
from kvrs_testkit.examples import examples


def deltas(
    tokenizer: Tokenizer, token_ids: list[int], stops: list[str] | None = None
) -> tuple[list[str], str | None]:
    """Every piece of text in order, and the stop string if one was hit (then there is no last
    piece).
    """
    output = OutputText(tokenizer, stops or [])
    pieces: list[str] = []
    for token in token_ids:
        delta = output.feed(token)
        pieces.append(delta.text)
        if delta.stopped is not None:
            return pieces, delta.stopped
    return [*pieces, output.finish().text], None


def byte_symbols() -> dict[int, str]:
    """How byte-level vocabularies write each byte: printable Latin-1 as itself, the others from
    code point 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {value: chr(value) for value in printable} | {
        value: chr(256 + index) for index, value in enumerate(others)
    }


def byte_token(tokenizer: Tokenizer, value: int) -> int:
    token = tokenizer.token_to_id(byte_symbols()[value])
    assert token is not None
    return token


def tokens_of(pieces: list[bytes]) -> tuple[Tokenizer, list[int]]:
    """A byte-level tokenizer whose tokens are just these, and their ids."""
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    symbols = byte_symbols()
    names = {"".join(symbols[value] for value in piece): index for piece, index in vocab.items()}
    tokenizer = Tokenizer(models.WordLevel(vocab=names, unk_token="?"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [vocab[piece] for piece in pieces]


@examples(200)
@given(token_ids=st.lists(st.integers(0, 530), max_size=120))
def test_deltas_joined_are_the_text_of_all_ids(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """Nothing is lost or emitted twice, even when the ids are noise, special or unknown."""
    pieces, _ = deltas(tokenizer, token_ids)

    assert "".join(pieces) == tokenizer.decode(token_ids)


@examples(50)
@given(text=st.text(max_size=60), cut=st.integers(0, 60))
def test_no_piece_holds_a_split_character(tokenizer: Tokenizer, text: str, cut: int) -> None:
    """Characters of several bytes are held back until they are whole."""
    token_ids = [byte_token(tokenizer, value) for value in text.encode()]

    pieces, _ = deltas(tokenizer, token_ids)

    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    """Bytes that are held back are released, so that the text equals the ids."""
    token_ids = [byte_token(tokenizer, value) for value in "a🙂".encode()[:-1]]

    pieces, _ = deltas(tokenizer, token_ids)

    assert pieces == ["a", "", "", "", "\ufffd"]


def test_endless_broken_bytes_do_not_make_the_window_grow(tokenizer: Tokenizer) -> None:
    """The cost per token is bounded: a model that produces garbage must not slow its instance
    down.
    """
    choose = random.Random(0)
    token_ids = [
        byte_token(tokenizer, choose.choice([0x80, 0xBF, 0xE4, 0xF0, 0xC3])) for _ in range(2000)
    ]
    output = OutputText(tokenizer)
    pieces: list[str] = []
    widest = 0

    for token in token_ids:
        pieces.append(output.feed(token).text)
        widest = max(widest, len(output._characters._window))

    assert widest <= 80
    assert "".join(pieces) + output.finish().text == tokenizer.decode(token_ids)


BROKEN_PIECES = [
    b"\xff",
    b"\xa0",
    b"\xe4",
    b"\xbd",
    b"\xe4\xbd",
    b"\xa0\xe4",
    b"\xbd\xa0\xff",
    b"\xa0\xf0\x9f",
    b"a\xe4",
]


@examples(100)
@given(pieces=st.lists(st.sampled_from(BROKEN_PIECES), min_size=30, max_size=150))
def test_tokens_that_straddle_characters_are_cut_nowhere_wrong(pieces: list[bytes]) -> None:
    """A long run of broken bytes is released early only where no character spans the cut."""
    tokenizer, token_ids = tokens_of(pieces)

    sent, _ = deltas(tokenizer, token_ids)

    assert "".join(sent) == tokenizer.decode(token_ids)


@examples(100)
@given(
    token_ids=st.lists(st.integers(2, 511), max_size=60),
    seam=st.integers(0, 60),
    stops=st.lists(st.text("kalomi 日", min_size=1, max_size=4), max_size=3),
)
def test_replaying_a_history_continues_exactly(
    tokenizer: Tokenizer, token_ids: list[int], seam: int, stops: list[str]
) -> None:
    """An engine that takes over feeds the ids sent so far, drops the text, and goes on."""
    whole, stopped = deltas(tokenizer, token_ids, stops)
    replayed = OutputText(tokenizer, stops)
    fed = min(seam, len(whole) - 1)

    for token in token_ids[:fed]:
        replayed.feed(token)
    rest: list[str] = []
    for token in token_ids[fed : len(whole) if stopped else None]:
        rest.append(replayed.feed(token).text)
    rest.append(replayed.finish().text)

    assert "".join(rest) == "".join(whole[fed:])


@examples(200)
@given(
    pieces=st.lists(st.text("ab日", min_size=1, max_size=3), max_size=12),
    stops=st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_where_the_first_stop_string_completes(
    pieces: list[str], stops: list[str]
) -> None:
    """Stop strings count in the text: how it is cut into tokens makes no difference, and not a
    character too much is sent.
    """
    text = "".join(pieces)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]

    sent, stopped = deltas(*tokens_of([piece.encode() for piece in pieces]), stops)

    if not ends:
        assert (stopped, "".join(sent)) == (None, text)
    else:
        assert stopped == max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert "".join(sent) == text[: ends[0] - len(stopped)]


def test_a_possible_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    """Text that was sent cannot be taken back."""
    token_ids = [byte_token(tokenizer, value) for value in b"ab<en<end>"]

    pieces, stopped = deltas(tokenizer, token_ids, ["<end>"])

    assert pieces == ["a", "b", "", "", "", "<en", "", "", "", ""]
    assert stopped == "<end>"


def test_spaces_of_sentencepiece_style_tokens_survive() -> None:
    """Such a decoder drops the space of the first token it sees; only the very first of a text may
    lose it.
    """
    vocab = {
        "▁the": 0,
        "▁cat": 1,
        "s": 2,
        "▁": 3,
        "<0xE2>": 4,
        "<0x82>": 5,
        "<0xAC>": 6,
        "<unk>": 7,
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    token_ids = [0, 1, 2, 1, 3, 3, 4, 5, 6, 0]

    pieces, _ = deltas(tokenizer, token_ids)

    assert "".join(pieces) == tokenizer.decode(token_ids) == "the cats cat  € the"
    assert pieces[0] == "the"
    assert pieces[1] == " cat"


def test_a_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    """The user sees which file is wrong."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)
