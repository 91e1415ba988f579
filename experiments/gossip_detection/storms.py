"""Thousands of short lives of small clusters in the worst of weather (`tests/gossip/gossip_weather`); the tests run dozens.

Every seed: 2 to 10 nodes with clocks that run wrong, 12 random blows (deaths, restarts, stops of which the node's own clock may
know nothing, partitions of both kinds, clocks set forward or back) with edits of records between them, while a share of all
packets is lost, doubled, and overtakes others. Then 40 s of calm: all who live have to agree on who lives, and on what each says.
"""

from collections import Counter
from dataclasses import dataclass, field

from tests.gossip.gossip_weather import Weather

BLOWS = 12
CALM_S = 40.0


@dataclass(slots=True)
class Storms:
    seeds: int = 0
    hours: float = 0.0
    packets: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)  # Seeds where something did not hold.


def storms(seeds: range) -> Storms:
    found, faults = Storms(), Counter[str]()
    for seed in seeds:
        weather = Weather(seed)
        try:
            weather.storm(BLOWS)
            weather.calm(CALM_S)
            weather.assert_agreed()
        except (AssertionError, KeyError) as error:  # A KeyError: somebody was never heard of.
            print(f"seed {seed}: {error!r}", flush=True)
            found.failed.append(seed)
        found.seeds += 1
        found.hours += weather.net.now_s / 3600
        found.packets += weather.net.delivered
        faults += weather.did
    found.faults = dict(sorted(faults.items()))
    return found
