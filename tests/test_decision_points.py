"""Verdicts over recoveries of real clusters (experiments/decisions)."""

from typing import Any

import pytest

from experiments.decisions.embedded import KEPT, PROFILE, points_of
from experiments.decisions.points import Point, Wave, missed, missed_within
from kvrs_engine.scheduling.pace import Pace
from kvrs_lab.load.passes import Run
from kvrs_lab.traces.records import StreamRecord

PROMPT_TOKENS, KILLED_S = 500, 10.0


def point(predicted_s: float, real_s: float = 1.0) -> Point:
    return Point("recompute", predicted_s, 0.5 * predicted_s, 2 * predicted_s, real_s, 1)


@pytest.mark.parametrize(
    ("predicted_s", "off"),
    [pytest.param(2.0, 2.0, id="too long"), pytest.param(0.5, 2.0, id="too short")],
)
def test_a_prediction_is_off_by_a_factor_either_way(predicted_s: float, off: float) -> None:
    """Too long and too short by the same factor count alike."""
    assert point(predicted_s).off == pytest.approx(off)


@pytest.mark.parametrize(
    ("predicted_s", "judged", "said"),
    [
        pytest.param([1.0, 1.4, 1.9], 3, [], id="kept"),
        pytest.param([1.6, 1 / 1.6, 1.0], 3, ["median off by x1.60, bar x1.5"], id="median"),
        pytest.param([1.0, 1.0, 2.1], 3, ["within x2 67%, bar 80%"], id="spread"),
        pytest.param([1.0, 1.0, 1.0], 1, ["the machine did not keep the pace: 1 of 3"], id="pace"),
        pytest.param([], 0, ["the machine did not keep the pace: 0 of 0"], id="none"),
    ],
)
def test_the_bars_are_on_the_judged_recoveries(
    predicted_s: list[float], judged: int, said: list[str]
) -> None:
    """If fewer than half of them could be judged, that is what is missed."""
    points = [*map(point, predicted_s)]

    found = [*missed(points, points[:judged]), *missed_within(points[:judged])]

    assert len(found) == len(said)
    assert all(each.startswith(begin) for each, begin in zip(found, said, strict=True))


def record(name: str, times_s: list[float]) -> StreamRecord:
    return StreamRecord(0, 0.0, PROMPT_TOKENS, 100, stream=name, token_times_s=times_s)


def steps(first_s: float, step_s: float, until_s: float) -> list[float]:
    return [first_s + number * step_s for number in range(int((until_s - first_s) / step_s))]


@pytest.mark.parametrize(
    ("before", "behind", "is_judged"),
    [
        pytest.param(1.0, 1.0, True, id="as the profile"),
        pytest.param(1.5, 1.0, False, id="slow before"),
        pytest.param(1.0, 1.5, False, id="slow behind"),
    ],
)
def test_a_target_keeps_its_pace_before_the_kill_and_behind_the_recovery(
    before: float, behind: float, is_judged: bool
) -> None:
    """The pause of the recovery itself is in neither."""
    pace, back_s = Pace(PROFILE), KILLED_S + 1.0
    alone_s, both_s = (pace.batch_s([], n, n * (PROMPT_TOKENS + 80)) for n in (1, 2))
    stays = steps(KILLED_S - 3, before * alone_s, KILLED_S)
    comes = steps(KILLED_S - 3, alone_s, KILLED_S)
    for each in (stays, comes):
        each += steps(back_s, behind * both_s, back_s + 3)
    row: dict[str, Any] = {"stream": "victim", "option": "recompute", "to": "d1"}
    row |= {"predicted_s": 0.9, "low_s": 0.5, "high_s": 1.5, "real_s": 1.0}
    streams = [{"id": "victim", "decode": "d0"}, {"id": "stays", "decode": "d1"}]
    run = Run([record("victim", comes), record("stays", stays)])

    (found,) = points_of(Wave("d0", KILLED_S, streams, [row], run), pace)

    assert found.pace is not None
    assert (found.pace <= KEPT) is is_judged
    assert found.pace == pytest.approx(max(before, behind), rel=0.05)
