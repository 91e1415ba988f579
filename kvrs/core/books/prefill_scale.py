"""The scale of guessed prefill tables (`profiles/guess.py`), learned from the prefills that the
proxy observes.

A guessed table has the right form and an unknown factor that depends on the GPUs. Prompts that an
instance computes together share its time, so the time of a single prompt says little. The proxy
measures busy periods: a period begins with a prompt for an idle instance, and ends when the
instance is idle again or has answered a few prompts. Its length, divided by the guessed time of its
prompts, is one sample of the factor. The factor is the median of the last samples, so that single
periods (a cold start, an unreported cached prompt, another proxy's work) do not count.
"""

from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from kvrs.core.model.member import Member
from kvrs.ids import InstanceId, StreamId

ENOUGH_PREFILLS = 8  # Number of prefills after which a table no longer counts as a guess.
MOST = 20.0  # The factor is in [1 / MOST, MOST].
_SAMPLES = 15
_PREFILLS_OF_PERIOD = 8
# Busy periods of fewer guessed step overheads are ignored: they depend little on the GPUs.
_LEAST_STEPS = 2


@dataclass(slots=True, eq=False)
class _Period:
    began_s: float
    computing: set[StreamId] = field(default_factory=set)
    prefills: int = 0
    guessed_s: float = 0.0
    is_whole: bool = True  # Every prompt was computed completely.


class PrefillScale:
    """Learns one factor for all instances: they serve one model, with one guessed table."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.prefills = 0  # Number of prefills from which the factor was learned.
        self._label: str | None = None
        self._samples: list[float] = []
        self._periods: dict[InstanceId, _Period] = {}

    @property
    def is_learned(self) -> bool:
        return self.prefills >= ENOUGH_PREFILLS

    @property
    def least_share(self) -> float:
        """Return the lower quartile of the samples, as a share of the factor: of a time predicted
        by it, the part that even a fast prefill takes. 0.0: the factor is still a guess.
        """
        if not self.is_learned:
            return 0.0
        if len(self._samples) < 2:
            return 1.0  # One busy period of many prefills.
        return min(1.0, quantiles(self._samples, n=4, method="inclusive")[0] / self.factor)

    def up(self, member: Member) -> None:
        """Handle the start of an instance's process: drop the busy period of the previous one."""
        self._periods.pop(member.id, None)
        if member.guess is not None:
            self._label = member.guess.label
        self.tune(member)

    def tune(self, member: Member) -> None:
        """Scale the instance's guessed table by the learned factor."""
        if member.guess is not None:
            table = replace(member.guess.scaled(self.factor), is_guess=not self.is_learned)
            member.set_table(table)

    def began(self, member: Member, stream: StreamId, now_s: float, *, is_whole: bool) -> None:
        """Note that the instance begins to compute a history; `is_whole`: no part is cached."""
        if member.guess is None:
            return
        period = self._periods.setdefault(member.id, _Period(now_s))
        period.computing.add(stream)
        period.is_whole &= is_whole

    def done(
        self, member: Member, stream: StreamId, tokens: int, now_s: float, reused: int = 0
    ) -> bool:
        """Note that the instance has computed a history of `tokens`, of which `reused` came from
        its cache; return whether the factor has changed.
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
        """Note that the proxy no longer waits for the stream's prefill: the busy period gives no
        sample, because the computed part is unknown.
        """
        period = self._periods.get(member.id)
        if period is None or stream not in period.computing:
            return
        period.computing.discard(stream)
        period.is_whole = False
        if not period.computing:
            self._end(member.id, period, now_s)

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state as plain data, for display; None: no table is a guess."""
        if self._label is None:
            return None
        return {
            "label": self._label,
            "is_guess": not self.is_learned,
            "factor": self.factor,
            "prefills": self.prefills,
            "least_share": self.least_share,
        }

    def _end(self, instance: InstanceId, period: _Period, now_s: float) -> None:
        if period.computing:
            # The prompts that still run belong to the next period with their remaining time.
            self._periods[instance] = _Period(now_s, period.computing, is_whole=period.is_whole)
        else:
            del self._periods[instance]
