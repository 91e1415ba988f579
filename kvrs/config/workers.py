"""The settings of each worker of a proxy that has several, made from those of the proxy.

A worker is a proxy: it has an id, a port for other proxies, and the other workers for peers.
"""

from collections.abc import Sequence
from pathlib import Path

from kvrs.config.file import Config, parse_config
from kvrs.config.proxy import PeerSettings


def worker_config(config: Config, worker: int, port: int, peer_ports: Sequence[int]) -> Config:
    """The configuration of one worker. `port`: the bound one of clients; `peer_ports`: those of all
    workers.
    """
    proxy, count = config.proxy, config.proxy.workers
    names = proxy.names
    workers = (
        PeerSettings(id=name, host=proxy.peer_host, peer_port=at)
        for name, at in zip(names, peer_ports, strict=True)
        if name != names[worker]
    )
    log = proxy.event_log
    own = proxy.model_copy(
        update={
            "id": names[worker],
            "workers": 1,
            "port": port,
            "admin_port": 0,
            "peer_port": peer_ports[worker],
            "gossip_port": proxy.gossip_port + worker if proxy.gossip_port else 0,
            "peers": [*workers, *proxy.every_peer()],
            "max_streams": proxy.max_streams // count,
            "body_budget_bytes": proxy.body_budget_bytes // count,
            "unfinished_body_bytes": proxy.unfinished_body_bytes // count,
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


def with_workers(config: Config, workers: int) -> Config:
    """The same configuration for so many workers.

    Raises:
        ConfigError: it does not go with them.
    """
    if config.proxy.workers == workers:
        return config
    document = config.model_dump(mode="json")
    document["proxy"]["workers"] = workers
    return parse_config(document)
