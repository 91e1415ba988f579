"""Section `backup` of the configuration: checkpoints of KV in host memory, and where a node's agent
listens.
"""

from enum import StrEnum
from typing import Any

from pydantic import Field, field_validator

from kvrs.config.settings import Settings


class BackupMode(StrEnum):
    OFF = "off"
    LOCAL = "local"  # The own node's agent: survives process and GPU (seed RaidServe).
    REMOTE = "remote"  # Another node's agent: survives the node (seed LUMEN).
    BOTH = "both"


class Placement(StrEnum):
    LOAD = "load"  # Seed LUMEN, Eq. 1: least queueing delay and restore pressure.
    FIXED = "fixed"  # The next node, as in DejaVu's ring.
    RANDOM = "random"


class AgentSettings(Settings):
    host: str = "127.0.0.1"
    # HTTP. 0: any free port, chosen once by `kvrs up`.
    port: int = Field(default=0, ge=0, le=65535)
    page_port: int = Field(default=0, ge=0, le=65535)  # Where checkpoints are stored and fetched.
    gossip_port: int = Field(default=0, ge=0, le=65535)  # UDP and TCP.
    # Of the page port and of the gossip port; none: `host`.
    page_host: str | None = None
    gossip_host: str | None = None

    @property
    def pages_at(self) -> str:
        return self.page_host or self.host

    @property
    def gossip_at(self) -> str:
        return self.gossip_host or self.host

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class BackupSettings(Settings):
    mode: BackupMode = Field(default=BackupMode.OFF, strict=False)
    placement: Placement = Field(default=Placement.LOAD, strict=False)
    # Weight of restore pressure against queueing delay (LUMEN Eq. 1).
    alpha: float = Field(default=1.0, ge=0, le=1000)
    capacity_bytes: int = Field(default=256 << 20, ge=1 << 16)  # Of one agent.
    # Until it is measured; LUMEN's figure.
    host_to_device_bytes_per_s: float = Field(default=26e9, gt=0)
    # Pages that an instance holds for sending at a time.
    staging_pages: int = Field(default=64, ge=1, le=65536)
    # Newly filled pages are sent together for this long.
    gather_s: float = Field(default=0.05, ge=0, le=10)
    # An agent creates a directory of its own in it, without access for others, for its segments.
    directory: str = "/dev/shm"  # noqa: S108 - see above.

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, mode: Any) -> Any:
        # YAML 1.1 reads the word `off` as false.
        return BackupMode.OFF if mode is False else mode
