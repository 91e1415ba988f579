"""Faults of a cluster with DistServe's engines, across sections."""

from collections.abc import Iterator

from kvrs.config.cluster import ClusterSettings
from kvrs.protocol.instance import Role


def faults_of_distserve(cluster: ClusterSettings) -> Iterator[str]:
    for node in cluster.nodes:
        roles = sorted(instance.role.value for instance in node.instances)
        # To a proxy that is not to use a server's prefill, its decode instance is shown alone.
        if roles not in ([Role.DECODE, Role.PREFILL], [Role.DECODE]):
            allowed = (
                "allowed with backend 'distserve': one prefill and one decode, which are one server"
            )
            yield (
                f"cluster.nodes: node {node.id!r} has instances of roles {', '.join(roles)}; "
                f"{allowed}"
            )
    engine = cluster.engine
    if engine.pace is not None and engine.device != "cpu":
        yield (
            f"cluster.engine.pace: got {engine.pace!r}; allowed with backend 'distserve' on "
            f"{engine.device!r}: null"
        )
