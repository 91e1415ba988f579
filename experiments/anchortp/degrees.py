"""AnchorTP's Figure 5 for dense models: an instance loses one rank after the other, and at each
degree the time to the first token (TFS) and from there to stable throughput (TTP) is taken, with
what the ranks have and from whole shards. The load is 95 % of what the ranks that are left can do.

    python -m experiments.anchortp.degrees

Simulated: scheduler, re-forming, layouts and plans are the product's, in virtual time; batches take
the times of a profile, weights those of the paper's loader. Exit status 1: whole shards are as
quick.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import fmean
from typing import Any

from experiments.command_line import parser_of
from experiments.model_shapes import SHAPES
from experiments.record import Record
from experiments.virtual_time import NumberedPrompt, grouped, patient, run_until, token_times
from kvrs.config.file import Config, parse_config
from kvrs.ids import InstanceId, StreamId
from kvrs_engine.elastic import on_demand
from kvrs_engine.elastic.layouts import hybrid, staged
from kvrs_engine.elastic.moving import LinkRates, schedule
from kvrs_engine.elastic.plans import plan
from kvrs_engine.elastic.units import Units
from kvrs_lab.report.impact import throughput, time_to_peak_s
from kvrs_lab.sim.cluster import SimCluster
from kvrs_lab.sim.rank_model import RankModel
from kvrs_lab.sim.ranks import SimRanks
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.mooncake import clip
from kvrs_lab.traces.presets import PRESETS
from kvrs_lab.traces.records import StreamRecord

NAME = "degrees"
HOME = InstanceId("a0")
KEPT, WHOLE = "what is lost", "whole shards"
# Table II: 281 GB in 197.31 s, by one loader for all ranks, and 105 GB in 1.87 s between ranks.
LOADER_BYTES_PER_S, PEER_BYTES_PER_S = 281.25e9 / 197.31, 56e9
JOIN_S = 0.05
BEFORE_S, AFTER_S = 40.0, 120.0  # Of load, and after the ranks compute again.
LOAD = 0.95  # Of the peak of the ranks that are left.
WARM_S, PEAK_S = 20.0, 40.0  # Of a peak: before it is measured, and measured.
_CROWD = 1500  # Requests that come at once, so that a queue stays through the measurement.
_PROMPT_TOKENS, _OUTPUT_TOKENS = 1024, 512
_GROUPS = 4  # Layers that lie alike, as one.
_BIN_S, _FINE_S, _LONGEST_S, _NEVER_S = 1.0, 0.01, 900.0, 1e6


@dataclass(frozen=True, slots=True)
class DenseModel:
    profile: str
    shape: str
    ranks: int
    least: int  # Ranks that are left at last.

    def units(self) -> Units:
        return grouped(SHAPES[self.shape].units(), _GROUPS)


MODELS = {
    "Llama-3.1-70B": DenseModel("llama-3.1-70b-h100-vllm-tp8", "meta-llama/Llama-3.1-70B", 8, 2),
    "Qwen3-32B": DenseModel("qwen3-32b-h100-vllm-tp4", "Qwen/Qwen3-32B", 4, 2),
}


@dataclass(frozen=True, slots=True)
class Switch:
    """One loss. `ttp_s` None: throughput was not stable before the run ended."""

    model: str
    degree: int  # Before it.
    way: str
    seed: int
    requests_per_s: float
    read_bytes: int  # From the host, of all ranks.
    tfs_s: float
    ttp_s: float | None


def rates_of(model: DenseModel, degree: int, way: str) -> tuple[LinkRates, int]:
    """Links on which what is missing takes as long as the way's moves do, and the bytes that these
    read. The ranks that are left share the loader.
    """
    units = model.units()
    before = hybrid(units, staged(units.layers, [range(model.ranks)]))
    for rank in range(model.ranks - 1, degree - 1, -1):
        before = on_demand.reshaped(before, units, on_demand.survivors(before, [rank]))
    after = on_demand.reshaped(before, units, on_demand.survivors(before, [degree - 1]))
    missing = plan(before, after, units, [degree - 1])
    rates = LinkRates(LOADER_BYTES_PER_S / (degree - 1), PEER_BYTES_PER_S)
    if way == KEPT:
        return rates, missing.host_bytes
    whole = plan(before, after, units, before.ranks)
    slower = schedule(whole, rates).makespan_s / schedule(missing, rates).makespan_s
    slow = LinkRates(rates.host_bytes_per_s / slower, rates.peer_bytes_per_s / slower)
    return slow, whole.host_bytes


def config_of(model: DenseModel) -> Config:
    instance = {"id": HOME, "role": "both", "tp": model.ranks}
    return parse_config(
        {
            "proxy": {"token_gap_s": _LONGEST_S},
            "cluster": {
                "engine": {
                    "pace": model.profile,
                    "pages": 20_000,
                    "max_model_len": _PROMPT_TOKENS + _OUTPUT_TOKENS,
                    "max_running": 256,
                    "max_batch_tokens": 2048,
                },
                "nodes": [{"id": "n0", "instances": [instance]}],
            },
            "policy": {"recovery": {"wait_s": _LONGEST_S}, "admission": {"wait_s": 3600.0}},
            "slo": {"recovery_gap_s": _LONGEST_S},
        }
    )


def begin(model: DenseModel, degree: int, rates: LinkRates, seed: int) -> SimCluster:
    """An instance that has so many of its ranks, and serves without load."""
    cluster = SimCluster(
        config_of(model),
        seed=seed,
        proxies=1,
        stay_away=0.0,
        keep_log=False,
        rank_model=RankModel(model.units(), rates, JOIN_S, _NEVER_S, _NEVER_S),
    )
    cluster.begin()
    cluster.clock.run(1.0)
    for rank in range(model.ranks - 1, degree - 1, -1):
        lose(cluster, rank)
    return cluster


def lose(cluster: SimCluster, rank: int) -> float:
    """Lose a rank with its memory; return when the others compute again."""
    ranks, clock = cluster.engines[HOME].ranks, cluster.clock
    assert isinstance(ranks, SimRanks)
    ranks.lose([rank], memory_kept=False)
    run_until(clock, lambda: ranks.serves, _FINE_S, _LONGEST_S)
    assert ranks.degree == rank, f"{ranks.degree} ranks are left; expected: {rank}"
    return clock.now_s


def peak_requests_per_s(name: str, degree: int) -> float:
    """The most that so many ranks serve: the tokens of a queue that never ends, by the mean of a
    request.
    """
    model = MODELS[name]
    rates = LinkRates(LOADER_BYTES_PER_S, PEER_BYTES_PER_S)
    with token_times() as tokens_s, patient(_LONGEST_S):
        cluster = begin(model, degree, rates, 0)
        mean_tokens = _send(cluster, _CROWD, 1e3, seed=0)
        from_s = cluster.clock.now_s + WARM_S
        cluster.clock.run(from_s + PEAK_S)
        count = sum(at_s >= from_s for times_s in tokens_s.values() for at_s in times_s)
    return count / PEAK_S / mean_tokens


def play(name: str, degree: int, way: str, seed: int, requests_per_s: float) -> Switch:
    """The loss of one of so many ranks under load, after those before it without any. Raises
    AssertionError where an invariant of the simulator is violated.
    """
    model = MODELS[name]
    rates, read_bytes = rates_of(model, degree, way)
    with token_times() as tokens_s, patient(_LONGEST_S):
        cluster = begin(model, degree, rates, seed)
        clock = cluster.clock
        count = round(requests_per_s * (BEFORE_S + AFTER_S + _LONGEST_S / 4))
        _send(cluster, count, requests_per_s, seed)
        clock.run(clock.now_s + BEFORE_S)
        lost_s = clock.now_s
        served_s = lose(cluster, degree - 1)
        clock.run(served_s + AFTER_S)
        records = [
            StreamRecord(number, 0.0, 1, 1, token_times_s=times_s)
            for number, times_s in enumerate(tokens_s.values())
        ]
    first_s = min(at_s for each in records for at_s in each.token_times_s if at_s >= served_s)
    ttp_s = time_to_peak_s(throughput(records, _BIN_S), _BIN_S, first_s)
    return Switch(name, degree, way, seed, requests_per_s, read_bytes, first_s - lost_s, ttp_s)


def _send(cluster: SimCluster, count: int, requests_per_s: float, seed: int) -> float:
    """Send requests with ShareGPT's lengths from now on; return their mean tokens of output."""
    clock, proxy = cluster.clock, cluster.serving[0]
    asked = replace(PRESETS["sharegpt"], requests=count, requests_per_s=requests_per_s)
    trace = clip(generate(asked, seed), _PROMPT_TOKENS, _OUTPUT_TOKENS)
    from_s = clock.now_s
    for number, each in enumerate(trace.requests):
        name = StreamId(f"s{number}")
        prompt = NumberedPrompt(number, each.input_tokens)
        arrival = Arrival(from_s + each.arrival_s, prompt, each.output_tokens)
        clock.after(each.arrival_s, partial(proxy.arrive, name, arrival))
    return fmean(each.output_tokens for each in trace.requests)


