"""Rows of vLLM's CPU tiers, which a node's agent serves out of the memory of its engines. This
module records which instances have rows, and the holders of a stream's rows after an attempt.

Rows need no room and no lease at the agent: the engine keeps them anyway, and evicts the rows of
protected streams last. The last blocks of a stream may be missing. A KV store that engines share
counts as one more agent, without a process.
"""

from collections import defaultdict
from collections.abc import Mapping

from kvrs.core.books.checkpoints import Checkpoints
from kvrs.core.model.cluster_view import Agent, ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import StoredCheckpoint, Stream
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.rows import NO_ROWS, RowsReport


class Rows:
    """Records rows by instance, by agent and by stream."""

    def __init__(
        self, view: ClusterView, checkpoints: Checkpoints, streams: Mapping[StreamId, Stream]
    ) -> None:
        self._view = view
        self._checkpoints = checkpoints
        self._streams = streams
        # The agents with second copies of rows, by the namespace of the rows.
        self._copying: defaultdict[str, dict[InstanceId, Agent]] = defaultdict(dict)

    def reported(self, agent: Agent, rows: RowsReport) -> None:
        """Replace the set of rows that the agent serves."""
        if rows == agent.rows:
            return
        self._note(agent, rows)
        for member in self._view.by_node.get(agent.node, ()):
            self.find(member)
        served = {*rows.copies, *(each.namespace for each in rows.regions)}
        for name in [*agent.streams]:
            stream = self._streams[name]
            stored = stream.checkpoints[agent.id]
            if stored.rows and stored.rows not in served:
                self._checkpoints.lose(stream, agent.id, f"{agent.id} has given its rows back")

    def _note(self, agent: Agent, rows: RowsReport) -> None:
        for namespace in agent.rows.copies:
            self._copying[namespace].pop(agent.id, None)
        agent.rows = rows
        for namespace in rows.copies:
            self._copying[namespace][agent.id] = agent

    def lost(self, agent: Agent) -> None:
        self._note(agent, NO_ROWS)
        for member in self._view.by_node.get(agent.node, ()):
            # The loss of an agent may be known before the loss of its node's instances, whose
            # streams then go on from a second copy.
            if member.has_tier and not self._copying[member.rows]:
                member.set_rows("")

    def find(self, member: Member) -> None:
        """Note the namespace of the instance's rows.

        The namespace of a dead engine is kept: the agent may report the death before the engine's
        streams are moved, and their recovery needs the rows.
        """
        agent = self._view.agent_on(member.node)
        if agent is None or not self._checkpoints.are_kept:
            return
        own = [each for each in agent.rows.regions if each.engine == member.id]
        alive = next((each.namespace for each in own if each.is_alive), "")
        member.tier_tokens = sum(each.rows * each.row_tokens for each in own if each.is_alive)
        is_gone = member.has_tier and all(each.namespace != member.rows for each in own)
        if alive or is_gone:
            member.set_rows(alive)

    def left(self, stream: Stream, member: Member) -> None:
        """Note the holders of a stream's rows when its attempt at the instance, which produced
        tokens, has ended.
        """
        pages = (stream.history_tokens - 1) // member.page_size_tokens
        if not member.rows or not pages:
            return
        holders = [self._view.store]
        if not member.in_store:
            own = self._view.agent_on(member.node)
            holders = [each for each in (own, *self._copying[member.rows].values()) if each]
        for agent in holders:
            stream.checkpoints[agent.id] = StoredCheckpoint(
                agent, member.geometry, pages=pages, rows=member.rows
            )
            agent.streams.add(stream.id)
