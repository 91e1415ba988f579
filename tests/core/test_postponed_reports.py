"""Reports that decide nothing are made a moment later, and before anything else is."""

from collections.abc import Callable
from random import Random

import pytest

from kvrs.config.policy import PolicySettings, RecoverySettings, SloSettings
from kvrs.core.control import Attempt, CallFault
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import Complete
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import LoadReport
from kvrs_lab.sim.streams import SimStream
from tests.core.test_core import D0, D1, P0, P1, Driver, S

Told = tuple[float, ev.Event, list[act.Action]]


class LateDriver(Driver):
    """Catches up only when it is asked to."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.asked = 0
        super().__init__()

    def catch_up_soon(self) -> None:
        self.asked += 1

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        super().trace(now_s, event, actions)
        self.told.append((now_s, event, [*actions]))


class PromptDriver(LateDriver):
    """Catches up at once."""

    def catch_up_soon(self) -> None:
        self.control.catch_up()


def report_of(driver: Driver, name: InstanceId) -> None:
    known = driver.control.instances.known[name]
    driver.control.load_reported(known, LoadReport(1, 0, 0, 0, 0.0, [], draining=True), 1.0)


def decode_of(live: SimStream) -> InstanceId:
    assert live.attempt.plan is not None
    return live.attempt.plan.decode


ENTRIES: dict[str, Callable[[Driver, SimStream], object]] = {
    "another stream arrives": lambda driver, live: driver.stream(StreamId("other")),
    "the stream ends": lambda driver, live: driver.control.end(live, Complete(), 1.0),
    "an instance is lost": lambda driver, live: driver.lose(D1),
    "its own instance is lost": lambda driver, live: driver.lose(decode_of(live)),
    "an instance comes up": lambda driver, live: driver.up(P1, epoch=2, pid=2),
    "an instance drains": lambda driver, live: report_of(driver, D0),
    "an operator drains": lambda driver, live: driver.control.drains.begin(D0, 0.0, 1.0),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_was_postponed_is_reported_before_anything_else(entry: str) -> None:
    """Each decision finds the books as they would be without a delay."""
    late, prompt = LateDriver(), PromptDriver()
    assert [type(event) for event in late.events][-1] is not ev.StreamResumed

    for driver in (late, prompt):
        live = driver.decoding()
        ENTRIES[entry](driver, live)

    assert late.asked == 1
    assert late.told == prompt.told
    assert late.control.policy.snapshot() == prompt.control.policy.snapshot()
    assert late.control.leases.batches(renew=True) == prompt.control.leases.batches(renew=True)


def test_a_load_report_finds_no_stream_that_has_left() -> None:
    """An instance that drains is told of again only while streams run there."""
    late, prompt = LateDriver(), PromptDriver()

    for driver in (late, prompt):
        driver.lose(P1)  # Else the stream is moved.
        live = driver.stream()
        assert live.attempt.plan is not None
        attempt = Attempt(driver.control, live, live.attempt.plan)
        prefill = attempt.begin()
        assert prefill is not None
        report_of(driver, prefill)
        assert attempt.prefilled(0.2)
        report_of(driver, prefill)

    assert (late.asked, late.told) == (1, prompt.told)


@pytest.mark.parametrize("how", ["ended", "closed"])
def test_a_stream_that_is_given_up_with_a_report_ends_once(how: str) -> None:
    """Its deadline had passed by the time of another one's first token, and its client leaves."""
    driver = LateDriver()
    settings = PolicySettings(recovery=RecoverySettings(gather_s=0.5))
    limit = SloSettings(abort=True, ttft_s=1.2)
    driver.control.tell(ev.SettingsReloaded(settings, limit), 0.0)
    leaving, other = driver.stream(), driver.stream(StreamId("other"))
    assert leaving.attempt.plan is not None
    assert other.attempt.plan is not None
    attempt = Attempt(driver.control, other, other.attempt.plan)
    attempt.begin()
    assert attempt.prefilled(0.1)
    attempt.decode()
    failed_at = leaving.attempt.plan.prefill or D0
    failed = ev.AttemptFailed(S, 1, failed_at, "lost", 0, True, ev.FailureKind.BROKEN)
    driver.control.attempt_over(leaving, failed, 1.0)
    attempt.resumed(1.6)

    if how == "ended":
        driver.control.end(leaving, Complete(), 1.6)
    else:
        driver.control.close(leaving, 1.6)

    assert [*driver.control.streams] == [other.id]
    (ended,) = driver.calls_of("end_stream")
    assert isinstance(ended[1], act.GiveUp)
    assert len(driver.calls_of("stream_closed")) == 1


def test_a_prefill_that_may_change_its_plan_is_reported_at_once() -> None:
    """Its hand-off goes elsewhere, by the answer of the policy."""
    driver = LateDriver()
    live = driver.stream()
    plan = live.attempt.plan
    assert plan is not None
    attempt = Attempt(driver.control, live, plan)
    attempt.begin()
    driver.control.instances.known[plan.decode].answers.busy_until_s = 9.0

    assert attempt.prefilled(0.2)

    assert (attempt.plan.decode != plan.decode, driver.asked) == (True, 0)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_comes_events_and_answers_are_those_without_a_delay(seed: int) -> None:
    """Streams come and go, fail, and lose their instances, and are caught up with now and then."""
    late, prompt = (run(driver, seed) for driver in (LateDriver(), PromptDriver()))

    assert late.told == prompt.told
    assert late.control.leases.batches(renew=True) == prompt.control.leases.batches(renew=True)


def run(driver: LateDriver, seed: int) -> LateDriver:
    random, attempts, now_s = Random(seed), dict[StreamId, Attempt[SimStream]](), 0.0
    for number in range(60):
        now_s += 0.01
        for name, live in driver.control.streams.items():
            if name not in attempts or attempts[name].number != live.journal.attempt:
                if live.attempt.plan is None or live.attempt.runs_on is None:
                    continue  # It waits.
                attempts[name] = Attempt(driver.control, live, live.attempt.plan)
                if attempts[name].begin() is None:
                    attempts[name].decode()
        step, name = random.randrange(9), random.choice([*attempts, S])
        if step < 2 or name not in attempts or name not in driver.control.streams:
            driver.stream(StreamId(f"s{number}"), now_s)
            continue
        attempt = attempts[name]
        live = attempt.live
        match step:
            case 2 | 3 if not attempt.has_resumed and attempt.failed_at == attempt.plan.prefill:
                if attempt.prefilled(now_s):
                    attempt.decode()
            case 4 | 5 if attempt.failed_at == attempt.plan.decode:
                live.journal.append(7, now_s)
                attempt.resumed(now_s)
            case 6:
                driver.control.end(live, Complete(), now_s)
            case 7:
                if (failed := attempt.failure(random.choice([*CallFault]), "cause")) is not None:
                    driver.control.attempt_over(live, failed, now_s)
            case 8:
                lost = random.choice([P0, D0, P1, D1])
                driver.control.instance_lost(driver.control.instances.known[lost], "killed", now_s)
                driver.up(lost, epoch=number + 2, pid=number + 2)
            case _:
                driver.control.catch_up()
    driver.control.catch_up()
    return driver
