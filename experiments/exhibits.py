"""Every table and figure of the five seeds: as it was published, ours out of the kept results, and
a verdict on the two.

A row without a figure of ours says what is missing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from experiments import exhibit_comparisons as compare
from experiments import exhibit_figures as figures
from experiments.kept import EXPERIMENTS, misses, runs_of
from experiments.sentinels.history import note_for
from experiments.verdicts import Compared, Verdict, each_of, of_all


class How(StrEnum):
    """How a figure of ours came about."""

    REAL = "real"  # Processes, sockets and computation of a small model, timed.
    PACED = "paced"  # Real processes and transfers; engines sleep the times of a profile.
    SIMULATED = "simulated"  # Virtual time; the product's decisions.
    COMPUTED = "computed"  # The product's code for it, without time.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One table, figure or claim of a paper.

    A row with a figure has either `compared`, which gives its verdict, or a `judged` one and the
    reason `because`. Where its kept result, or `missed`, says that a bar is missed, that is its
    verdict.
    """

    name: str
    published: str
    how: How
    why: str  # The two differ, or what ours needs.
    ours: Callable[[], str] | None = None
    experiment: str | None = None  # Folder below experiments/.
    result: str | None = None  # Of which `ours` is made, below experiments/; missing until it is.
    needs: str = ""  # For a run, while there is none.
    compared: Callable[[], Sequence[Compared]] | None = None
    judged: Verdict | None = None
    because: str = ""
    missed: Callable[[], Sequence[str]] = list  # Bars, beside those that the result's text names.
    sentinels: tuple[str, ...] = ()  # Those that watch what the result depends on.

    @property
    def is_filled(self) -> bool:
        has_result = self.result is None or (EXPERIMENTS / self.result).exists()
        return self.ours is not None and has_result and self.ours() != ""

    @property
    def misses(self) -> list[str]:
        """Bars that ours misses."""
        if not self.is_filled:
            return []
        return [*(misses(self.result) if self.result else []), *self.missed()]

    @property
    def verdict(self) -> Verdict:
        if not self.is_filled:
            return Verdict.MISSING
        return Verdict.MISSED_BAR if self.misses else self._of_figures

    @property
    def _of_figures(self) -> Verdict:
        """The verdict, whether or not a bar is missed."""
        if self.judged:
            return self.judged
        assert self.compared is not None, f"{self.name}: no verdict"
        return of_all(self.compared())

    @property
    def grounds(self) -> str:
        """Why the verdict is what it is, beyond the verdict itself."""
        if not self.is_filled:
            return ""
        reason = each_of(self.compared()) if self.compared else self.because
        if not self.misses:
            return reason
        found = "; ".join(self.misses)
        if self.judged in (Verdict.KEPT_BAR, Verdict.REPRODUCED):
            return found  # The reason would be one against the miss.
        return f"{found}. Beside that: {self._of_figures} ({reason})"

    @property
    def note(self) -> str:
        """How old the kept result is, or what has changed since; also of how many runs it is."""
        if self.result is None or not self.is_filled:
            return ""
        runs = runs_of(self.result)
        last = runs[-1]
        age = note_for(self.sentinels, last["commit"], last.get("at", ""))
        return "; ".join(filter(None, [age, parts_of(runs)]))


def parts_of(runs: Sequence[Mapping[str, Any]]) -> str:
    """A note for readers of a result that several runs have made."""
    if len(runs) == 1:
        return ""
    commits, machines = ({run[key]: None for run in runs} for key in ("commit", "machine"))
    said = f"put together from {len(runs)} runs"
    if len(commits) > 1:
        said += f" at {len(commits)} commits"
    if len(machines) > 1:
        kinds = " and ".join(machine.split(", ")[1] for machine in machines)
        said += f" on machines of {len(machines)} kinds ({kinds})"
    return said


# Rows of results whose scripts are gone, by name: neither the figures nor the verdict can change.
ONCE: dict[str, Any] = json.loads((EXPERIMENTS / "measured_once/exhibits.json").read_text())


def once(name: str) -> Exhibit:
    """A row as it was when its result was measured; its bars and its age are looked up again."""
    row = ONCE[name]
    return Exhibit(
        row["name"],
        row["published"],
        How(row["how"]),
        row["why"],
        lambda: str(row["ours"]),
        "measured_once",
        f"measured_once/results/{row['result']}.json",
        judged=Verdict(row["verdict"]),
        because=row["because"],
        missed=lambda: row.get("missed", ()),
        sentinels=tuple(row.get("sentinels", ())),
    )


