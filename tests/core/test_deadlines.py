"""When the next token of an interrupted stream is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.policy import SloSettings
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Stream, by_urgency
from kvrs.ids import InstanceId, NodeId, StreamId
from tests.core.policy_harness import PolicyHarness, of, only

A = StreamId("A")
PROMPT_TOKENS = 100


def interrupted(
    end_to_end_s: float, most_output: int | None, produced: int, flowed_s: float
) -> Stream:
    """A stream that arrived at 0, began at 1 s, and failed `flowed_s` later."""
    most = None if most_output is None else PROMPT_TOKENS + most_output
    deadlines = ev.Deadlines(end_to_end_s=end_to_end_s)
    stream = Stream(A, 0, PROMPT_TOKENS, 0.0, most, deadlines, prefilled=True)
    stream.note_resumed(ev.StreamResumed(stream.id, 1), 1.0)
    stream.note_tokens(produced)
    stream.note_pace(1.0 + flowed_s)
    stream.recovery.note_failure("killed", InstanceId("d0"), 1.0 + flowed_s)
    return stream


def test_the_next_token_is_due_before_the_rest_of_the_output() -> None:
    """50 tokens came in 5 s; of the 49 behind the next one each takes 0.1 s."""
    stream = interrupted(20.0, 100, produced=50, flowed_s=5.0)

    assert stream.due_s() == pytest.approx(20.0 - 4.9)
    assert stream.tightest() == "20 s in all, with 4.9 s for the rest of the output"


def test_the_more_urgent_of_two_streams_comes_first() -> None:
    """By its deadline; among equals the one that arrived first."""
    streams = [
        Stream(StreamId(str(number)), number, 20, 0.0, deadlines=ev.Deadlines(ttft_s=ttft_s))
        for number, ttft_s in enumerate((2.0, 1.0))
    ]

    ordered = by_urgency(streams)

    assert [stream.id for stream in ordered] == ["1", "0"]
    assert by_urgency(reversed(ordered[:1])) == ordered[:1]
    assert by_urgency([]) == []


def test_a_limit_that_was_out_of_reach_before_the_failure_says_nothing() -> None:
    """`max_tokens` is a bound: 1,000 tokens would have taken 100 s without any failure."""
    stream = interrupted(20.0, 1_000, produced=50, flowed_s=5.0)

    assert stream.due_s() == 20.0
    assert stream.tightest() == "20 s in all"


@given(
    st.floats(1, 1_000),
    st.one_of(st.none(), st.integers(1, 10_000)),
    st.integers(0, 1_000),
    st.floats(0, 100),
)
def test_the_next_token_is_due_between_the_failure_and_the_deadline(
    end_to_end_s: float, most_output: int | None, produced: int, flowed_s: float
) -> None:
    """The rest of the output makes no stream late that was in time when it failed."""
    stream = interrupted(end_to_end_s, most_output, produced, flowed_s)
    failed_s = stream.recovery.failed_at_s
    assert failed_s is not None

    assert stream.due_s() <= end_to_end_s
    assert stream.due_s() >= min(failed_s, end_to_end_s) - 1e-6
    if produced == 0 or most_output is None:
        assert stream.due_s() == end_to_end_s


@pytest.mark.parametrize(("most_output", "is_given_up"), [(60, False), (190, True)])
def test_a_stream_whose_output_cannot_end_in_time_is_given_up(
    most_output: int, is_given_up: bool
) -> None:
    """With `slo.abort`: the next token would come in time, and those behind it would not."""
    harness = PolicyHarness("p0", "d0", "d1", slo=SloSettings(abort=True, deadline_s=20.0))
    harness.handle(ev.LinkMeasured(NodeId("n0"), NodeId("n1"), 1e5))
    harness.handle(ev.StreamArrived(A, PROMPT_TOKENS, PROMPT_TOKENS + most_output))
    harness.handle(ev.PrefillDone(A, 1, PROMPT_TOKENS), at_s=0.5)
    harness.handle(ev.StreamResumed(A, 1), at_s=1.0)

    actions = harness.lose("d0", at_s=6.0, A=50)

    if is_given_up:
        given_up = only(actions, act.GiveUp)
        assert given_up.reason is act.Reason.SLO
        assert "for the rest of the output" in given_up.message
    else:
        assert of(actions, act.Recovered)
