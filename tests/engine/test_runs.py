"""Claims about the runs of an engine, in front of one that computes nothing."""

import pytest

from kvrs.ids import StreamId
from kvrs.protocol.pages import root_tag
from kvrs.text.output import OutputText, TextDelta
from kvrs_engine.engine.requests import GenerationRun, StepOutput
from kvrs_engine.engine.runs import ATTEMPTS_KEPT_S, AttemptBook, FencedError, RunCore
from kvrs_engine.engine.sampler import SamplingParams
from kvrs_engine.scheduling.sequences import Sequence

pytestmark = pytest.mark.engine

S, T = StreamId("s"), StreamId("t")


class IdleCore(RunCore):
    """Accepts runs and computes none."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(lambda: self.now_s)
        self.began: list[GenerationRun] = []

    def _begin(self, run: GenerationRun) -> None:
        self.began.append(run)

    def _cancel(self, run: GenerationRun) -> None:
        self._end(run, None)


def run_of(
    stream: StreamId, attempt: int, *, owner_epoch: int = 0, slot_token: int = 0
) -> GenerationRun:
    sequence = Sequence(stream, (owner_epoch, attempt), [1, 2, 3], 3, root_tag("model"), False)
    return GenerationRun(
        sequence=sequence,
        params=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, seed=0),
        penalties=None,
        logprobs=None,
        text=object.__new__(OutputText),
        max_tokens=10,
        min_tokens=0,
        end_token_ids=frozenset(),
        stop_token_ids=frozenset(),
        sources=(),
        slot_token=slot_token,
    )


def ended(run: GenerationRun) -> bool:
    return not run.outputs.empty() and run.outputs.get_nowait() is None


def test_a_higher_attempt_ends_the_lower_one_and_is_never_ended_by_it() -> None:
    """A stream has one writer; an owner epoch counts before the number of the attempt."""
    core = IdleCore()
    first, other, second = run_of(S, 5), run_of(T, 1), run_of(S, 1, owner_epoch=1)
    core.submit(first)
    core.submit(other)

    core.submit(second)

    assert core.began == [first, other, second]
    assert [ended(run) for run in (first, other, second)] == [True, False, False]
    assert core.runs == 2
    with pytest.raises(FencedError):
        core.submit(run_of(S, 6))


def test_the_end_of_slots_spares_runs_without_one() -> None:
    """A run that computes already does not fetch any more; but a late call of it is refused."""
    core = IdleCore()
    fetching, computing = run_of(S, 1, slot_token=7), run_of(T, 1)
    core.submit(fetching)
    core.submit(computing)

    core.end_transfers({S: (0, 2), T: (0, 2)})

    assert [ended(run) for run in (fetching, computing)] == [True, False]
    with pytest.raises(FencedError):
        core.submit(run_of(T, 1))


def test_ended_streams_are_forgotten_after_a_while() -> None:
    """The book remembers the streams of the last minutes, not those since the start."""
    book = AttemptBook()
    for n in range(10 * int(ATTEMPTS_KEPT_S)):
        book.fence({StreamId(f"{n}"): (0, 2)}, float(n))

    assert len(book) == ATTEMPTS_KEPT_S
    assert book.highest(StreamId("0")) == (0, 0)
    assert book.highest(StreamId(f"{n}")) == (0, 2)


def test_a_run_that_lasts_refuses_lower_attempts_all_the_time() -> None:
    """It may outlast what the book keeps of ended streams."""
    core = IdleCore()
    core.submit(run_of(S, 2))
    core.now_s = ATTEMPTS_KEPT_S
    core.submit(run_of(T, 1))

    with pytest.raises(FencedError):
        core.submit(run_of(S, 1))


def test_a_complete_history_is_answered_without_computing() -> None:
    """Its only output is its end, and it never becomes a run of the engine."""
    core, run = IdleCore(), run_of(S, 1)
    run.ending = StepOutput([], TextDelta(""), "stop")

    core.submit(run)

    assert run.outputs.get_nowait() is run.ending
    assert (core.runs, core.began) == (0, [])


def test_an_abort_of_an_ended_run_does_nothing() -> None:
    """A client may leave in the moment in which its run ends."""
    core, run = IdleCore(), run_of(S, 1)
    core.submit(run)

    core.abort(run)
    core.abort(run)

    assert ended(run)
    assert run.outputs.empty()
