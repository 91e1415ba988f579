"""The P/D convention over HTTP, and the instance protocol of engines that are ours: the embedded one, and patched DistServe."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from kvrs.errors import UpstreamError
from kvrs.ids import StreamId
from kvrs.protocol.instance import FenceRequest, InstanceInfo, LoadReport
from kvrs.protocol.openai import error_body, error_kind
from kvrs.proxy.backends.backend import Prefilled, RefusedError, is_the_clients_fault
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.backends.peer import UNREADABLE, Chunks, Peer, UnusableError, body_of


class _PrefillChoice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _PrefillAnswer(msgspec.Struct):
    choices: list[_PrefillChoice] = []
    prompt_token_ids: list[int] | None = None
    # Raw knows no union: absent is empty, and null stays the four bytes that it is.
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


class OpenAiPeer(Peer):
    """The two calls of a stream, as OpenAI requests with `kv_transfer_params`."""

    async def prefill(self, call: Call) -> Prefilled:
        async with self._completion(call) as response:
            raw = await body_of(response)
        try:
            answer = msgspec.json.decode(raw, type=_PrefillAnswer)
        except UNREADABLE as error:
            raise UnusableError(f"prefill answered what is no completion: {error}") from None
        # In a completion each choice has them, in a chat the answer.
        prompt_ids = answer.prompt_token_ids or next((choice.prompt_token_ids for choice in answer.choices), None)
        if not prompt_ids:
            raise UnusableError("prefill answered without prompt_token_ids: its version does not know return_token_ids")
        transfer = answer.kv_transfer_params
        return Prefilled(prompt_ids, None if bytes(transfer) in (b"", b"null") else transfer)

    @asynccontextmanager
    async def decode(self, call: Call) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._completion(call) as response:
            yield Chunks(response)

    @asynccontextmanager
    async def _completion(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self.call("POST", call.path, call.body) as response:
            if response.status != 200:
                answer = await body_of(response)
                if is_the_clients_fault(response.status):
                    raise RefusedError(response.status, _as_openai(answer))
                raise UpstreamError(f"HTTP {response.status}{error_kind(_decoded(answer))}")
            yield response


class PdBackend(OpenAiPeer):
    """An instance that has the instance protocol."""

    async def info(self) -> InstanceInfo:
        return await self.control("GET", "/kvrs/v1/instance", None, InstanceInfo)

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        request = FenceRequest(
            {stream: attempt for stream, (_, attempt) in attempts.items()},
            {stream: owner_epoch for stream, (owner_epoch, _) in attempts.items() if owner_epoch},
        )
        return await self.control("POST", "/kvrs/v1/fence", request, InstanceInfo)

    def blames_prefill(self, said: Any) -> bool:
        return False  # Where pages cannot be fetched, they are computed.

    def watch_load(self, interval_s: float) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return self.watch("/kvrs/v1/load", interval_s, LoadReport)


def _decoded(body: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
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
