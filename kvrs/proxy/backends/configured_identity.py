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
    hands_off: bool = True  # The cluster has prefill instances.
    served_name: str | None = None  # Value of `cluster.served_name`.
