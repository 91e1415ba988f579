"""Client of the P/D convention over HTTP and of the instance protocol, which the embedded engine
and patched DistServe implement.
"""

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from email.utils import parsedate_to_datetime
from math import inf
from typing import Any

import msgspec

from kvrs.errors import KvrsError, UpstreamError
from kvrs.ids import StreamId
from kvrs.process.large_work import LARGE_BYTES
from kvrs.protocol.instance import FenceRequest, InstanceInfo, LoadReport, RankAnswer, RankRequest
from kvrs.protocol.openai.chunks import (
    NOT_A_NUMBER,
    PromptDetails,
    Usage,
    error_body,
    error_kind,
    failure_body,
    refusal_body,
)
from kvrs.protocol.openai.decoding import UNREADABLE
from kvrs.protocol.openai.requests import decode_ids
from kvrs.proxy.backends.backend import Prefilled, RefusedError, is_the_clients_fault
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.wire.errors import (
    BusyError,
    DeniedError,
    EngineError,
    NotANumberError,
    UnusableError,
)
from kvrs.proxy.wire.peer import Peer
from kvrs.proxy.wire.upstream import EngineLinks, Need, Reader, WholeReader

_BUSY = (429, 503)
_DENIED = (401, 403)

# Seconds for reading a response to its end after the stream is complete: only then can its
# connection be used again.
_END_TIMEOUT_S = 1.0
_MAX_QUOTED_BYTES = 300  # Most bytes of an answer that a message quotes, if the answer is not JSON.
_MAX_PREFILL_BYTES = 32 << 20  # Most bytes of a prefill's answer: room for four million ids.


# Values of a Raw field that mean absence: empty if the field is missing, or JSON's null.
_ABSENT = (b"", b"null")


class _PrefillChoice(msgspec.Struct):
    prompt_token_ids: msgspec.Raw = msgspec.Raw()


class _PrefillAnswer(msgspec.Struct):
    choices: list[_PrefillChoice] = []
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


_PREFILL_ANSWER = msgspec.json.Decoder(_PrefillAnswer)


class OpenAiPeer(Peer):
    """An instance that is called by OpenAI requests with `kv_transfer_params`: one for prefill, one
    for decode.
    """

    def __init__(self, links: EngineLinks, url: str) -> None:
        super().__init__(links.pool(url))
        self._links = links
        self._large = links.large

    def leave(self) -> None:
        self._links.drop(self.pool)

    async def prefill(self, call: Call) -> Prefilled:
        reader = WholeReader(_MAX_PREFILL_BYTES)
        await self._complete(call, reader)
        if reader.size_bytes <= LARGE_BYTES:
            return _prefilled(reader.body)
        return await self._large.run(reader.size_bytes, lambda: _prefilled(reader.body))

    def decode(self, call: Call, reader: Reader) -> Coroutine[Any, Any, None]:
        return self._complete(call, reader)

    async def ask(self, call: Call) -> bytes:
        reader = WholeReader(_MAX_PREFILL_BYTES)
        await self._complete(call, reader)
        return reader.body

    async def _complete(self, call: Call, reader: Reader) -> None:
        pool, size_bytes = self.pool, call.size_bytes
        if size_bytes <= LARGE_BYTES:
            body = call.spend()
        else:
            body = await self._large.run(size_bytes, call.spend)
        head = pool.head(call.path, len(body), call.headers)
        upstream = await pool.take()
        try:
            if call.hand_off is not None:
                call.hand_off.is_sent = True
            sent = upstream.send(head, body, reader)
            del call, head, body  # Free their memory, since the answer may take minutes.
            # The future gets no name here: its error would refer to it through this frame, a cycle.
            need = await (await sent)
            status = upstream.status
            if status in _DENIED:
                answer = _as_openai(upstream.refusal)
                raise DeniedError(status, self.UNAUTHORISED, answer)
            if status != 200:
                raise _refusal(status, upstream.headers, upstream.refusal)
            if need is Need.END:
                await upstream.read_rest(_END_TIMEOUT_S)
        finally:
            pool.give_back(upstream)


