"""Recognition of a vLLM server's process, which vLLM itself does not identify.

Marks tell processes apart: the start time in `/metrics`, the engine id in prefill's hand-offs. A
server may have several processes behind its port, and `/metrics` of several API servers has no
start time. So a new mark means a new process only with further evidence:

| a read of `/metrics` shows         | watch stands | watch connection ended  | server was lost |
| ---------------------------------- | ------------ | ----------------------- | --------------- |
| a mark that was seen before        | same         | same                    | same            |
| a new mark, after one mark only    | same (*)     | new process             | new process     |
| a new mark, after several marks    | same (*)     | same (*)                | new process     |
| no mark, counters that went on     | same         | same                    | new process     |
| no mark, counters that did not     | same         | new process             | new process     |

(*) A new process once this has been the only start time for `REPLACED_S`: behind a gateway the
connection outlives a restart.

"Lost" means that a request of the watch failed; its streams are at other servers by then. Counters
went on if they are above 0 and not lower than at the last read: a new process starts at 0. Taking
one process for two is safe, and moves its streams. Taking two for one spoils a prediction: the
first one's streams have ended with their connections.
"""

from enum import IntEnum

REPLACED_S = 10.0
_MOST_MARKS = 256


def engine_mark(engine_id: str) -> str:
    """Return the mark of a NIXL engine id: its part that all engines of one server (data parallel)
    share.
    """
    return f"engine {engine_id.split('_dp')[0]}"


class _Doubt(IntEnum):
    NONE = 0
    ENDED = 1  # The idle connection of the watch has ended.
    LOST = 2  # A request of the watch has failed.


class ProcessIdentity:
    """Numbers the processes behind one URL: each new process gets a higher epoch."""

    def __init__(self) -> None:
        self.epoch = 0  # Number of the present process; 0: no process met.
        # Marks seen so far, with the epoch in which each was seen last; the latest mark is last.
        self._marks: dict[str, int] = {}
        self._doubt = _Doubt.NONE
        self._counted: float | None = None
        # The one start time that all reads since `_alone_s` have shown, and whether it was new
        # then.
        self._alone, self._alone_s, self._alone_is_new = "", 0.0, False

    @property
    def is_in_doubt(self) -> bool:
        """True if the process may have been replaced since the last read of `/metrics`."""
        return self._doubt is not _Doubt.NONE

    def connection_ended(self) -> None:
        """Note that the watch's idle connection has ended, so the process may have been
        replaced.
        """
        self._doubt = max(self._doubt, _Doubt.ENDED)

    def lost(self) -> None:
        """Note that a request of the watch has failed, so the server counts as lost."""
        self._doubt = _Doubt.LOST

    def noted(self, engine_id: str) -> None:
        """Keep the mark of a NIXL engine id that the process has shown."""
        if self.epoch and not self.is_in_doubt:
            self._keep(engine_mark(engine_id))

    def read(
        self,
        started_s: float | None,
        other_mark: str | None,
        counted: float | None,
        *,
        now_s: float,
        wall_s: float,
    ) -> int:
        """Return the epoch of the process that has just answered `/metrics`.

        other_mark: mark shown beside or in place of the start time.
        counted: sum of counters that only rise while the process lives; None: no counters.
        wall_s: time that numbers a process without a start time.
        """
        start = "" if started_s is None else f"start {started_s!r}"
        marks = [mark for mark in (start, other_mark) if mark]
        is_replaced = self._has_replaced(start, now_s)
        if not self.epoch or is_replaced or self._is_new(marks, counted):
            number = round(100 * (wall_s if started_s is None else started_s))
            self.epoch = max(self.epoch + 1, number)
            self._alone_is_new = False
        for mark in marks:
            self._keep(mark)
        self._doubt, self._counted = _Doubt.NONE, counted
        return self.epoch

    def _is_new(self, marks: list[str], counted: float | None) -> bool:
        if self._doubt is _Doubt.NONE or any(mark in self._marks for mark in marks):
            return False
        if self._doubt is _Doubt.LOST:
            return True
        if marks:
            return self._marks_like(marks[0]) <= 1
        before = self._counted
        return not (before and counted is not None and counted >= before)

    def _marks_like(self, mark: str) -> int:
        """Return how many marks of the same kind the process of this epoch has shown."""
        kind = mark.split()[0]
        return sum(
            epoch == self.epoch and each.split()[0] == kind for each, epoch in self._marks.items()
        )

    def _has_replaced(self, start: str, now_s: float) -> bool:
        """Return whether a start time, new when first seen, has been the only one for
        `REPLACED_S`.
        """
        if start != self._alone:
            self._alone, self._alone_s = start, now_s
            self._alone_is_new = bool(start) and start not in self._marks
        return self._alone_is_new and now_s - self._alone_s >= REPLACED_S

    def _keep(self, mark: str) -> None:
        self._marks.pop(mark, None)
        self._marks[mark] = self.epoch
        if len(self._marks) > _MOST_MARKS:
            del self._marks[next(iter(self._marks))]
