"""`kvrs simulate`: a configuration's cluster in virtual time, hit by a file's faults or at random,
for one seed or many, under one policy or several.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from random import Random
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.progress import track
from rich.table import Table
from rich.text import Text

from kvrs import __version__
from kvrs.config.file import Config, config_digest, load_config
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.faults.language import Fault, What, load_faults
from kvrs.report.output import claim_directory
from kvrs.sim.cluster import Outcome
from kvrs.sim.fault_scenarios import FaultEvent, named_deaths, random_deaths
from kvrs.sim.recovering import draft_model_of
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World
from kvrs.tables import folded, output
from kvrs.traces.formats import load_trace
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.mooncake import at_rate, check_lasts, clip, replay_requests, scale, window

VOCAB_SIZE = 50_000
FIRST_ORDINARY_TOKEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of the command line."""

    config: Path | None = None  # None: the cluster of the demo.
    trace: Path | None = None  # None: a generated one, scaled to `cluster.engine.max_model_len`.
    requests: int = 100
    rate: float = 8.0  # Requests per second.
    fault: Path | None = None
    deaths: int = 0  # Or so many at random.
    seed: int = 0
    seeds: int = 1  # So many, from `seed` on; a seed draws the trace, the victims and every delay.
    proxies: int = 1
    acceptance: float = 0.6  # Of drafts, with `speculation.source: draft`.
    policy: Sequence[PolicyName] = ()  # One after the other; none: the configuration's.
    json: bool = False
    out: Path | None = None  # Directory for simulation.json.


@dataclass(slots=True)
class Simulated:
    """All seeds together, under one policy."""

    by_seed: dict[int, Outcome]
    broken: dict[int, str]  # By seed: the violated invariant.

    @property
    def outcomes(self) -> list[Outcome]:
        return list(self.by_seed.values())


def run_simulation(options: SimulateOptions) -> int:
    """Simulate, print a table, return the exit status: 0 if all invariants held and all faults of a
    file came due.

    Raises:
        ConfigError, TraceError: a file is wrong.
    """
    config, faults, found = simulate_policies(options)
    document = described(options, config, found)
    if options.out is not None:
        (options.out / "simulation.json").write_text(json.dumps(document, indent=2) + "\n")
    if options.json:
        print(json.dumps(document, indent=2))
    elif len(found) == 1:
        output().print(summary(*found.values()))
    else:
        output().print(side_by_side(found))
    missed = missed_faults(found, faults)
    for name, count in sorted(missed.items()):
        Console(stderr=True).print(
            f"never due in {count} of {options.seeds * len(found)} runs: {name}",
            style="yellow",
            markup=False,
        )
    return 1 if missed or any(each.broken for each in found.values()) else 0


def simulate_policies(
    options: SimulateOptions,
) -> tuple[Config, list[Fault], dict[PolicyName, Simulated]]:
    """The same arrivals and faults under each policy, with the configuration and the faults.

    Raises:
        ConfigError, TraceError: an option or a file is wrong.
    """
    if wrong := [*numbers_out_of_range([("--rate", options.rate)], zero=False)]:
        raise ConfigError(wrong)
    config = load_config(options.config, os.environ)
    faults = _faults(options, config)
    if options.out is not None:
        claim_directory(options.out)
    policies = dict.fromkeys(options.policy or (config.policy.name,))
    return (
        config,
        faults,
        {name: simulate(options, _under(config, name), faults, name.value) for name in policies},
    )


def missed_faults(found: Mapping[PolicyName, Simulated], faults: Sequence[Fault]) -> Counter[str]:
    """How often each fault of a file did not come due."""
    return Counter(
        name
        for simulated in (found.values() if faults else ())
        for outcome in simulated.outcomes
        for name in outcome.never_due
    )


def _under(config: Config, policy: PolicyName) -> Config:
    return config.model_copy(update={"policy": config.policy.model_copy(update={"name": policy})})