def _prefilled(body: bytes) -> Prefilled:
    """Parse a prefill's answer. Raises UnusableError: it is no completion, or has no prompt ids."""
    try:
        answer = _PREFILL_ANSWER.decode(body)
        # The ids are in each choice of a completion, but beside the choices of a chat.
        found = bytes(answer.prompt_token_ids)
        for choice in answer.choices:
            if found not in _ABSENT:
                break
            found = bytes(choice.prompt_token_ids)
        prompt_ids = decode_ids(b"[]" if found in _ABSENT else found)
    except UNREADABLE as error:
        raise UnusableError(f"the answer of prefill is not a completion: {error}") from None
    if not prompt_ids:
        raise UnusableError(
            "prefill answered without prompt_token_ids: its version does not support "
            "return_token_ids"
        )
    transfer = answer.kv_transfer_params
    details = None if answer.usage is None else answer.usage.prompt_tokens_details
    cached = details.cached_tokens if isinstance(details, PromptDetails) else None
    return Prefilled(
        prompt_ids,
        # Copied, because a slice would keep the whole answer in memory.
        None if bytes(transfer) in _ABSENT else transfer.copy(),
        cached_tokens=cached,
        reused_tokens=cached,
        ids_text=msgspec.Raw(found),
    )


class PdBackend(OpenAiPeer):
    """An instance with the instance protocol."""

    async def info(self) -> InstanceInfo:
        return await self.control("GET", "/kvrs/v1/instance", None, InstanceInfo)

    async def free_hand_off(self, transfer: msgspec.Raw, history: Sequence[int]) -> None:
        raise UpstreamError("its hand-offs have leases")

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        request = FenceRequest(
            {stream: attempt for stream, (_, attempt) in attempts.items()},
            {stream: owner_epoch for stream, (owner_epoch, _) in attempts.items() if owner_epoch},
        )
        return await self.control("POST", "/kvrs/v1/fence", request, InstanceInfo)

    async def order_rank(self, order: RankRequest) -> RankAnswer:
        return await self.control("POST", "/kvrs/v1/ranks", order, RankAnswer)

    async def load(self) -> LoadReport:
        return await self.control("GET", "/kvrs/v1/load", None, LoadReport)

    async def kv_received(self) -> float | None:
        return (await self.load()).fetched_pages

    def blames_load(self, error: Any) -> bool:
        # No error is about KV: kvrs's engines compute the pages that they cannot load.
        return False

    def watch_load(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        return self.watch("/kvrs/v1/load", interval_s, LoadReport)


def _refusal(status: int, headers: Mapping[str, str], answer: bytes) -> KvrsError:
    if is_the_clients_fault(status):
        return RefusedError(status, _as_openai(answer))
    if not 400 <= status <= 599:
        # Neither a redirect nor another success is an answer, and a status without a body would end
        # the client's response at its head.
        cause = f"answered with HTTP {status}; allowed: 200, or 400 to 599"
        return EngineError(cause, 502, failure_body({"message": f"the engine {cause}"}))
    error = _decoded(answer)
    cause = f"HTTP {status}{error_kind(error)}"
    if status in _BUSY:
        return BusyError(cause, status, _seconds(headers.get("Retry-After")))
    match error:
        case {"error": {"code": str(code)}} if code == NOT_A_NUMBER:
            return NotANumberError(cause)
        case {"error": {"message": str()} as said} | ({"message": str()} as said):
            return EngineError(cause, status, failure_body(said))
        case _:
            text = answer[:_MAX_QUOTED_BYTES].decode(errors="replace").strip()
            return EngineError(cause, status, failure_body({"message": text or cause}))


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds that a Retry-After header names directly or by a date; None: no valid
    header.
    """
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < inf else None


def _decoded(body: bytes) -> Any:
    """Return the decoded body; None: the body is not JSON."""
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        return None


def _as_openai(body: bytes) -> bytes:
    """Rewrite an engine's refusal in OpenAI's form.

    Older versions of vLLM use a flat form, and a server in front of an engine any form.
    """
    match _decoded(body):
        case {"error": {"message": str()} as error}:
            return refusal_body(error)
        case {"message": str()} as error:
            return refusal_body(error)
        case _:
            return error_body(
                "the engine refused the request: "
                f"{body[:_MAX_QUOTED_BYTES].decode(errors='replace')}"
            )
