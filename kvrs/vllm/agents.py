"""Agents that are asked for a request's rows: the own node's, and those named in the request."""

import logging
import time
from collections.abc import Sequence
from typing import Any

from kvrs.errors import RequestError
from kvrs.protocol.rows import unseal
from kvrs.transfer.rows.client import RowClient

log = logging.getLogger(__name__)

_MAX_TOLD = 16  # Most faults of requests that are logged; each is logged once.


class KnownAgents:
    """Clients of the agents of the cluster, by id."""

    def __init__(
        self, own: RowClient, others: dict[str, RowClient], params_keys: Sequence[bytes]
    ) -> None:
        """Keep clients of the own node's agent and of others by id. `params_keys`: keys of the MACs
        under which a proxy may name agents to this server.
        """
        self.own = own
        self._others = others
        self._params_keys = params_keys
        self._told: set[str] = set()

    def named(self, given: Any) -> list[RowClient] | None:
        """Return clients of the agents that a request's `kvrs` object names, the own node's first;
        unknown ids are skipped. None: no proxy of this cluster has made the object.
        """
        if given is None:
            return None
        try:
            names = unseal(given, self._params_keys, time.time())
        except RequestError as error:
            self._tell(f"kv_transfer_params.kvrs of a request is ignored: {error}")
            return None
        found = {self.own: None}
        for name in names:
            if (agent := self._others.get(name)) is not None:
                found[agent] = None
            elif name != self.own.name:
                allowed = ", ".join(self._others) or "none, no other agent has a row_port"
                self._tell(f"a request names the agent {name!r:.64}; allowed: {allowed}")
        return list(found)

    def _tell(self, fault: str) -> None:
        if fault not in self._told and len(self._told) < _MAX_TOLD:
            self._told.add(fault)
            log.warning(fault)