def simulate(
    options: SimulateOptions, config: Config, faults: Sequence[Fault], title: str = ""
) -> Simulated:
    simulated = Simulated({}, {})
    seeds = range(options.seed, options.seed + options.seeds)
    console = Console(stderr=True)
    shown = track(
        seeds,
        f"simulating {title}",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    for seed in shown:
        world = make_world(options, config, faults, seed)
        try:
            simulated.by_seed[seed] = world.run()
        except AssertionError as error:
            simulated.broken[seed] = str(error) or repr(error)
    return simulated


def make_world(
    options: SimulateOptions,
    config: Config,
    faults: Sequence[Fault],
    seed: int,
    *,
    keep_log: bool = False,
) -> World:
    arrivals = _arrivals(options, config, seed)
    deaths: list[FaultEvent] = named_deaths(faults)
    if options.deaths:
        rng, nodes = Random(seed), [str(node.id) for node in config.cluster.nodes]
        has_agents = config.backup.at_agents
        deaths = random_deaths(
            rng,
            options.deaths,
            max(1.0, arrivals[-1].at_s),
            nodes,
            has_agents=has_agents,
            has_ranks=any(
                each.ranks > 1 and each.own_stages for _, each in config.cluster.instances()
            ),
            proxies=options.proxies,
        )
    return World(
        config,
        arrivals,
        deaths,
        seed=seed,
        proxies=options.proxies,
        keep_log=keep_log,
        draft_model=draft_model_of(config, options.acceptance),
    )


def _faults(options: SimulateOptions, config: Config) -> list[Fault]:
    if options.fault is None:
        return []
    if options.deaths:
        raise ConfigError(
            f"--deaths: got {options.deaths} with --fault {options.fault}; allowed: one of the two"
        )
    faults = load_faults(options.fault)
    names = {instance.id for _, instance in config.cluster.instances()}
    names |= {node.agent_id for node in config.cluster.nodes} if config.backup.at_agents else set()
    nodes = {node.id for node in config.cluster.nodes}
    wrong = [
        f"{options.fault}: [{index}].whom: unknown name {name!r}"
        for index, fault in enumerate(faults)
        for name, known in _named(fault, names, nodes)
        if not known
    ]
    has_hosts = any(
        each.stage_hosts and not each.own_stages for _, each in config.cluster.instances()
    )
    for index, fault in enumerate(faults):
        if fault.whom.stage is not None and (not has_hosts or fault.what is not What.KILL):
            allowed = "kill" if has_hosts else "no stage, without instances with all in stage_hosts"
            wrong.append(
                f"{options.fault}: [{index}].whom.stage: got {fault.whom.stage!r} with "
                f"{fault.what}; allowed in the simulator: {allowed}"
            )
    if wrong:
        raise ConfigError(wrong)
    return faults


def _named(
    fault: Fault, names: Collection[str], nodes: Collection[str]
) -> Iterator[tuple[str, bool]]:
    if fault.whom.id is not None:
        yield fault.whom.id, fault.whom.id in names
    for node in [fault.whom.node, *(fault.whom.link or ())]:
        if node is not None:
            yield node, node in nodes


def _arrivals(options: SimulateOptions, config: Config, seed: int) -> list[Arrival]:
    longest = config.cluster.engine.max_model_len
    if options.trace is None:
        trace = scale(
            generate(GeneratorSettings(requests=options.requests), seed), longest // 2, longest // 4
        )
    else:
        trace = window(load_trace(options.trace), options.requests)
    trace = at_rate(clip(trace, longest // 2, longest // 2), options.rate)
    check_lasts(trace, f"--rate: got {options.rate}")
    requests = replay_requests(trace, VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN)
    return [
        Arrival(request.arrival_s, request.prompt_ids, request.max_tokens, is_keyed=True)
        for request in requests
    ]


def summary(simulated: Simulated) -> RenderableType:
    """Verdict, streams, recoveries, pauses, and every kind of death with what it hit."""
    outcomes = simulated.outcomes
    broken = [
        Text(f"seed {seed}: {what}", style="red") for seed, what in sorted(simulated.broken.items())
    ]
    verdict = f"All invariants held in {len(outcomes)} of {len(outcomes) + len(broken)} runs."
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows(outcomes):
        table.add_row(name, value)
    deaths = Table("death", "times", "streams hit", box=box.SIMPLE)
    for name, (times, streams) in deaths_of(outcomes).items():
        deaths.add_row(Text(name), f"{times:,}", f"{streams:,}")
    return Group(
        Text(verdict, style="red" if broken else "green"),
        *broken,
        table,
        *([deaths] if deaths.row_count else []),
    )


def side_by_side(found: Mapping[PolicyName, Simulated]) -> RenderableType:
    """The rows of each policy beside those of the others."""
    broken = broken_lines(found)
    columns = {policy: dict(rows(simulated.outcomes)) for policy, simulated in found.items()}
    table = Table("", box=box.SIMPLE)
    for policy in found:
        table.add_column(policy.value, justify="right")
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns.values()))
    verdict = "All invariants held." if not broken else "Invariants were violated."
    return Group(Text(verdict, style="red" if broken else "green"), *broken, folded(table))


def broken_lines(found: Mapping[PolicyName, Simulated]) -> list[Text]:
    """The violated invariants of all policies."""
    return [
        Text(f"{policy.value}, seed {seed}: {what}", style="red")
        for policy, simulated in found.items()
        for seed, what in sorted(simulated.broken.items())
    ]


def described(
    options: SimulateOptions, config: Config, found: Mapping[PolicyName, Simulated]
) -> dict[str, Any]:
    """The simulated case and the outcome of each seed, as JSON."""
    return {
        "kvrs_version": __version__,
        "config_digest": config_digest(config),
        "trace": None if options.trace is None else options.trace.name,
        "requests": options.requests,
        "rate": options.rate,
        "fault": None if options.fault is None else options.fault.name,
        "deaths": options.deaths,
        "proxies": options.proxies,
        "policies": {
            policy.value: {
                "broken": {str(seed): what for seed, what in simulated.broken.items()},
                "totals": dict(rows(simulated.outcomes)),
                "seeds": {
                    str(seed): _measured(outcome) for seed, outcome in simulated.by_seed.items()
                },
            }
            for policy, simulated in found.items()
        },
    }


def _measured(outcome: Outcome) -> dict[str, Any]:
    pauses_s = sorted(outcome.pauses_s)
    return {
        "streams": sum(outcome.ended.values()),
        "ended": dict(outcome.ended),
        "recovered_streams": outcome.recovered_streams,
        "recoveries": {str(option): count for option, count in outcome.recoveries.items()},
        "tokens": outcome.tokens,
        "dropped_tokens": outcome.dropped_tokens,
        "pause_p50_s": _percentile(pauses_s, 50) if pauses_s else None,
        "pause_p99_s": _percentile(pauses_s, 99) if pauses_s else None,
        "waited_s": sum(pauses_s),
        "span_s": outcome.span_s,
        "never_due": outcome.never_due,
    }


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    ended = sum((outcome.ended for outcome in outcomes), Counter[str]())
    recoveries = sum((outcome.recoveries for outcome in outcomes), Counter[str]())
    pauses_s = sorted(pause_s for outcome in outcomes for pause_s in outcome.pauses_s)
    found = [
        ("streams", f"{sum(ended.values()):,}"),
        *((f"  {how}", f"{count:,}") for how, count in ended.most_common()),
        ("tokens", f"{sum(outcome.tokens for outcome in outcomes):,}"),
        (
            "  dropped, of attempts that were over",
            f"{sum(outcome.dropped_tokens for outcome in outcomes):,}",
        ),
        ("streams recovered", f"{sum(outcome.recovered_streams for outcome in outcomes):,}"),
        *((f"  by {option}", f"{count:,}") for option, count in recoveries.most_common()),
    ]
    if pauses_s:
        found += [
            (f"pause p{share}", f"{_percentile(pauses_s, share):.3f} s") for share in (50, 99)
        ]
    return [*found, ("simulated time", f"{sum(outcome.span_s for outcome in outcomes):,.0f} s")]


def deaths_of(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """How often each kind of death came, and how many streams counted on its victims."""
    times: Counter[str] = Counter()
    streams: Counter[str] = Counter()
    for hit in (hit for outcome in outcomes for hit in outcome.hits):
        times[hit.death] += 1
        streams[hit.death] += hit.streams
    return {name: (times[name], streams[name]) for name in sorted(times)}


def _percentile(ordered: Sequence[float], share: int) -> float:
    return ordered[max(0, ceil(len(ordered) * share / 100) - 1)]
