"""All experiments: what each needs, its kept result with commit and age, and the commands that make
it again.

    python -m experiments.run_all                    # The list.
    python -m experiments.run_all --only decision soak  # Run these.
    python -m experiments.run_all --readme           # Put the kept results into the READMEs.

A result is a dated measurement, which a change makes older and nothing else. It is void if the run
said so (experiments/results.py). Nothing else should run on the machine during a run. A run that
takes three times as long as listed is ended. Exit status 1: a run failed, missed a bar, or is void.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments import evidence
from experiments.conversation_trace.trace import DEFAULT_TRACE
from experiments.raidserve_throughput.run import DEFAULT_TRACE as AVAILABILITY_TRACE
from experiments.readme import renewed
from experiments.record import ROOT, shown
from experiments.results import KEPT, age, run_of, state

EXPERIMENTS = ROOT / "experiments"
_LEAST_LIMIT_S = 300.0
_TELL_S = 60.0
_END_S = 60.0
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class Need:
    """Something that not every machine has; `missing` says why this one has not."""

    name: str
    missing: Callable[[], str | None]


def _variable(name: str, what: str) -> Need:
    return Need(name, lambda: None if name in os.environ else f"{name} is not set: {what}")


def _networks_missing() -> str | None:
    from tests.networks.network_cluster import missing  # It makes a network to see.

    return missing()


def _file_missing(path: Path) -> str | None:
    return None if path.is_file() else f"no file {path.name}"


ROOT_USER = Need("root", _networks_missing)
TRACE = Need("trace", lambda: _file_missing(DEFAULT_TRACE))
AVAILABILITY = Need("availability trace", lambda: _file_missing(AVAILABILITY_TRACE))
DISTSERVE = _variable("DISTSERVE_HOME", "a checkout of DistServe")
VLLM = _variable("KVRS_VLLM_PYTHON", "the interpreter of an environment with vLLM")
KINSHIP = _variable("KVRS_KINSHIP_PYTHON", "the interpreter of an environment with kinship")
PACKAGES = _variable("KVRS_DOWNLOADS", "set where packages may be installed from PyPI")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A command, and the results that it keeps in `FOLDER/results`."""

    folder: str
    results: tuple[str, ...]  # Without the suffix; of one directory.
    minutes: float
    command: str
    needs: tuple[Need, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.folder}/{self.results[0]}"

    @property
    def paths(self) -> list[Path]:
        return [EXPERIMENTS / self.folder / "results" / f"{name}.json" for name in self.results]

    def state(self) -> str:
        """The state of the first result that is not simply kept."""
        states = [state(path) for path in self.paths]
        return next((found for found in states if found != KEPT), KEPT)

    def missing(self) -> list[str]:
        return [why for need in self.needs if (why := need.missing())]

    def words(self) -> list[str]:
        line = os.path.expandvars(self.command).replace("python -m ", f"{sys.executable} -m ")
        return [*shlex.split(line), "--out", str(self.paths[0].parent)]


def _plain(name: str, minutes: float, *needs: Need, options: str = "") -> Experiment:
    """The usual case: `run.py` keeps one result that has the folder's name."""
    command = f"python -m experiments.{name}.run {options}".strip()
    return Experiment(name, (name,), minutes, command, needs)


def _kinds(folder: str, minutes: float, *needs: Need, **options: str) -> list[Experiment]:
    """One result for each way to run it, by name."""
    command = f"python -m experiments.{folder}.run"
    return [
        Experiment(folder, (name,), minutes, f"{command} {words}".strip(), needs)
        for name, words in options.items()
    ]


