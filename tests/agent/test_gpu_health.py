"""Classification of GPUs by their readings."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.agent.gpu_health import FAILING_XIDS, PROGRAM_XIDS, GpuClassifier, Reading, Thresholds
from kvrs.protocol.instance import GpuHealth, GpuState

HEALTHY, DEGRADED, FAILING = GpuState
FINE = Reading(uuid="GPU-a", index=0, ecc_uncorrected=3)


class Readings:
    """One GPU, read once per second."""

    def __init__(self) -> None:
        self.classifier, self.now_s, self.changes = GpuClassifier(), 0.0, list[GpuHealth]()
        self.look(FINE)

    def look(self, *readings: Reading) -> GpuHealth:
        for reading in readings:
            self.changes += self.classifier.update([reading], self.now_s)
            self.now_s += 1
        return self.classifier.health[0]


def test_a_new_gpu_is_reported_once() -> None:
    """Counters above zero at the first reading are no symptom."""
    readings = Readings()
    readings.look(*[FINE] * 100)

    assert readings.changes == [GpuHealth("GPU-a", 0, HEALTHY, "", 0.0)]


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        ({"lost": "GPU is lost"}, FAILING, "lost: GPU is lost"),
        ({"xids": (79,)}, FAILING, "xid 79"),
        ({"xids": (31, 94)}, FAILING, "xid 94"),
        ({"xids": (63,)}, DEGRADED, "xid 63"),
        ({"xids": (987,)}, DEGRADED, "xid 987"),
        ({"ecc_uncorrected": 4}, FAILING, "ecc uncorrected"),
        ({"remap_failed": True}, FAILING, "row remapping failed"),
        ({"remap_pending": True}, DEGRADED, "row remapping pending"),
        ({"reset_due": "a reset"}, FAILING, "driver asks for a reset"),
        ({"drain_due": "draining"}, DEGRADED, "driver asks for draining"),
    ],
)
def test_a_symptom_counts_at_once(change: dict[str, object], state: GpuState, reason: str) -> None:
    """The state gets worse with the first one."""
    readings = Readings()

    assert readings.look(replace(FINE, **change)) == GpuHealth("GPU-a", 0, state, reason, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"xids": tuple(PROGRAM_XIDS)},
        {"xids": (154,)},  # Each reading has the recovery action.
        {"ecc_uncorrected": 0},  # The driver was reloaded.
        {"ecc_uncorrected": None},
        {"silent": "Unknown Error"},
    ],
)
def test_conditions_of_healthy_gpus_are_no_symptoms(change: dict[str, object]) -> None:
    """Errors of programs, a counter that was reset, no answer for a moment."""
    readings = Readings()

    assert readings.look(*[replace(FINE, **change)] * 2).state is HEALTHY  # type: ignore[arg-type]


def test_a_silence_that_lasts_is_a_symptom() -> None:
    """Three seconds without an answer; an interruption starts the time again."""
    readings, bad = Readings(), replace(FINE, silent="Unknown Error")

    assert readings.look(*[bad] * 3, FINE, *[bad] * 3).state is HEALTHY
    assert readings.look(bad).state is FAILING


def test_errors_behind_a_missing_reading_count() -> None:
    """A counter that could not be read once was not reset."""
    readings = Readings()

    readings.look(
        replace(FINE, ecc_uncorrected=None),
        replace(FINE, lost=None, silent="Unknown Error", ecc_uncorrected=None),
    )
    assert readings.look(replace(FINE, ecc_uncorrected=4)).reason == "ecc uncorrected"


def test_a_gpu_gets_better_step_by_step() -> None:
    """Failing for ten minutes after the last symptom, then degraded for one more."""
    readings = Readings()
    readings.look(replace(FINE, xids=(79,)), *[FINE] * 700)

    assert [(health.state, health.since_s) for health in readings.changes] == [
        (HEALTHY, 0.0),
        (FAILING, 1.0),
        (DEGRADED, 601.0),
        (HEALTHY, 661.0),
    ]
    assert readings.changes[2].reason == "after xid 79"


def test_a_new_symptom_starts_the_time_again() -> None:
    """The hold time counts from the last one."""
    readings = Readings()
    bad = replace(FINE, xids=(79,))

    assert readings.look(bad, *[FINE] * 599, bad, *[FINE] * 599).state is FAILING
    assert len(readings.changes) == 2  # Each change once.


def test_a_persistent_condition_keeps_the_state() -> None:
    """A pending reset is a symptom in every reading."""
    readings = Readings()

    pending = replace(FINE, remap_pending=True)
    assert readings.look(*[pending] * 1000).reason == "row remapping pending"
    assert readings.look(*[FINE] * 61).state is HEALTHY


def test_the_most_severe_symptom_is_the_reason() -> None:
    """A reading with several symptoms reports the worst of them."""
    readings = Readings()

    assert readings.look(replace(FINE, remap_pending=True, xids=(63, 48))).reason == "xid 48"


def test_a_blocked_reader_is_a_symptom_of_all_gpus() -> None:
    """After the time for GPUs that do not answer."""
    classifier = GpuClassifier()
    classifier.update([FINE, replace(FINE, uuid="GPU-b", index=1)], 0.0)

    assert classifier.no_answer("NVML is stuck", 1.0) == []
    assert {health.state for health in classifier.no_answer("NVML is stuck", 4.0)} == {FAILING}


def test_an_xid_is_either_of_programs_or_of_the_gpu() -> None:
    """The sets are disjoint."""
    assert not PROGRAM_XIDS & FAILING_XIDS


READINGS = st.builds(
    Reading,
    uuid=st.just("GPU-a"),
    index=st.just(0),
    lost=st.sampled_from([None, None, None, "gone"]),
    silent=st.sampled_from([None, None, None, "Unknown Error"]),
    xids=st.lists(st.sampled_from([13, 63, 79, 200]), max_size=1).map(tuple),
    ecc_uncorrected=st.sampled_from([None, 0, 0, 0, 1]),
    remap_pending=st.booleans(),
)


@given(st.lists(st.tuples(READINGS, st.sampled_from([0.5, 1.0, 30.0, 700.0])), max_size=60))
def test_the_state_never_flaps(looks: list[tuple[Reading, float]]) -> None:
    """For any readings: only changes are returned, better goes one step at a time, and never before
    its time.
    """
    classifier, now_s, changes, thresholds = GpuClassifier(), 0.0, list[GpuHealth](), Thresholds()
    for reading, pause_s in looks:
        changes += classifier.update([reading], now_s)
        now_s += pause_s

    order = list(GpuState)
    for before, after in pairwise(changes):
        step = order.index(after.state) - order.index(before.state)
        assert step != 0
        if step < 0:
            hold_s = (
                thresholds.failing_hold_s if before.state is FAILING else thresholds.degraded_hold_s
            )
            assert step == -1
            assert after.since_s - before.since_s >= hold_s
    assert all((health.reason == "") == (health.state is HEALTHY) for health in changes)


def test_health_fits_a_gossip_entry() -> None:
    """An entry of a record holds 512 bytes."""
    health = GpuHealth("GPU-" + "f" * 36, 7, FAILING, "x" * 128, 1e9, "n" * 64)

    packed = msgspec.msgpack.encode(health)

    assert len(packed) < 300
    assert msgspec.msgpack.decode(packed, type=GpuHealth) == health


def test_an_older_agent_reports_no_name() -> None:
    """And an older proxy reads what a newer one reports."""
    newer = GpuHealth("GPU-a", 0, HEALTHY, "", 1.0, "NVIDIA H200")
    fields = msgspec.to_builtins(newer)

    assert msgspec.convert(fields[:-1], GpuHealth) == msgspec.structs.replace(newer, name="")


def test_the_name_stays_while_the_health_changes() -> None:
    """A board that is lost, and one that recovers, is of the same kind."""
    classifier, fine = GpuClassifier(), replace(FINE, name="NVIDIA H200")

    for now_s, reading in enumerate([fine, replace(fine, lost="gone"), *[fine] * 2000]):
        classifier.update([reading], now_s)
        (health,) = classifier.health
        assert health.name == "NVIDIA H200"
    assert health.state is HEALTHY
