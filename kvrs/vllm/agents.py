"""The agents that a request is looked up at: that of the own node, and those that it names."""

import logging
from typing import Any

from kvrs.transfer.rows.client import RowClient

log = logging.getLogger(__name__)

MAX_NAMED = 16  # By one request.
_MAX_TOLD = 16  # Unknown ids that are logged, once each.


class KnownAgents:
    """Clients of the agents of the cluster, by id."""

    def __init__(self, own: RowClient, others: dict[str, RowClient]) -> None:
        self.own = own
        self._others = others
        self._unknown: set[str] = set()

    def named(self, given: Any) -> list[RowClient]:
        """Return the agents for the field `kvrs` of a request's params, the own node's first. What
        is malformed names none, and an id that is unknown is passed over.
        """
        names = given.get("agents") if isinstance(given, dict) else None
        if not isinstance(names, list) or len(names) > MAX_NAMED:
            names = []
        found = {self.own: None}
        for name in names:
            if not isinstance(name, str):
                continue
            if (agent := self._others.get(name)) is not None:
                found[agent] = None
            elif name != self.own.name:
                self._tell(name)
        return list(found)

    def _tell(self, name: str) -> None:
        if name not in self._unknown and len(self._unknown) < _MAX_TOLD:
            self._unknown.add(name)
            allowed = ", ".join(self._others) or "none, no other agent has a row_port"
            log.warning("a request names the agent %.64r; allowed: %s", name, allowed)
