"""The machine that decides an attempt: calls, slot, silence, and what is reported of it, once."""

from math import inf
from random import Random

import pytest

from kvrs.core.control import Attempt, CallFault
from kvrs.core.fleet.silence import GIVEN_UP_TOGETHER_S, LOST_TOGETHER_S
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.streams import StayDeadline
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId
from kvrs.protocol.instance import SlotRequest
from kvrs_lab.sim.streams import SimStream
from tests.core.test_core import D0, D1, P0, P1, Driver, S

RUNS = (act.PageRange(D1, 1, 0, 2),)


def attempt_of(driver: Driver, live: SimStream, plan: act.Plan | None = None) -> Attempt[SimStream]:
    assert live.attempt.plan is not None
    return Attempt(driver.control, live, plan or live.attempt.plan)


def test_prefill_is_called_where_the_plan_has_it() -> None:
    driver = Driver()
    attempt = attempt_of(driver, driver.stream())

    assert attempt.begin() == attempt.plan.prefill == attempt.failed_at
    assert [*attempt.live.prefilled_at] == [attempt.plan.prefill]


def test_only_the_ids_of_a_text_need_a_prefill_call_without_a_prefill_instance() -> None:
    """The prefix cache of the one instance is the hand-off."""
    driver = Driver()
    live = driver.stream()
    plan = act.Plan(D0)

    knows_ids = attempt_of(driver, live, plan).begin()
    live.journal.prompt_ids = None
    of_text = attempt_of(driver, live, plan).begin()

    assert (knows_ids, of_text) == (None, D0)


def test_one_call_reports_the_history_with_its_first_token() -> None:
    """The decode instance has it computed: no call and no answer of prefill."""
    driver = Driver(own_prefill=True)
    live = driver.stream()
    attempt = attempt_of(driver, live)
    assert (attempt.begin(), attempt.decode()) == (None, None)
    live.journal.append(7, 0.2)
    driver.events.clear()

    attempt.resumed(0.2)

    assert driver.events == [ev.PrefillDone(S, 1, 40), ev.StreamResumed(S, 1)]
    assert attempt.failed_at == attempt.plan.decode


def test_a_slot_is_asked_for_where_history_is_fetched() -> None:
    """A hand-off of a prefill is not counted."""
    driver = Driver()
    live = driver.stream()
    plain, fetching = (attempt_of(driver, live, act.Plan(D0, runs=runs)) for runs in ((), RUNS))

    assert plain.decode() is None
    assert fetching.decode() == SlotRequest(D0, S, 1)


def test_no_decode_call_follows_when_its_instance_is_gone() -> None:
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    driver.control.instances.known[attempt.plan.decode].lose("killed")

    assert not attempt.prefilled(0.1)
    assert driver.calls_of("end_attempt")


@pytest.mark.parametrize(
    ("fault", "kind", "abrupt", "delay_s"),
    [
        (CallFault.REFUSED, ev.FailureKind.REFUSED, False, 0.0),
        (CallFault.DENIED, ev.FailureKind.DENIED, False, 0.0),
        (CallFault.BUSY, ev.FailureKind.BUSY, False, LOST_TOGETHER_S),
        (CallFault.NOT_CONNECTED, ev.FailureKind.BUSY, True, LOST_TOGETHER_S),
        (CallFault.WRONG, ev.FailureKind.BROKEN, False, LOST_TOGETHER_S),
        (CallFault.LOST, ev.FailureKind.BROKEN, True, LOST_TOGETHER_S),
    ],
)
def test_a_fault_is_reported_when_the_loss_of_the_whole_instance_may_be_known(
    fault: CallFault, kind: ev.FailureKind, abrupt: bool, delay_s: float
) -> None:
    """All victims of one loss are decided together."""
    driver = Driver()
    attempt = attempt_of(driver, driver.stream())

    failed = attempt.failure(fault, "cause")

    at = attempt.failed_at
    assert failed == ev.AttemptFailed(S, 1, at, "cause", 0, abrupt=abrupt, failure=kind)
    assert fault.delay_s() == delay_s
    assert fault.delay_s(has_waited=True) == 0.0


