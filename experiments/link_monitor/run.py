"""The estimate of a link whose rate changes, and what decisions taken on it cost.

    python -m experiments.link_monitor.run [--seed 0] [--scale 1.0] [--times 1]

Two hosts as network namespaces; the kernel's token bucket sets the rate of the link between them. A
real page server sends, a real puller receives and measures. Nothing is paced.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import socket
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments.record import Record
from kvrs.config.transfer import TransferSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.profiles import catalog
from kvrs.protocol.tags import TAG_BYTES, Tag
from kvrs.transfer.links import SendingLinks
from kvrs.transfer.meter import LinkMeter
from kvrs.transfer.peers import Identity, Peer, PinnedPages, PullRequest
from kvrs.transfer.puller import PagePuller
from kvrs.transfer.send_faults import SendingFaults
from kvrs.transfer.server import PageServer
from tests.networks.network_cluster import DESK, Network, missing

SECRET = b"only for this measurement"
SETTINGS = TransferSettings(probe_interval_s=0.25)
TIME_CONSTANTS = 5
BAR_ERROR = 0.15
BAR_PROBES = 0.01
BAR_REGRET = 0.10

PAGE_BYTES = 1 << 16
REGION_PAGES = 1024
LOOK_S = 0.1
STARTS = 20
START_S = 0.8

PROFILE = "opt-13b-a100-distserve-tp1"
# Links of 12.5 to 125 MB/s are slower than a cluster's by this, and so is the KV of the decisions.
SHRINK = 100
# What the kernel lets pass at once: a millisecond of the link, with so much at least.
BURST_S, BURST_BYTES = 0.001, 1 << 17
DECISION_TOKENS = (512, 1024, 1475, 2000)
MB = 1e6


@dataclass(frozen=True)
class Step:
    """The rate of the link from a moment on."""

    at_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Scenario:
    name: str
    steps: tuple[Step, ...]
    length_s: float
    transfers: tuple[float, float] | None  # Least and most bytes; None: probes alone.
    pause_s: float = 0.3  # Between transfers, on average.
    hogs: int = 0  # Threads of the receiver's own CPU that never rest.
    cross: tuple[float, float] | None = None  # While another flow shares the link.
    times: float = 1.0  # As fast as links of 12.5 to 125 MB/s.

    def rate(self, at_s: float) -> float:
        """The rate of a transfer."""
        index = bisect_right([step.at_s for step in self.steps], at_s) - 1
        whole = self.steps[max(0, index)].bytes_per_s
        shared = self.cross is not None and self.cross[0] <= at_s < self.cross[1]
        return whole / 2 if shared else whole

    def seconds_for(self, size_bytes: float, at_s: float) -> float:
        """The time of a transfer that begins at a moment, through all changes of the rate."""
        edges = [step.at_s for step in self.steps] + list(self.cross or ())
        now_s = at_s
        for edge_s in sorted(edge for edge in edges if edge > at_s):
            carried = (edge_s - now_s) * self.rate(now_s)
            if carried >= size_bytes:
                break
            size_bytes -= carried
            now_s = edge_s
        return now_s + size_bytes / self.rate(now_s) - at_s


def scenarios(scale: float, times: float = 1.0) -> list[Scenario]:
    slow, fast, half_s = 12.5 * MB * times, 125 * MB * times, 20.0 * scale
    steps = (Step(0, slow), Step(half_s, fast), Step(2 * half_s, slow))
    ramp = tuple(
        Step(2.0 + 0.25 * number, slow * 10 ** (number / 80 / scale))
        for number in range(int(80 * scale) + 1)
    )
    waves = tuple(
        Step(5.0 * number, (25, 100)[number % 2] * MB * times)
        for number in range(int(8 * scale) or 2)
    )
    sizes = (1 * MB, 64 * MB)
    found = [
        Scenario("steps", steps, 3 * half_s, sizes),
        Scenario("steps, probes alone", steps, 3 * half_s, None),
        Scenario("steps, starved reader", steps, 3 * half_s, sizes, hogs=4),
        Scenario("one long transfer", steps, 3 * half_s, (1000 * MB, 1000 * MB), pause_s=0.01),
        Scenario("ramp", (Step(0, slow), *ramp), 2 * half_s, sizes),
        Scenario("oscillation, 10 s", waves, 5.0 * len(waves), sizes),
        Scenario("cross traffic", (Step(0, fast),), 3 * half_s, sizes, cross=(half_s, 2 * half_s)),
    ]
    return [replace(each, times=times) for each in found]


@dataclass
class Estimator:
    """One rule over the same samples."""

    name: str
    update: Callable[[list[float]], float]


def _harmonic(samples: list[float]) -> float:
    last = samples[-5:]
    return len(last) / sum(1 / rate for rate in last)


def _fixed_weight(samples: list[float]) -> float:
    estimate = samples[0]
    for rate in samples[1:]:
        estimate += 0.3 * (rate - estimate)
    return estimate


PLAIN = (
    Estimator("last sample", lambda samples: samples[-1]),
    Estimator("EWMA, weight 0.3", _fixed_weight),
    Estimator("harmonic mean of 5", _harmonic),
)
OURS = "kvrs"
NAMES = (OURS, *(each.name for each in PLAIN))


class SampledMeter(LinkMeter):
    """Also keeps every sample, for the rules beside it."""

    def __init__(self) -> None:
        super().__init__(SETTINGS.link, 1 << 15)
        self.samples: list[float] = []

    def _take_sample(self, link: Any) -> None:
        before_s = link.measured_s
        super()._take_sample(link)
        if link.measured_s != before_s:
            self.samples.append(link.latest_bytes_per_s)


class SampledPuller(PagePuller):
    def __init__(self, identity: Callable[[], Identity]) -> None:
        super().__init__(identity, SECRET, SETTINGS, time.monotonic)
        self._meter = self.meter = SampledMeter()


class Memory:
    """Pages of one region; a tag names a page, and the region is used again and again."""

    def __init__(self) -> None:
        self._region = memoryview(os.urandom(PAGE_BYTES * REGION_PAGES))

    async def pin(self, request: PullRequest) -> PinnedPages:
        starts = [int.from_bytes(tag) % REGION_PAGES * PAGE_BYTES for tag in request.tags]
        return PinnedPages(
            [self._region[start : start + PAGE_BYTES] for start in starts], None, None
        )

    def unpin(self, pinned: PinnedPages) -> None:
        assert pinned.token is None


def _identity(instance: str, node: str) -> Identity:
    return Identity(
        InstanceId(instance), NodeId(node), epoch=1, fingerprint="none", page_bytes=PAGE_BYTES
    )


def _send(network: Network, ports: Connection) -> None:
    """Process of host n0: a page server, and a flow that another program sends."""

    async def serve() -> None:
        server = PageServer(
            lambda: _identity("sender", "n0"),
            Memory(),
            SECRET,
            SETTINGS,
            SendingLinks(SETTINGS, SendingFaults(), NodeId("n0")),
        )
        pages = await server.start(network.addresses["n0"], 0)
        flow = await asyncio.start_server(_flood, network.addresses["n0"], 0)
        ports.send((pages, flow.sockets[0].getsockname()[1]))
        await asyncio.Event().wait()

    network.enter("n0")
    asyncio.run(serve())


async def _flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    piece = bytes(1 << 18)
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()


@dataclass
class Trial:
    """The observations of one scenario: by moment, the true rate and every rule's."""

    scenario: Scenario
    at_s: list[float] = field(default_factory=list)
    seen: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    probe_share: float | None = None
    transfers: int = 0

    def errors(self, name: str) -> Iterator[tuple[float, float]]:
        for at_s, estimate in zip(self.at_s, self.seen[name], strict=True):
            yield at_s, abs(estimate / self.scenario.rate(at_s) - 1)

    def settled_error(self, name: str) -> float | None:
        """The mean from five time constants after a step to the next one."""
        wait_s = TIME_CONSTANTS * SETTINGS.link.time_constant_s
        edges = [step.at_s for step in self.scenario.steps] + list(self.scenario.cross or ())
        found = [
            error
            for at_s, error in self.errors(name)
            if not any(edge <= at_s < edge + wait_s for edge in edges)
        ]
        return fmean(found) if found else None

    def reactions_s(self, name: str) -> list[float]:
        """Seconds until the error after each step is within the bar for half a second."""
        edges = [step.at_s for step in self.scenario.steps[1:]]
        found = []
        ends = [*edges[1:], self.scenario.length_s]
        for edge, end in zip(edges, ends, strict=False):
            within = [(at_s, error) for at_s, error in self.errors(name) if edge <= at_s < end]
            for index, (at_s, _) in enumerate(within):
                if all(error <= BAR_ERROR for _, error in within[index : index + 5]):
                    found.append(at_s - edge)
                    break
            else:
                found.append(end - edge)
        return found

    def regret(self, name: str) -> float:
        """The excess of migrating or recomputing by this rule, at every moment and length, over a
        rule that knows the rate at that moment and all that follow.
        """
        chosen = best = 0.0
        for at_s, estimate in zip(self.at_s, self.seen[name], strict=True):
            for tokens in DECISION_TOKENS:
                size_bytes, recompute_s = _costs(tokens, self.scenario.times)
                migrate_s = self.scenario.seconds_for(size_bytes, at_s)
                chosen += migrate_s if size_bytes / estimate <= recompute_s else recompute_s
                best += min(migrate_s, recompute_s)
        return chosen / best - 1


