"""`Control` turns the reports of a driver into events of the policy and actions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrs.config.backup import BackupSettings
from kvrs.config.policy import PolicySettings, RecoverySettings, SloSettings
from kvrs.config.sections import ProfileSettings
from kvrs.core.configured import Configured
from kvrs.core.control import Attempt, Control
from kvrs.core.fleet.known import Instances
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.lifecycle import Stage
from kvrs.core.model.member import Health
from kvrs.core.model.streams import CannotContinue, Complete
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles import catalog
from kvrs.profiles.catalog import write_profile
from kvrs.profiles.guess import guessed_prefill
from kvrs.protocol.instance import (
    AgentInfo,
    Capability,
    GpuHealth,
    GpuState,
    InstanceInfo,
    ModelNames,
    Role,
)
from kvrs_lab.sim.streams import Arrival, SimJournal, SimStream
from tests.core.policy_harness import GEOMETRY, PREFILL, make_config

P0, D0, P1, D1 = (InstanceId(name) for name in ("p0", "d0", "p1", "d1"))
S = StreamId("s")


class Driver:
    """Notes what it is to perform, and events, and performs nothing."""

    def __init__(self, *, can_give_end: bool = False, gather_s: float = 0.0, **info: Any) -> None:
        policy = PolicySettings(recovery=RecoverySettings(gather_s=gather_s))
        config = make_config([P0, D0, P1, D1], policy, SloSettings(), BackupSettings())
        self.gives_end = can_give_end
        self.recovering: set[StreamId] = set()
        self.performed: list[tuple[str, Any]] = []  # Names of the shell's methods, and arguments.
        self.events: list[ev.Event] = []
        self.control = Control[SimStream](
            Configured.of(config),
            run_id="test",
            shell=self,
            trace=self.trace,
        )
        for name in (P0, D0, P1, D1):
            self.up(name, **info)

    def trace(self, now_s: float, event: ev.Event, actions: list[act.Action]) -> None:
        self.events.append(event)

    def can_give_end(self) -> bool:
        return self.gives_end

    def catch_up_soon(self) -> None:
        self.control.catch_up()

    def stream_closed(self, live: SimStream) -> bool:
        self.performed.append(("stream_closed", (live,)))
        return live.id in self.recovering

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.performed.append((name, arguments))

    def up(self, name: InstanceId, epoch: int = 1, pid: int = 1, **changes: Any) -> None:
        known = self.control.instances.known[name]
        fields: dict[str, Any] = {
            "id": name,
            "node": known.node,
            "role": known.role,
            "epoch": epoch,
            "pid": pid,
            "model": "m",
            "fingerprint": "f",
            "geometry": GEOMETRY,
            "max_model_len": 0,
            "page_port": 0,
            "capabilities": list(Capability),
            "prefill": PREFILL,
        }
        if known.role is Role.DECODE and changes.pop("own_prefill", False):
            changes["own_prefill"] = InstanceId("p" + name[1])
        changes.pop("own_prefill", None) if known.role is Role.PREFILL else None
        self.control.instance_up(known, InstanceInfo(**{**fields, **changes}), 0.0)

    def lose(self, name: InstanceId) -> None:
        self.control.instance_lost(self.control.instances.known[name], "killed", 1.0)

    def stream(
        self, name: StreamId = S, now_s: float = 0.0, *, is_keyed: bool = False
    ) -> SimStream:
        arrival = Arrival(now_s, tuple(range(40)), 10, is_keyed=is_keyed)
        live = SimStream(name, journal=SimJournal(name, arrival, now_s, 40, list(range(40))))
        self.control.open(live, now_s)
        return live

    def decoding(self, **options: Any) -> SimStream:
        """A stream whose first token is with its client."""
        live = self.stream(**options)
        assert live.attempt.plan is not None
        attempt = Attempt(self.control, live, live.attempt.plan)
        assert attempt.begin() == live.attempt.plan.prefill
        assert attempt.prefilled(0.1)
        attempt.decode()
        live.journal.append(7, 0.2)
        attempt.resumed(0.2)
        return live

    def calls_of(self, name: str) -> list[Any]:
        return [arguments for called, arguments in self.performed if called == name]


def test_a_report_of_a_superseded_attempt_does_nothing() -> None:
    """Only the current attempt can fail a stream."""
    driver = Driver()
    live = driver.decoding()
    assert live.instance is not None
    driver.lose(live.instance)
    assert live.journal.attempt == 2
    driver.events.clear()

    driver.control.attempt_over(live, ev.AttemptFailed(S, 1, D0, "reset", 1), 2.0)

    assert driver.events == []


def test_an_attempt_that_fails_is_ended_before_the_next_begins() -> None:
    """A stream has exactly one writer."""
    driver = Driver()
    live = driver.decoding()
    assert live.instance is not None
    driver.performed.clear()

    driver.control.attempt_over(live, ev.AttemptFailed(S, 1, live.instance, "reset", 1), 1.0)

    calls = [name for name, _ in driver.performed]
    assert "end_attempt" in calls[: calls.index("begin_attempt")]
    assert [type(event) for event in driver.events][-1] is ev.AttemptFailed


def test_a_stream_an_instance_and_an_agent_have_one_record_each() -> None:
    """The policy writes into those that the calls and watches of its proxy have."""
    driver = Driver()
    live, control = driver.decoding(), driver.control
    agent = control.agents.add(InstanceId("agent-n0"), NodeId("n0"))

    control.checkpoints.up(agent, AgentInfo(agent.id, agent.node, 3, 1, 0, 1 << 20, 1e9), 1.0)

    assert control.policy.streams[S] is live
    assert control.policy.members[D0] is control.instances.known[D0]
    assert (agent.health, agent.epoch, agent.capacity_bytes) == (Health.UP, 3, 1 << 20)


def test_a_loss_names_all_its_victims_in_one_event() -> None:
    """So that the policy can spread them."""
    driver = Driver()
    lives = []
    for number in range(4):
        arrival = Arrival(0.0, (1, 2, 3), 10)
        name = StreamId(f"s{number}")
        live = SimStream(name, journal=SimJournal(name, arrival, 0.0, 3, [1, 2, 3]))
        driver.control.open(live, 0.0)
        lives.append(live)
    on_p0 = {live.id for live in lives if live.instance == P0}
    assert on_p0

    driver.lose(P0)

    (event,) = [event for event in driver.events if isinstance(event, ev.InstanceLost)]
    assert set(event.produced_tokens) == on_p0


def test_a_stream_that_has_all_its_text_is_no_victim() -> None:
    """Only its formal end was missing."""
    driver = Driver()
    live = driver.decoding()
    live.journal.output_ids.extend([7] * 9)
    assert live.journal.finished
    assert live.instance is not None

    driver.lose(live.instance)

    assert driver.calls_of("end_stream") == [(live, Complete())]
    assert not driver.control.streams


def test_a_driver_with_a_tokenizer_gives_the_end_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids are there and no engine is needed for the rest of the text."""

    monkeypatch.setattr(SimJournal, "finished", False)
    driver = Driver(can_give_end=True)
    live = driver.decoding()
    live.journal.output_ids.extend([7] * 9)
    assert live.instance is not None
    begun = len(driver.calls_of("begin_attempt"))

    driver.control.attempt_over(live, ev.AttemptFailed(S, 1, live.instance, "reset", 1), 1.0)

    assert len(driver.calls_of("give_end")) == 1
    assert len(driver.calls_of("begin_attempt")) == begun


