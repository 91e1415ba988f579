"""Place of an engine's process in the cluster: the agents whose rows it can load, and its link to
the agent of its own node.
"""

import hashlib
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvrs.config.file import load_config, read_secrets
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId
from kvrs.protocol.rows import RegionInfo, Space
from kvrs.protocol.secrets import Scope, scoped_key
from kvrs.transfer.rows.client import RegionLink, RowClient
from kvrs.transfer.rows.connections import dial_first, dial_tcp
from kvrs.transfer.rows.ledger import RowLedger
from kvrs.transfer.rows.tags import RowTags
from kvrs.transfer.store.directory import row_directory


def namespace_of(fields: dict[str, Any]) -> bytes:
    """Return the namespace of rows, a digest of all fields that determine what their bytes mean."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()


class EnginePlace:
    """The configuration and the secret of the cluster, as the process of one engine reads them."""

    def __init__(self, file: str, instance: str) -> None:
        """Read the cluster's YAML `file`, in which `instance` is this engine's id.

        Raises:
            KvrsError: the file, the id or the secret is wrong.
        """
        config = load_config(Path(file), os.environ)
        self.instance = InstanceId(instance)
        nodes = {each.id: node for node, each in config.cluster.instances()}
        if (own := nodes.get(self.instance)) is None:
            raise ConfigError(f"instance: {instance!r}; allowed: {', '.join(nodes)}")
        self.secrets = read_secrets(config.security, os.environ)
        self._own = own.agent_id
        base = config.backup.directory
        self._directories = [row_directory(base, secret, own.id) for secret in self.secrets]
        self._dials: dict[InstanceId, Callable[[float], socket.socket]] = {
            node.agent_id: partial(dial_tcp, node.agent.host, node.agent.row_port)
            for node in config.cluster.nodes
            if node.agent.row_port is not None
        }
        self._dials[own.agent_id] = partial(dial_first, self._directories)
        self._keys = {
            agent: scoped_key(self.secrets[0], Scope.ROWS, agent) for agent in self._dials
        }

    def clients(self, space: Space) -> tuple[RowClient, dict[str, RowClient]]:
        """Return the client of the own node's agent, and by id the clients of other nodes' agents
        that have a row port.
        """
        tags = RowTags(self.secrets)
        found = {
            str(agent): RowClient(
                agent, dial, self._keys[agent], space, tags, is_local=agent == self._own
            )
            for agent, dial in self._dials.items()
        }
        return found.pop(self._own), found

    def link(
        self, info: RegionInfo, memory: int, ledger: RowLedger, dial_within_s: float
    ) -> RegionLink:
        """Make the link that gives the engine's memory and its ledger to the own node's agent.

        Raises:
            OSError: the memory cannot be opened for reading.
        """
        dial = partial(dial_first, self._directories, dial_within_s)
        return RegionLink(info, memory, ledger, dial, self._keys[self._own])
