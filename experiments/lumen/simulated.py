"""LUMEN's experiments in virtual time: instances are gone for as long as it takes to load their
weights, and the others are nearly saturated without them. `paper.py` runs them.

A case is instances x failures, with requests per second of an instance behind a colon where the
rate is another.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from experiments.forking import in_children
from experiments.lumen.moving_window import moving_window_s
from experiments.virtual_time import NumberedPrompt
from kvrs.config.file import Config, parse_config
from kvrs.profiles import catalog
from kvrs_engine.scheduling.assisted import DraftCounts
from kvrs_engine.scheduling.pace import Pace
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.report import metrics
from kvrs_lab.report.impact import Impact, bucket_size, impact_window
from kvrs_lab.report.student import Interval, interval
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.fault_scenarios import FaultEvent, named_deaths
from kvrs_lab.sim.recovering import SimDraftModel
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World
from kvrs_lab.traces.generator import generate
from kvrs_lab.traces.presets import PRESETS
from kvrs_lab.traces.records import StreamRecord

LINK_BYTES_PER_S = 100e9 / 8
DISK_BYTES_PER_S = 2e9
Row = dict[str, Any]
# By case, scheme and seed.
ByCase = dict[str, dict[str, dict[str, Row]]]


@dataclass(frozen=True, slots=True)
class Scheme:
    name: str
    policy: str
    dispatch: str
    backup: dict[str, Any]
    drafts: bool = False
    depth: int = 4  # Drafts of a step.
    acceptance: float | None = None  # None: that of the setup's draft model.


STOP = Scheme("stop-and-restart", "always_recompute", "least_loaded", {"mode": "off"})
FIXED = Scheme("fixed", "always_restore", "holders", {"mode": "remote", "placement": "fixed"})
SCHEDULING = Scheme(
    "+ scheduling", "always_restore", "rebalance", {"mode": "remote", "placement": "load"}
)
AUTO = Scheme("auto", "auto", "rebalance", {"mode": "remote", "placement": "load"})
PROGRESSIVE = replace(STOP, name="+ progressive", drafts=True)
WHOLE = replace(SCHEDULING, name="LUMEN", drafts=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, its requests, and its loading."""

    pace: str
    preset: str
    most_prompt: int
    most_output: int
    per_s: float  # Requests of an instance.
    requests: int  # Of an instance; 0: as many as come in the span.
    reload_s: float
    schemes: tuple[Scheme, ...]
    draft: SimDraftModel | None = None
    pages: int = 4000
    max_running: int = 64
    max_batch_tokens: int = 512
    span_s: float = 0.0
    wait_s: float = 30.0  # The longest predicted wait of a request that is not refused.
    link_bytes_per_s: float = LINK_BYTES_PER_S


