"""Section `proxy` of the configuration."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from kvrs.config.settings import NAME, Host, Settings
from kvrs.config.tls import TlsSettings

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
    """Its `proxy.id`."""
    host: Host = "127.0.0.1"
    """Where its `proxy.peer_port` is reached: an address, or a name, which is resolved for each new
    connection.
    """
    peer_port: int = Field(ge=1, le=65535)
    """Its `proxy.peer_port`."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Its `proxy.workers`: beyond 1 they are ID.0, ID.1, ... at this port and those that follow."""

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
    """Its name among proxies, nodes and agents: letters, digits and `._-`."""
    host: Host = "127.0.0.1"
    """Address the client port listens on. For addresses beyond loopback see docs/guide/security.md.
    Each other port has a host of its own.
    """
    port: int = Field(default=8000, ge=0, le=65535)
    """Client port, for /v1/completions, /v1/models, /health, /readyz. 0: any free port."""
    workers: int = Field(default=1, ge=1, le=MAX_WORKERS)
    """Proxies that share the clients' port (docs/guide/proxies.md#workers)."""
    allow_anonymous: bool = False
    """Clients beyond loopback need no key: for a gateway in front that authenticates them."""
    endpoint_picker: bool = False
    """Begin streams at the instances that the endpoint picker of a gateway names in
    `x-gateway-destination-endpoint`, and tell it the load on request. Only behind a gateway that
    replaces this header: else clients choose instances (docs/guide/beside.md).
    """
    tls: TlsSettings | None = None
    """TLS of the client port (docs/guide/security.md#tls). null: plain HTTP."""
    admin_host: Host = "127.0.0.1"
    """Address the admin port listens on."""
    admin_port: int = Field(default=8001, ge=0, le=65535)
    """Admin port, for /kvrs/v1/state and /metrics; never open it to clients. 0: any free port.
    Worker K has the port 10 K above it.
    """
    admin_tls: TlsSettings | None = None
    """TLS of the admin port. null: plain HTTP."""
    gossip_host: Host = "127.0.0.1"
    """Address the gossip port listens on, and as the other members reach it: an IP address, or a
    name of this machine.
    """
    gossip_port: int = Field(default=0, ge=0, le=65535)
    """UDP. 0: any free port; the agents learn it from the proxy."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    """A request with a larger body gets 413."""
    body_budget_bytes: int = Field(default=512 << 20, ge=2048)
    """Memory for the requests of all clients that are open, and for bodies as they come, at least
    twice `max_body_bytes`. Beyond it new requests get 503 with Retry-After.
    """
    max_streams: int = Field(default=4096, ge=1)
    """Beyond it new requests get 503 with Retry-After. At most a quarter of the descriptors."""
    token_gap_s: float = Field(default=10.0, gt=0)
    """Longest silence of a stream, and of an instance while its event loop stalls or no other could
    take its streams. Of a stream that has sent its first tokens, and that others could take: 20
    usual intervals, at least 2 s. Before the first token twice the predicted prefill is added.
    """
    request_timeout_s: float | None = Field(default=None, gt=0)
    """Longest time from a request to its first token, or to an answer that has no tokens; beyond it
    the client gets 504. null: none.
    """
    load_interval_s: float = Field(default=0.25, gt=0, le=60)
    """How often instances report their load, and agents what they hold."""
    coalesce_ms: int = Field(default=0, ge=0, le=10)
    """Tick at which tokens of 16 steady streams and more are read together, which takes less CPU; a
    token waits for half of it on average, first tokens for none. 0: each token as it comes.
    """
    event_log: str | None = None
    """A file for the policy's events and actions as JSON lines, to look back at an
    incident (`kvrs incidents FILE`).
    """
    peer_host: Host = "127.0.0.1"
    """Address the port for the other proxies listens on."""
    peer_port: int = Field(default=0, ge=0, le=65535)
    """Port for the other proxies (docs/guide/proxies.md). 0: none."""
    peers: list[PeerSettings] = Field(default=[], max_length=MAX_PEERS)
    """The other proxies, each as {id: proxy-1, host: 127.0.0.1, peer_port: 8012, workers: 1}. The
    entry of this proxy itself is left out, so that all proxies may have the same list.
    """
    mirror: MirrorMode = Field(default=MirrorMode.ASYNC, strict=False)
    """Mirroring of streams with an Idempotency-Key to a peer. sync: no token is sent to the client
    before a peer has it.
    """
    mirror_bytes: int = Field(default=256 << 20, ge=LEAST_MIRROR_BYTES)
    """Memory for the records of streams that can be resumed, here and at other proxies."""
    drain_delay_s: float = Field(default=0.0, ge=0, le=300)
    """How long new requests are still taken after SIGTERM, while /readyz says 503, so that load
    balancers learn of it before requests are refused. A second SIGTERM, or SIGINT, ends it. 0 suits
    clients that repeat a refused request, and `kvrs lab up`.
    """
    drain_s: float = Field(default=600.0, ge=0, le=3600)
    """How long streams without a key, and all streams if no other proxy stays, may run to their
    end, after SIGTERM and `drain_delay_s`. The process ends when none is left, or at another
    signal.
    """
    inexact: Inexact = Field(default=Inexact.MARK, strict=False)
    """Requests that a plain engine could not continue exactly (docs/guide/openai.md): mark or
    refuse.
    """
    reload_on_change: bool = False
    """Reload when the file of the configuration has changed, as by SIGHUP."""
    self_test: bool = True
    """Each process of an instance computes a few tokens once, to test that KV moves and streams are
    continued exactly (docs/guide/backends.md). false: capabilities are taken as declared.
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
