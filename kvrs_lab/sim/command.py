"""`kvrs lab simulate`: a configuration's cluster in virtual time, with faults of a file or at
random, for one seed or many.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrs import __version__
from kvrs.config.file import Config, config_digest
from kvrs.config.policy import PolicyName
from kvrs.sums import sum_in_order
from kvrs.tables import output
from kvrs_lab.faults.language import Fault
from kvrs_lab.sim.case import SimulateOptions, arrivals_of, cut_requests, load_case, under
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.results import latencies, latency_table
from kvrs_lab.sim.seeds import Simulated, simulate


def run_simulation(options: SimulateOptions) -> int:
    """Simulate, print a table, return the exit status: 0 if all invariants held and all faults of a
    file came due.

    Raises:
        ConfigError, TraceError: a file is wrong.
    """
    config, faults, found = simulate_policies(options)
    if options.json:
        print(json.dumps(described(options, config, found), indent=2))
    else:
        output().print(summary(*found.values()))
    missed = missed_faults(found, faults)
    for name, count in sorted(missed.items()):
        Console(stderr=True).print(
            f"never due in {count} of {options.seeds} runs: {name}",
            style="yellow",
            markup=False,
        )
    return 1 if missed or any(each.broken for each in found.values()) else 0


def simulate_policies(
    options: SimulateOptions,
) -> tuple[Config, list[Fault], dict[PolicyName, Simulated]]:
    """Simulate each policy with the same arrivals and faults; return also the configuration.

    Raises:
        ConfigError, TraceError: an option or a file is wrong.
    """
    config, faults = load_case(options)
    arrivals_of(options, config, options.seed)  # Report errors in the arrivals first.
    cut, longest = cut_requests(options, config)
    if cut:
        Console(stderr=True).print(
            f"{cut} requests were cut: to {longest} tokens of prompt and of output, half of "
            f"cluster.engine.max_model_len",
            style="yellow",
            markup=False,
        )
    policies = dict.fromkeys(options.policy or (config.policy.name,))
    return (
        config,
        faults,
        {name: simulate(options, under(config, name), faults, name.value) for name in policies},
    )


def missed_faults(found: Mapping[PolicyName, Simulated], faults: Sequence[Fault]) -> Counter[str]:
    """Number of runs in which each fault of a file did not come due."""
    return Counter(
        name
        for simulated in (found.values() if faults else ())
        for outcome in simulated.outcomes
        for name in outcome.never_due
    )


def summary(simulated: Simulated) -> RenderableType:
    """Format the verdict, streams, recoveries, pauses, and every kind of death with its effect."""
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
        latency_table(simulated),
        table,
        *([deaths] if deaths.row_count else []),
    )


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
        "slo": asdict(options.slo),
        "fault": None if options.fault is None else options.fault.name,
        "deaths": options.deaths,
        "proxies": options.proxies,
        "policies": {
            policy.value: {
                "broken": {str(seed): what for seed, what in simulated.broken.items()},
                "totals": dict(rows(simulated.outcomes)),
                "clients": latencies(simulated),
                "seeds": {
                    str(seed): _measured(outcome) | _of_clients(simulated, seed)
                    for seed, outcome in simulated.by_seed.items()
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
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "dropped_tokens": outcome.dropped_tokens,
        "pause_p50_s": _percentile(pauses_s, 50) if pauses_s else None,
        "pause_p99_s": _percentile(pauses_s, 99) if pauses_s else None,
        "waited_s": sum_in_order(pauses_s),
        "span_s": outcome.span_s,
        "never_due": outcome.never_due,
    }


def _of_clients(simulated: Simulated, seed: int) -> dict[str, Any]:
    found = simulated.clients.get(seed)
    return {} if found is None else {"clients": found}


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
        *_cached(outcomes),
        ("streams recovered", f"{sum(outcome.recovered_streams for outcome in outcomes):,}"),
        *((f"  by {option}", f"{count:,}") for option, count in recoveries.most_common()),
    ]
    if pauses_s:
        found += [
            (f"pause p{share}", f"{_percentile(pauses_s, share):.3f} s") for share in (50, 99)
        ]
    return [*found, ("simulated time", f"{sum(outcome.span_s for outcome in outcomes):,.0f} s")]


def _cached(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    if prompt_tokens := sum(outcome.prompt_tokens for outcome in outcomes):
        cached_tokens = sum(outcome.cached_tokens for outcome in outcomes)
        yield "prompt tokens found in a prefix cache", f"{cached_tokens / prompt_tokens:.1%}"


def deaths_of(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """Number of deaths of each kind, and of streams that depended on the victims."""
    times: Counter[str] = Counter()
    streams: Counter[str] = Counter()
    for hit in (hit for outcome in outcomes for hit in outcome.hits):
        times[hit.death] += 1
        streams[hit.death] += hit.streams
    return {name: (times[name], streams[name]) for name in sorted(times)}


def _percentile(ordered: Sequence[float], share: int) -> float:
    return ordered[max(0, ceil(len(ordered) * share / 100) - 1)]
