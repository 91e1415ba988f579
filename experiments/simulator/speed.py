"""CPU time and memory of the simulator by number of workers.

    python -m experiments.simulator.speed [--cases 10x300 64x40] [--repeats 3]

A case is workers x requests of each. CPU seconds of one process, not the clock's; the fastest of
the repeats counts, since what else runs on the machine takes caches and cores and never gives any.
"""

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context

from experiments.command_line import parser_of
from experiments.lumen import simulated as lumen
from experiments.record import Record
from kvrs_lab.faults.language import parse_faults
from kvrs_lab.sim.fault_scenarios import named_deaths
from kvrs_lab.sim.world import World

PER_S = 1.4  # Requests of a worker.
BARS = {10: 600, 64: 400}
BYTES_BAR = 20_000


@dataclass(frozen=True, slots=True)
class Measured:
    workers: int
    requests: int
    tokens: int
    cpu_s: float
    memory_bytes: int  # That the arrivals and the run added to the process.

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.cpu_s

    @property
    def bytes_per_request(self) -> float:
        return self.memory_bytes / self.requests


def measure(workers: int, each: int) -> Measured:
    """One run, with the loss of a worker after a third of the requests, in this process."""
    setup = replace(lumen.LLAMA, requests=each, per_s=PER_S)
    case = lumen.Case.of(setup, f"{workers}x1")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asked = lumen.arrivals(case, 0)
    kill = {"when": {"at_s": asked[len(asked) // 3].at_s}, "what": "kill", "whom": {"id": "w00"}}
    config = lumen.config_of(case, lumen.SCHEDULING)
    deaths = named_deaths(parse_faults([kill]))
    world = World(config, asked, deaths, seed=0, reload_s=setup.reload_s)
    begun_s = time.process_time()
    outcome = world.run()
    cpu_s = time.process_time() - begun_s
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert set(outcome.ended) == {"complete"}, outcome.ended
    return Measured(workers, len(asked), outcome.tokens, cpu_s, (after - before) * 1024)


def alone(workers: int, each: int) -> Measured:
    """The same in a process of its own, whose memory is that run's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, workers, each).result()


def as_text(found: list[Measured]) -> str:
    lines = [
        f"{lumen.LLAMA.preset} lengths, {PER_S}/s a worker, {lumen.LLAMA.pace}; one worker is lost",
        f"{'workers':>8}{'requests':>10}{'per CPU s':>11}{'bar':>6}{'us a token':>12}"
        f"{'kB a request':>14}{'bar':>5}",
    ]
    for row in found:
        lines.append(
            f"{row.workers:>8}{row.requests:>10,}{row.requests_per_s:>11.0f}"
            f"{BARS.get(row.workers, '-'):>6}{row.cpu_s / row.tokens * 1e6:>12.1f}"
            f"{row.bytes_per_request / 1e3:>14.1f}{BYTES_BAR // 1000:>5}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--cases", nargs="+", default=["10x300", "64x40"])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    record = Record(0)
    found = []
    for case in options.cases:
        workers, each = map(int, case.split("x"))
        runs = [alone(workers, each) for _ in range(options.repeats)]
        found.append(min(runs, key=lambda run: run.cpu_s))
    text = as_text(found)
    print(text)
    record.keep(options.out, "speed", {"rows": [asdict(row) for row in found]}, text)
    missed = any(
        row.requests_per_s < BARS.get(row.workers, 0) or row.bytes_per_request > BYTES_BAR
        for row in found
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
