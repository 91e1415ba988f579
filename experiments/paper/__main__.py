"""All exhibits of a paper: runs its programs within a time budget, and prints its rows.

    python -m experiments.paper                        # The five papers, with minutes and needs.
    python -m experiments.paper kvrs                   # Results go below experiments/.
    python -m experiments.paper kvrs lumen --quick     # In short; into a scratch folder.
    python -m experiments.paper all --quick --twice    # Those in virtual time two times.
    python -m experiments.paper all --quick --twice --virtual    # Those alone.

Results are laid out like experiments/: OUT/FOLDER/results/NAME.json of each program, and
OUT/paper/results/PAPER.json with commit, load, seeds, what became of each program, and the rows. A
program whose result exists for this commit is not run again. One that takes twice its share of the
budget is ended, and none begins that would go beyond it. `--quick` has one seed, short spans and
fewer sizes: all five papers in an hour on two cores. Exit status 1: a program has left no result,
or two runs in virtual time differ.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments import evidence, running
from experiments.paper.plan import Budget, Planned, budget_minutes, planned
from experiments.paper.rows import as_text, draw, figures_of
from experiments.paper.same import differences
from experiments.programs import EXPERIMENTS, PAPERS, Experiment
from experiments.record import Record
from experiments.results import is_of_this_code, is_whole, run_of

_SHOWN_LINES = 5
_TIMES = ("wall_s", "cpu_s")


@dataclass(slots=True)
class Outcome:
    """The end of a program: `done`, `kept` (its result was there), `failed`, `ended` or
    `skipped`.
    """

    program: str
    command: str
    state: str
    why: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    void: str = ""
    twice: str = ""  # `same`, or where two runs differ.
    seeds: list[int] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.state in ("done", "kept", "skipped") and self.twice in ("", "same")


def command_of(each: Experiment, *, is_quick: bool) -> str:
    """The command as a result of it names it."""
    command = each.quick.command if is_quick and each.quick else each.command
    return " ".join(shlex.split(command))


def is_measured(each: Experiment, root: Path, *, is_quick: bool) -> bool:
    """True if this code has all results of the program below `root`, whole and not void."""
    command = command_of(each, is_quick=is_quick)
    return all(
        is_of_this_code(path) and is_whole(path) and run_of(path).get("command") == command
        for path in each.paths_in(root)
    )


class Papers:
    """A run of several papers."""

    def __init__(self, plan: Sequence[Planned], budget: Budget, out: Path, logs: Path) -> None:
        self._plan, self._budget = plan, budget
        self._out, self._logs = out, logs
        self._begun_s = time.monotonic()

    def run(self, paper: str, *, is_quick: bool, twice: bool) -> list[Outcome]:
        """Run the programs of the plan that are of this paper, and tell of each."""
        found = []
        for number, each in enumerate(self._plan, 1):
            if each.paper != paper:
                continue
            minutes = f", about {each.minutes:.2g} min" if each.minutes else ""
            print(
                f"[{number}/{len(self._plan)}] {each.paper}: {each.experiment.name}{minutes}; "
                f"{self._left_min():.1f} min of the budget left",
                flush=True,
            )
            outcome = self._outcome(each, is_quick=is_quick, twice=twice)
            found.append(outcome)
            print(f"    {_said(outcome)}", flush=True)
        return found

    def _left_min(self) -> float:
        return (self._budget.total_s - (time.monotonic() - self._begun_s)) / 60

    def _outcome(self, each: Planned, *, is_quick: bool, twice: bool) -> Outcome:
        experiment = each.experiment
        command = command_of(experiment, is_quick=is_quick)
        outcome = Outcome(experiment.name, command, "skipped", each.why_not)
        if each.why_not:
            return outcome
        repeated = twice and experiment.is_virtual
        if not repeated and is_measured(experiment, self._out, is_quick=is_quick):
            outcome.state, outcome.why = "kept", "its result is of this commit"
        else:
            self._measure(each, outcome, self._out, is_quick=is_quick)
            if repeated and outcome.state == "done":
                self._repeat(each, outcome, is_quick=is_quick)
        if outcome.state in ("done", "kept"):
            run = run_of(experiment.paths_in(self._out)[0])
            outcome.void, outcome.seeds = run.get("void", ""), run.get("seeds", [])
        return outcome

    def _measure(self, each: Planned, outcome: Outcome, root: Path, *, is_quick: bool) -> None:
        limit_s = self._budget.limit_s(each.minutes, time.monotonic() - self._begun_s)
        if limit_s is None:
            outcome.state = "skipped"
            outcome.why = f"less of the budget is left than its {each.minutes:.2g} min"
            return
        paths = each.experiment.paths_in(root)
        begun = [_written_at(path) for path in paths]
        log = self._logs / f"{each.paper}-{each.experiment.name.replace('/', '-')}.log"
        ran = running.run(
            each.experiment.words(root, is_quick=is_quick),
            log,
            limit_s,
            lambda so_far_s: print(
                f"    {so_far_s / 60:.0f} of about {each.minutes:.2g} min; "
                f"{self._left_min():.1f} min of the budget left",
                flush=True,
            ),
        )
        outcome.wall_s = round(outcome.wall_s + ran.wall_s, 1)
        outcome.cpu_s = round(outcome.cpu_s + ran.cpu_s, 1)
        outcome.why = "" if ran.status == 0 else ran.how
        has_written = all(
            _written_at(path) not in (None, before)
            for path, before in zip(paths, begun, strict=True)
        )
        if ran.status is None:
            outcome.state = "ended"
        else:
            outcome.state = "done" if has_written else "failed"
        if outcome.state == "failed":
            lines = log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
            outcome.why = " | ".join([ran.how, *(line.strip() for line in lines)])

    def _repeat(self, each: Planned, outcome: Outcome, *, is_quick: bool) -> None:
        with tempfile.TemporaryDirectory(prefix="kvrs-paper-again-") as directory:
            again = Path(directory)
            self._measure(each, outcome, again, is_quick=is_quick)
            if outcome.state != "done":
                return
            ways = zip(
                each.experiment.paths_in(self._out), each.experiment.paths_in(again), strict=True
            )
            found = [place for one, other in ways for place in differences(one, other)]
        outcome.twice = f"figures that differ: {len(found)}, first {found[0]}" if found else "same"


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _said(outcome: Outcome) -> str:
    parts = [outcome.state]
    if outcome.wall_s:
        parts.append(f"{outcome.wall_s / 60:.1f} min, {outcome.cpu_s:.0f} s of CPU")
    if outcome.why:
        parts.append(outcome.why)
    if outcome.void:
        parts.append(f"void: {outcome.void}")
    if outcome.twice:
        parts.append(f"twice: {outcome.twice}")
    return "; ".join(parts)


def listing() -> str:
    """The papers with their programs, minutes and needs."""
    lines = []
    for paper, programs in PAPERS.items():
        full, quick = (planned([paper], is_quick=is_quick) for is_quick in (False, True))
        can = sum(not each.why_not for each in full)
        lines.append(
            f"{paper}: {can} of {len(programs)} programs can run here, about "
            f"{sum(each.minutes for each in full):.0f} min; --quick "
            f"{sum(each.minutes for each in quick):.0f} min"
        )
        for each in programs:
            short = f"{each.quick.minutes:.2g}" if each.quick else "-"
            needs = ", ".join(need.name for need in each.needs) or "-"
            time_of = "virtual" if each.is_virtual else "timed"
            lines.append(f"    {each.name:<30}{each.minutes:>5g}{short:>6}  {time_of:<9}{needs}")
            lines += [f"        cannot run here: {why}" for why in each.missing()]
    return "\n".join(lines)


def parsed() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("papers", nargs="*", metavar="PAPER", help=f"{', '.join(PAPERS)}, or all")
    parser.add_argument("--quick", action="store_true", help="one seed, short spans, fewer sizes")
    parser.add_argument(
        "--twice", action="store_true", help="repeat what is in virtual time, and compare"
    )
    parser.add_argument(
        "--virtual", action="store_true", help="only what is in virtual time, on any machine"
    )
    parser.add_argument(
        "--minutes", type=float, help="the budget; default: the sum of the minutes and a quarter"
    )
    parser.add_argument(
        "--out", type=Path, help="of the results; default: experiments/, or a scratch folder"
    )
    options = parser.parse_args()
    for name in options.papers:
        if name not in (*PAPERS, "all"):
            parser.error(f"PAPER: got {name}; allowed: {', '.join(PAPERS)}, all")
    if options.minutes is not None and not options.minutes > 0:
        parser.error(f"--minutes: got {options.minutes:g}; allowed: more than 0")
    if options.quick and options.out and options.out.resolve() == EXPERIMENTS.resolve():
        parser.error("--out: got experiments/; allowed for --quick: a folder without kept results")
    return parser, options


def main() -> int:
    _, options = parsed()
    if not options.papers:
        print(listing())
        return 0
    # What is under way ends too, with all that it has started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    papers = [*PAPERS] if "all" in options.papers else list(dict.fromkeys(options.papers))
    plan = planned(
        papers, is_quick=options.quick, twice=options.twice, only_virtual=options.virtual
    )
    minutes = budget_minutes(plan) if options.minutes is None else options.minutes
    scratch = Path(tempfile.mkdtemp(prefix="kvrs-paper-"))
    out = options.out or (scratch if options.quick else EXPERIMENTS)
    wanted = sum(each.minutes for each in plan)
    print(
        f"{sum(not each.why_not for each in plan)} of {len(plan)} programs run here, about "
        f"{wanted:.0f} min; budget {minutes:.0f} min; results in {out}, output in {scratch}",
        flush=True,
    )
    run = Papers(plan, Budget(60 * minutes, max(wanted, 1e-9)), out, scratch)
    found = {}
    for paper in papers:
        record = Record(timed=False)
        found[paper] = run.run(paper, is_quick=options.quick, twice=options.twice)
        keep(record, out, paper, found[paper], is_quick=options.quick, twice=options.twice)
    if out.resolve() == EXPERIMENTS.resolve():
        evidence.renew()
    return 0 if all(each.is_good for outcomes in found.values() for each in outcomes) else 1


def keep(
    record: Record,
    out: Path,
    paper: str,
    outcomes: Sequence[Outcome],
    *,
    is_quick: bool,
    twice: bool,
) -> None:
    """Keep the rows, the times and the picture of a paper; of a quick run, also the times of all
    papers whose quick runs are below `out`, as `quick`, or as `twice` with what was compared.
    """
    folder = out / "paper/results"
    rows = figures_of(paper, out)
    text, programs = as_text(paper, rows), [asdict(each) for each in outcomes]
    print(f"\n{text}\n{table({paper: programs})}", flush=True)
    figures = {"is_quick": is_quick, "programs": programs} | rows
    record.keep(folder, paper, figures, f"{text}\n{table({paper: programs})}")
    if draw(paper, out, folder / f"{paper}.svg"):
        print(f"picture: {folder / paper}.svg", flush=True)
    if is_quick:
        kept = {name: path for name in PAPERS if (path := folder / f"{name}.json").exists()}
        documents = {name: json.loads(path.read_text()) for name, path in kept.items()}
        times = {
            name: {"run": document["run"], "programs": document["programs"]}
            for name, document in documents.items()
        }
        shown = table({name: document["programs"] for name, document in documents.items()})
        record.keep(folder, "twice" if twice else "quick", {"papers": times}, shown)


def table(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The end of each program, and its times, by paper."""
    lines = [f"{'paper':<12}{'program':<33}{'state':<9}{'wall s':>8}{'CPU s':>8}  twice"]
    for paper, programs in found.items():
        for each in programs:
            times = "".join(f"{each[key]:>8.1f}" if each[key] else f"{'-':>8}" for key in _TIMES)
            why = f"  {each['why']}" if each["state"] != "done" else ""
            line = f"{paper:<12}{each['program']:<33}{each['state']:<9}{times}"
            lines.append(f"{line}  {each['twice'] or '-'}{why}")
        sums = "".join(f"{sum(each[key] for each in programs):>8.1f}" for key in _TIMES)
        lines.append(f"{paper:<12}{'in sum':<42}{sums}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
