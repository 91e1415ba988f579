"""The simulator beside that of DistServe (Zhong et al., OSDI 2024), which is run as published: the
same requests, by the same fits.

    DISTSERVE_HOME=... python -m experiments.simulator.distserve [--rates 2 4 8] [--requests 400]

Its folder `simdistserve` is imported from a checkout; it needs simpy and pandas. Each known
difference has a switch: with all of them off, both should agree; then each is on by itself.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from experiments.command_line import parser_of
from experiments.record import Record
from experiments.simulator.beside import (
    BAR,
    MOST_PREFILL,
    OFF,
    Asked,
    Differences,
    Latencies,
    as_text,
    largest,
    ours,
    requests_of,
    row_of,
)
from kvrs.errors import ConfigError
from kvrs.profiles import catalog
from kvrs.profiles.catalog import DecodeFit, PrefillQuadratic

PACE = "opt-13b-a100-distserve-tp1"
# Beside its fits, its worker adds to each step 2 ms and 0.0001 ms for each token of context, and to
# a prefill 1 ms (base/worker.py, estimators/time_estimator.py).
STEP_MS, PREFILL_MS, TOKEN_MS = 2.0, 1.0, 1e-4
NO_TIME_BYTES_PER_S = 1e18  # Its hand-off takes none.


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


SWITCHES = {
    OFF: Differences(),
    "hand-off by bytes": Differences(hand_off=True),
    "network": Differences(network=True),
    "no overhead of steps": Differences(overhead=True),
    "first token of decode": Differences(first_token=True),
    "chunks of 512": Differences(chunks=True),
    "all on": Differences(True, True, True, True, True),
}


def compare(home: Path, rate: float, count: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    asked = requests_of("sharegpt", rate, count, seed, most_prompt=1024, most_output=512)
    right = theirs(home, asked)
    return [
        row_of(
            rate,
            name,
            ours(asked, differ, profile_of(differ.overhead, folder), NO_TIME_BYTES_PER_S),
            right,
        )
        for name, differ in SWITCHES.items()
    ]


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
    title = (
        f"one prefill and one decode instance, {PACE}, {options.requests} requests of ShareGPT's "
        f"lengths (at most 1,024 and 512 tokens)"
    )
    text = as_text(rows, title, "DistServe's")
    print(text)
    record.keep(options.out, "distserve", {"rows": rows}, text)
    return 0 if largest(rows) <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
