"""Every table and figure of the five seeds, as it was published and out of the kept results.

A row without a figure of ours says what is missing.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from kvrs.elastic import cmm, on_demand, speed
from kvrs.elastic.layouts import even, hybrid, staged, uneven
from kvrs.elastic.plans import HOST
from kvrs.elastic.units import Units
from kvrs.profiles import catalog
from kvrs.report.metrics import percentile
from kvrs.report.student import interval
from kvrs.traces.generator import generate
from kvrs.traces.presets import PRESETS

EXPERIMENTS = Path(__file__).parent
RATES = "load_skew/results/rates.json"
HAND_OFF = "hand_off_crossover/results/hand_off_crossover.json"
# With DistServe's servers in place of embedded engines.
DISTSERVE_HAND_OFF = "hand_off_crossover/results/distserve.json"
DISTSERVE_RATES = "load_skew/results/distserve_rates.json"
DISTSERVE_CROSSOVER = "crossover/results/distserve.json"
SHARES = "prefill_shares/results/prefill_shares.json"
IN_PLACE = "in_place/results/in_place.json"
COMPUTED = "raidserve_recovery/results/computed.json"
RAIDSERVE_IN_PLACE = "raidserve_recovery/results/in_place.json"
SIMULATED = "lumen_simulated/results/lumen_simulated.json"
SIMULATED_TEN = "lumen_simulated/results/ten.json"
ON_PROCESSES = "lumen_recovery/results/lumen_recovery.json"
STOP, FIXED, SCHEDULED = "stop-and-restart", "fixed", "+ scheduling"  # In both.
RANK_BALANCE = "rank_balance/results/rank_balance.json"
ANCHORTP_RECOVERY = "anchortp_recovery/results/anchortp_recovery.json"
ANCHORTP_PLANNERS = "anchortp_recovery/results/anchortp_planners.json"


class How(StrEnum):
    """How a figure of ours came about."""

    REAL = "real"  # Processes, sockets and computation of a small model, timed.
    PACED = "paced"  # Real processes and transfers; engines sleep the times of a profile.
    SIMULATED = "simulated"  # Virtual time; the product's decisions.
    COMPUTED = "computed"  # The product's code for it, without time.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One table, figure or claim of a paper."""

    name: str
    published: str
    how: How
    why: str  # The two differ, or what ours needs.
    ours: Callable[[], str] | None = None
    experiment: str | None = None  # Folder below experiments/.
    result: str | None = None  # Of which `ours` is made, below experiments/; missing until it is.
    needs: str = ""  # For a run, while there is none.

    @property
    def is_filled(self) -> bool:
        has_result = self.result is None or (EXPERIMENTS / self.result).exists()
        return self.ours is not None and has_result and self.ours() != ""


@cache
def kept(path: str) -> Any:
    """The figures of a kept result, by its path below experiments/."""
    return json.loads((EXPERIMENTS / path).read_text())


def _crossover_map() -> str:
    of_token_bytes = catalog.kv_geometry("opt-13b-a100-distserve-tp1").bytes_per_token
    depths = [
        tokens * of_token_bytes / (gbit_per_s / 8 * 1e9) / 0.06
        for tokens in (256, 16_384)
        for gbit_per_s in (1, 100)
    ]
    return f"q* from {min(depths):.2f} to {max(depths):,.0f}"


def _hand_off(path: str = HAND_OFF) -> str:
    result = kept(path)
    (row,) = (row for row in result["rows"] if (row["tokens"], row["gbit_per_s"]) == (1475, 25.0))
    remote_ms = statistics.median(row["remote_s"]) * 1e3
    depths = {int(depth): statistics.median(times) for depth, times in row["own_s"].items()}
    slope = statistics.linear_regression(list(depths), list(depths.values())).slope
    off = result.get("worst_off_measured", result["worst_off"])
    return (
        f"{slope * 1e3:.0f} ms a request; {remote_ms:.0f} ms for 1.21 GB at 25 Gbit/s; worst of "
        f"{len(result['rows'])} cells {off:+.1%}"
    )


def _skew() -> str:
    rows = kept("load_skew/results/load_skew.json")["rows"]
    gains = []
    for share in ("60", "90"):
        base, rom = (
            statistics.median(run["goodput_per_s"] for run in rows[name][share])
            for name in ("own_pair", "rom")
        )
        gains.append(f"{rom / base - 1:+.1%} at {share} %")
    return "goodput with `rom` " + ", ".join(gains) + _skew_by_rate()


def _skew_by_rate() -> str:
    """The rate at which the gain is nearest to the published one, where it was looked for."""
    if not (EXPERIMENTS / RATES).exists():
        return ""
    found = kept(RATES)["nearest"]
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.1%}"
    return f"; at 90 % and {found['rate']} requests/s {found['gain']:+.1%}{half}"


