"""The cost of the patches to an undisturbed stream of DistServe.

    DISTSERVE_HOME=... python -m experiments.distserve_overhead.run [--rounds 200]

CPU time per token of a plain and of a patched server process, in turns; see README.md.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from experiments.distserve_overhead.side import OUTPUT_TOKENS, PROMPT_TOKENS, STREAMS
from experiments.record import Record
from experiments.rig import interval
from kvrs.cluster.loopback_ray import ENVIRONMENT
from kvrs.engine.tiny import write_tiny_model

SIDES = ("plain", "patched")
WANTED_COST = 0.02
WARM_UP = 8  # Rounds of each side that do not count.
MOST_DRIFT = 0.05
STOP_TIMEOUT_S = 30.0


class Server:
    def __init__(self, side: str, directory: Path, log: Any) -> None:
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.distserve_overhead.side", side, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
        )
        self._heard()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def round(self) -> float:
        """CPU seconds per output token."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._heard())

    def _heard(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"a server ended with status {self._process.wait()}; its log has the reason"
            )
        return json.loads(line)


def measure(rounds: int, seed: int, directory: Path) -> dict[str, list[float]]:
    order = random.Random(seed)
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        log = stack.enter_context((directory / "log").open("w"))
        servers = {side: stack.enter_context(Server(side, directory, log)) for side in SIDES}
        for _ in range(WARM_UP):
            for server in servers.values():
                server.round()
        progress = stack.enter_context(Progress(disable=not sys.stderr.isatty()))
        for _ in progress.track(range(rounds), description="rounds"):
            for side in order.sample(SIDES, 2):
                samples[side].append(servers[side].round())
    return samples


def drift(ratios: Sequence[float]) -> float:
    """By how much the later half of the pairs' ratios is above the earlier one, as one part of what
    the plain side takes. The pairs, not the samples: both sides of a pair meet the same machine,
    whose speed changes by half and more from minute to minute where other machines share it.
    """
    half = len(ratios) // 2
    return statistics.median(ratios[half:]) - statistics.median(ratios[:half])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    record = Record(arguments.seed)
    # Ray puts sockets with long names into it.
    directory = Path(tempfile.mkdtemp(prefix="kvrs-", dir="/tmp"))
    try:
        write_tiny_model(directory / "tiny", seed=0)
        samples = measure(arguments.rounds, arguments.seed, directory)
    except SystemExit:
        print((directory / "log").read_text()[-4000:], file=sys.stderr)
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    ratios = [
        patched / plain - 1
        for plain, patched in zip(samples["plain"], samples["patched"], strict=True)
    ]
    cost, spread = statistics.median(ratios), interval(ratios)
    medians_us = {side: statistics.median(values) * 1e6 for side, values in samples.items()}
    result = {
        "rounds": arguments.rounds,
        "streams": STREAMS,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "cpu_us_per_token": medians_us,
        "cost": cost,
        "cost_interval": spread,
        "wanted_cost": WANTED_COST,
        "warm_up_rounds": WARM_UP,
        "samples_s": samples,
    }
    text = (
        f"patched engine against plain DistServe, {arguments.rounds} interleaved rounds, "
        f"medians\n"
        f"{STREAMS} streams, prompts of {PROMPT_TOKENS} tokens, outputs of {OUTPUT_TOKENS}\n"
        f"CPU of the server's process per token: plain {medians_us['plain']:.1f} us, "
        f"patched {medians_us['patched']:.1f} us: "
        f"{cost:+.1%} ± {spread:.1%} (wanted below {WANTED_COST:.0%})\n"
    )
    print(text, end="")
    if abs(moved := drift(ratios)) > MOST_DRIFT:
        record.void(f"the ratio of later pairs differs from that of earlier ones by {moved:+.1%}")
    if spread > WANTED_COST:
        record.void(f"the interval is wider than the bar of {WANTED_COST:.0%}")
    is_void = record.keep(arguments.out, "distserve_overhead", result, text)
    return 2 if is_void else 0 if cost <= WANTED_COST else 1


if __name__ == "__main__":
    raise SystemExit(main())
