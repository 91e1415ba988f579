"""Answers of vLLM and SGLang to chats, recorded from their own code: `recordings` reads them.

The files in `recorded/` are made by `record_vllm` and `record_sglang`, each in the environment of
its engine; README.md has the commands.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvrs_testkit.engine_streams.reading import Answer

DIRECTORY = Path(__file__).with_name("recorded")
# The same in every file, so that one is like another but for what the engine says.
HEAD = (
    '{"id":"chatcmpl-recorded","object":"chat.completion.chunk",'
    '"created":1700000000,"model":"tiny",'
)


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a chat request, as an engine streams it."""

    command: str  # That makes the file, run in the root of the repository.
    engine: Literal["vllm", "sglang"]
    version: str
    tool_parser: str | None
    reasoning_parser: str | None
    tool_choice: Literal["auto", "required", "named", "none"]
    tokens_per_event: int
    request: dict[str, Any]  # The request but for its messages and its tools, `scripts.TOOLS`.
    prompt_ids: list[int]
    ids: list[int]  # Of the output; the last one ends it and has no text.
    texts: list[str]  # By id, as a completion by ids has them, without those of special tokens.
    covered: list[int]  # By event: how many ids had been generated when it was sent.
    whole: msgspec.Raw  # The choice of the answer to the same request without a stream.
    frames: list[str]
    events: list[msgspec.Raw]  # As written; `data` has them as they are sent.
    name: str = ""

    @property
    def data(self) -> list[str]:
        """The data of each event but `[DONE]`, exactly as the engine sends it."""
        covered = [0, *self.covered]
        return [
            HEAD + expanded(event, self.frames, self.ids[covered[n] : covered[n + 1]])[1:]
            for n, event in enumerate(self.events)
        ]

    @property
    def answer(self) -> Answer:
        """The answer that a client has at the end of the stream."""
        return Answer.of(self.data)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """The calls of the stream: names, and arguments as objects, or text that is no JSON."""
        return self.answer.parsed_calls()

    @property
    def content(self) -> str:
        """The content of the whole stream."""
        return self.answer.content

    @property
    def reasoning(self) -> str:
        """The reasoning of the whole stream."""
        return self.answer.reasoning

    @property
    def finish_reason(self) -> str | None:
        """How the stream ends."""
        return self.answer.finish_reason


def recordings(engine: Literal["vllm", "sglang"] | None = None) -> dict[str, Recording]:
    """Read the recordings of one engine, or of all, by name."""
    return {name: one for name, one in _all().items() if engine in (None, one.engine)}


def read(path: Path) -> Recording:
    """Read one file. Raises msgspec.ValidationError: it lacks a field, say its command."""
    read = msgspec.json.decode(path.read_bytes(), type=Recording)
    return msgspec.structs.replace(read, name=path.stem)


@functools.cache
def _all() -> dict[str, Recording]:
    return {path.stem: read(path) for path in sorted(DIRECTORY.glob("*.json"))}


def expanded(event: msgspec.Raw, frames: Sequence[str], ids: Sequence[int]) -> str:
    """Return the event as it is sent, whether it is written in full or as a pair."""
    text = bytes(event).decode()
    if not text.startswith("["):
        return text
    number, delta = msgspec.json.decode(event, type=tuple[int, msgspec.Raw])
    listed = msgspec.json.encode(ids).decode()
    return frames[number].replace("IDS", listed).replace("DELTA", bytes(delta).decode())


def shortened(event: str, frames: Sequence[str], ids: Sequence[int]) -> str:
    """Return the text that stands for the event in a file: the opposite of `expanded`."""
    choices = msgspec.json.decode(event, type=dict[str, msgspec.Raw])["choices"]
    for choice in msgspec.json.decode(choices, type=list[dict[str, msgspec.Raw]]):
        for number in range(len(frames)):
            short = f"[{number},{bytes(choice['delta']).decode()}]"
            if expanded(msgspec.Raw(short.encode()), frames, ids) == event:
                return short
    return event