def _distserve_skew() -> str:
    found = kept(DISTSERVE_RATES)["nearest"]
    half = "" if found["half_width"] is None else f" ± {found['half_width']:.1%}"
    return f"`rom` at 90 % and {found['rate']} requests/s {found['gain']:+.1%}{half}"


def _distserve_crossover() -> str:
    result = kept(DISTSERVE_CROSSOVER)
    right = ", ".join(f"`{name}` {count}" for name, count in result["right_by_policy"].items())
    return f"{right} of {result['cells_clear']} cells that differ by more than 20 % are right"


def _crossover() -> str:
    result = kept("crossover/results/crossover.json")
    return (
        f"`rom` picks the faster side in {result['cells_clear_right']} of {result['cells_clear']} "
        f"cells that differ by more than 20 %"
    )


def _healthy() -> str:
    result = kept("healthy_path/results/healthy_path.json")["figures"]
    return (
        f"{result['added']['latency_ms_p50']:.3f} ms added to a token (p50), time per token "
        f"{result['proxy']['tpot_ms'] / result['plain']['tpot_ms'] - 1:+.1%}, no request more"
    )


def _decision() -> str:
    rows = kept("decision/results/decision.json")["decision_us"]["opt-13b-a100-distserve-tp1"]
    return ", ".join(
        f"`{name}` {rows[name]['512']['median']:.1f} us at 512 tokens, "
        f"{rows[name]['100000']['median']:.1f} at 100,000"
        for name in ("rom", "auto")
    )


def _slots() -> str:
    result = kept("two_proxies/results/two_proxies.json")
    return (
        f"{result['most_held_seen']} of {result['slots_max']} held at most; {result['exact']} of "
        f"{result['streams']} victims exact"
    )


def _simulated(case: str) -> dict[str, dict[str, dict[str, float]]]:
    """By scheme and seed."""
    path = SIMULATED_TEN if case.startswith("10x") else SIMULATED
    found: dict[str, dict[str, dict[str, float]]] = kept(path)["cases"].get(case, {})
    return found


def _means(case: str, scheme: str, key: str) -> float:
    return statistics.fmean(row[key] for row in _simulated(case)[scheme].values())


def _change(case: str, key: str, base: str = STOP, scheme: str = SCHEDULED) -> str:
    """Seed by seed, with the interval over the seeds; one has none."""
    rows = _simulated(case)
    pairs = [(row[key], rows[base][seed][key]) for seed, row in rows[scheme].items()]
    found = interval([ours / others - 1 for ours, others in pairs])
    assert found is not None
    half = " (one run)" if found.half_width is None else f" ± {found.half_width:.0%}"
    return f"{found.mean:+.0%}{half}"


def _at(cases: Sequence[str], of_one: Callable[[str], str], least: int = 1) -> Callable[[], str]:
    """For each of the cases that is kept; nothing for fewer than the least number of them."""

    def ours() -> str:
        having = [case for case in cases if _simulated(case)]
        return (
            "; ".join(f"{case}: {of_one(case)}" for case in having) if len(having) >= least else ""
        )

    return ours


def _impact_of_one(case: str) -> str:
    ttft, clean, tpot, clean_tpot = (
        _means(case, STOP, key) for key in ("ttft_s", "clean_ttft_s", "tpot_s", "clean_tpot_s")
    )
    return f"TTFT {clean:.2f} to {ttft:.2f} s, TPOT {tpot / clean_tpot:.2f} times"


def _causes(case: str) -> str:
    ttft, share, replay = (
        _means(case, STOP, key) for key in ("ttft_s", "queue_share", "replay_ttft_s")
    )
    return f"uninterrupted TTFT {ttft:.1f} s, {share:.0%} of it queueing; replay {replay:.1f} s"


def _first_scheme(case: str) -> str:
    return (
        f"window {_change(case, 'window_s')} / {_change(case, 'window_s', FIXED)} of "
        f"stop-and-restart / fixed checkpoints; TTFT {_change(case, 'ttft_s')}"
    )


def _windows(case: str) -> str:
    found = " / ".join(f"{_means(case, name, 'window_s'):.0f}" for name in (STOP, FIXED, SCHEDULED))
    return f"windows {found} s; TTFT {_change(case, 'ttft_s')}"


def _scheduling(case: str) -> str:
    before, after = (_means(case, name, "tpot_s") * 1e3 for name in (STOP, SCHEDULED))
    return f"TTFT {_change(case, 'ttft_s')}, TPOT {after:.1f} ms of {before:.1f}"


def _ttft(case: str) -> str:
    return f"TTFT {_means(case, STOP, 'ttft_s'):.2f} s, {_change(case, 'ttft_s')}"


def _against_both(case: str) -> str:
    return (
        f"TTFT {_means(case, STOP, 'ttft_s'):.2f} s, {_change(case, 'ttft_s')} / "
        f"{_change(case, 'ttft_s', FIXED)} of stop-and-restart / fixed checkpoints"
    )


