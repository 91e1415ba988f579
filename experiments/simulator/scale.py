"""The costs of a cluster by its number of workers, with the loss of a rack: CPU per request of the
simulator and of each component, memory, and the time that the proxy's policy takes to decide.

    python -m experiments.simulator.scale [--cases 64x10 256x10 1000x10 4000x4] [--interval-s 0.25]
    python -m experiments.simulator.scale --cases 4000x100 --at-most

A case is workers x requests of each. One proxy has all workers. A rack is 16 nodes; it is lost as
the middle request comes, with its hosts' memory, and nothing is left to reset a connection. Until
then, and until the last stream has ended, invariants are checked; the rest behind that is left out.

With `--at-most` the result is kept as `scale_at_most`, also where other processes run beside it:
its times are what the run takes at most.
"""

import re
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from types import FrameType
from unittest.mock import patch

from experiments.command_line import parser_of
from experiments.lumen import simulated as lumen
from experiments.record import Record
from kvrs.config.file import Config
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.report.metrics import percentile
from kvrs_lab.sim.clients import records_of
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.streams import Arrival
from kvrs_lab.sim.world import World

PER_S = 1.4  # Requests of a worker.
RACK_NODES = 16
SLICE_S = 1.0
SAMPLE_S = 0.004
_OF_PACKAGES = re.compile(r"/kvrs(?:_engine|_lab)?/")
# The first part of a call stack's file names that one of these is in, innermost last.
COMPONENTS = (
    ("reports", ("core/watch.py", "proxy/watch/", "sim/fleet.py")),
    ("invariants", ("sim/invariants.py",)),
    ("decisions", ("core/",)),
    ("checkpoints", ("transfer/", "sim/checkpoints.py", "sim/links.py", "sim/agent.py")),
    ("tokens at the proxy", ("sim/attempts.py", "sim/proxy.py", "sim/streams.py")),
    ("batches", ("scheduling/", "sim/engine.py")),
)


@dataclass(frozen=True, slots=True)
class Scaled:
    workers: int
    requests: int
    cpu_s: float
    wall_s: float
    memory_bytes: int  # That building the world and the run added to the process.
    shares: dict[str, float]  # Of the samples of its CPU time, by component.
    start_us: float  # CPU time of the policy for a request, mean.
    start_us_p99: float
    loss_ms: float  # For the loss of a worker with all its victims, the longest.
    ended: dict[str, int]
    recovered: int


def config_of(case: lumen.Case, interval_s: float) -> Config:
    config = lumen.config_of(case, lumen.SCHEDULING)
    proxy = config.proxy.model_copy(update={"load_interval_s": interval_s})
    return config.model_copy(update={"proxy": proxy})


