"""The computation of scripted instances: tokens, and their text by the machines of the product.

A token is a function of the whole history before it, so that a wrong continuation differs from its
first token on, and a lost or repeated token cannot hide. Most prompts give random text; those of a
play (below) give that play, word by word.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from kvrs.protocol.openai.chunks import (
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    Logprobs,
    TokenLogprob,
)
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs.text.output import OutputText, TextDelta
from kvrs_testkit.plays import SCENARIOS

RANDOM_TOKENS = 500
_TEXTS = ("a", " b", "é", '"', ',"token_ids":[7],', "\n", " data: x\n\n", "]}", "\\", "[DONE]")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def text_of(token_id: int) -> str:
    return _TEXTS[token_id % len(_TEXTS)] + str(token_id)


def _digest(*parts: object) -> int:
    return int.from_bytes(blake2b(msgspec.json.encode(parts), digest_size=8).digest(), "big")


def token_after(history: Sequence[int], seed: int | None = None) -> int:
    """The next token; with a seed it is drawn from single bytes too, whose text is mostly broken
    UTF-8.
    """
    if (played := _next_of_play(history)) is not None:
        return played
    if seed is None:
        return _digest(history) % RANDOM_TOKENS
    drawn = _digest(history, seed)
    return RANDOM_TOKENS + drawn % 256 if drawn % 3 else drawn % RANDOM_TOKENS


class Sampler(StrEnum):
    """The values on which the draws of a seeded request depend."""

    KEYED = "keyed"  # Seed and position, as in vLLM's second model runner: a cut changes nothing.
    GENERATOR = "generator"  # Seed and draws of this request, as in its first one and on the CPU.
    NOISE = "noise"  # Neither: not even the likeliest token is always the same.


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How an engine computes: two of different ones, say of different TP, differ in some tokens."""

    name: int = 0
    sampler: Sampler = Sampler.KEYED

    def next_token(self, history: Sequence[int], begun_with: int, seed: int | None) -> int:
        """The token after `history`, for a request that began with `begun_with` of these."""
        if self.sampler is Sampler.NOISE:
            return random.SystemRandom().randrange(RANDOM_TOKENS)
        if self.sampler is Sampler.GENERATOR and seed is not None:
            return _digest(history[:1], seed, len(history) - begun_with) % RANDOM_TOKENS
        token = token_after(history, seed)
        return (token + self.name) % RANDOM_TOKENS if self.name else token


def expected_ids(prompt: list[int], count: int) -> list[int]:
    """The tokens of an undisturbed stream."""
    history = list(prompt)
    for _ in range(count):
        history.append(token_after(history))
    return history[len(prompt) :]


def ids_of(prompt: str | list[int]) -> list[int]:
    """The scripted tokenizer: a byte is a token."""
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


class _Message(msgspec.Struct):
    role: str
    content: str


def rendered(parsed: ChatRequest) -> list[int]:
    """The scripted chat template."""
    messages = msgspec.json.decode(parsed.messages, type=list[_Message])
    return ids_of("".join(f"{message.role}: {message.content}\n" for message in messages))


# Plays.


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokenizer: Tokenizer
    pieces: dict[bytes, int]
    markers: dict[str, int]
    end_id: int

    def spell(self, name: str, text: str) -> list[int]:
        """The text in pieces of one to four bytes, wherever characters begin and end; markers are
        tokens if the name says so.
        """
        ids: list[int] = []
        for part in _parts(text) if name.endswith("/tokens") else [text]:
            if part in self.markers:
                ids.append(self.markers[part])
            else:
                ids += [self.pieces[piece] for piece in _pieces(name, part)]
        return [*ids, self.end_id]


def _parts(text: str) -> list[str]:
    for marker in _MARKERS:
        text = text.replace(marker, f"\0{marker}\0")
    return [part for part in text.split("\0") if part]


def _pieces(name: str, text: str) -> Iterator[bytes]:
    sizes, rest = random.Random(name), text.encode()
    while rest:
        size = sizes.choice((1, 1, 2, 3, 4))
        yield rest[:size]
        rest = rest[size:]


