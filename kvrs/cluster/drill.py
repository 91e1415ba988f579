"""A drill: load through the proxy of a running cluster, and faults carried out on its processes when they are due."""

from collections.abc import Sequence

import uvloop
from rich.console import Console

from kvrs.cluster.faults import check_faults, strike
from kvrs.cluster.launcher import Cluster
from kvrs.replay.admin import AdminPort
from kvrs.replay.faults import Fault
from kvrs.replay.live import LiveView
from kvrs.replay.passes import Run, Target, run_pass
from kvrs.replay.records import ReplayRequest

__all__ = ["Run", "run_load"]


def run_load(
    cluster: Cluster, requests: Sequence[ReplayRequest], faults: list[Fault], seed: int, console: Console, title: str
) -> Run:
    """Replay the requests through the proxy on an empty cache, and carry the faults out when they are due.

    Raises:
        ConfigError: a fault names nobody of this cluster, or one that would not obey.
        FaultError: a fault could not be carried out.
    """
    with LiveView(console, title, len(requests)) as view:
        return uvloop.run(_run(cluster, requests, faults, seed, view))


async def _run(cluster: Cluster, requests: Sequence[ReplayRequest], faults: list[Fault], seed: int, view: LiveView) -> Run:
    async with AdminPort(cluster.admin_url, cluster.secret) as port:
        await check_faults(faults, port)
        return await run_pass(Target(cluster.url, port=port, strike=strike), requests, faults, seed, view.show)