# In the order in which they are run: decisions and costs, then exactness, then what takes hours.
ALL = (
    _plain("decision", 1),
    _plain("request_path", 1),
    Experiment("request_path", ("gauge",), 1, "python -m experiments.request_path.gauge"),
    _plain("innocents", 15),
    _plain("anchortp_plans", 1),
    _plain("prefill_shares", 1),
    _plain("raidserve_throughput", 5, AVAILABILITY),
    _plain("rank_kills", 10),
    Experiment("rank_kills", ("on_nodes",), 10, "python -m experiments.rank_kills.run --on-nodes"),
    _plain("in_place", 14),
    _plain("rank_balance", 12),
    Experiment(
        "rank_balance",
        ("rank_balance_degrees",),
        4,
        "python -m experiments.rank_balance.degrees",
    ),
    *_kinds(
        "anchortp_recovery",
        10,
        anchortp_recovery="",
        anchortp_planners="--part planners",
        anchortp_bytes="--part bytes",
    ),
    _plain("healthy_path", 2),
    Experiment(
        "healthy_path",
        ("paced/healthy_path",),
        3,
        "python -m experiments.healthy_path.run --paced --pairs 10 --tokens 200",
    ),
    _plain("bench_proxy", 15),
    _plain("checkpoint_cost", 14),
    _plain("notice", 4),
    *_kinds("notice", 4, starved="--spinning 4"),
    _plain("crossover", 7),
    _plain("hand_off_crossover", 5),
    _plain("load_skew", 22),
    Experiment(
        "load_skew",
        ("rates",),
        55,
        "python -m experiments.load_skew.rates --repeats 10 --limit-s 3600",
    ),
    _plain("lumen_recovery", 110, options="--limit-s 7200"),
    _plain("lumen_simulated", 60),
    Experiment(
        "lumen_simulated",
        ("ten",),
        60,
        "python -m experiments.lumen_simulated.run --keep ten --cases 10x1 10x5 10x1:7.5",
    ),
    _plain("raidserve_recovery", 8, TRACE),
    Experiment(
        "raidserve_recovery", ("in_place",), 1, "python -m experiments.raidserve_recovery.in_place"
    ),
    Experiment(
        "raidserve_recovery",
        ("computed",),
        40,
        "python -m experiments.raidserve_recovery.computed --limit-s 3300",
    ),
    Experiment("kill_series", ("simulated",), 4, "python -m experiments.kill_series.simulated"),
    Experiment("kill_series", ("one_kill",), 4, "python -m experiments.kill_series.one_kill"),
    Experiment("kill_series", ("auto",), 3, "python -m experiments.kill_series.run"),
    Experiment(
        "kill_series",
        ("policies",),
        50,
        "python -m experiments.kill_series.policies --seeds 8 --limit-s 3600",
    ),
    Experiment(
        "conversation_trace", ("auto",), 3, "python -m experiments.conversation_trace.run", (TRACE,)
    ),
    Experiment(
        "conversation_trace",
        ("aiperf",),
        5,
        "python -m experiments.conversation_trace.aiperf",
        (TRACE, PACKAGES),
    ),
    _plain("all_deaths", 10),
    _plain("two_proxies", 3),
    *_kinds(
        "proxy_kills",
        5,
        **{
            "2_async": "",
            "2_sync": "--mirror sync",
            "3_async": "--proxies 3",
            "3_sync": "--proxies 3 --mirror sync",
        },
    ),
    _plain("responses_kills", 6),
    *_kinds("proxy_kills", 10, **{"2_async_mix": "--mix --kills 40"}),
    _plain("link_monitor", 6, ROOT_USER),
    Experiment(
        "link_monitor",
        ("times_5",),
        6,
        "python -m experiments.link_monitor.run --times 5",
        (ROOT_USER,),
    ),
    Experiment("link_monitor", ("simulated",), 1, "python -m experiments.link_monitor.simulated"),
    Experiment(
        "link_monitor",
        ("computed",),
        22,
        "python -m experiments.link_monitor.computed",
        (ROOT_USER,),
    ),
    Experiment(
        "gossip_agents",
        ("gossip_agents",),
        14,
        "python -m experiments.gossip_agents.run --kinship-python $KVRS_KINSHIP_PYTHON",
        (KINSHIP,),
    ),
    _plain("simulated_deaths", 10),
    Experiment(
        "simulated_deaths", ("poisons",), 12, "python -m experiments.simulated_deaths.poisons"
    ),
    _plain("placement_spread", 1),
    *_kinds(
        "distserve_kill_series",
        5,
        DISTSERVE,
        **{
            "auto-backup-off": "",
            "auto-backup-both": "--backup both",
            "rom-backup-off": "--policy rom",
            "always_migrate-backup-off": "--policy always_migrate",
            "always_recompute-backup-off": "--policy always_recompute",
            "always_restore-backup-both": "--policy always_restore --backup both",
        },
    ),
    Experiment(
        "load_skew",
        ("distserve",),
        12,
        "python -m experiments.load_skew.run --distserve --repeats 1",
        (DISTSERVE,),
    ),
    Experiment(
        "load_skew",
        ("distserve_rates",),
        17,
        "python -m experiments.load_skew.rates --distserve --seconds 20",
        (DISTSERVE,),
    ),
    Experiment(
        "crossover",
        ("distserve",),
        8,
        "python -m experiments.crossover.run --distserve --repeats 5",
        (DISTSERVE,),
    ),
    Experiment(
        "hand_off_crossover",
        ("distserve",),
        6,
        "python -m experiments.hand_off_crossover.run --distserve",
        (DISTSERVE,),
    ),
    _plain("distserve_overhead", 19, DISTSERVE),
    Experiment(
        "distserve_overhead",
        ("backup",),
        13,
        "python -m experiments.distserve_overhead.backup",
        (DISTSERVE,),
    ),
    Experiment(
        "vllm_kill_series",
        ("kill_series",),
        15,
        "python -m experiments.vllm_kill_series.run",
        (VLLM,),
    ),
    Experiment(
        "gossip_detection",
        ("gossip_detection", "hours"),
        30,
        "python -m experiments.gossip_detection.run",
    ),
    _plain("soak", 125),
)


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
        lines.append(f"    {each.command}")
        lines += [f"    cannot run here: {why}" for why in each.missing()]
    return "\n".join(lines)


