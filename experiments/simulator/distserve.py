"""The simulator beside that of DistServe (Zhong et al., OSDI 2024), which is run as published: the
same requests, by the same fits.

    DISTSERVE_HOME=... python -m experiments.simulator.distserve [--rates 2 4 8] [--requests 400]

Its folder `simdistserve` is imported from a checkout; it needs
simpy and pandas. Each known difference has a
switch: with all of them off, both should agree; then each is on by itself.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from experiments.command_line import parser_of
from experiments.record import Record
from kvrs.config.file import parse_config
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.schema import DecodeFit, PrefillQuadratic
from kvrs.report import metrics
from kvrs.sim.clients import records_of
from kvrs.sim.first_token import FirstToken
from kvrs.sim.streams import Arrival
from kvrs.sim.world import World
from kvrs.traces.generator import generate
from kvrs.traces.presets import PRESETS
from kvrs.traces.records import StreamRecord

PACE = "opt-13b-a100-distserve-tp1"
BEGIN_S = 2.0
BAR = 0.05
# Beside its fits, its worker adds to each step 2 ms and 0.0001 ms for each token of context, and to
# a prefill 1 ms (base/worker.py, estimators/time_estimator.py).
STEP_MS, PREFILL_MS, TOKEN_MS = 2.0, 1.0, 1e-4
MOST_PREFILL = 65_536  # Tokens of a batch, near its own limit for this model.


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    tokens: int
    output: int  # After the first token, which is prefill's there.


def requests_of(rate: float, count: int, seed: int) -> list[Asked]:
    settings = replace(PRESETS["sharegpt"].settings, requests=count, requests_per_s=rate)
    return [
        Asked(each.arrival_s, min(each.input_tokens, 1024), max(1, min(each.output_tokens, 512)))
        for each in generate(settings, seed).requests
    ]


@dataclass(frozen=True, slots=True)
class Latencies:
    ttft_s: list[float]
    tpot_s: list[float]


def theirs(home: Path, asked: Sequence[Asked]) -> Latencies:
    """By DistServe's own code.

    Raises:
        ConfigError: it cannot be imported.
    """
    sys.path.insert(0, str(home))
    try:
        import simpy
        from simdistserve.base.request import E_EXIT_SYSTEM, E_INIT, E_WAIT_DECODE, Request
        from simdistserve.base.scheduler import put_requests_with_interarrivals
        from simdistserve.clusters.disagg import DisaggCluster
        from simdistserve.constants import ModelTypes
    except ImportError as error:
        raise ConfigError(
            f"DISTSERVE_HOME: {home}: {error}; allowed: a checkout of DistServe, with simpy and "
            f"pandas"
        ) from None
    env = simpy.Environment()
    worker: dict[str, Any] = {
        "model_type": ModelTypes.opt_13b,
        "TP": 1,
        "TP_Prefill": 1,
        "TP_Decode": 1,
        "prefill_max_tokens": MOST_PREFILL,
        "decode_max_tokens": MOST_PREFILL,
        "engine_type": "distserve",
    }
    cluster = DisaggCluster(env=env, worker_configs=worker)
    cluster.run()
    requests = [
        Request(env=env, req_id=number, prefill_length=each.tokens, output_lens=each.output)
        for number, each in enumerate(asked)
    ]
    before_s = [0.0, *(each.at_s for each in asked)]
    gaps = [(each.at_s - earlier) * 1e3 for each, earlier in zip(asked, before_s, strict=False)]
    put_requests_with_interarrivals(env, cluster.scheduler, gaps, requests)
    env.run()
    ttft, tpot = [], []
    for request in requests:
        at = {event: ms / 1e3 for ms, event, _ in reversed(request.log)}  # The first of each.
        ttft.append(at[E_WAIT_DECODE] - at[E_INIT])
        tpot.append((at[E_EXIT_SYSTEM] - at[E_WAIT_DECODE]) / request.output_lens)
    return Latencies(ttft, tpot)


@dataclass(frozen=True, slots=True)
class Differences:
    """True: as the product has it, and not as their simulator."""

    hand_off: bool = False  # Takes its bytes at 25 Gbit/s. Theirs takes no time.
    network: bool = False  # Messages take 0.1 to 3 ms. Theirs take no time.
    overhead: bool = False  # A step has none beside its fit.
    first_token: bool = False  # The decode instance's.
    chunks: bool = False  # Prefill in chunks of 512 tokens. Theirs is of whole prompts.


def profile_of(overhead: bool, folder: Path) -> str:
    """Their fits, with what their worker adds to them unless the product's difference is on."""
    known = catalog.profile(PACE)
    if overhead:
        return PACE
    prefill, decode = known.prefill, known.decode
    assert isinstance(prefill, PrefillQuadratic)
    assert isinstance(decode, DecodeFit)
    a, b, c = prefill.coefficients_ms
    changed = msgspec.structs.replace(
        known,
        prefill=msgspec.structs.replace(prefill, coefficients_ms=(a + PREFILL_MS, b + TOKEN_MS, c)),
        decode=msgspec.structs.replace(
            decode,
            small_ms=_with_tokens(decode.small_ms),
            large_ms=_with_tokens(decode.large_ms),
        ),
        engine_step_s=STEP_MS / 1e3,
    )
    path = folder / "distserve.json"
    path.write_bytes(msgspec.json.encode(changed))
    return str(path)