_NO_DRAFTS = "our kept run had no draft models"
_VIRTUAL = (
    "virtual time, the clock of OPT-13B, ShareGPT's lengths cut to 1,024 and 256 tokens, a reload "
    "of 20 s"
)

# One instance fails, or a quarter of them; those that are kept are shown.
_SINGLES = ("4x1", "8x1", "16x1", "64x1")
_QUARTERS = ("4x1", "8x2", "16x4", "64x16")

SEEDS: dict[str, tuple[Exhibit, ...]] = {
    "KVRS (RecompOrMigrate)": (
        Exhibit(
            "Figure: crossover queue depth",
            "near 0 to more than 250, three orders of magnitude",
            How.COMPUTED,
            "the paper names no axes; ours: 256 to 16,384 tokens, 1 to 100 Gbit/s, 60 ms a request",
            figures.crossover_map,
            judged=Verdict.EXAMPLE,
            because="the formula of the paper over lengths and rates of ours",
        ),
        once("hand_off"),
        once("hand_off_distserve"),
        once("skew"),
        once("skew_distserve"),
        once("crossover"),
        once("crossover_distserve"),
        once("link_computed"),
        once("link_simulated"),
        Exhibit(
            "O(1) decision",
            "claimed, no figure",
            How.REAL,
            "-",
            figures.decision,
            "request_path",
            result=figures.DECISION,
            judged=Verdict.KEPT_BAR,
            because="a decision takes as long for 100,000 tokens as for 512",
        ),
        once("two_proxies"),
        Exhibit(
            "Healthy path as without it",
            "claimed, no figure",
            How.REAL,
            "a proxy in between, beside a client that calls the instances itself",
            figures.healthy,
            "healthy_path",
            result=figures.HEALTHY,
            judged=Verdict.KEPT_BAR,
            because="at most 0.3 ms more for a token (p50), no request more",
        ),
    ),
    "LUMEN": (
        Exhibit(
            "Figures 1, 2: impact of failures, 4 to 64 workers",
            "TTFT and TPOT of stop-and-restart; TPOT 1.6 times",
            How.SIMULATED,
            f"{_VIRTUAL}; {figures.instances(*_SINGLES)} instances; {_NO_DRAFTS}",
            figures.at(_SINGLES, figures.impact_of_one),
            "lumen",
            figures.SIMULATED,
            compared=compare.impact,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Table 1: causes",
            "uninterrupted TTFT 3.5 to 4.1 s, 78-80 % of it queueing; replay 24.0 to 29.4 s",
            How.SIMULATED,
            f"{_VIRTUAL}; {_NO_DRAFTS}; what is not queueing is the computation of the prompt "
            "alone",
            figures.at(("4x1", "8x1"), figures.causes),
            "lumen",
            figures.SIMULATED,
            compared=compare.causes,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figure 6 (A.1), 4 workers",
            "window -50.0 / -34.9 % of stop-and-restart / fixed checkpoints; TTFT -44.4 %",
            How.SIMULATED,
            f"{_VIRTUAL}; {_NO_DRAFTS}, so ours is its + scheduling",
            figures.at(("4x1",), figures.first_scheme),
            "lumen",
            figures.SIMULATED,
            compared=compare.four_workers,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Table 2 (A.1), 8 workers",
            "recovery 83.3 / 82.8 / 29.9 s; TTFT -29.6 %",
            How.SIMULATED,
            f"{_VIRTUAL}; {_NO_DRAFTS}, so ours ends with + scheduling",
            figures.at(("8x1",), figures.windows),
            "lumen",
            figures.SIMULATED,
            compared=compare.eight_workers,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figure 7 (A.2): scheduling alone",
            "TTFT -19.1 %, TPOT 96.7 ms of 99.3",
            How.SIMULATED,
            f"{_VIRTUAL}; {_NO_DRAFTS}",
            figures.at(("4x1", "8x1"), figures.scheduling),
            "lumen",
            figures.SIMULATED,
            compared=compare.scheduling,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figures 6, 7 (A.1, A.2), 4 workers, with draft models",
            "TTFT -44.4 %, TPOT -15.9 %, window -50.0 %; + progressive alone TPOT 95.8 ms of 99.3",
            How.SIMULATED,
            "virtual time, the clock of Llama 3.1 70B; our kept run had draft models, at the clock "
            "of its 8B, with four drafts a step that are right with probability 0.6; Splitwise's "
            "conversations at 1.8/s an instance, a reload of 72 s",
            figures.with_drafts,
            "lumen",
            figures.SIMULATED_DRAFTS,
            compared=compare.with_drafts,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figure 8 (A.3): request rates",
            "TTFT 1.5 s at 10/s, 26.7 s at 12/s; -33.3 % at 11/s",
            How.SIMULATED,
            f"{_VIRTUAL}; requests per second of an instance behind the colon, else 6.5; changes "
            f"of + scheduling, since {_NO_DRAFTS}",
            figures.at(("4x1:5.5", "4x1", "4x1:7.5"), figures.ttft, least=2),
            "lumen",
            figures.SIMULATED,
            compared=compare.request_rates,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figure 9 (A.4): 1, 2, 4 of 8 fail",
            "TTFT -29.6 / -50.8 / -82.7 %",
            How.SIMULATED,
            f"{_VIRTUAL}; changes of + scheduling, since {_NO_DRAFTS}",
            figures.at(("8x1", "8x2", "8x4"), figures.ttft),
            "lumen",
            figures.SIMULATED,
            compared=compare.failures_of_eight,
            sentinels=("lumen",),
        ),
        once("lumen_recovery"),
        once("checkpoint_cost"),
        Exhibit(
            "Table 3 (B.1)",
            "windows 100.3 / 94.9 / 91.1 / 81.5 / 81.5 s",
            How.SIMULATED,
            f"{_VIRTUAL}; the last two published are with draft models; {_NO_DRAFTS}",
            figures.at(("10x1",), figures.windows),
            "lumen",
            figures.SIMULATED_TEN,
            needs="25 minutes of CPU time",
            compared=compare.ten_windows,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figures 10, 11 (B.2, B.3): rates, failures",
            "TTFT up to -42.7 %; 5 failures -63.6 / -33.9 %",
            How.SIMULATED,
            f"{_VIRTUAL}; two of five rates and two of five counts; changes of + scheduling, since "
            f"{_NO_DRAFTS}",
            figures.at(("10x1", "10x1:7.5", "10x5"), figures.against_both),
            "lumen",
            figures.SIMULATED_TEN,
            needs="25 minutes of CPU time",
            compared=compare.ten_rates_and_failures,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Figure 12 (B.4): 25 % fail, 4 to 64 workers",
            "TTFT -46.8 to -51.2 %",
            How.SIMULATED,
            f"{_VIRTUAL}; {figures.instances(*_QUARTERS)} instances; changes of + scheduling, "
            f"since {_NO_DRAFTS}",
            figures.at(_QUARTERS, figures.ttft),
            "lumen",
            figures.SIMULATED,
            compared=compare.a_quarter,
            sentinels=("lumen",),
        ),
        Exhibit(
            "B.4: 16 of 64 fail, checkpoints lost with their streams",
            "23.8 %",
            How.COMPUTED,
            "even draws give 15 of 63",
            figures.co_failure,
            "lumen",
            result=figures.PLACEMENT,
            compared=compare.co_failure,
            sentinels=("placement",),
        ),
        Exhibit(
            "Figure 13, Table 4 (B.5): one failure",
            "TTFT -50.6 % at 4 workers, -1.3 % at 64",
            How.SIMULATED,
            f"{_VIRTUAL}; {figures.instances(*_SINGLES)} instances; changes of + scheduling, since "
            f"{_NO_DRAFTS}",
            figures.at(_SINGLES, figures.ttft, least=2),
            "lumen",
            figures.SIMULATED,
            compared=compare.one_failure,
            sentinels=("lumen",),
        ),
        Exhibit(
            "Table 5 (B.6): depth of speculation",
            "acceptance 0.72 / 0.60 / 0.50",
            How.COMPUTED,
            "circular: pairs of tiny models were made with these acceptances, and nothing is timed",
            figures.acceptance,
            "speculation",
            result=figures.ACCEPTANCE,
            judged=Verdict.OTHER,
            because="drafts that a step accepts in place of TTFT and TPOT",
        ),
        Exhibit(
            "Table 6 (B.7): alpha 0.25 to 4",
            "TTFT 1.4 s at each, TPOT 129.0 to 129.2 ms",
            How.COMPUTED,
            "ours shows where alpha acts, the spread of unequal checkpoints; "
            "the paper's measures hardly see it",
            figures.alphas,
            "lumen",
            result=figures.PLACEMENT,
            judged=Verdict.OTHER,
            because="shares of checkpoints in place of TTFT and TPOT",
            sentinels=("placement",),
        ),
    ),
    "RaidServe": (
        Exhibit(
            "Figure 1: cyclic placement",
            "KV capacity +50 % at 4 heads on 3 GPUs",
            How.COMPUTED,
            "the same; 12 layers",
            figures.cyclic,
            judged=Verdict.EXAMPLE,
            because="the paper's four heads on three GPUs",
        ),
        Exhibit(
            "Figure 2: hybrid attention",
            "up to 2 times slower attention without",
            How.COMPUTED,
            "heads in place of time, which needs GPUs; the paper's 2 is two heads beside one, ours "
            "counts the share of the spread head too",
            figures.hybrid_attention,
            judged=Verdict.EXAMPLE,
            because="heads of the busiest rank, counted",
        ),
        once("shares"),
        Exhibit(
            "Figure 4: on-demand weights",
            "12 shards, 4 GPUs: each survivor loads one",
            How.COMPUTED,
            "the same; its figure shows GPU 0 lost, its text says GPU 3",
            figures.loaded_on_demand,
            judged=Verdict.EXAMPLE,
            because="the paper's twelve shards on four GPUs",
        ),
        once("availability"),
        Exhibit(
            "Table 1: OpenThoughts (mean / median / max)",
            "in 422 / 352 / 7,633; out 7,295 / 5,583 / 37,817",
            How.COMPUTED,
            "lognormal, fitted to mean and median",
            figures.preset("openthoughts"),
            judged=Verdict.CONSTRUCTION,
            because="the distribution is fitted to the published mean and median, and cut at the "
            "published maximum",
        ),
        Exhibit(
            "Table 2: Mooncake sample (mean / median / max)",
            "in 13,516 / 8,001 / 123,192; out 349 / 362 / 2,000",
            How.COMPUTED,
            "fitted to the whole trace (12,035 / 6,909 in), of which the paper drew 3,000",
            figures.preset("mooncake-conversation"),
            judged=Verdict.CONSTRUCTION,
            because="the distribution is fitted to mean and median of the trace, and cut at its "
            "maximum",
        ),
        once("curves"),
        once("prefill_balance"),
        once("decode_balance"),
        once("breakdown"),
        once("rank_balance"),
        once("raidserve_computed"),
        once("table_3_in_place"),
        once("longest_waits"),
    ),
    "AnchorTP": (
        Exhibit(
            "Figure 3: 1,024 rows, 4 to 3 GPUs",
            "256 reloaded, 86 between GPUs",
            How.COMPUTED,
            "the same",
            figures.figure_3,
            judged=Verdict.EXAMPLE,
            because="the paper's rows and GPUs",
        ),
        once("in_place"),
        once("anchortp_recovery"),
        once("planners"),
        once("anchortp_planners"),
        once("degree_by_degree"),
        once("experts_degrees"),
        once("dense_degrees"),
        Exhibit(
            "Figures 4, 6: experts rebalanced",
            "436.61 to 562.32 tokens/s",
            How.SIMULATED,
            "Mixtral-8x22B by the clock of a profile of vLLM on eight GPUs, one of which is lost, "
            "at three skews of the router; the paper does not say how skewed its is, and a step of "
            "ours is as long as the tiles of its busiest rank",
            figures.experts,
            "experts",
            figures.EXPERTS,
            judged=Verdict.DIRECTION,
            because="the paper's ratio of 1.29 lies between those of two skews",
            sentinels=("in_place", "plans"),
        ),
        once("experts_cpu"),
        Exhibit(
            "Table I with experts, of a restart's",
            "8 to 6: TFS 0.10, TTP 0.71 and 0.70; 4 to 2: TFS 0.09 and 0.10, TTP 0.44 and 0.41",
            How.REAL,
            "a Mixtral of 1 GB in the page cache, on two processors, of which two ranks are lost "
            "one after the other, as the paper's are, and stay away; for the restart all start "
            "again on the same processors. Requests come faster than they are served, and each "
            "case was run once",
            figures.lost_ranks,
            "experts",
            figures.EXPERTS_LOST,
            judged=Verdict.DIRECTION,
            because="TFS falls by an order of magnitude at the first loss, and by less at the "
            "second one; TTP falls in five of eight cases",
            sentinels=("in_place", "plans"),
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
            How.SIMULATED,
            "virtual time; clock, slots and lengths as the paper has them without a failure, "
            "length of a run and moment of the failure fitted to one row of the baseline; replicas "
            "of pipelines are the simulator's, and lost streams go on from what they had, in the "
            "baseline too; a session of 0.1 s, where the paper takes 30",
            figures.table_1,
            "pipelines",
            result=figures.TABLE_1,
            compared=compare.table_1,
            needs="an hour",
        ),
        once("pipelines_capacity"),
        Exhibit(
            "Figure 9: overhead of replication",
            "2.3 / 2.8 % and 4.0 / 3.6 %",
            How.PACED,
            "two instances of one process each, with a small model, on one machine",
            figures.replication,
            "pipelines",
            result=figures.REPLICATION,
            compared=compare.replication,
            needs="a quiet machine",
        ),
        once("checkpoint_cost_of_stages"),
    ),
}
