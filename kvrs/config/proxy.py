"""Section `proxy` of the configuration."""

from enum import StrEnum

from pydantic import Field

from kvrs.config.settings import Settings
from kvrs.config.tls import TlsSettings


class Inexact(StrEnum):
    """Treatment of a request that an engine could not continue exactly."""

    REFUSE = "refuse"
    MARK = "mark"


class MirrorMode(StrEnum):
    """When a token of a resumable stream is sent to its client."""

    ASYNC = "async"
    SYNC = "sync"


class PeerSettings(Settings):
    id: str = Field(min_length=1, max_length=64)
    host: str = "127.0.0.1"
    peer_port: int = Field(ge=1, le=65535)


class ProxySettings(Settings):
    # Its name among proxies, nodes and agents.
    id: str = Field(default="proxy-0", min_length=1, max_length=64)
    # Of the clients' port. Each other port has a host of its own.
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)  # 0: any free port.
    # Beyond loopback without keys, for a gateway in front that authenticates clients.
    allow_anonymous: bool = False
    tls: TlsSettings | None = None  # Of the clients' port; none: plain HTTP.
    # State and metrics; never the clients' port.
    admin_host: str = "127.0.0.1"
    admin_port: int = Field(default=8001, ge=0, le=65535)
    admin_tls: TlsSettings | None = None
    # UDP and TCP. 0: any free port; the agents learn it from the proxy.
    gossip_host: str = "127.0.0.1"
    gossip_port: int = Field(default=0, ge=0, le=65535)
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    # Bodies that are being read and requests that are open; of one client's address three quarters.
    body_budget_bytes: int = Field(default=512 << 20, ge=2048)
    body_timeout_s: float = Field(default=10.0, gt=0)  # A client that drips its request is cut off.
    write_timeout_s: float = Field(default=30.0, gt=0)  # A client that does not read is cut off.
    max_streams: int = Field(default=4096, ge=1)  # Beyond it new requests get 503.
    token_gap_s: float = Field(default=10.0, gt=0)  # The longest silence of an attempt.
    # How often instances report their load, and agents what they hold.
    load_interval_s: float = Field(default=0.25, gt=0, le=60)
    # A file for the events and actions of the policy, as JSON lines.
    event_log: str | None = None
    # A larger file is renamed to FILE.1, replacing the one there.
    event_log_bytes: int = Field(default=64 << 20, ge=4096)
    # For the other proxies. 0: none.
    peer_host: str = "127.0.0.1"
    peer_port: int = Field(default=0, ge=0, le=65535)
    peers: list[PeerSettings] = Field(default=[], max_length=32)  # The other proxies.
    # Sync: a token is sent when a peer has it.
    mirror: MirrorMode = Field(default=MirrorMode.ASYNC, strict=False)
    # For the records of streams that can be resumed, here and at other proxies.
    mirror_bytes: int = Field(default=256 << 20, ge=1 << 20)
    # On SIGTERM: how long streams without a key may run to their end; the process ends when none is
    # left, or at a second signal.
    drain_s: float = Field(default=600.0, ge=0, le=3600)
    # For requests that plain engines cannot continue exactly.
    inexact: Inexact = Field(default=Inexact.MARK, strict=False)
    # Each process of an instance is tested for what it does in a recovery; else it is believed.
    self_test: bool = True
