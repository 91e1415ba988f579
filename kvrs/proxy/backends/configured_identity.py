"""The facts of a stock engine's instance that only the configuration knows."""

import msgspec

from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role
from kvrs.proxy.backends.model_files import ModelFiles


class ConfiguredIdentity(msgspec.Struct, frozen=True):
    """Facts of an instance that it does not report: fields of the configuration, and the model's
    files.
    """

    id: InstanceId
    node: NodeId
    role: Role
    files: ModelFiles
    hands_off: bool = True  # There are prefill instances.
    served_name: str | None = None  # `cluster.served_name`.