def test_an_instance_that_is_given_up_ends_its_attempts_itself() -> None:
    assert CallFault.LOST.delay_s(is_given_up=True) == GIVEN_UP_TOGETHER_S


def test_the_hand_off_is_blamed_before_the_first_token_only() -> None:
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    assert attempt.prefilled(0.1)
    attempt.decode()
    assert attempt.failed_at == attempt.plan.decode

    attempt.blame_hand_off()
    before = attempt.failed_at
    attempt.decode()
    live.journal.append(7, 0.2)
    attempt.resumed(0.2)
    attempt.blame_hand_off()

    assert (before, attempt.failed_at) == (attempt.plan.prefill, attempt.plan.decode)


def test_a_call_may_be_silent_while_its_stream_stays() -> None:
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()

    live.attempt.stay_deadline = StayDeadline(0.0, until_s=5.0, number=1, latest_s=9.0)

    assert (attempt.is_excused(4.0), attempt.is_excused(6.0)) == (True, False)


def test_the_first_token_has_the_longer_limit() -> None:
    """The queue of the instance is part of it; afterwards the stream's own pace counts."""
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    first_s = attempt.limit_s(0.0, 0.0)
    assert attempt.prefilled(0.1)
    attempt.decode()
    live.journal.append(7, 0.2)
    live.journal.append(8, 0.21)

    attempt.resumed(0.21)

    assert attempt.limit_s(0.21, 0.21) < first_s < inf


def events_of_attempts(driver: Driver) -> list[ev.Event]:
    kinds = ev.PrefillDone | ev.StreamResumed | ev.AttemptFailed | ev.SlotDenied
    return [event for event in driver.events if isinstance(event, kinds)]


@pytest.mark.parametrize("seed", range(200))
def test_whatever_comes_in_any_order_an_attempt_ends_once_and_changes_nothing_then(
    seed: int,
) -> None:
    """An end is reported once, and an attempt that is over reports nothing."""
    random, driver = Random(seed), Driver(own_prefill=seed % 3 == 0)
    live = driver.stream()
    runs = RUNS if random.random() < 0.5 else ()
    prefill = random.choice([None, P0, P1])
    attempt = attempt_of(driver, live, act.Plan(D0, prefill, runs=runs))
    ends = 0
    if attempt.begin() is None:
        attempt.decode()

    def step() -> None:
        nonlocal ends
        match random.randrange(5):
            case 0:
                attempt.prefilled(0.1)
            case 1:
                live.journal.append(7, 0.2)
                attempt.resumed(0.2)
            case 2:
                failed = attempt.failure(random.choice(list(CallFault)), "cause")
                if failed is not None:
                    ends += 1
                    driver.control.attempt_over(live, failed, 0.3)
            case 3:
                if (denied := attempt.denial(0.1)) is not None:
                    ends += 1
                    driver.control.attempt_over(live, denied, 0.3)
            case 4 if random.random() < 0.3:
                driver.control.instance_lost(driver.control.instances.known[D0], "killed", 0.4)
                driver.up(D0, epoch=random.randrange(2, 1_000_000_000))
            case _:
                pass

    for _ in range(12):
        over, told = not attempt.is_current, len(events_of_attempts(driver))
        step()
        assert not over or len(events_of_attempts(driver)) == told

    assert ends <= 1


def silent_after_s(attempt: Attempt[SimStream], driver: Driver, instance: InstanceId) -> float:
    """How long from 0 the call may be silent whose instance has delivered to others at 5."""
    driver.control.progress.delivered[instance].last_s = 5.0
    return attempt.limit_s(0.0, 6.0)


