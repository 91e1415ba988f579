"""The oracle of cuts: every stream here, cut anywhere, must give its client the bytes of the
uninterrupted run.

A case is a request; a cut is a kind of break before one event of its stream. A test makes some.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvrs_testkit.scripted import Cut, Fault, Script
from kvrs_testkit.sse import events_of

KINDS = (Fault.RESET, Fault.EOF, Fault.ERROR, Fault.CUT, Fault.DONE_ONLY, Fault.HANG)

_HEAD = re.compile(rb'"id":"((?:chat)?cmpl-[0-9a-f]{32})",')
_CREATED = re.compile(rb'"created":\d+')
_INDEX = re.compile(rb'[{,]"index":(\d+),"(?:logprobs|delta)":')


@dataclass(frozen=True, slots=True)
class Case:
    """One request. With `choices` its events interleave, and are compared choice by choice."""

    name: str
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))


class CutOffError(AssertionError):
    """The response is not one that a complete request gives."""


def encoded(case: Case) -> bytes:
    return msgspec.json.encode(case.body)


async def ask(http: aiohttp.ClientSession, url: str, case: Case, **more: Any) -> list[bytes]:
    """The answer in comparable form: per choice the bytes that it got, then those of the whole
    response.

    Raises: CutOffError: a status that is not 200, several ids or times in one response, or not
        exactly one end.
    """
    async with http.post(url + case.path, json=case.body | more) as response:
        body = (await response.read()).replace(b": keep-alive\n", b"")  # Of a stream that waits.
    if response.status != 200:
        raise CutOffError(f"HTTP {response.status}: {body[:300].decode(errors='replace')}")
    return comparable(body, case)


def comparable(body: bytes, case: Case) -> list[bytes]:
    """Without what differs between any two requests: the id and the time. They are checked
    instead.
    """
    heads = set(_HEAD.findall(body))
    if len(heads) != 1 or len(set(_CREATED.findall(body))) != 1:
        raise CutOffError(
            f"ids {sorted(heads)}, times {sorted(set(_CREATED.findall(body)))} in one response"
        )
    (whole_id,) = heads
    body = _CREATED.sub(b'"created":0', body.replace(whole_id, b"ID"))
    if not case.body.get("stream"):
        return [body]
    *events, last, nothing = events_of(body)
    if (last, nothing) != (b"data: [DONE]", b"") or b"data: [DONE]" in events:
        raise CutOffError(f"ends with {body[-100:]!r}")
    if case.choices == 1:
        return [body]
    per_choice = [b""] * (case.choices + 1)
    for event in events:
        found = _INDEX.search(event)
        # What belongs to no choice comes after them all, and is compared as the last of these.
        per_choice[case.choices if found is None else int(found[1])] += event + b"\n\n"
    return per_choice


@dataclass(frozen=True, slots=True)
class Point:
    """Where and how a case is cut, and what it must give all the same."""

    case: Case
    cut: Cut
    expected: list[bytes]


async def points(http: aiohttp.ClientSession, url: str, script: Script, case: Case) -> list[Point]:
    """Every cut of a case, after an uninterrupted run."""
    expected = await ask(http, url, case, user="undisturbed")
    lengths = dict(script.lengths)
    script.lengths.clear()
    assert len(lengths) == case.choices, "an upstream stream per choice"
    return [
        Point(case, Cut(kind, event, seed if case.choices > 1 else None), expected)
        for seed, length in lengths.items()
        for event in range(length)
        for kind in KINDS
    ]


async def try_point(
    http: aiohttp.ClientSession, url: str, script: Script, point: Point, key: str
) -> str | None:
    """Make one cut; what was wrong with the answer, if anything."""
    script.cuts[key] = point.cut
    try:
        got = await ask(http, url, point.case, user=key)
    except CutOffError as error:
        return str(error)
    if key in script.cuts:
        return "was not cut"
    for mine, theirs in zip(got, point.expected, strict=True):
        if mine != theirs:
            return difference(mine, theirs)
    return None


def difference(got: bytes, expected: bytes) -> str:
    """Where two answers part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
        min(len(got), len(expected)),
    )
    return (
        f"differs at byte {at}: got {got[max(0, at - 80) : at + 80]!r}, expected "
        f"{expected[max(0, at - 80) : at + 80]!r}"
    )


