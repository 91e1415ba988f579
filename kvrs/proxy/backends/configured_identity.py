"""Facts about a stock engine's instance that only the configuration has."""

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.model_files import ModelFiles


class ConfiguredIdentity(msgspec.Struct, frozen=True):
    """Facts that an instance does not report, from the configuration and the model's files."""

    id: InstanceId
    node: NodeId
    role: Role
    files: ModelFiles
    hands_off: bool = True  # True if the cluster has prefill instances, so KV is handed off.
    served_name: str | None = None  # `cluster.served_name`; None: the first listed model.
