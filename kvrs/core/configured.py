"""The settings of a proxy as its core reads them: the sections of the policy, and facts of the
other sections of the configuration. A program without a configuration file makes them itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvrs.config.backup import BackupSettings
from kvrs.config.cluster import Backend
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role

if TYPE_CHECKING:
    from kvrs.config.file import Config


@dataclass(frozen=True, slots=True)
class ConfiguredInstance:
    id: InstanceId
    node: NodeId
    role: Role
    group: str | None = None  # Instances whose ranks share hosts of stages; None: of no group.


@dataclass(frozen=True, slots=True)
class Configured:
    """A proxy's settings as `Control` reads them. A reload of the configuration replaces it."""

    instances: Sequence[ConfiguredInstance]
    agents: Mapping[InstanceId, NodeId] = field(default_factory=dict)
    policy: PolicySettings = field(default_factory=PolicySettings)
    slo: SloSettings = field(default_factory=SloSettings)
    # Copies of KV that engines are ordered to send.
    backup: BackupSettings = field(default_factory=BackupSettings)
    engine_keeps_kv: bool = False  # The engine stores KV by itself, without an order.
    served_name: str | None = None  # Name of the model for clients; None: the engines' own.
    decodes_only: bool = False  # No instance has another role, those found by DNS included.
    prefill_profile: str | None = None  # Prefill table of all instances; None: each one's own.
    tests_kv: bool = True  # Self-tests move KV between instances.
    prefill_generates: bool = False  # Prefill instances are tested like decode instances.
    lease_s: float = 30.0
    load_interval_s: float = 1.0
    token_gap_s: float = 10.0
    proxies: int = 1  # Processes that share the targets' slots.
    has_peers: bool = False  # Other proxies use the instances as well.

    @property
    def slot_share(self) -> int:
        """Slots of a target that are this proxy's while no agent arbitrates."""
        return self.policy.slots_max // self.proxies

    @classmethod
    def of(cls, config: "Config") -> "Configured":
        """Take what the core needs of a checked configuration."""
        backend, proxy = config.cluster.backend, config.proxy
        nodes = config.cluster.nodes if config.agents_run else []
        return cls(
            [
                ConfiguredInstance(each.id, node.id, each.role, each.group)
                for node, each in config.cluster.instances()
            ],
            {node.agent_id: node.id for node in nodes},
            config.policy,
            config.slo,
            config.ordered_backup,
            engine_keeps_kv=config.backup.mode is not config.ordered_backup.mode,
            served_name=config.cluster.served_name,
            decodes_only=config.cluster.roles == {Role.DECODE},
            prefill_profile=config.profiles.prefill,
            tests_kv=backend is not Backend.DISTSERVE,
            prefill_generates=backend is Backend.VLLM,
            lease_s=config.transfer.lease_s,
            load_interval_s=proxy.load_interval_s,
            token_gap_s=proxy.token_gap_s,
            proxies=1 + sum(1 for _ in proxy.every_peer()),
            has_peers=bool(proxy.peers),
        )
