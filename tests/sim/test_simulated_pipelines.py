"""Instances with a host for each stage, in virtual time: they lose hosts, borrow and lend them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvrs.config.cluster import pipeline_nodes
from kvrs.config.file import parse_config
from kvrs.core import staying
from kvrs.core.event_log import rerun
from kvrs.core.model import actions as act
from kvrs.core.model.estimates import Option
from kvrs.core.model.streams import Stream
from kvrs.core.state import State
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import ReformingReport
from kvrs_engine.elastic import lending
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.hosts import SimHost, SimLoan
from kvrs_lab.sim.lent_stages import LentStages
from kvrs_lab.sim.lost_cells import LostCells
from kvrs_lab.sim.pipelines import SimPipeline
from kvrs_lab.sim.process import Clock, InvariantError
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.site import LATENCY_S
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_testkit.death_scenarios import STAGE_SCENARIOS
from kvrs_testkit.examples import scaled
from kvrs_testkit.random_worlds import pipelines
from tests.sim.stepwise import assert_same_step_by_step, outcome_told

D0, D1 = map(InstanceId, ("d0", "d1"))
SEEDS = max(32, scaled(8))  # Fewer have not every story.
COMPARED = range(3)
KILL_S, LOAD_S, SESSION_S = 2.0, 3.0, 0.05
MODEL = PipelineModel(load_s=LOAD_S, session_s=SESSION_S, computing_share=0.2)


def world(
    *faults: tuple[str, int, float],
    instances: int = 2,
    stages: int = 3,
    streams: int = 16,
    model: PipelineModel = MODEL,
    keep_log: bool = False,
    **sections: Any,
) -> World:
    """`faults`: an instance, a stage of it, and when the host dies that has it."""
    nodes = [
        node.model_dump(mode="json", exclude_unset=True)
        for node in pipeline_nodes(instances, stages)
    ]
    config = parse_config({"cluster": {"nodes": nodes}} | sections)
    rows = [
        {"when": {"at_s": at_s}, "what": "kill", "whom": {"id": name, "stage": stage}}
        for name, stage, at_s in faults
    ]
    arrivals = [
        Arrival(0.5 + number * 0.02, tuple(range(number, number + 60)), 300)
        for number in range(streams)
    ]
    deaths = named_deaths(parse_faults(rows)) if rows else []
    return World(config, arrivals, deaths, seed=0, keep_log=keep_log, pipeline_model=model)


def pipeline(found: World, name: InstanceId) -> SimPipeline:
    ranks = found.cluster.engines[name].ranks
    assert isinstance(ranks, SimPipeline)
    return ranks


def seen_at(found: World, look: Callable[[], object], *moments_s: float) -> list[object]:
    """Answers of `look` at these moments, once the world has run."""
    seen: list[object] = []
    for at_s in moments_s:
        found.cluster.clock.after(at_s, lambda: seen.append(look()))
    return seen


def test_a_lost_stage_is_borrowed_and_handed_back() -> None:
    """The instance computes again once the session stands, and with its own host once that has
    loaded; the lender has its pages back.
    """
    found = world((D0, 1, KILL_S))

    def look() -> tuple[object, ...]:
        own, lender = pipeline(found, D0), pipeline(found, D1)
        report = own.load()
        way = None if report is None else report.way
        lent = sum(len(loan.pages) for loan in lender.lent.loans)
        return own.serves, str(own.host_of(1).owner), way, lent

    lost_s = KILL_S + 0.01 + LATENCY_S  # Faults are looked for every 10 ms.
    there_s = KILL_S + LOAD_S
    seen = seen_at(
        found, look, KILL_S - 0.01, lost_s, lost_s + SESSION_S, there_s - 0.05, there_s + 1.0
    )
    outcome = found.run()

    assert seen == [
        (True, "d0", None, 0),
        (False, "d0", "substitute", 1024),
        (True, "d1", None, 1024),
        (True, "d1", None, 1024),
        (True, "d0", None, 0),
    ]
    assert outcome.ended == {"complete": 16}
    assert outcome.recoveries[Option.SUBSTITUTE.value] > 0
    lender = found.cluster.engines[D1].pages
    assert lender.free_pages == lender.pages == 2048


def test_a_stream_that_stays_keeps_its_attempt() -> None:
    found = world((D0, 1, KILL_S), keep_log=True)
    found.run()

    (proxy,) = found.cluster.proxies
    stayed = [live for live in proxy.streams.values() if live.option is Option.SUBSTITUTE]
    assert stayed
    assert {live.journal.attempt for live in stayed} == {1}
    assert proxy.log is not None
    assert rerun(proxy.log).difference is None


def test_without_a_lender_the_own_host_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All refuse: a loan that has no room for the longest stream is none."""
    monkeypatch.setattr(lending, "LEND_PAGES", 0.01)
    found = world((D0, 1, KILL_S))

    def look() -> object:
        report = pipeline(found, D0).load()
        return None if report is None else (report.way, round(report.ready_in_s, 1))

    seen = seen_at(found, look, KILL_S + 0.1, KILL_S + LOAD_S + 1.0)
    outcome = found.run()

    assert seen == [("wait", 2.9), None]
    assert outcome.ended == {"complete": 16}


