"""The cost of the proxy to an undisturbed stream: latency per token, and requests to the instances.

    python -m experiments.healthy_path.run [--pairs 16] [--tokens 256] [--seconds 15] [--paced --out
    DIR]

The same prompt goes through the proxy and, by plain P/D, from this client straight to the same two
engines: prefill, then decode. Both ways pass the same taps, which live in this process. A token's
latency is the time from its passing the tap on its way out of the engine until the client has it.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from experiments.command_line import parser_of
from experiments.healthy_path.tap import Piece, Tap, token_events
from experiments.record import Record
from kvrs.config.file import Config, parse_config
from kvrs.net.proving import ProvingConnector, instance_keys
from kvrs_lab.report.metrics import percentile
from kvrs_testkit.processes import Processes, cpu_ticks, share_used

LIMIT_MS = 0.3
PACE = "opt-13b-a100-distserve-tp1"
WAYS = ("plain", "proxy")
COMPLETIONS = "POST /v1/completions"
LEASES = "POST /kvrs/v1/leases"
# Short, so that a run of seconds sees many renewals: one is due every third of it.
LEASE_S = 3.0
INTERVAL_S = LEASE_S / 3
CONCURRENT = (1, 32)
PROMPT_TOKENS = 128
VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream as the tap in front of decode and the client saw it."""

    sent_s: float
    passed: list[Piece]
    received: list[Piece]

    @property
    def latencies_ms(self) -> list[float]:
        return [
            (got - passed) * 1e3
            for (passed, _), (got, _) in zip(self.passed, self.received, strict=True)
        ]

    @property
    def tpot_ms(self) -> float:
        return (self.received[-1][0] - self.received[0][0]) / (len(self.received) - 1) * 1e3

    @property
    def ttft_ms(self) -> float:
        return (self.received[0][0] - self.sent_s) * 1e3

    @property
    def text(self) -> str:
        return "".join(json.loads(event)["choices"][0]["text"] for _, event in self.received)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests to the instances while so many streams at a time went through the proxy."""

    concurrent: int
    streams: int
    seconds: float
    requests: Counter[str]


class Client:
    """Knows both ways to a stream; `inner` proves connections to the instances."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        inner: aiohttp.ClientSession,
        proxy_port: int,
        prefill_port: int,
        decode_port: int,
        max_tokens: int,
    ) -> None:
        self._session, self._inner = session, inner
        self._proxy, self._prefill, self._decode = map(
            _completions_url, (proxy_port, prefill_port, decode_port)
        )
        self._max_tokens = max_tokens

    async def stream(self, way: str, prompt: list[int], salt: str) -> tuple[float, list[Piece]]:
        """The time of a request and all pieces of its response. Its salt keeps it out of the prefix
        cache of others.
        """
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
        sent_s = time.perf_counter()
        if way == "proxy":
            return sent_s, await self._read(self._session, self._proxy, body)
        hand_off = {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        async with self._inner.post(self._prefill, json=body | hand_off) as response:
            answer = await response.json()
        hand_off = {"kv_transfer_params": answer["kv_transfer_params"]}
        return sent_s, await self._read(self._inner, self._decode, body | hand_off)

    async def _read(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]
    ) -> list[Piece]:
        pieces: list[Piece] = []
        body = body | {"max_tokens": self._max_tokens, "stream": True}
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            while data := await response.content.readany():
                pieces.append((time.perf_counter(), data))
        return pieces


def _completions_url(port: int) -> str:
    return f"http://127.0.0.1:{port}/v1/completions"