def rack_lost(workers: int, each: int, interval_s: float) -> tuple[World, list[Arrival]]:
    """A world in which a rack is lost as the middle request comes, and its requests."""
    setup = replace(lumen.LLAMA, requests=each, per_s=PER_S)
    case = lumen.Case.of(setup, f"{workers}x1")
    asked = lumen.arrivals(case, 0)
    at_s = asked[len(asked) // 2].at_s
    rack = [
        {"when": {"at_s": at_s}, "what": "kill", "whom": {"node": f"n{node:02}"}}
        for node in range(min(RACK_NODES, workers // 4))
    ]
    deaths = named_deaths(parse_faults(rack))
    config = config_of(case, interval_s)
    return World(config, asked, deaths, seed=0, reload_s=setup.reload_s), asked


def measure(workers: int, each: int, interval_s: float) -> Scaled:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    world, asked = rack_lost(workers, each, interval_s)
    with sampled() as samples, decisions() as took_s:
        begun_s, began_s, until_s = time.process_time(), time.monotonic(), SLICE_S
        while world.run_before(until_s):
            shown_at(until_s, asked[-1].at_s)
            until_s += SLICE_S
        cpu_s, wall_s = time.process_time() - begun_s, time.monotonic() - began_s
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    records = records_of(asked, world.cluster.proxies)
    starts = took_s[ev.StreamArrived.__name__]
    return Scaled(
        workers,
        len(asked),
        cpu_s,
        wall_s,
        (after - before) * 1024,
        {name: count / samples.total() for name, count in samples.most_common()},
        sum(starts) / len(starts) * 1e6,
        (percentile(starts, 99) or 0.0) * 1e6,
        max(took_s[ev.InstanceLost.__name__], default=0.0) * 1e3,
        dict(Counter("complete" if each.completed else "lost" for each in records)),
        sum(live.recoveries > 0 for live in world.cluster.proxies[0].streams.values()),
    )


def shown_at(clock_s: float, last_s: float) -> None:
    """Show the simulated time, where someone reads along."""
    if sys.stderr.isatty():
        print(
            f"\r{clock_s:.0f} s, the last request comes at {last_s:.0f} s ", end="", file=sys.stderr
        )


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Counts of samples of this process's CPU time, by component."""
    found: Counter[str] = Counter()

    def take(_: int, frame: FrameType | None) -> None:
        files = []
        while frame is not None:
            files.append(_OF_PACKAGES.split(frame.f_code.co_filename)[-1])
            frame = frame.f_back
        found[_component(files)] += 1

    before = signal.signal(signal.SIGPROF, take)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _component(files: list[str]) -> str:
    for name, parts in COMPONENTS:
        if any(part in file for file in files for part in parts):
            return name
    return "clock"


@contextmanager
def decisions() -> Iterator[defaultdict[str, list[float]]]:
    """CPU seconds of the policy for each event, by its kind."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    real = RecoveryPolicy.handle

    def timed(self: RecoveryPolicy, event: ev.Event, now_s: float) -> list[act.Action]:
        begun_s = time.thread_time()
        actions = real(self, event, now_s)
        found[type(event).__name__].append(time.thread_time() - begun_s)
        return actions

    with patch.object(RecoveryPolicy, "handle", timed):
        yield found


def as_text(found: list[Scaled], interval_s: float) -> str:
    names = [name for name, _ in COMPONENTS] + ["clock"]
    lines = [
        f"{lumen.LLAMA.preset} lengths, {PER_S}/s a worker, {lumen.LLAMA.pace}; a report of each "
        f"process every {interval_s:g} s; a rack of {RACK_NODES} nodes (a quarter at most) is lost",
        f"{'workers':>8}{'requests':>9}{'recovered':>10}{'CPU ms a request':>18}{'MB':>7}"
        f"{'minutes':>9}{'us to place one, p99':>22}{'ms for a loss':>15}",
    ]
    for row in found:
        lines.append(
            f"{row.workers:>8,}{row.requests:>9,}{row.recovered:>10}"
            f"{row.cpu_s / row.requests * 1e3:>18.2f}{row.memory_bytes / 1e6:>7.0f}"
            f"{row.wall_s / 60:>9.1f}"
            f"{f'{row.start_us:.0f}, {row.start_us_p99:.0f}':>22}{row.loss_ms:>15.1f}"
        )
    lines += ["", f"{'share of CPU':20}" + "".join(f"{row.workers:>9,}" for row in found)]
    lines += [
        f"{name:20}" + "".join(f"{row.shares.get(name, 0.0):>9.0%}" for row in found)
        for name in names
    ]
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--cases", nargs="+", default=["64x10", "256x10", "1000x10", "4000x4"])
    parser.add_argument("--interval-s", type=float, default=0.25)
    parser.add_argument("--at-most", action="store_true", help="keep it beside other processes")
    options = parser.parse_args()
    record = Record(0, timed=not options.at_most)
    found = []
    for case in options.cases:
        workers, each = map(int, case.split("x"))
        # In a process of its own, whose memory is that run's.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            found.append(pool.submit(measure, workers, each, options.interval_s).result())
        print(as_text(found[-1:], options.interval_s), flush=True)
    text = as_text(found, options.interval_s)
    print(text)
    name = "scale_at_most" if options.at_most else "scale"
    record.keep(options.out, name, {"rows": [asdict(row) for row in found]}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
