"""The case of a simulation: a configuration with options, faults and arrivals, and their world.
Errors in the case are found before the simulation starts.
"""

import os
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvrs.config.cluster import Backend
from kvrs.config.file import Config, load_config
from kvrs.config.policy import PolicyName
from kvrs.errors import ConfigError, numbers_out_of_range
from kvrs.profiles import catalog
from kvrs_lab.faults.language import Fault, VictimRole, What, load_faults
from kvrs_lab.report.metrics import Slo
from kvrs_lab.sim.cluster import PACE
from kvrs_lab.sim.fault_scenarios import FaultEvent, named_deaths, random_deaths
from kvrs_lab.sim.first_token import FirstToken
from kvrs_lab.sim.rank_model import PipelineModel
from kvrs_lab.sim.recovering import draft_model_of, read_s
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.formats import load_trace
from kvrs_lab.traces.generator import GeneratorSettings, generate
from kvrs_lab.traces.mooncake import (
    Trace,
    at_rate,
    check_lasts,
    clip,
    prompt_token_ids,
    scale,
    window,
)

VOCAB_SIZE = 50_000
FIRST_ORDINARY_TOKEN = 4
GENERATED_REQUESTS, GENERATED_PER_S = 100, 8.0
# DistServe's prefill stage gives the first token to its client. Other engines' prefill computes a
# first token as well, which the proxy leaves out.
_FIRST_TOKEN = {Backend.DISTSERVE: FirstToken.PREFILL}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of the command line."""

    config: Path | None = None  # None: the cluster of the demo.
    trace: Path | None = None  # None: a generated one, scaled to `cluster.engine.max_model_len`.
    requests: int | None = None  # None: all of the trace, or 100 generated ones.
    first_request: int = 0  # Index in the trace.
    rate: float | None = None  # Requests per second. None: the trace's own, or 8.
    fault: Path | None = None
    deaths: int = 0  # Number of random deaths.
    seed: int = 0
    seeds: int = 1  # Seeds from `seed` on, which draw the trace, the victims and every delay.
    jobs: int = 1  # Processes that simulate seeds in parallel.
    proxies: int = 1
    policy: Sequence[PolicyName] = ()  # Run one after the other; empty: the configuration's.
    slo: Slo = Slo()  # noqa: RUF009 - frozen
    json: bool = False


def load_case(options: SimulateOptions) -> tuple[Config, list[Fault]]:
    """Load the configuration and the faults.

    Raises:
        ConfigError, TraceError: an option or a file is wrong.
    """
    given = [] if options.rate is None else [("--rate", options.rate)]
    if wrong := [*numbers_out_of_range(given, zero=False)]:
        raise ConfigError(wrong)
    config = load_config(options.config, os.environ)
    return config, faults_of(options, config)


def under(config: Config, policy: PolicyName) -> Config:
    """Replace the policy of the configuration."""
    return config.model_copy(update={"policy": config.policy.model_copy(update={"name": policy})})


def make_world(
    options: SimulateOptions,
    config: Config,
    faults: Sequence[Fault],
    seed: int,
) -> World:
    arrivals = arrivals_of(options, config, seed)
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
        )
    load_s = load_s_of(config)
    return World(
        config,
        arrivals,
        deaths,
        seed=seed,
        proxies=options.proxies,
        load_s=load_s,
        probes=True,
        pipeline_model=PipelineModel(load_s=load_s),
        draft_model=draft_model_of(config),
        first_token=_FIRST_TOKEN.get(config.cluster.backend, FirstToken.DECODE),
    )


def load_s_of(config: Config) -> float:
    """Return the time in which an instance reads the weights of its profile's model from the disk
    and loads them. Raises ConfigError: the profile has no load time.
    """
    profile = config.cluster.engine.pace or PACE
    return read_s(config, profile) + catalog.load_s(profile)


def faults_of(options: SimulateOptions, config: Config) -> list[Fault]:
    """Load the faults. Raises ConfigError: a fault is wrong or has an unknown victim."""
    if options.fault is None:
        return []
    if options.deaths:
        raise ConfigError(
            f"--deaths: got {options.deaths} with --fault {options.fault}; allowed: one of the two"
        )
    faults = load_faults(options.fault)
    wrong = [
        f"{options.fault}: [{index}].{line}"
        for index, fault in enumerate(faults)
        for line in _unknown(fault, config)
    ]
    names = {instance.id for _, instance in config.cluster.instances()}
    names |= {node.agent_id for node in config.cluster.nodes} if config.backup.at_agents else set()
    nodes = {node.id for node in config.cluster.nodes}
    wrong += [
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


def _unknown(fault: Fault, config: Config) -> Iterator[str]:
    """Messages about victims that the cluster lacks: a role, or a rank or stage of an instance."""
    whom, instances = fault.whom, [each for _, each in config.cluster.instances()]
    if whom.role is VictimRole.AGENT and not config.backup.at_agents:
        yield f"whom.role: got 'agent' with backup.mode {config.backup.mode.value!r}: none is there"
    elif whom.role not in (None, VictimRole.AGENT):
        roles = sorted({each.role.value for each in instances})
        if whom.role.value not in roles:
            yield f"whom.role: got {whom.role.value!r}; allowed: {', '.join(roles)}"
    for each in instances:
        if each.id != whom.id:
            continue
        for part, number, count in (
            ("rank", whom.rank, each.ranks),
            ("stage", whom.stage, each.pp),
        ):
            if isinstance(number, int) and number >= count:
                yield f"whom.{part}: got {number} of {each.id!r}; allowed: below {count}"


def arrivals_of(options: SimulateOptions, config: Config, seed: int) -> list[Arrival]:
    """Build the requests of a seed.

    Raises:
        ConfigError, TraceError: an option or the trace is wrong.
    """
    longest = config.cluster.engine.max_model_len
    trace, rate = _source(options, longest, seed), options.rate
    if options.trace is None and rate is None:
        rate = GENERATED_PER_S
    trace = clip(trace, longest // 2, longest // 2)
    if rate is not None:
        trace = at_rate(trace, rate)
        check_lasts(trace, f"--rate: got {rate}")
    return [
        Arrival(
            each.arrival_s,
            array(
                "H",  # Ids of the vocabulary take two bytes.
                prompt_token_ids(each, trace.block_tokens, VOCAB_SIZE, seed, FIRST_ORDINARY_TOKEN),
            ),
            each.output_tokens,
            is_keyed=True,
        )
        for each in trace.requests
    ]


def _source(options: SimulateOptions, longest: int, seed: int) -> Trace:
    if options.trace is None:
        settings = GeneratorSettings(requests=options.requests or GENERATED_REQUESTS)
        return scale(generate(settings, seed), longest // 2, longest // 4)
    trace = load_trace(options.trace)
    first = options.first_request
    return window(trace, options.requests or len(trace.requests) - first, first)


def cut_requests(options: SimulateOptions, config: Config) -> tuple[int, int]:
    """The number of requests of the trace that are cut, and the longest length."""
    longest = config.cluster.engine.max_model_len // 2
    if options.trace is None:
        return 0, longest
    requests = _source(options, 2 * longest, options.seed).requests
    return sum(max(each.input_tokens, each.output_tokens) > longest for each in requests), longest
