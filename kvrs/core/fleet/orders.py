"""Orders of operators to drain instances, at whichever proxy they were given.

Each proxy has the last order about each instance that it knows, and shows all of them to the others
with its hellos, again and again: one that is missed is heard later. Of two orders about one
instance that with the higher version counts everywhere. A version is above all that were known
where the order was given, and not below the wall clock there, so that a proxy that has just started
and has not heard of others gives none that is outdated.
"""

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from kvrs.core.fleet.drains import Drains
from kvrs.core.fleet.known import Instances
from kvrs.ids import InstanceId
from kvrs.protocol.mirror import StandingOrder


def next_version(held: Iterable[int], wall_s: float) -> int:
    """The version of an order that counts before those with the versions that are held."""
    return max(max(held, default=0) + 1, int(wall_s * 1000))


class _Held(msgspec.Struct, frozen=True):
    version: int
    given_at: str
    moves_at_s: float | None  # By this proxy's clock. None: it is not to be drained any more.

    def counts_before(self, order: StandingOrder) -> bool:
        return (self.version, self.given_at) >= (order.version, order.given_at)


class DrainOrders:
    """Orders to drain that one proxy holds; `me` is its id."""

    def __init__(self, me: str, instances: Instances, drains: Drains) -> None:
        self._me = me
        self._instances = instances
        self._drains = drains
        self._held: dict[InstanceId, _Held] = {}

    def give(
        self, instance: InstanceId, drain_s: float | None, now_s: float, wall_s: float
    ) -> None:
        """Drain an instance that is known here, or (None) use it again."""
        version = next_version((held.version for held in self._held.values()), wall_s)
        self.take([StandingOrder(instance, version, self._me, drain_s)], now_s)

    def take(self, orders: Iterable[StandingOrder], now_s: float) -> bool:
        """Obey those that are newer than what is held; whether there was any.

        One about an instance that is not known here is left out.
        """
        has_newer = False
        for order in orders:
            name, held = order.instance, self._held.get(order.instance)
            is_old = held is not None and held.counts_before(order)
            if is_old or not self._instances.is_present(name):
                continue
            has_newer = True
            if order.moves_in_s is None:
                self._held[name] = _Held(order.version, order.given_at, None)
                self._drains.end(name, now_s)
            else:
                moves_at_s = now_s + order.moves_in_s
                self._held[name] = _Held(order.version, order.given_at, moves_at_s)
                self._drains.begin(name, order.moves_in_s, now_s)
        return has_newer

    def forget(self, instance: InstanceId) -> None:
        """It is removed here. The order has ended for one of that name that is added later, also
        at proxies that have not removed it.
        """
        if (held := self._held.get(instance)) is not None:
            self._held[instance] = replace(held, version=held.version + 1, moves_at_s=None)

    def shown(self, now_s: float) -> list[StandingOrder]:
        """For other proxies: with the time that is left, since clocks differ.

        None about an instance that is removed here: another proxy may have added it again.
        """
        return [
            StandingOrder(
                instance,
                held.version,
                held.given_at,
                None if held.moves_at_s is None else max(0.0, held.moves_at_s - now_s),
            )
            for instance, held in self._held.items()
            if self._instances.is_present(instance) and not self._drains.leaves(instance)
        ]
