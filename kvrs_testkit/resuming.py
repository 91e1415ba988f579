"""A client of completions and chats that loses its proxy and resumes at another one
(docs/guide/proxies.md), and the comparison of its stream with a quiet run.

Every event of a keyed stream holds the count of tokens so far, so each client checks by itself that
none is missing and none comes twice; only the quiet run shows that they are the right ones.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec

from kvrs_testkit.sse import without_comments

PATIENCE_S = 120.0
_AGAIN_S = 0.05
# Error codes of a stream that cannot be resumed by any number of requests.
_FINAL = {"unknown_stream", "inexact", "idempotency_mismatch", "beyond_end"}


class Way(StrEnum):
    """The action of a client when its stream breaks."""

    CONTINUE = "continue"  # The same request with Last-Event-ID.
    REPLAY = "replay"  # The same request alone: the client discards its part and gets all again.
    # No resume: it has no key. Only a request that no proxy accepted is repeated elsewhere.
    PLAIN = "plain"


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Message = _Message()
    message: _Message = _Message()
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: str | None = None
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_events = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Had:
    """The part of one stream that one client has received."""

    request: int  # Which one of the distinct requests.
    way: Way
    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: int | None = None
    done: bool = False
    began: bool = False  # An answer with status 200 has come.
    last: str | None = None  # The id of its last event.
    lost: int = 0
    repeated: int = 0
    asked: int = 0
    breaks: int = 0  # How often the stream broke off after it had begun.
    token_times_s: list[float] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    failure: str | None = None

    def begin_again(self) -> None:
        self.ids, self.text, self.finish_reason, self.usage, self.last = [], "", None, None, None
        self.token_times_s = []

    @property
    def longest_gap_s(self) -> float:
        return max(
            (later - earlier for earlier, later in pairwise(self.token_times_s)), default=0.0
        )


class Clients:
    """Clients of one cluster. `urls` is asked anew each time."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Callable[[], Sequence[str]],
        bodies: Sequence[dict[str, Any]],
    ) -> None:
        self._session = session
        self._urls = urls
        self._bodies = bodies

    async def read(self, request: int, way: Way, key: str, proxy: int) -> Had:
        """One stream, from one proxy to the next until it is over."""
        had = Had(request, way)
        give_up_s = time.monotonic() + PATIENCE_S
        while not had.done and had.failure is None:
            if time.monotonic() > give_up_s:
                had.failure = f"not over after {PATIENCE_S:.0f} s: {dict(had.refusals)}"
                break
            urls = self._urls()
            await self._ask(had, urls[proxy % len(urls)], key)
            proxy += 1
            if not had.done and had.failure is None:
                await asyncio.sleep(_AGAIN_S)
        return had

    async def _ask(self, had: Had, url: str, key: str) -> None:
        headers = {} if had.way is Way.PLAIN else {"Idempotency-Key": key}
        if had.way is Way.REPLAY:
            had.begin_again()
        elif had.last is not None:
            headers["Last-Event-ID"] = had.last
        had.asked += 1
        began = False
        try:
            body = self._bodies[had.request]
            path = "chat/completions" if "messages" in body else "completions"
            async with self._session.post(
                f"{url}/v1/{path}", json=body, headers=headers
            ) as response:
                if response.status != 200:
                    self._refused(
                        had, f"{response.status}", _events.decode(await response.read()).error
                    )
                    return
                had.began = began = True
                if not body["stream"]:
                    self._note(had, _events.decode(await response.read()))
                    had.done = True
                while not had.done and had.failure is None:
                    raw = await response.content.readuntil(b"\n\n")
                    self._take(had, without_comments(raw))
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
            had.refusals[type(error).__name__] += 1
        had.breaks += began and not had.done
        if had.way is Way.PLAIN and began and not had.done and had.failure is None:
            had.failure = f"broke off after {len(had.ids)} tokens"

    def _refused(self, had: Had, what: str, error: _Error | None) -> None:
        code = (error.code if error is not None else None) or what
        had.refusals[code] += 1
        if code in _FINAL:
            had.failure = f"{code} after {len(had.ids)} tokens ({had.way})"

    def _take(self, had: Had, raw: bytes) -> None:
        lines = dict(line.split(b": ", 1) for line in raw.strip().split(b"\n"))
        if lines.get(b"data") == b"[DONE]":
            had.done = True
            return
        event = _events.decode(lines[b"data"])
        if event.error is not None:
            self._refused(had, "error", event.error)
            if had.failure is None:
                raise aiohttp.ClientPayloadError  # Try another proxy.
            return
        self._note(had, event)
        if b"id" in lines:
            self._count(had, lines[b"id"].decode())

    def _note(self, had: Had, event: _Event) -> None:
        """Add an event of a stream, or the whole answer."""
        for choice in event.choices:
            had.ids += choice.token_ids or []
            had.token_times_s += [time.monotonic()] * len(choice.token_ids or [])
            had.text += choice.text or choice.delta.content or choice.message.content or ""
            had.finish_reason = choice.finish_reason or had.finish_reason
        if event.usage is not None:
            had.usage = event.usage.completion_tokens

    def _count(self, had: Had, event_id: str) -> None:
        """The count of tokens so far, by the event's id; finish and usage count as one each after
        the last token.
        """
        had.last = event_id
        if had.finish_reason is None:
            seq = int(event_id.rpartition(":")[2])
            had.lost += max(0, seq - len(had.ids))
            had.repeated += max(0, len(had.ids) - seq)


