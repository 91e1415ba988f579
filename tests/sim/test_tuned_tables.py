"""The experiment that tunes the prefill table: what it searches, and what it says of the gain."""

import json
from pathlib import Path

import pytest
import yaml

from experiments.simulator import tune
from kvrs.profiles import catalog
from kvrs.report.student import Interval
from kvrs.sim.tuning import Tuned


def test_a_search_has_all_tables_and_compares_on_the_other_trace(tmp_path: Path) -> None:
    """Every value is a table; the configuration has the one that is searched from."""
    traces = []
    for name, tokens in (("search", 900), ("other", 500)):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps([[n / 8, tokens, 20] for n in range(40)]))
        traces.append(path)
    directory = tmp_path / "work"
    directory.mkdir()
    values = tune.tables(directory)
    held_out = tune.cut(traces[1], 12, directory)

    tuned = tune.search(
        "4 times", values, directory, (traces[0], held_out), requests=20, trials=2, seeds=2
    )

    assert len(json.loads(held_out.read_text())) == 12
    space = yaml.safe_load((directory / "space.yaml").read_text())
    assert space == {tune.KEY: list(values.values())}
    config = yaml.safe_load((directory / "kvrs.yaml").read_text())
    assert config["profiles"]["prefill"] == values["4 times"]
    assert tuned.gain.n == 4
    row = tune.figures_of("4 times", tuned, values)
    assert row["values"][tune.KEY] in values
    assert str(tmp_path) not in json.dumps(row)


def test_tables_are_so_many_times_as_slow(tmp_path: Path) -> None:
    values = tune.tables(tmp_path)

    own_s = catalog.prefill_table(tune.PACE).seconds_for(2048)
    for factor in tune.FACTORS:
        slow = catalog.prefill_table(str(values[f"{factor:g} times"]))
        assert slow.seconds_for(2048) == pytest.approx(factor * own_s)
    assert values[tune.OWN] is None
    assert set(tune.BASES) <= set(values)


@pytest.mark.parametrize(
    ("half_width", "says"), [(0.1, "  +0.2000 ± 0.1000 s"), (0.3, "none (+0.2000 ± 0.3000 s)")]
)
def test_a_gain_that_is_not_shown_is_none(half_width: float, says: str) -> None:
    tuned = Tuned({tune.KEY: None}, 1.0, 1.5, Interval(0.2, half_width, 10), 1.4)

    text = tune.as_text([tune.figures_of("4 times", tuned, {tune.OWN: None})])

    assert text.splitlines()[-1].endswith(says)