def _on_processes() -> str:
    """The longest pause and the window of + scheduling against stop-and-restart, run by run."""
    found = []
    for case, schemes in sorted(kept(ON_PROCESSES)["cases"].items()):
        pairs = list(zip(schemes[SCHEDULED], schemes[STOP], strict=True))
        pause = interval([a["max_gap_s"]["mean"] / b["max_gap_s"]["mean"] - 1 for a, b in pairs])
        window = interval([a["recovery_time_s"] / b["recovery_time_s"] - 1 for a, b in pairs])
        assert pause is not None
        assert window is not None
        found.append(
            f"{case}: pause {pause.mean:+.0%} ± {pause.half_width or 0:.0%}, window "
            f"{window.mean:+.0%} ± {window.half_width or 0:.0%}"
        )
    return "; ".join(found)


def _checkpoint_cost() -> str:
    result = kept("checkpoint_cost/results/checkpoint_cost.json")
    gaps = result["gap_ms"]
    return (
        f"CPU per token {result['cost']:+.1%} ± {result['cost_interval']:.1%}; time between tokens "
        f"p50 {gaps['off']['p50']:.2f} to {gaps['on']['p50']:.2f} ms, p99 {gaps['off']['p99']:.1f} "
        f"to {gaps['on']['p99']:.1f}"
    )


def _alphas() -> str:
    rows = kept("placement_spread/results/placement_spread.json")["rows"]
    found = [
        row["largest_share"]
        for row in rows
        if row["placement"] == "load" and row["footprints"].startswith("lognormal")
    ]
    return f"largest share on one holder of eight: {' / '.join(f'{share:.2f}' for share in found)}"


def _co_failure() -> str:
    found = kept("placement_spread/results/placement_spread.json")["co_failure"]
    return f"{found['load']:.1%} (`fixed` {found['fixed']:.1%}, `random` {found['random']:.1%})"


def _raidserve(of: str, quantile: str) -> str:
    rows = kept("raidserve_recovery/results/raidserve_recovery.json")["rows"]
    names = ("recompute", "host", "ours", "oracle")
    return " / ".join(
        f"{statistics.median(run[of][quantile] for run in rows[name]):.0f}" for name in names
    )


def _computed_waits(*whose: str) -> dict[str, list[float]]:
    """By way: the longest time between two tokens of each of these streams, in all runs."""
    found: dict[str, list[float]] = {}
    for name, row in sorted(kept(COMPUTED)["cells"].items()):
        waits_s = [wait_s for key in whose for wait_s in row[key]]
        found.setdefault(name.partition("#")[0], []).extend(waits_s)
    return found


def _long_prompts() -> str:
    found = _computed_waits("victims_s")
    medians = " / ".join(
        f"{statistics.median(found[way]):.2f}" for way in ("recompute", "host", "ours")
    )
    return f"recompute / host / ours, p50 of {len(found['ours'])} victims: {medians} s"


def _longest_waits() -> str:
    found = _computed_waits("victims_s", "others_s")
    ways = ("recompute", "host", "ours", "oracle")
    shares = " and ".join(
        " / ".join(f"{percentile(found[way], share):.2f}" for way in ways) for share in (90, 99)
    )
    return f"{' / '.join(ways)}, p90 and p99 of {len(found['ours'])} streams: {shares} s"


def _table_3_in_place() -> str:
    rows = kept(RAIDSERVE_IN_PLACE)["rows"]
    weights, last = (
        " / ".join(f"{row[key]:.3g}" for row in rows) for key in ("weights_s", "last_s")
    )
    return (
        f"recompute / host / full / oracle: ranks compute again after {weights} s, the last of 56 "
        f"streams has its next token after {last} s"
    )


def _preset(name: str) -> Callable[[], str]:
    def ours() -> str:
        trace = generate(replace(PRESETS[name].settings, requests=3000), seed=0)
        sides = {
            "in": [request.input_tokens for request in trace.requests],
            "out": [request.output_tokens for request in trace.requests],
        }
        return "generated: " + "; ".join(
            f"{what} {statistics.fmean(side):,.0f} / {statistics.median(side):,.0f} / {max(side):,}"
            for what, side in sides.items()
        )

    return ours


def _cyclic() -> str:
    units = Units(12, (1,) * 4, (1,) * 12, (1,), 0)
    stages = staged(12, [range(3)])
    naive, cyclic = (
        max(layout.cells_per_page(rank) for rank in layout.ranks)
        for layout in (uneven(units, stages), uneven(units, stages, rotate=True))
    )
    return f"{naive / cyclic - 1:+.0%} (fullest rank: {naive} cells of a page, {cyclic} cyclic)"


