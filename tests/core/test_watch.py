"""The watch of a process: what is met, fenced, up and lost, and when it is tried again."""

from itertools import pairwise
from math import inf
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.config.proxy import ProxySettings
from kvrs.core.model import events as ev
from kvrs.core.model.member import Health, Member
from kvrs.core.watch import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    AgentWatch,
    DeathCause,
    End,
    InstanceWatch,
    Watch,
    WatchLimits,
    WatchNote,
    WatchStep,
)
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import (
    AgentInfo,
    AgentReport,
    Capability,
    FailedQuestion,
    Fails,
    InstanceInfo,
    LoadReport,
    ModelNames,
    RankInfo,
    WatchQuestion,
)
from tests.core.test_core import D0, D1, Driver

LIMITS = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))
FAILED, SILENT = DeathCause.FAILED, DeathCause.SILENT


class Shell:
    url = "http://d0"

    def __init__(self) -> None:
        self.dead_epoch = -1  # As gossip says.
        self.ups = 0
        self.losses: list[tuple[int, str, DeathCause, float]] = []
        self.notes: list[tuple[WatchNote, str | list[str]]] = []

    def is_gossiped_dead(self, epoch: int) -> bool:
        return self.dead_epoch >= epoch

    def came_up(self) -> None:
        self.ups += 1

    def lost(self, epoch: int, cause: str, death: DeathCause, silent_s: float) -> None:
        self.losses.append((epoch, cause, death, silent_s))

    def note(self, note: WatchNote, detail: str | list[str]) -> None:
        self.notes.append((note, detail))


class Watched:
    """The watch of d0, which was never up; d1 is."""

    def __init__(self, **info: Any) -> None:
        self.driver = Driver()
        self.control = self.driver.control
        instances = self.control.instances
        up = instances.known[D0].info
        assert up is not None
        self.info: InstanceInfo = msgspec.structs.replace(up, **info)
        self.control.tell(ev.InstanceRemoved(D0, {}), 0.0)
        known = instances.known[D0] = Member(D0, self.info.node, self.info.role)
        self.control.instances.known[D1].reported_s = inf  # It could always take the streams.
        self.shell = Shell()
        self.watch = InstanceWatch(known, self.control, LIMITS, self.shell)
        self.session = 0

    def identity(self, epoch: int, **changes: Any) -> InstanceInfo:
        return msgspec.structs.replace(self.info, epoch=epoch, **changes)

    def meet(self, epoch: int = 1, now_s: float = 0.0, **changes: Any) -> object:
        self.session = self.watch.connects()
        return self.answer(self.identity(epoch, **changes), now_s)

    def answer(
        self, info: InstanceInfo, now_s: float = 0.0, step: WatchStep = WatchStep.IDENTIFY
    ) -> object:
        return self.watch.answered(self.session, step, info, now_s)

    def report(self, epoch: int = 1, now_s: float = 0.0, **fields: Any) -> object:
        return self.watch.reported(self.session, load(epoch, **fields), now_s)

    def end(self, death: DeathCause = FAILED, now_s: float = 0.0) -> float | None:
        return self.watch.ended(self.session, "ended", death, now_s)

    @property
    def known(self) -> Member:
        return self.control.instances.known[D0]

    @property
    def health(self) -> Health:
        return self.known.health


def load(epoch: int, *, running: int = 0, **fields: Any) -> LoadReport:
    return LoadReport(
        epoch=epoch, queued=0, running=running, free_pages=9, queue_delay_s=0.0, links=[], **fields
    )


def test_a_process_is_up_with_its_first_report() -> None:
    """Its identity alone does not show that it works."""
    watched = Watched()

    met = watched.meet(now_s=1.0)
    before = watched.health
    nothing = watched.report(now_s=1.2)

    assert (met, before, nothing) == (WatchStep.LISTEN, Health.STARTING, None)
    assert (watched.health, watched.shell.ups, watched.known.reported_s) == (Health.UP, 1, 1.2)


def test_a_loss_is_told_with_its_epoch_and_cause() -> None:
    for death in DeathCause:
        watched = Watched()
        watched.meet(epoch=7, now_s=1.0)
        watched.report(epoch=7, now_s=2.0)

        watched.end(death, now_s=3.0)

        lost = watched.driver.events[-1]
        assert watched.shell.losses == [(7, "ended", death, 1.0)]
        assert isinstance(lost, ev.InstanceLost)
        assert lost.epoch == 7
        assert watched.health is Health.DOWN


