"""Settings that are replaced while a policy runs."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import msgspec
import pytest

from kvrs.config.policy import (
    AdmissionSettings,
    Dispatch,
    Handoff,
    PolicyName,
    PolicySettings,
    RecoverySettings,
    RestoredAt,
    Route,
    SloSettings,
)
from kvrs.config.settings import Settings
from kvrs.core.event_log import LogEntry, event_line, read, rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.errors import LogError
from kvrs.ids import InstanceId, StreamId
from tests.core.policy_harness import PolicyHarness, instance_up, of
from tests.core.recorded_incident import Recorder

OTHER = PolicySettings(
    name=PolicyName.ALWAYS_RECOMPUTE,
    handoff=Handoff.AUTO,
    route=Route.LOAD,
    dispatch=Dispatch.LEAST_LOADED,
    restored_at=RestoredAt.HOLDER,
    slots_max=3,
    slot_lease_s=7.0,
    assumed_link_bytes_per_s=1e6,
    admission=AdmissionSettings(wait_s=4.0),
    recovery=RecoverySettings(wait_s=3.0, gather_s=0.5, max_attempts=3),
)
OTHER_SLO = SloSettings(abort=True, ttft_s=1.0, recovery_gap_s=2.0, deadline_s=3.0)


def leaves(found: Any, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Every plain value that can be reached from an object, by its path."""
    if isinstance(found, Settings | str | int | float | frozenset) or found is None:
        yield path, found
        return
    if id(found) in seen or callable(found):
        return
    seen.add(id(found))
    parts: Mapping[Any, Any]
    if isinstance(found, Mapping):
        parts = found
    elif isinstance(found, list | tuple | set | deque):
        parts = dict(enumerate(found))
    elif is_dataclass(found) and not isinstance(found, type):
        parts = {each.name: getattr(found, each.name) for each in fields(found)}
    elif isinstance(found, msgspec.Struct):
        parts = msgspec.structs.asdict(found)
    else:
        parts = vars(found)
    yield from chain.from_iterable(
        leaves(part, f"{path}.{name}", seen) for name, part in parts.items()
    )


def test_every_part_of_the_policy_takes_over_all_settings() -> None:
    """A policy that has been reloaded holds what one that was made with these settings holds: a
    part that keeps a copy of a setting is found here.
    """
    assert not {
        name
        for section, default in ((OTHER, PolicySettings()), (OTHER_SLO, SloSettings()))
        for name, value in section
        if value == getattr(default, name)
    }
    reloaded = RecoveryPolicy(PolicySettings(), SloSettings())

    reloaded.handle(ev.SettingsReloaded(OTHER, OTHER_SLO), 0.0)

    made = RecoveryPolicy(OTHER, OTHER_SLO)
    assert dict(leaves(reloaded, "policy", set())) == dict(leaves(made, "policy", set()))


def test_what_was_learned_outlives_a_reload() -> None:
    """The spread of real costs takes events to learn."""
    policy = PolicyHarness("p0", "d0", "d1")
    for epoch, name in enumerate(("A", "B", "C"), 1):
        policy.decoding(name)
        for lost in ("d0", "d1"):
            policy.lose(lost, epoch, **{name: 1})
            policy.handle(instance_up(lost, epoch + 1))
        attempt = of(policy.actions, act.Start)[-1].attempt
        policy.handle(ev.StreamResumed(StreamId(name), attempt), policy.now_s + 10.0)
        policy.handle(ev.StreamEnded(StreamId(name), attempt))
    learned = policy.policy.snapshot()["spread"]
    assert learned["events"] > 2

    policy.handle(ev.SettingsReloaded(PolicySettings(slots_max=7), SloSettings()))

    assert policy.policy.snapshot()["spread"] == learned


def test_a_log_runs_again_with_the_settings_of_each_time() -> None:
    """From the line of the reload on: without that line, the same events lead to other actions."""
    recorder = Recorder()
    for name in ("p0", "d0", "d1"):
        recorder.handle(instance_up(name))
    recorder.handle(ev.SettingsReloaded(OTHER, OTHER_SLO))
    stream = StreamId("A")
    recorder.handle(ev.StreamArrived(stream, 1000))
    recorder.handle(ev.PrefillDone(stream, 1, 1000))
    recorder.handle(ev.StreamResumed(stream, 1))
    recorder.handle(ev.InstanceLost(InstanceId("d0"), 1, "killed", {stream: 1}))
    recorder.handle(ev.InstanceLost(InstanceId("d1"), 1, "killed", {stream: 1}))
    for _ in range(10):
        recorder.handle(ev.TimerFired(), after_s=1.0)

    reloads = [
        entry.event
        for entry in read(recorder.lines)
        if isinstance(entry, LogEntry) and isinstance(entry.event, ev.SettingsReloaded)
    ]
    without = [line for line in recorder.lines if "SettingsReloaded" not in line]

    assert reloads == [ev.SettingsReloaded(OTHER, OTHER_SLO)]
    assert rerun(recorder.lines).difference is None
    assert rerun(without).difference is not None


def test_a_log_with_settings_that_cannot_be_is_refused() -> None:
    """A log may come from anywhere; a value out of its range is named."""
    line = event_line(1.0, ev.SettingsReloaded(OTHER, SloSettings()), [])

    with pytest.raises(LogError, match="slots_max"):
        rerun([*Recorder().lines, line.replace('"slots_max": 3', '"slots_max": 0')])