def _hybrid_attention() -> str:
    """KV heads that the busiest rank computes, over those of hybrid attention."""
    found = []
    for heads, ranks in ((4, 3), (8, 7)):
        units = Units(1, (1,) * heads, (1,) * ranks, (1,) * ranks, 0)
        stages = staged(1, [range(ranks)])
        naive, even_out = (
            speed.shares(layout, units).cells
            for layout in (uneven(units, stages), hybrid(units, stages))
        )
        found.append(f"{naive / even_out:.2f} times at {heads} heads on {ranks} ranks")
    return "attention of the busiest rank without: " + ", ".join(found)


def _kill_pauses() -> str:
    found = kept("kill_series/results/policies.json")["policies"]["auto"]["pause_s"]
    return f"pause of interrupted streams p50 {found['p50']:.2f} s, p99 {found['p99']:.2f} s"


def _availability() -> str:
    found = []
    for model, runs in kept("raidserve_throughput/results/raidserve_throughput.json")[
        "results"
    ].items():
        standard = statistics.fmean(run["ours"] / run["standard"] for run in runs)
        scaled = statistics.fmean(run["ours"] / run["fault-scaled"] for run in runs)
        found.append(f"{model} {standard:.2f} times standard TP, {scaled:.0%} of fault-scaled")
    return "; ".join(found)


def _rates(name: str) -> dict[str, list[float]]:
    """Of a node, by the number of GPUs that are left."""
    found: dict[str, list[float]] = kept("raidserve_throughput/results/raidserve_throughput.json")[
        "rates"
    ][name]
    return found


def _seven_of_eight() -> str:
    rates = _rates("Llama-3.1-70B")
    ours = rates["hybrid"][7]
    return (
        f"Llama-3.1-70B {ours / rates['standard'][7]:.2f} times TP 4, "
        f"{ours / rates['non-uniform'][7]:.2f} times naive"
    )


def _balance() -> str:
    rates = _rates("Llama-3.1-70B")
    gains_of = [rates["hybrid"][gpus] / rates["non-uniform"][gpus] - 1 for gpus in (5, 6, 7)]
    return " / ".join(f"{gain:+.0%}" for gain in gains_of) + " at 5 / 6 / 7 GPUs"


def _balance_of_ranks() -> str:
    found = {(row["layout"], row["ranks"]): row for row in kept(RANK_BALANCE)["rows"]}
    gains = {
        how: " / ".join(
            f"{found['naive', ranks][key] / found['hybrid', ranks][key] - 1:+.0%}"
            for ranks in (5, 6, 7)
        )
        for how, key in (("layer by layer", "decode_by_layer_s"), ("in sum", "decode_busiest_s"))
    }
    return "; ".join(f"{gain} {how}" for how, gain in gains.items()) + "; at 5 / 6 / 7 ranks"


def _shares() -> str:
    rows = kept(SHARES)["rows"].values()
    ours, arrival = (max(row[key] for row in rows) for key in ("largest_over_mean", "by_arrival"))
    return (
        f"the largest load of a rank over the mean: {ours:.2f} at most, {arrival:.2f} in the order "
        f"of arrival"
    )


def _in_place() -> str:
    passes = kept(IN_PLACE)["passes"]
    pause = passes["as by default"]["pause_s"]  # The others go on, as in the paper.
    tokens = [each["tokens"] for each in passes.values()]
    wrong = sum(each["lost"] + each["repeated"] + each["different"] for each in tokens)
    return (
        f"pause of a re-forming p50 {pause['p50']:.2f} s, p99 {pause['p99']:.2f} s; {wrong} of "
        f"{sum(each['all'] for each in tokens):,} tokens lost, repeated or different"
    )


def _recovered() -> str:
    rows = kept(ANCHORTP_RECOVERY)["rows"]
    return "; ".join(
        f"{name}: TFS {_each(row, 'tfs_s')} s, TTP {_each(row, 'ttp_s')} s, total "
        f"{row['total_s']:.0f} s"
        for name, row in rows.items()
        if row["losses"]
    )


def _degree_by_degree() -> str:
    row = kept(ANCHORTP_RECOVERY)["rows"]["in place, KV restored"]
    return f"4 to 3 / 3 to 2: TFS {_each(row, 'tfs_s')} s, TTP {_each(row, 'ttp_s')} s"


def _each(row: dict[str, Any], key: str) -> str:
    """Of both losses."""
    return " / ".join("-" if one[key] is None else f"{one[key]:.2f}" for one in row["losses"])


def _planners_timed() -> str:
    return ", ".join(
        f"{row['planner']} {row['reload_s']:.2f}"
        + (f" and {row['copy_s']:.2f} between ranks" if row["peer_bytes"] else "")
        for row in kept(ANCHORTP_PLANNERS)["rows"]
    )


