"""Gossip at a proxy: a second source, beside its own watches, on deaths, links and GPUs, and the
facts that the proxy publishes.

A gossiped death only shortens the report timeout. A node that others hold dead is given up as soon
as its own report is overdue too, several times sooner than by silence alone. A node that goes on
reporting stays in use, whatever gossip says of its agent.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

from kvrs.core.control import Control
from kvrs.errors import GossipError
from kvrs.gossip.facts import (
    Event,
    FactKind,
    FailureFact,
    LinkFact,
    MemberChanged,
    RecordChanged,
    Superseded,
)
from kvrs.gossip.wire import Status
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import GpuHealth
from kvrs.transfer.meter import Measurement

if TYPE_CHECKING:
    from kvrs.gossip.membership import Membership

log = logging.getLogger(__name__)

# Interval at which links are read: their measured bounds fall with time, without an event.
_LOOK_S = 1.0
_MAX_CAUSE_CHARS = 128


class GossipView:
    def __init__(self, control: Control[Any], clock: Callable[[], float]) -> None:
        # Members of the gossip; None: the proxy has not joined yet.
        self.membership: Membership | None = None
        self._control = control
        self._clock = clock
        # Node of each watched process, and the function that checks the process's watch.
        self._watches: dict[str, tuple[NodeId, Callable[[], None]]] = {}

    def follow(self, name: InstanceId, node: NodeId, check: Callable[[], None]) -> None:
        """Call `check` when gossip reports this process or its node dead."""
        self._watches[name] = node, check

    def leave(self, name: InstanceId) -> None:
        """Stop following a process that was removed."""
        del self._watches[name]
        self.up(name)

    def heard(self, event: Event) -> None:
        """Let the watches of the nodes that an event concerns check at once whether a report is
        overdue.
        """
        match event:
            case MemberChanged(id=node, status=Status.DEAD):
                self._check_watches(node)
            case RecordChanged(kind=FactKind.FAILURE, name=name) if name in self._watches:
                self._check_watches(self._watches[name][0])
            case RecordChanged(kind=FactKind.GPU):
                self.look_at_gpus()
            case MemberChanged() | RecordChanged() | Superseded():
                pass  # These facts are read from the member table when they are needed.
            case _:
                assert_never(event)

    def _check_watches(self, dead: NodeId) -> None:
        for node, check in list(self._watches.values()):
            if node == dead:
                check()

    def is_dead(self, node: NodeId, name: InstanceId, epoch: int | None) -> bool:
        """Return whether other members hold the node dead, or report the death of this process in
        `epoch` or a later epoch.
        """
        if self.membership is None:
            return False
        return self.membership.is_dead(node) or any(
            isinstance(fact, FailureFact)
            and epoch is not None
            and fact.epoch >= epoch
            and reporter != self.membership.id
            for reporter, fact in self.membership.facts.about(FactKind.FAILURE, name)
        )

    def lost(self, name: InstanceId, node: NodeId, epoch: int, cause: str) -> None:
        if self.membership is None:
            return
        try:
            self.membership.publish(name, FailureFact(epoch, cause[:_MAX_CAUSE_CHARS], 0.0))
        except GossipError as error:
            log.warning("not published", extra={"about": name, "cause": str(error)})
        self.membership.probe_now(node)

    def up(self, name: InstanceId) -> None:
        if self.membership is not None:
            self.membership.withdraw(FactKind.FAILURE, name)

    async def run(self) -> None:
        """Pass the member table's links and GPUs on to the policy, until cancelled."""
        while True:
            self.look_at_links()
            # GPUs are judged again, because a new instance may run on a GPU that was judged before.
            self.look_at_gpus()
            await asyncio.sleep(_LOOK_S)

    def look_at_links(self) -> None:
        if self.membership is None:
            return
        now_s = self._clock()
        for (target, source), report in self.membership.facts.of(LinkFact).items():
            fact, written_s = report.fact, report.written_s
            age_s = fact.age_s + max(0.0, now_s - written_s)
            measured = Measurement(fact.bytes_per_s, fact.spread, age_s)
            self._control.link_measured(NodeId(source), target, measured, now_s)

    def look_at_gpus(self) -> None:
        if self.membership is None:
            return
        by_node: defaultdict[NodeId, list[GpuHealth]] = defaultdict(list)
        for (node, _), report in self.membership.facts.of(GpuHealth).items():
            by_node[node].append(report.fact)
        for node, gpus in by_node.items():
            self._control.gpus_seen(node, gpus, self._clock())

    def describe(self) -> dict[str, Any] | None:
        return None if self.membership is None else self.membership.describe()
