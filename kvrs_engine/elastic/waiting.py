"""Time limits of an instance for its ranks: at the start, in a batch, in a re-forming, and for
restarts of missing ranks.
"""

from collections import Counter
from dataclasses import InitVar, dataclass, field

# Ranks of a re-forming hang after this time plus the predicted duration without any report. Each
# arrived unit is a report; long silences are a process that loads, a GB-sized unit from a slow
# disk, or the join of a large formation.
HUNG_S = 60.0
# Limit of a start beside computing ranks, in multiples of the first start; no rank waits for it.
BESIDE_FACTOR = 8.0
# Limit of the silence of starting ranks, in multiples of the time of the last report: ranks do
# similar work at the start.
_ALIKE_FACTOR = 8.0
# A batch hangs if no rank progresses for this multiple of its predicted time, at least `_HANG_S`.
_HANG_FACTOR = 8.0
_HANG_S = 1.0
UNPREDICTED_S = 60.0
MAX_STARTS = 3  # Limit of starts of one rank within a re-forming that needs it.
# Delay before a lost rank is restarted; doubled each time that the rank dies before it serves.
AGAIN_S = 0.5
_AGAIN_MAX_S = 60.0
# Number of checks within the limit of silence. A head that was itself suspended misses one check,
# and receives the pending reports before the next.
_LOOKS = 6


def start_limit_s(took_s: float) -> float | None:
    """Return the limit of silence for starting ranks, whose last report came after `took_s`; None:
    no limit while all ranks load.
    """
    return HUNG_S + _ALIKE_FACTOR * took_s if took_s else None


def batch_limit_s(predicted_s: float | None) -> float:
    """Return the limit of a batch's time without progress."""
    return UNPREDICTED_S if predicted_s is None else max(_HANG_S, _HANG_FACTOR * predicted_s)


@dataclass(slots=True)
class MissingRank:
    due_s: float  # Time of the next start.
    wait_s: float = AGAIN_S
    began_s: float | None = None  # Start of its running process; None: no process.
    is_loaded: bool = False

    def put_off(self, now_s: float) -> None:
        """Delay the next start, after the process was used, has ended or was not started."""
        self.due_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _AGAIN_MAX_S)
        self.began_s, self.is_loaded = None, False


@dataclass(frozen=True, slots=True)
class Due:
    """The actions that are due."""

    start: tuple[int, ...] = ()  # Missing ranks to start.
    end: tuple[int, ...] = ()  # Missing ranks whose loading process hangs and must be ended.
    is_silent: bool = False  # The ranks of the re-forming hang.


@dataclass(slots=True)
class RankWaits:
    start_s: InitVar[float]  # Time of a process's start, measured at the start of the instance.
    missing: dict[int, MissingRank] = field(default_factory=dict)
    _starts: Counter[int] = field(default_factory=Counter)  # Starts in this re-forming.
    _silent_most_s: float | None = None  # Limit of silence; None: no re-forming.
    _next_look_s: float = 0.0
    _looks: int = 0
    _load_most_s: float = field(init=False)

    def __post_init__(self, start_s: float) -> None:
        self._load_most_s = HUNG_S + BESIDE_FACTOR * start_s

    def begin(self, ready_s: float, now_s: float) -> None:
        """Begin a re-forming, or restart the current one; `ready_s` is its predicted time."""
        if self._silent_most_s is None:
            self._starts.clear()
        self._silent_most_s = HUNG_S + ready_s
        self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """Note a report of any rank."""
        self._looks = 0
        self._put_off(now_s)

    def may_start(self, rank: int) -> bool:
        """Count a start of a rank that the re-forming needs; return whether it is allowed."""
        self._starts[rank] += 1
        return self._starts[rank] <= MAX_STARTS

    def end(self) -> None:
        self._silent_most_s = None

    def miss(self, rank: int, now_s: float, *, at_once: bool = False) -> None:
        """Schedule the restart of a missing rank, unless it is already scheduled."""
        self.missing.setdefault(rank, MissingRank(now_s + (0.0 if at_once else AGAIN_S)))

    def started(self, rank: int, now_s: float) -> None:
        self.missing[rank].began_s = now_s

    def next_s(self) -> float | None:
        """Return the latest time of the next call of `due`; None: not before another event."""
        if self._silent_most_s is not None:
            return self._next_look_s
        moments_s = [
            each.due_s if each.began_s is None else each.began_s + self._load_most_s
            for each in self.missing.values()
            if not each.is_loaded
        ]
        return min(moments_s, default=None)

    def due(self, now_s: float) -> Due:
        """Return whether the ranks of a re-forming hang; else, the missing ranks to start or
        end.
        """
        if self._silent_most_s is not None:
            return Due(is_silent=self._is_silent(now_s))
        missing = self.missing.items()
        hanging = [
            rank
            for rank, each in missing
            if each.began_s is not None
            and not each.is_loaded
            and each.began_s + self._load_most_s <= now_s
        ]
        due = [rank for rank, each in missing if each.began_s is None and each.due_s <= now_s]
        return Due(start=tuple(due), end=tuple(hanging))

    def _is_silent(self, now_s: float) -> bool:
        if now_s < self._next_look_s:
            return False
        self._looks += 1
        self._put_off(now_s)
        return self._looks % _LOOKS == 0

    def _put_off(self, now_s: float) -> None:
        if self._silent_most_s is not None:
            self._next_look_s = now_s + self._silent_most_s / _LOOKS
