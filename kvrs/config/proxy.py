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
    """Its `proxy.id`."""
    host: str = "127.0.0.1"
    """Its `proxy.peer_host`."""
    peer_port: int = Field(ge=1, le=65535)
    """Its `proxy.peer_port`."""


class ProxySettings(Settings):
    id: str = Field(default="proxy-0", min_length=1, max_length=64)
    """Its name among proxies, nodes and agents."""
    host: str = "127.0.0.1"
    """Of the clients' port; beyond loopback see docs/security.md. Each other port has a host of its
    own.
    """
    port: int = Field(default=8000, ge=0, le=65535)
    """For clients: /v1/completions, /v1/models, /healthz, /readyz. 0: any free port."""
    allow_anonymous: bool = False
    """Beyond loopback without keys: for a gateway in front that authenticates clients."""
    tls: TlsSettings | None = None
    """Of the clients' port (docs/security.md#tls). null: plain HTTP."""
    admin_host: str = "127.0.0.1"
    """Of the admin port."""
    admin_port: int = Field(default=8001, ge=0, le=65535)
    """For /kvrs/v1/state and /metrics; never open it to clients. 0: any free port."""
    admin_tls: TlsSettings | None = None
    """Of the admin port. null: plain HTTP."""
    gossip_host: str = "127.0.0.1"
    """Of the gossip port; a numeric address at which the other members reach it."""
    gossip_port: int = Field(default=0, ge=0, le=65535)
    """UDP and TCP. 0: any free port; the agents learn it from the proxy."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """A request with a larger body gets 413."""
    body_budget_bytes: int = Field(default=512 << 20, ge=2048)
    """Memory for bodies that are being read and requests that are open, of which one client address
    gets three quarters. Beyond it new requests get 503 with Retry-After.
    """
    body_timeout_s: float = Field(default=10.0, gt=0)
    """A client that sends its request more slowly is cut off."""
    write_timeout_s: float = Field(default=30.0, gt=0)
    """A client that does not read for this long is cut off."""
    max_streams: int = Field(default=4096, ge=1)
    """Beyond it new requests get 503 with Retry-After. At most a quarter of the descriptors."""
    token_gap_s: float = Field(default=10.0, gt=0)
    """Longest silence of a stream, and of an instance while its event loop stalls. Of a stream that
    has sent its first tokens: 20 usual intervals, at least 2 s.
    """
    load_interval_s: float = Field(default=0.25, gt=0, le=60)
    """How often instances report their load, and agents what they hold."""
    event_log: str | None = None
    """A file for the policy's events and actions as JSON lines, to replay an incident (`kvrs
    explain --log`).
    """
    event_log_bytes: int = Field(default=64 << 20, ge=4096)
    """A larger event log is renamed to FILE.1, replacing the one there."""
    peer_host: str = "127.0.0.1"
    """Of the port for the other proxies."""
    peer_port: int = Field(default=0, ge=0, le=65535)
    """For the other proxies (docs/proxies.md). 0: none."""
    peers: list[PeerSettings] = Field(default=[], max_length=32)
    """The other proxies, each as {id: proxy-1, host: 127.0.0.1, peer_port: 8012}."""
    mirror: MirrorMode = Field(default=MirrorMode.ASYNC, strict=False)
    """Of streams with an Idempotency-Key. sync: no token is sent to the client before a peer has
    it.
    """
    mirror_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Memory for the records of streams that can be resumed, here and at other proxies."""
    drain_s: float = Field(default=600.0, ge=0, le=3600)
    """On SIGTERM: how long streams without a key may run to their end. The process ends when none
    is left, or at a second signal.
    """
    inexact: Inexact = Field(default=Inexact.MARK, strict=False)
    """Requests that a plain engine could not continue exactly (docs/openai.md): mark or refuse."""
    self_test: bool = True
    """A few tokens once per process of an instance: does KV move, are streams continued exactly
    (docs/backends.md)? false: what instances declare is believed.
    """
