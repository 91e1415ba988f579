"""A scripted vLLM that answers as the request makes it: with an error, after a long time, with a
finish reason of its own, or without token ids.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from kvrs.net.http import PieceWriter
from kvrs.net.routes import JSON, Request, Response
from kvrs.protocol.openai.chunks import DONE, sse
from kvrs.protocol.openai.requests import ChatRequest, CompletionRequest
from kvrs_testkit.scripted import Fault
from kvrs_testkit.scripted_vllm import ScriptedVllm
from kvrs_testkit.vllm_cluster import Servers


@dataclass
class Oddity:
    """The behaviour that all servers of one cluster have in common."""

    status: int | None = None  # Of the answer to prefill or decode calls, with `message`.
    message: str = "403, message='Forbidden', url='https://pictures.example/cat.png'"
    stage: str = "prefill"  # The calls that are answered so.
    times: float = inf  # As often; later ones are answered well.
    is_event: bool = False  # The error comes in the stream.
    finish: str | None = None
    hides_ids: bool = False
    takes_s: float = 0.0  # Prefill calls, and requests that are answered whole.
    calls: list[str] = field(default_factory=list)  # To completions and whole answers: the servers.

    async def fail(self, request: Request) -> Response:
        kind = "BadRequestError" if self.status == 400 else "InternalServerError"
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        body = msgspec.json.encode({"error": error})
        if not self.is_event:
            status = self.status or 500
            return Response(status, body, {"Content-Type": JSON})
        writer = PieceWriter(request, "text/event-stream")
        await writer.write(sse(body) + DONE)
        return writer.end()

    def changed(self, event: bytes) -> bytes:
        if event == DONE:
            return event
        said: dict[str, Any] = msgspec.json.decode(event.removeprefix(b"data: "))
        for choice in said["choices"]:
            if self.finish is not None and choice["finish_reason"] is not None:
                choice["finish_reason"] = self.finish
            if self.hides_ids and history_is_real(choice):
                choice.pop("token_ids", None)
        return sse(msgspec.json.encode(said))


@dataclass(eq=False)
class OddVllm(ScriptedVllm):
    odd: Oddity = field(default_factory=Oddity)

    async def _completions(self, request: Request) -> Response:
        fields = msgspec.json.decode(await request.read())
        transfer = fields.get("kv_transfer_params") or {}
        is_prefill = bool(transfer.get("do_remote_decode"))
        if fields.get("prompt") != [1]:  # Else the probe as it comes up.
            self.odd.calls.append(self.id)
            if is_prefill:
                await asyncio.sleep(self.odd.takes_s)
            is_odd = is_prefill == (self.odd.stage == "prefill") and self.odd.times > 0
            if self.odd.status is not None and is_odd:
                self.odd.times -= 1
                return await self.odd.fail(request)
        return await super()._completions(request)

    async def _pass(self, request: Request) -> Response:
        self.odd.calls.append(self.id)
        await asyncio.sleep(self.odd.takes_s)
        if self.odd.status is not None:
            return await self.odd.fail(request)
        return await super()._pass(request)

    async def _events(
        self,
        parsed: CompletionRequest | ChatRequest,
        history: list[int],
        position: int,
        known: list[int],
    ) -> AsyncIterator[bytes | Fault]:
        async for event in super()._events(parsed, history, position, known):
            yield event if isinstance(event, Fault) else self.odd.changed(event)


def history_is_real(choice: dict[str, Any]) -> bool:
    """Not the answer to the probe, whose prompt is one token."""
    return choice.get("prompt_token_ids") != [1]


def make_odd(servers: Servers, **changes: Any) -> Oddity:
    """Have all servers of a cluster be of this kind."""
    odd = Oddity(**changes)
    for name, server in servers.items():
        made = OddVllm(name, server.node, role=server.role, script=server.script, odd=odd)
        made.passed = server.passed
        servers[name] = made
    return odd
