"""Source of a proxy's configuration: a file, possibly written by `kvrs lab up`, or the command
line.

Configuration of a proxy without a file: the URLs of its servers. Everything else is a default,
or comes from environment variables.

Settings of each worker of a proxy, derived from those of the proxy.

A worker is a proxy: it has an id, ports of its own except the clients' port, and the other workers
as peers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvrs.config.cluster import Backend
from kvrs.config.file import Config, Source, checked, override, parse_config
from kvrs.config.proxy import PeerSettings
from kvrs.errors import ConfigError

_URL = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(?::([0-9]{1,5}))?/?")
_HTTP_PORT, _LAST_PORT = 80, 65535
ALLOWED_URL = "http://HOST:PORT of a server, without TLS and without a path"


class CommandLine(msgspec.Struct, frozen=True):
    """Command-line options of a proxy without a file."""

    prefill: list[str]
    decode: list[str]
    model: str | None = None  # Value of `cluster.model`; None: not given.
    backend: Backend = Backend.VLLM  # The stock engine that all servers run.
    # Settings of section `proxy` by key; None: the default value.
    proxy: dict[str, int | str | None] = {}

    def source(self, environ: Mapping[str, str] | None) -> Source:
        """Return the settings that the options stand for, not checked yet.

        Raises:
            ConfigError: a URL that is not HTTP, or is given twice; or no URL of role decode.
        """
        if faults := [*self._faults()]:
            raise ConfigError(faults)
        source = Source("the command line", self._document())
        if environ is not None:
            override(source, environ, Config)
        return source

    def read(self, environ: Mapping[str, str] | None) -> Config:
        """Return the configuration that the options stand for, checked. Raises ConfigError."""
        return with_proxy(checked(self.source(environ)), self.proxy)

    def _roles(self) -> dict[str, list[str]]:
        return {"prefill": self.prefill, "decode": self.decode}

    def _faults(self) -> Iterator[str]:
        seen: set[tuple[str, int]] = set()
        for role, urls in self._roles().items():
            for url in urls:
                place = place_of(url)
                if place is None:
                    yield f"--{role}: got {url!r}; allowed: {ALLOWED_URL}"
                elif place in seen:
                    yield f"--{role}: {url!r} is given twice; allowed: each server once"
                else:
                    seen.add(place)
        if not self.decode:
            yield "--decode: missing; allowed: at least one URL, such as http://127.0.0.1:8200"

    def _document(self) -> dict[str, Any]:
        """Return the settings as a YAML document. Servers on one host are on one node."""
        nodes: dict[str, list[dict[str, Any]]] = {}
        for role, urls in self._roles().items():
            for number, url in enumerate(urls):
                place = place_of(url)
                assert place is not None, url
                host, port = place
                instance = {"id": f"{role[0]}{number}", "role": role, "host": host, "port": port}
                nodes.setdefault(host, []).append(instance)
        named = [
            {"id": f"n{number}", "instances": instances}
            for number, instances in enumerate(nodes.values())
        ]
        cluster = {"backend": self.backend.value, "model": self.model, "nodes": named}
        return {"cluster": cluster}


def place_of(url: str) -> tuple[str, int] | None:
    """Return host and port of a URL; None: the URL is not HTTP."""
    if (found := _URL.fullmatch(url)) is None:
        return None
    port = _HTTP_PORT if found[2] is None else int(found[2])
    return (found[1].strip("[]"), port) if 0 < port <= _LAST_PORT else None


class WorkerPlan(msgspec.Struct, frozen=True):
    """Number of a worker, and the ports that the proxy has chosen for it and for all its
    workers.
    """

    worker: int
    port: int  # The clients' port, which all workers listen at.
    admin_port: int
    peer_ports: list[int]  # Peer port of each worker, by number.


def worker_config(config: Config, plan: WorkerPlan) -> Config:
    """Derive the configuration of one worker from that of its proxy."""
    proxy, count, worker = config.proxy, config.proxy.workers, plan.worker
    workers = (
        PeerSettings(id=name, host=proxy.peer_host, peer_port=at)
        for name, at in zip(proxy.names, plan.peer_ports, strict=True)
        if name != proxy.names[worker]
    )
    log = proxy.event_log
    own = proxy.model_copy(
        update={
            "id": proxy.names[worker],
            "workers": 1,
            "port": plan.port,
            "admin_port": plan.admin_port,
            "peer_port": plan.peer_ports[worker],
            "gossip_port": proxy.ports_of("gossip_port")[worker],
            "peers": [*workers, *proxy.every_peer()],
            "max_streams": proxy.max_streams // count,
            "body_budget_bytes": proxy.body_budget_bytes // count,
            "mirror_bytes": proxy.mirror_bytes // count,
            "event_log": None if log is None else _event_log(log, worker),
        }
    )
    policy = config.policy
    if not config.agents_run:
        # Each worker gets an equal part of a target's slots, since without agents nothing
        # arbitrates between workers.
        policy = policy.model_copy(update={"slots_max": policy.slots_max // count})
    return config.model_copy(update={"proxy": own, "policy": policy})


def _event_log(path: str, worker: int) -> str:
    given = Path(path)
    return str(given.with_name(f"{given.stem}.{worker}{given.suffix}"))


def with_proxy(config: Config, asked: Mapping[str, int | str | None]) -> Config:
    """Return the configuration with the settings of section `proxy` from the command line; None: as
    in the file.

    Raises:
        ConfigError: the settings do not fit the configuration.
    """
    given = {key: value for key, value in asked.items() if value is not None}
    if not given:
        return config
    document = config.model_dump(mode="json", exclude_unset=True)
    return parse_config(document | {"proxy": document.get("proxy", {}) | given})


class UpCommand(msgspec.Struct, frozen=True):
    """A running `kvrs lab up`, which writes a file with the ports that it has chosen for each of
    its proxies.
    """

    pid: int
    file: str | None  # Configuration file given to the command; None: no file.
    digest: str  # Digest of the configuration in that file.


class ConfigFile(msgspec.Struct, frozen=True):
    """Reader of a proxy's configuration, from its file or its command line; each call
    reads anew.
    """

    path: Path | None  # Path of the configuration file; None: the proxy has no file.
    read: Callable[[], Config]  # Read and check the configuration. Raises ConfigError.
    launch: UpCommand | None = None
    command_line: CommandLine | None = None  # The command line, if the proxy has no file.

    def __call__(self) -> Config:
        return self.read()

    @property
    def note(self) -> str | None:
        """Reason why an edit of this file changes nothing, for operators; None: an edit counts."""
        if self.command_line is not None:
            return "this proxy was started without a file: its command line counts"
        if self.launch is None:
            return None
        if self.launch.file is None:
            return "this proxy was started by kvrs lab up without a file: only its options count"
        return f"this proxy was started by kvrs lab up, which read {self.launch.file} at its start"
