"""The settings of each worker of a proxy that has several, made from those of the proxy.

A worker is a proxy: it has an id, ports of its own but for the clients', and the other workers for
peers.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrs.config.file import Config, parse_config
from kvrs.config.proxy import PeerSettings


class WorkerPlan(msgspec.Struct, frozen=True):
    """The number of a worker, and the ports that are kept for it and the others."""

    worker: int
    port: int  # The client port, which all workers share.
    admin_port: int
    peer_ports: list[int]  # Those of all workers.


def worker_config(config: Config, plan: WorkerPlan) -> Config:
    """The configuration of one worker."""
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
        # Nothing arbitrates between the workers, so that each has a share of a target's slots.
        policy = policy.model_copy(update={"slots_max": policy.slots_max // count})
    return config.model_copy(update={"proxy": own, "policy": policy})


def _event_log(path: str, worker: int) -> str:
    given = Path(path)
    return str(given.with_name(f"{given.stem}.{worker}{given.suffix}"))


def with_proxy(config: Config, asked: Mapping[str, int | str | None]) -> Config:
    """The same configuration with settings of the proxy that the command line asks for; None: as in
    the file.

    Raises:
        ConfigError: it does not go with them.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if not given:
        return config
    document = config.model_dump(mode="json", exclude_unset=True)
    return parse_config(document | {"proxy": document.get("proxy", {}) | given})
