"""Faults of a cluster whose engines are DistServe's or vLLM's, across sections."""

from collections.abc import Iterator

from kvrs.config.backup import BackupMode
from kvrs.config.cluster import ClusterSettings
from kvrs.config.profiles import ProfileSettings
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


def faults_of_vllm(
    cluster: ClusterSettings, mode: BackupMode, profiles: ProfileSettings
) -> Iterator[str]:
    """Settings that other engines publish themselves must be in the file."""
    if cluster.model is None:
        yield (
            "cluster.model: missing with backend 'vllm'; allowed: the model's directory, for "
            "its tokenizer and config.json"
        )
    if profiles.prefill is None:
        yield (
            "profiles.prefill: missing with backend 'vllm', which publishes no table; "
            "allowed: a name, or the path of one"
        )
    instances = [instance for _, instance in cluster.instances()]
    if mode is not BackupMode.OFF and not any(each.connector_port for each in instances):
        yield (
            f"backup.mode: got {mode.value!r} with backend 'vllm', of which no instance has a kvrs "
            f"connector that sends checkpoints; allowed: 'off', or a connector_port"
        )
    for instance in instances:
        if instance.role is Role.BOTH:
            yield (
                f"cluster.nodes: instance {instance.id!r} has role 'both'; allowed with "
                f"backend 'vllm': prefill, decode"
            )
        if instance.port == 0:
            yield (
                f"cluster.nodes: instance {instance.id!r} has no port; allowed with backend "
                f"'vllm': the port it listens on"
            )
        if instance.bind is not None:
            yield (
                f"cluster.nodes: instance {instance.id!r} has bind: {instance.bind}; allowed with "
                f"backend 'vllm', which binds its ports itself: null"
            )
