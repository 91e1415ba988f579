"""`kvrs lab simulate`: what it prints, and what it says with its exit status."""

import math
from pathlib import Path

import pytest

from kvrs.config.file import load_config
from kvrs.core import ledger
from kvrs.errors import ConfigError
from kvrs_lab.sim import process, world
from kvrs_lab.sim.case import SimulateOptions
from kvrs_lab.sim.command import run_simulation
from kvrs_lab.sim.process import Clock
from kvrs_lab.sim.streams import Arrival

CONFIG = """
cluster:
  nodes:
  - {id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}
  - {id: n1, instances: [{id: p1, role: prefill}, {id: d1, role: decode}]}
policy: {name: auto}
backup: {mode: both, capacity_bytes: 10737418240}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def faults(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    return path


def test_faults_of_a_file_hit_the_simulated_cluster(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The language is that of real clusters."""
    file = faults(
        tmp_path,
        "- {when: {inflight_at_least: 3}, what: kill, whom: {role: decode, pick: busiest}}",
    )

    status = run_simulation(
        SimulateOptions(config=config, fault=file, requests=30, seeds=2, proxies=2)
    )

    shown = capsys.readouterr().out
    assert status == 0
    assert "All invariants held in 2 of 2 runs." in shown
    assert "kill decode (inflight_at_least 3)" in shown
    assert "streams recovered" in shown
    assert "pause p99" in shown


def test_random_deaths_are_drawn_by_the_seed(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same seeds, the same table; other seeds, another one."""
    options = SimulateOptions(config=config, deaths=4, requests=20, seeds=2)

    tables = []
    for seed in (0, 0, 5):
        assert (
            run_simulation(
                SimulateOptions(config=config, deaths=4, requests=20, seeds=2, seed=seed)
            )
            == 0
        )
        tables.append(capsys.readouterr().out)

    assert options.seed == 0
    assert tables[0] == tables[1] != tables[2]


def test_fault_that_never_comes_due_makes_the_command_fail(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing was shown about it."""
    file = faults(tmp_path, "- {when: {inflight_at_least: 5000}, what: kill, whom: {id: d0}}")

    assert run_simulation(SimulateOptions(config=config, fault=file, requests=5)) == 1
    assert "never due in 1 of 1 runs: kill d0" in capsys.readouterr().err


def test_unknown_names_are_refused(config: Path, tmp_path: Path) -> None:
    """All of them at once, before anything runs."""
    file = faults(
        tmp_path,
        "- {when: {at_s: 1}, what: kill, whom: {id: d9}}\n- {when: {at_s: 1}, what: "
        "link_cut, for_s: 1, whom: {link: [n0, n7]}}",
    )

    with pytest.raises(ConfigError) as caught:
        run_simulation(SimulateOptions(config=config, fault=file))

    assert [line.rsplit(": ", 1)[1] for line in caught.value.faults] == [
        "unknown name 'd9'",
        "unknown name 'n7'",
    ]


GROUP = """\
cluster:
  nodes:
    - id: n0
      instances:
        - {id: d0, role: both, pp: 2, group: g, stage_hosts: [{node: n0}, {node: n0}]}
        - {id: d1, role: both, pp: 2, group: g, stage_hosts: [{node: n0}, {node: n0}]}
"""


def test_a_host_of_a_stage_dies_where_instances_have_some(config: Path, tmp_path: Path) -> None:
    """Elsewhere the fault would never come due, and a host does nothing else in the simulator."""
    file = faults(tmp_path, "- {when: {at_s: 1}, what: kill, whom: {id: d0, stage: 1}}")
    group = tmp_path / "group.yaml"
    group.write_text(GROUP)

    assert run_simulation(SimulateOptions(config=group, fault=file, requests=20)) == 0
    with pytest.raises(ConfigError, match=r"\[0\]\.whom\.stage: got 1 with kill; allowed in the "):
        run_simulation(SimulateOptions(config=config, fault=file))
    file = faults(tmp_path, "- {when: {at_s: 1}, what: stop, for_s: 1, whom: {id: d0, stage: 1}}")
    with pytest.raises(ConfigError, match=r"got 1 with stop; allowed in the simulator: kill$"):
        run_simulation(SimulateOptions(config=group, fault=file))


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    """One line, before anything runs."""
    with pytest.raises(ConfigError, match=r"^--rate: got .*; allowed: above 0, below 1e\+09$"):
        run_simulation(SimulateOptions(rate=rate, requests=5))


@pytest.mark.parametrize("rate", [1e-300, 1e-7])
def test_a_rate_that_would_never_end_is_refused(rate: float) -> None:
    """Virtual time passes quickly, and not that quickly."""
    with pytest.raises(ConfigError, match=r"^--rate: got .* arrives after .* at most 1e\+06 s$"):
        run_simulation(SimulateOptions(rate=rate, requests=5))


def test_the_bound_of_a_world_that_is_stuck_counts_each_second(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long runs are no violation; what goes round at one moment is."""
    monkeypatch.setattr(process, "STEPS_MAX", 2000)

    assert run_simulation(SimulateOptions(config=config, requests=5, rate=0.05)) == 0

    def go_round(clock: Clock) -> None:
        clock.after(0.0, lambda: go_round(clock))

    stuck = world.World(load_config(config, {}), [Arrival(100.0, (4,), 1)], [], seed=0)
    stuck.cluster.clock.after(1.0, lambda: go_round(stuck.cluster.clock))
    with pytest.raises(AssertionError, match="does not come to rest"):
        stuck.run()


def test_streams_may_wait_as_long_as_the_configuration_lets_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wait that ends by its own limit is none for ever."""
    waits = tmp_path / "waits.yaml"
    nodes = "nodes: [{id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}]"
    waits.write_text(f"cluster: {{{nodes}}}\npolicy: {{recovery: {{wait_s: 3600}}}}\n")
    stop = "{{when: {{at_s: 1}}, what: stop, whom: {{id: {}}}, for_s: 3600}}"
    file = faults(tmp_path, f"[{stop.format('p0')}, {stop.format('d0')}]")

    assert run_simulation(SimulateOptions(config=waits, fault=file, requests=10)) == 0
    assert "All invariants held in 1 of 1 runs." in capsys.readouterr().out


def test_broken_law_is_named_with_its_seed(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other seeds are simulated all the same."""
    monkeypatch.setattr(ledger, "forget", lambda state, stream: None)

    assert run_simulation(SimulateOptions(config=config, requests=5, seeds=2)) == 1
    shown = capsys.readouterr().out
    assert "All invariants held in 0 of 2 runs." in shown
    assert "seed 1: " in shown
