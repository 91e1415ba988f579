"""Lateness of this process's own event loop, during which silence is no evidence against another
process.

| state   | the loop                                  | what counts as another's silence           |
| ------- | ----------------------------------------- | ------------------------------------------ |
| calm    | runs on time                              | all time but the delays of the loop itself |
| starved | was late for more than a quarter of the   | nothing; but of one spell of starvation at |
|         | last second or so, or by `STARVED_S` once | most `EXCUSED_S` of time in which it ran   |

A starved process shares its CPU with whatever starves it, and often with the processes that it
watches, so it blames no instance and no peer for silence. Sockets that the kernel closes or refuses
are evidence as ever. The bound keeps a hung instance from being waited for as long as a machine is
overloaded.
"""

from dataclasses import dataclass, field
from typing import Any

# A loop is starved while this many seconds of delay are in the bucket.
STARVED_S = 0.25
# Delay that leaves the bucket in each second in which the loop runs.
_LEAK = 0.25
_FULL_S = 0.75  # Most delay in the bucket, so a spell ends 2 s after its last delay at the latest.
EXCUSED_S = 10.0
# A delay from which on the process counts as paused, not only busy.
_PAUSE_S = 1.0
# Time before a pause in which data may have arrived that is read after it.
_BEFORE_PAUSE_S = 0.05


@dataclass(slots=True, eq=False)
class Lateness:
    """Sums the delays of an event loop, which calls `looked` at each of its timers."""

    looked_s: float  # Time of the last look.
    late_s: float = 0.0  # Sum of all delays.
    # Sum of the time that is no process's silence: delays, and starved time within its bound.
    excused_s: float = 0.0
    spells: int = 0  # Number of spells of starvation.
    spell_late_s: float = 0.0  # Sum of the delays of the last spell.
    starved_s: float | None = None  # Time of the last delay of a spell; None: no spell yet.
    # Start and end of the last pause; None: no pause yet.
    pause: tuple[float, float] | None = None
    _bucket_s: float = field(default=0.0, init=False)
    _may_excuse_s: float = field(default=0.0, init=False)

    def looked(self, due_s: float, now_s: float) -> None:
        """Note a timer that was due at `due_s`. Timers may overlap: no delay counts twice."""
        passed_s = max(0.0, now_s - self.looked_s)
        late_s = min(passed_s, max(0.0, now_s - due_s))
        ran_s, was_starved = passed_s - late_s, self.is_starved
        self.looked_s = max(self.looked_s, now_s)
        self._bucket_s = max(0.0, self._bucket_s - _LEAK * ran_s)
        if was_starved:
            excused_s = min(ran_s, self._may_excuse_s)
            self._may_excuse_s -= excused_s
            self.excused_s += excused_s
        if late_s <= 0.0:
            return
        self.late_s += late_s
        self.excused_s += late_s
        self._bucket_s = min(_FULL_S, self._bucket_s + late_s)
        if late_s > _PAUSE_S:
            self.pause = due_s - _BEFORE_PAUSE_S, now_s
        if self.is_starved:
            if not was_starved:
                self.spells, self.spell_late_s, self._may_excuse_s = self.spells + 1, 0.0, EXCUSED_S
            self.spell_late_s, self.starved_s = self.spell_late_s + late_s, now_s

    @property
    def is_starved(self) -> bool:
        return self._bucket_s >= STARVED_S

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return the starvation as plain data. `late_s` is of the last spell."""
        ago_s = None if self.starved_s is None else now_s - self.starved_s
        found = {"now": self.is_starved, "spells": self.spells, "late_s": self.spell_late_s}
        return {**found, "ago_s": ago_s}

    def awake_since_s(self, due_s: float | None, now_s: float) -> float:
        """Return the time since which the process runs: now, or the start of a pause that has just
        ended. `due_s`: time of the next timer, which has not looked yet (None: no timer).
        """
        if due_s is not None and now_s - due_s > _PAUSE_S:
            return due_s - _BEFORE_PAUSE_S
        if self.pause is not None and now_s - self.pause[1] < _PAUSE_S:
            return self.pause[0]
        return now_s
