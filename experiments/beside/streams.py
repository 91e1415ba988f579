"""One stream of a chat or completion as a client reads it, and its comparison with the tokens that
it should have.

Text is compared, since proxies drop the ids of tokens; each scripted token has a text of its own,
which can be read back out of the stream.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import StrEnum
from typing import Any, NamedTuple

import aiohttp

from kvrs_testkit.scripted_model import RANDOM_TOKENS, expected_ids, ids_of, text_of

SILENCE_S = 20.0  # A client that waits longer gives up.
UNREADABLE = -1  # In place of a token: text that no token has.
_TOKENS = {text_of(number): number for number in range(RANDOM_TOKENS)}
_STARTS = sorted({re.sub(r"\d+$", "", text) for text in _TOKENS}, key=len, reverse=True)
_TOKEN = re.compile(rf"(?:{'|'.join(map(re.escape, _STARTS))})\d+|.", re.DOTALL)


class End(StrEnum):
    """The end of a stream as its client learns it."""

    COMPLETE = "complete"
    STATUS = "an error as its status"
    ERROR_EVENT = "an error event"
    BROKEN = "a broken connection"
    SILENCE = "silence"
    NO_DONE = "an end without [DONE]"
    NO_FINISH = "[DONE] without a finish"
    MALFORMED = "a malformed event, then an end as if whole"
    WRONG = "an end as if whole, with other tokens"

    @property
    def is_told(self) -> bool:
        """True if a client sees that its stream is not whole."""
        return self in (End.STATUS, End.ERROR_EVENT, End.BROKEN, End.SILENCE)


@dataclass(slots=True)
class Stream:
    """The part of one stream that its client has received."""

    wanted: Sequence[int]
    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    is_done: bool = False
    is_broken: bool = False
    is_silent: bool = False
    malformed: int = 0
    error: str | None = None
    events: int = 0
    over: bool = False
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [_TOKENS.get(part, UNREADABLE) for part in _TOKEN.findall(self.text)]

    @property
    def end(self) -> End:
        if self.status != 200:
            return End.BROKEN if self.status == 0 else End.STATUS
        if self.error is not None:
            return End.ERROR_EVENT
        if self.is_silent:
            return End.SILENCE
        if self.is_broken:
            return End.BROKEN
        if not self.is_done:
            return End.NO_DONE
        if self.finish_reason is None:
            return End.NO_FINISH
        if self.malformed:
            return End.MALFORMED
        return End.COMPLETE if self.ids == list(self.wanted) else End.WRONG

    def take(self, line: bytes) -> None:
        """Take one line of the answer."""
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.malformed += 1
            return
        if event.get("error") is not None:
            self.error = str(event["error"])[:200]
            return
        for choice in event.get("choices", []):
            added = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if added:
                self.text += added
                self.events += 1
                self.token_times_s.append(asyncio.get_running_loop().time())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def prompt_of(number: int) -> str:
    return f"stream {number:03d}"


def wanted_of(number: int, tokens: int) -> list[int]:
    return expected_ids(prompt_ids_of(number), tokens)


def prompt_ids_of(number: int) -> list[int]:
    """The prompt as the scripted servers render the chat."""
    return ids_of(f"user: {prompt_of(number)}\n")


async def read(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    stream: Stream,
    headers: dict[str, str] | None = None,
    silence_s: float = SILENCE_S,
) -> None:
    """Read a stream to its end, whatever that is. A comment is no news of it."""
    timeout, loop = aiohttp.ClientTimeout(total=None), asyncio.get_running_loop()
    try:
        async with (
            asyncio.timeout(silence_s) as patience,
            session.post(url, json=body, timeout=timeout, headers=headers) as answer,
        ):
            stream.status = answer.status
            if answer.status != 200:
                stream.error = (await answer.text())[:200]
                return
            while line := await answer.content.readline():
                if line.startswith(b"data:"):
                    patience.reschedule(loop.time() + silence_s)
                stream.take(line.rstrip(b"\r\n"))
                if stream.is_done:
                    return
    except TimeoutError:
        stream.is_silent = True
        # Its status is that of an answer that has begun, or it never came.
        stream.status = stream.status or 200
    except (aiohttp.ClientError, OSError):
        stream.is_broken = True
    finally:
        stream.over = True


class Difference(NamedTuple):
    lost: int
    repeated: int
    different: int


def difference(got: Sequence[int], wanted: Sequence[int]) -> Difference:
    """Return how many tokens are lost, come twice, and are others than they should be."""
    lost = repeated = different = 0
    known = set(wanted)
    for tag, first, last, begin, end in SequenceMatcher(
        None, wanted, got, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        replaced = min(last - first, end - begin)
        different += replaced
        lost += last - first - replaced
        for token in got[begin + replaced : end]:
            repeated += token in known
            different += token not in known
    return Difference(lost, repeated, different)


def figures_of(streams: Sequence[Stream]) -> dict[str, Any]:
    """Return the counts of one run."""
    ends = [stream.end for stream in streams]
    found = [difference(stream.ids, stream.wanted) for stream in streams]
    untold = [each for each, end in zip(found, ends, strict=True) if not end.is_told]
    return {
        "streams": len(streams),
        "complete": ends.count(End.COMPLETE),
        "tokens_lost": sum(each.lost for each in found),
        "tokens_lost_untold": sum(each.lost for each in untold),
        "tokens_repeated": sum(each.repeated for each in found),
        "tokens_different": sum(each.different for each in found),
        "ends": dict(Counter(str(end) for end in ends)),
        "errors": dict(
            Counter(
                f"{stream.status}: {stream.error}" for stream in streams if stream.error
            ).most_common(3)
        ),
        "malformed_events": sum(stream.malformed for stream in streams),
    }
