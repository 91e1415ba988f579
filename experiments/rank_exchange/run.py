"""Time of one sum among ranks, and from the death of a rank until its instance knows.

Ranks are processes; the exchange is the engine's own. Every rank adds up four parts of which it has
one, again and again, without anything between. Deaths: a process that holds its life and has
touched so much memory is killed, and the time until the waiting thread goes on is taken; beside it
the time until its handle (pidfd) tells. A rank that hangs is stopped in an instance of two.
"""

import argparse
import math
import mmap
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.record import Record
from kvrs.config.cluster import InstanceSettings
from kvrs.config.engine import EngineSettings
from kvrs.elastic.layouts import Layout, Stage
from kvrs.elastic.units import UnitKind
from kvrs.engine.model_config import ModelConfig
from kvrs.engine.ranks.exchange import Areas, FormationMemory, SharedMemory
from kvrs.engine.ranks.futex import Life
from kvrs.engine.ranks.group import RankGroup
from kvrs.engine.ranks.settings import layout_of
from kvrs.engine.tiny import write_tiny_model
from kvrs.errors import RanksLostError
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Role
from kvrs.scheduling.sequences import Chunk

RANKS, SUMS, WARM_UP = 4, 2000, 200
SHAPES = ((16, 128), (16, 1024), (256, 1024))
MEMORY_MB = (3, 256, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--deaths", type=int, default=25)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record = Record()
    torch.set_num_threads(1)
    sums = [sum_of(rows, hidden) for rows, hidden in SHAPES]
    deaths = [death_of(size_mb, options.deaths) for size_mb in MEMORY_MB]
    hangs = hangs_of(options.deaths)
    figures = {"sums": sums, "deaths": deaths, "hangs": hangs}
    text = as_text(figures)
    print(text)
    raise SystemExit(1 if record.keep(options.out, "rank_exchange", figures, text) else 0)


def sum_of(rows: int, hidden: int) -> dict[str, Any]:
    """Microseconds of one sum, as rank 0 sees it, and of processor time on each rank."""
    ranks = tuple(range(RANKS))
    layout = Layout(1, (Stage(0, 1, ranks),), (ranks,), (ranks,), ranks)
    areas = Areas.of(layout, hidden=hidden, vocabulary=RANKS, batch_tokens=rows)
    memory, results = mmap.mmap(-1, areas.size_bytes), mmap.mmap(-1, 8 * (SUMS + 2))
    taken = torch.frombuffer(results, dtype=torch.float64)

    def compute(rank: int) -> None:
        worked_s = 0.0
        exchange = SharedMemory(FormationMemory(memory, areas), layout, rank)
        exchange.begin(rows, hidden)
        own = torch.ones(rows, hidden)
        for at in range(-WARM_UP, SUMS):
            if at == 0:
                worked_s = time.thread_time()
            began_s = time.perf_counter()
            exchange.total([own], UnitKind.MLP, 0)
            if rank == 0 and at >= 0:
                taken[at] = time.perf_counter() - began_s
        if rank == 0:
            taken[SUMS] = time.thread_time() - worked_s

    for child in [forked(partial(compute, rank)) for rank in ranks]:
        assert os.waitpid(child, 0)[1] == 0
    times = sorted((taken[:SUMS] * 1e6).tolist())
    return {
        "rows": rows,
        "hidden": hidden,
        "p50_us": percentile(times, 0.5),
        "p99_us": percentile(times, 0.99),
        "cpu_us": float(taken[SUMS]) / SUMS * 1e6,
    }


def death_of(size_mb: int, deaths: int) -> dict[str, Any]:
    """Milliseconds from SIGKILL."""
    told, handles = [], []
    for _ in range(deaths):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        life = Life(memory, 0)
        life.prepare()
        ready, begun = os.pipe()
        child = forked(partial(live, life, size_mb, begun))
        assert os.read(ready, 1) == b"r"
        handle = os.pidfd_open(child)
        ends: list[float] = []
        watcher = threading.Thread(target=await_end, args=(life, ends))
        watcher.start()
        time.sleep(0.05)
        began_s = time.monotonic()
        os.kill(child, signal.SIGKILL)
        watcher.join()
        os.waitpid(child, 0)
        handles.append((time.monotonic() - began_s) * 1e3)
        told.append((ends[0] - began_s) * 1e3)
        for descriptor in (ready, begun, handle):
            os.close(descriptor)
    return {"size_mb": size_mb, "life_ms": summary(told), "process_ms": summary(handles)}


def await_end(life: Life, ends: list[float]) -> None:
    life.await_end()
    ends.append(time.monotonic())


def live(life: Life, size_mb: int, begun: int) -> None:
    life.begin()
    touched = torch.ones(size_mb << 18)
    os.write(begun, b"r")
    while float(touched[0]) > 0:
        touched[:4096].add_(1.0)


def hangs_of(count: int) -> list[float]:
    """Seconds from the SIGSTOP of a rank, right before a batch, until it is lost."""
    seconds = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "tiny"
        write_tiny_model(model, seed=0)
        settings = InstanceSettings(id=InstanceId("d0"), role=Role.DECODE, tp=2)
        layout = layout_of(settings, ModelConfig.from_directory(model).units)
        assert layout is not None
        for _ in range(max(3, count // 5)):
            group = RankGroup(model, EngineSettings(pages=64), layout)
            group.predict = lambda chunks: 0.005
            chunk = Chunk([5, 6, 7], 0, [0], wants_logits=True)
            group.execute([chunk])
            began_s = time.monotonic()
            os.kill(group.pids[1], signal.SIGSTOP)
            try:
                group.execute([chunk])
            except RanksLostError:
                seconds.append(time.monotonic() - began_s)
            group.close()
    return seconds


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": percentile(ordered, 0.5), "p99": percentile(ordered, 0.99)}


def as_text(figures: dict[str, Any]) -> str:
    lines = [f"a sum among {RANKS} ranks, {SUMS} times:"]
    lines += [
        f"  {one['rows']:>3} x {one['hidden']:>4}: p50 {one['p50_us']:,.0f} us, p99 "
        f"{one['p99_us']:,.0f} us; {one['cpu_us']:,.0f} us of processor time on a rank"
        for one in figures["sums"]
    ]
    lines.append("from SIGKILL of a rank until its instance knows, p50 / p99:")
    for one in figures["deaths"]:
        life, process = one["life_ms"], one["process_ms"]
        lines.append(
            f"  {one['size_mb']:>5} MB touched: by its life {life['p50']:.2f} / {life['p99']:.2f} "
            f"ms, by the end of its process {process['p50']:.1f} / {process['p99']:.1f} ms"
        )
    hangs = figures["hangs"]
    lines.append(
        f"from SIGSTOP of a rank at a batch until it is lost: median "
        f"{statistics.median(hangs):.2f} s, longest {max(hangs):.2f} s of {len(hangs)}"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
