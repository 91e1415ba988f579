from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.agent.gpu_health import FAILING_XIDS, PROGRAM_XIDS, GpuJudge, Patience, Reading
from kvrs.protocol.gpus import GpuHealth, GpuState

HEALTHY, DEGRADED, FAILING = GpuState
FINE = Reading(uuid="GPU-a", index=0, ecc_uncorrected=3, nvlink_errors=1000, nvlink_recoveries=2, nvlinks_up=18)


class Story:
    """One GPU, looked at once a second."""

    def __init__(self) -> None:
        self.judge, self.now_s, self.said = GpuJudge(), 0.0, list[GpuHealth]()
        self.look(FINE)

    def look(self, *readings: Reading) -> GpuHealth:
        for reading in readings:
            self.said += self.judge.take([reading], self.now_s)
            self.now_s += 1
        return self.judge.health[0]


def test_a_new_gpu_is_told_of_once() -> None:
    """Counters that were not zero before we came are no sign."""
    story = Story()
    story.look(*[FINE] * 100)

    assert story.said == [GpuHealth("GPU-a", 0, HEALTHY, "", 0.0)]


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
        ({"nvlink_errors": 1101}, DEGRADED, "nvlink errors"),
        ({"nvlink_recoveries": 3}, DEGRADED, "nvlink recovery"),
        ({"nvlinks_up": 16}, DEGRADED, "nvlinks down: 2"),
    ],
)
def test_a_sign_is_believed_at_once(change: dict[str, object], state: GpuState, reason: str) -> None:
    story = Story()

    assert story.look(replace(FINE, **change)) == GpuHealth("GPU-a", 0, state, reason, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"xids": tuple(PROGRAM_XIDS)},
        {"xids": (154,)},  # The action that it is about is read by itself.
        {"ecc_uncorrected": 0},  # The driver was loaded anew.
        {"ecc_uncorrected": None},
        {"nvlink_errors": 1050},
        {"slowed_by": ("hw thermal",)},
        {"silent": "Unknown Error"},
    ],
)
def test_what_happens_to_sound_gpus_is_no_sign(change: dict[str, object]) -> None:
    """Bugs of programs, a few corrected errors, a moment of heat."""
    story = Story()

    assert story.look(*[replace(FINE, **change)] * 2).state is HEALTHY  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "state", "after"),
    [({"slowed_by": ("hw thermal",)}, DEGRADED, 6), ({"silent": "Unknown Error"}, FAILING, 4)],
)
def test_what_lasts_is_a_sign(change: dict[str, object], state: GpuState, after: int) -> None:
    """Five seconds of throttling, three without an answer; an interruption begins it anew."""
    story, bad = Story(), replace(FINE, **change)  # type: ignore[arg-type]

    assert story.look(*[bad] * (after - 1), FINE, *[bad] * (after - 1)).state is HEALTHY
    assert story.look(bad).state is state


def test_errors_behind_a_missing_reading_are_counted() -> None:
    """A counter that could not be read once has not begun anew."""
    story = Story()

    story.look(replace(FINE, ecc_uncorrected=None), replace(FINE, lost=None, silent="Unknown Error", ecc_uncorrected=None))
    assert story.look(replace(FINE, ecc_uncorrected=4)).reason == "ecc uncorrected"


def test_it_gets_better_step_by_step() -> None:
    """Failing for ten minutes after the last sign, then degraded for one more."""
    story = Story()
    story.look(replace(FINE, xids=(79,)), *[FINE] * 700)

    assert [(health.state, health.since_s) for health in story.said] == [
        (HEALTHY, 0.0),
        (FAILING, 1.0),
        (DEGRADED, 601.0),
        (HEALTHY, 661.0),
    ]
    assert story.said[2].reason == "after xid 79"


def test_a_new_sign_begins_the_time_anew() -> None:
    story = Story()
    bad = replace(FINE, xids=(79,))

    assert story.look(bad, *[FINE] * 599, bad, *[FINE] * 599).state is FAILING
    assert len(story.said) == 2  # It says so once.


def test_a_condition_that_stays_keeps_the_state() -> None:
    """A link that is down, or a reset that is due, is not forgotten because nothing new happens."""
    story = Story()

    assert story.look(*[replace(FINE, nvlinks_up=17)] * 1000).reason == "nvlinks down: 1"
    assert story.look(*[FINE] * 61).state is HEALTHY


def test_the_gravest_sign_is_the_reason() -> None:
    story = Story()

    assert story.look(replace(FINE, remap_pending=True, xids=(63, 48))).reason == "xid 48"


def test_a_stuck_reader_is_a_sign_against_all() -> None:
    judge = GpuJudge()
    judge.take([FINE, replace(FINE, uuid="GPU-b", index=1)], 0.0)

    assert judge.no_answer("NVML is stuck", 1.0) == []
    assert {health.state for health in judge.no_answer("NVML is stuck", 4.0)} == {FAILING}


def test_an_xid_is_either_the_programs_or_the_gpus() -> None:
    assert not PROGRAM_XIDS & FAILING_XIDS


READINGS = st.builds(
    Reading,
    uuid=st.just("GPU-a"),
    index=st.just(0),
    lost=st.sampled_from([None, None, None, "gone"]),
    silent=st.sampled_from([None, None, None, "Unknown Error"]),
    xids=st.lists(st.sampled_from([13, 63, 79, 200]), max_size=1).map(tuple),
    ecc_uncorrected=st.sampled_from([None, 0, 0, 0, 1]),
    slowed_by=st.sampled_from([(), (), ("hw thermal",)]),
    nvlink_errors=st.none() | st.integers(0, 10_000),
    nvlinks_up=st.sampled_from([None, 17, 18]),
)


@given(st.lists(st.tuples(READINGS, st.sampled_from([0.5, 1.0, 30.0, 700.0])), max_size=60))
def test_it_never_flaps(looks: list[tuple[Reading, float]]) -> None:
    """Whatever is read: only changes are told, better is one step at a time, and never before its time."""
    judge, now_s, said, patience = GpuJudge(), 0.0, list[GpuHealth](), Patience()
    for reading, pause_s in looks:
        said += judge.take([reading], now_s)
        now_s += pause_s

    order = list(GpuState)
    for before, after in pairwise(said):
        step = order.index(after.state) - order.index(before.state)
        assert step != 0
        if step < 0:
            hold_s = patience.failing_hold_s if before.state is FAILING else patience.degraded_hold_s
            assert step == -1
            assert after.since_s - before.since_s >= hold_s
    assert all((health.reason == "") == (health.state is HEALTHY) for health in said)


def test_what_is_told_is_small_and_travels() -> None:
    """A record of gossip holds 512 bytes."""
    health = GpuHealth("GPU-" + "f" * 36, 7, FAILING, "x" * 128, 1e9)

    packed = msgspec.msgpack.encode(health)

    assert len(packed) < 300
    assert msgspec.msgpack.decode(packed, type=GpuHealth) == health
