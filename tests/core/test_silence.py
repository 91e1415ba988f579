"""Silence: when it counts, and what excuses it."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.configured import Configured
from kvrs.core.fleet.known import Instances
from kvrs.core.fleet.silence import SHORTEST_SILENCE_S, InstanceProgress, SilenceTimer
from kvrs.core.model.member import Member
from kvrs.core.model.streams import LiveStream, mean_interval_s
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LoadReport, ReformingReport
from kvrs_lab.sim.streams import Arrival, SimJournal
from tests.core.policy_harness import TABLE, make_config

P0, D0 = InstanceId("p0"), InstanceId("d0")


def never() -> bool:
    return False


def test_a_timer_looks_again_when_the_limit_could_be_passed() -> None:
    """It is re-armed when it fires, not with every token."""
    timer = SilenceTimer(0.0)

    assert timer.look(0.0, 1.5, never) == 1.5
    timer.heard_s = 1.0
    assert timer.look(1.5, 1.5, never) == 2.5
    assert timer.look(2.5, 1.5, never) is None


def test_a_long_limit_is_looked_at_in_between() -> None:
    """It may become shorter: an attempt's limit follows its own pace."""
    assert SilenceTimer(0.0).look(0.0, 3600.0, never) == SHORTEST_SILENCE_S


def test_an_excuse_starts_the_timeout_again() -> None:
    """A queue at an instance that delivers is no hang."""
    timer = SilenceTimer(0.0)

    assert timer.look(0.0, 1.0, never) == 1.0
    assert timer.look(1.0, 1.0, lambda: True) == 2.0


@pytest.mark.parametrize(
    ("first_s", "last_s", "tokens", "mean_s"),
    [(None, None, 0, None), (1.0, 1.0, 1, None), (1.0, 3.0, 5, 0.5)],
)
def test_the_usual_interval_is_the_mean_over_the_stream(
    first_s: float | None, last_s: float | None, tokens: int, mean_s: float | None
) -> None:
    """In the proxy and in the simulator alike."""
    assert mean_interval_s(first_s, last_s, tokens) == mean_s


def test_a_stall_in_which_no_look_was_due_is_no_silence() -> None:
    """It was over a moment before the look."""
    timer = SilenceTimer(0.0)
    assert timer.look(0.0, 2.0, never) == 2.0

    timer.excused(1.9, 1.95)

    assert timer.look(2.0, 2.0, never) == 3.9
    assert timer.look(3.9, 2.0, never) is None


def test_a_stall_before_the_last_word_takes_nothing_away() -> None:
    timer = SilenceTimer(0.0)
    timer.heard_s = 1.0

    timer.excused(1.0, 1.2)

    assert timer.heard_s == 1.2


def test_silence_of_a_time_slice_is_suspected_by_nobody() -> None:
    """Half a second at least, whatever attempts say of the process."""
    timer = SilenceTimer(0.0)

    assert not timer.may_be_suspected(0.042)
    assert not timer.may_be_suspected(0.45)
    assert timer.may_be_suspected(0.5)


class Paced(SimJournal):
    """A journal of a stream with a token every 10 ms."""

    @property
    def token_interval_s(self) -> float | None:
        return 0.01


class NoPolicy(RecoveryPolicy):
    """A policy that is told whether others could take streams."""

    def __init__(self) -> None:
        self.can_leave = True

    def has_others(self, instance: InstanceId, is_heard: Callable[[InstanceId], bool]) -> bool:
        return self.can_leave