@pytest.mark.parametrize(
    ("promise", "unkept", "ends"),
    [
        (ev.Promise.GREEDY, ("tools",), True),
        (ev.Promise.SAMPLED, ("tools",), True),
        (ev.Promise.GREEDY, (), False),  # A replay has them exactly.
        (ev.Promise.NONE, ("tools",), False),  # The head has said so.
    ],
)
def test_what_cannot_be_continued_as_promised_ends_with_its_cause(
    promise: ev.Promise, unkept: tuple[str, ...], *, ends: bool
) -> None:
    """No stream ends as if it were exact."""
    driver = Driver()
    live = driver.decoding()
    live.journal.inexact, live.journal.unkept = ("tools",), unkept
    live.journal.promise = promise
    lost = live.instance
    assert lost is not None

    driver.lose(lost)

    outcomes = [outcome for _, outcome in driver.calls_of("end_stream")]
    cause = "cannot be continued exactly: tools"
    assert outcomes == [CannotContinue(cause)] * ends
    ended = [each for each in driver.events if isinstance(each, ev.StreamEnded)]
    assert [(each.cause, each.instance) for each in ended] == [(cause, lost)] * ends


def test_one_call_is_lost_with_either_of_its_instances() -> None:
    """A decode instance that has its own prefill instance compute holds the one connection."""
    driver = Driver(own_prefill=True)
    live = driver.stream()
    plan = live.attempt.plan
    assert plan is not None
    assert driver.control.instances.known[plan.decode].info.own_prefill == plan.prefill
    assert live.stage is Stage.PREFILL

    driver.lose(plan.decode)

    (event,) = [event for event in driver.events if isinstance(event, ev.InstanceLost)]
    assert set(event.produced_tokens) == {S}


