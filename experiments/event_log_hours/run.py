"""For how many hours the event log of a proxy reaches back, by the number of streams.

python -m experiments.event_log_hours.run [--out DIR]

The events are those of a simulated cluster, in the form in which a proxy writes them.
"""

import argparse
import gzip
import json
import sys
from pathlib import Path
from typing import Any

from experiments.processes import nodes_with_pairs
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.proxy.streams.event_log import COMPRESS_LEVEL, part_bytes
from kvrs.sim.command import SimulateOptions, make_world

INSTANCES = 64
RATES = (1.0, 5.0, 20.0)  # Streams per second.
SPAN_S = 60.0  # In which they arrive.
WARM_S = 20.0  # The log from then on counts, as long as streams arrive.
SEED = 1
WALL_S = 1_790_000_000.0  # Any time of the wall clock: its digits count.
BAR_HOURS = 24.0
BAR_RATE = 5.0


def config() -> Config:
    """32 nodes, of `kvrs up` as it starts: checkpoints and the choice of hand-offs are on."""
    return parse_config(
        {
            "cluster": {"nodes": nodes_with_pairs(INSTANCES // 2)},
            "backup": {"mode": "both"},
            "policy": {"handoff": "auto"},
        }
    )


def measure(rate: float) -> dict[str, Any]:
    """Sizes of the log per second, and for how long the default size lasts."""
    options = SimulateOptions(requests=round(rate * SPAN_S), rate=rate)
    used = config()
    world = make_world(options, used, [], SEED, keep_log=True)
    world.run()
    (proxy,) = world.cluster.proxies
    assert proxy.log is not None
    lines, streams = [], 0
    for each in proxy.log[1:]:
        fact = json.loads(each)
        if WARM_S <= fact["at_s"] < SPAN_S:
            at_s = fact.pop("at_s")
            lines.append(json.dumps({"at_s": at_s, "wall_s": round(WALL_S + at_s, 3)} | fact))
            streams += fact["event"]["kind"] == "StreamArrived"
    raw = ("\n".join(lines) + "\n").encode()
    span_s = SPAN_S - WARM_S
    raw_per_s = len(raw) / span_s
    packed_per_s = len(gzip.compress(raw, COMPRESS_LEVEL)) / span_s
    most, part = used.proxy.event_log_bytes, part_bytes(used.proxy.event_log_bytes)
    kept_s = (most - part) / packed_per_s + part / raw_per_s
    return {
        "streams_per_s": rate,
        "arrived": streams,
        "lines_per_s": round(len(lines) / span_s, 1),
        "bytes_per_s": round(raw_per_s),
        "compressed_bytes_per_s": round(packed_per_s),
        "hours": round(kept_s / 3600, 1),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{INSTANCES} instances, proxy.event_log_bytes {Config().proxy.event_log_bytes:,}",
        f"{'streams/s':>9} {'lines/s':>8} {'bytes/s':>8} {'compressed':>11} {'hours kept':>11}",
    ]
    lines += [
        f"{row['streams_per_s']:9g} {row['lines_per_s']:8} {row['bytes_per_s']:8} "
        f"{row['compressed_bytes_per_s']:11} {row['hours']:11}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record(SEED, timed=False)
    rows = [measure(rate) for rate in RATES]
    (judged,) = (row for row in rows if row["streams_per_s"] == BAR_RATE)
    passed = judged["hours"] >= BAR_HOURS
    verdict = "PASSED" if passed else "FAILED"
    text = f"{as_text(rows)}\n{verdict}: bar {BAR_HOURS:g} h at {BAR_RATE:g} streams/s"
    print(text)
    record.keep(options.out, "event_log_hours", {"bar_hours": BAR_HOURS, "rows": rows}, text)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
