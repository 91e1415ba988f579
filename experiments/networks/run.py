"""Agents and engines on hosts of their own (network namespaces): stalls, real packet loss, and what
probes take of a link.

    python -m experiments.networks.run [--stalls 10] [--kills 10] [--seconds 20] [--seed 1]

Needs root, `ip`, `tc` and `nft`.
"""

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from experiments.gossip_agents.run import kill_one, stall_one
from experiments.record import Record
from kvrs.config.transfer import LinkSettings
from kvrs.transfer.meter import Measurement, lower_bound
from tests.networks.agents_on_hosts import AgentsOnHosts
from tests.networks.cluster_on_hosts import FRONTS, NODES, Clients, ClusterOnHosts
from tests.networks.network_cluster import Network, missing

HOSTS = 5
LOSS_PERCENT = 20
REFUTED_BAR_S = 2.0
PROBE_SHARE_BAR = 0.01
RATES_BYTES_PER_S = (1e6, 4e6, 12.5e6)
TRANSFER = {"probe_interval_s": 0.25, "probe_bytes": 1 << 16}
_QUIET_S = (
    1.0,
    3.0,
)  # Between two of them, so that none begins at the same moment of a probe's round.


def agents_that_sleep(stalls: int, draw: random.Random) -> list[dict[str, Any]]:
    """Each agent stopped for 5 s, watched by the others."""
    with AgentsOnHosts(HOSTS) as agents:
        agents.start_all()
        rows = []
        for _ in range(stalls):
            time.sleep(draw.uniform(*_QUIET_S))
            rows.append(stall_one(agents, agents.watch, draw.choice(agents.names)))
        return rows


def agents_that_die_in_loss(kills: int, draw: random.Random) -> list[dict[str, Any]]:
    """Kills while every host loses a part of the packets that it receives."""
    with AgentsOnHosts(HOSTS) as agents:
        agents.start_all()
        agents.network.lose(LOSS_PERCENT, *agents.names)
        rows = []
        for _ in range(kills):
            time.sleep(draw.uniform(*_QUIET_S))
            rows.append(kill_one(agents, agents.watch, draw.choice(agents.names)))
        return rows


async def probes_of_a_link(bytes_per_s: float, seconds: float) -> dict[str, Any]:
    """The traffic of an otherwise idle host: probes of its link's rate."""
    with (
        Network(*NODES, *FRONTS.values()) as network,
        ClusterOnHosts(network, gossip=False, transfer=TRANSFER) as cluster,
    ):
        network.throttle("n0", bytes_per_s)
        cluster.start("p0", "d1")
        cluster.wait_ready("p0", "d1")
        async with Clients(cluster) as clients:

            async def is_measured() -> bool:
                return bool((await clients.load("d1")).links)

            await clients.until(is_measured)
            sent, since_s = network.sent_bytes("n0"), time.monotonic()
            await asyncio.sleep(seconds)
            sent, took_s = network.sent_bytes("n0") - sent, time.monotonic() - since_s
            (link,) = (await clients.load("d1")).links
    return {
        "rate_bytes_per_s": bytes_per_s,
        "seconds": round(took_s, 2),
        "sent_bytes": sent,
        "share": sent / (bytes_per_s * took_s),
        "measured_bytes_per_s": link.bytes_per_s,
        "lower_bound_bytes_per_s": lower_bound(
            Measurement(link.bytes_per_s, link.spread, link.age_s), LinkSettings()
        ),
    }


def summary(
    stalls: list[dict[str, Any]], kills: list[dict[str, Any]], links: list[dict[str, Any]]
) -> dict[str, Any]:
    back_s, known_s = [row["alive_for_all_s"] for row in stalls], [row["all_s"] for row in kills]
    stalled = [row["false_deaths_by_victim"] + row["false_deaths_by_others"] for row in stalls]
    return {
        "stalls": len(stalls),
        "held_dead_meanwhile": sum(row["was_held_dead_by"] > 0 for row in stalls),
        "alive_for_all_s": {
            "median": round(statistics.median(back_s), 3),
            "longest": round(max(back_s), 3),
        },
        "false_deaths_after_stalls": sum(stalled),
        "kills_in_loss": len(kills),
        "known_by_all_s": {
            "median": round(statistics.median(known_s), 3),
            "longest": round(max(known_s), 3),
        },
        "false_deaths_in_loss": sum(row["false_deaths"] for row in kills),
        "probe_shares": [round(row["share"], 5) for row in links],
    }


def as_text(found: dict[str, Any], links: list[dict[str, Any]]) -> str:
    back, known = found["alive_for_all_s"], found["known_by_all_s"]
    lines = [
        f"{HOSTS} agents on hosts of their own, profile lan",
        f"{found['stalls']} stalls of 5 s ({found['held_dead_meanwhile']} held dead "
        f"meanwhile): alive for all again: "
        f"{back['median']} s (median), {back['longest']} s (longest); false deaths: "
        f"{found['false_deaths_after_stalls']}",
        f"{found['kills_in_loss']} kills while {LOSS_PERCENT} % of all packets are lost: "
        f"dead for all after "
        f"{known['median']} s (median), {known['longest']} s (longest); false deaths: "
        f"{found['false_deaths_in_loss']}",
        "probes of an idle link:      rate   measured   lower bound (MB/s)   share of the link",
    ]
    for row in links:
        rate, measured, bound = (
            row[f"{name}_bytes_per_s"] / 1e6 for name in ("rate", "measured", "lower_bound")
        )
        lines.append(f"{rate:32.2f} {measured:10.2f} {bound:13.2f} {row['share']:26.2%}")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stalls", type=int, default=10)
    parser.add_argument("--kills", type=int, default=10, help="with loss")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="that each link's probes are watched"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    arguments = parser.parse_args()
    if (why := missing()) is not None:
        parser.error(f"no network of our own: {why}")
    record, draw = Record(arguments.seed), random.Random(arguments.seed)
    stalls = agents_that_sleep(arguments.stalls, draw)
    kills = agents_that_die_in_loss(arguments.kills, draw)
    links = [asyncio.run(probes_of_a_link(rate, arguments.seconds)) for rate in RATES_BYTES_PER_S]
    found = summary(stalls, kills, links)
    result = {"summary": found, "stalls": stalls, "kills": kills, "links": links}
    print(as_text(found, links), end="")
    record.keep(arguments.out, "networks", result, as_text(found, links))
    # A watched time may begin right before a probe, and end right behind one.
    within = [
        row["sent_bytes"]
        <= PROBE_SHARE_BAR * row["rate_bytes_per_s"] * row["seconds"] + 1.1 * (1 << 16)
        for row in links
    ]
    died = found["false_deaths_after_stalls"] + found["false_deaths_in_loss"]
    return (
        0
        if all(within) and not died and found["alive_for_all_s"]["longest"] <= REFUTED_BAR_S
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
