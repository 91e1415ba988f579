"""Scripted vLLM servers for requests from the field: computations that take long, an engine that
stops, and answers that are unusual for one request at a time.
"""

import asyncio
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvrs.net.http import answer
from kvrs.net.routes import Request, Response
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.odd_vllm import Oddity
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_vllm import ScriptedVllm

_NUMBER = re.compile(rb"#(\d+)#")  # Stands in every prompt; requests without are probes.
_EVERY = 1000  # More computations at a time than there are requests.
_CHUNK_S = 0.5
_BYTES = 256  # Tokens that are bytes of a prompt; others come from outputs.


@dataclass(frozen=True, slots=True)
class Odd:
    """The unusual behaviour of the servers towards one request."""

    kind: str = "plain"
    answer: Oddity = field(default_factory=Oddity)
    lacks_transfer: bool = False  # Prefill hands nothing over.
    ends_at_once: bool = False  # The same, since the token of prefill ends its output.


PLAIN = Odd()


@dataclass
class Seen:
    """The engine calls of one cluster, by the number of their request."""

    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    refused: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    # Histories that were computed, and not pulled.
    computed: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def most_calls(self) -> int:
        return max(map(len, self.calls.values()), default=0)

    def most_computed(self) -> int:
        return max(self.computed.values(), default=0)


@dataclass(eq=False)
class FieldVllm(ScriptedVllm):
    """`takes_s`: of the first, second, ... computation of a request's history, by any server."""

    seen: Seen = field(default_factory=Seen)
    takes_s: tuple[float, ...] = (0.0,)
    held: set[int] = field(default_factory=set)  # Requests that it decodes.
    odd: Mapping[int, Odd] = field(default_factory=dict)
    in_chunks: bool = False  # Its counters move while it computes a history.
    chunks: int = 0
    computes: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.computes.set()
        self.narrow(_EVERY)

    def narrow(self, lanes: int) -> None:
        """Compute at most so many histories at a time."""
        self._lanes = asyncio.Semaphore(lanes)

    async def _completions(self, request: Request) -> Response:
        fields = msgspec.json.decode(await request.read())
        if (number := number_of(fields)) is None:
            return await super()._completions(request)
        self.seen.calls[number].append(self.id)
        odd = self.odd.get(number, PLAIN)
        transfer = fields.get("kv_transfer_params") or {}
        is_prefill = bool(transfer.get("do_remote_decode"))
        if not transfer.get("do_remote_prefill"):
            await self._compute(number)
        # What prefill cannot do, such as to fetch a picture, no server can.
        is_refused = not is_prefill or odd.answer.stage == "prefill"
        if odd.answer.status is not None and is_refused:
            return await self._refuse(request, number, odd.answer)
        if not is_prefill:
            self.held.add(number)
        try:
            response = await super()._completions(request)
        finally:
            self.held.discard(number)
        if is_prefill and response.body is not None:
            return _changed_prefill(response, odd)
        return response

    async def _pass(self, request: Request) -> Response:
        number = number_of(msgspec.json.decode(await request.read()))
        if number is not None and request.path not in ("/v1/completions", "/v1/chat/completions"):
            self.seen.calls[number].append(self.id)
            await self._compute(number)
            odd = self.odd.get(number, PLAIN)
            if odd.answer.status is not None:
                return await self._refuse(request, number, odd.answer)
        return await super()._pass(request)

    async def _compute(self, number: int) -> None:
        nth = self.seen.computed[number]
        self.seen.computed[number] += 1
        takes_s = self.takes_s[min(nth, len(self.takes_s) - 1)]
        if not takes_s:
            return
        self.waiting += 1
        try:
            await self._lanes.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            for _ in range(int(takes_s / _CHUNK_S)):
                await asyncio.sleep(_CHUNK_S)
                self.chunks += self.in_chunks
            await self.computes.wait()
        finally:
            self.running -= 1
            self._lanes.release()

    async def _metrics(self, request: Request) -> Response:
        response = await super()._metrics(request)
        labels = f'engine="0",model_name="{self.model}"'
        steps = f"vllm:iteration_tokens_total_count{{{labels}}} {float(self.chunks)}\n"
        assert response.body is not None
        response.body += steps.encode()
        return response

    async def _refuse(self, request: Request, number: int, answer: Oddity) -> Response:
        self.seen.refused[number] += 1
        return await answer.fail(request)

    async def _events(
        self,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        position: int,
        known: list[int],
    ) -> AsyncIterator[bytes | Fault]:
        number = _number_in(history)
        odd = PLAIN if number is None else self.odd.get(number, PLAIN)
        async for event in super()._events(parsed, history, position, known):
            await self.computes.wait()
            is_plain = isinstance(event, Fault) or odd is PLAIN
            yield event if isinstance(event, Fault) or is_plain else odd.answer.changed(event)


def number_of(fields: Mapping[str, Any]) -> int | None:
    """The number of a request; None: it is a probe."""
    if isinstance(prompt := fields.get("prompt"), list):
        return _number_in(prompt)
    asked = [fields.get(name) for name in ("prompt", "messages", "input")]
    found = _NUMBER.search(msgspec.json.encode(asked))
    return int(found[1]) if found else None


def _number_in(history: list[int]) -> int | None:
    found = _NUMBER.search(bytes(each for each in history if each < _BYTES))
    return int(found[1]) if found else None


def _changed_prefill(response: Response, odd: Odd) -> Response:
    """The answer of prefill as it is for this request."""
    if not odd.lacks_transfer and not odd.ends_at_once:
        return response
    assert isinstance(response.body, bytes)
    said = msgspec.json.decode(response.body)
    said["kv_transfer_params"] = None
    if odd.ends_at_once:
        said["choices"][0]["finish_reason"] = "stop"
    return answer(said)
