"""Simulated hours without a death: 64 nodes, a share of all packets lost, no node stopped. Every
declared death is a false one. A chunk is one seed for some time.
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.gossip_detection.clusters import joined
from kvrs.config.gossip import GossipSettings
from kvrs.gossip.detector import Suspicion
from kvrs.gossip.facts import Event, MemberChanged
from kvrs.gossip.wire import Status
from kvrs.ids import NodeId
from kvrs_testkit.gossip_net import SimNode

NODES = 64


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


def run_chunks(
    loss: float, hours: int, budget_s: float, workers: int, tell: Callable[[list[Chunk]], None]
) -> list[Chunk]:
    """An hour of each seed, until there are so many or the time is over; `tell` gets all that there
    are whenever some are finished.
    """
    chunks, begun_s = list[Chunk](), time.monotonic()
    with ProcessPoolExecutor(workers) as pool:
        for first in range(0, hours, workers):
            if time.monotonic() - begun_s > budget_s:
                break
            seeds = range(first, min(hours, first + workers))
            chunks += pool.map(partial(run_chunk, hours=1.0, loss=loss), seeds)
            tell(chunks)
    return chunks


def figures_of(chunks: Sequence[Chunk], loss: float) -> dict[str, Any]:
    return {
        "hours": sum(chunk.hours for chunk in chunks),
        "loss": loss,
        "deaths": sum(chunk.deaths for chunk in chunks),
        "suspicions": sum(chunk.suspicions for chunk in chunks),
        "most_accusers": max((chunk.most_accusers for chunk in chunks), default=0),
        "nearest": max((chunk.nearest for chunk in chunks), default=0.0),
        "packets": sum(chunk.packets for chunk in chunks),
        "cpu_s": sum(chunk.cpu_s for chunk in chunks),
    }
