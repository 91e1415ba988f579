"""Requests of a proxy to an instance with any engine. Attempts, watchers and the driver use nothing
else of an instance.

Abilities beyond the two calls of a stream are the capabilities of an `InstanceInfo`; a request that
needs a capability is not sent to an engine without it. A failure of the instance is an
`UpstreamError`; an instance that answers and must not be used, an `UnusableError` (`peer.py`); a
request that the instance rejects, a `RefusedError`; one that it has no room for, a `BusyError`.
docs/guide/backends.md describes how to add a backend, tests/backends/ what each has to prove.
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
from kvrs.proxy.backends.bodies import Call
from kvrs.proxy.wire.upstream import Reader

# Refusals that are final: they name a fault of the request, which every instance of the model would
# find. Any other 4xx may be the fault of the instance, and another one is asked.
_FINAL_STATUSES = frozenset({400, 413, 422})
_FINAL_CODES = frozenset({"context_length_exceeded", "invalid_prompt", "string_above_max_length"})
# Parameters that the proxy sets, or that depend on what an instance has loaded.
_NOT_THE_CLIENTS = ("kvrs", "kv_transfer_params", "model")
# vLLM says these without a code, and most versions without a parameter.
_FINAL_MESSAGES = ("maximum context length", "maximum model length", "out of vocabulary")
# These are about the proxy or the moment, not about the client's request.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 407, 408, 409, 425, 429})


def is_the_clients_fault(status: int) -> bool:
    return 400 <= status < 500 and status not in _NOT_THE_CLIENTS_FAULT


class RefusedError(KvrsError):
    """The engine rejected the client's request. If another one does so too, or the refusal is
    final, the client gets `body`, in OpenAI's form.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with HTTP {status}")
        self.status = status
        self.body = body

    @property
    def is_final(self) -> bool:
        """It names a fault of the request itself: its length, or a field."""
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
    """The result of prefill; `transfer` is forwarded once, to one decode call. `ids_text`: the ids
    as they came, which that call sends as they are.
    """

    prompt_ids: "array[int]"
    transfer: msgspec.Raw | None
    good_until_s: float | None = (
        None  # On the monotonic clock: not to be forwarded later. None: that does no harm.
    )
    cached_tokens: int | None = None  # Of the prompt, for clients; None: its usage does not say.
    reused_tokens: int | None = None  # Of the prompt, that its cache had; None: it does not say.
    ranks: int = 1  # That hand it over, each a part.
    ids_text: msgspec.Raw | None = None


class Backend(Protocol):
    """One instance."""

    @property
    def url(self) -> str: ...

    @property
    def engine_version(self) -> str | None:
        """Version that the process that was met last names; None: it is kvrs, or none was met."""

    def leave(self) -> None:
        """It is removed: nothing is kept open to it once the calls that run have ended."""

    # Identity and load.

    async def info(self) -> InstanceInfo:
        """The identity of the process at the URL. A fault that makes it unusable is found here,
        when it comes up, not by the first stream.
        """

    async def load(self) -> LoadReport:
        """Ask the instance for its report."""

    def watch_load(
        self, interval_s: float, is_awaited: Callable[[], bool]
    ) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        """Load reports, about every `interval_s`; the loss of the process is an UpstreamError.
        `is_awaited`: streams wait for a token of the instance; one that is polled is asked less
        while none do.
        """

    def watch_heartbeats(
        self, interval_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Heartbeat]]:
        """Heartbeats that go on while the instance's event loop stalls. An engine without them
        refuses, and its stall looks like its death.
        """

    async def kv_received(self) -> float | None:
        """KV that has come from other instances since its start, in pages or bytes; or has gone to
        them, where prefill is called together with decode. None: it does not count that.
        """

    async def order_rank(self, order: RankRequest) -> RankAnswer:
        """Let a rank of it leave, or have it back."""

    # The calls of a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Compute the history's KV and keep it for a hand-off."""

    async def decode(self, call: Call, reader: Reader) -> None:
        """Pass the tokens after the history on to the reader, as bytes, until the response has
        ended or the reader needs no more of it. A call that is cancelled ends the request in the
        engine.
        """

    async def ask(self, call: Call) -> bytes:
        """The answer to a request that is no stream, and that any instance answers alike."""

    async def free_hand_off(self, transfer: msgspec.Raw, history: Sequence[int]) -> None:
        """Have prefill free what it has handed over and no stream will fetch. An engine whose
        hand-offs have leases refuses.
        """

    def blames_load(self, error: Any) -> bool:
        """The error event that opened a decode call is about KV that could not be loaded: of a
        hand-off, or of a store.
        """

    # Requests that need a capability.

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        """Renew, release and drop leases of retained pages. Needs RETAIN."""

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        """Drop every (owner epoch, attempt) below the given ones, and enter a new epoch. Needs
        FENCE.
        """
