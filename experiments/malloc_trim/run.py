"""Time of a step, page faults and memory, with freed memory kept for the next step and without.

Each variant is a process of its own, since a C library cannot go back to its defaults. The two of a
pair take turns and do the same steps in the same random order: with the defaults, the time of a
step depends on what the process allocated before it.
"""

import argparse
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from experiments.record import Record

# Name of a step: sequences in the batch, tokens of each, positions before them.
STEPS = {
    "decode 1": (1, 1, 200),
    "decode 16": (16, 1, 200),
    "decode 64": (64, 1, 200),
    "prefill 512": (1, 512, 0),
    "prefill 512 behind 3,584": (1, 512, 3584),
}
PAGES, PAGE_SIZE_TOKENS = 2048, 16
VARIANTS = {"C library's defaults": False, "freed memory kept": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--starts", type=int, default=6, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=3, help="of all kinds of step")
    parser.add_argument("--steps", type=int, default=6, help="steps in a turn")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = Record(options.seed)
    order = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        pairs = []
        for _ in range(options.starts):
            turns = [step for _ in range(options.rounds) for step in order.sample([*STEPS], 5)]
            pairs.append(measure(model, options.seed, turns, options.steps))
    rows = [summary(step, pairs) for step in STEPS]
    rows += [
        {"memory": name, "resident_mb": [pair[name].resident_mb for pair in pairs]}
        for name in VARIANTS
    ]
    print(as_text(rows))
    record.keep(options.out, "malloc_trim", {"rows": rows}, as_text(rows))


@dataclass
class Series:
    """Measurements of one process: times and page faults of every step by its kind, and memory at
    its start and after its last step.
    """

    resident_mb: list[float]
    times_s: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})
    faults: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})


Pair = dict[str, Series]


def as_text(rows: list[dict[str, Any]]) -> str:
    """Each kind of step: times and page faults of every process; and their memory."""
    lines = []
    for row in rows:
        if "memory" in row:
            shown = ", ".join(f"{before} to {after}" for before, after in row["resident_mb"])
            lines.append(f"resident MB, {row['memory']}: {shown}")
            continue
        lines.append(f"{row['step']}: {row['ratio_p50']} of the time")
        for name in VARIANTS:
            times, faults = row[name]["ms_p50"], row[name]["faults_per_step"]
            lines.append(f"  {name}: ms {times}, faults per step {faults}")
    return "\n".join(lines)


def summary(step: str, pairs: list[Pair]) -> dict[str, Any]:
    """Medians of each process, and the median of the pairs' ratios."""
    row: dict[str, Any] = {"step": step}
    medians = {
        name: [statistics.median(pair[name].times_s[step]) for pair in pairs] for name in VARIANTS
    }
    for name in VARIANTS:
        row[name] = {
            "ms_p50": [round(value * 1e3, 2) for value in medians[name]],
            "faults_per_step": [round(statistics.mean(pair[name].faults[step])) for pair in pairs],
        }
    ratios = [kept / default for default, kept in zip(*medians.values(), strict=True)]
    return row | {"ratio_p50": round(statistics.median(ratios), 3)}


def measure(model: Path, seed: int, turns: list[str], steps: int) -> Pair:
    """Those turns in two fresh processes."""
    context = multiprocessing.get_context("spawn")
    ends: dict[str, Connection] = {}
    processes = []
    for name, kept in VARIANTS.items():
        ends[name], other = context.Pipe()
        processes.append(context.Process(target=serve, args=(other, model, seed, kept)))
        processes[-1].start()
        other.close()
    found: Pair = {name: Series([end.recv()]) for name, end in ends.items()}
    for number, step in enumerate(turns):
        # The order alternates, so that neither variant always comes after the other.
        for name in list(ends)[:: 1 if number % 2 else -1]:
            ends[name].send((step, steps))
            times_s, faults = ends[name].recv()
            found[name].times_s[step] += times_s
            found[name].faults[step].append(faults)
    for name, end in ends.items():
        end.send(None)
        found[name].resident_mb.append(end.recv())
    for process in processes:
        process.join()
    return found


def serve(end: Connection, model: Path, seed: int, kept: bool) -> None:
    """One variant: compute the steps that are asked for, in a thread as the engine does."""
    from kvrs.config.engine import EngineSettings
    from kvrs.engine import allocator

    if not kept:
        allocator.keep_freed_memory = lambda: False
    from kvrs.engine.tiny import write_tiny_model
    from kvrs.engine.worker import Worker

    write_tiny_model(model, seed)
    engine = EngineSettings(pages=PAGES, page_size_tokens=PAGE_SIZE_TOKENS, max_model_len=4096)
    worker = Worker(model, engine)
    thread = ThreadPoolExecutor(1)
    end.send(_resident_mb())
    while (asked := end.recv()) is not None:
        step, steps = asked
        thread.submit(_run, worker, step, 1).result()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times_s = thread.submit(_run, worker, step, steps).result()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        end.send((times_s, faults / steps))
    end.send(_resident_mb())


def _run(worker: Any, step: str, steps: int) -> list[float]:
    from kvrs.scheduling.sequences import Chunk

    sequences, tokens, context = STEPS[step]
    each = -(-(context + tokens) // PAGE_SIZE_TOKENS)
    chunks = [
        Chunk(
            [1 + (number + at) % 500 for at in range(tokens)],
            context,
            range(number * each, (number + 1) * each),
            wants_logits=True,
        )
        for number in range(sequences)
    ]
    times_s = []
    for _ in range(steps):
        started_s = time.perf_counter()
        worker.execute(chunks)
        times_s.append(time.perf_counter() - started_s)
    return times_s


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)


if __name__ == "__main__":
    main()