def _costs(tokens: int, times: float) -> tuple[float, float]:
    """Bytes to move, and seconds to compute: the break-even lies within the rates of the link."""
    geometry = catalog.kv_geometry(PROFILE)
    size_bytes = tokens * geometry.bytes_per_token * times / SHRINK
    return size_bytes, catalog.prefill_table(PROFILE).seconds_for(tokens)


class Bench:
    def __init__(self, network: Network, pages: int, flow: int, seed: int) -> None:
        self._network = network
        self._peer = Peer(InstanceId("sender"), NodeId("n0"), network.addresses["n0"], pages)
        self._flow = (network.addresses["n0"], flow)
        self._random = random.Random(seed)
        self._region = memoryview(bytearray(PAGE_BYTES * REGION_PAGES))

    async def run(self, scenario: Scenario) -> Trial:
        trial = Trial(scenario)
        puller = SampledPuller(lambda: _identity("receiver", "n1"))
        self._throttle(scenario.rate(0))
        resting = threading.Event()
        hogs = [
            threading.Thread(target=_hog, args=(resting,), daemon=True)
            for _ in range(scenario.hogs)
        ]
        for hog in hogs:
            hog.start()
        sent = self._network.sent_bytes("n0")
        since_s = time.monotonic()
        try:
            async with asyncio.timeout(scenario.length_s + 60):
                await asyncio.gather(
                    self._change(scenario, since_s),
                    self._look(trial, puller, since_s),
                    self._load(trial, puller, since_s),
                    self._share(scenario, since_s),
                )
        finally:
            resting.set()
            await puller.close()
        if scenario.transfers is None:
            capacity = sum(
                scenario.rate(0.1 * index) * 0.1 for index in range(int(scenario.length_s * 10))
            )
            trial.probe_share = (self._network.sent_bytes("n0") - sent) / capacity
        return trial

    async def _change(self, scenario: Scenario, since_s: float) -> None:
        for step in scenario.steps[1:]:
            await asyncio.sleep(since_s + step.at_s - time.monotonic())
            await asyncio.to_thread(self._throttle, step.bytes_per_s)

    def _throttle(self, bytes_per_s: float) -> None:
        self._network.throttle("n0", bytes_per_s, max(BURST_BYTES, int(BURST_S * bytes_per_s)))

    async def _look(self, trial: Trial, puller: SampledPuller, since_s: float) -> None:
        while (at_s := time.monotonic() - since_s) < trial.scenario.length_s:
            samples = puller.meter.samples
            if samples and (measured := puller.links()):
                trial.at_s.append(at_s)
                trial.seen[OURS].append(measured[NodeId("n0")].bytes_per_s)
                for rule in PLAIN:
                    trial.seen[rule.name].append(rule.update(samples))
            await asyncio.sleep(LOOK_S)

    async def _load(self, trial: Trial, puller: SampledPuller, since_s: float) -> None:
        """Transfers and probes; what is under way at the end is given up."""
        left_s = since_s + trial.scenario.length_s - time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._transfer(trial, puller, since_s)

    async def _transfer(self, trial: Trial, puller: SampledPuller, since_s: float) -> None:
        scenario = trial.scenario
        while True:
            if scenario.transfers is None:
                await puller.probe(self._peer)
                await asyncio.sleep(0.05)
                continue
            least, most = scenario.transfers
            size = int(least * (most / least) ** self._random.random())
            await self._pull(puller, size)
            trial.transfers += 1
            pause_s = self._random.expovariate(1 / scenario.pause_s)
            until_s = min(time.monotonic() + pause_s, since_s + scenario.length_s)
            while time.monotonic() < until_s:
                await puller.probe(self._peer)
                await asyncio.sleep(min(0.05, max(0.0, until_s - time.monotonic())))

    async def _pull(self, puller: SampledPuller, size_bytes: int) -> None:
        pages = max(1, size_bytes // PAGE_BYTES)
        for first in range(0, pages, REGION_PAGES):
            count = min(REGION_PAGES, pages - first)
            request = PullRequest(
                tuple(Tag((first + index).to_bytes(TAG_BYTES)) for index in range(count))
            )
            views = [
                self._region[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
                for index in range(count)
            ]
            result = await puller.pull(self._peer, request, views, None)
            assert result.full_pages == count, result

    async def _share(self, scenario: Scenario, since_s: float) -> None:
        if scenario.cross is None:
            return
        begin_s, end_s = scenario.cross
        await asyncio.sleep(since_s + begin_s - time.monotonic())
        with socket.socket() as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._flow)
            scratch = bytearray(1 << 18)
            while time.monotonic() - since_s < end_s:
                await loop.sock_recv_into(sock, scratch)


def _hog(resting: threading.Event) -> None:
    while not resting.is_set():
        sum(range(20_000))


async def start_errors(bench: Bench, times: float) -> list[float]:
    """Errors of estimates of pullers that have just begun to probe an idle link, whose bucket of
    tokens is full.
    """
    first = Step(0, 12.5 * MB * times)
    errors = []
    for _ in range(STARTS):
        before = Scenario("before a start", (first,), 0.5, (64 * MB, 64 * MB), times=times)
        await bench.run(before)
        trial = await bench.run(Scenario("start", (first,), START_S, None, times=times))
        errors.append(abs(trial.seen[OURS][-1] / first.bytes_per_s - 1))
    return errors


async def measure(seed: int, scale: float, times: float) -> tuple[list[Trial], list[float]]:
    context = multiprocessing.get_context("fork")
    with Network("n0", "n1") as network:
        ours, theirs = context.Pipe()
        sender = context.Process(target=_send, args=(network, theirs), daemon=True)
        sender.start()
        pages, flow = ours.recv()
        network.enter("n1")
        try:
            bench = Bench(network, pages, flow, seed)
            trials = []
            for scenario in scenarios(scale, times):
                trials.append(await bench.run(scenario))
                print(f"  {scenario.name}: {len(trials[-1].at_s)} looks", flush=True)
            return trials, await start_errors(bench, times)
        finally:
            network.enter(DESK)
            sender.kill()
            sender.join()


def as_rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    return [
        {
            "scenario": trial.scenario.name,
            "rule": name,
            "mean_error": fmean(error for _, error in trial.errors(name)),
            "settled_error": trial.settled_error(name),
            "reaction_s": trial.reactions_s(name) if len(trial.scenario.steps) <= 3 else [],
            "regret": trial.regret(name),
            "probe_share": trial.probe_share,
            "transfers": trial.transfers,
        }
        for trial in trials
        for name in NAMES
    ]


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "error of the estimate, mean over all moments and over those 5 time constants after a "
        "step;",
        "time until it is within 15 % after each step; cost of decisions above one that knows the "
        "rate",
        f"{'scenario':24}{'rule':20}{'error':>8}{'settled':>9}{'reaction s':>14}{'regret':>9}"
        f"{'probes':>8}",
    ]
    for row in rows:
        settled = "-" if row["settled_error"] is None else f"{row['settled_error']:.1%}"
        reaction = " ".join(f"{each:.1f}" for each in row["reaction_s"]) or "-"
        probes = f"{row['probe_share']:.2%}" if row["probe_share"] and row["rule"] == OURS else ""
        lines.append(
            f"{row['scenario']:24}{row['rule']:20}{row['mean_error']:>8.1%}{settled:>9}"
            f"{reaction:>14}{row['regret']:>9.1%}{probes:>8}".rstrip()
        )
    return "\n".join(lines)


