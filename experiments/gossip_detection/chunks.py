"""Simulated hours without a death: 64 nodes, a share of all packets lost, no node stopped. Every
declared death is a false one.

A chunk is one seed for one hour; finished chunks are kept in a file, so that hours add up over runs
of unchanged code. The file names the commit and the time of the last run.
"""

import gc
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import kvrs.gossip
from experiments.gossip_detection.clusters import joined
from experiments.record import ROOT, commit_of
from kvrs.config.gossip import GossipSettings
from kvrs.gossip.detector import Suspicion
from kvrs.gossip.facts import Event, MemberChanged
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs_testkit.gossip_net import SimNode

NODES = 64
SIMULATED = ("detector", "exchange", "facts", "members", "node", "probes", "sender", "wire")


@dataclass(slots=True)
class Chunk:
    seed: int
    hours: float
    loss: float
    deaths: int = 0  # Nodes declared dead, each counted once.
    suspicions: int = 0  # Incarnations that were suspected.
    # Suspectors of one incarnation at any node (the name of the field in kept results).
    most_accusers: int = 0
    # Longest time of a suspicion at any node, as a share of the length of an unconfirmed one.
    nearest: float = 0.0
    packets: int = 0
    cpu_s: float = 0.0


class _Watch:
    def __init__(self, chunk: Chunk, settings: GossipSettings) -> None:
        self._chunk = chunk
        self._most_s = Suspicion(settings, NODES, 0.0).most_s
        self._dead: set[NodeId] = set()
        self._suspected: set[tuple[NodeId, int]] = set()
        self._since_s: dict[tuple[NodeId, NodeId], float] = {}

    def __call__(self, now_s: float, node: SimNode, event: Event) -> None:
        if not isinstance(event, MemberChanged):
            return
        since_s = self._since_s.pop((node.id, event.id), None)
        if since_s is not None:
            self._chunk.nearest = max(self._chunk.nearest, (now_s - since_s) / self._most_s)
            suspectors = len(node.gossip.members[event.id].suspectors)
            self._chunk.most_accusers = max(self._chunk.most_accusers, suspectors)
        if event.status is Status.SUSPECT:
            self._since_s[node.id, event.id] = now_s
            self._suspected.add((event.id, event.incarnation))
            self._chunk.suspicions = len(self._suspected)
            self._chunk.most_accusers = max(self._chunk.most_accusers, len(event.suspectors))
        elif event.status is Status.DEAD:
            self._dead.add(event.id)
            self._chunk.deaths = len(self._dead)


def run_chunk(seed: int, hours: float, loss: float) -> Chunk:
    os.nice(19 - os.nice(0))
    chunk, settings = Chunk(seed, hours, loss), GossipSettings()
    watch = _Watch(chunk, settings)
    net = joined(NODES, seed, settings, observer=watch)
    net.loss = loss
    # Nothing in it refers to itself in a circle, and looking for circles takes a tenth of the time.
    gc.collect()
    gc.disable()
    begun_s, before = time.process_time(), net.delivered
    net.run(net.now_s + hours * 3600)
    gc.enable()
    chunk.cpu_s, chunk.packets = time.process_time() - begun_s, net.delivered - before
    return chunk


def code_version() -> str:
    """Changes when what is simulated does."""
    folder = Path(kvrs.gossip.__file__).parent
    files = [
        *(folder / f"{name}.py" for name in SIMULATED),
        ROOT / "kvrs_testkit/gossip_net.py",
    ]
    settings = GossipSettings().model_dump_json().encode()
    return hashlib.sha256(b"".join([settings, *(path.read_bytes() for path in files)])).hexdigest()[
        :16
    ]


def kept(path: Path, loss: float) -> list[Chunk]:
    """Chunks of earlier runs with this code."""
    if not path.exists():
        return []
    saved = json.loads(path.read_text())
    if saved["code"] != code_version():
        return []
    return [
        chunk for chunk in (Chunk(**fields) for fields in saved["chunks"]) if chunk.loss == loss
    ]


def keep(path: Path, chunks: list[Chunk]) -> None:
    lines = ",\n".join(json.dumps(asdict(chunk)) for chunk in chunks)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    run = json.dumps({"commit": commit_of(ROOT), "at": at})
    # Replaced atomically: a kill in the middle loses nothing.
    part = path.with_suffix(".part")
    part.write_text(f'{{"run": {run}, "code": "{code_version()}", "chunks": [\n{lines}\n]}}\n')
    part.replace(path)


def run_chunks(
    path: Path,
    loss: float,
    want_h: float,
    budget_s: float,
    workers: int,
    tell: Callable[[list[Chunk]], None],
    chunk_h: float = 1.0,
) -> list[Chunk]:
    """Until there are `want_h` hours, the time is over, or SIGTERM; `tell` gets all that there are
    whenever one is finished.
    """
    chunks, begun_s, stop = kept(path, loss), time.monotonic(), list[int]()
    seed = max((chunk.seed for chunk in chunks), default=-1) + 1
    # Workers have this handler too: they end with the pool, and not in the middle of an hour.
    before = signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    with ProcessPoolExecutor(workers) as pool:
        running = set[Future[Chunk]]()
        while True:
            hours = sum(chunk.hours for chunk in chunks) + chunk_h * len(running)
            in_time = not stop and time.monotonic() - begun_s < budget_s
            if len(running) < workers and hours < want_h and in_time:
                running.add(pool.submit(run_chunk, seed, chunk_h, loss))
                seed += 1
                continue
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            chunks = sorted(
                chunks + [future.result() for future in done], key=lambda chunk: chunk.seed
            )
            keep(path, chunks)
            tell(chunks)
    signal.signal(signal.SIGTERM, before)
    return chunks
