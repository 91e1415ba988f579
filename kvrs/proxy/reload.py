"""Reload of a running proxy's configuration without a restart.

Each reloading part is registered once. A reload reads the file, lets every part check its changes,
and only then applies all of them: a fault anywhere changes nothing. The policy gets its settings as
an event, so that an event log reruns with the settings of each time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvrs.config.cluster import Found, Nodes, with_services
from kvrs.config.file import Config, config_digest, parse_config
from kvrs.config.origin import ConfigFile
from kvrs.errors import ConfigError

log = logging.getLogger(__name__)

Apply = Callable[[], None]


class ReloadingPart(msgspec.Struct, frozen=True):
    """A part of the proxy that reloads. `prepare` reads and checks the new configuration, in a
    thread and without any effect, and returns a function that applies it on the event loop; None:
    nothing has changed.
    """

    name: str
    # Function that checks the new configuration. Raises ConfigError: the part cannot apply it.
    prepare: Callable[[Config], Apply | None]
    # Sections of the file, or single keys, that the part applies; empty: the part is outside the
    # file.
    sections: Sequence[str] = ()


class ReloadResult(msgspec.Struct, frozen=True, omit_defaults=True):
    applied: list[str]  # Changed settings by path, and changed parts outside the file.
    restart_needed: list[str]  # Paths of changed settings that need a restart.
    file: str | None = None  # The file that was read; None: the proxy has no file.
    # Hint if an operator edits another file than the proxy reads; else None.
    note: str | None = None


class Reloads:
    """Reloads of one proxy. `config` is the configuration in use: the file's, plus the `found`
    addresses of its services.
    """

    def __init__(self, config: Config, read: Callable[[], Config]) -> None:
        """`read` reads the configuration file again. It raises ConfigError for
        faults of the file.
        """
        self.config = config
        self.found: Found = {}
        self._file_config = config
        self._read = read
        self._origin = read if isinstance(read, ConfigFile) else None
        self._parts: list[ReloadingPart] = []
        self._last_succeeded = True
        self._turn = asyncio.Lock()

    def describe(self) -> dict[str, Any]:
        """Describe which configuration is in use, for the proxy's row in the state."""
        launch = None if self._origin is None else self._origin.launch
        line = None if self._origin is None else self._origin.command_line
        return {
            "policy": self.config.policy.name.value,
            "config_digest": config_digest(self.config),
            # Digest of the file that an operator edits, without found addresses.
            "source_digest": config_digest(self._file_config) if launch is None else launch.digest,
            "launcher_pid": None if launch is None else launch.pid,
            "command_line": None if line is None else msgspec.to_builtins(line),
            "last_reload_succeeded": self._last_succeeded,
        }

    def add(self, part: ReloadingPart) -> None:
        self._parts.append(part)

    async def reload(self) -> ReloadResult:
        """Read the file again and apply the changes that can be reloaded.

        Raises:
            ConfigError: the file, or what it names, has faults; nothing has changed.
        """
        files: list[Config] = []

        def read() -> Config:
            files.append(found := self._read())
            below = with_services(nodes_of(found), found.cluster.services, self.found)
            return with_nodes(found, below)

        succeeded = False
        try:
            result = await self._take(read)
            succeeded = True
        except ConfigError as error:
            for fault in error.faults:
                log.error("not reloaded", extra={"cause": fault})
            raise
        finally:
            self._last_succeeded = succeeded
        self._file_config = files[0]
        if (origin := self._origin) is None:
            return result
        if origin.path is None:
            log.warning("no file to reload", extra={"note": origin.note})
        elif origin.note is not None:
            log.warning("reloaded a copy", extra={"file": origin.path, "note": origin.note})
        file = None if origin.path is None else str(origin.path)
        return msgspec.structs.replace(result, file=file, note=origin.note)

    async def follow_services(self, found: Found) -> None:
        """Apply found addresses of the services.

        Raises:
            ConfigError: they cannot be applied; nothing changes.
        """

        def read() -> Config:
            own = nodes_of(self._file_config)
            return with_nodes(self.config, with_services(own, self.config.cluster.services, found))

        await self._take(read)
        self.found = found

    async def _take(self, read: Callable[[], Config]) -> ReloadResult:
        async with self._turn:
            merged, changes, result = await asyncio.to_thread(self._prepare, read)
            for apply in changes:
                apply()
            self.config = merged
        extra = {"applied": ", ".join(result.applied) or "nothing"}
        if result.restart_needed:
            extra["restart_needed"] = ", ".join(result.restart_needed)
        log.info("reloaded", extra=extra)
        return result

    def _prepare(self, read: Callable[[], Config]) -> tuple[Config, list[Apply], ReloadResult]:
        found = read()
        sections = [section for part in self._parts for section in part.sections]
        differing = list(_differing(_plain(self.config), _plain(found)))
        applied = [path for path in differing if _is_in(path, sections)]
        merged = _merged(self.config, found, applied)
        changes, faults = [], []
        for part in self._parts:
            try:
                apply = part.prepare(merged)
            except ConfigError as error:
                faults += error.faults
                continue
            if apply is not None:
                changes.append(apply)
                if not part.sections:
                    applied.append(part.name)
        if faults:
            raise ConfigError(faults)
        restart_needed = [path for path in differing if not _is_in(path, sections)]
        return merged, changes, ReloadResult(applied, restart_needed)


def nodes_of(config: Config) -> Nodes:
    return [node.model_dump(mode="json") for node in config.cluster.nodes]


def with_nodes(config: Config, nodes: Nodes) -> Config:
    """Return the configuration with other nodes.

    Raises:
        ConfigError: an entry of the nodes is invalid.
    """
    document = _plain(config)
    if nodes == document["cluster"]["nodes"]:
        return config
    document["cluster"]["nodes"] = nodes
    return parse_config(document)


def _plain(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _differing(before: dict[str, Any], after: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the paths of settings that differ; a list counts as one setting."""
    for key in before:
        path, old, new = above + key, before[key], after[key]
        if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
            yield from _differing(old, new, f"{path}.")
        elif old != new:
            yield path


def _is_in(path: str, sections: Sequence[str]) -> bool:
    return any(path == section or path.startswith(f"{section}.") for section in sections)


def _merged(config: Config, found: Config, paths: Sequence[str]) -> Config:
    """Return the configuration in use with the settings at `paths` of the new configuration. The
    whole is checked, since only a part of the file's checked settings is applied.

    Raises:
        ConfigError: the settings do not fit together.
    """
    document, source = _plain(config), _plain(found)
    for path in paths:
        *above, key = path.split(".")
        into, of = document, source
        for each in above:
            into, of = into[each], of[each]
        into[key] = of[key]
    return parse_config(document)
