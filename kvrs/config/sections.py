"""Sections of the YAML file, each checked on its own."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any, TypedDict

from pydantic import Field, field_validator

from kvrs.config.backup import BackupSettings, StatePlaneSettings
from kvrs.config.cluster import Backend, ClusterSettings, ElasticSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.config.proxy import ProxySettings
from kvrs.config.security import SecuritySettings
from kvrs.config.settings import EMBEDDED, Settings
from kvrs.protocol.instance import MOST_DRAFTS


class GossipSettings(Settings):
    """Settings of SWIM with Lifeguard; all else is constant."""

    enabled: bool = False
    """Agents and proxies are members, at `cluster.nodes[].agent.gossip_port` and
    `proxy.gossip_port`. Each node then needs an agent, whatever `backup.mode` is.
    """
    probe_interval_s: float = Field(default=0.5, ge=0.05, le=60)
    """One member is probed per interval, by up to three pings, and suspected if it has not answered
    by the end of the interval. All other intervals of gossip are multiples of it. 2.5 suits round
    trips of up to half a second.
    """


class LogFormat(StrEnum):
    CONSOLE = "console"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogOptions(TypedDict):
    level: str
    as_json: bool


class LogSettings(Settings):
    format: LogFormat = Field(default=LogFormat.CONSOLE, strict=False)
    """console: a line of words and key=value; json: an object per line."""
    level: LogLevel = Field(default=LogLevel.INFO, strict=False)
    """Lowest level that is logged; `kvrs --log-level` and KVRS_LOG_LEVEL override it."""
    access: bool = False
    """Log a line for each request of a client (docs/guide/monitoring.md#logs)."""

    @property
    def options(self) -> LogOptions:
        """Arguments for `log_to` and `log_to_stderr` of `kvrs.process.logs`."""
        return {"level": self.level.value, "as_json": self.format is LogFormat.JSON}


class ProfileSettings(Settings):
    prefill: str | None = None
    """Table of prefill times for all instances: the name of one that comes with kvrs, or the path
    of a file (docs/research/profiles.md). It does not apply to DistServe's decode instances, which
    read known tokens one per step. null: each instance measures its own; with vLLM and SGLang a
    guess by the model's size, which learns.
    """


class TransferSettings(Settings):
    link_bytes_per_s: float | None = Field(default=None, gt=0)
    """Limit per link between two nodes; transfers within a node have none. null: no limit."""
    stall_timeout_s: float = Field(default=2.0, gt=0, le=600)
    """A peer that sends nothing for this long is given up."""
    probe_interval_s: float = Field(default=2.0, gt=0, le=3600)
    """A link without traffic for this long is probed."""
    lease_s: float = Field(default=30.0, gt=0, le=3600)
    """Time for which prefill retains a hand-off without a renewal."""


class DraftSourceName(StrEnum):
    OFF = "off"
    DRAFT = "draft"


class SpeculationSettings(Settings):
    source: DraftSourceName = Field(default=DraftSourceName.OFF, strict=False)
    """Source of drafts: off, draft (a small model, at a restarted instance while its own model
    loads). Drafts change when tokens come, never which.
    """
    draft: str | None = None
    """Hugging Face directory of the small model, which has the tokenizer of `cluster.model`. null:
    if the model is generated, one that is generated with it.
    """
    pace: str | None = None
    """Name of a profile: the draft model's steps take that profile's time, and so does loading it
    at `cluster.engine.disk_bytes_per_s`.
    """
    depth: int = Field(default=4, ge=1, le=MOST_DRAFTS)
    """Drafts of one stream that a step verifies."""

    @field_validator("source", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, source: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return DraftSourceName.OFF if source is False else source


def faults_of_speculation(
    speculation: SpeculationSettings, cluster: ClusterSettings
) -> Iterator[str]:
    source, backend = speculation.source, cluster.backend
    if source is not DraftSourceName.OFF and backend is not Backend.EMBEDDED:
        yield (
            f"speculation.source: got {source.value!r} with backend {backend.value!r}; allowed: "
            f"'off', or backend 'embedded'"
        )
    if source is DraftSourceName.DRAFT and speculation.draft is None and cluster.model is not None:
        yield (
            "speculation.draft: missing with source 'draft'; allowed: a Hugging Face directory, or "
            "no `cluster.model`"
        )


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
