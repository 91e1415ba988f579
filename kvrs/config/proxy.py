"""Section `proxy` of the configuration."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvrs.config.security import TlsSettings
from kvrs.config.settings import NAME, Host, Settings

MAX_WORKERS = 16
MAX_PEERS = 32
MAX_PORT = 65535
MAX_ID = 64  # Most characters of a proxy's or worker's id.
ADMIN_PORT_STEP = 10  # Difference between the numbers of two consecutive workers' admin ports.
LEAST_MIRROR_BYTES = 1 << 20


class Inexact(StrEnum):
    """Treatment of a request whose stream could not continue exactly at another engine."""

    REFUSE = "refuse"
    MARK = "mark"


class MirrorMode(StrEnum):
    """Order in which a token of a resumable stream goes to its client and to its mirror; sync: to
    the mirror first.
    """

    ASYNC = "async"
    SYNC = "sync"


def names_of(proxy: str, workers: int) -> list[str]:
    """Return the ids of a proxy's processes: the proxy's own, or those of its workers if it has
    several.
    """
    return [proxy] if workers == 1 else [f"{proxy}.{worker}" for worker in range(workers)]


def proxy_of_worker(name: str) -> str | None:
    """Return the id of the proxy that a worker belongs to; None: the name is not a worker's."""
    proxy, _, number = name.rpartition(".")
    return proxy if proxy and number.isdecimal() else None


def are_workers_of_one(one: str, other: str) -> bool:
    """Return whether two ids belong to workers of the same proxy."""
    proxy = proxy_of_worker(one)
    return proxy is not None and proxy == proxy_of_worker(other)


