"""Limits that hold for all workers of a proxy together, kept by their supervisor.

Tenants' limits are exact: a worker asks before it takes a stream or bytes of a tenant with limits,
and says what it gives back. A worker that has ended gives back all at once.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrs.config.tenants import TenantSettings
from kvrs.control.tenants import GuessLimit, TenantMeter


class TenantLimits(msgspec.Struct, frozen=True, array_like=True):
    """Those of a tenant, as in the key file."""

    streams: int | None
    open_bytes: int | None

    @property
    def exist(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


class Take(msgspec.Struct, array_like=True):
    """What a request needs of a tenant's limits; zeros are not asked for."""

    tenant: str
    limits: TenantLimits
    size_bytes: int = 0
    streams: int = 0
    key: str = ""  # Of the stream's record: at however many workers, it is one stream.


class Taken(msgspec.Struct, array_like=True):
    """`excess`: what the tenant has no room for; nothing was taken then."""

    excess: tuple[str, str] | None


class Give(msgspec.Struct, array_like=True):
    """What was taken."""

    tenant: str
    size_bytes: int
    streams: int
    key: str = ""


@dataclass(slots=True)
class _Open:
    """What one worker has of one tenant. `keys` counts its requests for streams with a key."""

    size_bytes: int = 0
    streams: int = 0  # Without a key.
    keys: Counter[str] = field(default_factory=Counter)


class SharedLimits:
    """A question about a guess takes the time."""

    def __init__(self) -> None:
        self._meters: dict[str, TenantMeter] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._open: dict[int, dict[str, _Open]] = {}  # By worker, then tenant.
        self._guesses = GuessLimit()

    def take(self, worker: int, asked: Take) -> Taken:
        meter = self._meter(asked.tenant, asked.limits)
        held = self._open.setdefault(worker, {}).setdefault(asked.tenant, _Open())
        excess = None
        if asked.size_bytes:
            excess = meter.take_bytes(asked.size_bytes)
            held.size_bytes += 0 if excess else asked.size_bytes
        if excess is None and asked.streams:
            streams = 0 if asked.key and self._runs(asked.tenant, asked.key) else asked.streams
            excess = meter.take_streams(streams)
            if excess is None and asked.key:
                held.keys[asked.key] += 1
            elif excess is None:
                held.streams += asked.streams
        return Taken(None if excess is None else (excess.kind, excess.message))

    def give(self, worker: int, given: Give) -> None:
        meter, held = self._meters[given.tenant], self._open[worker][given.tenant]
        meter.give_bytes(given.size_bytes)
        held.size_bytes -= given.size_bytes
        streams = given.streams
        if given.key:
            held.keys -= Counter({given.key: 1})  # Without those that are 0.
            streams = 0 if self._runs(given.tenant, given.key) else 1
        else:
            held.streams -= streams
        meter.give_streams(streams)

    def end(self, worker: int) -> None:
        """Its requests ended with it."""
        for tenant, held in self._open.pop(worker, {}).items():
            meter = self._meters[tenant]
            meter.give_bytes(held.size_bytes)
            ended = held.streams + sum(not self._runs(tenant, key) for key in held.keys)
            meter.give_streams(ended)

    def _runs(self, tenant: str, key: str) -> bool:
        return any(key in open_[tenant].keys for open_ in self._open.values() if tenant in open_)

    def guess(self, address: str, now_s: float) -> float:
        """A key from the address was wrong: seconds until its next try, 0: this one counts."""
        return self._guesses.guess(address, now_s)

    def _meter(self, tenant: str, limits: TenantLimits) -> TenantMeter:
        meter = self._meters.get(tenant)
        if meter is None or self._limits[tenant] != limits:
            settings = TenantSettings.model_construct(
                keys=[], **{name: getattr(limits, name) for name in limits.__struct_fields__}
            )
            if meter is None:
                meter = self._meters[tenant] = TenantMeter(settings)
            else:
                meter.limits = settings
            self._limits[tenant] = limits
        return meter


@dataclass(slots=True)
class _Turn:
    """`waiting` are told when it is theirs, in the order in which they came."""

    worker: int
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)


class Turns:
    """One request at a time looks for the stream of a key and begins it where there is none, so
    that requests with one key at several workers find one stream.
    """

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = {}

    def begin(self, key: str, worker: int, begun: Callable[[], None]) -> None:
        """Call `begun` when it is the worker's turn, at once if no request has it."""
        if (turn := self._turns.get(key)) is not None:
            turn.waiting.append((worker, begun))
            return
        self._turns[key] = _Turn(worker)
        begun()

    def end(self, key: str) -> None:
        turn = self._turns[key]
        if not turn.waiting:
            del self._turns[key]
            return
        turn.worker, begun = turn.waiting.popleft()
        begun()

    def end_all(self, worker: int) -> None:
        """The worker has ended."""
        for key, turn in list(self._turns.items()):
            turn.waiting = deque(each for each in turn.waiting if each[0] != worker)
            if turn.worker == worker:
                self.end(key)
