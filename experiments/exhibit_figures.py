"""Figures of ours for docs/evidence.md, out of the kept results, and beside published ones."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from experiments.kept import kept
from kvrs.profiles import catalog
from kvrs_engine.elastic import cmm, on_demand, speed
from kvrs_engine.elastic.layouts import hybrid, staged, uneven
from kvrs_engine.elastic.plans import HOST
from kvrs_engine.elastic.units import Units
from kvrs_lab.report.student import Interval, interval
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from kvrs_testkit.layouts import even, rotated

DECISION = "request_path/results/decision.json"
HEALTHY = "healthy_path/results/healthy_path.json"
PLACEMENT = "lumen/results/placement.json"
EXPERTS = "experts/results/simulated.json"
EXPERTS_LOST = "experts/results/lost_ranks.json"
SIMULATED = "lumen/results/lumen.json"
SIMULATED_TEN = "lumen/results/ten.json"
SIMULATED_DRAFTS = "lumen/results/progressive.json"
SIMULATED_PAPER = "lumen/results/paper.json"
AT_PAPER = (SIMULATED_PAPER, "lumen/results/loads.json", "lumen/results/sizes.json")
STOP, FIXED, SCHEDULED = "stop-and-restart", "fixed", "+ scheduling"  # In all of them.
PROGRESSIVE, WHOLE = "+ progressive", "LUMEN"  # With draft models.
TABLE_1 = "pipelines/results/table1.json"
REPLICATION = "pipelines/results/replication.json"
# Of KevlarFlow's Table 1, by scene and requests/s: those of which its text speaks, and the highest
# rate of each scene.
NAMED_ROWS = (("1", 2.0), ("1", 8.0), ("2", 5.0), ("2", 16.0), ("3", 5.0), ("3", 7.0), ("3", 16.0))


def crossover_map() -> str:
    of_token_bytes = catalog.kv_geometry("opt-13b-a100-distserve-tp1").bytes_per_token
    depths = [
        tokens * of_token_bytes / (gbit_per_s / 8 * 1e9) / 0.06
        for tokens in (256, 16_384)
        for gbit_per_s in (1, 100)
    ]
    return f"q* from {min(depths):.2f} to {max(depths):,.0f}"


def healthy() -> str:
    result = kept(HEALTHY)["figures"]
    return (
        f"{result['added']['latency_ms_p50']:.3f} ms added to a token (p50), "
        f"{result['added']['latency_ms_p99']:.3f} (p99), time per token "
        f"{result['proxy']['tpot_ms'] / result['plain']['tpot_ms'] - 1:+.1%}, no request more"
    )


def decision() -> str:
    rows = kept(DECISION)["decision_us"]["opt-13b-a100-distserve-tp1"]
    return ", ".join(
        f"`{name}` {rows[name]['512']['median']:.1f} us at 512 tokens, "
        f"{rows[name]['100000']['median']:.1f} at 100,000"
        for name in ("rom", "auto")
    )


def simulated(case: str) -> dict[str, dict[str, dict[str, float]]]:
    """By scheme and seed."""
    path = SIMULATED_TEN if case.startswith("10x") else SIMULATED
    found: dict[str, dict[str, dict[str, float]]] = kept(path)["cases"].get(case, {})
    return found


def means(case: str, scheme: str, key: str) -> float:
    return statistics.fmean(row[key] for row in simulated(case)[scheme].values())


def by_seed(case: str, key: str, base: str = STOP, scheme: str = SCHEDULED) -> Interval:
    """The change of a scheme against another one, seed by seed, with the interval over seeds."""
    rows = simulated(case)
    return mean_of([row[key] / rows[base][seed][key] - 1 for seed, row in rows[scheme].items()])


def changed(case: str, key: str, base: str = STOP) -> str:
    return percent(by_seed(case, key, base))


def percent(found: Interval, digits: int = 0) -> str:
    if found.half_width is None:
        return f"{found.mean:+.{digits}%} (one run)"
    return f"{found.mean:+.{digits}%} ± {found.half_width:.{digits}%}"


def mean_of(values: Sequence[float]) -> Interval:
    found = interval(values)
    assert found is not None
    return found


def at(cases: Sequence[str], of_one: Callable[[str], str], least: int = 1) -> Callable[[], str]:
    """For each of the cases that is kept; nothing for fewer than the least number of them."""

    def ours() -> str:
        having = [case for case in cases if simulated(case)]
        return (
            "; ".join(f"{case}: {of_one(case)}" for case in having) if len(having) >= least else ""
        )

    return ours


def first_scheme(case: str) -> str:
    return (
        f"window {changed(case, 'window_s')} / {changed(case, 'window_s', FIXED)} of "
        f"stop-and-restart / fixed checkpoints; TTFT {changed(case, 'ttft_s')}"
    )


def windows(case: str) -> str:
    found = " / ".join(f"{means(case, name, 'window_s'):.0f}" for name in (STOP, FIXED, SCHEDULED))
    return f"windows {found} s; TTFT {changed(case, 'ttft_s')}"


def scheduling(case: str) -> str:
    before, after = (means(case, name, "tpot_s") * 1e3 for name in (STOP, SCHEDULED))
    return f"TTFT {changed(case, 'ttft_s')}, TPOT {after:.1f} ms of {before:.1f}"


def ttft(case: str) -> str:
    return f"TTFT {means(case, STOP, 'ttft_s'):.2f} s, {changed(case, 'ttft_s')}"


def with_drafts() -> str:
    """TTFT and TPOT of each scheme against stop-and-restart."""
    return "; ".join(
        f"{case}: "
        + ", ".join(
            f"{scheme} TTFT {percent(changed_with_drafts(case, scheme, 'ttft_s'))}, TPOT "
            f"{percent(changed_with_drafts(case, scheme, 'tpot_s'))}"
            for scheme in (SCHEDULED, PROGRESSIVE, WHOLE)
        )
        for case in ("4x1", "8x2")
    )


def changed_with_drafts(case: str, scheme: str, key: str) -> Interval:
    rows = kept(SIMULATED_DRAFTS)["cases"][case]
    return mean_of([row[key] / rows[STOP][seed][key] - 1 for seed, row in rows[scheme].items()])


def rows_at_paper(case: str) -> dict[str, dict[str, dict[str, float]]]:
    """By scheme and seed; empty: the case is not kept."""
    results = (kept(path)["cases"] for path in AT_PAPER)
    return next((cases[case] for cases in results if case in cases), {})


def changed_at_paper(scheme: str, key: str, case: str = "10x1", base: str = STOP) -> Interval:
    """A scheme against another one at the paper's load, seed by seed; a seed without a window is
    none for its length.
    """
    rows = rows_at_paper(case)
    pairs = [(row[key], rows[base][seed][key]) for seed, row in rows[scheme].items()]
    return mean_of([own / other - 1 for own, other in pairs if other])


def lumen_at_paper(case: str) -> str:
    """LUMEN against stop-and-restart."""
    rows = rows_at_paper(case)[STOP]
    ttft, tpot = (
        percent(changed_at_paper(WHOLE, key, case)) for key in ("window_ttft_s", "window_tpot_s")
    )
    text = f"TTFT {_mean(rows, 'window_ttft_s'):.2f} s, {ttft}, TPOT {tpot}, window "
    if _mean(rows, "window_s") < 1.0:
        return text + f"{_mean(rows, 'window_s'):.0f} s"
    return text + percent(changed_at_paper(WHOLE, "window_s", case))


def impact_at_paper(case: str) -> str:
    """Means of the failure-impact window beside those of the run without a failure."""
    rows = rows_at_paper(case)[STOP]
    clean_s, ttft_s, clean_tpot_s, tpot_s = (
        _mean(rows, f"window_{key}") for key in ("clean_ttft_s", "ttft_s", "clean_tpot_s", "tpot_s")
    )
    return (
        f"TTFT {clean_s:.2f} to {ttft_s:.2f} s ({ttft_s / clean_s:.1f} times), TPOT "
        f"{clean_tpot_s * 1e3:.0f} to {tpot_s * 1e3:.0f} ms ({tpot_s / clean_tpot_s:.2f} times)"
    )


def causes_at_paper(case: str) -> str:
    rows = rows_at_paper(case)[STOP]
    ttft_s, share, replay_s = (
        _mean(rows, key) for key in ("ttft_s", "queue_share", "replay_ttft_s")
    )
    return f"uninterrupted TTFT {ttft_s:.1f} s, {share:.0%} of it queueing; replay {replay_s:.1f} s"


def one_failure_at_paper(case: str) -> str:
    hit = percent(changed_at_paper(WHOLE, "hit_tpot_s", case))
    return f"{lumen_at_paper(case)}, TPOT of the interrupted {hit}"


def at_paper(
    cases: Sequence[str], of_one: Callable[[str], str] = lumen_at_paper
) -> Callable[[], str]:
    """For each of the cases at the paper's load that is kept."""
    return lambda: "; ".join(f"{case}: {of_one(case)}" for case in cases if rows_at_paper(case))