def _on_demand() -> str:
    units = Units(1, (1,) * 4, (1,) * 12, (1,) * 4, 0)
    before = even(units, 4)
    found = []
    for lost in before.ranks:
        living = on_demand.survivors(before, [lost])
        after = on_demand.reshaped(before, units, living)
        found.append(sorted(len({*after.tiles(r, 0)} - {*before.tiles(r, 0)}) for r in after.ranks))
    assert all(each == found[0] for each in found)
    return f"tiles that each survivor loads, whichever is lost: {found[0]}"


def _figure_3() -> str:
    shards = [
        cmm.Shard(gpu, *part)
        for gpu, part in zip((1, 2, 3, 4), cmm.even_parts(1024, 4), strict=True)
    ]
    tasks = cmm.plan_interval(shards, {2}, [1, 3, 4])
    reloaded = sum(task.bytes for task in tasks if task.source == HOST)
    moved = sum(task.bytes for task in tasks if task.source not in (HOST, task.target))
    return f"{reloaded} reloaded, {moved} between ranks"


def _planners() -> str:
    found = {
        row["planner"]: row["host_bytes"]
        for row in kept("anchortp_plans/results/anchortp_plans.json")["rows"]
        if (row["model"], row["ranks"], row["left"]) == ("Mixtral-8x22B", 8, 7)
    }
    full = found["full reload"][0]
    return "of the weights: " + ", ".join(
        f"{name} {least / full:.1%}" + (f" to {most / full:.1%}" if most > least else "")
        for name, (least, most) in found.items()
    )


_DRAFT = "draft models (speculation) are not built"
_VIRTUAL = (
    "virtual time, the clock of OPT-13B, ShareGPT's lengths cut to 1,024 and 256 tokens, a reload "
    "of 20 s"
)
_PIPELINES = (
    "pipelines of which one serves with a node of another are not built: an instance that loses a "
    "stage on another node ends, and its streams leave"
)

_CHECKOUT = "a checkout of DistServe, and a quiet machine"

_LONG_PROMPTS = Exhibit(
    "Table 3: recovery latency",
    "recompute 22 s, host 530 ms, full 120 ms, oracle 15 ms",
    How.REAL,
    "prompts of 8,192 tokens, computed by a small model on CPUs; whole instances; `ours` is the "
    "policy, not on-demand weights",
    _long_prompts,
    "raidserve_recovery",
    COMPUTED,
)
_SHORT_PROMPTS = Exhibit(
    "Table 3: recovery latency",
    "recompute 22 s, host 530 ms, full 120 ms, oracle 15 ms",
    How.PACED,
    "whole instances, prompts of at most 480 tokens in place of "
    "13,516, so that there is little to recompute; four victims; `ours` is the policy, "
    "not on-demand weights; oracle: no failure",
    lambda: (
        f"recompute / host / ours / oracle, p50 of victims: "
        f"{_raidserve('max_tbt_of_interrupted_ms', 'p50')} ms"
    ),
    "raidserve_recovery",
)
_TABLE_3 = _LONG_PROMPTS if _LONG_PROMPTS.is_filled else _SHORT_PROMPTS

