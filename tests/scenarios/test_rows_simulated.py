"""Every row of the table in the simulator, whose invariants are checked on the way."""

from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from kvrs.core import placing, routing
from kvrs.core.event_log import LogEntry, read
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_testkit.hostile_worlds import as_vllm
from kvrs_testkit.scenarios import (
    DRAINS_S,
    Becomes,
    Condition,
    Entry,
    Found,
    Scenario,
    check,
    gpu_of,
)
from tests.scenarios.rows import ROWS

# A host computes in a fifth of the time in which its stage has a batch: else a loan gains nothing.
PIPELINES = PipelineModel(computing_share=0.2)
ANSWERS = {Condition.FAILS: "HTTP 500", Condition.BUSY: "HTTP 503"}


def simulated(row: Scenario, seed: int) -> Found:
    load = row.load
    arrivals = [
        Arrival(
            load.at_s(number),
            tuple(prompt),
            load.tokens,
            is_poison=number in load.poisons,
        )
        for number, prompt in enumerate(load.prompts(seed))
    ]
    world = World(
        row.config(),
        arrivals,
        named_deaths(row.parsed),
        seed=seed,
        reload_s=row.back_s,
        keep_log=True,
        pipeline_model=PIPELINES,
    )
    for engine in world.cluster.engines.values() if row.is_vllm else ():
        engine.declares = as_vllm
    for change in row.becomes:
        world.cluster.clock.after(change.at_s, partial(become, world, change))
    outcome = world.run()
    poison_deaths = Counter({str(name): deaths for name, deaths in outcome.poison_deaths.items()})
    return Found(outcome.ended, entries(world), outcome.never_due, outcome.pauses_s, poison_deaths)


def become(world: World, change: Becomes) -> None:
    """Each condition ends the one before."""
    (proxy,), now_s = world.cluster.proxies, world.cluster.clock.now_s
    name, what = InstanceId(change.whom), change.what
    engine, drains = world.cluster.engines[name], proxy.control.drains
    engine.answer = ANSWERS.get(what)
    engine.draining = what is Condition.ENDING
    engine.hangs = what is Condition.HANGS
    engine.look()
    proxy.control.gpus_seen(engine.node, [gpu_of(name, what)], now_s)
    if what in DRAINS_S:
        drains.begin(name, DRAINS_S[what], now_s)
    else:
        drains.end(name, now_s)


def entries(world: World) -> Iterator[Entry]:
    """The log until the last stream had ended: then the world is brought to rest."""
    (proxy,) = world.cluster.proxies
    for entry in read(proxy.log or []):
        if isinstance(entry, LogEntry) and entry.now_s <= world.cluster.outcome.span_s:
            yield entry.event, entry.actions


@pytest.mark.parametrize(
    ("row", "seed"),
    [
        pytest.param(row, seed, id=f"{row.name}-{seed}", marks=pytest.mark.nightly if seed else [])
        for row in ROWS
        if not row.not_simulated
        for seed in range(row.seeds)
    ],
)
def test_row_holds_in_the_simulator(row: Scenario, seed: int) -> None:
    """Each row states its own rule."""
    check(row, simulated(row, seed))


def test_simulator_notices_streams_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of paused instances can be broken."""
    monkeypatch.setattr(RecoveryPolicy, "has_others", lambda *_: True)
    (row,) = (row for row in ROWS if row.name == "paused-alone")

    with pytest.raises(AssertionError, match="lost"):
        check(row, simulated(row, 0))


def test_simulator_notices_prompts_that_decode_instances_do_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row of prefill instances that are all lost can be broken: requests are refused then."""
    monkeypatch.setattr(routing, "computing_prompts", lambda view: [])
    monkeypatch.setattr(placing, "computing_prompts", lambda view: [])
    (row,) = (row for row in ROWS if row.name == "all-prefill-vllm")

    assert simulated(row, 0).ended["no_instance"] > 0
