"""Does the replay client keep to its trace? Offered against asked rate, streaming, and how long a
trace takes to load.

    python -m experiments.replay_client.run [--rate 200] [--seconds 20] [--trace FILE]

The server is a process of its own that answers every request with a stream of tokens at a fixed
pace, so that whatever is late here is the client.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import uvloop
from aiohttp import web

from experiments.record import Record
from kvrs.load.open_loop import replay
from kvrs.report import metrics
from kvrs.traces.formats import load_trace
from kvrs.traces.generator import GeneratorSettings, generate
from kvrs.traces.mooncake import write_mooncake
from kvrs.traces.records import ReplayRequest

RATE_TOLERANCE = 0.01
LOADER_REQUESTS = 12_031
LOADER_LIMIT_S = 1.0
REPEATS = 5
PROMPT_TOKENS = 64
TOKENS = 8
TOKEN_PAUSE_S = 0.02


def serve(ports: Connection) -> None:
    """Runs in a process of its own: streams of `TOKENS` tokens, one every `TOKEN_PAUSE_S`."""
    uvloop.run(_serve(ports))


async def _serve(ports: Connection) -> None:
    app = web.Application()
    app.router.add_post("/v1/completions", _complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
    ports.send(runner.addresses[0][1])
    await asyncio.Event().wait()


async def _complete(request: web.Request) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for token in range(TOKENS):
        await asyncio.sleep(TOKEN_PAUSE_S)
        choice = {
            "text": "x",
            "index": 0,
            "finish_reason": "length" if token + 1 == TOKENS else None,
            "token_ids": [token],
        }
        await response.write(
            b"data: " + json.dumps({"id": "cmpl-s", "choices": [choice]}).encode() + b"\n\n"
        )
    await response.write(b"data: [DONE]\n\n")
    return response


async def drive(url: str, rate: float, seconds: float) -> dict[str, Any]:
    trace = generate(GeneratorSettings(requests=int(rate * seconds), requests_per_s=rate), seed=1)
    prompt = tuple(range(PROMPT_TOKENS))
    requests = [ReplayRequest(request.arrival_s, prompt, TOKENS) for request in trace.requests]
    started_s = time.process_time()
    records = await replay(url, requests)
    rates = metrics.request_rates(records)
    assert rates is not None
    return {
        "requests": len(records),
        "completed": sum(record.completed for record in records),
        "asked_per_s": rates[0],
        "offered_per_s": rates[1],
        "off_by": abs(rates[1] / rates[0] - 1),
        "lag_s": metrics.spread(record.lag_s for record in records),
        "ttft_s": metrics.spread(map(metrics.arrival_ttft_s, records)),
        "tbt_s": metrics.spread(gap for record in records for gap in metrics.gaps_s(record)),
        "client_cpu_s": time.process_time() - started_s,
    }


def load_seconds(path: Path) -> tuple[int, list[float]]:
    """How many requests a file has, and the seconds of each time it was read."""
    seconds = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        requests = len(load_trace(path).requests)
        seconds.append(time.perf_counter() - started_s)
    return requests, seconds


def measure_loader(path: Path | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        source = "generated" if path is None else path.name
        if path is None:
            path = Path(directory) / "generated.jsonl"
            write_mooncake(generate(GeneratorSettings(requests=LOADER_REQUESTS), seed=1), path)
        requests, seconds = load_seconds(path)
    return {
        "trace": source,
        "requests": requests,
        "seconds_p50": median(seconds),
        "seconds_max": max(seconds),
    }


def measure_client(rate: float, seconds: float) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    own, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        return uvloop.run(drive(f"http://127.0.0.1:{own.recv()}", rate, seconds))
    finally:
        server.kill()
        server.join()


def words(document: dict[str, Any]) -> str:
    client, loader = document["client"], document["loader"]
    lag, tbt = client["lag_s"], client["tbt_s"]
    return "\n".join(
        (
            f"client: {client['completed']} of {client['requests']} streams, offered "
            f"{client['offered_per_s']:.2f} of "
            f"{client['asked_per_s']:.2f} requests/s (off by {client['off_by']:.3%}; at "
            f"most {RATE_TOLERANCE:.0%}): "
            f"{'met' if document['client_met'] else 'MISSED'}",
            f"  send lag p50 {lag['p50'] * 1000:.2f} ms, p99 {lag['p99'] * 1000:.2f} ms, "
            f"worst {lag['max'] * 1000:.1f} ms; "
            f"TBT p50 {tbt['p50'] * 1000:.1f} ms of {TOKEN_PAUSE_S * 1000:.0f} ms; "
            f"client CPU {client['client_cpu_s']:.1f} s",
            f"loader: {loader['requests']} requests ({loader['trace']}) in "
            f"{loader['seconds_p50']:.3f} s, worst "
            f"{loader['seconds_max']:.3f} s (at most {LOADER_LIMIT_S:.0f} s): "
            f"{'met' if document['loader_met'] else 'MISSED'}",
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--trace",
        type=Path,
        help="Mooncake's conversation_trace.jsonl; without it, a generated trace of its size",
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    record = Record()

    client, loader = measure_client(options.rate, options.seconds), measure_loader(options.trace)

    document = {
        "client": client,
        "client_met": client["off_by"] <= RATE_TOLERANCE
        and client["completed"] == client["requests"],
        "loader": loader,
        "loader_met": loader["seconds_max"] <= LOADER_LIMIT_S
        and loader["requests"] >= LOADER_REQUESTS,
    }
    text = words(document)
    print(text)
    record.keep(options.out, "replay_client", document, text)


if __name__ == "__main__":
    main()
