"""Ports that the workers of a proxy share, or have for each other: kept for them by their
supervisor, which listens on none of these.
"""

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

from kvrs.config.file import Config
from kvrs.errors import ConfigError

_FREED_WITHIN_S = 3.0  # The workers of a supervisor that was killed end by then.
_PAUSE_S = 0.05


def check_shared_ports(config: Config) -> None:
    """Raises ConfigError: there are to be several workers, which this system cannot have."""
    if config.proxy.workers > 1 and not hasattr(socket, "SO_REUSEPORT"):
        raise ConfigError(
            [
                f"proxy.workers: got {config.proxy.workers}, and this system has no SO_REUSEPORT, "
                f"by which they share a port; allowed: 1"
            ]
        )


class KeptPorts:
    """Sockets that are bound until `close`, and listen to nothing."""

    def __init__(self) -> None:
        self._sockets = ExitStack()

    def close(self) -> None:
        self._sockets.close()

    def keep(self, key: str, host: str, port: int) -> int:
        """Keep a port, any free one for 0; return it.

        Raises:
            ConfigError: it is in use, or cannot be bound.
        """
        until_s = time.monotonic() + _FREED_WITHIN_S
        while True:
            try:
                return self._keep(host, port)
            except OSError as error:
                is_used = error.errno == errno.EADDRINUSE
                if is_used and time.monotonic() < until_s:
                    time.sleep(_PAUSE_S)
                    continue
                why = "is already in use" if is_used else f"cannot be bound: {error.strerror}"
                raise ConfigError(
                    [f"proxy.{key}: port {host}:{port} {why}; allowed: a free port, or 0 for any"]
                ) from None

    def _keep(self, host: str, port: int) -> int:
        for family, address in _addresses(host, port):
            at = (address[0], port, *address[2:])
            if port:
                # Another proxy of this user would share the port without a word.
                with socket.socket(family, socket.SOCK_STREAM) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    _only_own_family(probe)
                    probe.bind(at)
            kept = self._sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            # Connections of a former proxy may linger there.
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _only_own_family(kept)
            kept.bind(at)
            port = kept.getsockname()[1]
        return port


def _addresses(host: str, port: int) -> Iterator[tuple[int, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, _, _, _, address in dict.fromkeys(found):
        yield family, address  # type: ignore[misc]  # Of IPv6 it has two more numbers.


def _only_own_family(made: socket.socket) -> None:
    if made.family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
