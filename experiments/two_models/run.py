"""Two models at one proxy: the latency of one, with deaths in the other and without.

python -m experiments.two_models.run [--rounds N] [--seed N] [--out DIR]
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import (
    BenchError,
    Engines,
    Instance,
    Load,
    compile_programs,
)
from experiments.bench_proxy.proxies import Running
from experiments.bench_proxy.steady import Cores, Row, Setting
from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.protocol.instance import Role

MAX_RATIO = 1.05  # Of the p99 with deaths to that without.
ROUNDS = 10
_DYING, _OBSERVED = "bench-1", "bench-2"
_DECODES = 8  # Of the model with deaths.
_KILLS, _EVERY_S = 6, 0.9
_UP_WITHIN_S = 20.0
_SHARES = ("ttft_us", "transit_us")
# Times in ms, rates in tokens per 1,000 s, as in `load.c`.
_LOAD = {"streams": 100, "rate": 20_000, "spread_ms": 800, "limit_ms": 60_000}
_OF_DYING = {**_LOAD, "tokens": 120, "model": 1, "window_ms": 9_000}
_OF_OBSERVED = {**_LOAD, "tokens": 60, "model": 2, "warm_ms": 1_500, "window_ms": 6_000}


def _instances(model: str, letter: str, decodes: int) -> list[Instance]:
    found = [Instance(f"p{letter}", Role.PREFILL, f"n{letter}", model=model)]
    for number in range(decodes):
        name = f"{letter}{number}"
        found.append(Instance(f"d{name}", Role.DECODE, f"n{name}", model=model))
    return found


CLUSTERS = {
    _DYING: _instances(_DYING, "a", _DECODES),
    _OBSERVED: _instances(_OBSERVED, "b", 2),
}


def models_of(engines: Engines) -> list[dict[str, Any]]:
    """Section `models` of the configuration."""
    page_ports = iter(range(1, 100))
    return [
        {
            "name": model,
            "cluster": {
                "nodes": [
                    {
                        "id": each.node,
                        "instances": [
                            {
                                "id": each.id,
                                "role": each.role.value,
                                "port": engines.ports[each.id],
                                "page_port": next(page_ports),
                            }
                        ],
                    }
                    for each in instances
                ]
            },
        }
        for model, instances in CLUSTERS.items()
    ]


def measure(setting: Setting, *, kills: bool) -> Row:
    """Both models under load in a fresh proxy, the instances of one killed one after the other."""
    instances = [each for cluster in CLUSTERS.values() for each in cluster]
    with setting.engines(instances) as engines:
        start = proxies.kvrs(sections={"cluster": {}, "models": models_of(engines)})
        with start(setting.bench(engines)) as running:
            _wait_up(running)
            return _loaded(setting, engines, running, kills=kills)


def _loaded(setting: Setting, engines: Engines, running: Running, *, kills: bool) -> Row:
    victims, core = 0, setting.cores.mocks
    dying = Load(setting.programs, running.port, _OF_DYING | {"seed": setting.seed}, (), core)
    with dying:
        if not dying.wait_open():
            raise BenchError(f"streams did not begin: {dying.result()['fault']}")
        options = _OF_OBSERVED | {"seed": setting.seed + 1}
        with Load(setting.programs, running.port, options, running.pids, core) as observed:
            time.sleep(_OF_OBSERVED["warm_ms"] / 1000)
            for number in range(_KILLS if kills else 0):
                time.sleep(_EVERY_S)
                victims += int(engines.order(f"kill da{number}")["streams"])
            result, of_dying = observed.result(), dying.result()
    row: Row = {"kills": _KILLS if kills else 0, "victims": victims}
    for name in _SHARES:
        row |= {f"{name}_{share}": result[name][share] for share in ("p50", "p99")}
    both = (result, of_dying)
    row["broken"] = sum(int(each["broken"]) for each in both)
    row["whole"] = sum(int(each["whole"]) for each in both)
    row["fault"] = next((each["fault"] for each in both if each["fault"]), "")
    return row


def _wait_up(running: Running) -> None:
    give_up_s = time.monotonic() + _UP_WITHIN_S
    for number in range(len(CLUSTERS)):
        while any(row["health"] != "up" for row in proxies.state(running, number)["instances"]):
            if time.monotonic() > give_up_s:
                raise BenchError("not all instances came up")
            time.sleep(0.05)


def ratios(rows: list[Row]) -> dict[str, float]:
    """Medians over the rounds: with deaths by without."""
    found = {}
    for name in _SHARES:
        medians = [
            statistics.median(row[f"{name}_p99"] for row in rows if bool(row["kills"]) is kills)
            for kills in (True, False)
        ]
        found[f"{name}_p99"] = medians[0] / medians[1]
    return found


def shown(rows: list[Row]) -> str:
    keys = [f"{name}_{share}" for name in _SHARES for share in ("p50", "p99")]
    lines = ["".join(f"{key:>16}" for key in ("deaths", "victims", "broken", *keys))]
    for kills in (False, True):
        of_kind = [row for row in rows if bool(row["kills"]) is kills]
        sums = [sum(row[key] for row in of_kind) for key in ("kills", "victims", "broken")]
        middles = [round(statistics.median(row[key] for row in of_kind)) for key in keys]
        lines.append("".join(f"{value:>16,}" for value in (*sums, *middles)))
    lines += [f"{name}: ratio {value:.3f}" for name, value in ratios(rows).items()]
    return "\n".join([*lines, f"bar: at most {MAX_RATIO}"])


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Ends what was started.
    cores = sorted(os.sched_getaffinity(0))
    placed = Cores(cores[0], cores[1]) if len(cores) > 1 else Cores(None, None)
    record = Record(options.seed)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvrs-bench-") as name:
        directory = Path(name)
        programs = compile_programs(directory)
        for number in range(options.rounds):
            setting = Setting(programs, placed, directory, directory, options.seed, quick=False)
            for kills in (False, True) if number % 2 else (True, False):
                rows.append({"round": number, **measure(setting, kills=kills)})
                print(rows[-1], flush=True)
    text = shown(rows)
    print(text)
    found = ratios(rows)
    record.keep(options.out, "two_models", {"ratios": found, "rows": rows}, text)
    is_met = max(found.values()) <= MAX_RATIO and not any(row["broken"] for row in rows)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
