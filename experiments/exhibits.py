"""Every table and figure of the five seeds: as it was published, ours out of the kept results, and
a verdict on the two.

The rows stand in exhibits.json. Ours, and the comparison that gives the verdict, are computed by
functions that are named here; a row of a result that is not measured at each release has both as
text, which a new result is to renew. A row without a figure of ours says what is missing.
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
    result: str | None = None  # Of which `ours` is made, below experiments/; missing until it is.
    needs: str = ""  # For a run, while there is none.
    compared: Callable[[], Sequence[Compared]] | None = None
    judged: Verdict | None = None
    because: str = ""
    missed: tuple[str, ...] = ()  # Bars, beside those that the result's text names.
    sentinels: tuple[str, ...] = ()  # Those that watch what the result depends on.

    @property
    def experiment(self) -> str | None:
        """The folder below experiments/."""
        return self.result and self.result.partition("/")[0]

    @property
    def is_filled(self) -> bool:
        has_result = self.result is None or (EXPERIMENTS / self.result).exists()
        return self.ours is not None and has_result and self.ours() != ""

    @property
    def misses(self) -> list[str]:
        """Bars that ours misses."""
        if not self.is_filled:
            return []
        return [*(misses(self.result) if self.result else []), *self.missed]

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


# A quarter of the workers fails, and one.
_QUARTERS = ("4x1", "8x2", "16x4", "32x8", "64x16")
_SINGLES = ("4x1", "8x1", "16x1", "32x1", "64x1")

# By the name of the row.
OURS: dict[str, Callable[[], str]] = {
    "Figure: crossover queue depth": figures.crossover_map,
    "O(1) decision": figures.decision,
    "Healthy path as without it": figures.healthy,
    "Figures 1, 2: impact of failures, 4 to 64 workers": figures.at_paper(
        _QUARTERS, figures.impact_at_paper
    ),
    "Table 1: causes": figures.at_paper(_QUARTERS, figures.causes_at_paper),
    "Figure 6 (A.1), 4 workers": figures.at(("4x1",), figures.first_scheme),
    "Table 2 (A.1), 8 workers": figures.at(("8x1",), figures.windows),
    "Figure 7 (A.2): scheduling alone": figures.at(("4x1", "8x1"), figures.scheduling),
    "Figures 6, 7 (A.1, A.2), 4 workers, with draft models": figures.with_drafts,
    "Figure 8 (A.3): request rates": figures.at(
        ("4x1:5.5", "4x1", "4x1:7.5"), figures.ttft, least=2
    ),
    "Figure 9 (A.4): 1, 2, 4 of 8 fail": figures.at(("8x1", "8x2", "8x4"), figures.ttft),
    "Table 3 (B.1)": figures.table_3,
    "Figure 10 (B.2): request rates of ten workers": figures.at_paper(
        ("10x1:1.2", "10x1", "10x1:1.5", "10x1:1.7", "10x1:2.1")
    ),
    "Figure 11 (B.3): 1 to 5 of 10 fail": figures.at_paper(
        ("10x1", "10x2", "10x3", "10x4", "10x5")
    ),
    "Figure 12 (B.4): 25 % fail, 4 to 64 workers": figures.at_paper(_QUARTERS),
    "B.4: 16 of 64 fail, checkpoints lost with their streams": figures.co_failure,
    "Figure 13, Table 4 (B.5): one failure": figures.at_paper(
        _SINGLES, figures.one_failure_at_paper
    ),
    "Table 5 (B.6): depth of speculation": figures.variants("10x1 depth"),
    "Table 6 (B.7): alpha 0.25 to 4": figures.variants("10x1 alpha"),
    "Figure 1: cyclic placement": figures.cyclic,
    "Figure 2: hybrid attention": figures.hybrid_attention,
    "Figure 4: on-demand weights": figures.loaded_on_demand,
    "Table 1: OpenThoughts (mean / median / max)": figures.preset("openthoughts"),
    "Table 2: Mooncake sample (mean / median / max)": figures.preset("mooncake-conversation"),
    "Figure 3: 1,024 rows, 4 to 3 GPUs": figures.figure_3,
    "Figures 4, 6: experts rebalanced": figures.experts,
    "Table I with experts, of a restart's": figures.lost_ranks,
    "Table 1, figures 1, 5 to 7: three scenarios": figures.table_1,
    "Figure 9: overhead of replication": figures.replication,
}
COMPARED: dict[str, Callable[[], Sequence[Compared]]] = {
    "Figures 1, 2: impact of failures, 4 to 64 workers": compare.impact,
    "Table 1: causes": compare.causes,
    "Figure 6 (A.1), 4 workers": compare.four_workers,
    "Table 2 (A.1), 8 workers": compare.eight_workers,
    "Figure 7 (A.2): scheduling alone": compare.scheduling,
    "Figures 6, 7 (A.1, A.2), 4 workers, with draft models": compare.with_drafts,
    "Figure 8 (A.3): request rates": compare.request_rates,
    "Figure 9 (A.4): 1, 2, 4 of 8 fail": compare.failures_of_eight,
    "Table 3 (B.1)": compare.table_3,
    "Figure 10 (B.2): request rates of ten workers": compare.rates,
    "Figure 11 (B.3): 1 to 5 of 10 fail": compare.failures_of_ten,
    "Figure 12 (B.4): 25 % fail, 4 to 64 workers": compare.a_quarter,
    "B.4: 16 of 64 fail, checkpoints lost with their streams": compare.co_failure,
    "Figure 13, Table 4 (B.5): one failure": compare.one_failure,
    "Table 1, figures 1, 5 to 7: three scenarios": compare.table_1,
    "Figure 9: overhead of replication": compare.replication,
}


def exhibit_of(row: Mapping[str, Any]) -> Exhibit:
    """A row of exhibits.json."""
    name = row["name"]
    return Exhibit(
        name,
        row["published"],
        How(row["how"]),
        row["why"],
        (lambda: str(row["ours"])) if "ours" in row else OURS.get(name),
        row.get("result"),
        compared=None if "judged" in row else COMPARED.get(name),
        judged=Verdict(row["judged"]) if "judged" in row else None,
        because=row.get("because", ""),
        missed=tuple(row.get("missed", ())),
        sentinels=tuple(row.get("sentinels", ())),
    )


ROWS: dict[str, list[dict[str, Any]]] = json.loads((EXPERIMENTS / "exhibits.json").read_text())
SEEDS = {seed: tuple(map(exhibit_of, rows)) for seed, rows in ROWS.items()}