def table_3() -> str:
    rows = kept(SIMULATED_PAPER)["cases"]["10x1"]
    schemes = (STOP, FIXED, SCHEDULED, PROGRESSIVE, WHOLE)
    windows = " / ".join(f"{_mean(rows[name], 'window_s'):.0f}" for name in schemes)
    changes = "; ".join(
        f"{name}: TTFT {percent(changed_at_paper(name, 'window_ttft_s'))}, "
        f"TPOT {percent(changed_at_paper(name, 'window_tpot_s'))}"
        for name in schemes[2:]
    )
    return f"windows {windows} s; {changes}"


def variants(case: str) -> Callable[[], str]:
    """LUMEN with other values at the paper's load, the default first."""

    def ours() -> str:
        rows = kept(SIMULATED_PAPER)["cases"][case]
        names = " / ".join(name.split()[1] for name in rows)
        ttft_s = " / ".join(f"{_mean(row, 'window_ttft_s'):.2f}" for row in rows.values())
        tpot_ms = " / ".join(f"{_mean(row, 'window_tpot_s') * 1e3:.1f}" for row in rows.values())
        return f"at {names} TTFT {ttft_s} s, TPOT {tpot_ms} ms"

    return ours


def _mean(by_seed: Mapping[str, Mapping[str, float]], key: str) -> float:
    return statistics.fmean(row[key] for row in by_seed.values())