def test_a_fence_names_one_above_what_may_still_run() -> None:
    """Also of a stream that has ended meanwhile: an instance that is cut off cannot know."""
    driver = Driver()
    live = driver.decoding()
    instance = live.instance
    assert instance is not None
    driver.lose(instance)
    driver.control.end(live, Complete(), 2.0)

    assert driver.control.fences.numbers(instance) == {S: (0, 2)}

    driver.up(instance, epoch=2, pid=2)
    assert driver.control.fences.numbers(instance) == {}


def test_a_fence_names_an_attempt_that_has_a_successor_elsewhere() -> None:
    """The instance it was silent at may hang, and go on with it when it wakes."""
    driver = Driver()
    live = driver.decoding()
    former = live.instance
    assert former is not None
    assert driver.control.fences.noted == {}

    failed = ev.AttemptFailed(S, 1, former, "silent", 1, failure=ev.FailureKind.SILENT)
    driver.control.attempt_over(live, failed, 1.0)
    assert (live.journal.attempt, live.instance != former) == (2, True)
    driver.lose(former)

    assert driver.control.fences.numbers(former) == {S: (0, 2)}


@pytest.mark.parametrize("is_over", [False, True])
def test_a_fence_names_an_attempt_of_a_stream_that_waits_for_another_one(is_over: bool) -> None:
    """It failed before its instance was taken for lost, and the client may not have waited."""
    driver = Driver(gather_s=0.5)
    live = driver.decoding()
    former = live.instance
    assert former is not None

    failed = ev.AttemptFailed(S, 1, former, "silent", 1, True, ev.FailureKind.SILENT)
    driver.control.attempt_over(live, failed, 1.0)
    assert live.stage is Stage.WAITING
    driver.lose(former)
    if is_over:
        driver.control.end(live, Complete(), 1.0)

    assert driver.control.fences.numbers(former) == {S: (0, 2)}


def test_attempts_at_a_process_that_another_proxy_fenced_run_on() -> None:
    """It is the same process in a new epoch."""
    driver = Driver()
    live = driver.decoding()
    assert live.instance is not None

    driver.up(live.instance, epoch=2, pid=1)

    assert (live.stage, live.journal.attempt) == (Stage.DECODE, 1)


def test_what_a_resumable_stream_keeps_is_not_released() -> None:
    """Its next proxy needs the pages; leases that are not renewed run out by themselves."""
    for is_keyed in (False, True):
        driver = Driver()
        live = driver.decoding(is_keyed=is_keyed)
        driver.control.close(live, 1.0)

        batches = driver.control.leases.batches(renew=True)

        assert all(not update.renew for update in batches.values())
        assert any(update.release for update in batches.values()) is not is_keyed


def test_a_stream_is_closed_once() -> None:
    """Metrics and logs count it once, however often the driver says so."""
    driver = Driver()
    live = driver.decoding()

    for _ in range(2):
        driver.control.close(live, 1.0)

    assert driver.calls_of("stream_closed") == [(live,)]


def test_operators_are_shown_nothing_of_a_healthy_request() -> None:
    """Nor is anything of incidents done for it."""
    driver = Driver()
    driver.performed.clear()

    live = driver.decoding()
    driver.control.end(live, Complete(), 1.0)

    assert driver.events[-1] == ev.StreamEnded(S, 1)
    assert driver.calls_of("note") == []


def test_a_death_is_shown_once_and_each_event_until_its_stream_is_back() -> None:
    """With the actions that it called for, before they are performed."""
    driver = Driver()
    live = driver.decoding()
    driver.performed.clear()

    assert live.instance is not None
    driver.lose(live.instance)
    assert live.attempt.plan is not None
    attempt = Attempt(driver.control, live, live.attempt.plan)
    attempt.begin()
    attempt.prefilled(1.2)
    attempt.decode()
    attempt.resumed(1.4)

    shown = [(type(event), *map(type, actions)) for event, actions, _ in driver.calls_of("note")]
    assert shown == [
        (ev.InstanceLost, act.Start, act.Recovered, act.WakeAt),
        (ev.StreamResumed, act.Settled),
    ]
    names = [name for name, _ in driver.performed]
    assert names.index("note") < names.index("begin_attempt")


