"""A proxy's requests to an instance with any engine. Attempts, watchers and the driver use an
instance only through this interface.

A request that needs a capability of `InstanceInfo` is not sent to an engine without it. Errors:
`UpstreamError` for a failed instance, `UnusableError` (`peer.py`) for an instance that answers and
must not be used, `RefusedError` for a rejected request, `BusyError` for a request without room.
docs/guide/backends.md describes how to add a backend, tests/backends/ tests each of them.
"""

from array import array
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.protocol.instance import (
    Heartbeat,
    InstanceInfo,
    LeaseAnswer,
    LeaseUpdate,
    LoadReport,
    RankAnswer,
    RankRequest,
)
from kvrs.protocol.openai.chunks import error_kind
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.wire.upstream import Reader

# Statuses that blame the request itself, so that every instance of the model would refuse it. After
# any other 4xx another instance is tried.
_FINAL_STATUSES = frozenset({400, 413, 422})
_FINAL_CODES = frozenset({"context_length_exceeded", "invalid_prompt", "string_above_max_length"})
# Parameters that the client does not choose: the proxy sets them, or they depend on the models that
# an instance has loaded. An error about them is not final.
_NOT_THE_CLIENTS = ("kvrs", "kv_transfer_params", "model")
# Parts of vLLM's messages that blame the request itself, since vLLM sends no code with them.
_FINAL_MESSAGES = ("maximum context length", "maximum model length", "out of vocabulary")
# Statuses 4xx that are about the proxy's access or the instance's load, and so do not blame the
# client.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 407, 408, 409, 425, 429})


def is_the_clients_fault(status: int) -> bool:
    return 400 <= status < 500 and status not in _NOT_THE_CLIENTS_FAULT


class RefusedError(KvrsError):
    """The engine rejected the client's request. The client gets `body`, in OpenAI's form, if the
    refusal is final, or if another engine refuses too.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with HTTP {status}{error_kind(msgspec.json.decode(body))}")
        self.status = status
        self.body = body

    @property
    def is_final(self) -> bool:
        """True if the refusal blames the request itself, its length or a field, so no other engine
        is tried.
        """
        if self.status not in _FINAL_STATUSES:
            return False
        match msgspec.json.decode(self.body):
            case {"error": {"code": str(code)}} if code in _FINAL_CODES:
                return True
            case {"error": {"param": str(param)}} if param:
                return param.split(".")[0] not in _NOT_THE_CLIENTS
            case {"error": {"message": str(message)}}:
                return any(words in message for words in _FINAL_MESSAGES)
            case _:
                return False


class Prefilled(msgspec.Struct):
    """The result of prefill. `transfer` is forwarded once, to one decode call; None: no hand-off.
    `ids_text`: the JSON of the prompt's ids, as received.
    """

    prompt_ids: "array[int]"
    transfer: msgspec.Raw | None
    good_until_s: float | None = (
        None  # Monotonic time after which `transfer` must not be forwarded. None: no limit.
    )
    # Prompt tokens found in the cache, as the client's usage shows them; None: not reported.
    cached_tokens: int | None = None
    # Prompt tokens that the instance did not compute, for the proxy's counts; None: not reported.
    reused_tokens: int | None = None
    ranks: int = 1  # Ranks of the prefill instance, each of which hands over a part of the KV.
    ids_text: msgspec.Raw | None = None


class WatchedInstance(Protocol):
    """Requests by which a proxy, or a simulated one, watches an instance."""

    @property
    def url(self) -> str: ...

    async def info(self) -> InstanceInfo:
        """Return the identity of the process at the URL. Raises UnusableError: the instance must
        not be used, which shows when it comes up and not at its first stream.
        """

    def watch_load(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        """Yield load reports, about every `interval_s`; raises UpstreamError when the process is
        lost. `is_awaited`: whether streams wait for a token of the instance; while none does, an
        instance that is polled is polled less often.
        """

    def watch_heartbeats(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        """Yield heartbeats, which go on while the instance's event loop stalls. An engine without
        heartbeats refuses the call, so its stall looks like its death.
        """

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        """Make the instance drop every attempt below the given (owner epoch, attempt) of its
        stream, and enter a new epoch. Needs the capability FENCE.
        """


class Backend(WatchedInstance, Protocol):
    """Requests to one instance."""

    @property
    def engine_version(self) -> str | None:
        """Version of the stock engine, as its last process reported it; None: a kvrs engine, or no
        process has answered yet.
        """

    def leave(self) -> None:
        """Close the connections of an instance that was removed, once its running calls
        have ended.
        """

    async def load(self) -> LoadReport:
        """Ask the instance for its load report."""

    async def kv_received(self) -> float | None:
        """KV that the instance has received since its start, or for SGLang's prefill sent, in pages
        or bytes: a self-test sees by the difference that KV has moved. None: not counted.
        """

    async def order_rank(self, order: RankRequest) -> RankAnswer:
        """Order a rank to leave or to return."""

    # Requests that serve a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Make the instance compute the history's KV and keep it for a hand-off."""

    async def decode(self, call: Call, reader: Reader) -> None:
        """Pass the tokens after the history to the reader, as bytes, until the response ends or the
        reader needs no more. Cancelling the call ends the request in the engine.
        """

    async def ask(self, call: Call) -> bytes:
        """Return the answer to a request that is no stream and that every instance
        answers alike.
        """

    async def free_hand_off(self, transfer: msgspec.Raw, history: Sequence[int]) -> None:
        """Free a hand-off at prefill that no stream will fetch. An engine whose hand-offs have
        leases refuses.
        """

    def blames_load(self, error: Any) -> bool:
        """True if `error`, the first event of a decode call, says that the engine could not load
        KV, from a hand-off or a store.
        """

    # Requests that need a capability.

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        """Renew and release leases of the pages that the instance retains. Needs the capability
        RETAIN.
        """
