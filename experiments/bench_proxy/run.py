"""The kvrs proxy beside its peers: latency, CPU and throughput in one run, interleaved.

    python -m experiments.bench_proxy.run --quick                  # about two minutes
    python -m experiments.bench_proxy.run --out experiments/bench_proxy/results
    python -m experiments.bench_proxy.run --only s200 --subjects kvrs --tree ../before

Exit status 1: a bar is missed, or kvrs did not serve every stream whole.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from experiments.bench_proxy import proxies, table
from experiments.bench_proxy.engines import (
    PAIR,
    VLLM_PAIR,
    BenchError,
    Instance,
    compile_programs,
)
from experiments.bench_proxy.proxies import HERE, MissingError, Start
from experiments.bench_proxy.special import SPECIAL, SkippedError, Special
from experiments.bench_proxy.steady import STEADY, Cores, Row, Setting, Steady, measure
from experiments.command_line import parser_of
from experiments.record import Record, commit_of

ROUNDS = 3
LIMIT_S = 580.0
SCENARIOS = tuple(each.name for each in (*STEADY, *SPECIAL))
PEERS: dict[str, Start] = {
    "no proxy": proxies.none,
    "nginx": proxies.nginx,
    "vllm-router": proxies.router(disaggregated=False),
    "vllm-router P/D": proxies.router(disaggregated=True),
}
QUICK = ("no proxy", "nginx", "vllm-router P/D")
_KVRS, _VLLM = "kvrs", "kvrs, vLLM"
# This kvrs in other ways: in front of mocks of plain vLLM, and with `proxy.coalesce_ms: 1`.
OTHERS: dict[str, Start] = {
    _VLLM: proxies.kvrs(),
    f"{_KVRS}, 1 ms": proxies.kvrs(coalesce_ms=1),
    f"{_VLLM}, 1 ms": proxies.kvrs(coalesce_ms=1),
}
# No bar names these: the first round has them, unless --subjects names them.
ONCE = ("vllm-router", *OTHERS)
SUBJECTS = (*PEERS, _KVRS, *OTHERS)


def main() -> int:
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    if placed.mocks is not None:
        os.sched_setaffinity(0, {placed.mocks})
    record = Record(arguments.seed)
    bench = Bench.of(arguments)
    with opened(arguments, placed) as setting:
        bench.carry_out(setting, arguments.limit_s)
    text = "\n".join(filter(None, [table.shown(bench.rows), bench.ended_early]))
    print(text)
    figures = {
        "trees": {name: commit_of(tree) for name, tree in bench.trees.items()},
        "rounds": bench.rounds,
        "ended_early": bench.ended_early,
        "bars": table.judged(bench.rows),
        "rows": bench.rows,
    }
    record.keep(arguments.out, "bench_proxy", figures, text)
    return 1 if table.is_failed(bench.rows) else 0


def parsed() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--quick", action="store_true", help="one short round of few proxies")
    parser.add_argument("--rounds", type=int, help=f"of all subjects; default {ROUNDS}")
    parser.add_argument("--only", help=f"scenarios, of {','.join(SCENARIOS)}")
    parser.add_argument("--subjects", help=f"of {';'.join(SUBJECTS)}; default all")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvrs-bench"
    parser.add_argument("--peers", type=Path, default=cache, help="where peers are installed")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="no measurement goes beyond")
    arguments = parser.parse_args()
    arguments.only = _chosen(parser, arguments.only, ",", SCENARIOS)
    arguments.subjects = _chosen(parser, arguments.subjects, ";", SUBJECTS)
    for tree in arguments.tree:
        if not (tree / "kvrs/proxy").is_dir():
            parser.error(f"--tree: got {tree}; allowed: a checkout of kvrs")
    return arguments


def _chosen(
    parser: argparse.ArgumentParser, given: str | None, separator: str, allowed: Sequence[str]
) -> list[str] | None:
    """The names; None: none was given."""
    if given is None:
        return None
    names = given.split(separator)
    if unknown := [name for name in names if name not in allowed]:
        parser.error(f"got {separator.join(unknown)}; allowed: {separator.join(allowed)}")
    return names


@contextlib.contextmanager
def opened(arguments: argparse.Namespace, cores: Cores) -> Iterator[Setting]:
    with tempfile.TemporaryDirectory(prefix="kvrs-bench-") as name:
        directory = Path(name)
        try:
            programs = compile_programs(directory)
        except BenchError as error:
            sys.exit(str(error))
        yield Setting(programs, cores, directory, arguments.peers, arguments.seed, arguments.quick)


@dataclass(frozen=True, slots=True)
class Step:
    """One proxy under the steady loads, or one scenario of one kvrs."""

    subject: str
    scenario: str | None
    rows: Callable[[], list[Row]]

    @property
    def name(self) -> str:
        return self.subject if self.scenario is None else f"{self.subject}, {self.scenario}"

    def missing(self, why: str, error: Exception) -> Row:
        scenario = {} if self.scenario is None else {"scenario": self.scenario}
        return {"subject": self.subject, **scenario, why: str(error)}


@dataclass(slots=True)
class Bench:
    """The subjects to measure, and the results so far."""

    rounds: int
    once: Sequence[str]  # Subjects of the first round alone.
    peers: dict[str, Start]
    trees: dict[str, Path]  # Of kvrs.
    others: dict[str, Start]  # This kvrs in other ways.
    steadies: Sequence[Steady]
    specials: Sequence[Special]
    rows: list[Row] = field(default_factory=list)
    ended_early: str = ""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Bench":
        names = arguments.only or SCENARIOS
        default = (*QUICK, _KVRS) if arguments.quick else SUBJECTS
        wanted = arguments.subjects or default
        trees = {_KVRS: HERE} if _KVRS in wanted else {}
        trees |= {f"{_KVRS} of {path.name}": path for path in map(Path.resolve, arguments.tree)}
        return cls(
            arguments.rounds or (1 if arguments.quick else ROUNDS),
            () if arguments.subjects else ONCE,
            {name: start for name, start in PEERS.items() if name in wanted},
            trees,
            {name: start for name, start in OTHERS.items() if name in wanted},
            [each for each in STEADY if each.name in names],
            [each for each in SPECIAL if each.name in names],
        )

    def carry_out(self, setting: Setting, limit_s: float) -> None:
        begun_s = time.monotonic()
        took_s: dict[str, float] = {}
        impossible: set[str] = set()  # Steps.
        for number in range(self.rounds):
            for step in self._steps(setting, number):
                if step.name in impossible:
                    continue
                before_s = time.monotonic()
                if before_s - begun_s + took_s.get(step.name, 0.0) > limit_s:
                    self.ended_early = (
                        f"round {number + 1} ended before {step.name}: --limit-s {limit_s:g}"
                    )
                    return
                try:
                    self.rows += [{"round": number, **row} for row in step.rows()]
                except (MissingError, SkippedError) as error:
                    impossible.add(step.name)
                    self.rows.append(step.missing("skipped", error))
                except (BenchError, OSError) as error:
                    self.rows.append(step.missing("failed", error))
                took_s[step.name] = time.monotonic() - before_s
                print(f"round {number + 1}: {step.name}, {took_s[step.name]:.1f} s", flush=True)

    def _steps(self, setting: Setting, number: int) -> list[Step]:
        """All subjects, in each round from another one on, then what is of kvrs alone."""
        starts = self.peers | {name: proxies.kvrs(tree) for name, tree in self.trees.items()}
        starts |= self.others
        steady = [
            Step(name, None, partial(measure, setting, start, name, self.steadies, _mocks(name)))
            for name, start in starts.items()
            if self.steadies and (number == 0 or name not in self.once)
        ]
        shift = number * 2 % max(1, len(steady))
        special = [
            Step(name, each.name, partial(_special, each, setting, name, tree, number))
            for each in self.specials
            for name, tree in self.trees.items()
            if number == 0 or not each.once
        ]
        return steady[shift:] + steady[:shift] + special


def _mocks(subject: str) -> Sequence[Instance]:
    return VLLM_PAIR if subject.startswith(_VLLM) else PAIR


def _special(
    special: Special, setting: Setting, subject: str, tree: Path, number: int
) -> list[Row]:
    row = special.measure(setting, tree, number)
    return [{"scenario": special.name, "subject": subject, **row}]


if __name__ == "__main__":
    sys.exit(main())