@pytest.mark.parametrize("cause", ["", "cannot be continued exactly: tokens"])
def test_an_end_is_shown_for_its_cause_or_if_its_stream_was_being_recovered(cause: str) -> None:
    for is_recovering in (False, True):
        driver = Driver()
        live = driver.decoding()
        driver.recovering = {S} if is_recovering else set()
        driver.performed.clear()

        driver.control.close(live, 1.0, cause)

        assert len(driver.calls_of("note")) == (is_recovering or bool(cause))


def test_an_adopted_stream_holds_what_is_still_there() -> None:
    """Pages known at a process that has restarted since then do not count."""
    driver = Driver()
    arrival = Arrival(0.0, tuple(range(40)), 10, is_keyed=True)
    journal = SimJournal(S, arrival, 0.0, 40, list(range(40)), [7, 7], owner_epoch=1)
    journal.kept = (ev.Kept(P0, 1, 2), ev.Kept(P1, 0, 2), ev.Kept(InstanceId("gone"), 1, 2))
    live = SimStream(journal.stream, journal=journal)

    driver.control.open(live, 1.0)

    assert [*live.prefilled_at] == [P0]
    (event,) = [event for event in driver.events if isinstance(event, ev.StreamAdopted)]
    assert (event.produced_tokens, event.age_s) == (2, 1.0)


def test_a_role_that_was_never_up_may_have_any_name() -> None:
    """Names that the instances of the other role serve are taken before it comes up."""
    config = make_config([P0, D0], PolicySettings(), SloSettings(), BackupSettings())
    instances, infos = (
        Instances(Configured.of(config)),
        Driver(names=ModelNames(("alias",))).control.instances,
    )

    instances.accept(instances.known[D0], infos.known[D0].info)

    assert set(instances.served_names()) == {"m", "alias"}


def test_a_named_table_is_not_that_of_forced_decode_steps() -> None:
    """A decode instance that has its prompts computed elsewhere reads known tokens one a step: its
    own table says what that takes.
    """
    name = "opt-13b-a100-distserve-tp1"
    config = make_config([P0, D0], PolicySettings(), SloSettings(), BackupSettings())
    config = config.model_copy(update={"profiles": ProfileSettings(prefill=name)})
    instances, infos = (
        Instances(Configured.of(config)),
        Driver(own_prefill=True).control.instances.known,
    )

    accepted = [
        instances.accept(instances.known[each], infos[each].info).prefill for each in (P0, D0)
    ]

    assert accepted == [catalog.prefill_table(name), None]


@pytest.mark.parametrize(("own_s", "added_s"), [(0.0, 0.004), (0.001, 0.0)])
def test_a_named_table_of_the_model_alone_gets_the_part_of_a_step_that_an_engine_measures(
    tmp_path: Path, own_s: float, added_s: float
) -> None:
    """A profile that names an engine's part has it in its table already."""
    profile = msgspec.structs.replace(
        catalog.profile("opt-13b-a100-distserve-tp1"), engine_step_s=own_s
    )
    path = write_profile(profile, tmp_path / "named.json")
    config = make_config([P0, D0], PolicySettings(), SloSettings(), BackupSettings())
    config = config.model_copy(update={"profiles": ProfileSettings(prefill=str(path))})
    instances = Instances(Configured.of(config))
    info = Driver().control.instances.known[P0].info
    prefill = msgspec.structs.replace(info.prefill, engine_step_s=0.004)

    accepted = instances.accept(instances.known[P0], msgspec.structs.replace(info, prefill=prefill))

    assert accepted.prefill == catalog.prefill_table(str(path)).plus(added_s)


def test_an_instance_has_one_record_which_its_next_process_replaces() -> None:
    """The watch and the policy write the same one: nothing is copied between them. One that another
    proxy has fenced is the same process.
    """
    driver = Driver()
    known, members = driver.control.instances.known, driver.control.policy.members
    first = known[D0]

    driver.up(D0, epoch=2)
    fenced = known[D0], members[D0].epoch
    driver.lose(D0)
    lost = known[D0], first.health, D0 in members
    driver.up(D0, epoch=3, pid=2)

    assert (fenced, lost) == ((first, 2), (first, Health.DOWN, False))
    assert all(known[name] is members[name] for name in (P0, D0, P1, D1))
    assert (known[D0] is first, known[D0].epoch, first.epoch) == (False, 3, 2)
    assert known[D0].epochs == {0: 3}


