"""The sentinels: exact figures of the product in virtual time, or computed without any time.

All of them together take a minute and a half of one core. None depends on
the machine, on the order of hashes or on a kept result, so that any difference is the code's.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean, median
from unittest.mock import patch

from experiments.kills import simulated as kill_series
from experiments.lumen import placement
from experiments.lumen import simulated as lumen
from experiments.sentinels import gossip, lost_rank, planners, rates, situations
from experiments.sentinels.history import Figures
from kvrs.config.backup import Placement
from kvrs.config.policy import PolicyName, RecoverySettings
from kvrs.profiles import catalog
from kvrs.protocol.pages import page_tags, root_tag
from kvrs_engine.elastic.layouts import hybrid, staged, uneven
from kvrs_lab.sim.cluster import Outcome
from kvrs_lab.sim.process import require
from kvrs_lab.sim.world import World
from kvrs_testkit import link_scenarios
from kvrs_testkit.random_worlds import in_turn, outage, poisons_at_once, scenario, sick

POISON_DEATHS = RecoverySettings().poison_deaths  # The most that one poisoned request may cause.
OUTAGE_SEEDS = POISON_SEEDS = range(6)


def kill_pauses() -> Figures:
    """Three series of kills, 500 streams each, under `auto`."""
    found = kill_series.Found()
    for seed in (1, 2, 3):
        kill_series.simulate("auto", seed, 500, found)
    figures = kill_series.figures_of(found)
    return {
        **{f"{key} in ms": figures[f"{key}_s"] * 1e3 for key in ("mean", "p50", "p90")},
        **{f"p99 in ms, seed {seed}": s * 1e3 for seed, s in figures["p99_s_by_seed"].items()},
        **_counts("recoveries", figures["recoveries"]),
        **_counts("ended", figures["ended"]),
    }


def simulated_deaths() -> Figures:
    """Forty random worlds, one with every kind of death, and four with sick instances."""
    worlds = [scenario(seed) for seed in range(40)]
    return _of_worlds([*worlds, in_turn(0), *map(sick, range(4))])


def outages() -> Figures:
    """Four of eight instances die within 0, 60 or 300 ms: no request is to blame."""
    outcomes = [
        outage(seed, spread_s, both=both).run()
        for seed in OUTAGE_SEEDS
        for spread_s in (0.0, 0.06, 0.3)
        for both in (False, True)
    ]
    return _blameless(outcomes)


def poisons() -> Figures:
    """Three requests at once that end what they run on, among 4 and 6 pairs."""
    outcomes = [poisons_at_once(seed, pairs).run() for seed in POISON_SEEDS for pairs in (4, 6)]
    return _blameless(outcomes)


def link() -> Figures:
    """The link estimate: regret of decisions on it and on its lower bound, and share of probes."""
    rows = link_scenarios.measure(range(2))
    regrets = {
        f"{row['rule']}, {row['scenario']}": row["regret"]
        for row in rows
        if row["rule"] in (link_scenarios.OURS, link_scenarios.BOUND)
    }
    return regrets | {"probes": max(row["probe_share"] for row in rows)}


def ranks_lost() -> Figures:
    """One of eight ranks is lost with 56 streams of 16K tokens: seconds until they go on."""
    rows = [lost_rank.play(way, seed=1) for way in ("host", "full")]
    computed = lost_rank.ladder_s()
    return {
        **{f"{row.way}, weights in s": row.weights_s for row in rows},
        **{f"{row.way}, p50 in s": row.p50_s for row in rows},
        **{f"{way}, computed in s": seconds for way, seconds in computed.items()},
    }


def lumen_quarter() -> Figures:
    """One of four instances is lost, with a quarter of the requests of the experiment."""
    setup = replace(lumen.OPT, requests=lumen.OPT.requests // 4)
    schemes = lumen.cell(setup, "4x1#0", {})
    shown = ("interrupted", "window_s", "ttft_s", "replay_ttft_s", "tpot_s", "pause_s")
    return {f"{scheme}, {key}": row[key] for scheme, row in schemes.items() for key in shown}


def pages() -> Figures:
    """Bytes of a page of three models, and tags of two pages of one history."""
    profiles = (situations.PROFILE, "llama-3.1-70b-a100-vllm-tp4", "mixtral-8x22b-h100-vllm-tp8")
    sizes = {f"bytes, {name}": catalog.kv_geometry(name).page_bytes for name in profiles}
    root = root_tag("a model", "a tenant")
    tags = page_tags(root, range(40), 16)
    return sizes | {f"tag of page {number}": tag.hex() for number, tag in enumerate(tags)}


def plans() -> Figures:
    """Bytes that ranks read and copy after a loss, by model and planner: the most of all losses."""
    found: dict[str, float | str] = {}
    for name, (host, peer) in planners.measure().items():
        found[f"{name}, from the host"] = host
        found[f"{name}, between ranks"] = peer
    return found


def balance() -> Figures:
    """Simulated tokens per second with 5 to 8 ranks, with hybrid attention and without."""
    found: dict[str, float | str] = {}
    for model in rates.models():
        for left in range(5, 9):
            stages = staged(model.units.layers, [range(left)])
            for name, layout in (("hybrid", hybrid), ("uneven", uneven)):
                per_s = rates.tokens_per_s(model, layout(model.units, stages), 256)
                found[f"{model.name}, {left} ranks, {name}"] = per_s
    return found


def placements() -> Figures:
    """Share of the checkpoints of a node on one agent, and of those that die with it."""
    with patch.object(placement, "SEEDS", range(1)):
        spread = {
            f"{how.value}, {footprint}, largest share": placement.spread(how, 1.0, footprint)
            for how in Placement
            for footprint in placement.FOOTPRINTS
        }
        lost = {f"{how.value}, lost together": placement.co_failure(how) for how in Placement}
    return spread | lost


def detection() -> Figures:
    """Seconds until the first and all members of 16 hold a killed node dead, at a fifth lost."""
    first_s, everyone_s = gossip.death_times(16, range(2), 5, 0.2)
    return {
        "first, median in s": median(first_s),
        "all, median in s": median(everyone_s),
        "all, most in s": max(everyone_s),
    }


def _blameless(outcomes: list[Outcome]) -> Figures:
    """Whatever the kept values are: nothing that ended no instance is refused or lost, and no
    request ends more instances than the setting allows.
    """
    found = _of_outcomes(outcomes)
    require(found["innocents refused"] == 0, f"innocents refused: {found['innocents refused']}")
    require(found["innocents lost"] == 0, f"innocents lost: {found['innocents lost']}")
    most = int(found["most deaths of one poison"])
    require(most <= POISON_DEATHS, f"deaths of one poisoned request: {most}; bar {POISON_DEATHS}")
    return found


def _of_worlds(worlds: Iterable[World]) -> Figures:
    return _of_outcomes([world.run() for world in worlds])


def _of_outcomes(outcomes: list[Outcome]) -> Figures:
    pauses_s = [pause_s for outcome in outcomes for pause_s in outcome.pauses_s]
    most = max((max(each.poison_deaths.values(), default=0) for each in outcomes), default=0)

    def total(name: str) -> Counter[str]:
        return sum((getattr(each, name) for each in outcomes), Counter[str]())

    return {
        **_counts("ended", total("ended")),
        **_counts("recoveries", total("recoveries")),
        "deaths": sum(len(each.hits) for each in outcomes),
        "most deaths of one poison": most,
        "innocents refused": sum(each.innocents_refused for each in outcomes),
        "innocents lost": sum(each.innocents_lost for each in outcomes),
        "mean pause in ms": fmean(pauses_s) * 1e3 if pauses_s else 0.0,
        "longest pause in ms": max(pauses_s, default=0.0) * 1e3,
        "tokens": sum(each.tokens for each in outcomes),
        "steps": sum(each.steps for each in outcomes),
    }


def _counts(what: str, counts: dict[str, int]) -> dict[str, float | str]:
    return {f"{what}, {name}": count for name, count in sorted(counts.items())}


ALL: dict[str, Callable[[], Figures]] = {
    "page": pages,
    "auto_costs": lambda: situations.costs(PolicyName.AUTO),
    "rom_costs": lambda: situations.costs(PolicyName.ROM),
    "hand_off": situations.hand_offs,
    "plans": plans,
    "throughput": balance,
    "placement": placements,
    "gossip": detection,
    "link": link,
    "outage": outages,
    "poison": poisons,
    "kill_series": kill_pauses,
    "in_place": ranks_lost,
    "deaths": simulated_deaths,
    "lumen": lumen_quarter,
}
