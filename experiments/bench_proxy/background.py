"""The proxy's CPU for its reports, per second and without any stream, in front of 2 and 64 mock
instances of vLLM and of the instance protocol.

    python -m experiments.bench_proxy.background [--reps 3] [--tree ../before] [--out DIR]

The figures are from the proxy's own CPU clock, which counts nothing of other processes. Exit status
1: a bar is missed.
"""

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import Engines, Instance
from experiments.bench_proxy.lockstep import Subject, measure_background
from experiments.bench_proxy.run import opened
from experiments.bench_proxy.steady import Cores, Setting
from experiments.command_line import parser_of
from experiments.record import Record, commit_of
from kvrs.protocol.instance import Role

AT_MOST = {2: 1.5, 64: 30.0}  # Milliseconds a second, by instances.
_UP_WITHIN_S = 60.0
_SETTLE_S = 3.0

Rows = list[dict[str, Any]]


def cluster(count: int, *, is_vllm: bool) -> list[Instance]:
    """Instances of both roles in equal numbers."""
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    return [
        Instance(f"{name}{n}", role, f"n{n}", is_vllm=is_vllm)
        for n in range(count // 2)
        for name, role in roles.items()
    ]


def measure(setting: Setting, tree: Path, count: int, *, is_vllm: bool) -> float:
    """Milliseconds of CPU a second."""
    instances = cluster(count, is_vllm=is_vllm)
    with ExitStack() as stack:
        engines = stack.enter_context(Engines(setting.programs, instances, setting.cores.mocks))
        running = stack.enter_context(proxies.kvrs(tree)(setting.bench(engines)))
        give_up_s = time.monotonic() + _UP_WITHIN_S
        while any(row["health"] != "up" for row in proxies.state(running)["instances"]):
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{count} instances did not come up")
            time.sleep(0.2)
        time.sleep(_SETTLE_S)
        (found,) = measure_background([Subject("kvrs", engines, running, running.pids)])
    return found["background ms/s"]


def as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'':<28}{'instances':>10}{'ms/s':>8}{'range':>16}{'at most':>9}"]
    for row in rows:
        spread = f"{min(row['ms_per_s']):.1f}-{max(row['ms_per_s']):.1f}"
        lines.append(
            f"{row['subject']:<28}{row['instances']:>10}{row['median']:>8.1f}{spread:>16}"
            f"{row['at_most']:>9g}"
        )
    return "\n".join(lines)


def run(setting: Setting, trees: Mapping[str, Path], reps: int) -> Rows:
    """All subjects, which take turns."""
    found: dict[tuple[str, int], list[float]] = {}
    for rep in range(reps):
        for count in AT_MOST:
            for is_vllm in (True, False):
                for name, tree in trees.items():
                    subject = f"{name}, vLLM" if is_vllm else name
                    value = measure(setting, tree, count, is_vllm=is_vllm)
                    found.setdefault((subject, count), []).append(value)
        print(f"repetition {rep + 1} of {reps}", flush=True)
    return [
        {
            "subject": subject,
            "instances": count,
            "ms_per_s": values,
            "median": statistics.median(values),
            "at_most": AT_MOST[count],
        }
        for (subject, count), values in sorted(found.items())
    ]


def main() -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    if placed.mocks is not None:
        os.sched_setaffinity(0, {placed.mocks})
    record = Record(options.seed, timed=False)
    trees = {"kvrs": proxies.HERE}
    trees |= {f"kvrs of {tree.resolve().name}": tree.resolve() for tree in options.tree}
    arguments = argparse.Namespace(quick=False, peers=Path(), seed=options.seed)
    with opened(arguments, placed) as setting:
        rows = run(setting, trees, options.reps)
    text = as_text(rows)
    print(text)
    figures = {"trees": {name: commit_of(tree) for name, tree in trees.items()}, "rows": rows}
    record.keep(options.out, "background", figures, text)
    ours = [row for row in rows if row["subject"] in ("kvrs", "kvrs, vLLM")]
    return 0 if all(row["median"] <= row["at_most"] for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
