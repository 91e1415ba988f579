"""A drill: load through the proxy of a running cluster, and faults on its processes when they are
due.
"""

from collections.abc import Sequence

import uvloop
from rich.console import Console

from kvrs.cluster.fault_injection import check_faults, inject_faults
from kvrs.cluster.launcher import Cluster
from kvrs.faults.language import Fault
from kvrs.load.admin import AdminPort
from kvrs.load.passes import Run, Target, run_pass
from kvrs.load.progress import LiveView
from kvrs.tls import load_certificates
from kvrs.traces.records import ReplayRequest

__all__ = ["Run", "run_load"]


def run_load(
    cluster: Cluster,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
    title: str,
    timeout_s: float = 300.0,
) -> Run:
    """Replay the requests through the proxy on an empty cache, and carry the faults out when they
    are due. A request that takes longer than `timeout_s` fails.

    Raises:
        ConfigError: a fault has an unknown victim, or one that refuses it.
        FaultError: a fault could not be carried out.
    """
    with LiveView(console, title, len(requests)) as view:
        return uvloop.run(_run(cluster, requests, faults, seed, view, timeout_s))


async def _run(
    cluster: Cluster,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    view: LiveView,
    timeout_s: float,
) -> Run:
    tls = load_certificates("security.tls", cluster.config.security.tls)
    async with AdminPort(cluster.proxies[0].admin, cluster.secret, tls) as port:
        await check_faults(faults, port)
        return await run_pass(
            Target(cluster.url, timeout_s=timeout_s, port=port, inject_faults=inject_faults),
            requests,
            faults,
            seed,
            view.show,
        )