def test_of_a_removed_instance_nothing_is_known() -> None:
    """It is found not up, and with no capability, by all that still name it."""
    driver = Driver()
    instances = driver.control.instances
    before = instances.known[D0].abilities.retains, instances.known[D0].abilities.checkpoints
    left = instances.known[D0]

    instances.remove(left)

    assert before == (True, True)
    assert (instances.known[D0].abilities.retains, instances.known[D0].abilities.checkpoints) == (
        False,
        False,
    )
    assert left.health is instances.known[D0].health is Health.REMOVED
    assert (instances.known[D0].epochs, instances.is_present(D0)) == ({}, False)


@pytest.mark.parametrize("pulls", [True, False])
def test_a_decode_instance_without_its_prefill_is_one_that_fetches(pulls: bool) -> None:
    """A proxy that is not to use the prefill of a server: hand-offs come from elsewhere, in two
    calls.
    """
    config = make_config([P0, D1], PolicySettings(), SloSettings(), BackupSettings())
    instances, known = (
        Instances(Configured.of(config)),
        Driver(own_prefill=True).control.instances.known,
    )
    described = known[D1].info
    assert described is not None
    capabilities = [Capability.PULL_PAGES] if pulls else []
    info = msgspec.structs.replace(described, capabilities=capabilities)

    fault = instances.fault(instances.known[D1], info, streams_open=False)

    if pulls:
        assert fault is None
        assert instances.accept(instances.known[D1], info).info.own_prefill is None
    else:
        assert fault is not None
        assert fault.startswith("own_prefill is 'p1'")


@pytest.mark.parametrize(
    ("pid", "worker_pids", "had_not_ended"),
    [(1, [], True), (2, [], False), (1, [7], False)],
    ids=["same", "other process", "other workers"],
)
def test_the_policy_learns_whether_a_process_that_was_lost_had_ended(
    pid: int, worker_pids: list[int], *, had_not_ended: bool
) -> None:
    """Once: later news is of the process that is up then."""
    driver = Driver()
    driver.control.instance_lost(driver.control.instances.known[D0], "silent", 1.0)

    for epoch in (2, 3):
        driver.up(D0, epoch, pid=pid, worker_pids=worker_pids)

    ups = [event for event in driver.events if isinstance(event, ev.InstanceUp)][-2:]
    assert [event.had_not_ended for event in ups] == [had_not_ended, False]


@pytest.mark.parametrize(("epoch", "had_not_ended"), [(1, True), (2, False)])
def test_a_process_without_a_pid_had_not_ended_if_its_epoch_is_the_same(
    epoch: int, *, had_not_ended: bool
) -> None:
    driver = Driver(pid=0)
    driver.control.instance_lost(driver.control.instances.known[D0], "silent", 1.0)

    driver.up(D0, epoch, pid=0)

    ups = [event for event in driver.events if isinstance(event, ev.InstanceUp)]
    assert ups[-1].had_not_ended == had_not_ended


@pytest.mark.parametrize("is_guess", [True, False])
def test_a_guess_is_that_of_the_gpus_of_the_node(*, is_guess: bool) -> None:
    """The node's agent has named them in gossip. A table that was measured stays."""
    driver, guess = Driver(), guessed_prefill(None)
    gpu = GpuHealth("GPU-a", 0, GpuState.HEALTHY, "", 0.0, "NVIDIA H200")
    driver.control.gpus_seen(NodeId("n0"), [gpu], 0.0)

    given = msgspec.structs.replace(guess, is_guess=is_guess)
    driver.up(D0, epoch=2, prefill=given)

    found = driver.control.instances.known[D0].info.prefill
    assert found == (guessed_prefill(None, "NVIDIA H200") if is_guess else given)
    assert guess.seconds[-1] / guessed_prefill(None, "NVIDIA H200").seconds[-1] > 3


def test_what_an_instance_can_do_is_replaced_as_a_whole() -> None:
    """With the info, or with rows that it can load, without which nothing but pages is pulled."""
    driver = Driver(capabilities=[Capability.SPLIT, Capability.RETAIN])
    known = driver.control.instances.known[D0]
    before = known.abilities

    known.learn(names=ModelNames(("alias",)))
    named = known.abilities
    known.set_rows("rows")

    assert (before.pulls, before.splits, before.retains) == (False, False, True)
    assert named == msgspec.structs.replace(before, names=known.info.name_keys)
    assert known.abilities == msgspec.structs.replace(named, pulls=True, splits=True)
