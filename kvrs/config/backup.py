"""Sections `backup` and `state_plane` of the configuration: checkpoints of KV in host memory, the
agents' addresses, and memory that outlives instances' processes.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from kvrs.config.settings import EMBEDDED_OR_DISTSERVE, STOCK, Host, Settings, netloc
from kvrs.protocol.instance import Role

# Share of an instance's pages that may hold replicas of other instances' streams, with `mode:
# peer`. Replicas are dropped before the instance's own pages.
PEER_SHARE = 0.5


class BackupMode(StrEnum):
    OFF = "off"
    # At the agent of the instance's own node; survives the process and the GPU (seed RaidServe).
    LOCAL = "local"
    REMOTE = "remote"  # At the agent of another node; survives the node (seed LUMEN).
    BOTH = "both"
    # In the memory of another instance; survives the instance (KevlarFlow's replicas).
    PEER = "peer"


class Placement(StrEnum):
    # The agent with the least queueing delay and restore pressure (seed LUMEN, Eq. 1).
    LOAD = "load"
    FIXED = "fixed"  # The agent of the next node, as in DejaVu's ring.
    RANDOM = "random"


class AgentSettings(Settings):
    host: Host = "127.0.0.1"
    """Address of the agent's ports, as other processes reach it: an IP address, or a name, which is
    resolved for each new connection.
    """
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the HTTP API. 0: any free port, chosen once by `kvrs lab up`."""
    page_port: int = Field(default=0, ge=0, le=65535)
    """Port at which checkpoints are stored and fetched. 0: any free port, chosen once by `kvrs lab
    up`.
    """
    row_port: int | None = Field(default=None, ge=1, le=65535, json_schema_extra=STOCK)
    """Port at which servers and agents of other nodes read rows of vLLM's CPU tier, and servers
    read pages of SGLang. null: only the own node is served.
    """
    gossip_port: int = Field(default=0, ge=0, le=65535)
    """UDP port for gossip. 0: any free port, chosen once by `kvrs lab up`."""
    bind: Host | None = None
    """Address its ports listen on, such as 0.0.0.0 or ::. null: `host`."""

    def bound(self, host: str) -> str:
        """Return the address to listen at: `bind`, or else the `host` at which others reach the
        agent.
        """
        return self.bind or host

    @property
    def url(self) -> str:
        return f"http://{netloc(self.host, self.port)}"


class BackupSettings(Settings):
    mode: BackupMode = Field(default=BackupMode.OFF, strict=False)
    """Holder of checkpoints: off, local (agent of the own node: survives process and GPU), remote
    (agent of another node: survives the node), both, peer (pool of another instance, on another
    node if there is one; no agent. In a group, each stage in a host of another instance).
    """
    placement: Placement = Field(
        default=Placement.LOAD, strict=False, json_schema_extra=EMBEDDED_OR_DISTSERVE
    )
    """Choice of the agent for a remote checkpoint: load (queueing delay and restore pressure),
    fixed (next node), random.
    """
    alpha: float = Field(default=1.0, ge=0, le=1000, json_schema_extra=EMBEDDED_OR_DISTSERVE)
    """Weight of restore pressure against queueing delay."""
    capacity_bytes: int = Field(default=256 << 20, ge=1 << 16)
    """Memory of one agent for checkpoints."""
    host_to_device_bytes_per_s: float = Field(default=26e9, gt=0)
    """Assumed rate from an agent's memory into instances of its node, until it is measured."""
    staging_pages: int = Field(default=64, ge=1, le=65536, json_schema_extra=EMBEDDED_OR_DISTSERVE)
    """Most pages that an instance holds for sending at a time."""
    checksum_share: float = Field(default=0.1, ge=0, le=1, json_schema_extra=STOCK)
    """Most CPU time in which an agent makes checksums of engines' rows, as a part of one core. 0:
    a row has none until it is first read.
    """
    directory: str = "/dev/shm"  # noqa: S108 - a directory of its own in it, private.
    """Directory below which an agent keeps its pages (in a private directory) and the socket of
    rows (in one that its group may enter).
    """

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that an agent reserves for checkpoints; 0: it keeps none."""
        return self.capacity_bytes if self.at_agents else 0

    @property
    def at_agents(self) -> bool:
        """True if checkpoints go to agents, not to other instances and not nowhere."""
        return self.mode not in (BackupMode.OFF, BackupMode.PEER)

    def replica_share(self, role: Role) -> float:
        """Return the share of an instance's pages that may hold replicas, by the
        instance's role.
        """
        is_kept = self.mode is BackupMode.PEER and role is not Role.PREFILL
        return PEER_SHARE if is_kept else 0.0

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, mode: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return BackupMode.OFF if mode is False else mode


class StatePlaneSettings(Settings):
    enabled: bool = False
    """The agent of a node owns the memory of its instances' weights and KV, below
    `backup.directory`. A restarted process finds both there, and the instances of a node share one
    copy of the weights. The agent also keeps the weights of `speculation.draft`. Only for the
    embedded engine on a CPU.
    """
