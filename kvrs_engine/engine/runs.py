"""The runs of one engine: the acceptance, fencing and end of attempts.

The embedded engine and both stages of DistServe share this code; they differ in the computation.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping

from kvrs.ids import StreamId
from kvrs_engine.engine.hooks import StepHook
from kvrs_engine.engine.requests import GenerationRun, StepOutput
from kvrs_engine.scheduling.sequences import Sequence

# Time for which an ended stream is remembered. A later request can come only from a proxy that was
# suspended for longer, and whose client is gone.
ATTEMPTS_KEPT_S = 300.0
ATTEMPTS_REMEMBERED = 100_000

Attempt = tuple[int, int]  # (owner_epoch, attempt)


class FencedError(Exception):
    """The request's attempt is lower than an attempt already seen for its stream."""


class AttemptBook:
    """Records the highest attempt of each stream for `ATTEMPTS_KEPT_S` after its last use."""

    def __init__(self) -> None:
        # Attempt and time of expiry, in order of expiry.
        self._highest: OrderedDict[StreamId, tuple[Attempt, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._highest)

    def highest(self, stream: StreamId) -> Attempt:
        return self._highest.get(stream, ((0, 0), 0.0))[0]

    def fence(self, attempts: Mapping[StreamId, Attempt], now_s: float) -> None:
        """Refuse attempts below the given one of each stream from now on."""
        for stream, attempt in attempts.items():
            highest = max(attempt, self.highest(stream))
            self._highest[stream] = highest, now_s + ATTEMPTS_KEPT_S
            self._highest.move_to_end(stream)
        while self._highest and (
            len(self._highest) > ATTEMPTS_REMEMBERED
            or next(iter(self._highest.values()))[1] <= now_s
        ):
            self._highest.popitem(last=False)


class RunCore(ABC):
    """Accepts, fences and ends runs; a subclass computes them.

    All methods are called on the event loop.
    """

    def __init__(self, clock: Callable[[], float], hooks: Iterable[StepHook] = ()) -> None:
        self.hooks = list(hooks)
        self._clock = clock
        self._attempts = AttemptBook()
        self._runs: dict[Sequence, GenerationRun] = {}

    @property
    def runs(self) -> int:
        """Number of accepted runs that have not ended."""
        return len(self._runs)

    @property
    def under_way(self) -> list[GenerationRun]:
        """The accepted runs that have not ended."""
        return list(self._runs.values())

    def submit(self, run: GenerationRun) -> None:
        """Begin a run, and end lower attempts at the same stream.

        Raises:
            FencedError: a higher attempt was already seen.
            RequestError: the run could never be computed here.
        """
        sequence = run.sequence
        known = [self._attempts.highest(sequence.stream)]
        known += [each.attempt for each in self._runs if each.stream == sequence.stream]
        if sequence.attempt < max(known):
            raise FencedError(f"stream {sequence.stream} has an attempt above {sequence.attempt}")
        self.fence({sequence.stream: sequence.attempt})
        if run.ending is not None:
            run.outputs.put_nowait(run.ending)
            return
        self._prepare(run)
        self._runs[sequence] = run
        for hook in self.hooks:
            hook.began(run)
        self._begin(run)

    def fence(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """End all runs below the given attempt of each stream, and refuse such attempts."""
        self._end_below(attempts, lambda run: True)

    def end_transfers(self, attempts: Mapping[StreamId, Attempt]) -> None:
        """End all runs below the given attempt of each stream that still have a transfer slot, and
        refuse such attempts.
        """
        self._end_below(attempts, lambda run: run.holds_slot)

    def abort(self, run: GenerationRun) -> None:
        """End a run without a last output; a run that has ended is ignored."""
        if run.sequence in self._runs:
            self._cancel(run)

    def _end_below(
        self, attempts: Mapping[StreamId, Attempt], affected: Callable[[GenerationRun], bool]
    ) -> None:
        self._attempts.fence(attempts, self._clock())
        superseded = [
            run
            for sequence, run in self._runs.items()
            if sequence.attempt < attempts.get(sequence.stream, (0, 0)) and affected(run)
        ]
        for run in superseded:
            self.abort(run)

    def _report_filled(self, run: GenerationRun) -> None:
        for hook in self.hooks:
            hook.filled(run)

    def _end(self, run: GenerationRun, output: StepOutput | None) -> None:
        """Remove a run and queue its last output; None: the run was aborted or has failed."""
        del self._runs[run.sequence]
        for hook in self.hooks:
            hook.ended(run)
        run.outputs.put_nowait(output)

    def _prepare(self, run: GenerationRun) -> None:  # noqa: B027  # Optional: nothing to check.
        """Check a new run; raises RequestError if it could never be computed here."""

    @abstractmethod
    def _begin(self, run: GenerationRun) -> None:
        """Start to compute an accepted run."""

    @abstractmethod
    def _cancel(self, run: GenerationRun) -> None:
        """End a run and stop computing it."""
