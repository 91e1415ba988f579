"""Runs of a case under several seeds, in this process or in parallel processes."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import track

from kvrs.config.file import Config
from kvrs_lab.faults.language import Fault
from kvrs_lab.report import metrics
from kvrs_lab.sim.case import SimulateOptions, make_world
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.cluster import Outcome


@dataclass(slots=True)
class Simulated:
    """The runs of all seeds under one policy."""

    by_seed: dict[int, Outcome]
    broken: dict[int, str]  # Violated invariant by seed.
    # `kvrs_lab.report.metrics.summary` by seed.
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.by_seed.values())


@dataclass(slots=True)
class SeedRun:
    seed: int
    outcome: Outcome | None = None  # None: see `broken`.
    clients: dict[str, Any] | None = None
    broken: str = ""


def simulate(
    options: SimulateOptions, config: Config, faults: Sequence[Fault], title: str = ""
) -> Simulated:
    """Simulate all seeds. The number of processes does not change the results."""
    seeds = range(options.seed, options.seed + options.seeds)
    console = Console(stderr=True)
    runs = track(
        _runs(options, config, faults, seeds),
        f"simulating {title}",
        len(seeds),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    found = {run.seed: run for run in runs}
    simulated = Simulated({}, {})
    for seed in seeds:
        run = found[seed]
        if run.outcome is None:
            simulated.broken[seed] = run.broken
        else:
            assert run.clients is not None
            simulated.by_seed[seed], simulated.clients[seed] = run.outcome, run.clients
    return simulated


def _runs(
    options: SimulateOptions,
    config: Config,
    faults: Sequence[Fault],
    seeds: Sequence[int],
) -> Iterator[SeedRun]:
    if options.jobs == 1 or len(seeds) == 1:
        for seed in seeds:
            yield run_seed(options, config, faults, seed)
        return
    jobs = min(options.jobs, len(seeds))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(run_seed, options, config, faults, seed) for seed in seeds]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            for task in tasks:
                task.cancel()


def run_seed(
    options: SimulateOptions, config: Config, faults: Sequence[Fault], seed: int
) -> SeedRun:
    """Simulate one seed."""
    world = make_world(options, config, faults, seed)
    try:
        outcome = world.run()
    except AssertionError as error:
        return SeedRun(seed, broken=str(error) or repr(error))
    records = records_of(world.arrivals, world.cluster.proxies)
    return SeedRun(seed, outcome, metrics.summary(records, options.slo))