class PeerSettings(Settings):
    id: str = Field(min_length=1, max_length=MAX_ID, pattern=NAME)
    """`proxy.id` of the other proxy."""
    host: Host = "127.0.0.1"
    """Address or name at which its `proxy.peer_port` is reached; a name is resolved for each new
    connection.
    """
    peer_port: int = Field(ge=1, le=65535)
    """`proxy.peer_port` of the other proxy."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """`proxy.workers` of the other proxy. Several workers are ID.0, ID.1, ..., at this port and the
    following ones.
    """

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        last = names_of(self.id, self.workers)[-1]
        if self.peer_port + self.workers - 1 > MAX_PORT or len(last) > MAX_ID:
            raise ValueError(
                f"workers: {self.workers} need ids of at most {MAX_ID} characters, and ports of "
                f"at most {MAX_PORT}"
            )
        return self

    def each(self) -> Iterator["PeerSettings"]:
        """Yield one peer for each process of this proxy."""
        for offset, name in enumerate(names_of(self.id, self.workers)):
            yield PeerSettings(id=name, host=self.host, peer_port=self.peer_port + offset)


class ProxySettings(Settings):
    id: str = Field(default="proxy-0", min_length=1, max_length=MAX_ID, pattern=NAME)
    """Name of this proxy, unique among proxies, nodes and agents: letters, digits and `._-`."""
    host: Host = "127.0.0.1"
    """Address the client port listens on. For addresses beyond loopback see docs/guide/security.md.
    Each other port has a host of its own.
    """
    port: int = Field(default=8000, ge=0, le=65535)
    """Client port, for /v1/completions, /v1/models, /health, /readyz. 0: any free port."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Processes of this proxy, which share the client port (docs/guide/proxies.md#workers)."""
    allow_anonymous: bool = False
    """Accept clients beyond loopback without a key, because a gateway in front authenticates them.
    """
    endpoint_picker: bool = False
    """Begin streams at the instances that the endpoint picker of a gateway names in
    `x-gateway-destination-endpoint`, and report the load on request. Only behind a gateway that
    removes this header from clients' requests; otherwise clients choose instances
    (docs/guide/beside.md).
    """
    tls: TlsSettings | None = None
    """TLS of the client port (docs/guide/security.md#tls). null: plain HTTP."""
    admin_host: Host = "127.0.0.1"
    """Address the admin port listens on."""
    admin_port: int = Field(default=8001, ge=0, le=65535)
    """Admin port, for /kvrs/v1/state and /metrics; never open it to clients. 0: any free port. The
    port of worker K is 10 K higher.
    """
    admin_tls: TlsSettings | None = None
    """TLS of the admin port. null: plain HTTP."""
    gossip_host: Host = "127.0.0.1"
    """Address the gossip port listens on, and at which other members reach it: an IP address, or a
    name of this machine.
    """
    gossip_port: int = Field(default=0, ge=0, le=65535)
    """UDP port for gossip. 0: any free port, which the agents learn from the proxy."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """A request with a larger body gets 413."""
    body_budget_bytes: int = Field(default=512 << 20, ge=2048)
    """Memory for open requests, incoming bodies and unread responses of all clients, at least twice
    `max_body_bytes`. Beyond it new requests and long responses become 503 with Retry-After.
    """
    max_streams: int = Field(default=4096, ge=1)
    """Most open streams; beyond it new requests get 503 with Retry-After. At most a quarter of the
    file descriptors.
    """
    token_gap_s: float = Field(default=10.0, gt=0)
    """Longest silence of a stream, or of an instance whose event loop stalls or whose streams no
    other instance could take. A stream that has tokens, and that others could take, is moved after
    20 of its usual intervals, at least 2 s. Before the first token twice the predicted prefill is
    added.
    """
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time from a request to its first token, or to its answer if that has no tokens;
    beyond it the client gets 504. null: no limit.
    """
    load_interval_s: float = Field(default=0.25, gt=0, le=60)
    """Interval at which instances report their load, and agents what they hold."""
    coalesce_ms: int = Field(default=0, ge=0, le=10)
    """Interval at which tokens of 16 or more steady streams are read together, which takes less
    CPU. A token waits for half of it on average; first tokens do not wait. 0: each token is read as
    it arrives.
    """
    event_log: str | None = None
    """File to which the policy's events and actions are written as JSON lines, for `kvrs incidents
    FILE`.
    """
    peer_host: Host = "127.0.0.1"
    """Address the port for the other proxies listens on."""
    peer_port: int = Field(default=0, ge=0, le=65535)
    """Port for the other proxies (docs/guide/proxies.md). 0: no such port."""
    peers: list[PeerSettings] = Field(default=[], max_length=MAX_PEERS)
    """The other proxies, each as {id: proxy-1, host: 127.0.0.1, peer_port: 8012, workers: 1}. The
    entry of this proxy itself is ignored, so all proxies may have the same list.
    """
    mirror: MirrorMode = Field(default=MirrorMode.ASYNC, strict=False)
    """How streams with an Idempotency-Key are mirrored to another proxy. sync: no token is sent to
    the client before the mirror has it.
    """
    mirror_bytes: int = Field(default=256 << 20, ge=LEAST_MIRROR_BYTES)
    """Memory for the records of resumable streams, of this proxy and of others."""
    drain_delay_s: float = Field(default=0.0, ge=0, le=300)
    """Time after SIGTERM in which new requests are still served while /readyz returns 503, so that
    load balancers notice before requests are refused. A second SIGTERM, or SIGINT, ends it. 0 suits
    clients that retry refused requests, and `kvrs lab up`.
    """
    drain_s: float = Field(default=600.0, ge=0, le=3600)
    """Time after SIGTERM and `drain_delay_s` in which streams without a key may run to their end,
    and all streams if no other proxy stays. The process ends when none is left, or at another
    signal.
    """
    inexact: Inexact = Field(default=Inexact.MARK, strict=False)
    """Treatment of requests that the engine could not continue exactly (docs/guide/openai.md): mark
    or refuse.
    """
    reload_on_change: bool = False
    """Reload when the configuration file has changed, as after SIGHUP."""
    self_test: bool = True
    """Test each process of an instance once with a few tokens, whether KV moves and streams
    continue exactly (docs/guide/backends.md). false: trust the capabilities that it declares.
    """

    @field_validator("peers")
    @classmethod
    def _without_itself(cls, peers: list[PeerSettings], info: ValidationInfo) -> list[PeerSettings]:
        own = {key: info.data.get(key) for key in ("id", "peer_port", "workers")}
        for peer in peers:
            if peer.id == own["id"] and peer.model_dump(include={*own}) != own:
                raise ValueError(
                    f"{peer.id!r} is this proxy, with peer_port {own['peer_port']} and workers "
                    f"{own['workers']}; allowed: an entry with these, or none"
                )
        return [peer for peer in peers if peer.id != own["id"]]

    @property
    def names(self) -> list[str]:
        """Ids of the proxy's processes: the proxy's own, or those of its workers if it
        has several.
        """
        return names_of(self.id, self.workers)

    def ports_of(self, key: str) -> list[int]:
        """Return, for each process of the proxy, the port that the key means; 0: any free port."""
        first, step = getattr(self, key), ADMIN_PORT_STEP if key == "admin_port" else 1
        return [first + step * worker if first else 0 for worker in range(self.workers)]

    def every_peer(self) -> Iterator[PeerSettings]:
        """Yield one peer for each process of each other proxy."""
        return (each for peer in self.peers for each in peer.each())