def bodies(count: int, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Distinct requests, every second one sampled."""
    rng = random.Random(seed)
    return [
        {
            "prompt": [rng.randrange(4, 512) for _ in range(rng.randrange(40, 200))],
            "max_tokens": rng.randrange(tokens // 2, tokens),
            "temperature": 0.8 if number % 2 else 0.0,
            "seed": number,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for number in range(count)
    ]


async def quiet_run(clients: Clients, count: int) -> list[Had]:
    """Each request once, without a kill."""
    found = await asyncio.gather(
        *(clients.read(number, Way.PLAIN, "", number) for number in range(count))
    )
    assert all(had.done for had in found), [had.failure for had in found if not had.done]
    return found


def verdict(found: Sequence[Had], quiet: Sequence[Had]) -> dict[str, Any]:
    """The figures of the claim."""
    whole = [had for had in found if had.done]
    pairs = [(had, quiet[had.request]) for had in whole]
    ends = [
        ((had.finish_reason, had.usage), (wanted.finish_reason, wanted.usage))
        for had, wanted in pairs
    ]
    gaps_s = sorted(had.longest_gap_s for had in whole if had.breaks and had.way is Way.CONTINUE)
    return {
        "streams": len(found),
        "by_way": dict(Counter(had.way.value for had in found)),
        "complete": len(whole),
        "failed": len(found) - len(whole),
        "failures": dict(Counter(str(had.failure) for had in found if not had.done)),
        "tokens": sum(len(had.ids) for had in whole),
        "tokens_lost": sum(had.lost for had in found)
        + sum(max(0, len(b.ids) - len(a.ids)) for a, b in pairs),
        "tokens_repeated": sum(had.repeated for had in found)
        + sum(max(0, len(a.ids) - len(b.ids)) for a, b in pairs),
        "tokens_different": sum(
            one != other for a, b in pairs for one, other in zip(a.ids, b.ids, strict=False)
        ),
        "texts_different": sum(a.text != b.text for a, b in pairs),
        "ends_different": sum(one != other for one, other in ends),
        "breaks": sum(had.breaks for had in found),
        "streams_that_broke": sum(had.breaks > 0 for had in found),
        "most_breaks_of_a_stream": max((had.breaks for had in found), default=0),
        "refusals": dict(sum((had.refusals for had in found), Counter())),
        "longest_gap_s": {
            name: round(gaps_s[min(len(gaps_s) - 1, int(share * len(gaps_s)))], 3)
            for name, share in (("median", 0.5), ("p99", 0.99), ("most", 1.0))
            if gaps_s
        },
    }


BARS = (
    "failed",
    "tokens_lost",
    "tokens_repeated",
    "tokens_different",
    "texts_different",
    "ends_different",
)


def is_exact(figures: dict[str, Any]) -> bool:
    return not any(figures[bar] for bar in BARS)


class Load:
    """Clients with one stream after the other, until stopped; then every stream is read
    to its end.
    """

    def __init__(self, clients: Clients, ways: Sequence[Way], requests: int, seed: int) -> None:
        """Client number n goes the n-th way."""
        self._clients = clients
        self._ways = ways
        self._requests = requests
        self._rng = random.Random(seed)
        self._stop = False
        self.found: list[Had] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._client(number, way) for number, way in enumerate(self._ways)))

    def stop(self) -> None:
        self._stop = True

    async def _client(self, number: int, way: Way) -> None:
        await asyncio.sleep(self._rng.random())
        while not self._stop:
            key = f"key-{self._rng.getrandbits(128):032x}"
            had = await self._clients.read(
                self._rng.randrange(self._requests), way, key, self._rng.randrange(8)
            )
            self.found.append(had)