OPT = Setup(
    pace="opt-13b-a100-distserve-tp1",
    preset="sharegpt",
    most_prompt=1024,
    most_output=256,
    per_s=6.5,
    requests=640,
    reload_s=20.0,
    schemes=(STOP, FIXED, SCHEDULING, AUTO),
)
DRAFT = "llama-3.1-8b-a100-vllm-tp1"
TARGET = "llama-3.1-70b-a100-vllm-tp4"
LLAMA = Setup(
    pace=TARGET,
    preset="splitwise-conv",
    most_prompt=4096,
    most_output=1024,
    per_s=1.8,
    requests=300,
    reload_s=catalog.load(TARGET).weight_bytes / DISK_BYTES_PER_S + catalog.load_s(TARGET),
    schemes=(STOP, FIXED, SCHEDULING, PROGRESSIVE, WHOLE),
    draft=SimDraftModel(
        Pace(DRAFT),
        catalog.load(DRAFT).weight_bytes / DISK_BYTES_PER_S + catalog.load_s(DRAFT),
        acceptance=0.6,
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    setup: Setup
    instances: int
    failures: int
    per_s: float

    @classmethod
    def of(cls, setup: Setup, text: str) -> "Case":
        size, _, rate = text.partition(":")
        instances, failures = map(int, size.split("x"))
        return cls(setup, instances, failures, float(rate) if rate else setup.per_s)


def config_of(case: Case, scheme: Scheme) -> Config:
    nodes = [
        {"id": f"n{n:02}", "instances": [{"id": f"w{n:02}", "role": "both"}]}
        for n in range(case.instances)
    ]
    return parse_config(
        {
            "cluster": {
                "engine": {
                    "pace": case.setup.pace,
                    "pages": case.setup.pages,
                    "max_running": case.setup.max_running,
                    "max_batch_tokens": case.setup.max_batch_tokens,
                    "max_model_len": case.setup.most_prompt + case.setup.most_output,
                },
                "nodes": nodes,
            },
            "policy": {
                "name": scheme.policy,
                "dispatch": scheme.dispatch,
                # As published, a victim that is not at its checkpoint's holder is recomputed.
                "restored_at": "holder" if scheme.policy == "always_restore" else "anywhere",
                "admission": {"wait_s": case.setup.wait_s},
            },
            "backup": {"capacity_bytes": 160 << 30, **scheme.backup},
            "transfer": {"link_bytes_per_s": case.setup.link_bytes_per_s},
            # The agent of a node keeps the draft's weights.
            "state_plane": {"enabled": scheme.drafts},
            "speculation": {
                "source": "draft" if scheme.drafts else "off",
                "draft": DRAFT,
                "depth": scheme.depth,
            },
        }
    )


def arrivals(case: Case, seed: int) -> list[Arrival]:
    """Poisson, with lengths of the preset, cut to what an instance takes."""
    setup, per_s = case.setup, case.per_s * case.instances
    count = setup.requests * case.instances or round(per_s * setup.span_s)
    settings = replace(PRESETS[setup.preset], requests=count, requests_per_s=per_s)
    found = []
    for number, asked in enumerate(generate(settings, seed).requests):
        prompt = NumberedPrompt(number, min(asked.input_tokens, setup.most_prompt))
        output = min(asked.output_tokens, setup.most_output)
        found.append(Arrival(asked.arrival_s, prompt, output))
    return found


@dataclass(frozen=True, slots=True)
class Run:
    records: list[StreamRecord]  # Of all requests, or of the first that came.
    interrupted: set[int]
    fault_s: float
    drafts: DraftCounts
    presence: float = 0.0  # Share of assisted decode steps of streams that had drafts.


def world_of(case: Case, scheme: Scheme, seed: int, *, drafts: bool) -> tuple[World, float]:
    """And when instances fail. `drafts`: they are configured, for this scheme or another one that
    goes on from a state of this world.
    """
    asked = arrivals(case, seed)
    fault_s = asked[len(asked) // 3].at_s
    world = World(
        config_of(case, replace(scheme, drafts=drafts)),
        asked,
        deaths_of(case, fault_s),
        seed=seed,
        reload_s=case.setup.reload_s,
        draft_model=draft_of(case.setup, scheme),
    )
    return world, fault_s


def draft_of(setup: Setup, scheme: Scheme) -> SimDraftModel | None:
    """The draft model of a scheme; None: it has none."""
    if setup.draft is None or not scheme.drafts:
        return None
    if scheme.acceptance is None:
        return setup.draft
    return replace(setup.draft, acceptance=scheme.acceptance)


def deaths_of(case: Case, fault_s: float) -> list[FaultEvent]:
    rows = [
        {"when": {"at_s": fault_s}, "what": "kill", "whom": {"id": f"w{n:02}"}}
        for n in range(case.failures)
    ]
    return named_deaths(parse_faults(rows))


def simulate(case: Case, scheme: Scheme, seed: int, *, fails: bool) -> Run:
    """One run to its end. Raises AssertionError where an invariant is violated."""
    world, fault_s = world_of(case, scheme, seed, drafts=scheme.drafts)
    return to_its_end(world, fault_s) if fails else without_failure(world, fault_s)


def to_its_end(world: World, fault_s: float) -> Run:
    outcome = world.run()
    assert set(outcome.ended) == {"complete"}, outcome.ended
    return run_of(world, fault_s)


def run_of(world: World, fault_s: float) -> Run:
    """The run as far as it has come."""
    (proxy,) = world.cluster.proxies
    records = records_of(world.arrivals[: len(proxy.streams)], [proxy])
    recovered = (number for number, live in enumerate(proxy.streams.values()) if live.recoveries)
    counts, asked, given = DraftCounts(), 0, 0
    for engine in world.cluster.engines.values():
        if engine.drafts is not None:
            asked += engine.drafts.asked
            given += engine.drafts.given
            counts.steps += engine.drafts.counts.steps
            counts.proposed += engine.drafts.counts.proposed
            counts.accepted += engine.drafts.counts.accepted
    return Run(records, set(recovered), fault_s, counts, given / asked if asked else 0.0)


# By instances, rate and seed: runs without a failure.
Clean = dict[tuple[int, float, int], Run]


def window_of(run: Run, clean: Run) -> tuple[dict[int, float], Impact]:
    """And the replay TTFT of each interrupted request."""
    replayed = {
        record.index: metrics.replay_ttft_s(record, run.fault_s)
        for record in run.records
        if record.index in run.interrupted
    }
    known = {index: at_s for index, at_s in replayed.items() if at_s is not None}
    size = bucket_size(len(clean.records))
    return known, impact_window(run.records, clean.records, known, run.fault_s, size)


def near_ones(run: Run, setup: Setup) -> list[StreamRecord]:
    """Those that the failure can have touched, and has not interrupted: they came while an instance
    loaded.
    """
    return [
        record
        for record in run.records
        if record.index not in run.interrupted
        and run.fault_s <= record.due_s <= run.fault_s + setup.reload_s
    ]


def until_it_has_closed(world: World, fault_s: float, clean: Run, setup: Setup) -> Run:
    """The run, to the first moment at which nothing that comes can change its figures: both
    failure-impact windows have closed, and what was interrupted or came while an instance loaded
    has ended. Where that is never so, to its end.
    """
    size, arrived = bucket_size(len(clean.records)), world.arrivals
    for count in range(size, len(arrived), size):
        at_s = arrived[count].at_s
        if at_s <= fault_s + setup.reload_s:
            continue
        if not world.run_before(at_s):
            break
        if (run := has_closed(run_of(world, fault_s), clean, setup)) is not None:
            return run
    return to_its_end(world, fault_s)


def has_closed(run: Run, clean: Run, setup: Setup) -> Run | None:
    """The run with what its figures are made of; None: more may come."""
    judged = [*near_ones(run, setup), *(run.records[index] for index in run.interrupted)]
    # Only whole buckets of requests that have all had their first token.
    size = bucket_size(len(clean.records))
    first = next((r.index for r in run.records if not r.token_times_s), len(run.records))
    seen = replace(run, records=run.records[: first // size * size])
    if not all(each.completed and each.index < len(seen.records) for each in judged):
        return None
    known, impact = window_of(seen, clean)
    if impact.end_bucket is None or not all(each.completed for each in within(seen, impact)):
        return None
    has_ended = moving_window_s(seen.records, clean.records, known, seen.fault_s, size)[1]
    return seen if has_ended else None


def within(run: Run, impact: Impact) -> list[StreamRecord]:
    """The requests of the failure-impact window."""
    if impact.first_bucket is None:
        return []
    size, end = impact.bucket_requests, impact.end_bucket
    return run.records[impact.first_bucket * size : None if end is None else end * size]


def figures(run: Run, clean: Run, setup: Setup) -> Row:
    prefill = catalog.prefill_table(setup.pace)
    known, impact = window_of(run, clean)
    size = bucket_size(len(clean.records))
    moving = moving_window_s(run.records, clean.records, known, run.fault_s, size)
    near, in_window = near_ones(run, setup), within(run, impact)
    twins = {record.index: record for record in clean.records}
    hit = [run.records[index] for index in run.interrupted]
    pauses = [metrics.max_gap_s(run.records[index]) or 0.0 for index in run.interrupted]
    return {
        "interrupted": len(run.interrupted),
        "window_s": impact.recovery_time_s,
        "is_closed": impact.end_bucket is not None or impact.first_bucket is None,
        "moving_window_s": moving[0],
        "moving_is_closed": moving[1],
        "ttft_s": fmean(metrics.arrival_ttft_s(record) or 0.0 for record in near),
        "clean_ttft_s": fmean(
            metrics.arrival_ttft_s(twins[record.index]) or 0.0 for record in near
        ),
        "queue_share": 1
        - fmean(prefill.seconds_for(record.prompt_tokens) for record in near)
        / fmean(metrics.arrival_ttft_s(record) or 0.0 for record in near),
        "tpot_s": fmean(metrics.tpot_s(record) or 0.0 for record in near),
        "clean_tpot_s": fmean(metrics.tpot_s(twins[record.index]) or 0.0 for record in near),
        "replay_ttft_s": fmean(known.values()),
        "draft_steps": run.drafts.steps,
        "draft_presence": run.presence,
        "accepted_a_step": run.drafts.accepted / run.drafts.steps if run.drafts.steps else 0.0,
        "pause_s": fmean(pauses),
        "hit_tpot_s": fmean(metrics.tpot_s(record) or 0.0 for record in hit),
        "in_window": len(in_window),
        "window_ttft_s": _mean(
            known.get(record.index, metrics.arrival_ttft_s(record)) for record in in_window
        ),
        "window_tpot_s": _mean(metrics.tpot_s(record) for record in in_window),
        "window_clean_ttft_s": _mean(
            metrics.arrival_ttft_s(twins[record.index]) for record in in_window
        ),
        "window_clean_tpot_s": _mean(metrics.tpot_s(twins[record.index]) for record in in_window),
    }


def _mean(values: Iterable[float | None]) -> float:
    """0: there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else 0.0


def cell(setup: Setup, name: str, clean: Clean) -> dict[str, Row]:
    """By scheme. `clean` has the runs without a failure, which several cells share."""
    text, _, seed_text = name.partition("#")
    case, seed = Case.of(setup, text), int(seed_text)
    same = case.instances, case.per_s, seed
    if same not in clean:
        clean[same] = simulate(case, setup.schemes[0], seed, fails=False)
    return {
        scheme.name: figures(simulate(case, scheme, seed, fails=True), clean[same], setup)
        for scheme in setup.schemes
    }


def forked_cell(setup: Setup, name: str, clean: Clean, jobs: int = 1) -> dict[str, Row]:
    """The same figures as `cell`, from less work: until the failure all schemes with one kind of
    backup and one depth are one run, from whose state each goes on in a process of its own, and no
    further than its figures need. So does the run without a failure, with the first scheme's.
    """
    text, _, seed_text = name.partition("#")
    case, seed = Case.of(setup, text), int(seed_text)
    same, found = (case.instances, case.per_s, seed), dict[str, Row]()
    together: dict[str, list[Scheme]] = {}
    for scheme in setup.schemes:
        together.setdefault(f"{scheme.backup} {scheme.depth}", []).append(scheme)
    for schemes in together.values():
        drafts = any(scheme.drafts for scheme in schemes)
        world, fault_s = world_of(case, schemes[0], seed, drafts=drafts)
        world.run_before(fault_s)
        if same not in clean:
            (clean[same],) = in_children([partial(without_failure, world, fault_s)])
        branches = [
            partial(with_failure, world, case, scheme, fault_s, clean[same]) for scheme in schemes
        ]
        for scheme, row in zip(schemes, in_children(branches, jobs), strict=True):
            found[scheme.name] = row
    return {scheme.name: found[scheme.name] for scheme in setup.schemes}


def without_failure(world: World, fault_s: float) -> Run:
    world.go_on_with([], world.cluster.config, None)
    return to_its_end(world, fault_s)


def with_failure(world: World, case: Case, scheme: Scheme, fault_s: float, clean: Run) -> Row:
    draft = draft_of(case.setup, scheme)
    world.go_on_with(deaths_of(case, fault_s), config_of(case, scheme), draft)
    return figures(until_it_has_closed(world, fault_s, clean, case.setup), clean, case.setup)


def by_case(cells: dict[str, dict[str, Row]]) -> ByCase:
    found: ByCase = {}
    for name, rows in cells.items():
        case, _, seed = name.partition("#")
        for scheme, row in rows.items():
            found.setdefault(case, {}).setdefault(scheme, {})[seed] = row
    return found


def change(
    rows: dict[str, dict[str, Row]], scheme: str, key: str, base: str = STOP.name
) -> Interval | None:
    """Against another scheme, seed by seed; None: there it is 0 with some seed."""
    before = rows[base]
    if not all(before[seed][key] for seed in rows[scheme]):
        return None
    return interval([row[key] / before[seed][key] - 1 for seed, row in rows[scheme].items()])


def shown(found: Interval) -> str:
    half = "" if found.half_width is None else f" ± {found.half_width:.0%}"
    return f"{found.mean:+.0%}{half}"


def is_shown(found: Interval) -> bool:
    """True if the interval excludes 0."""
    return found.half_width is not None and abs(found.mean) > found.half_width


def mean(rows: dict[str, Row], key: str) -> float:
    return fmean(row[key] for row in rows.values())


def cell_text(
    rows: dict[str, dict[str, Row]], scheme: str, key: str, scale: float, base: str = STOP.name
) -> str:
    """The mean of a scheme, and in brackets its change against another one."""
    text = f"{mean(rows[scheme], key) * scale:.2f}"
    if scheme != base and (by := change(rows, scheme, key, base)) is not None:
        text += f" ({shown(by)}{'*' if is_shown(by) else ''})"
    return text
