"""The identity of a vLLM server's process, which vLLM itself does not report.

Marks tell processes apart: the start time in `/metrics`, the engine id in a hand-off of prefill. A
server may have several processes behind its port, and `/metrics` of several API servers has no
start time at all. So a mark that was not seen before is a new process only where something else
says so too:

| a read of `/metrics` shows         | watch stands | watch connection ended  | server was lost |
| ---------------------------------- | ------------ | ----------------------- | --------------- |
| a mark that was seen before        | same         | same                    | same            |
| a new mark, after one mark only    | same (*)     | new process             | new process     |
| a new mark, after several marks    | same (*)     | same (*)                | new process     |
| no mark, counters that went on     | same         | same                    | new process     |
| no mark, counters that did not     | same         | new process             | new process     |

(*) A new process all the same once it is the only start time that was seen for `REPLACED_S`: behind
a gateway the connection outlives a restart.

"Lost" means that a request of the watch failed; its streams are at other servers by then. Counters
went on if they are above 0 and not lower than at the read before: those of a new process begin at
0. An error on the safe side takes one process for two, and moves its streams. The other one takes
two for one, and costs a prediction: the streams of the first have ended with their connections.
"""

from enum import IntEnum

REPLACED_S = 10.0
_MOST_MARKS = 256


def engine_mark(engine_id: str) -> str:
    """The mark of NIXL's engine id; engines of one server (data parallel) have one in common."""
    return f"engine {engine_id.split('_dp')[0]}"


class _Doubt(IntEnum):
    NONE = 0
    ENDED = 1  # The idle connection of the watch has ended.
    LOST = 2  # A request of the watch has failed.


class ProcessIdentity:
    """Numbers the processes behind one URL: a higher epoch is another process."""

    def __init__(self) -> None:
        self.epoch = 0  # 0: none was met.
        # The epoch in which each was seen last; the one that was seen last is last.
        self._marks: dict[str, int] = {}
        self._doubt = _Doubt.NONE
        self._counted: float | None = None
        self._alone = ""  # The start time of the last reads, ...
        self._alone_s = 0.0  # ... the first of which was then, ...
        self._alone_is_new = False  # ... when it had not been seen before.

    @property
    def is_in_doubt(self) -> bool:
        """It may be another process since the last read."""
        return self._doubt is not _Doubt.NONE

    def connection_ended(self) -> None:
        """The idle connection of the watch has ended."""
        self._doubt = max(self._doubt, _Doubt.ENDED)

    def lost(self) -> None:
        """The watch has ended, since a request of it failed."""
        self._doubt = _Doubt.LOST

    def noted(self, engine_id: str) -> None:
        """The process has shown this engine id of NIXL."""
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

        other_mark: shown beside or in place of its start time.
        counted: a sum of counters that only rise while it lives; None: it has none.
        wall_s: the time by which a process without a start time is numbered.
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
        """How many marks of this kind the process of this epoch has shown."""
        kind = mark.split()[0]
        return sum(
            epoch == self.epoch and each.split()[0] == kind for each, epoch in self._marks.items()
        )

    def _has_replaced(self, start: str, now_s: float) -> bool:
        """A start time that was new when it was seen first has been the only one for long."""
        if start != self._alone:
            self._alone, self._alone_s = start, now_s
            self._alone_is_new = bool(start) and start not in self._marks
        return self._alone_is_new and now_s - self._alone_s >= REPLACED_S

    def _keep(self, mark: str) -> None:
        self._marks.pop(mark, None)
        self._marks[mark] = self.epoch
        if len(self._marks) > _MOST_MARKS:
            del self._marks[next(iter(self._marks))]
