"""Section `proxy` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.settings import Settings


class Inexact(StrEnum):
    """What becomes of a request that an engine could not continue exactly."""

    REFUSE = "refuse"
    MARK = "mark"


class MirrorMode(StrEnum):
    """When a token of a stream that can be resumed elsewhere goes to its client."""

    ASYNC = "async"
    SYNC = "sync"


class PeerSettings(Settings):
    id: str = Field(min_length=1, max_length=64)
    host: str = "127.0.0.1"
    peer_port: int = Field(ge=1, le=65535)


class ProxySettings(Settings):
    id: str = Field(default="proxy-0", min_length=1, max_length=64)  # Its name among proxies, nodes and agents.
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port.
    admin_port: int = Field(default=8001, ge=0, le=65535)  # State and metrics; never the clients' port.
    gossip_port: int = Field(default=0, ge=0, le=65535)  # UDP and TCP. 0: any free port; the agents tell where it is.
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    body_timeout_s: float = Field(default=10.0, gt=0)  # A client that drips its request is cut off.
    write_timeout_s: float = Field(default=30.0, gt=0)  # A client that does not read is cut off.
    max_streams: int = Field(default=4096, ge=1)  # Beyond it new requests get 503.
    token_gap_s: float = Field(default=10.0, gt=0)  # The longest silence of an attempt.
    load_interval_s: float = Field(default=0.25, gt=0, le=60)  # How often instances report their load, and agents what they hold.
    event_log: str | None = None  # A file for what the policy was told and what it asked for, as JSON lines.
    event_log_bytes: int = Field(default=64 << 20, ge=4096)  # A larger file is put aside as FILE.1, in place of the one there.
    peer_port: int = Field(default=0, ge=0, le=65535)  # What the other proxies talk to. 0: they do not.
    peers: list[PeerSettings] = Field(default=[], max_length=32)  # The other proxies.
    mirror: MirrorMode = Field(default=MirrorMode.ASYNC, strict=False)  # Sync: no token before a peer has it.
    drain_s: float = Field(default=0.0, ge=0, le=3600)  # On SIGTERM: how long streams without a key may run to their end.
    inexact: Inexact = Field(default=Inexact.MARK, strict=False)  # Of requests that plain engines cannot continue exactly.
