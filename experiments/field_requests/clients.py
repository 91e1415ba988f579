"""Clients as people use them, in a stream that pauses for half a minute: its decode server dies,
and its history takes so long to be computed again.
"""

import asyncio
import importlib
import importlib.util
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import openai

from experiments.field_requests.cluster import (
    MODEL,
    Answer,
    Cluster,
    body,
    cluster,
    prompt,
    read,
    text_after,
)
from experiments.field_requests.rows import Row

PAUSE_S = 30.0
_TOKENS, _PACE_S = 120, 0.2
_BEFORE_S = 2.0  # From the request to the first death.
_DOWN_S = 1.0
_LANGCHAIN = "langchain_openai"


@dataclass
class Heard:
    """The text that a client has, and when it got more of it."""

    text: str = ""
    finish: str | None = None
    times_s: list[float] = field(default_factory=list)

    def add(self, text: str, finish: str | None = None) -> None:
        self.text += text
        self.finish = finish or self.finish
        self.times_s.append(time.monotonic())

    @property
    def longest_s(self) -> float:
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)


Client = Callable[[str, int, Mapping[str, str], Heard], Awaitable[None]]


async def by_openai(url: str, number: int, headers: Mapping[str, str], heard: Heard) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as user:
        stream = await user.completions.create(
            model=MODEL,
            prompt=prompt(number),
            max_tokens=_TOKENS,
            temperature=0,
            stream=True,
            extra_headers=headers,
        )
        async for event in stream:
            for choice in event.choices:
                heard.add(choice.text, choice.finish_reason)


async def by_langchain(url: str, number: int, headers: Mapping[str, str], heard: Heard) -> None:
    user: Any = importlib.import_module(_LANGCHAIN).OpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=0,
        max_tokens=_TOKENS,
        temperature=0,
        default_headers=dict(headers),
    )
    async for text in user.astream(prompt(number)):
        heard.add(text)
    heard.finish = "length"  # It tells none.


async def by_curl(url: str, number: int, headers: Mapping[str, str], heard: Heard) -> None:
    given = {"Content-Type": "application/json", **headers}
    words = ["curl", "-sSN", "--fail-with-body", f"{url}/v1/completions"]
    words += [part for name, value in given.items() for part in ("-H", f"{name}: {value}")]
    process = await asyncio.create_subprocess_exec(
        *words, "-d", json.dumps(body(number, _TOKENS)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    lines = b""
    async for line in process.stdout:
        lines += line
        if line.startswith(b"data: "):
            heard.times_s.append(time.monotonic())
    status, answer = await process.wait(), Answer(0)
    if lines:
        answer = read(200, lines)
    heard.text, heard.finish = answer.text, answer.finish
    if status or answer.error or not answer.is_done:
        raise OSError(f"curl: status {status}, {answer.error}")


CLIENTS: dict[str, Client] = {
    "openai": by_openai,
    "langchain": by_langchain,
    "curl": by_curl,
}


async def pauses(_: int) -> Row:
    """Each decode server dies once, and comes back: every stream is on one of them."""
    row = Row("pauses")
    names = [*CLIENTS]
    if importlib.util.find_spec(_LANGCHAIN) is None:
        names.remove("langchain")
        row.notes.append(f"langchain: skipped, {_LANGCHAIN} is not installed")
    users = [(name, keyed) for name in names for keyed in (False, True)]
    row.wanted = len(users)
    async with cluster((0.0, PAUSE_S), pause_s=_PACE_S) as system:
        begun_s = time.monotonic()
        heard = [Heard() for _ in users]
        asked = [
            asyncio.create_task(_ask(system, number, *user, heard[number]))
            for number, user in enumerate(users)
        ]
        await asyncio.sleep(_BEFORE_S)
        async for name in _deaths(system):
            row.more.setdefault("killed", []).append(name)
        errors = await asyncio.gather(*asked)
        row.seconds = time.monotonic() - begun_s
        await row.take(system, "d0", "d1")
        row.note_causes()
    for number, (name, keyed) in enumerate(users):
        each, error = heard[number], errors[number]
        is_whole = each.text == text_after(prompt(number), _TOKENS) and each.finish == "length"
        row.answered += is_whole and not error
        with_key = "with" if keyed else "without"
        said = error or ("all tokens" if is_whole else f"finish {each.finish}, other text")
        row.notes.append(f"{name} {with_key} a key: pause {each.longest_s:.1f} s, {said}")
    row.more["pauses_s"] = [each.longest_s for each in heard]
    row.all_answered()
    is_met = min(each.longest_s for each in heard) >= PAUSE_S
    row.bar(f"each has paused for {PAUSE_S:.0f} s or more", is_met=is_met)
    return row


async def _ask(system: Cluster, number: int, name: str, keyed: bool, heard: Heard) -> str:
    """Returns the error; empty: there was none."""
    headers = {"Idempotency-Key": f"key-{number}"} if keyed else {}
    try:
        await CLIENTS[name](system.url, number, headers, heard)
    except Exception as error:  # Whatever the client raises.
        return f"{type(error).__name__}: {error}"[:200]
    return ""


async def _deaths(system: Cluster) -> AsyncIterator[str]:
    """Kill one decode server, start it again, and kill the other, if it has streams by then."""
    for name, other in (("d0", "d1"), ("d1", "d0")):
        if system.on.get(name):
            await system.servers[name].kill()
            yield name
            await asyncio.sleep(_DOWN_S)
            await system.servers[name].restart()
            await system.until_health(**{name: "up", other: "up"})