def test_progress_with_other_prompts_is_no_silence_of_a_prompt() -> None:
    """Prompts share the steps of an engine, or wait for each other. What only waits for its KV to
    come does not wait for them.
    """
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    alone_s = attempt.limit_s(0.0, 6.0)

    prompt_s = silent_after_s(attempt, driver, attempt.failed_at)
    assert attempt.prefilled(6.0)
    attempt.decode()
    pulling_s = silent_after_s(attempt, driver, attempt.plan.decode)

    assert prompt_s == alone_s + 5.0
    assert pulling_s <= alone_s


def test_the_longer_prompt_may_be_silent_for_longer() -> None:
    """By twice what its table predicts."""
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    short_s = (attempt.begin(), attempt.limit_s(0.0, 0.0))[1]
    assert live.attempt.booked_on is not None

    live.attempt.booked_on.work_s += 60.0

    assert attempt.limit_s(0.0, 0.0) == pytest.approx(short_s + 120.0, abs=0.1)


def test_silence_alone_ends_no_call_that_has_no_prediction() -> None:
    """Pictures, say: unless other streams of the instance stand still."""
    driver = Driver()
    live = driver.stream()
    live.journal.is_predictable = False
    attempt = attempt_of(driver, live)
    instance = attempt.begin()
    assert instance is not None
    assert attempt.limit_s(0.0, 1e6) == inf

    attempt.fell_silent(50.0)  # As another one of that instance.

    assert attempt.limit_s(0.0, 1e6) < 70.0

    driver.control.progress.restarted(instance)

    assert attempt.limit_s(0.0, 1e6) == inf


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_request_that_two_instances_were_silent_at_gets_longer_at_the_next(
    is_whole: bool,
) -> None:
    """It has an end all the same: the only instance may be wedged."""
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    attempt.is_whole = is_whole
    driver.control.progress.delivered[attempt.plan.decode].report = 1.0, 1
    short_s = attempt.limit_s(0.0, 0.0)

    for _ in range(2):
        live.recovery.take_for_slow(0.0)

    assert attempt.limit_s(0.0, 0.0) == pytest.approx(16 * short_s)


def test_a_request_that_no_other_instance_could_take_gets_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its next attempt would only compute the same at the same instance."""
    limits_s = []
    for has_others in (True, False):
        monkeypatch.setattr(RecoveryPolicy, "has_others", lambda *_, found=has_others: found)
        driver = Driver()
        attempt = attempt_of(driver, driver.stream())
        attempt.begin()
        limits_s.append(attempt.limit_s(0.0, 0.0))

    assert limits_s[1] == pytest.approx(4 * limits_s[0])


def test_a_slow_request_says_nothing_of_its_instance() -> None:
    driver = Driver()
    live = driver.stream()
    live.recovery.take_for_slow(0.0)
    attempt = attempt_of(driver, live)
    attempt.begin()

    attempt.fell_silent(50.0)

    assert not driver.control.progress.delivered[attempt.failed_at].stands_still


@pytest.mark.parametrize(
    ("fault", "produced", "kind"),
    [
        (CallFault.ERROR, 0, ev.FailureKind.ERROR),
        (CallFault.ERROR, 1, ev.FailureKind.BROKEN),
        (CallFault.SILENT, 0, ev.FailureKind.SILENT),
        (CallFault.SILENT, 1, ev.FailureKind.BROKEN),
    ],
)
def test_behind_a_token_a_fault_is_that_of_the_instance(
    fault: CallFault, produced: int, kind: ev.FailureKind
) -> None:
    """Its request was served: it is not the cause."""
    driver = Driver()
    live = driver.stream()
    attempt = attempt_of(driver, live)
    attempt.begin()
    assert attempt.prefilled(0.1)
    attempt.decode()
    if produced:
        live.journal.append(7, 0.2)
        attempt.resumed(0.2)

    failed = attempt.failure(fault, "cause")

    assert failed is not None
    assert (failed.failure, failed.produced_tokens) == (kind, produced)