def test_pauses_double_up_to_a_second_and_begin_anew_after_a_loss() -> None:
    """A process that restarts is in use soon."""
    watched, pauses_s = Watched(), []
    for _ in range(7):
        watched.session = watched.watch.connects()
        pauses_s.append(watched.end())
    watched.meet()
    watched.report()

    again_s = watched.end()

    assert pauses_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert again_s == 0.05
    assert watched.shell.notes == [(WatchNote.UNREACHED, "ended (http://d0)")]


def test_a_process_that_must_not_be_used_is_refused_until_it_is_another() -> None:
    """The reason stays, also when it is not reached."""
    watched = Watched()

    end = watched.meet(fingerprint="other")
    assert isinstance(end, End)
    watched.watch.ended(watched.session, end.cause, end.death, 0.0)
    watched.session = watched.watch.connects()
    watched.end(DeathCause.CONNECTION_LOST)

    assert end.death is DeathCause.UNUSABLE
    assert (watched.health, watched.known.reason) == (Health.REFUSED, end.cause)
    assert watched.shell.notes == [(WatchNote.REFUSED, end.cause)]
    watched.meet()
    watched.report()
    assert watched.health is Health.UP


def test_a_process_is_checked_again_when_it_comes_up() -> None:
    """Another instance may have become the measure since it was met."""
    watched = Watched()
    watched.meet()
    watched.driver.lose(D1)
    for name in ("p0", "p1"):
        watched.driver.lose(InstanceId(name))
    watched.driver.up(D1, epoch=2, fingerprint="other")

    end = watched.report()

    assert isinstance(end, End)
    assert (end.death, watched.health) == (DeathCause.UNUSABLE, Health.STARTING)


def test_a_process_that_ran_on_while_it_was_taken_for_lost_is_fenced_once() -> None:
    """Its answer to the fence is its identity from then on."""
    watched = Watched()
    watched.meet()
    watched.report()
    watched.end(SILENT)

    fence = watched.meet(now_s=1.0)
    listen = watched.answer(watched.identity(2), 1.1, WatchStep.FENCE)
    watched.report(epoch=2, now_s=1.2)

    assert (fence, listen) == (WatchStep.FENCE, WatchStep.LISTEN)
    assert (watched.health, watched.known.info) == (Health.UP, watched.identity(2))


def test_a_process_without_a_fence_is_used_when_it_has_drained() -> None:
    """Old attempts may still run there."""
    watched = Watched(capabilities=[Capability.EXACT_RESUME])
    watched.meet()
    watched.report()
    watched.end(SILENT)

    step = watched.meet(now_s=1.0)
    watched.report(running=1, now_s=1.2)
    before = watched.health
    watched.report(running=0, now_s=1.4)

    assert (step, before, watched.health) == (WatchStep.LISTEN, Health.DOWN, Health.UP)


def test_a_report_of_another_epoch_leads_to_the_identity_and_then_counts() -> None:
    """Another proxy has fenced it: nothing is lost."""
    watched = Watched()
    watched.meet()
    watched.report()

    step = watched.report(epoch=2, now_s=0.25)
    waiting = watched.report(epoch=2, running=3, now_s=0.5)
    watched.answer(watched.identity(2), 0.6)

    assert (step, waiting) == (WatchStep.IDENTIFY, None)
    assert (watched.known.info, watched.shell.losses) == (watched.identity(2), [])
    assert watched.known.load == load(2, running=3)


def test_a_report_older_than_the_identity_asked_for_is_left_out() -> None:
    """It was fenced once more meanwhile; one that stays in another epoch is given up."""
    watched = Watched()
    watched.meet()
    watched.report()
    watched.report(epoch=2)

    outrun = watched.answer(watched.identity(3))
    watched.report(epoch=2)
    stuck = watched.answer(watched.identity(3))

    assert outrun is None
    assert stuck == End("reports epoch 2, but is in 3", FAILED)


def test_the_shape_of_ranks_is_learned_when_it_changes() -> None:
    """Without an answer it is asked for with the next report."""
    watched, ranks = Watched(), [RankInfo(0, 0, 7, NodeId("n0"), 1, [0])]
    watched.meet()

    steps = [watched.report(full_degree=2, degree=2) for _ in range(2)]
    watched.answer(watched.identity(1, ranks=ranks), step=WatchStep.SHAPE)
    steps += [watched.report(full_degree=2, degree=degree) for degree in (2, 1)]

    assert steps == [WatchStep.SHAPE, WatchStep.SHAPE, None, WatchStep.SHAPE]
    assert watched.known.info == watched.identity(1, ranks=ranks)