_PLAIN: dict[str, dict[str, Any]] = {
    "": {},
    "usage": {"stream_options": {"include_usage": True}},
    "ids": {"return_token_ids": True},
    "short": {"max_tokens": 7, "stream_options": {"include_usage": True}},
    "sampled": {"temperature": 0.9, "seed": 5},
    "logprobs": {"logprobs": 1},
    "whole": {"stream": False, "return_token_ids": True, "logprobs": 1},
    "two": {"n": 2, "seed": 40, "stream_options": {"include_usage": True}},
}
_TEXTS = {
    "latin": ("", "ids", "logprobs"),
    "cjk": ("usage", "short", "whole"),
    "emoji": ("", "logprobs", "two"),
    "mixed": ("short", "ids"),
    "spaces": ("", "whole"),
    "wire": ("ids", "usage", "logprobs"),
    "empty": ("usage", "whole"),
}
_STOPS: dict[str, tuple[str, list[str]]] = {
    "found": ("stops", ["STOP"]),
    "late": ("stops", ["two STOOP three STOP fo", "STOP four"]),
    "never": ("stops", ["STOPPED", "fourteen"]),
    "first": ("stops", ["one"]),
    "overlap": ("near", ["abcabcabe", "abcabd"]),
    "emoji": ("emojistop", ["👩‍👩‍👧"]),
    "wire": ("wire", ["data: [DONE]\n\nx", '\\"']),
}
_CHATS = {
    "latin": ("", "logprobs", "two"),
    "thought": ("", "usage"),
    "thought/tokens": ("", "ids", "whole"),
    "unclosed/tokens": ("", "short"),
    "almost": ("tools", ""),
    "call": ("tools", "whole+tools"),
    "call/tokens": ("tools", "", "logprobs+tools", "two+tools"),
    "calls/tokens": ("tools", "whole+tools"),
    "nocall": ("tools",),
    "all/tokens": ("tools", "usage+tools", "whole+tools"),
}
_TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def cases() -> list[Case]:
    """At least 40, each with a name of its own."""
    return [*_completions(), *_chats()]


def _completions() -> Iterator[Case]:
    for play, variants in _TEXTS.items():
        for variant in variants:
            yield _completion(f"{play} {variant}", f"play {play}.", **_PLAIN[variant])
    for name, (play, stop) in _STOPS.items():
        yield _completion(
            f"stop {name}", f"play {play}.", stop=stop, stream_options={"include_usage": True}
        )
    yield _completion("stop whole", "play stops.", stop=["STOP"], stream=False)
    yield _completion(
        "stop by id",
        "play latin.",
        stop_token_ids=[13, 500 + ord("!")],
        ignore_eos=True,
        max_tokens=24,
    )
    yield _completion("echo", "play cjk.", echo=True, return_token_ids=True)
    yield _completion("echo two", "play mixed.", echo=True, n=2, seed=60)
    yield _completion("echo whole", [1, 600, 2], echo=True, stream=False, max_tokens=5)
    for variant in ("sampled", "logprobs", "two", "whole"):
        yield _completion(
            f"random {variant}",
            [5, 6, 7],
            **{"temperature": 1.0, "seed": 3, "max_tokens": 16} | _PLAIN[variant],
        )
    yield _completion("random greedy", [8, 9], max_tokens=16, stop=["0x", "é1", "\n"])


def _chats() -> Iterator[Case]:
    for play, variants in _CHATS.items():
        for variant in variants:
            first, _, tools = variant.rpartition("+") if variant != "tools" else ("", "", "tools")
            fields = dict(_PLAIN[first or (tools if tools != "tools" else "")])
            if "logprobs" in fields:
                fields["logprobs"] = True
            if tools == "tools":
                fields["tools"] = _TOOLS
            yield _chat(f"chat {play} {variant}", play, **fields)
    yield _chat(
        "chat sampled", "nothing that is played", temperature=1.0, seed=9, max_completion_tokens=18
    )
    yield _chat("chat stop", "thought/tokens", stop=["Cinquante-sept", "six"])
    yield _chat("chat stop in reasoning", "thought", stop=["8…</th"])


def _completion(name: str, prompt: str | list[int], **fields: Any) -> Case:
    body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": True} | fields
    return Case(name, "/v1/completions", body)


def _chat(name: str, content: str, **fields: Any) -> Case:
    if not content.startswith("nothing"):
        content = f"play {content}."
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "stream": True,
        "max_tokens": 90,
    } | fields
    if "max_completion_tokens" in fields:
        del body["max_tokens"]
    return Case(name, "/v1/chat/completions", body)