class Experiment:
    def __init__(self, processes: Processes, max_tokens: int) -> None:
        self._processes = processes
        self._max_tokens = max_tokens
        self._choose = random.Random(0)
        self._salts = 0
        self.streams: dict[str, list[Stream]] = {way: [] for way in WAYS}
        self.requests: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
        self.crowds: list[Crowd] = []

    async def run(self, pairs: int, seconds: float, say: Callable[[str], None]) -> None:
        ports = {
            str(instance.id): instance.port
            for _, instance in self._processes.config.cluster.instances()
        }
        async with AsyncExitStack() as stack:
            self._taps = {name: Tap(port) for name, port in ports.items()}
            tapped = {name: await tap.start() for name, tap in self._taps.items()}
            for tap in self._taps.values():
                stack.callback(tap.close)
            config = _through_taps(self._processes.config, tapped)
            await asyncio.to_thread(self._processes.start_proxy, config)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
            )
            instances = [each for _, each in config.cluster.instances()]
            keys = instance_keys(self._processes.secret, instances)
            inner = await stack.enter_async_context(
                aiohttp.ClientSession(connector=ProvingConnector(keys, limit=0))
            )
            self._client = Client(
                session, inner, config.proxy.port, tapped["p0"], tapped["d0"], self._max_tokens
            )
            for index in range(-1, pairs):
                await self._pair(index)
            say(f"{pairs} pairs")
            for concurrent in CONCURRENT:
                self.crowds.append(await self._crowd(concurrent, seconds))
                say(f"{concurrent} at a time for {seconds:.0f} s")

    async def _pair(self, index: int) -> None:
        """The same prompt both ways, first one way, then the other; pair -1 warms up."""
        prompt = self._prompt()
        both = {}
        for way in WAYS if index % 2 else WAYS[::-1]:
            before = self._requests()
            self._taps["d0"].answers.clear()
            sent_s, pieces = await self._client.stream(way, prompt, self._salt())
            both[way] = Stream(sent_s, token_events(self._taps["d0"].answers), token_events(pieces))
            assert len(both[way].received) == len(both[way].passed) == self._max_tokens, (
                "one event per token is expected"
            )
            if index >= 0:
                self.streams[way].append(both[way])
                self.requests[way] += self._requests() - before
        assert both["proxy"].text == both["plain"].text, "the proxy changed the text"

    async def _crowd(self, concurrent: int, seconds: float) -> Crowd:
        """So many streams at a time through the proxy, each followed by another until the time is
        over.
        """
        before, started_s = self._requests(), time.perf_counter()
        streams = 0

        async def one_after_the_other() -> None:
            nonlocal streams
            while time.perf_counter() < started_s + seconds:
                await self._client.stream("proxy", self._prompt(), self._salt())
                streams += 1

        await asyncio.gather(*(one_after_the_other() for _ in range(concurrent)))
        return Crowd(
            concurrent, streams, time.perf_counter() - started_s, self._requests() - before
        )

    def _requests(self) -> Counter[str]:
        return sum((tap.requests for tap in self._taps.values()), Counter())

    def _prompt(self) -> list[int]:
        return [self._choose.randrange(2, VOCABULARY) for _ in range(PROMPT_TOKENS)]

    def _salt(self) -> str:
        self._salts += 1
        return f"stream {self._salts}"


def _through_taps(config: Config, ports: dict[str, int]) -> Config:
    """The same cluster as the proxy shall see it: each instance at its tap's port."""
    document = config.model_dump(mode="json")
    for node in document["cluster"]["nodes"]:
        for instance in node["instances"]:
            instance["port"] = ports[instance["id"]]
    return parse_config(document)


def settings(pace: str | None) -> Config:
    """One prefill and one decode instance."""
    nodes = [
        {"id": "n0", "instances": [{"id": "p0", "role": "prefill"}, {"id": "d0", "role": "decode"}]}
    ]
    cluster, transfer = {"engine": {"pace": pace}, "nodes": nodes}, {"lease_s": LEASE_S}
    # Requests are counted: those of self-tests, once per process, are left out.
    proxy = {"port": 0, "admin_port": 0, "self_test": False}
    return parse_config({"proxy": proxy, "cluster": cluster, "transfer": transfer})


def latency_figures(streams: dict[str, list[Stream]]) -> dict[str, dict[str, float]]:
    """Per way: latency p50 and p99 over all tokens, TPOT and TTFT as medians over streams; and what
    the proxy adds.
    """
    figures: dict[str, dict[str, float]] = {}
    for way, ones in streams.items():
        latencies = [latency for stream in ones for latency in stream.latencies_ms]
        p50, p99 = percentile(latencies, 50), percentile(latencies, 99)
        assert p50 is not None
        assert p99 is not None
        tpot = statistics.median(stream.tpot_ms for stream in ones)
        ttft = statistics.median(stream.ttft_ms for stream in ones)
        figures[way] = {
            "latency_ms_p50": p50,
            "latency_ms_p99": p99,
            "tpot_ms": tpot,
            "ttft_ms": ttft,
        }
    figures["added"] = {
        name: figures["proxy"][name] - value for name, value in figures["plain"].items()
    }
    return figures


def tpot_ratio(streams: dict[str, list[Stream]]) -> float:
    """Median over the pairs, so that what else the machine does at the time cancels out."""
    pairs = zip(streams["proxy"], streams["plain"], strict=True)
    return statistics.median(proxied.tpot_ms / plain.tpot_ms for proxied, plain in pairs)


def own_requests(requests: Counter[str], streams: int) -> float:
    """Requests per stream, without the lease renewals that are sent per instance and interval."""
    return (requests.total() - requests[LEASES]) / streams


def extra_requests(experiment: Experiment) -> float:
    """Requests per stream beyond those of plain P/D, in the worst of the proxy's phases."""
    plain = experiment.requests["plain"][COMPLETIONS] / len(experiment.streams["plain"])
    phases = [own_requests(experiment.requests["proxy"], len(experiment.streams["proxy"]))]
    phases += [own_requests(crowd.requests, crowd.streams) for crowd in experiment.crowds]
    return max(phases) - plain


