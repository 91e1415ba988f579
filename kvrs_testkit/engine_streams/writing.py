"""Spells scripts in ids, and writes recordings to files: what both recorders share."""

import json
import os
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from kvrs_testkit.engine_streams import DIRECTORY, HEAD, shortened
from kvrs_testkit.engine_streams.scripts import Script
from kvrs_testkit.engine_streams.vocabulary import end_id, tokenizer

# Forms of the usual events: what stands in a file for these is only their delta.
FRAMES = {
    "vllm": [
        '{"choices":[{"index":0,"delta":DELTA,"logprobs":null,"finish_reason":null,"token_ids":IDS}]}'
    ],
    "sglang": [
        '{"choices":[{"index":0,"delta":DELTA,"logprobs":null,"finish_reason":null,"matched_stop":null}]}',
        '{"choices":[{"index":0,"delta":DELTA,"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}',
    ],
}
INTO = "KVRS_RECORD_INTO"  # Directory for recordings that are only to be compared.
# SGLang's package imports what only a GPU has, for which the stand-ins of its tests do.
_BEFORE = {"vllm": "", "sglang": "PYTHONPATH=tests/sglang/stand_ins "}
_ENVELOPE = re.compile(
    r'\{"id":"[^"]*","object":"chat\.completion\.chunk","created":\d+,"model":"tiny",'
)


@dataclass
class Heard:
    """The answers of an engine to one script."""

    version: str
    events: list[str] = field(default_factory=list)  # Their data, without `[DONE]`.
    covered: list[int] = field(default_factory=list)
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class Spelled:
    """A script in ids."""

    prompt_ids: list[int]
    ids: list[int]
    texts: list[str]  # By id, without special tokens.


def spelled(script: Script) -> Spelled:
    """Spell a script in ids of the handmade tokenizer, with the id that ends the output."""
    prompt_ids = tokenizer().encode(script.prompt, add_special_tokens=False).ids
    ids = [*tokenizer().encode(script.text, add_special_tokens=False).ids, end_id()]
    return Spelled(prompt_ids, ids, texts_of(ids, skip_special_tokens=True))


def texts_of(ids: Sequence[int], *, skip_special_tokens: bool) -> list[str]:
    """The text that each id adds to those before it."""
    stream = DecodeStream(skip_special_tokens=skip_special_tokens)
    return ["" if (text := stream.step(tokenizer(), each)) is None else text for each in ids]


def packs(ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """The ids in pieces of `size`, the last of which may be shorter."""
    for start in range(0, len(ids), size):
        yield list(ids[start : start + size])


def same_every_time(script: Script) -> None:
    """Make random ids of calls a function of the script."""
    drawn = random.Random(script.name)
    random.seed(script.name)
    uuid.uuid4 = lambda: uuid.UUID(int=drawn.getrandbits(128), version=4)


def as_file(script: Script, heard: Heard) -> str:
    """The text of the file: JSON with one event per line."""
    written = spelled(script)
    frames = FRAMES[script.engine]
    python = f"{_BEFORE[script.engine]}.venv-{script.engine}/bin/python"
    module = f"kvrs_testkit.engine_streams.record_{script.engine}"
    covered = [0, *heard.covered]
    events = [
        shortened(_behind_head(event), frames, written.ids[before:after])
        for event, before, after in zip(heard.events, covered, covered[1:], strict=False)
    ]
    fields: dict[str, str] = {
        "command": _json(f"{python} -m {module} {script.name}"),
        "engine": _json(script.engine),
        "version": _json(heard.version),
        "tool_parser": _json(script.tool_parser),
        "reasoning_parser": _json(script.reasoning_parser),
        "tool_choice": _json(script.tool_choice),
        "tokens_per_event": _json(script.tokens_per_event),
        "request": _json(script.request),
        "prompt_ids": _json(written.prompt_ids),
        "ids": _json(written.ids),
        "texts": _json(written.texts),
        "covered": _json(heard.covered),
        "whole": heard.whole or "null",
        "frames": _json(frames),
        "events": "[\n" + ",\n".join(events) + "\n]",
    }
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in fields.items()) + "\n}\n"


def save(script: Script, heard: Heard) -> None:
    """Write the recording of a script, where the environment says so not beside the kept ones."""
    directory = Path(os.environ.get(INTO, DIRECTORY))
    (directory / f"{script.name}.json").write_text(as_file(script, heard), encoding="utf-8")


def _behind_head(event: str) -> str:
    """The event without what is the same in all: `HEAD` says that."""
    assert HEAD.startswith("{")
    rest = _ENVELOPE.sub("{", event, count=1)
    assert rest != event, f"another envelope: {event}"
    return rest


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
