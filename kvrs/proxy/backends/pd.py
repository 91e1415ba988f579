"""The embedded engine's and vLLM's P/D convention: what a proxy asks of an instance, and how that can fail.

A failure of the instance is an `UpstreamError`; a request that the instance finds wrong is a `RefusedError`, whose
body the client gets.
"""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from kvrs.errors import KvrsError, UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.instance import FenceRequest, InstanceInfo, LoadReport
from kvrs.protocol.openai import error_body, error_kind
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.peer import Chunks, Peer, body_of

# These say something about the proxy or the moment, not about the client's request.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 407, 408, 409, 425, 429})


class RefusedError(KvrsError):
    """The engine says that the client's request is wrong."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with HTTP {status}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill hands to decode. `transfer` is forwarded as the bytes it came in."""

    prompt_ids: list[int]
    transfer: msgspec.Raw | None


class _PrefillChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PrefillAnswer(msgspec.Struct):
    choices: list[_PrefillChoice] = []
    prompt_token_ids: list[int] | None = None
    # Raw knows no union: absent is empty, and null stays the four bytes that it is.
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class PdBackend(Peer):
    """Speaks to the instance at one URL."""

    # The two calls of a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Have the history's KV computed and retained for a hand-off."""
        async with self._completion(call) as response:
            raw = await body_of(response)
        try:
            answer = msgspec.json.decode(raw, type=_PrefillAnswer)
        except msgspec.DecodeError as error:
            raise UpstreamError(f"prefill answered what is no completion: {error}") from None
        # In a completion each choice has them, in a chat the answer.
        prompt_ids = answer.prompt_token_ids or next((choice.prompt_token_ids for choice in answer.choices), None)
        if not prompt_ids:
            raise UpstreamError("prefill answered without prompt_token_ids")
        transfer = answer.kv_transfer_params
        return Prefilled(prompt_ids, None if bytes(transfer) in (b"", b"null") else transfer)

    @asynccontextmanager
    async def decode(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        """Open the stream of the tokens after the history, as chunks of bytes."""
        async with self._completion(call) as response:
            yield Chunks(response)

    @asynccontextmanager
    async def _completion(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.call("POST", call.path, call.body) as response:
            if response.status != 200:
                answer = await body_of(response)
                if 400 <= response.status < 500 and response.status not in _NOT_THE_CLIENTS_FAULT:
                    raise RefusedError(response.status, _as_openai(answer))
                raise UpstreamError(f"HTTP {response.status}{error_kind(_decoded(answer))}")
            yield response

    # The instance protocol.

    async def info(self) -> InstanceInfo:
        return await self.control("GET", "/kvrs/v1/instance", None, InstanceInfo)

    async def fence(self, attempts: dict[StreamId, int]) -> InstanceInfo:
        return await self.control("POST", "/kvrs/v1/fence", FenceRequest(attempts), InstanceInfo)

    def watch_load(self, interval_s: float) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return self.watch("/kvrs/v1/load", interval_s, LoadReport)


def _decoded(body: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _as_openai(body: bytes) -> bytes:
    """An engine's refusal in the form that clients read, on one line, as it must be in an event.

    Engines have other forms too: older ones of vLLM a flat one, and what stands before an engine may say anything.
    """
    match _decoded(body):
        case {"error": {"message": str()}} as said:
            return msgspec.json.encode(said)
        case {"message": str(message)}:
            return error_body(message)
        case _:
            return error_body(f"the engine refuses the request: {body[:300].decode(errors='replace')}")