def test_a_stage_that_always_computes_is_not_lent() -> None:
    """The borrower would gain nothing (`elastic.least_gain`)."""
    model = PipelineModel(load_s=LOAD_S, session_s=SESSION_S, computing_share=1.0)
    found = world((D0, 1, 7.0), model=model, streams=60)

    seen = seen_at(found, lambda: pipeline(found, D0).load(), 8.0)
    outcome = found.run()

    (report,) = seen
    assert isinstance(report, ReformingReport)
    assert report.way == "wait"
    assert outcome.ended == {"complete": 60}


def test_without_elastic_a_lost_host_ends_its_instance() -> None:
    """It is started again, and its streams go on elsewhere."""
    nodes = [
        {
            "id": f"n{n}",
            "instances": [
                {"id": f"d{n}", "role": "both", "pp": 2, "stage_hosts": [{"node": f"n{n}"}] * 2}
            ],
        }
        for n in range(2)
    ]
    config = parse_config({"cluster": {"nodes": nodes}, "elastic": {"enabled": False}})
    rows = [{"when": {"at_s": KILL_S}, "what": "kill", "whom": {"id": "d0", "stage": 1}}]
    arrivals = [Arrival(0.5, tuple(range(60)), 200) for _ in range(8)]
    found = World(config, arrivals, named_deaths(parse_faults(rows)), seed=0, pipeline_model=MODEL)
    outcome = found.run()

    assert outcome.ended == {"complete": 8}
    assert found.cluster.engines[D0].epoch == 2
    assert set(outcome.recoveries) <= {Option.RECOMPUTE.value}


def test_sessions_of_a_host_take_turns() -> None:
    """A batch of each at a time, whoever has more of them; alone it does not wait."""
    clock, done = Clock(), list[tuple[float, str]]()
    host = SimHost(D0, 0, NodeId("n0"), clock, load_s=5.0)

    for name in (D0, D0, D0, D1, D1):
        host.compute(name, 1.0, lambda name=name: done.append((clock.now_s, name)))  # type: ignore[misc]
    clock.run(10.0)

    assert done == [(1.0, D0), (2.0, D1), (3.0, D0), (4.0, D1), (5.0, D0)]
    assert host.worked_s == 5.0


def test_a_batch_is_computed_in_each_stage_at_a_time() -> None:
    """Prompts that fill a batch each: three stages have three times the rate of one batch."""
    spans_s = []
    for stages in (1, 3):
        batch = {"max_batch_tokens": 64}
        nodes = [
            {
                "id": "n0",
                "instances": [{"id": "d0", "role": "both"}]
                if stages == 1
                else [{"id": "d0", "role": "both", "pp": 3, "stage_hosts": [{"node": "n0"}] * 3}],
            }
        ]
        config = parse_config({"cluster": {"nodes": nodes, "engine": batch}})
        arrivals = [Arrival(0.5, tuple(range(n, n + 64)), 1) for n in range(60)]
        spans_s.append(World(config, arrivals, [], seed=0).run().span_s - 0.5)

    assert 2.6 < spans_s[0] / spans_s[1] <= 3.0


def test_generated_worlds_lose_no_stream() -> None:
    """Every story occurs, every way and option of a lost stage, and no law is broken."""
    outcomes = [outcome_told(pipelines, seed) for seed in COMPARED]
    outcomes += [pipelines(seed).run() for seed in range(COMPARED.stop, SEEDS)]

    ended = sum((outcome.ended for outcome in outcomes), Counter[str]())
    recoveries = sum((outcome.recoveries for outcome in outcomes), Counter[str]())
    hit = {one.death for outcome in outcomes for one in outcome.hits if one.streams}
    assert set(ended) == {"complete"}
    assert hit == {*STAGE_SCENARIOS}
    assert min(recoveries[each.value] for each in (Option.SUBSTITUTE, Option.IN_PLACE)) > 10


def test_a_world_is_the_same_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where stages are lost and lent."""
    assert_same_step_by_step(pipelines, COMPARED, monkeypatch)


def nothing(*given: Any) -> None:
    pass


def lends_without_giving(self: LentStages, *given: Any) -> SimLoan | str:
    """The lender goes on to use what it lends."""
    loan = LENDS(self, *given)
    if isinstance(loan, SimLoan):
        self._engine.pages.release(loan.pages)
    return loan


LENDS, STAYS = LentStages.lend, staying._stay


def stays_and_starts(state: State, stream: Stream, *given: Any) -> None:
    """The stream that stays is started again beside its attempt."""
    STAYS(state, stream, *given)
    assert stream.attempt.plan is not None
    state.actions.append(act.Start(stream.id, stream.attempt.number + 1, stream.attempt.plan))


# What is broken on purpose, and what is to be said of it.
BREAKS: dict[str, tuple[Any, str, Any, str]] = {
    "streams do not begin again": (LostCells, "_begin_again", nothing, "cells that are gone"),
    "what is written to a loan is not noted": (SimLoan, "write", nothing, "cells that are gone"),
    "pages are lent and used": (LentStages, "lend", lends_without_giving, "that another one has"),
    "a loan does not end": (LentStages, "_take_back", nothing, "lends"),
    "a stream that stays is started again": (staying, "_stay", stays_and_starts, "was moved"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_laws_of_stages_notice_what_is_broken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invariant that cannot be broken proves nothing."""
    owner, name, wrong, said = BREAKS[what]
    monkeypatch.setattr(owner, name, wrong)

    with pytest.raises(InvariantError, match=said):
        _run_all()


def _run_all() -> list[Outcome]:
    return [pipelines(seed).run() for seed in range(SEEDS)]