def put_into_readmes() -> list[str]:
    """Renew the kept results in all READMEs and in docs/evidence.md; returns the folders whose
    README has changed.
    """
    evidence.renew()
    changed = []
    for path in sorted(EXPERIMENTS.glob("*/README.md")):
        before = path.read_text()
        after = renewed(before, path.parent)
        if after != before:
            path.write_text(after)
            changed.append(path.parent.name)
    return changed


def run(experiment: Experiment, log: Path) -> str:
    """Run the command to its end or its time limit; returns how it ended."""
    limit_s = max(_LEAST_LIMIT_S, 180 * experiment.minutes)
    begun_s = told_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            experiment.words(),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            # A shell that started this in the background has it ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        try:
            while process.poll() is None:
                time.sleep(0.2)
                now_s = time.monotonic()
                if now_s - begun_s > limit_s:
                    _end(process)
                    return f"ended: not done after {limit_s / 60:.0f} min"
                if now_s - told_s > _TELL_S:
                    told_s = now_s
                    print(
                        f"    {(now_s - begun_s) / 60:.0f} of about {experiment.minutes:g} min",
                        flush=True,
                    )
        except BaseException:
            _end(process)
            raise
    took = f"{(time.monotonic() - begun_s) / 60:.1f} min"
    return (
        f"done in {took}"
        if process.returncode == 0
        else (f"exit status {process.returncode} after {took}")
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it like Ctrl-C, so that clusters are taken down; then by force, with the rest of its
    session.
    """
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
        how = run(each, log)
        put_into_readmes()
        after = each.state()
        print(f"    {how}; result: {after}", flush=True)
        if not how.startswith("done") or after != KEPT:
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
        help="renew the results in READMEs and docs only",
    )
    parser.add_argument("--logs", type=Path, help="for the output of the runs; default: temporary")
    arguments = parser.parse_args()
    if arguments.readme:
        print("\n".join(put_into_readmes()) or "all READMEs show the kept results")
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
