"""An instance's limits of waiting for its ranks and of starting them: those that start with it or
compute a batch, those that a re-forming awaits, and those that are missing from the layout that
serves.

Pure: moments are arguments.
"""

from collections import Counter
from dataclasses import InitVar, dataclass, field

# Ranks that are awaited in a re-forming hang if nothing is heard for so long, and as long again as
# the whole of it was predicted to take. Each unit is an answer of its own: what may be as silent is
# a process that loads, a unit of a GB from a slow disk, or one of a large formation that is joined.
HUNG_S = 60.0
# A rank that starts beside others that compute may take so many times as long as at the start:
# nothing waits for it.
BESIDE_FACTOR = 8.0
# Ranks that start have alike to do: from one answer to the next it may take so many times as long
# as it had taken until then.
_ALIKE_FACTOR = 8.0
# A batch in which no rank comes further for longer has one that hangs: so many times as long as all
# of it was predicted to take, but at least so long.
_HANG_FACTOR = 8.0
_HANG_S = 1.0
UNPREDICTED_S = 60.0
MAX_STARTS = 3  # Of one rank within a re-forming that needs it.
# A lost rank is started again after so long; each time that it dies before it serves, twice as
# long.
AGAIN_S = 0.5
_AGAIN_MAX_S = 60.0
# In the time after which ranks that say nothing hang. A process that was stopped itself, as all of
# a machine may be, has missed one look, and hears before the next one what was said meanwhile.
_LOOKS = 6


def start_limit_s(took_s: float) -> float | None:
    """How long ranks may be silent as they start, of which the last answer came after `took_s`;
    None: all of them load, which may take any time.
    """
    return HUNG_S + _ALIKE_FACTOR * took_s if took_s else None


def batch_limit_s(predicted_s: float | None) -> float:
    """How long a batch may take without any progress."""
    return UNPREDICTED_S if predicted_s is None else max(_HANG_S, _HANG_FACTOR * predicted_s)


@dataclass(slots=True)
class MissingRank:
    due_s: float  # Its next start.
    wait_s: float = AGAIN_S
    began_s: float | None = None  # The start of the process that is to join; None: there is none.
    is_loaded: bool = False

    def put_off(self, now_s: float) -> None:
        """Its process is used, has ended or was not started."""
        self.due_s = now_s + self.wait_s
        self.wait_s = min(2 * self.wait_s, _AGAIN_MAX_S)
        self.began_s, self.is_loaded = None, False


@dataclass(frozen=True, slots=True)
class Due:
    """Work that is due after waiting."""

    start: tuple[int, ...] = ()  # Missing ranks.
    end: tuple[int, ...] = ()  # Processes of missing ranks that hang as they load.
    is_silent: bool = False  # The ranks that the re-forming awaits hang.


@dataclass(slots=True)
class RankWaits:
    start_s: InitVar[float]  # Of a process beside others, as measured at the start of the instance.
    missing: dict[int, MissingRank] = field(default_factory=dict)
    _starts: Counter[int] = field(default_factory=Counter)  # In this re-forming.
    _silent_most_s: float | None = None  # None: no re-forming is under way.
    _next_look_s: float = 0.0
    _looks: int = 0
    _load_most_s: float = field(init=False)

    def __post_init__(self, start_s: float) -> None:
        self._load_most_s = HUNG_S + BESIDE_FACTOR * start_s

    # A re-forming.

    def begin(self, ready_s: float, now_s: float) -> None:
        """A re-forming begins that is predicted to take so long, or the one under way anew."""
        if self._silent_most_s is None:
            self._starts.clear()
        self._silent_most_s = HUNG_S + ready_s
        self.heard(now_s)

    def heard(self, now_s: float) -> None:
        """A rank has said something."""
        self._looks = 0
        self._put_off(now_s)

    def may_start(self, rank: int) -> bool:
        """Count one more start of a rank that the re-forming needs, unless it died each time."""
        self._starts[rank] += 1
        return self._starts[rank] <= MAX_STARTS

    def end(self) -> None:
        self._silent_most_s = None

    # Missing ranks.

    def miss(self, rank: int, now_s: float, *, at_once: bool = False) -> None:
        """A rank is to be started again, unless that is known already."""
        self.missing.setdefault(rank, MissingRank(now_s + (0.0 if at_once else AGAIN_S)))

    def started(self, rank: int, now_s: float) -> None:
        self.missing[rank].began_s = now_s

    # Time.

    def next_s(self) -> float | None:
        """When `due` is to be called at the latest; None: when something else has happened."""
        if self._silent_most_s is not None:
            return self._next_look_s
        moments_s = [
            each.due_s if each.began_s is None else each.began_s + self._load_most_s
            for each in self.missing.values()
            if not each.is_loaded
        ]
        return min(moments_s, default=None)

    def due(self, now_s: float) -> Due:
        """In a re-forming, whether ranks hang; else missing ranks that are due or hang."""
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
