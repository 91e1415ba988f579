"""Every table and figure of the five papers: published figures, ours out of results, and a verdict.

The rows stand in exhibits.json, the published figures in published/. A module for each paper
computes ours beside them, which gives the verdict, and the panels of its picture. A row of which
nothing is measured has a verdict that is judged.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any

from experiments.exhibits import anchortp, kevlarflow, kvrs, lumen, raidserve
from experiments.kept import EXPERIMENTS, Results, misses, runs_of
from experiments.panels import Panel
from experiments.sentinels.history import note_for
from experiments.verdicts import Compared, Verdict, each_of, headline, of_all

KEPT = Results()
# A run in short has not all results, cases and seeds.
INCOMPLETE = (FileNotFoundError, LookupError, ArithmeticError, ValueError)


EXAMPLES = (Verdict.EXAMPLE, Verdict.CONSTRUCTION)  # They measure nothing of ours.
# Verdicts with which nothing is left to explain.
NO_CAUSE = (Verdict.REPRODUCED, Verdict.KEPT_BAR, Verdict.MISSING, *EXAMPLES)


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

    Attributes:
        cause: why it is not reproduced, as measured.
        fitted: parameters that were fitted to published figures.
        result: the file below experiments/ of which ours is made; None: it is computed at once.
        needs: of a run, while there is no result.
        judged: the verdict where nothing is measured.
        power: an effect without which the comparisons show nothing.
        sentinels: those that watch what the result depends on.
    """

    name: str
    how: How
    why: str
    compared: Callable[[Results], Sequence[Compared]] | None = None
    result: str | None = None
    needs: str = ""
    cause: str = ""
    fitted: tuple[str, ...] = ()
    judged: Verdict | None = None
    power: Callable[[Results], Compared] | None = None
    sentinels: tuple[str, ...] = ()

    @property
    def experiment(self) -> str | None:
        """The folder below experiments/."""
        return self.result and self.result.partition("/")[0]

    def found(self, results: Results = KEPT) -> list[Compared]:
        """Published figures and ours; empty: nothing of ours is there."""
        if self.compared is None or (self.result and not results.has(self.result)):
            return []
        with suppress(*INCOMPLETE):
            return list(self.compared(results))
        return []

    def verdict(self, results: Results = KEPT) -> Verdict:
        found = self.found(results)
        if not found:
            return Verdict.MISSING
        return self.judged or of_all(found, self.power(results) if self.power else None)

    @property
    def note(self) -> str:
        """How old the kept result is, or what has changed since; of how many runs it is, and
        whether it is void.
        """
        if self.result is None or not KEPT.has(self.result):
            return ""
        runs = runs_of(self.result)
        last = runs[-1]
        age = note_for(self.sentinels, last["commit"], last.get("at", ""))
        void = f"void: {last['void']}" if "void" in last else ""
        return "; ".join(filter(None, [void, age, parts_of(runs)]))

    def row(self, results: Results = KEPT) -> dict[str, Any]:
        """The exhibit as data: every comparison, and why the verdict is what it is."""
        found = self.found(results)
        return {
            "exhibit": self.name,
            "verdict": self.verdict(results).value,
            "fitted": self._fitted(results) if found else 0,
            "fitted_to": list(self.fitted),
            "how": (self.how if found else How.MISSING).value,
            "experiment": self.experiment or "-",
            "result": self.result or "-",
            "compared": [_as_data(each) for each in found],
            "grounds": each_of(found) if found and not self.judged else "",
            "cause": "" if self.verdict(results) in NO_CAUSE else self.cause,
            "why": self.why if found or not self.result else self._waits(),
            "bars_missed": misses(self.result) if found and self.result else [],
            "note": self.note,
        }

    def _fitted(self, results: Results) -> int:
        """The number of fitted parameters: as the result says, else as the row does."""
        said = results(self.result).get("fitted") if self.result else None
        return said if isinstance(said, int) else len(self.fitted)

    def _waits(self) -> str:
        waits = f"not run yet, needs {self.needs}" if self.needs else "not run yet"
        return f"{waits}; {self.why}"


def _as_data(each: Compared) -> dict[str, str]:
    published, ours = each.shown()
    return {"what": each.what, "published": published, "ours": ours, "verdict": each.verdict()}


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


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper with its exhibits, the panels of its picture, and its first claim.

    Attributes:
        claim: in our own words; `{0}` stands for the first published figure, and so on.
        headline: the comparisons of the claim.
    """

    title: str
    claim: str
    headline: Callable[[Results], list[Compared]]
    exhibits: tuple[Exhibit, ...]
    panels: tuple[Callable[[Results], list[Panel]], ...]


def rows_of(paper: str, results: Results = KEPT) -> list[dict[str, Any]]:
    """The rows of a paper, of the kept results or of those of a run."""
    return [each.row(results) for each in PAPERS[paper].exhibits]


def panels_of(paper: str, results: Results = KEPT) -> list[Panel]:
    """The panels of a paper's picture, without those whose results are not there."""
    found = []
    for each in PAPERS[paper].panels:
        with suppress(*INCOMPLETE):
            found += each(results)
    return found


def headline_of(paper: str, results: Results = KEPT) -> dict[str, Any]:
    """The first claim of a paper, ours beside it, and what is left of it."""
    about = PAPERS[paper]
    found = about.headline(results)
    shown = [_as_data(each) for each in found]
    return {
        "paper": about.title,
        "claim": about.claim.format(*(each["published"].strip("+-") for each in shown)),
        "compared": shown,
        "verdict": headline(of_all(found)).value,
        "command": f"python -m experiments.paper {paper}",
    }


def _exhibit_of(row: Mapping[str, Any], module: ModuleType) -> Exhibit:
    """A row of exhibits.json."""
    name = row["name"]
    return Exhibit(
        name,
        How(row["how"]),
        row["why"],
        module.COMPARED.get(name),
        row.get("result"),
        row.get("needs", ""),
        row.get("cause", ""),
        tuple(row.get("fitted", ())),
        Verdict(row["judged"]) if "judged" in row else None,
        getattr(module, "POWER", {}).get(name),
        tuple(row.get("sentinels", ())),
    )


def _paper_of(found: Mapping[str, Any], module: ModuleType) -> Paper:
    return Paper(
        found["title"],
        found["claim"],
        module.headline,
        tuple(_exhibit_of(row, module) for row in found["rows"]),
        module.PANELS,
    )


DATA: dict[str, Any] = json.loads((EXPERIMENTS / "exhibits.json").read_text())
MODULES = {
    "kvrs": kvrs,
    "lumen": lumen,
    "raidserve": raidserve,
    "anchortp": anchortp,
    "kevlarflow": kevlarflow,
}
PAPERS = {name: _paper_of(DATA[name], module) for name, module in MODULES.items()}
