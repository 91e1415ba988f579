"""How a soak tells memory that grows from memory that does not."""

import pytest

from experiments.soak.growth import Growth, Sample, Size, growths
from experiments.soak.load import EVERY_S, until_turn_s

RUN_S, STEP_S, MIB = 3600.0, 10.0, 1 << 20


def life(name: str, pid: int, from_s: float, to_s: float, growth: float = 0.0) -> list[Sample]:
    """A process of 100 MiB and 50 descriptors that grows by so many of both per minute."""
    steps = range(int(from_s / STEP_S), int(to_s / STEP_S))
    ages_min = [(step * STEP_S - from_s) / 60 for step in steps]
    return [
        Sample(step * STEP_S, name, pid, int((100 + growth * age) * MIB), int(50 + growth * age))
        for step, age in zip(steps, ages_min, strict=True)
    ]


@pytest.mark.parametrize(("per_minute", "is_flat"), [(0.0, True), (0.05, True), (0.5, False)])
def test_a_process_that_nobody_ends_is_compared_with_its_first_minutes(
    per_minute: float, is_flat: bool
) -> None:
    """An hour at half a MiB a minute is a leak."""
    found = growths(life("proxy-2", 1, 0, RUN_S, per_minute), ["proxy-2"])

    assert found["proxy-2"].is_flat == is_flat


def test_the_first_five_minutes_are_no_measure() -> None:
    """A proxy keeps finished answers so long, and grows meanwhile."""
    warm = life("proxy-2", 1, 0, 300, 20.0)
    rest = [each._replace(rss_bytes=200 * MIB) for each in life("proxy-2", 1, 300, RUN_S)]

    assert growths(warm + rest, ["proxy-2"])["proxy-2"].first.rss_bytes == 200 * MIB


def test_processes_that_are_ended_are_compared_by_kind() -> None:
    """Each from its second minute on; what each of them grows by itself is the same."""
    first = life("agent-n0", 1, 0, 480, 1.0) + life("agent-n1", 2, 0, 240, 1.0)
    later = life("agent-n0", 3, 700, 1180, 1.0)
    heavier = [each._replace(rss_bytes=each.rss_bytes + 20 * MIB) for each in later]

    flat, grown = (growths(first + each, [])["agents"] for each in (later, heavier))

    assert (flat.lives, flat.first) == (3, flat.later)
    assert flat.is_flat
    assert not grown.is_flat


def test_a_kind_without_a_second_life_is_left_out() -> None:
    """Nothing is flat by having been seen once."""
    assert growths(life("proxy-0", 1, 0, 480), []) == {}


def test_more_descriptors_are_a_leak_too() -> None:
    """By their fewest: those of open streams come and go."""
    size = Size(100 * MIB, 50)

    assert Growth(1, size, size._replace(descriptors=55)).is_flat
    assert not Growth(1, size, size._replace(descriptors=56)).is_flat


@pytest.mark.parametrize(
    ("after_turns", "until_turns"),
    [(-0.25, 0.25), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0), (3.75, 0.25)],
    ids=["before the first", "at the first", "in time", "as long as a turn", "late"],
)
def test_a_late_client_leaves_turns_out(after_turns: float, until_turns: float) -> None:
    """Catching up would give some minutes more answers than others."""
    assert until_turn_s(100.0, 100.0 + after_turns * EVERY_S) == until_turns * EVERY_S
