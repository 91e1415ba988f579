"""What the workers of a proxy have sent to each instance, so that each counts what the others have
sent: load reports of instances come too late for requests that come together. Pure.
"""

from collections.abc import Mapping
from typing import NamedTuple

from kvrs.ids import InstanceId


class Booked(NamedTuple):
    work_ms: int  # Predicted compute time of what has no answer yet.
    streams: int  # Those that decode there or will after their prefill.


NOTHING = Booked(0, 0)


def booked_now(booked: Mapping[InstanceId, tuple[float, int]]) -> dict[str, Booked]:
    """From seconds, as `RecoveryPolicy.booked` has them."""
    return {
        name: Booked(round(work_s * 1000), streams) for name, (work_s, streams) in booked.items()
    }


def changes(before: Mapping[str, Booked], now: Mapping[str, Booked]) -> dict[str, Booked]:
    """What differs; an instance that is there no more has nothing."""
    gone = {name: NOTHING for name in before if name not in now}
    return gone | {name: each for name, each in now.items() if before.get(name, NOTHING) != each}


class Loads:
    """The supervisor's: what each worker has, and what each has been told."""

    def __init__(self) -> None:
        self._booked: dict[int, dict[str, Booked]] = {}
        self._told: dict[int, dict[str, Booked]] = {}
        self._is_new = False

    def note(self, worker: int, changed: Mapping[str, Booked]) -> None:
        self._booked.setdefault(worker, {}).update(changed)
        self._is_new = True

    def end(self, worker: int) -> None:
        """The worker has ended: its streams too, and another process begins without news."""
        self._booked.pop(worker, None)
        self._told.pop(worker, None)
        self._is_new = True

    def repeat(self) -> None:
        """Have the next news be all that there is."""
        self._told.clear()
        self._is_new = True

    def news(self, workers: Mapping[int, object]) -> dict[int, dict[str, Booked]]:
        """For each of these workers what the others have, where it has changed."""
        if not self._is_new:
            return {}
        self._is_new = False
        total: dict[str, Booked] = {}
        for booked in self._booked.values():
            for name, each in booked.items():
                work_ms, streams = total.get(name, NOTHING)
                total[name] = Booked(work_ms + each.work_ms, streams + each.streams)
        found: dict[int, dict[str, Booked]] = {}
        for worker in workers:
            own = self._booked.get(worker, {})
            others = {name: _less(each, own.get(name, NOTHING)) for name, each in total.items()}
            if changed := changes(self._told.get(worker, {}), others):
                found[worker] = changed
            self._told[worker] = others
        return found


def _less(total: Booked, own: Booked) -> Booked:
    return Booked(total.work_ms - own.work_ms, total.streams - own.streams)
