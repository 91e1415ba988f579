"""Configuration of a proxy without a file: the URLs of its servers. Everything else is a default,
or comes from environment variables.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvrs.config.cluster import Backend
from kvrs.config.file import Config, checked
from kvrs.config.overrides import override
from kvrs.config.source import Source
from kvrs.config.workers import with_proxy
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