def start_text(errors: Sequence[float], times: float) -> str:
    return (
        f"idle link of {12.5 * times:g} MB/s, {START_S} s after the first probe, "
        f"{len(errors)} times: error {median(errors):.1%} (p50), {max(errors):.1%} at most"
    )


def verdict(rows: Sequence[dict[str, Any]]) -> tuple[bool, str]:
    of_ours = [row for row in rows if row["rule"] == OURS]
    steps = [row for row in of_ours if row["settled_error"] is not None]
    worst = max(steps, key=lambda row: row["settled_error"])
    probes = max(row["probe_share"] or 0.0 for row in of_ours)
    regrets = {name: fmean(r["regret"] for r in rows if r["rule"] == name) for name in NAMES}
    passed = (
        worst["settled_error"] <= BAR_ERROR and probes <= BAR_PROBES and regrets[OURS] <= BAR_REGRET
    )
    return passed, "\n".join(
        [
            "",
            f"worst settled error {worst['settled_error']:.1%} ({worst['scenario']}), bar "
            f"{BAR_ERROR:.0%}; probes {probes:.2%}, bar {BAR_PROBES:.0%}",
            "regret in all scenarios: "
            + ", ".join(f"{name} {value:.1%}" for name, value in regrets.items())
            + f"; bar {BAR_REGRET:.0%}",
            "PASSED" if passed else "FAILED",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the scenarios' lengths, more than 0.5"
    )
    parser.add_argument(
        "--times", type=float, default=1.0, help="as fast as links of 12.5 to 125 MB/s"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if (why := missing()) is not None:
        print(f"cannot run here: {why}")
        return 2
    record = Record(options.seed)
    trials, starts = asyncio.run(measure(options.seed, options.scale, options.times))
    rows = as_rows(trials)
    passed, end = verdict(rows)
    rates = " to ".join(f"{rate * options.times:g}" for rate in (12.5, 125))
    head = f"a link of {rates} MB/s"
    text = "\n".join([head, as_text(rows), start_text(starts, options.times), end])
    print(text)
    name = "link_monitor" if options.times == 1 else f"times_{options.times:g}"
    figures = {"times": options.times, "rows": rows, "starts": starts}
    is_void = record.keep(options.out, name, figures, text)
    return 2 if is_void else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
