"""Certificates of a proxy's ports, and of its connections to the cluster."""

from collections.abc import Callable, Iterator

import msgspec

from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.net.tls import Certificates, load_certificates


class TlsOfPorts(msgspec.Struct, frozen=True):
    """Certificates by the configuration key of the port; None: plain HTTP."""

    port: Certificates | None = None
    admin_port: Certificates | None = None
    peer_port: Certificates | None = None

    @classmethod
    def load(cls, config: Config) -> "TlsOfPorts":
        """Load the certificates of all ports. Raises ConfigError: a file cannot be used."""
        return cls(
            load_certificates("proxy.tls", config.proxy.tls),
            load_certificates("proxy.admin_tls", config.proxy.admin_tls),
            load_certificates("security.tls", config.security.tls),
        )

    @property
    def inner(self) -> Certificates | None:
        """Certificates of connections to instances, agents and other proxies."""
        return self.peer_port

    @property
    def all(self) -> Iterator[Certificates]:
        return (each for each in (self.port, self.admin_port, self.peer_port) if each is not None)

    def prepare(self, _: Config) -> Callable[[], None] | None:
        """Load changed files, and return a function that puts them in use. None: no file has
        changed.

        Raises:
            ConfigError: with the faults of all files; nothing changes.
        """
        faults: list[str] = []
        changes: list[Callable[[], None]] = []
        for certificates in self.all:
            try:
                if (apply := certificates.prepare()) is not None:
                    changes.append(apply)
            except ConfigError as error:
                faults += error.faults
        if faults:
            raise ConfigError(faults)

        def apply_all() -> None:
            for apply in changes:
                apply()

        return apply_all if changes else None
