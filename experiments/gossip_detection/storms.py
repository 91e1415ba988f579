"""Thousands of short runs of small clusters under chaos (`kvrs_testkit/gossip_chaos.py`); the tests
run dozens.

Every seed: 2 to 10 nodes with clocks that run wrong, 12 random faults (deaths, restarts, stops with
or without the node's own clock, partitions of both kinds, clocks set forward or back)
with edits of records between them, while a share of all packets is lost, doubled, and overtakes
others. Then 40 s without faults: all live nodes have to agree on the live nodes and their
records.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvrs_testkit.gossip_chaos import ChaosNetwork

BLOWS = 12
CALM_S = 40.0


@dataclass(slots=True)
class Storms:
    seeds: int = 0
    hours: float = 0.0
    packets: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # Seeds with a violated invariant.


def storms(seeds: range) -> Storms:
    found, faults = Storms(), Counter[str]()
    for seed in seeds:
        chaos = ChaosNetwork(seed)
        try:
            chaos.run_with_faults(BLOWS)
            chaos.run_without_faults(CALM_S)
            chaos.assert_agreed()
        except (AssertionError, KeyError) as error:  # A KeyError: a node was never discovered.
            print(f"seed {seed}: {error!r}", flush=True)
            found.failed.append(seed)
        found.seeds += 1
        found.hours += chaos.net.now_s / 3600
        found.packets += chaos.net.delivered
        faults += chaos.did
    found.faults = dict(sorted(faults.items()))
    return found
