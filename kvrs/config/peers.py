"""The check that instances of a cluster can keep each other's pages (`backup.mode` peer)."""

from collections.abc import Iterator

from kvrs.config.cluster import Backend, ClusterSettings
from kvrs.protocol.instance import Role


def faults_of_peers(cluster: ClusterSettings, *, state_plane: bool) -> Iterator[str]:
    """Why instances of this cluster cannot keep each other's pages."""
    if cluster.backend is not Backend.EMBEDDED:
        yield (
            f"backup.mode: got 'peer' with backend {cluster.backend.value!r}; allowed: another "
            f"mode, or backend 'embedded'"
        )
        return
    instances = [instance for _, instance in cluster.instances()]
    if sum(each.role is not Role.PREFILL for each in instances) < 2:
        yield (
            "backup.mode: got 'peer' with one decode instance; allowed: another mode, or a second "
            "decode instance"
        )
    if state_plane:
        # The file of a pool names the page before each, which a peer does not know.
        yield (
            "backup.mode: got 'peer' with state_plane.enabled: true; allowed: another mode, or "
            "false"
        )
    for each in instances:
        if each.stage_hosts and each.group is None:
            yield (
                f"backup.mode: got 'peer', and instance {each.id!r} has stage_hosts and no group; "
                f"allowed: another mode, none of them, or both"
            )
