"""Limits that hold for all workers of a proxy together, kept by their supervisor.

Tenants' limits are exact: a worker asks before it takes a stream, bytes, tokens or a request of a
tenant with limits, and says what it gives back. A worker that has ended gives back all at once.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from kvrs.config.tenants import TenantSettings
from kvrs.control.tenants import Excess, GuessLimit, TenantMeter

Rates = list[tuple[str, int, int, float]]  # As `TenantMeter.rates`.


class TenantLimits(msgspec.Struct, frozen=True, array_like=True):
    """Those of a tenant, as in the key file."""

    streams: int | None
    requests_per_s: float | None
    open_bytes: int | None
    tokens_per_min: int | None

    @property
    def exist(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__struct_fields__)


class Take(msgspec.Struct, array_like=True):
    """What a request needs of a tenant's limits; zeros are not asked for."""

    tenant: str
    limits: TenantLimits
    requests: int = 0
    size_bytes: int = 0
    streams: int = 0
    tokens: int = 0
    key: str = ""  # Of the stream's record: at however many workers, it is one stream.


class Taken(msgspec.Struct, array_like=True):
    """`excess`: what the tenant has no room for; nothing was taken then."""

    excess: tuple[str, str, str, float] | None
    rates: Rates


class Give(msgspec.Struct, array_like=True):
    """What was taken, and the tokens that were really used."""

    tenant: str
    size_bytes: int
    streams: int
    tokens: int
    used: int
    key: str = ""


@dataclass(slots=True)
class _Open:
    """What one worker has of one tenant. `keys` counts its requests for streams with a key."""

    size_bytes: int = 0
    streams: int = 0  # Without a key.
    keys: Counter[str] = field(default_factory=Counter)


class SharedLimits:
    """Every question takes the time."""

    def __init__(self) -> None:
        self._meters: dict[str, TenantMeter] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._open: dict[int, dict[str, _Open]] = {}  # By worker, then tenant.
        self._guesses = GuessLimit()

    def take(self, worker: int, asked: Take, now_s: float) -> Taken:
        meter = self._meter(asked.tenant, asked.limits, now_s)
        held = self._open.setdefault(worker, {}).setdefault(asked.tenant, _Open())
        excess = None
        if asked.requests:
            excess = meter.take_request(now_s)
        if excess is None and asked.size_bytes:
            excess = meter.take_bytes(asked.size_bytes)
            held.size_bytes += 0 if excess else asked.size_bytes
        if excess is None and (asked.streams or asked.tokens):
            streams = 0 if asked.key and self._runs(asked.tenant, asked.key) else asked.streams
            excess = meter.take_streams(streams, asked.tokens, now_s)
            if excess is None and asked.key:
                held.keys[asked.key] += 1
            elif excess is None:
                held.streams += asked.streams
        return Taken(None if excess is None else _plain(excess), meter.rates(now_s))

    def give(self, worker: int, given: Give, now_s: float) -> None:
        meter, held = self._meters[given.tenant], self._open[worker][given.tenant]
        meter.give_bytes(given.size_bytes)
        held.size_bytes -= given.size_bytes
        streams = given.streams
        if given.key:
            held.keys -= Counter({given.key: 1})  # Without those that are 0.
            streams = 0 if self._runs(given.tenant, given.key) else 1
        else:
            held.streams -= streams
        meter.end_streams(streams, given.tokens, given.used, now_s)

    def end(self, worker: int, now_s: float) -> None:
        """Its requests ended with it. Tokens that were expected count as used."""
        for tenant, held in self._open.pop(worker, {}).items():
            meter = self._meters[tenant]
            meter.give_bytes(held.size_bytes)
            ended = held.streams + sum(not self._runs(tenant, key) for key in held.keys)
            meter.end_streams(ended, 0, 0, now_s)

    def _runs(self, tenant: str, key: str) -> bool:
        return any(key in open_[tenant].keys for open_ in self._open.values() if tenant in open_)

    def guess(self, address: str, now_s: float) -> float:
        """A key from the address was wrong: seconds until its next try, 0: this one counts."""
        return self._guesses.guess(address, now_s)

    def _meter(self, tenant: str, limits: TenantLimits, now_s: float) -> TenantMeter:
        meter = self._meters.get(tenant)
        if meter is None or self._limits[tenant] != limits:
            settings = TenantSettings.model_construct(
                keys=[], **{name: getattr(limits, name) for name in limits.__struct_fields__}
            )
            if meter is None:
                meter = self._meters[tenant] = TenantMeter(settings, now_s)
            else:
                meter.change(settings, now_s)
            self._limits[tenant] = limits
        return meter


def _plain(excess: Excess) -> tuple[str, str, str, float]:
    return excess.limit, excess.kind, excess.message, excess.retry_after_s


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
