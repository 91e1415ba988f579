"""Gossip as a proxy uses it: a second source beside its own watches for deaths, links and GPUs; and
what the proxy publishes.

A gossiped death only shortens the report timeout. A node that others hold dead is given up as soon
as its own report is overdue too, which is several times sooner than silence alone; one that goes on
reporting stays in use, whatever is gossiped about its agent.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, assert_never

from kvrs.errors import GossipError
from kvrs.gossip.facts import Event, FactKind, FailureFact, MemberChanged, RecordChanged, Superseded
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.gpus import GpuHealth
from kvrs.transfer.meter import Measurement

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # How often links are looked at: their bounds sink with time.
_MAX_CAUSE_CHARS = 128


class Watching(Protocol):
    """The watch of one process."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def node(self) -> NodeId: ...
    def look(self) -> None: ...


class GossipView:
    def __init__(
        self,
        link_measured: Callable[[NodeId, NodeId, Measurement, float], None],
        gpus_seen: Callable[[NodeId, Sequence[GpuHealth], float], None],
        clock: Callable[[], float],
    ) -> None:
        self._link_measured = link_measured
        self._gpus_seen = gpus_seen
        self._clock = clock
        self._membership: Membership | None = None
        self._watchers: defaultdict[NodeId, list[Watching]] = defaultdict(list)
        self._nodes: dict[str, NodeId] = {}
        self._failed: dict[
            InstanceId, tuple[int, str, float]
        ] = {}  # Lost, and not back yet: epoch, cause, when.

    def join(self, membership: Membership) -> None:
        self._membership = membership

    def follow(self, watcher: Watching) -> None:
        """From now on its watch hears of gossiped deaths."""
        self._watchers[watcher.node].append(watcher)
        self._nodes[watcher.id] = watcher.node

    def leave(self, watcher: Watching) -> None:
        """Its process is no part of the cluster any more."""
        self._watchers[watcher.node].remove(watcher)
        del self._nodes[watcher.id]
        self.up(watcher.id)

    def heard(self, event: Event) -> None:
        """At a gossiped death the watches there check at once whether a report is overdue."""
        match event:
            case MemberChanged(id=node, status=Status.DEAD):
                self._check_watches(node)
            case RecordChanged(kind=FactKind.FAILURE, name=name):
                self._check_watches(self._nodes.get(name))
            case RecordChanged(kind=FactKind.GPU):
                self.look_at_gpus()
            case MemberChanged() | RecordChanged() | Superseded():
                pass  # Read from the member table when it is needed.
            case _:
                assert_never(event)

    def _check_watches(self, node: NodeId | None) -> None:
        if node is not None:
            for watcher in self._watchers.get(node, ()):
                watcher.look()

    def is_dead(self, node: NodeId, name: InstanceId, epoch: int | None) -> bool:
        """Others hold the node dead, or report the death of this process, in this epoch or a later
        one.
        """
        if self._membership is None:
            return False
        return self._membership.is_dead(node) or any(
            about == name
            and epoch is not None
            and report.fact.epoch >= epoch
            and reporter != self._membership.id
            for (reporter, about), report in self._membership.facts.failures.items()
        )

    # What this proxy has seen itself.

    def lost(self, name: InstanceId, node: NodeId, epoch: int, cause: str) -> None:
        self._failed[name] = epoch, cause[:_MAX_CAUSE_CHARS], self._clock()
        if self._membership is not None:
            self._publish(self._membership, name)
            self._membership.probe_now(node)

    def up(self, name: InstanceId) -> None:
        if self._failed.pop(name, None) is not None and self._membership is not None:
            self._membership.withdraw(FactKind.FAILURE, name)

    def _publish(self, membership: Membership, name: InstanceId) -> None:
        epoch, cause, failed_s = self._failed[name]
        try:
            membership.publish(name, FailureFact(epoch, cause, max(0.0, self._clock() - failed_s)))
        except GossipError as error:
            log.warning("not published", extra={"about": name, "cause": str(error)})

    async def run(self) -> None:
        """Pass links and GPUs of the member table on, until cancelled."""
        while True:
            self.look_at_links()
            # An instance that has just come up runs on one that was judged before.
            self.look_at_gpus()
            await asyncio.sleep(_LOOK_S)

    def look_at_links(self) -> None:
        if self._membership is None:
            return
        now_s = self._clock()
        for (target, source), report in self._membership.facts.links.items():
            fact, written_s = report.fact, report.written_s
            age_s = fact.age_s + max(0.0, now_s - written_s)
            measured = Measurement(fact.bytes_per_s, fact.spread, age_s)
            self._link_measured(NodeId(source), target, measured, now_s)

    def look_at_gpus(self) -> None:
        if self._membership is None:
            return
        by_node: defaultdict[NodeId, list[GpuHealth]] = defaultdict(list)
        for (node, _), report in self._membership.facts.gpus.items():
            by_node[node].append(report.fact)
        for node, gpus in by_node.items():
            self._gpus_seen(node, gpus, self._clock())

    def describe(self) -> dict[str, Any] | None:
        return None if self._membership is None else self._membership.describe()

    @property
    def membership(self) -> Membership | None:
        return self._membership
