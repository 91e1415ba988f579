"""The scale of guessed prefill tables (`profiles/guess.py`), learned from the prefills that the
proxy sees.

A guess has the right form, and a factor that depends on the GPUs. Prompts that an instance computes
together share its time, so that one of them alone tells nothing. A busy period is what is measured:
it begins with a prompt for an instance that computes none, and ends when it computes none again, or
has answered a few. Its length, over the time that the guess gives for its prompts, is one sample of
the factor; queues are part of both. The median of the last samples is used, so that single periods
(a cold start, a cached prompt of which the engine does not tell, another proxy's work) do not
count.
"""

from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, StreamId

ENOUGH_PREFILLS = 8  # After so many a table is no guess any more.
MOST = 20.0  # The factor is in [1 / MOST, MOST].
_SAMPLES = 15
_PREFILLS_OF_PERIOD = 8
# Periods whose prompts take less than this many steps' overheads tell nothing of the GPUs.
_LEAST_STEPS = 2


@dataclass(slots=True, eq=False)
class _Period:
    began_s: float
    computing: set[StreamId] = field(default_factory=set)
    prefills: int = 0
    guessed_s: float = 0.0
    is_whole: bool = True  # Each prompt was computed from its beginning, to its end.


class PrefillScale:
    """One factor for all instances: they serve one model, and one guess is made of it."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.prefills = 0  # That the factor was learned from.
        self._label: str | None = None
        self._samples: list[float] = []
        self._periods: dict[InstanceId, _Period] = {}

    @property
    def is_learned(self) -> bool:
        return self.prefills >= ENOUGH_PREFILLS

    def up(self, member: Member) -> None:
        """A process has come up; what ran before it is gone."""
        self._periods.pop(member.id, None)
        if member.guess is not None:
            self._label = member.guess.label
        self.tune(member)

    def tune(self, member: Member) -> None:
        """Give its guess the factor."""
        if member.guess is not None:
            table = replace(member.guess.scaled(self.factor), is_guess=not self.is_learned)
            member.set_table(table)

    def began(self, member: Member, stream: StreamId, now_s: float, *, is_whole: bool) -> None:
        """The instance has got a history to compute; `is_whole`: none of it is there already."""
        if member.guess is None:
            return
        period = self._periods.setdefault(member.id, _Period(now_s))
        period.computing.add(stream)
        period.is_whole &= is_whole

    def done(
        self, member: Member, stream: StreamId, tokens: int, now_s: float, reused: int = 0
    ) -> bool:
        """The instance has computed all of these tokens but `reused`, which it had in its cache;
        return whether the factor has changed.
        """
        period = self._periods.get(member.id)
        if member.guess is None or period is None or stream not in period.computing:
            return False
        period.computing.discard(stream)
        period.prefills += 1
        guess = member.guess
        period.guessed_s += guess.seconds_for(tokens)
        if 0 < reused < tokens:
            period.guessed_s += guess.step_overhead_s - guess.seconds_for(reused)
        if period.computing and period.prefills < _PREFILLS_OF_PERIOD:
            return False
        self._end(member.id, period, now_s)
        least_s = _LEAST_STEPS * member.guess.step_overhead_s
        if not period.is_whole or period.guessed_s < least_s:
            return False
        factor = (now_s - period.began_s) / period.guessed_s
        self._samples = [*self._samples, min(max(factor, 1 / MOST), MOST)][-_SAMPLES:]
        self.prefills += period.prefills
        self.factor = median(self._samples)
        return True

    def left(self, member: Member, stream: StreamId, now_s: float) -> None:
        """The instance is not waited for any more: how much of it was computed is not known."""
        period = self._periods.get(member.id)
        if period is None or stream not in period.computing:
            return
        period.computing.discard(stream)
        period.is_whole = False
        if not period.computing:
            self._end(member.id, period, now_s)

    def snapshot(self) -> dict[str, Any] | None:
        """Plain data for people; None: no table is a guess."""
        if self._label is None:
            return None
        return {
            "label": self._label,
            "is_guess": not self.is_learned,
            "factor": self.factor,
            "prefills": self.prefills,
        }

    def _end(self, instance: InstanceId, period: _Period, now_s: float) -> None:
        if period.computing:
            # What runs on has begun in this period, and the next one has the rest of it.
            self._periods[instance] = _Period(now_s, period.computing, is_whole=period.is_whole)
        else:
            del self._periods[instance]
