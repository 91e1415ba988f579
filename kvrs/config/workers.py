"""Settings of each worker of a proxy, derived from those of the proxy.

A worker is a proxy: it has an id, ports of its own except the clients' port, and the other workers
as peers.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.config.proxy import PeerSettings


class WorkerPlan(msgspec.Struct, frozen=True):
    """Number of a worker, and the ports that the proxy has chosen for it and for all its
    workers.
    """

    worker: int
    port: int  # The clients' port, which all workers listen at.
    admin_port: int
    peer_ports: list[int]  # Peer port of each worker, by number.


def worker_config(config: Config, plan: WorkerPlan) -> Config:
    """Derive the configuration of one worker from that of its proxy."""
    proxy, count, worker = config.proxy, config.proxy.workers, plan.worker
    workers = (
        PeerSettings(id=name, host=proxy.peer_host, peer_port=at)
        for name, at in zip(proxy.names, plan.peer_ports, strict=True)
        if name != proxy.names[worker]
    )
    log = proxy.event_log
    own = proxy.model_copy(
        update={
            "id": proxy.names[worker],
            "workers": 1,
            "port": plan.port,
            "admin_port": plan.admin_port,
            "peer_port": plan.peer_ports[worker],
            "gossip_port": proxy.ports_of("gossip_port")[worker],
            "peers": [*workers, *proxy.every_peer()],
            "max_streams": proxy.max_streams // count,
            "body_budget_bytes": proxy.body_budget_bytes // count,
            "mirror_bytes": proxy.mirror_bytes // count,
            "event_log": None if log is None else _event_log(log, worker),
        }
    )
    policy = config.policy
    if not config.agents_run:
        # Each worker gets an equal part of a target's slots, since without agents nothing
        # arbitrates between workers.
        policy = policy.model_copy(update={"slots_max": policy.slots_max // count})
    return config.model_copy(update={"proxy": own, "policy": policy})


def _event_log(path: str, worker: int) -> str:
    given = Path(path)
    return str(given.with_name(f"{given.stem}.{worker}{given.suffix}"))


def with_proxy(config: Config, asked: Mapping[str, int | str | None]) -> Config:
    """Return the configuration with the settings of section `proxy` from the command line; None: as
    in the file.

    Raises:
        ConfigError: the settings do not fit the configuration.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if not given:
        return config
    document = config.model_dump(mode="json", exclude_unset=True)
    return parse_config(document | {"proxy": document.get("proxy", {}) | given})
