"""Clients in `kvrs lab simulate`: latencies and goodput."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvrs.config.file import load_config
from kvrs.errors import ConfigError, KvrsError
from kvrs.profiles import catalog
from kvrs_lab.report import metrics
from kvrs_lab.report.metrics import Slo, goodput_per_s
from kvrs_lab.sim import seeds
from kvrs_lab.sim.case import SimulateOptions, load_case, make_world
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.command import run_simulation
from kvrs_lab.sim.fault_scenarios import FaultEvent
from kvrs_lab.sim.results import latencies
from kvrs_lab.sim.seeds import Simulated, simulate
from kvrs_lab.sim.streams import Arrival
from kvrs_testkit.death_scenarios import PROXY_KILLED
from kvrs_testkit.disturbances import DisturbedWorld

CONFIG = """
cluster:
  nodes:
  - {id: n0, instances: [{id: p0, role: prefill}, {id: d0, role: decode}]}
  - {id: n1, instances: [{id: p1, role: prefill}, {id: d1, role: decode}]}
backup: {mode: both, capacity_bytes: 10737418240}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_document_and_table_agree(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are made of the same records."""
    kill = config.with_name("faults.yaml")
    kill.write_text("- {when: {inflight_at_least: 3}, what: kill, whom: {role: decode}}")
    options = SimulateOptions(config=config, fault=kill, requests=30, slo=Slo(ttft_s=0.1))
    loaded, faults = load_case(options)
    world = make_world(options, loaded, faults, 0)
    world.run()
    records = records_of(world.arrivals, world.cluster.proxies)

    assert run_simulation(replace(options, json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    assert run_simulation(options) == 0
    shown = capsys.readouterr().out

    ttft = [record.token_times_s[0] - record.due_s for record in records]
    found = document["policies"]["auto"]["clients"]
    assert found["arrival_ttft_s"]["mean"]["mean"] == pytest.approx(sum(ttft) / 30)
    assert f"{sum(ttft) / 30 * 1000:.1f} ms" in shown
    in_time = sum(each <= 0.1 for each in ttft)
    assert 0 < in_time < 30
    assert document["policies"]["auto"]["seeds"]["0"]["clients"]["slo_met"] == in_time


def test_a_terminal_is_shown_how_many_seeds_have_ended(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have one bar."""
    shown = StringIO()
    terminal = partial(Console, file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(seeds, "Console", lambda stderr: terminal())

    simulate(SimulateOptions(config=config, requests=5, seeds=2), load_config(config, {}), [])

    assert "100%" in shown.getvalue()


def test_clients_keep_their_tokens_when_their_proxy_dies(config: Path) -> None:
    """Every token is received once, at a time that does not go back."""
    died = FaultEvent(PROXY_KILLED, 1.0)
    arrivals = [Arrival(n / 10, (4, 5, n), 60, is_keyed=True) for n in range(20)]
    world = DisturbedWorld(load_config(config, {}), arrivals, [died], seed=0, proxies=2)
    world.run()

    records = records_of(world.arrivals, world.cluster.proxies)

    complete = [record for record in records if record.completed]
    assert world.cluster.outcome.adopted > 0
    assert len(complete) == 20
    for record in complete:
        assert len(record.token_times_s) == record.max_tokens
        assert all(earlier <= later for earlier, later in pairwise(record.token_times_s))
        assert record.due_s < record.token_times_s[0]
        assert record.ended_s >= record.token_times_s[-1]
    assert goodput_per_s(records, Slo()) > 0


def test_the_first_token_comes_from_prefill_where_the_backend_sends_it(config: Path) -> None:
    """It does not wait for the hand-off and the first step of decode; the other tokens do."""
    found = {}
    for backend in ("distserve", "embedded"):
        config.write_text(CONFIG.replace("cluster:", f"cluster:\n  backend: {backend}"))
        options = SimulateOptions(config=config, requests=20, rate=1.0)
        loaded, faults = load_case(options)
        found[backend] = simulate(options, loaded, faults).clients[0]
    prefill, decode = found["distserve"], found["embedded"]

    pace = catalog.decode_table("opt-13b-a100-distserve-tp1")
    assert decode["arrival_ttft_s"]["p50"] - prefill["arrival_ttft_s"]["p50"] > pace.seconds_for(
        1, 100
    )
    assert prefill["latency_s"]["p50"] == pytest.approx(decode["latency_s"]["p50"], rel=0.05)
    assert prefill["tokens"] == decode["tokens"]


@pytest.mark.process
def test_seeds_in_several_processes_give_the_same(config: Path) -> None:
    """In the order of the seeds, whichever ends first."""
    found = []
    for jobs in (1, 2):
        options = SimulateOptions(config=config, requests=5, seeds=2, deaths=1, jobs=jobs)
        loaded, faults = load_case(options)
        found.append(simulate(options, loaded, faults))

    assert found[0] == found[1]
    assert list(found[0].clients) == [0, 1]


def test_latencies_of_several_seeds_are_means_with_intervals() -> None:
    """The interval is that of the seeds, not that of the requests."""
    summary = metrics.summary([], Slo())
    values = {"mean": 1.0, "p50": 1.0, "p90": 2.0, "p99": 3.0}
    runs = [summary | {"tpot_s": values}, summary | {"tpot_s": values | {"mean": 3.0}}]

    found = latencies(Simulated({}, {}, dict(enumerate(runs))))

    assert found["tpot_s"]["mean"] == {"mean": 2.0, "half_width": pytest.approx(12.7062)}
    assert found["tpot_s"]["p99"] == {"mean": 3.0, "half_width": 0.0}
    assert found["arrival_ttft_s"]["p50"] == {"mean": None, "half_width": None}


FAULT = "- {{when: {{at_s: 1}}, what: kill, whom: {}}}"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            lambda path: {"fault": path("f.yaml", FAULT.format("{id: d0, rank: 1}"))},
            r"f\.yaml: \[0\]\.whom\.rank: got 1 of 'd0'; allowed: below 1$",
        ),
        (
            lambda path: {"fault": path("f.yaml", FAULT.format("{role: both}"))},
            r"f\.yaml: \[0\]\.whom\.role: got 'both'; allowed: decode, prefill$",
        ),
        (
            lambda path: {"trace": path("t.csv", "input,output\n3,4\n")},
            r"t\.csv:1: no trace of a known format, .* a plain trace \(CSV with arrival, ",
        ),
        (
            lambda path: {"trace": path("t.csv", "arrival,input,output\n1,3,4\n"), "requests": 2},
            r"^the trace has 1 requests, 2 were asked for$",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    config: Path,
    tmp_path: Path,
    given: Callable[[Callable[[str, str], Path]], dict[str, Any]],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With place and reason."""

    def path(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    monkeypatch.setattr("kvrs_lab.sim.seeds.make_world", None)

    with pytest.raises(KvrsError, match=reason):
        run_simulation(SimulateOptions(config=config, **given(path)))


def test_agents_that_are_not_there_cannot_be_hit(config: Path, tmp_path: Path) -> None:
    """Without checkpoints at agents there are none."""
    config.write_text(CONFIG.replace("mode: both", "mode: 'off'"))
    fault = tmp_path / "faults.yaml"
    fault.write_text(FAULT.format("{role: agent}"))

    with pytest.raises(ConfigError, match=r"whom\.role: got 'agent' with backup\.mode 'off'"):
        load_case(SimulateOptions(config=config, fault=fault))


def test_a_trace_keeps_its_own_times(config: Path, tmp_path: Path) -> None:
    """Where no rate is asked for."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival,input,output\n10,30,4\n11,40,2\n15,9000,3\n")
    loaded = load_config(config, {})

    for rate, times_s in ((None, [0, 1, 5]), (1.0, [0, 0.4, 2])):
        options = SimulateOptions(config=config, trace=trace, rate=rate)
        world = make_world(options, loaded, [], 0)
        assert [each.at_s for each in world.arrivals] == pytest.approx(times_s)
    assert [each.prompt_tokens for each in world.arrivals] == [30, 40, 1024]