def test_names_that_change_are_told_without_another_epoch() -> None:
    """Adapters are loaded while it runs."""
    watched, names = Watched(), ModelNames(aliases=("other",))
    watched.meet()
    watched.report()
    instances = watched.control.instances
    before = instances.served_names()

    watched.report(names=names)

    listed = [event for event in watched.driver.events if isinstance(event, ev.NamesListed)]
    assert [event.epoch for event in listed] == [1]
    assert watched.shell.notes == [(WatchNote.NAMES, ["m", "other"])]
    assert (watched.known.info, watched.shell.ups) == (watched.identity(1, names=names), 1)
    assert instances.served_names() is not before


def test_heartbeats_count_that_came_before_a_process_was_up() -> None:
    """Its first report may come long after it was met: the record of the process has them."""
    watched = Watched()
    watched.meet(now_s=1.0)
    watched.watch.beat(1.3)

    watched.report(now_s=1.4)

    assert (watched.health, watched.known.beat_s) == (Health.UP, 1.3)


def test_an_agent_is_watched_alike() -> None:
    """It has no fence, and its death is that of a holder."""
    driver = Driver()
    known = driver.control.agents.add(InstanceId("agent-n0"), NodeId("n0"))
    shell = Shell()
    watch = AgentWatch(known, driver.control, LIMITS, shell)
    info = AgentInfo(known.id, known.node, 1, 1, 0, 1 << 20, 1e9)
    session = watch.connects()

    step = watch.answered(session, WatchStep.IDENTIFY, info, 0.0)
    watch.reported(session, AgentReport(1, 0, 0, 0, {}, []), 0.1)
    health = known.health
    watch.ended(session, "ended", SILENT, 5.2)

    assert (step, health, known.health) == (WatchStep.LISTEN, Health.UP, Health.DOWN)
    assert isinstance(driver.events[-1], ev.HolderLost)
    assert [loss[:3] for loss in shell.losses] == [(1, "ended", SILENT)]


def test_gossip_and_heartbeats_set_how_long_a_process_may_be_silent() -> None:
    """A death in a former epoch is that of another process."""
    watched = Watched()
    watched.meet(epoch=2, now_s=10.0)
    watched.report(epoch=2, now_s=10.0)
    limits_s = []

    for dead_epoch, beat_s in ((-1, -inf), (1, -inf), (2, -inf), (2, 13.0)):
        watched.shell.dead_epoch = dead_epoch
        watched.watch.beat(beat_s)
        limits_s.append(watched.watch.limit_s(14.0))

    watched.control.instances.known[D1].reported_s = 0.0
    alone_s = watched.watch.limit_s(14.0)

    assert limits_s == [5.0, 5.0, 1.0, 4.0]
    assert alone_s == 10.0


def test_tokens_are_signs_of_life_as_reports_are() -> None:
    """An instance whose reports stop while its streams go on is not silent."""
    watched = Watched()
    watched.meet(now_s=10.0)
    watched.report(now_s=10.0)
    silence = watched.watch.silence

    watched.control.progress.delivered[D0].last_s = 14.0
    assert silence.look(18.9, watched.watch.limit_s(18.9), lambda: False) is not None
    assert silence.look(19.1, watched.watch.limit_s(19.1), lambda: False) is None


def test_a_report_that_says_that_health_is_not_answered_is_no_sign_of_life() -> None:
    """Its figures may have been read before the process hung. While tokens come it counts, and the
    instance gets nothing new.
    """
    watched = Watched()
    watched.meet(now_s=10.0)
    watched.report(now_s=10.0)
    late = {WatchQuestion.HEALTH: FailedQuestion(Fails.LATE, "late")}

    nothing = watched.report(now_s=12.0, failing=late)
    silent_since_s = watched.watch.silence.heard_s
    watched.control.progress.delivered[D0].last_s = 12.5
    watched.report(now_s=13.0, failing=late)

    assert (nothing, silent_since_s) == (None, 10.0)
    assert watched.watch.silence.heard_s == 13.0
    assert watched.control.policy.members[D0].is_unwell
    watched.report(now_s=13.5)
    assert not watched.control.policy.members[D0].is_unwell


inputs = st.lists(
    st.tuples(
        st.sampled_from(["connect", "identity", "fence", "report", "end", "die", "fence by other"]),
        st.integers(0, 3),  # How many sessions ago.
        st.sampled_from(list(DeathCause)),
    ),
    max_size=60,
)


