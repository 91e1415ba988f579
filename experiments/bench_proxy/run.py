"""The kvrs proxy beside its peers: latency, CPU and throughput in one run, interleaved.

    python -m experiments.bench_proxy.run --quick                  # about a minute
    python -m experiments.bench_proxy.run --out experiments/bench_proxy/results
    python -m experiments.bench_proxy.run --only s200 --subjects kvrs --tree ../before

Exit status 1: a bar is missed, or a stream was not whole.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.bench_proxy import proxies, table
from experiments.bench_proxy.engines import BenchError, compile_programs
from experiments.bench_proxy.proxies import MissingError, Start
from experiments.bench_proxy.steady import STEADY, Cores, Row, Setting, Steady, measure
from experiments.record import Record

ROUNDS = 3
SCENARIOS = tuple(steady.name for steady in STEADY)
PEERS: dict[str, Start] = {
    "no proxy": proxies.none,
    "nginx": proxies.nginx,
    "aiohttp relay": proxies.relay,
    "vllm-router": proxies.router(disaggregated=False),
    "vllm-router P/D": proxies.router(disaggregated=True),
}

QUICK = ("no proxy", "nginx", "vllm-router P/D", "kvrs")


def main() -> int:
    arguments = parsed()
    record = Record(arguments.seed)
    subjects = chosen(arguments.subjects, arguments.tree, is_quick=arguments.quick)
    scenarios = arguments.only.split(",") if arguments.only else list(SCENARIOS)
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    with opened(arguments) as setting:
        steadies = [steady for steady in STEADY if steady.name in scenarios]
        rows = interleaved(setting, subjects, steadies, rounds)
    print(table.shown(rows))
    record.keep(arguments.out, "bench_proxy", {"rows": rows}, table.shown(rows))
    return 1 if table.is_failed(rows) else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round with short windows, of few proxies"
    )
    parser.add_argument("--rounds", type=int, help=f"of all subjects; default {ROUNDS}")
    parser.add_argument("--only", help=f"scenarios, of {','.join(SCENARIOS)}")
    parser.add_argument("--subjects", help=f"of kvrs,{','.join(PEERS)}; default all")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvrs-bench"
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for given, allowed in (
        (arguments.only, SCENARIOS),
        (arguments.subjects, ("kvrs", *PEERS)),
    ):
        unknown = set(given.split(",") if given else ()) - set(allowed)
        if unknown:
            parser.error(f"got {','.join(sorted(unknown))}; allowed: {','.join(allowed)}")
    return arguments


def chosen(names: str | None, trees: Sequence[Path], *, is_quick: bool) -> dict[str, Start]:
    """The proxies to be compared, and those of the other trees."""
    everyone = {**PEERS, "kvrs": proxies.kvrs()}
    wanted = names.split(",") if names else list(QUICK if is_quick else everyone)
    others = {f"kvrs of {tree.resolve().name}": proxies.kvrs(tree.resolve()) for tree in trees}
    return {name: everyone[name] for name in wanted} | others


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Setting]:
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    with tempfile.TemporaryDirectory(prefix="kvrs-bench-") as name:
        directory = Path(name)
        try:
            programs = compile_programs(directory)
        except BenchError as error:
            sys.exit(str(error))
        yield Setting(programs, placed, directory, arguments.peers, arguments.seed, arguments.quick)


def interleaved(
    setting: Setting, subjects: dict[str, Start], steadies: Sequence[Steady], rounds: int
) -> list[Row]:
    """All subjects in turn, in each round from another one on."""
    rows: list[Row] = []
    missing: dict[str, str] = {}
    names = list(subjects)
    for number in range(rounds if steadies else 0):
        shift = number * 2 % len(names)
        for name in names[shift:] + names[:shift]:
            if name in missing:
                continue
            begun_s = time.monotonic()
            try:
                measured = measure(setting, subjects[name], name, steadies, number)
            except MissingError as error:
                missing[name] = str(error)
                continue
            rows += measured
            print(f"round {number + 1}: {name}, {time.monotonic() - begun_s:.1f} s", flush=True)
    return rows + [{"skipped": name, "reason": reason} for name, reason in missing.items()]


if __name__ == "__main__":
    sys.exit(main())