def cells(seeds: int, names: Sequence[str]) -> list[tuple[str, int, str, int]]:
    return [
        (name, degree, way, seed)
        for name in names
        for way in (KEPT, WHOLE)
        for degree in range(MODELS[name].ranks, MODELS[name].least, -1)
        for seed in range(seeds)
    ]


def by_degree(rows: Sequence[dict[str, Any]], name: str, way: str, key: str) -> dict[int, float]:
    """Means of the seeds, by the degree before the loss."""
    found: dict[int, list[float]] = {}
    for row in rows:
        if (row["model"], row["way"]) == (name, way) and row[key] is not None:
            found.setdefault(row["degree"], []).append(row[key])
    return {degree: fmean(values) for degree, values in found.items()}


def missed(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = []
    for name in MODELS:
        kept, whole = (by_degree(rows, name, way, "tfs_s") for way in (KEPT, WHOLE))
        found += [
            f"{name}, {degree} ranks: {kept_s:.2f} s; bar: less than {whole[degree]:.2f}, whole"
            for degree, kept_s in kept.items()
            if kept_s >= whole[degree]
        ]
    return found


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "SIMULATED on the clocks of profiles, no GPU: one rank is lost with its memory under load",
        f"ShareGPT's lengths at {LOAD:.0%} of the peak of the ranks that are left; ranks share one "
        f"loader of {LOADER_BYTES_PER_S / 1e9:.2f} GB/s, {PEER_BYTES_PER_S / 1e9:g} GB/s between "
        "ranks; lost KV is computed again; means of the seeds; no process starts",
        "",
        f"{'model':16}{'ranks':10}{'requests/s':>10}"
        f"{'':4}{f'{KEPT}: GB':>18}{'TFS s':>9}{'TTP s':>9}"
        f"{'':4}{f'{WHOLE}: GB':>18}{'TFS s':>9}{'TTP s':>9}{'TFS ratio':>12}{'least share':>13}",
    ]
    for name in MODELS:
        found = {
            (way, key): by_degree(rows, name, way, key)
            for way in (KEPT, WHOLE)
            for key in ("requests_per_s", "read_bytes", "tfs_s", "ttp_s")
        }
        for degree in found[KEPT, "tfs_s"]:
            rate = found[KEPT, "requests_per_s"][degree]
            line = f"{name:16}{f'{degree} to {degree - 1}':10}{rate:>10.1f}"
            for way in (KEPT, WHOLE):
                ttp_s = found[way, "ttp_s"].get(degree)
                shown = "-" if ttp_s is None else f"{ttp_s:.1f}"
                line += (
                    f"{'':4}{found[way, 'read_bytes'][degree] / 1e9:>18.1f}"
                    f"{found[way, 'tfs_s'][degree]:>9.1f}{shown:>9}"
                )
            # Eq. 1: of so many ranks the lost one had this share, and the others read it.
            ratio = found[KEPT, "tfs_s"][degree] / found[WHOLE, "tfs_s"][degree]
            lines.append(f"{line}{ratio:>12.2f}{1 / degree:>13.2f}")
    wrong = missed(rows)
    return "\n".join([*lines, "", *(["MISSED", *wrong] if wrong else ["PASSED"])])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    record = Record(*range(options.seeds), timed=False)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        left = [
            (name, left)
            for name in options.models
            for left in range(MODELS[name].least, MODELS[name].ranks)
        ]
        peaks = dict(
            zip(left, pool.map(peak_requests_per_s, *zip(*left, strict=True)), strict=True)
        )
        running = [
            pool.submit(play, name, degree, way, seed, LOAD * peaks[name, degree - 1])
            for name, degree, way, seed in cells(options.seeds, options.models)
        ]
        rows = [asdict(each.result()) for each in running]
    text = as_text(rows)
    print(text)
    figures = {
        "load": LOAD,
        "peak_requests_per_s": {
            f"{name}, {ranks} ranks": peak for (name, ranks), peak in peaks.items()
        },
        "rows": rows,
    }
    record.keep(options.out, NAME, figures, text)
    return int(bool(missed(rows)))


if __name__ == "__main__":
    sys.exit(main())