def latency_table(figures: dict[str, dict[str, float]]) -> list[str]:
    lines = [f"{'':<8}{'latency ms p50':>15}{'p99':>8}{'TPOT ms p50':>13}{'TTFT ms p50':>13}"]
    for way, values in figures.items():
        cells = zip(values.values(), (15, 8, 13, 13), strict=True)
        lines.append(f"{way:<8}" + "".join(f"{value:{width}.3f}" for value, width in cells))
    return lines


def request_table(experiment: Experiment) -> list[str]:
    head = f"{'requests at the instances':<28}{'streams':>8}{'per stream':>11}"
    lines = [f"{head}{'renewals':>9}{'seconds':>8}{'renewals per interval':>22}"]
    for way in WAYS:
        requests, streams = experiment.requests[way], len(experiment.streams[way])
        per_stream = (
            requests[COMPLETIONS] / streams if way == "plain" else own_requests(requests, streams)
        )
        lines.append(f"{f'{way}, 1 at a time, in turns':<28}{streams:>8}{per_stream:>11.3f}")
    for crowd in experiment.crowds:
        name, renewals = f"proxy, {crowd.concurrent} at a time", crowd.requests[LEASES]
        row = (
            f"{name:<28}{crowd.streams:>8}{own_requests(crowd.requests, crowd.streams):>11.3f}"
            f"{renewals:>9}{crowd.seconds:>8.1f}"
        )
        lines.append(f"{row}{renewals * INTERVAL_S / crowd.seconds:>22.2f}")
    return lines


def main() -> int:
    parser = parser_of(__doc__, __file__)
    parser.add_argument("--pairs", type=int, default=16, help="of streams, one each way")
    parser.add_argument("--tokens", type=int, default=256, help="per stream")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each phase in which renewals are counted"
    )
    parser.add_argument(
        "--paced",
        action="store_true",
        help=f"tokens at the rate of {PACE}: the machine idles between them",
    )
    options = parser.parse_args()
    record = Record()

    with Processes(settings(PACE if options.paced else None)) as processes:
        processes.start("p0", "d0")
        processes.wait_ready("p0", "d0")
        experiment, ticks = Experiment(processes, options.tokens), cpu_ticks()
        asyncio.run(
            experiment.run(
                options.pairs, options.seconds, lambda line: print(line, file=sys.stderr)
            )
        )
        used = share_used(ticks, cpu_ticks())

    return report(record, experiment, options.out, used)


def report(record: Record, experiment: Experiment, out: Path, used: float) -> int:
    figures, extra, ratio = (
        latency_figures(experiment.streams),
        extra_requests(experiment),
        tpot_ratio(experiment.streams),
    )
    added_ms = figures["added"]["latency_ms_p50"]
    # Whatever the number of streams: one message per instance that retains something, which is p0,
    # and interval.
    batched = all(
        crowd.requests[LEASES] <= crowd.seconds / INTERVAL_S + 1 for crowd in experiment.crowds
    )
    met = added_ms <= LIMIT_MS and extra == 0 and batched
    verdict = f"renewals batched: {'yes' if batched else 'NO'}: {'met' if met else 'MISSED'}"
    text = "\n".join(
        [
            *latency_table(figures),
            f"TPOT through the proxy / plain: {ratio:.3f} (median of "
            f"{len(experiment.streams['plain'])} pairs)",
            "",
            *request_table(experiment),
            "",
            f"added latency per token, p50: {added_ms:.3f} ms (bar: {LIMIT_MS} ms); "
            f"extra requests per stream: {extra:.3f} (bar: 0); {verdict}",
            f"CPU in use during the run: {used:.0%}",
        ]
    )
    print(text)
    document = {
        "met": met,
        "limit_ms_p50": LIMIT_MS,
        "cpu_used_during": round(used, 3),
        "pairs": len(experiment.streams["plain"]),
        "tokens": len(experiment.streams["plain"][0].received),
        "figures": {
            way: {name: round(value, 4) for name, value in values.items()}
            for way, values in figures.items()
        },
        "tpot_ratio": round(ratio, 4),
        "extra_requests_per_stream": extra,
        "requests": experiment.requests,
        "lease_interval_s": INTERVAL_S,
        "crowds": [
            {
                "concurrent": crowd.concurrent,
                "streams": crowd.streams,
                "seconds": round(crowd.seconds, 2),
                "requests": crowd.requests,
            }
            for crowd in experiment.crowds
        ],
        "per_stream": {
            way: [
                {
                    "latency_ms_p50": round(statistics.median(stream.latencies_ms), 4),
                    "tpot_ms": round(stream.tpot_ms, 4),
                }
                for stream in streams
            ]
            for way, streams in experiment.streams.items()
        },
    }
    record.keep(out, "healthy_path", document, text)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