@functools.cache
def vocabulary() -> _Vocabulary:
    """500 random words, 256 bytes, the pieces of the plays, the markers, and the end."""
    symbols = _byte_symbols()
    texts = [text_of(token_id).encode() for token_id in range(RANDOM_TOKENS)] + [
        bytes([value]) for value in range(256)
    ]
    pieces = {text: token_id for token_id, text in enumerate(texts)}
    for name, text in SCENARIOS.items():
        for part in (text, *_parts(text)):
            for piece in _pieces(name, part):
                pieces.setdefault(piece, len(pieces))
    vocab = {
        "".join(symbols[value] for value in piece): token_id for piece, token_id in pieces.items()
    }
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = ByteLevel()
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in _MARKERS])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    added = {
        token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    return _Vocabulary(
        tokenizer, pieces, {marker: added[marker] for marker in _MARKERS}, added["<|end|>"]
    )


def _byte_symbols() -> list[str]:
    """How byte-level vocabularies write bytes: printable Latin-1 as itself, the others from code
    point 256 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def save_tokenizer(directory: Path) -> None:
    """Make it a model directory, as far as a proxy reads it."""
    vocabulary().tokenizer.save(str(directory / "tokenizer.json"))


_OPENINGS = (ids_of("play "), ids_of("user: play "))  # As text and as a chat.


@functools.cache
def _plays() -> list[tuple[list[int], list[int]]]:
    """Prompts that start a play, and its ids."""
    known = vocabulary()
    return [
        (opening + ids_of(name + end), known.spell(name, text))
        for name, text in SCENARIOS.items()
        for opening, end in zip(_OPENINGS, (".", ".\n"), strict=True)
    ]


def _next_of_play(history: Sequence[int]) -> int | None:
    if not any(history[: len(opening)] == opening for opening in _OPENINGS):
        return None
    for prompt, play in _plays():
        if history[: len(prompt)] != prompt:
            continue
        produced = list(history[len(prompt) :])
        if len(produced) < len(play) and play[: len(produced)] == produced:
            return play[len(produced)]
    return None


# Text.

_NOTHING = TextDelta("")


@dataclass(frozen=True, slots=True)
class Step:
    """The output of one token; `finish_reason` is set on the last one, whose held-back text is
    `rest`.
    """

    token_id: int
    delta: TextDelta
    logprobs: Logprobs | ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    rest: TextDelta = _NOTHING


class Writer:
    """Turns the output ids of one attempt into steps, as engines of ours do.

    A plain engine (not `exact`) takes the history for a prompt. `tokenizer` and `end_id` are those
    of another vocabulary than that of the plays.
    """

    def __init__(
        self,
        parsed: CompletionRequest | ChatRequest,
        exact: bool,
        tokenizer: Tokenizer | None = None,
        end_id: int | None = None,
    ) -> None:
        self._parsed = parsed
        end_id = vocabulary().end_id if end_id is None else end_id
        self._end_ids = {*parsed.stop_token_ids} | (set() if parsed.ignore_eos else {end_id})
        self._produced = 0
        self._is_exact = exact
        self._machine = OutputText(tokenizer or vocabulary().tokenizer, parsed.stop_strings)

    def write(self, token_id: int) -> Step:
        self._produced += 1
        logprobs = self._logprobs(token_id)
        if token_id in self._end_ids:
            named = token_id if token_id in self._parsed.stop_token_ids else None
            rest = self._machine.finish()
            return Step(token_id, TextDelta(""), logprobs, "stop", named, rest)
        delta = self._machine.feed(token_id)
        if delta.stopped is not None:
            return Step(token_id, delta, logprobs, "stop", delta.stopped)
        if self._parsed.max_tokens is not None and self._produced >= self._parsed.max_tokens:
            return Step(token_id, delta, logprobs, "length", None, self._machine.finish())
        return Step(token_id, delta, logprobs)

    def finish(self) -> TextDelta:
        return self._machine.finish()

    def _logprobs(self, token_id: int) -> Logprobs | ChatLogprobs | None:
        """Numbers that depend on the place in the stream, so that a wrong place shows."""
        if self._parsed.wanted_logprobs is None:
            return None
        text = f"t{token_id}"
        # A plain engine does not know its place in a stream that was begun elsewhere.
        logprob = -(_digest(token_id, self._produced if self._is_exact else 0) % 1000) / 100
        if isinstance(self._parsed, ChatRequest):
            return ChatLogprobs([TokenLogprob(text, logprob, list(text.encode()), [])])
        return Logprobs(
            [text], [logprob], [{text: logprob, "token_ids": -1.5}], [self._machine.characters]
        )


def choice_of(
    parsed: CompletionRequest | ChatRequest, steps: Sequence[Step], finished: bool
) -> Choice | ChatChunkChoice:
    """An event's choice; the finish is in it if it is `finished`."""
    last = steps[-1] if finished else None
    delta = functools.reduce(TextDelta.then, [step.delta for step in steps])
    if last is not None and last.finish_reason is not None:
        delta = delta.then(last.rest)
    choice = _bare_choice(parsed, delta)
    choice.token_ids = [step.token_id for step in steps]
    if parsed.wanted_logprobs is not None:
        _add_logprobs(choice, steps)
    if last is not None:
        choice.finish_reason, choice.stop_reason = last.finish_reason, last.stop_reason
    return choice


def finish_of(parsed: CompletionRequest | ChatRequest, last: Step) -> Choice | ChatChunkChoice:
    """The choice of a finish that comes in an event of its own, with the text held back until
    then.
    """
    choice = _bare_choice(parsed, last.rest)
    choice.finish_reason, choice.stop_reason, choice.token_ids = (
        last.finish_reason,
        last.stop_reason,
        [],
    )
    return choice


def _bare_choice(
    parsed: CompletionRequest | ChatRequest, delta: TextDelta
) -> Choice | ChatChunkChoice:
    if isinstance(parsed, CompletionRequest):
        return Choice(text=delta.text)
    return ChatChunkChoice(delta=ChatDelta(content=delta.text))


def _add_logprobs(choice: Choice | ChatChunkChoice, steps: Sequence[Step]) -> None:
    made = [step.logprobs for step in steps]
    if isinstance(choice, Choice):
        parts = [part for part in made if isinstance(part, Logprobs)]
        choice.logprobs = Logprobs(
            [token for part in parts for token in part.tokens],
            [logprob for part in parts for logprob in part.token_logprobs],
            [top for part in parts for top in part.top_logprobs],
            [offset for part in parts for offset in part.text_offset],
        )
    else:
        choice.logprobs = ChatLogprobs(
            [entry for part in made if isinstance(part, ChatLogprobs) for entry in part.content]
        )