@given(inputs)
def test_a_loss_is_told_once_per_epoch_and_old_sessions_change_nothing(
    given_inputs: list[tuple[str, int, DeathCause]],
) -> None:
    """Whatever comes, in whatever order; pauses stay within bounds."""
    watched, epoch = Watched(), 1
    watch, sessions = watched.watch, [0]
    for now, (what, age, death) in enumerate(given_inputs):
        session = sessions[-1 - min(age, len(sessions) - 1)]
        before = _state(watched)
        result: object = None
        match what:
            case "connect":
                sessions.append(watch.connects())
                continue
            case "identity":
                result = watch.answered(session, WatchStep.IDENTIFY, watched.identity(epoch), now)
            case "fence":
                result = watch.answered(session, WatchStep.FENCE, watched.identity(epoch), now)
            case "report":
                result = watch.reported(session, load(epoch), now)
            case "end":
                result = watch.ended(session, "ended", death, now)
                assert result is None or FIRST_PAUSE_S <= float(str(result)) <= LONGEST_PAUSE_S
            case "die":
                epoch += 1000
            case _:
                epoch += 1
        if session != before[0]:
            assert (result, _state(watched)) == (None, before)

    epochs = [loss[0] for loss in watched.shell.losses]
    events = [each for each in watched.driver.events if isinstance(each, ev.InstanceLost)]
    assert [each.epoch for each in events] == epochs
    assert len(epochs) <= watched.shell.ups
    assert all(before <= after for before, after in pairwise(epochs))


def _state(watched: Watched) -> tuple[object, ...]:
    known = watched.known
    told = len(watched.shell.losses), watched.shell.ups, len(watched.driver.events)
    return watched.watch.session, known.health, known.info, known.load, told


@given(st.lists(st.tuples(st.floats(0.01, LIMITS.overdue_s - 0.01), st.booleans()), max_size=30))
def test_a_process_that_reports_in_time_is_never_lost(reports: list[tuple[float, bool]]) -> None:
    """Whatever is gossiped. One that ceases to report is lost as soon as its limit is passed."""
    watched, now_s = Watched(), 0.0
    watched.meet()
    watched.report()
    next_s: float | None = 0.0
    for pause_s, is_dead in reports:
        watched.shell.dead_epoch = 1 if is_dead else -1
        next_s = _look(watched.watch, now_s)
        while next_s is not None and next_s < now_s + pause_s:
            next_s = _look(watched.watch, next_s)
        assert next_s is not None
        now_s += pause_s
        watched.report(now_s=now_s)
    heard_s = now_s
    while next_s is not None:
        now_s, next_s = next_s, _look(watched.watch, next_s)

    assert now_s - heard_s == pytest.approx(watched.watch.limit_s(now_s))


def _look(watch: Watch[Any, Any, Any], now_s: float) -> float | None:
    return watch.silence.look(now_s, watch.limit_s(now_s), lambda: False)


def test_a_gossiped_death_only_shortens_the_report_timeout() -> None:
    """A process that goes on reporting stays in use."""
    limits = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))

    assert limits.silence_s(is_gossiped_dead=False) == 5.0
    assert limits.silence_s(is_gossiped_dead=True) == 1.0


def test_a_process_whose_heartbeats_go_on_has_until_they_are_overdue() -> None:
    """Its event loop stalls; but no longer than any silence may last."""
    limits = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))

    for is_gossiped_dead in (False, True):
        allowed = [
            limits.silence_s(is_gossiped_dead=is_gossiped_dead, beats_for_s=beats_for_s)
            for beats_for_s in (-inf, 0.5, 6.0, 60.0)
        ]
        usual_s = limits.silence_s(is_gossiped_dead=is_gossiped_dead)
        assert allowed == [usual_s, max(usual_s, 1.5), 7.0, 10.0]


def test_a_process_whose_streams_nothing_else_could_take_has_the_longest_limit() -> None:
    """To give it up would gain nothing; agents gossip silence as a death. Once there are others its
    limit counts from then on.
    """
    limits = WatchLimits.of(ProxySettings(load_interval_s=0.25, token_gap_s=10.0))

    for is_gossiped_dead, usual_s in ((False, 5.0), (True, 1.0)):
        allowed_s = [
            limits.silence_s(is_gossiped_dead=is_gossiped_dead, alone_for_s=alone_for_s)
            for alone_for_s in (-inf, 3.0, inf)
        ]
        assert allowed_s == [usual_s, 3.0 + usual_s, 10.0]
