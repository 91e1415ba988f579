"""Step times of an engine, measured for its load reports.

`step_s` is the median time d of the last steps without prompts. `slowness` is the median s of the
last steps in which prompts take at least half of the time. With the prefill table T, the overhead h
of a step and the factor of the present ranks f, such a step takes

    max(d, s * f * h) + s * f * sum(T(new given computed) - h)

So decodes beside the prompts do not count, and a machine that is slower than the table does.
Medians leave out single steps: the first ones after a start, and those in which the process was
stopped.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median

from kvrs.profiles.tables import PrefillTable
from kvrs_engine.scheduling.sequences import Chunk

ENOUGH = 3  # Fewer steps are not reported.
MOST = 100.0  # The slowness is in [1 / MOST, MOST].
# Steps that count: more of those without prompts, of which there are tens a second, so that their
# jitter makes no news.
_DECODES, _PROMPTS = 31, 15


class StepTimes:
    """Notes each step in time that grows with its chunks; reports and steps with prompts sort."""

    def __init__(self, prefill: PrefillTable) -> None:
        """`prefill`: the table of prompts that share steps."""
        self.prefill_factor = 1.0  # Time of prefill with the present ranks, over that with all.
        self._prefill = prefill
        self._decodes: deque[float] = deque(maxlen=_DECODES)
        self._prompts: deque[float] = deque(maxlen=_PROMPTS)

    def note(self, chunks: Iterable[Chunk], took_s: float) -> None:
        """Note a step; decodes need not be among the chunks."""
        overhead_s, prompts_s, has_prompts = self._prefill.step_overhead_s, 0.0, False
        for chunk in chunks:
            tokens = len(chunk.token_ids)
            if tokens - chunk.drafts > 1:
                has_prompts = True
                prompts_s += self._prefill.extra(chunk.first_position, tokens) - overhead_s
        if not has_prompts:
            self._decodes.append(took_s)
        elif prompts_s >= overhead_s and prompts_s > 0:
            # The part of decodes, by their own steps, if it is longer than that of the table.
            slowness = (took_s - self.step_s) / prompts_s
            if not self._decodes or slowness * overhead_s > self.step_s:
                slowness = took_s / (overhead_s + prompts_s)
            self._prompts.append(slowness / self.prefill_factor)

    @property
    def step_s(self) -> float:
        """Return the time of a step without prompts; 0: not known."""
        return median(self._decodes) if len(self._decodes) >= ENOUGH else 0.0

    @property
    def slowness(self) -> float | None:
        """Return the time of steps with prompts over that of the table; None: not known."""
        if len(self._prompts) < ENOUGH:
            return None
        return min(MOST, max(1 / MOST, median(self._prompts)))
