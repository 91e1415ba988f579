"""The programs that a run of papers consists of, and their shares of its time.

Pure: no clock and no process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.programs import PAPERS, Experiment

# A budget that nobody names is the sum of the minutes and a quarter.
SLACK = 1.25
# A program is ended after this many times its share of the budget.
_PATIENCE = 2.0
_LEAST_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Planned:
    """A program of a paper, with its minutes, or the reason why it does not run here."""

    paper: str
    experiment: Experiment
    minutes: float
    why_not: str = ""


def planned(
    papers: Sequence[str], *, is_quick: bool, twice: bool = False, only_virtual: bool = False
) -> list[Planned]:
    """The programs of these papers in order; `twice`: those in virtual time run two times;
    `only_virtual`: no others.
    """
    found = []
    for paper in papers:
        for each in PAPERS[paper]:
            if only_virtual and not each.is_virtual:
                continue
            why = "; ".join(each.missing())
            minutes = each.minutes
            if is_quick:
                why = why or ("" if each.quick else "it has no quick form")
                minutes = each.quick.minutes if each.quick else 0.0
            if twice and each.is_virtual:
                minutes *= 2
            found.append(Planned(paper, each, 0.0 if why else minutes, why))
    return found


def budget_minutes(plan: Sequence[Planned]) -> float:
    """The budget of a plan for which none is named."""
    return SLACK * sum(each.minutes for each in plan)


@dataclass(frozen=True, slots=True)
class Budget:
    """The time of a run, which its programs share in proportion to their minutes."""

    total_s: float
    planned_minutes: float

    def limit_s(self, minutes: float, used_s: float) -> float | None:
        """The seconds after which a program of so many minutes is ended; None if less of the budget
        is left than it takes.
        """
        share_s = self.total_s * minutes / self.planned_minutes
        left_s = self.total_s - used_s
        if left_s < min(60 * minutes, share_s):
            return None
        return min(left_s, max(_LEAST_LIMIT_S, _PATIENCE * share_s))
