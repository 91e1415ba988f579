"""All experiments: what each needs, its kept result with commit and age, and the commands that make
it again.

    python -m experiments.run_all                    # The list.
    python -m experiments.run_all --only decision notice  # Run these.
    python -m experiments.run_all --readme           # Renew docs/evidence.md and marked figures.

A result is a dated measurement, which a change makes older and nothing else. It is void if the run
said so (experiments/results.py). Nothing else should run on the machine during a run. A run that
takes three times as long as listed is ended. Exit status 1: a run failed, missed a bar, or is void.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from experiments import evidence, running
from experiments.programs import ALL, Experiment
from experiments.record import shown
from experiments.results import KEPT, age, run_of, state

_LEAST_LIMIT_S = 300.0
_REST_S = 10.0


def listing(experiments: Sequence[Experiment]) -> str:
    lines = [f"{'result':<38}{'minutes':>8}  {'needs':<22}{'commit':<18}{'age':<10}state"]
    for each in experiments:
        needs = ", ".join(need.name for need in each.needs) or "-"
        for path, name in zip(each.paths, each.results, strict=True):
            run = run_of(path) if path.exists() else None
            commit = "-" if run is None else shown(run.get("commit", "unknown"))
            old = "-" if run is None else age(run)
            lines.append(
                f"{f'{each.folder}/{name}':<38}{each.minutes:>8g}  {needs:<22}{commit:<18}{old:<10}"
                f"{state(path)}"
            )
        lines += [f"    {each.command}"] * bool(each.command)
        lines += [f"    cannot run here: {why}" for why in each.missing()]
    return "\n".join(lines)


def run(experiment: Experiment, log: Path) -> running.Ran:
    """Run the command to its end or its time limit."""
    limit_s = max(_LEAST_LIMIT_S, 180 * experiment.minutes)
    return running.run(
        experiment.words(),
        log,
        limit_s,
        lambda so_far_s: print(
            f"    {so_far_s / 60:.0f} of about {experiment.minutes:g} min", flush=True
        ),
    )


def run_all(experiments: Sequence[Experiment], logs: Path) -> bool:
    """Run them in order, and tell of each; whether all ended well with a result that is current."""
    all_good = True
    for number, each in enumerate(experiments, 1):
        print(f"[{number}/{len(experiments)}] {each.name}, about {each.minutes:g} min", flush=True)
        if why := each.missing():
            print(f"    cannot run here: {'; '.join(why)}")
            continue
        time.sleep(_REST_S)  # What ends of the one before is not load of this one.
        log = logs / f"{each.name.replace('/', '-')}.log"
        ran = run(each, log)
        evidence.renew()
        after = each.state()
        print(f"    {ran.how}; result: {after}", flush=True)
        if ran.status != 0 or after != KEPT:
            all_good = False
            last = log.read_text(errors="replace").splitlines()[-10:]
            print(*(f"    | {line}" for line in last), sep="\n", flush=True)
    return all_good


def chosen(names: Sequence[str]) -> list[Experiment]:
    """Those of these folders or results.

    Raises:
        ValueError: a name is neither.
    """
    for name in names:
        if not any(name in (each.folder, each.name) for each in ALL):
            folders = sorted({each.folder for each in ALL})
            raise ValueError(f"--only: got {name}; allowed: {', '.join(folders)}")
    return [each for each in ALL if not names or {each.folder, each.name} & set(names)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="run these: folders, or results"
    )
    parser.add_argument("--dry-run", action="store_true", help="list, and run nothing")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="renew docs/evidence.md and marked figures only",
    )
    parser.add_argument("--logs", type=Path, help="for the output of the runs; default: temporary")
    arguments = parser.parse_args()
    if arguments.readme:
        evidence.renew()
        return 0
    try:
        experiments = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    if arguments.dry_run or not arguments.only:
        print(listing(experiments))
        return 0
    # What is under way ends too, with all that it has started.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="kvrs-experiments-"))
    logs.mkdir(parents=True, exist_ok=True)
    can = [each for each in experiments if not each.missing()]
    minutes = sum(each.minutes for each in can)
    print(f"{len(can)} of {len(experiments)} can run here: about {minutes:g} min; output in {logs}")
    return 0 if run_all(experiments, logs) else 1


if __name__ == "__main__":
    sys.exit(main())
