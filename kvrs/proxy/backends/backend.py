"""What a proxy asks of an instance, whatever engine it is. Attempts, watchers and the driver know no more of it than this.

What an engine can do beyond the two calls of a stream is in the capabilities of its `InstanceInfo`; nothing that needs a
capability is asked of an engine without it. A failure of the instance is an `UpstreamError`; an instance that answers and
must not be used, an `UnusableError` (`peer.py`); a request that the instance finds wrong, a `RefusedError`.
docs/backends.md says how to add one, tests/backends/ what each has to show.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvrs.errors import KvrsError
from kvrs.ids import StreamId
from kvrs.protocol.instance import InstanceInfo, LeaseAnswer, LeaseUpdate, LoadReport
from kvrs.proxy.backends.bodies import Call

# These say something about the proxy or the moment, not about the client's request.
_NOT_THE_CLIENTS_FAULT = frozenset({401, 403, 407, 408, 409, 425, 429})


def is_the_clients_fault(status: int) -> bool:
    return 400 <= status < 500 and status not in _NOT_THE_CLIENTS_FAULT


class RefusedError(KvrsError):
    """The engine says that the client's request is wrong; the client gets `body`, in OpenAI's form."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"refused with HTTP {status}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What prefill hands to decode: `transfer` is forwarded once, to one decode call."""

    prompt_ids: list[int]
    transfer: msgspec.Raw | None
    good_until_s: float | None = None  # On the monotonic clock: not to be forwarded later. None: that does no harm.


class Backend(Protocol):
    """One instance."""

    @property
    def url(self) -> str: ...

    # Who it is, and how it is.

    async def info(self) -> InstanceInfo:
        """Who answers there. What makes it unusable is found here, when it comes up, and not by the first stream."""

    def watch_load(self, interval_s: float) -> AbstractAsyncContextManager[AsyncIterator[LoadReport]]:
        """Its load, about every `interval_s`, until it is gone: that is an UpstreamError, as soon as it can be noticed."""

    # The calls of a stream.

    async def prefill(self, call: Call) -> Prefilled:
        """Have the history's KV computed and kept for a hand-off."""

    def decode(self, call: Call) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The stream of the tokens after the history, as chunks of bytes; to leave the context ends it in the engine."""

    def blames_prefill(self, said: Any) -> bool:
        """Whether the error event with which a decode call began is about a hand-off that it could not get."""

    # What some can do.

    async def leases(self, update: LeaseUpdate) -> LeaseAnswer:
        """Of retained pages. With RETAIN."""

    async def fence(self, attempts: Mapping[StreamId, tuple[int, int]]) -> InstanceInfo:
        """Drop every (owner epoch, attempt) below the ones named, and rise in epoch. With FENCE."""