SEEDS: dict[str, tuple[Exhibit, ...]] = {
    "KVRS (RecompOrMigrate)": (
        Exhibit(
            "Figure: crossover queue depth",
            "near 0 to more than 250, three orders of magnitude",
            How.COMPUTED,
            "the paper names no axes; ours: 256 to 16,384 tokens, 1 to 100 Gbit/s, 60 ms a request",
            _crossover_map,
            "hand_off_crossover",
        ),
        Exhibit(
            "Figure: crossover validation",
            "60 ms a request, 387 ms for 1.21 GB at 25 Gbit/s, within 2 %",
            How.PACED,
            "ours has the first decode step and the hand-shake in it",
            _hand_off,
            "hand_off_crossover",
        ),
        Exhibit(
            "The same on DistServe",
            "60 ms a request, 387 ms for 1.21 GB at 25 Gbit/s, within 2 %",
            How.PACED,
            "DistServe's engine, schedulers and Ray without a GPU; a request takes what these need "
            "for each step, too",
            lambda: _hand_off(DISTSERVE_HAND_OFF),
            "hand_off_crossover",
            DISTSERVE_HAND_OFF,
            needs=f"{_CHECKOUT} for 6 minutes",
        ),
        Exhibit(
            "Figure: goodput under skew",
            "+0.6 requests/s, +8.6 % at 90 % skew",
            How.PACED,
            "a node alone is beyond saturation at our rate and TTFT limit, so the baseline "
            "collapses at 90 %; at 60 % it loses what the paper's does",
            _skew,
            "load_skew",
        ),
        Exhibit(
            "The same on DistServe",
            "+0.6 requests/s, +8.6 % at 90 % skew",
            How.PACED,
            "as above; a queue at the decoding stage shows in the time per token, since token 0 "
            "comes from the context stage",
            _distserve_skew,
            "load_skew",
            DISTSERVE_RATES,
            needs=f"{_CHECKOUT} for 17 minutes",
        ),
        Exhibit(
            "Migrate or recompute, 10 to 100 Gbit/s",
            "the crossover depends on length and bandwidth",
            How.PACED,
            "OPT-66B's profile; with the paper's table for OPT-13B recomputing is cheaper at every "
            "length below 112 Gbit/s",
            _crossover,
            "crossover",
        ),
        Exhibit(
            "The same on DistServe",
            "the crossover depends on length and bandwidth",
            How.PACED,
            "decided by the tables that its stages measure; `rom` does not count the steps in "
            "which a decoding stage reads known tokens behind fetched pages, `auto` does",
            _distserve_crossover,
            "crossover",
            DISTSERVE_CROSSOVER,
            needs=f"{_CHECKOUT} for 8 minutes",
        ),
        Exhibit(
            "O(1) decision",
            "claimed, no figure",
            How.REAL,
            "-",
            _decision,
            "decision",
        ),
        Exhibit(
            "At most 32 concurrent migrations",
            "claimed, no figure",
            How.REAL,
            "two proxies share one target",
            _slots,
            "two_proxies",
        ),
        Exhibit(
            "Healthy path as without it",
            "claimed, no figure",
            How.REAL,
            "a proxy in between, beside a client that calls the instances itself",
            _healthy,
            "healthy_path",
        ),
    ),
    "LUMEN": (
        Exhibit(
            "Figures 1, 2: impact of failures, 4 to 64 workers",
            "TTFT and TPOT of stop-and-restart; TPOT 1.6 times",
            How.SIMULATED,
            _VIRTUAL,
            _at(("4x1", "8x1", "16x1"), _impact_of_one),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Table 1: causes",
            "uninterrupted TTFT 3.5 to 4.1 s, 78-80 % of it queueing; replay 24.0 to 29.4 s",
            How.SIMULATED,
            f"{_VIRTUAL}; what is not queueing is the computation of the prompt alone",
            _at(("4x1", "8x1"), _causes),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Figure 6 (A.1), 4 workers",
            "window -50.0 / -34.9 % of stop-and-restart / fixed checkpoints; TTFT -44.4 %",
            How.SIMULATED,
            f"{_VIRTUAL}; {_DRAFT}, so ours is its + scheduling",
            _at(("4x1",), _first_scheme),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Table 2 (A.1), 8 workers",
            "recovery 83.3 / 82.8 / 29.9 s; TTFT -29.6 %",
            How.SIMULATED,
            f"{_VIRTUAL}; {_DRAFT}, so ours ends with + scheduling",
            _at(("8x1",), _windows),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Figure 7 (A.2): scheduling alone",
            "TTFT -19.1 %, TPOT 96.7 ms of 99.3",
            How.SIMULATED,
            _VIRTUAL,
            _at(("4x1", "8x1"), _scheduling),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Figure 8 (A.3): request rates",
            "TTFT 1.5 s at 10/s, 26.7 s at 12/s; -33.3 % at 11/s",
            How.SIMULATED,
            f"{_VIRTUAL}; requests per second of an instance behind the colon, else 6.5; changes "
            f"of + scheduling, since {_DRAFT}",
            _at(("4x1:5.5", "4x1", "4x1:7.5"), _ttft, least=2),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Figure 9 (A.4): 1, 2, 4 of 8 fail",
            "TTFT -29.6 / -50.8 / -82.7 %",
            How.SIMULATED,
            f"{_VIRTUAL}; changes of + scheduling, since {_DRAFT}",
            _at(("8x1", "8x2", "8x4"), _ttft),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Figures 6, 9 (A.1, A.4) in small, on processes",
            "window -50.0 % of stop-and-restart with one of 4 lost, 83.3 to 29.9 s with one of 8",
            How.PACED,
            "a tiny model on a clock that is 2.4 and 4.8 times slower, a reload of 10 s, some "
            f"thirteen streams an instance; + scheduling against stop-and-restart, since {_DRAFT}",
            _on_processes,
            "lumen_recovery",
            ON_PROCESSES,
        ),
        Exhibit(
            "Steady state",
            "no measurable overhead; time per token within 0.1 ms",
            How.REAL,
            "a CPU computes and copies on the same core; a GPU's copy engine would not",
            _checkpoint_cost,
            "checkpoint_cost",
        ),
        Exhibit(
            "Table 3 (B.1)",
            "windows 100.3 / 94.9 / 91.1 / 81.5 / 81.5 s",
            How.SIMULATED,
            f"{_VIRTUAL}; its last two are with draft models, which are not built",
            _at(("10x1",), _windows),
            "lumen_simulated",
            SIMULATED_TEN,
            needs="25 minutes of CPU time",
        ),
        Exhibit(
            "Figures 10, 11 (B.2, B.3): rates, failures",
            "TTFT up to -42.7 %; 5 failures -63.6 / -33.9 %",
            How.SIMULATED,
            f"{_VIRTUAL}; two of five rates and of five counts; changes of + scheduling, since "
            f"{_DRAFT}",
            _at(("10x1", "10x1:7.5", "10x5"), _against_both),
            "lumen_simulated",
            SIMULATED_TEN,
            needs="25 minutes of CPU time",
        ),
        Exhibit(
            "Figure 12 (B.4): 25 % fail, 4 to 64 workers",
            "TTFT -46.8 to -51.2 %",
            How.SIMULATED,
            f"{_VIRTUAL}; up to 16 instances; changes of + scheduling, since {_DRAFT}",
            _at(("4x1", "8x2", "16x4"), _ttft),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "B.4: 16 of 64 fail, checkpoints lost with their streams",
            "23.8 %",
            How.COMPUTED,
            "even draws give 15 of 63",
            _co_failure,
            "placement_spread",
        ),
        Exhibit(
            "Figure 13, Table 4 (B.5): one failure",
            "TTFT -50.6 % at 4 workers, -1.3 % at 64",
            How.SIMULATED,
            f"{_VIRTUAL}; up to 16 instances; changes of + scheduling, since {_DRAFT}",
            _at(("4x1", "8x1", "16x1"), _ttft, least=2),
            "lumen_simulated",
            SIMULATED,
        ),
        Exhibit(
            "Table 5 (B.6): depth of speculation",
            "acceptance 0.72 / 0.60 / 0.50",
            How.MISSING,
            f"{_DRAFT}: no engine here verifies tokens that a smaller model has proposed",
        ),
        Exhibit(
            "Table 6 (B.7): alpha 0.25 to 4",
            "TTFT 1.4 s at each, TPOT 129.0 to 129.2 ms",
            How.COMPUTED,
            "ours shows where alpha acts, the spread of unequal checkpoints; "
            "the paper's measures hardly see it",
            _alphas,
            "placement_spread",
        ),
    ),
    "RaidServe": (
        Exhibit(
            "Figure 1: cyclic placement",
            "KV capacity +50 % at 4 heads on 3 GPUs",
            How.COMPUTED,
            "the same; 12 layers",
            _cyclic,
        ),
        Exhibit(
            "Figure 2: hybrid attention",
            "up to 2 times slower attention without",
            How.COMPUTED,
            "heads in place of time, which needs GPUs; the paper's 2 is two heads beside one, ours "
            "counts the share of the spread head too",
            _hybrid_attention,
        ),
        Exhibit(
            "Figure 3: load-aware routing and scheduling",
            "an example of four requests",
            How.COMPUTED,
            "batches of 64 sequences in place of the example's four",
            _shares,
            "prefill_shares",
            SHARES,
        ),
        Exhibit(
            "Figure 4: on-demand weights",
            "12 shards, 4 GPUs: each survivor loads one",
            How.COMPUTED,
            "the same; its figure shows GPU 0 lost, its text says GPU 3",
            _on_demand,
        ),
        Exhibit(
            "Figures 6, 9: GCP trace",
            "1.28 / 1.71 times standard TP, 95 / 92 % of fault-scaled",
            How.SIMULATED,
            "layouts and re-forming are ours, step times estimates from profiles; ours fills all "
            "memory with sequences, of which Mixtral's weights leave much less as GPUs go",
            _availability,
            "raidserve_throughput",
        ),
        Exhibit(
            "Table 1: OpenThoughts (mean / median / max)",
            "in 422 / 352 / 7,633; out 7,295 / 5,583 / 37,817",
            How.COMPUTED,
            "lognormal, fitted to mean and median",
            _preset("openthoughts"),
        ),
        Exhibit(
            "Table 2: Mooncake sample (mean / median / max)",
            "in 13,516 / 8,001 / 123,192; out 349 / 362 / 2,000",
            How.COMPUTED,
            "fitted to the whole trace (12,035 / 6,909 in), of which the paper drew 3,000",
            _preset("mooncake-conversation"),
        ),
        Exhibit(
            "Figure 10: Mooncake at 7 of 8 GPUs",
            "TP 7: 2 times TP 4; 1.28 / 1.60 times naive in prefill / decode",
            How.SIMULATED,
            "step times estimated from profiles; lengths of OpenThoughts, nearly all decode",
            _seven_of_eight,
            "raidserve_throughput",
        ),
        Exhibit(
            "Figures 11, 12: balance",
            "decode +16 / +51 / +78 % over naive at TP 5 / 6 / 7",
            How.SIMULATED,
            "step times estimated from profiles of even degrees; prefill and decode together",
            _balance,
            "raidserve_throughput",
        ),
        Exhibit(
            "Figure 11 as CPU time of ranks",
            "decode +16 / +51 / +78 % over naive at TP 5 / 6 / 7",
            How.REAL,
            "CPU time of the busiest rank in place of throughput; products of spread heads have "
            "whole tiles of 16 rows, of which a rank fills a part",
            _balance_of_ranks,
            "rank_balance",
        ),
        _TABLE_3,
        Exhibit(
            "Table 3 in place: 70B, 56 requests of 16K, one of eight GPUs lost",
            "recompute 22 s, host 530 ms, full 120 ms, oracle 15 ms",
            How.SIMULATED,
            "paced: the clock of a profile of vLLM, by which a prompt takes twice as long as by "
            "the paper's 22 s, near the peak of seven H100; to the next token, a decode step "
            "included; 120 ms for 7.5 GB are more than the 50 GB/s of the paper's arithmetic",
            _table_3_in_place,
            "raidserve_recovery",
            RAIDSERVE_IN_PLACE,
        ),
        Exhibit(
            "Figure 13: longest time between tokens",
            "P90 and P99 over 10 s recomputed, P99 572 ms with host, 229 with all",
            How.REAL,
            "as table 3; the waits of the victims, half of the streams; oracle: no failure",
            _longest_waits,
            "raidserve_recovery",
        ),
    ),
    "AnchorTP": (
        Exhibit(
            "Figure 3: 1,024 rows, 4 to 3 GPUs",
            "256 reloaded, 86 between GPUs",
            How.COMPUTED,
            "the same",
            _figure_3,
        ),
        Exhibit(
            "Table I: TFS, TTP, total",
            "TFS 4.48 s against 48.43 (10.8 times)",
            How.REAL,
            "ranks on processors with a small model: seconds of moves say nothing of large ones",
            _in_place,
            "in_place",
            IN_PLACE,
        ),
        Exhibit(
            "Table I on real weights",
            "4 to 2: TFS 4.48 / 4.98 s against 48.43 / 49.21, TTP 6.23 / 7.91 against 14.15 / "
            "19.33, total 139.74 against 285.82 (107.84 without failure)",
            How.REAL,
            "1 GB in place of 61, four ranks on two processors that share a memory; the restart "
            "is that of all ranks",
            _recovered,
            "anchortp_recovery",
            ANCHORTP_RECOVERY,
        ),
        Exhibit(
            "Table II: planners, 8 to 7",
            "reload 17.56 s, greedy 26.15, full 197.31; Eq. 1 "
            "allows 12.5 %, 17.56 of 197.31 is 8.9 %",
            How.COMPUTED,
            "bytes in place of seconds; the paper's greedy is 13.3 % of its full reload, with even "
            "contiguous shares it needs at least 28.6 %",
            _planners,
            "anchortp_plans",
        ),
        Exhibit(
            "Table II in seconds",
            "reload 17.56 s and 1.87 between GPUs, greedy 26.15, full 197.31",
            How.REAL,
            "4 to 3 ranks, 1 GB of files in memory: a read is a copy with a hash, as is "
            "what comes from another rank",
            _planners_timed,
            "anchortp_recovery",
            ANCHORTP_PLANNERS,
        ),
        Exhibit(
            "Figure 5: degree by degree",
            "TFS and TTP rise",
            How.REAL,
            "two losses of four ranks; two processors, however many ranks",
            _degree_by_degree,
            "anchortp_recovery",
            ANCHORTP_RECOVERY,
        ),
        Exhibit(
            "Figures 4, 6: experts rebalanced",
            "436.61 to 562.32 tokens/s",
            How.MISSING,
            "the engine has no model with experts (MoE), so that nothing is rebalanced",
        ),
    ),
    "KevlarFlow": (
        Exhibit(
            "Figures 3, 4: baseline",
            "knees at 3 to 4 and 6 to 7 requests/s",
            How.MISSING,
            "of TensorRT-LLM alone, on 8 and 16 GPUs: nothing of kvrs is in it",
        ),
        Exhibit(
            "Table 1, figures 1, 5 to 7: three scenarios",
            "TTFT up to 378.9 times, latency 3.1 times",
            How.MISSING,
            _PIPELINES,
        ),
        Exhibit(
            "Figure 8: recovery time",
            "35 / 30 / 29 s",
            How.PACED,
            "no pipeline: decode instances of one process are killed, and streams go on at another "
            "one that runs; the paper's is a node that joins another pipeline; p99 is of one "
            "series of eight, in the other seven no pause is as long as half a second",
            _kill_pauses,
            "kill_series",
        ),
        Exhibit(
            "Figure 9: overhead of replication",
            "2.3 / 2.8 % and 4.0 / 3.6 %",
            How.REAL,
            "latency of requests there, CPU and tokens here; no pipeline: one instance sends its "
            "KV to the agent of another node, and a CPU computes and copies on the same core",
            _checkpoint_cost,
            "checkpoint_cost",
        ),
    ),
}