def _with_tokens(fit: tuple[float, float, float]) -> tuple[float, float, float]:
    """Theirs counts a context without the new token, which the fit counts."""
    a, b, c = fit
    return a, b + TOKEN_MS, c - TOKEN_MS


def ours(asked: Sequence[Asked], differ: Differences, folder: Path) -> Latencies:
    nodes = [
        {"id": f"n{n}", "instances": [{"id": role, "role": role}]}
        for n, role in enumerate(("prefill", "decode"))
    ]
    config = parse_config(
        {
            "cluster": {
                "engine": {
                    "pace": profile_of(differ.overhead, folder),
                    "pages": 1 << 17,
                    "max_running": 4096,
                    "max_batch_tokens": 512 if differ.chunks else MOST_PREFILL,
                },
                "nodes": nodes,
            },
            "backup": {"mode": "off"},
            "transfer": {"link_bytes_per_s": 3.125e9 if differ.hand_off else 1e18},
        }
    )
    arrivals = [
        Arrival(BEGIN_S + each.at_s, [number + 1, *range(100, 99 + each.tokens)], each.output + 1)
        for number, each in enumerate(asked)
    ]
    kind = FirstToken.DECODE if differ.first_token else FirstToken.PREFILL
    world = World(config, arrivals, [], seed=0, first_token=kind)
    if not differ.network:
        for proxy in world.cluster.serving:
            proxy.be_near()
    world.run()
    return _of(records_of(arrivals, world.cluster.proxies))


def _of(records: Sequence[StreamRecord]) -> Latencies:
    assert all(record.completed for record in records)
    return Latencies(
        [metrics.arrival_ttft_s(record) or 0.0 for record in records],
        [metrics.tpot_s(record) or 0.0 for record in records],
    )


SWITCHES = {
    "all differences off": Differences(),
    "hand-off by bytes": Differences(hand_off=True),
    "network": Differences(network=True),
    "no overhead of steps": Differences(overhead=True),
    "first token of decode": Differences(first_token=True),
    "chunks of 512": Differences(chunks=True),
    "all on": Differences(True, True, True, True, True),
}


def compare(home: Path, rate: float, count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    asked = requests_of(rate, count, seed)
    right = theirs(home, asked)
    rows = []
    for name, differ in SWITCHES.items():
        left = ours(asked, differ, folder)
        row: dict[str, Any] = {"rate": rate, "case": name}
        for key, pick in PICKED.items():
            one, other = pick(left), pick(right)
            for q in (50, 90, 99):
                mine, published = metrics.percentile(one, q), metrics.percentile(other, q)
                assert mine is not None
                assert published is not None
                row |= {f"{key}_p{q}_s": mine, f"{key}_p{q}_theirs_s": published}
        rows.append(row)
    return rows


PICKED: dict[str, Callable[[Latencies], list[float]]] = {
    "ttft": lambda found: found.ttft_s,
    "tpot": lambda found: found.tpot_s,
}


def error(row: dict[str, Any], name: str) -> float:
    return float(row[f"{name}_s"] / row[f"{name}_theirs_s"] - 1)


def as_text(rows: Sequence[dict[str, Any]], count: int) -> str:
    names = [f"{key}_p{q}" for key in PICKED for q in (50, 90, 99)]
    lines = [
        f"one prefill and one decode instance, {PACE}, {count} requests of ShareGPT's lengths (at "
        f"most 1,024 and 512 tokens)",
        f"{'requests/s':>10}  {'':24}" + "".join(f"{name.replace('_', ' '):>20}" for name in names),
    ]
    for row in rows:
        cells = "".join(f"{row[f'{n}_s'] * 1e3:>11.1f} ms {error(row, n):>+5.1%}" for n in names)
        lines.append(f"{row['rate']:>10g}  {row['case']:24}{cells}")
    most = largest(rows)
    verdict = "met" if most <= BAR else "MISSED"
    lines += [
        "",
        "in each cell: ours, and how far it is from DistServe's simulator",
        f"largest error of a median with all differences off: {most:.2%}; bar {BAR:.0%}: {verdict}",
    ]
    return "\n".join(lines)


def largest(rows: Sequence[dict[str, Any]]) -> float:
    off = [row for row in rows if row["case"] == "all differences off"]
    return max(abs(error(row, name)) for row in off for name in ("ttft_p50", "tpot_p50"))


def main() -> int:
    parser = parser_of(__doc__, __file__, seed=0)
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0, 8.0])
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    if "DISTSERVE_HOME" not in os.environ:
        raise ConfigError("DISTSERVE_HOME: not set; allowed: a checkout of DistServe")
    home = Path(os.environ["DISTSERVE_HOME"])
    record = Record(options.seed, timed=False)
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row
            for rate in options.rates
            for row in compare(home, rate, options.requests, options.seed, Path(folder))
        ]
    text = as_text(rows, options.requests)
    print(text)
    record.keep(options.out, "distserve", {"rows": rows}, text)
    return 0 if largest(rows) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
