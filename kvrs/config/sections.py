"""Sections of the YAML file, each checked on its own."""

from pydantic import Field

from kvrs.config.backup import BackupSettings, StatePlaneSettings
from kvrs.config.cluster import Backend, ClusterSettings
from kvrs.config.engine import ElasticSettings
from kvrs.config.gossip import GossipSettings
from kvrs.config.logs import LogSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.config.profiles import ProfileSettings
from kvrs.config.proxy import ProxySettings
from kvrs.config.security import SecuritySettings
from kvrs.config.settings import EMBEDDED, Settings
from kvrs.config.speculation import SpeculationSettings
from kvrs.config.transfer import TransferSettings


class Sections(Settings):
    proxy: ProxySettings = ProxySettings()
    """The proxy: its ports, its limits and the other proxies."""
    cluster: ClusterSettings = ClusterSettings()
    """Nodes with their instances and agents, and the engine."""
    policy: PolicySettings = PolicySettings()
    """Admission, hand-off and recovery (docs/guide/policies.md)."""
    slo: SloSettings = SloSettings()
    """Latencies that clients expect; they order recoveries, and may end streams."""
    transfer: TransferSettings = TransferSettings()
    """How KV pages move between nodes."""
    backup: BackupSettings = BackupSettings()
    """Checkpoints of KV in the host memory of the nodes' agents."""
    state_plane: StatePlaneSettings = Field(
        default=StatePlaneSettings(), json_schema_extra=EMBEDDED
    )
    """Memory of weights and KV that survives the processes of instances."""
    elastic: ElasticSettings = Field(default=ElasticSettings(), json_schema_extra=EMBEDDED)
    """How an instance with several ranks reacts to the loss of some."""
    speculation: SpeculationSettings = Field(
        default=SpeculationSettings(), json_schema_extra=EMBEDDED
    )
    """Speculative decoding: several proposed tokens are verified in one step."""
    gossip: GossipSettings = GossipSettings()
    """Membership and facts, exchanged by agents and proxies (docs/guide/gossip.md). Time in which a
    node is suspended does not count.
    """
    profiles: ProfileSettings = ProfileSettings()
    """Tables of measured times, which predictions use."""
    security: SecuritySettings = SecuritySettings()
    """Files of secrets, keys and certificates; the configuration itself holds no secret
    (docs/guide/security.md).
    """
    logs: LogSettings = LogSettings()
    """Logs of proxies and agents, to stderr; `kvrs lab up` writes those of its processes to files
    (docs/guide/monitoring.md#logs).
    """

    @property
    def ordered_backup(self) -> BackupSettings:
        """Copies of KV that proxies order from engines: none from SGLang, which itself decides
        which pages it stores.
        """
        return BackupSettings() if self.cluster.backend is Backend.SGLANG else self.backup

    @property
    def agents_run(self) -> bool:
        """True if each node has an agent, which holds checkpoints, owns memory of instances, or is
        the node's gossip member.
        """
        keeps = self.backup.at_agents or self.state_plane.enabled
        return keeps or self.gossip.enabled
