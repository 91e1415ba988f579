"""Instances that are paused as processes, and a machine without processors to spare.

Mock engines and the load client of experiments/bench_proxy, and `kvrs proxy`. As vLLM the engines
cannot know which token of a stream that was sent again is the next one, so that they are paused
only for as long as attempts last.
"""

import contextlib
import os
import re
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.bench_proxy import proxies
from experiments.bench_proxy.engines import (
    PAIR,
    VLLM_PAIR,
    Engines,
    Load,
    Programs,
    compile_programs,
)
from experiments.bench_proxy.proxies import Bench, Running
from kvrs_testkit.processes import spinning

Row = dict[str, Any]
TOKEN_GAP_S = 10.0  # The default of proxy.token_gap_s.
LONG_GAP_S = 15.0  # For an instance that may be silent for longer.
# Whether the engines are as vLLM, how long, and `proxy.token_gap_s`: within it, and beyond it.
PAUSES = (
    (True, 3.0, TOKEN_GAP_S),
    (False, 3.0, TOKEN_GAP_S),
    (True, 12.0, LONG_GAP_S),
    (False, 12.0, LONG_GAP_S),
    (False, 12.0, TOKEN_GAP_S),
)
TWO_DECODES = (*PAIR, replace(PAIR[1], id="d1", node="n2"))
BEFORE_S, AFTER_S = 2.0, 4.0  # Of a pause, or of the load beside it.
SPINNING = 4
STREAMS = {"paused": 256, "busy": 500}
TOKENS_PER_S = {"paused": 200, "busy": 20}  # Of each stream.
LATEST_S = 300.0  # A stream that is open then counts as broken.
_SERIES = {
    "attempts_failed": "kvrs_attempts_failed_total",
    "instances_lost": "kvrs_worker_deaths_total",
    "recoveries": "kvrs_recoveries_total",
}


def measure(part: str, directory: Path, streams: int | None = None) -> list[Row]:
    """The rows of "paused" or "busy"."""
    programs = compile_programs(directory)
    count = streams or STREAMS[part]
    if part == "busy":
        return [busy(programs, count)]
    return [
        paused(programs, count, pause_s, gap_s, is_vllm=is_vllm)
        for is_vllm, pause_s, gap_s in PAUSES
    ]


def paused(
    programs: Programs, streams: int, pause_s: float, token_gap_s: float, *, is_vllm: bool
) -> Row:
    """The only decode instance is stopped while all streams run."""
    prefill, decode = VLLM_PAIR if is_vllm else PAIR
    lasts_s = BEFORE_S + pause_s + AFTER_S
    with Engines(programs, (prefill,)) as engines, Engines(programs, (decode,)) as stopped:
        engines.instances, engines.ports = (prefill, decode), engines.ports | stopped.ports
        opened = _load(programs, engines, "paused", streams, lasts_s, token_gap_s)
        with opened as (running, load):
            time.sleep(BEFORE_S)
            os.kill(stopped.pid, signal.SIGSTOP)
            try:
                time.sleep(pause_s)
            finally:
                os.kill(stopped.pid, signal.SIGCONT)
            result = load.result()
            counts = _counts(running)
    row = {"part": "paused", "engines": "vllm" if is_vllm else "kvrs", "pause_s": pause_s}
    return row | {"token_gap_s": token_gap_s, "streams": streams} | counts | _ends(result)


def busy(programs: Programs, streams: int) -> Row:
    """Processes that spin want all processors, while another instance could take every stream."""
    lasts_s = 2 * BEFORE_S + 20.0
    with (
        Engines(programs, TWO_DECODES) as engines,
        _load(programs, engines, "busy", streams, lasts_s, TOKEN_GAP_S) as (running, load),
    ):
        time.sleep(BEFORE_S)
        with spinning(SPINNING):
            result = load.result()
            counts = _counts(running)
    return {"part": "busy", "spinning": SPINNING, "streams": streams} | counts | _ends(result)


@contextmanager
def _load(
    programs: Programs,
    engines: Engines,
    part: str,
    streams: int,
    lasts_s: float,
    token_gap_s: float,
) -> Iterator[tuple[Running, Load]]:
    """One stream in each slot, which lasts so long without a disturbance; all are open."""
    rate = TOKENS_PER_S[part]
    options = {
        "streams": streams,
        "tokens": int(rate * lasts_s),
        "rate": rate * 1000,
        "restart": 0,
        "spread_ms": 1000,
        "limit_ms": int(LATEST_S * 1000),
    }
    with tempfile.TemporaryDirectory(prefix="kvrs-paused-") as directory:
        bench = Bench(engines, Path(directory), Path(directory), None)
        start = proxies.kvrs(token_gap_s=token_gap_s, keep_alive_s=None)
        with start(bench) as running, Load(programs, running.port, options) as load:
            load.wait_open()
            yield running, load


def _counts(running: Running) -> dict[str, int]:
    """Counts of failed attempts, lost instances and recoveries at the proxy."""
    url = f"http://127.0.0.1:{running.admin_port}/metrics"
    with contextlib.closing(urllib.request.urlopen(url, timeout=60)) as answer:
        text = answer.read().decode()
    return {
        name: round(sum(map(float, re.findall(rf"^{series}(?:{{.*}})? (\S+)$", text, re.M))))
        for name, series in _SERIES.items()
    }


def _ends(result: Row) -> Row:
    return {name: result[name] for name in ("whole", "broken", "fault")}


def is_met(row: Row) -> bool:
    """No stream is broken, and nothing is given up but after the longest silence."""
    is_long = row["part"] == "paused" and row["pause_s"] >= row["token_gap_s"]
    given_up = sum(row[name] for name in _SERIES)
    return not row["broken"] and row["whole"] == row["streams"] and (is_long or not given_up)


def as_text(rows: list[Row]) -> str:
    return "\n".join(
        (
            f"the only decode instance ({row['engines']}) is paused for {row['pause_s']:g} s"
            f" (token_gap_s {row['token_gap_s']:g})"
            if row["part"] == "paused"
            else f"{row['spinning']} spinning processes"
        )
        + f", {row['streams']} streams: attempts failed {row['attempts_failed']}, instances lost "
        f"{row['instances_lost']}, recoveries {row['recoveries']}, streams broken {row['broken']}"
        + ("" if is_met(row) else ": MISSED")
        for row in rows
    )