def co_failure() -> str:
    found = kept(PLACEMENT)["co_failure"]
    return f"{found['load']:.1%} (`fixed` {found['fixed']:.1%}, `random` {found['random']:.1%})"


def preset(name: str) -> Callable[[], str]:
    def ours() -> str:
        trace = generate(replace(PRESETS[name], requests=3000), seed=0)
        sides = {
            "in": [request.input_tokens for request in trace.requests],
            "out": [request.output_tokens for request in trace.requests],
        }
        return "generated: " + "; ".join(
            f"{what} {statistics.fmean(side):,.0f} / {statistics.median(side):,.0f} / {max(side):,}"
            for what, side in sides.items()
        )

    return ours


def cyclic() -> str:
    units = Units(12, (1,) * 4, (1,) * 12, (1,), 0)
    stages = staged(12, [range(3)])
    naive, cyclic = (
        max(layout.cells_per_page(rank) for rank in layout.ranks)
        for layout in (uneven(units, stages), rotated(units, stages))
    )
    return f"{naive / cyclic - 1:+.0%} (fullest rank: {naive} cells of a page, {cyclic} cyclic)"


def hybrid_attention() -> str:
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


def loaded_on_demand() -> str:
    units = Units(1, (1,) * 4, (1,) * 12, (1,) * 4, 0)
    before = even(units, 4)
    found = []
    for lost in before.ranks:
        living = on_demand.survivors(before, [lost])
        after = on_demand.reshaped(before, units, living)
        found.append(sorted(len({*after.tiles(r, 0)} - {*before.tiles(r, 0)}) for r in after.ranks))
    assert all(each == found[0] for each in found)
    return f"tiles that each survivor loads, whichever is lost: {found[0]}"


def figure_3() -> str:
    shards = [
        cmm.Shard(gpu, *part)
        for gpu, part in zip((1, 2, 3, 4), cmm.even_parts(1024, 4), strict=True)
    ]
    tasks = cmm.plan_interval(shards, {2}, [1, 3, 4])
    reloaded = sum(task.bytes for task in tasks if task.source == HOST)
    moved = sum(task.bytes for task in tasks if task.source not in (HOST, task.target))
    return f"{reloaded} reloaded, {moved} between ranks"


def experts() -> str:
    rows = {(row["exponent"], row["variant"]): row["behind"] for row in kept(EXPERTS)["rows"]}
    return "; ".join(
        f"Zipf {exponent:g}: {off:.0f} to {rows[exponent, 'on']:.0f} tokens/s"
        for (exponent, variant), off in rows.items()
        if variant == "off"
    )


def lost_ranks() -> str:
    def shown(ratio: float | None) -> str:
        return "none" if ratio is None else f"{ratio:.2f}"

    return "; ".join(
        f"{case}: TFS {shown(own['tfs_s'])}, TTP {shown(own['ttp_s'])}"
        for case, own in kept(EXPERTS_LOST)["ratios"].items()
    )


def table_1() -> str:
    """Base and ours at the rows of which the paper speaks, as far as they were run."""
    rows = [
        f"scene {scene} at {per_s:g}/s: TTFT {base['ttft_s']:.2f} to {ours['ttft_s']:.2f} s, "
        f"latency {base['latency_s']:.0f} to {ours['latency_s']:.0f} s"
        for (scene, per_s), (base, ours) in named_rows().items()
    ]
    count = len(kept(TABLE_1)["cells"])
    return "; ".join([*rows, f"{count // 2} of 40 rows"])


def named_rows() -> dict[tuple[str, float], tuple[dict[str, float], dict[str, float]]]:
    cells = kept(TABLE_1)["cells"]
    names = {
        row: [f"{row[0]}:{row[1]:g}:{system}" for system in ("base", "ours")] for row in NAMED_ROWS
    }
    return {
        row: (cells[base], cells[ours])
        for row, (base, ours) in names.items()
        if base in cells and ours in cells
    }


def replication() -> str:
    found = kept(REPLICATION)["latency"]
    return ", ".join(
        f"latency {key} {row['change']:+.1%} [{row['interval'][0]:+.1%}, {row['interval'][1]:+.1%}]"
        for key, row in found.items()
    )
