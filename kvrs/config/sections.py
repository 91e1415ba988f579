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
    """The process that clients talk to."""
    cluster: ClusterSettings = ClusterSettings()
    """Nodes with their instances and agents, and the engine."""
    policy: PolicySettings = PolicySettings()
    """Admission, hand-off and recovery (docs/guide/policies.md)."""
    slo: SloSettings = SloSettings()
    """Latency that clients expect, for the order of recoveries and for giving up."""
    transfer: TransferSettings = TransferSettings()
    """How KV pages move between nodes."""
    backup: BackupSettings = BackupSettings()
    """Checkpoints of KV in the host memory of the nodes' agents."""
    state_plane: StatePlaneSettings = Field(
        default=StatePlaneSettings(), json_schema_extra=EMBEDDED
    )
    """Memory of weights and KV that outlives the processes of instances."""
    elastic: ElasticSettings = Field(default=ElasticSettings(), json_schema_extra=EMBEDDED)
    """Reaction of an instance of several ranks to the loss of some."""
    speculation: SpeculationSettings = Field(
        default=SpeculationSettings(), json_schema_extra=EMBEDDED
    )
    """Tokens that are proposed and verified several a step."""
    gossip: GossipSettings = GossipSettings()
    """Membership and facts, among agents and proxies (docs/guide/gossip.md); seconds are of a
    node's own time, without the time it was stopped.
    """
    profiles: ProfileSettings = ProfileSettings()
    """Measured tables that predictions rest on."""
    security: SecuritySettings = SecuritySettings()
    """Secrets, keys and certificates; files only, no secret stands here
    (docs/guide/security.md).
    """
    logs: LogSettings = LogSettings()
    """Logs of proxies and agents to stderr, and of the processes of `kvrs lab up` to their files
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
