"""`kvrs lab tune`: a search in the simulator, and a gain that only a held-out load may show."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from kvrs.errors import ConfigError
from kvrs_lab.report.metrics import Slo
from kvrs_lab.report.student import Interval
from kvrs_lab.sim import tuning
from kvrs_lab.sim.case import SimulateOptions
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.goals import Goal
from kvrs_lab.sim.tuning import Tuned, TuneOptions, Tuning, recovery_p99_s, run_tuning

CONFIG = """
cluster:
  engine: {max_batch_tokens: 16, max_running: 4}
  nodes:
  - {id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}
"""
# The longer prompts of a load wait for the budget of a step.
BATCHES = "cluster.engine.max_batch_tokens: [16, 512]\ncluster.engine.max_running: [4, 64]\n"


@pytest.fixture
def case(tmp_path: Path) -> SimulateOptions:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return SimulateOptions(config=path, requests=15, rate=4.0, seeds=2, slo=Slo(ttft_s=0.5))


def options(tmp_path: Path, space: str, goal: Goal = Goal.GOODPUT, **given: Any) -> TuneOptions:
    path = tmp_path / "space.yaml"
    path.write_text(space)
    return TuneOptions(space=path, goal=goal, **{"trials": 4, "held_out_seeds": 3, **given})


def test_a_gain_on_the_held_out_load_is_printed_as_yaml(
    tmp_path: Path, case: SimulateOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    """The lines above it are comments, so that the output is a piece of a configuration."""
    given = options(tmp_path, BATCHES)

    assert run_tuning(given, case) == 0

    shown = capsys.readouterr().out
    assert yaml.safe_load(shown) == {
        "cluster": {"engine": {"max_batch_tokens": 512, "max_running": 64}}
    }
    assert "# on the held-out load, 3 seeds, 95 %: gain +" in shown


def test_values_that_change_nothing_are_no_gain(
    tmp_path: Path, case: SimulateOptions, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without faults nothing recovers, whatever the settings of recoveries are."""
    given = options(tmp_path, "policy.slots_max: {low: 8, high: 64}\n", trials=2)

    assert run_tuning(given, case) == 0

    shown = capsys.readouterr()
    assert "gain: none (" in shown.out
    assert yaml.safe_load(shown.out) is None
    assert "no gain is shown: nothing to change" in shown.err


def test_noise_is_no_gain(
    tmp_path: Path, case: SimulateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best of many proposals looks better in the search, where it was chosen."""

    def noisy(goal: Goal, simulated: object, seed: int) -> float:
        return rng.random()

    rng = Random(7)
    monkeypatch.setattr(tuning, "cost", noisy)
    given = options(tmp_path, "policy.recovery.gather_s: {low: 0.001, high: 0.1, log: true}\n")
    quick = replace(case, requests=1)

    found = Tuning(given, quick).run()

    assert found.found > found.base
    assert not found.is_shown


@pytest.mark.parametrize(
    ("gain", "shown"),
    [((0.3, 0.2), True), ((0.1, 0.2), False), ((-0.3, 0.2), False), ((0.3, None), False)],
)
def test_an_interval_with_zero_in_it_shows_nothing(
    gain: tuple[float, float | None], shown: bool
) -> None:
    """Nor does a single run, which has none."""
    tuned = Tuned({}, 1.0, 1.0, Interval(*gain, 5), 1.0)

    assert tuned.is_shown is shown


def test_the_second_half_of_a_trace_is_held_out(tmp_path: Path, case: SimulateOptions) -> None:
    """The search does not see it; another trace takes its place."""
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival,input,output", *(f"{n},{20 + n},3" for n in range(9))]))
    given = options(tmp_path, BATCHES)

    search, held_out = Tuning(given, replace(case, trace=trace, requests=None))._loads(
        replace(case, trace=trace, requests=None)
    )

    assert (search.first_request, search.requests) == (0, 4)
    assert (held_out.first_request, held_out.requests) == (4, 5)
    assert {search.seed, search.seed + 1}.isdisjoint(range(held_out.seed, held_out.seed + 3))


def test_a_stream_that_was_lost_counts_as_a_long_pause() -> None:
    """Giving up is no quick recovery."""
    quick = Outcome(ended=Counter(complete=10), pauses_s=[0.1] * 5)
    lost = Outcome(ended=Counter(complete=9, aborted=1), pauses_s=[0.1] * 4)

    assert recovery_p99_s(quick) == pytest.approx(0.1)
    assert recovery_p99_s(lost) > 10


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        ("policy.name: [auto, fast]\n", r"space\.yaml: .*: policy\.name: got 'fast'; "),
        ("policy.nmae: [auto]\n", r"space\.yaml: .*: policy\.nmae: unknown key; "),
        ("policy.slots_max: {low: 5, high: 5}\n", r"policy\.slots_max: got low 5 and high 5; all"),
        (
            "policy.recovery.gather_s: {low: 0, high: 1, log: true}\n",
            r"allowed: low below high, above 0",
        ),
        ("policy.slots_max: {low: 5}\n", r"space\.yaml: Object missing required field `high`"),
        ("preset: [kvrs]\n", r"config\.yaml: preset: unknown key"),
        ("{}\n", r"space\.yaml: no settings; allowed: one or more$"),
        ("a: [1\n", r"space\.yaml:2: not valid YAML: while parsing .* at line 1, c"),
    ],
)
def test_a_wrong_space_is_refused(
    tmp_path: Path, case: SimulateOptions, space: str, reason: str
) -> None:
    """Each end of it is tried before anything is simulated."""
    with pytest.raises(ConfigError, match=reason):
        Tuning(options(tmp_path, space), case)


def test_recoveries_need_faults(tmp_path: Path, case: SimulateOptions) -> None:
    """Without any, all values are equally good."""
    with pytest.raises(ConfigError, match=r"^--fault, --deaths: missing"):
        Tuning(options(tmp_path, BATCHES, Goal.RECOVERY_P99), case)
