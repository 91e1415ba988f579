"""`kvrs lab demo`: mistakes are reported before anything is started."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError, KvrsError
from kvrs_lab.cluster.launcher import Cluster
from kvrs_lab.demo import DemoOptions, run_demo


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoOptions:
    """Options with the few requests that the demo's fault needs; a started cluster is an error."""

    def started(self: Cluster) -> Cluster:
        raise KvrsError("a cluster was started")

    monkeypatch.setattr(Cluster, "__enter__", started)
    return DemoOptions(
        policy=PolicyName.AUTO,
        requests=40,
        trace=None,
        fault=None,
        seed=0,
        out=tmp_path / "out",
    )


def test_a_fault_on_an_unknown_victim_is_refused_before_the_start(
    options: DemoOptions, tmp_path: Path
) -> None:
    """The demo's cluster is known beforehand."""
    path = tmp_path / "f.yaml"
    path.write_text("- {when: {at_s: 1}, what: kill, whom: {id: zz}}\n")

    with pytest.raises(ConfigError) as caught:
        run_demo(replace(options, fault=path))

    assert caught.value.faults == [
        f"{path}: fault [0]: no 'zz' in the cluster; allowed: agent-n0, agent-n1, d0, d1, p0, p1"
    ]


def test_a_place_that_cannot_be_written_to_is_refused_before_the_start(
    options: DemoOptions, tmp_path: Path
) -> None:
    """The demo would run for half a minute and then lose its report."""
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match=r"--out: .*file/under: Not a directory"):
        run_demo(replace(options, out=tmp_path / "file" / "under"))


def test_a_trace_of_any_known_format_will_do(options: DemoOptions, tmp_path: Path) -> None:
    """The first line of a file tells its format, as for `kvrs lab replay`."""
    path = tmp_path / "azure.csv"
    rows = "".join(
        f"2023-11-16 18:17:{second:02}.0000000,{100 + second},9\n" for second in range(40)
    )
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)

    with pytest.raises(KvrsError, match="a cluster was started"):
        run_demo(replace(options, trace=path))


def test_too_few_requests_for_the_demos_own_fault_are_refused(
    options: DemoOptions, tmp_path: Path
) -> None:
    """It would never come due; a fault that waits for less may have less."""
    path = tmp_path / "f.yaml"
    path.write_text("- {when: {at_s: 1}, what: kill, whom: {id: d0}}\n")

    with pytest.raises(ConfigError, match="--requests: got 9; allowed: at least 40"):
        run_demo(replace(options, requests=9))
    with pytest.raises(KvrsError, match="a cluster was started"):
        run_demo(replace(options, requests=9, fault=path))