def test_a_stream_waits_for_its_instance_where_no_other_could_take_it() -> None:
    """Until one can: from then on it has the usual time. What wakes first of several that were
    paused together does not end the others.
    """
    policy = NoPolicy()
    config = make_config([P0, D0], PolicySettings(), SloSettings(), BackupSettings())
    progress = InstanceProgress(Instances(Configured.of(config)), 10.0, policy)
    arrival = Arrival(0.0, (1, 2), 9, is_text=False, is_keyed=False)
    live = LiveStream(StreamId("s"), journal=Paced(StreamId("s"), arrival, 0.0, 2, [1, 2]))

    gaps_s = [progress.token_gap_s(live, D0, 1.0, 1.5)]
    policy.can_leave = False
    gaps_s.append(progress.token_gap_s(live, D0, 1.0, 4.0))
    policy.can_leave = True
    gaps_s += [progress.token_gap_s(live, D0, 1.0, now_s) for now_s in (6.0, 7.0)]
    gaps_s.append(progress.token_gap_s(live, D0, 6.5, 8.0))

    assert gaps_s == [SHORTEST_SILENCE_S, 10.0, 7.0, 7.0, SHORTEST_SILENCE_S]


@pytest.mark.parametrize(
    ("predicted_s", "booked_s", "marks", "limit_s"),
    [
        (0.0, 0.0, {}, 10.0),
        (30.0, 0.0, {}, 70.0),
        (1.0, 8.0, {}, 26.0),  # Behind other prompts that were sent there.
        (1.0, 0.0, {"is_guess": True}, 48.0),
        (1.0, 0.0, {"is_estimated": True}, 48.0),
    ],
)
def test_a_first_token_may_take_twice_its_predicted_prefill(
    predicted_s: float, booked_s: float, marks: dict[str, Any], limit_s: float
) -> None:
    """Four times as long as that while the table is a guess or an estimate."""
    progress, decode = progress_at_d0()
    decode.times.table, decode.work_s = replace(TABLE, **marks), booked_s

    assert progress.first_token_s(decode, predicted_s) == limit_s


def test_a_first_token_may_take_the_queue_and_a_re_forming_longer() -> None:
    """Both are those of the last report of the instance."""
    progress, decode = progress_at_d0()
    unknown_s = progress.first_token_s(decode, 0.0)
    reforming = ReformingReport(1, "restart", 3.0, 1, [1], 0)

    decode.load = LoadReport(1, 0, 0, 9, 2.0, [], reforming=reforming)

    assert (unknown_s, progress.first_token_s(decode, 0.0)) == (10.0, 15.0)


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    [
        ((5.0, 9), (5.0, 9), False),
        ((5.0, 9), (6.0, 9), True),  # Tokens were computed.
        ((5.0, 9), (5.0, 8), True),  # A chunk of a long prompt has taken pages.
    ],
)
def test_a_report_that_moves_is_a_sign_of_progress(
    before: tuple[float, int], after: tuple[float, int], *, moves: bool
) -> None:
    """An API server whose engine hangs reports the same again and again."""
    progress, _ = progress_at_d0()
    delivered = progress.delivered[D0]

    delivered.reported(before, 1.0)
    delivered.reported(after, 2.0)

    assert delivered.last_s == (2.0 if moves else -inf)
    assert progress.moved_for_s(D0, 0.5) == (1.5 if moves else 0.0)


def test_a_call_without_a_prediction_is_given_up_only_where_others_stand_still() -> None:
    """Embeddings of a large batch say nothing for minutes."""
    progress, _ = progress_at_d0()
    delivered = progress.delivered[D0]
    alone_s = progress.answer_s(D0, 1.0)

    delivered.stood_still_s = 3.0
    beside_a_hang_s = progress.answer_s(D0, 1.0)
    delivered.last_s = 4.0

    assert (alone_s, beside_a_hang_s, progress.answer_s(D0, 1.0)) == (inf, 12.0, inf)


def progress_at_d0() -> tuple[InstanceProgress, Member]:
    config = make_config([P0, D0], PolicySettings(), SloSettings(), BackupSettings())
    instances = Instances(Configured.of(config))
    instances.known[D0].times.table = TABLE
    return InstanceProgress(instances, 10.0, NoPolicy()), instances.known[D0]
