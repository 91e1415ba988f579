"""Several schemes on the same requests: each gets a fresh cluster, the same load and the same
faults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvrs.cluster.launcher import Cluster
from kvrs.config.file import Config, parse_config
from kvrs.demo import run_load
from kvrs.faults.language import Fault
from kvrs.load.passes import Run
from kvrs.traces.records import ReplayRequest

PACE = "opt-13b-a100-distserve-tp1"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of recovering: sections `policy` and `backup` of the configuration."""

    name: str
    policy: Mapping[str, Any]
    backup: Mapping[str, Any]
    fails: bool = True  # False: the same load without a fault.

    def config(
        self, nodes: Sequence[Mapping[str, Any]], seed: int, pace: str, link_bytes_per_s: float
    ) -> Config:
        return parse_config(
            {
                "proxy": {"port": 0, "admin_port": 0},
                "cluster": {
                    "engine": {"seed": seed, "pace": pace},
                    "allow_faults": True,
                    "nodes": list(nodes),
                },
                "policy": dict(self.policy),
                "backup": dict(self.backup),
                "transfer": {"link_bytes_per_s": link_bytes_per_s, "probe_interval_s": 1.0},
            }
        )


def run_scheme(
    scheme: Scheme,
    config: Config,
    requests: Sequence[ReplayRequest],
    faults: list[Fault],
    seed: int,
    console: Console,
) -> Run:
    with Cluster(
        config, lambda line: console.print(f"  {line}", style="dim", markup=False)
    ) as cluster:
        return run_load(
            cluster, requests, faults if scheme.fails else [], seed, console, scheme.name
        )
