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
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import evidence
from experiments.kills.drill import TRACE as CONVERSATIONS
from experiments.raidserve.throughput import DEFAULT_TRACE as AVAILABILITY_TRACE
from experiments.record import ROOT, gpus, shown
from experiments.results import KEPT, age, run_of, state

EXPERIMENTS = ROOT / "experiments"
_LEAST_LIMIT_S = 300.0
_TELL_S = 60.0
_END_S = 60.0
_ENDING = {signal.SIGINT, signal.SIGTERM}
_REST_S = 10.0


@dataclass(frozen=True, slots=True)
class Need:
    """Something that not every machine has; `missing` says why this one has not."""

    name: str
    missing: Callable[[], str | None]


def _variable(name: str, what: str) -> Need:
    return Need(name, lambda: None if name in os.environ else f"{name} is not set: {what}")


def _file_missing(path: Path) -> str | None:
    return None if path.is_file() else f"no file {path.name}"


def _namespaces_missing() -> str | None:
    """The reason why there are none, as far as it shows without making one."""
    if os.geteuid():
        return "network namespaces need root"
    lacking = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    return f"not installed: {', '.join(lacking)}" if lacking else None


TRACE = Need("trace", lambda: _file_missing(CONVERSATIONS))
AVAILABILITY = Need("availability trace", lambda: _file_missing(AVAILABILITY_TRACE))
DISTSERVE = _variable("DISTSERVE_HOME", "a checkout of DistServe")
SPLITWISE = _variable("SPLITWISE_HOME", "a checkout of splitwise-sim")
VLLM = _variable("KVRS_VLLM_PYTHON", "the interpreter of an environment with vLLM")
SGLANG = _variable("KVRS_SGLANG_PYTHON", "the interpreter of an environment with SGLang")
NAMESPACES = Need("network namespaces", _namespaces_missing)
GPU = Need("a GPU", lambda: None if gpus() else "no NVIDIA GPU is here")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A command, and the results that it keeps in `FOLDER/results`."""

    folder: str
    results: tuple[str, ...]  # Without the suffix; of one directory.
    minutes: float
    command: str  # Empty: the script is gone.
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
        if not self.command:
            return ["the script is gone; it lies at the commit of the result"]
        return [why for need in self.needs if (why := need.missing())]

    def words(self) -> list[str]:
        line = os.path.expandvars(self.command).replace("python -m ", f"{sys.executable} -m ")
        return [*shlex.split(line), "--out", str(self.paths[0].parent)]


def _of(folder: str, result: str, minutes: float, words: str = "run", *needs: Need) -> Experiment:
    """A module of the folder with its options, that keeps one result."""
    return Experiment(folder, (result,), minutes, f"python -m experiments.{folder}.{words}", needs)


_MEASURED_ONCE = sorted(
    path.stem for path in (EXPERIMENTS / "measured_once/results").glob("*.json")
)

# Places that the reader of the kept drawing found unclear.
_UNCLEAR = "1,3,4,9,13,18,19,25,26,30,33,39"

# In the order in which they are run: decisions and costs, then exactness, then what takes hours.
ALL = (
    _of("request_path", "decision", 1, "decision"),
    _of("request_path", "gauge", 1, "gauge"),
    _of("request_path", "size", 1, "size"),
    _of("request_path", "places", 1, f"places --seed 4211 --unclear {_UNCLEAR}"),
    _of("healthy_path", "healthy_path", 2),
    _of("healthy_path", "paced/healthy_path", 3, "run --paced --pairs 10 --tokens 200"),
    _of("bench_proxy", "bench_proxy", 15),
    _of("bench_proxy", "lockstep", 4, "lockstep"),
    _of("bench_proxy", "background", 3, "background"),
    _of("speculation", "exact", 20, "exact"),
    _of("speculation", "acceptance", 19, "acceptance"),
    _of("speculation", "gain", 16, "gain --pairs 4"),
    _of("speculation", "steps", 7, "steps"),
    _of("pipelines", "replication", 15, "replication"),
    _of("pipelines", "replication-hosts", 2, "replication --hosts --rounds 4"),
    _of("pipelines", "capacity", 9, "capacity"),
    _of("pipelines", "table1", 60, "table1 --jobs 2"),
    _of("pipelines", "series-wait", 8, "series"),
    _of("pipelines", "series", 8, "series --group"),
    _of("pipelines", "series-ring", 4, "series --group --ring --streams 220 --seed 11"),
    _of("experts", "simulated", 1, "simulated"),
    _of("experts", "lost_ranks", 60, "lost_ranks"),
    _of("experts", "degrees", 1, "degrees"),
    _of("experts", "cpu", 17, "cpu --steps 30 --seeds 3 --rows 128"),
    _of("raidserve", "in_place", 1, "in_place"),
    _of("raidserve", "shares", 1, "shares"),
    _of("raidserve", "throughput", 2, "throughput", AVAILABILITY),
    _of("raidserve", "peaks", 8, "peaks", TRACE),
    _of("raidserve", "curves", 8, "curves --jobs 2 --seeds 1", TRACE),
    _of("raidserve", "rank_balance", 7, "rank_balance"),
    _of("raidserve", "computed", 40, "computed --limit-s 2300"),
    _of("anchortp", "plans", 1, "plans"),
    _of("anchortp", "degrees", 6, "degrees"),
    _of("anchortp", "planners", 1, "run --part planners"),
    _of("anchortp", "recovery", 15, "run"),
    _of("anchortp", "in_place", 13, "in_place"),
    _of("crossover", "crossover", 5),
    _of("crossover", "distserve", 6, "run --distserve --repeats 5", DISTSERVE),
    _of("crossover", "hand_off", 4, "hand_off"),
    _of("crossover", "hand_off_distserve", 4, "hand_off --distserve", DISTSERVE),
    _of("load_skew", "load_skew", 22),
    _of("load_skew", "distserve", 12, "run --distserve --repeats 1", DISTSERVE),
    _of("load_skew", "rates", 55, "rates --repeats 10 --limit-s 3600"),
    _of("load_skew", "distserve_rates", 15, "rates --distserve --seconds 20", DISTSERVE),
    _of("link_monitor", "simulated", 1, "simulated"),
    _of("link_monitor", "computed", 18, "computed", NAMESPACES),
    _of("prefix_placement", "prefix_placement", 70, "run --seeds 4 --limit-s 7200", TRACE),
    _of("prefix_placement", "agents", 15, "agents", TRACE),
    _of("prefix_placement", "costs", 1, "costs"),
    _of("prefix_placement", "engines", 5, "engines"),
    _of("two_proxies", "two_proxies", 2),
    _of("notice", "notice", 4),
    _of("notice", "starved", 4, "run --spinning 4"),
    _of("lumen", "lumen", 60),
    _of("lumen", "progressive", 60, "run --model llama"),
    _of("lumen", "paper", 60, "paper --jobs 2"),
    _of("lumen", "loads", 60, "paper --exhibits B.2 B.3"),
    _of("lumen", "sizes", 200, "paper --exhibits B.4 B.5"),
    _of("lumen", "processes", 60, "processes"),
    _of("lumen", "recovery", 60, "recovery --limit-s 3400"),
    _of("lumen", "ten", 60, "run --keep ten --cases 10x1 10x5 10x1:7.5"),
    _of("lumen", "placement", 1, "placement"),
    _of("kills", "simulated", 4, "run decode simulated"),
    _of("kills", "decode", 3, "run decode embedded"),
    _of("kills", "decode-trace", 3, "run decode embedded --load trace", TRACE),
    _of("kills", "rank", 10, "run rank embedded"),
    _of("kills", "rank-on-nodes", 10, "run rank embedded --on-nodes"),
    _of("kills", "rank-experts", 5, "run rank embedded --experts"),
    _of("kills", "everything", 10, "run everything embedded"),
    _of("kills", "proxy", 5, "run proxy embedded"),
    _of("kills", "proxy-sync", 5, "run proxy embedded --mirror sync"),
    _of("kills", "proxy-3", 5, "run proxy embedded --proxies 3"),
    _of("kills", "proxy-3-sync", 5, "run proxy embedded --proxies 3 --mirror sync"),
    _of("kills", "proxy-mix", 10, "run proxy embedded --mix --kills 40"),
    _of("kills", "proxy-responses", 6, "run proxy embedded --api responses"),
    _of("kills", "worlds", 10, "run everything simulated --seed 0"),
    _of("kills", "poison", 3, "run poison simulated"),
    _of("simulator", "queueing", 5, "queueing"),
    _of("simulator", "speed", 2, "speed"),
    _of("simulator", "distserve", 5, "distserve", DISTSERVE),
    _of("simulator", "splitwise", 5, "splitwise", SPLITWISE),
    _of("simulator", "cluster", 2, "cluster"),
    _of("simulator", "scale", 6, "scale"),
    _of("simulator", "scale_at_most", 60, "scale --cases 4000x100 --at-most"),
    _of("simulator", "limits", 6, "limits"),
    _of("kills", "distserve", 5, "run everything distserve", DISTSERVE),
    _of("kills", "distserve-both", 5, "run everything distserve --backup both", DISTSERVE),
    *(
        _of("kills", f"distserve-{way}", 5, f"run everything distserve --policy {way}", DISTSERVE)
        for way in ("rom", "always_migrate", "always_recompute")
    ),
    _of(
        *("kills", "distserve-always_restore-both", 5),
        *("run everything distserve --policy always_restore --backup both", DISTSERVE),
    ),
    _of("kills", "vllm", 15, "run decode vllm", VLLM),
    _of("kills", "vllm-replay", 10, "run decode vllm --replays --kills 50", VLLM),
    _of("kills", "vllm-replay-targets", 20, "run decode vllm --targets --kills 15", VLLM),
    _of("kills", "vllm-recompute", 48, "run decode vllm --option recompute --kills 100", VLLM),
    _of("kills", "vllm-migrate", 60, "run decode vllm --option migrate --kills 100", VLLM),
    _of("vllm_rows", "vllm_rows", 100, "run --limit-s 6000", VLLM),
    _of("vllm_rows", "agent/vllm_rows", 10, "run --kind agent", VLLM),
    _of("vllm_rows", "nixl/vllm_rows", 40, "run --nixl", VLLM),
    _of("sglang_pairs", "pairs", 60, "run --limit-s 3600", SGLANG),
    _of("sglang_pairs", "scripted", 1, "scripted"),
    _of("sglang_restore", "sglang_restore", 12, "run", SGLANG),
    _of("sglang_restore", "ranks/sglang_restore", 6, "run --ranks 2 --rounds 3", SGLANG),
    _of("checkpoint_cost", "checkpoint_cost", 10),
    _of("checkpoint_cost", "vllm", 20, "vllm", VLLM),
    _of("gpu", "plane", 8, "plane", GPU),
    _of("demo_vllm", "demo_vllm", 4, "run", VLLM),
    _of("vllm_scheduler", "vllm_scheduler", 2, "run", VLLM),
    _of("first_minutes", "demo", 3, "demo"),
    _of("first_minutes", "vllm", 4, "vllm", VLLM),
    _of("first_minutes", "scripted", 1, "vllm --scripted"),
    _of("field_requests", "field_requests", 4),
    _of("proxy_rolls", "proxy_rolls", 8),
    _of("row_pull", "row_pull", 2, "measure"),
    Experiment("measured_once", tuple(_MEASURED_ONCE), 0, ""),
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
        lines += [f"    {each.command}"] * bool(each.command)
        lines += [f"    cannot run here: {why}" for why in each.missing()]
    return "\n".join(lines)


def run(experiment: Experiment, log: Path) -> str:
    """Run the command to its end or its time limit; returns how it ended."""
    limit_s = max(_LEAST_LIMIT_S, 180 * experiment.minutes)
    begun_s = told_s = time.monotonic()
    with log.open("wb") as output:
        # A signal that came before `process` is known would leave it running.
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        process = subprocess.Popen(
            experiment.words(),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_as_in_front,
        )
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
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


def _as_in_front() -> None:
    """Let this process end by signals, which a shell that started it in the background ignores."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


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
        evidence.renew()
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
