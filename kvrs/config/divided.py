"""Settings of a proxy that are divided among its workers, or counted for each of them."""

from collections.abc import Iterator

from kvrs.config.policy import PolicySettings
from kvrs.config.proxy import LEAST_MIRROR_BYTES, MOST_ID, MOST_PEERS, MOST_PORT, ProxySettings


def faults_of_workers(
    proxy: ProxySettings, policy: PolicySettings, *, agents_run: bool
) -> Iterator[str]:
    workers = proxy.workers
    body = 2 * proxy.max_body_bytes
    for key, got, each in (
        ("proxy.max_streams", proxy.max_streams, 1),
        ("proxy.body_budget_bytes", proxy.body_budget_bytes, body),
        ("proxy.mirror_bytes", proxy.mirror_bytes, LEAST_MIRROR_BYTES),
    ):
        if got < each * workers:
            yield (
                f"{key}: got {got} with proxy.workers: {workers}; allowed: at least "
                f"{each * workers}, {each} for each worker"
            )
    if not agents_run and policy.slots_max < workers:
        yield (
            f"policy.slots_max: got {policy.slots_max} with proxy.workers: {workers}, and "
            f"no agent arbitrates between them; allowed: at least {workers}, or gossip.enabled: "
            f"true"
        )
    for key in ("admin_port", "peer_port", "gossip_port"):
        first, *_, last = proxy.ports_of(key)
        if last > MOST_PORT:
            yield (
                f"proxy.{key}: got {first} with proxy.workers: {workers}, the last of which has "
                f"{last}; allowed: at most {MOST_PORT - last + first}"
            )
    if len(longest := proxy.names[-1]) > MOST_ID:
        yield (
            f"proxy.id: got {proxy.id!r} with proxy.workers: {workers}, the last of which is "
            f"{longest!r}; allowed: at most {MOST_ID} characters"
        )
    if (peers := workers - 1 + sum(1 for _ in proxy.every_peer())) > MOST_PEERS:
        yield (
            f"proxy.peers: {peers} other processes with proxy.workers: {workers}; allowed: at "
            f"most {MOST_PEERS}, workers included"
        )
