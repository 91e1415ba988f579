"""Lengths and times of prefills, learned from those that the proxy observes.

The size of a request in bytes gives a first guess of its tokens. The number of tokens per byte
depends on the tokenizer and on the text: prose, code, or a script with several bytes a character.

A guessed table (`profiles/guess.py`) has the right form and an unknown factor that depends on the
GPUs; a table that the settings name may be that of another machine or version. Prompts that an
instance computes together share its time, so the time of a single prompt says little. The proxy
measures busy periods: a period begins with a prompt for an idle instance, and ends when the
instance is idle again or has answered a few prompts. Its length, divided by the guessed time of its
prompts, is one sample of the factor. The factor is the median of the last samples, so that single
periods (a cold start, an unreported cached prompt, another proxy's work) do not count. A table that
was measured somewhere is scaled only after several periods of enough prefills.

Decode steps beside the prompts are part of a period, as they are of the prompts' real time. Work of
other proxies that fills most of an instance's time makes the factor too large.
"""

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from statistics import median, quantiles
from typing import Any

from kvrs.core.model.member import Member, has_moved
from kvrs.ids import InstanceId, StreamId
from kvrs.profiles.tables import PrefillTable

_KEPT = 31 / 32  # Decay of the weight of earlier prompts with each new prompt.
_MOST = 8.0  # The factor is in [1 / _MOST, _MOST].
_NAMES_MAX = 256


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    guessed: float = 0.0


class PromptLengths:
    """Learns the ratio of real to guessed tokens of each model or adapter, weighted by length."""

    def __init__(self) -> None:
        self._sums: OrderedDict[str, _Sums] = OrderedDict()

    def expected(self, name: str, guessed_tokens: int) -> int:
        """Return `guessed_tokens` corrected by the ratio learned for this model or adapter, at
        least 1.
        """
        sums = self._sums.get(name)
        factor = 1.0 if sums is None else sums.tokens / sums.guessed
        return max(1, round(guessed_tokens * min(_MOST, max(1 / _MOST, factor))))

    def observe(self, name: str, guessed_tokens: int, tokens: int) -> None:
        """Note the real length of a prompt; `tokens` is 0 if the engine sent no token ids."""
        if guessed_tokens <= 0 or tokens <= 0:
            return
        sums = self._sums.setdefault(name, _Sums())
        self._sums.move_to_end(name)
        sums.tokens = sums.tokens * _KEPT + tokens
        sums.guessed = sums.guessed * _KEPT + guessed_tokens
        if len(self._sums) > _NAMES_MAX:
            self._sums.popitem(last=False)


ENOUGH_PREFILLS = 8  # Number of prefills after which a table no longer counts as a guess.
# Number of busy periods from which the factor of a measured table is taken.
_ENOUGH_PERIODS = 3
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
    """Learns one factor for all instances: they serve one model, with one table."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._applied = 1.0  # The factor of the tables, which follow only larger moves.
        # The last table that was scaled, and the scaled one; None: it must be made anew.
        self._made: tuple[PrefillTable, PrefillTable] | None = None
        self.prefills = 0  # Number of prefills from which the factor was learned.
        self._label: str | None = None
        self._is_guess = False
        self._samples: list[float] = []
        self._periods: dict[InstanceId, _Period] = {}

    @property
    def is_learned(self) -> bool:
        return self.prefills >= ENOUGH_PREFILLS

    @property
    def _is_sure(self) -> bool:
        """True if the factor counts for a measured table."""
        return self.is_learned and len(self._samples) >= _ENOUGH_PERIODS

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
        if member.times.observed is not None:
            self._label = member.times.observed.label
            self._is_guess = member.times.has_guess
        self.tune(member)

    def tune(self, member: Member) -> None:
        """Scale the instance's table by the learned factor, unless it has measured the table."""
        if (table := member.times.observed) is None or not (table.is_guess or self._is_sure):
            return
        if self._made is None or self._made[0] is not table:
            scaled = table.scaled(self._applied)
            is_guess = table.is_guess and not self.is_learned
            self._made = table, replace(scaled, is_guess=is_guess)
        member.times.set_table(self._made[1])

    def began(self, member: Member, stream: StreamId, now_s: float, *, is_whole: bool) -> None:
        """Note that the instance begins to compute a history; `is_whole`: no part is cached."""
        if member.times.observed is None:
            return
        period = self._periods.setdefault(member.id, _Period(now_s))
        period.computing.add(stream)
        period.is_whole &= is_whole

    def done(
        self, member: Member, stream: StreamId, tokens: int, now_s: float, reused: int = 0
    ) -> bool:
        """Note that the instance has computed a history of `tokens`, of which `reused` came from
        its cache; return whether tables must be scaled anew.
        """
        period, table = self._periods.get(member.id), member.times.observed
        if table is None or period is None or stream not in period.computing:
            return False
        period.computing.discard(stream)
        period.prefills += 1
        period.guessed_s += table.seconds_for(tokens)
        if 0 < reused < tokens:
            period.guessed_s += table.step_overhead_s - table.seconds_for(reused)
        if period.computing and period.prefills < _PREFILLS_OF_PERIOD:
            return False
        self._end(member.id, period, now_s)
        least_s = _LEAST_STEPS * table.step_overhead_s
        if not period.is_whole or period.guessed_s < least_s:
            return False
        factor = (now_s - period.began_s) / period.guessed_s
        before = self.is_learned, self._is_sure
        self._samples = [*self._samples, min(max(factor, 1 / MOST), MOST)][-_SAMPLES:]
        self.prefills += period.prefills
        self.factor = median(self._samples)
        is_same = before == (self.is_learned, self._is_sure)
        if is_same and not has_moved(self.factor, self._applied):
            return False
        self._applied, self._made = self.factor, None
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
        """Return the state as plain data, for display; None: instances measure their tables."""
        if self._label is None:
            return None
        return {
            "label": self._label,
            "is_guess": self._is_guess and not self.is_learned,
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
