"""What a proxy makes of gossip: a second source beside its own watches, for who died and for what links carry; and what it tells.

Nobody is lost on hearsay alone. A node that others hold dead is given up as soon as its own word is overdue too, which is
several times sooner than silence alone would be; one that goes on reporting lives, whatever is said of its agent.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvrs.errors import GossipError
from kvrs.gossip.events import Event, MemberChanged, RecordChanged
from kvrs.gossip.facts import FailureFact, Kind
from kvrs.gossip.membership import Membership
from kvrs.gossip.wire import Status
from kvrs.ids import InstanceId, NodeId
from kvrs.policy.events import LinkMeasured
from kvrs.protocol.gpus import GpuHealth
from kvrs.proxy.gpus import Gpus
from kvrs.proxy.links import Links
from kvrs.transfer.meter import Measurement

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # How often links are looked at: their bounds sink with time.
_MAX_CAUSE_CHARS = 128


class Watching(Protocol):
    """Somebody who has a process in view."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def node(self) -> NodeId: ...
    def look(self) -> None: ...


class Hearsay:
    def __init__(self, links: Links, gpus: Gpus, tell: Callable[[LinkMeasured], None], clock: Callable[[], float]) -> None:
        self._links = links
        self._gpus = gpus
        self._tell = tell
        self._clock = clock
        self._membership: Membership | None = None
        self._watchers: defaultdict[NodeId, list[Watching]] = defaultdict(list)
        self._nodes: dict[str, NodeId] = {}
        self._failed: dict[InstanceId, tuple[int, str, float]] = {}  # Lost, and not back yet: epoch, cause, when.

    def join(self, membership: Membership, watchers: Iterable[Watching]) -> None:
        self._membership = membership
        for watcher in watchers:
            self._watchers[watcher.node].append(watcher)
            self._nodes[watcher.id] = watcher.node

    def heard(self, event: Event) -> None:
        """Somebody is said to be dead: whoever watches there looks now whether its own word is overdue."""
        match event:
            case MemberChanged(id=node, status=Status.DEAD):
                self._look(node)
            case RecordChanged(kind=Kind.FAILURE, name=name):
                self._look(self._nodes.get(name))
            case RecordChanged(kind=Kind.GPU):
                self.look_at_gpus()

    def _look(self, node: NodeId | None) -> None:
        if node is not None:
            for watcher in self._watchers.get(node, ()):
                watcher.look()

    def is_dead(self, node: NodeId, name: InstanceId, epoch: int | None) -> bool:
        """Whether others hold the node dead, or say that this process, in this life or a later one, is."""
        if self._membership is None:
            return False
        return self._membership.is_dead(node) or any(
            about == name and epoch is not None and report.fact.epoch >= epoch and whose != self._membership.id
            for (whose, about), report in self._membership.facts.failures.items()
        )

    # What this proxy saw itself.

    def lost(self, name: InstanceId, node: NodeId, epoch: int, cause: str) -> None:
        self._failed[name] = epoch, cause[:_MAX_CAUSE_CHARS], self._clock()
        if self._membership is not None:
            self._say(self._membership, name)
            self._membership.doubt(node)

    def up(self, name: InstanceId) -> None:
        if self._failed.pop(name, None) is not None and self._membership is not None:
            self._membership.withdraw(Kind.FAILURE, name)

    def _say(self, membership: Membership, name: InstanceId) -> None:
        epoch, cause, failed_s = self._failed[name]
        try:
            membership.publish(name, FailureFact(epoch, cause, max(0.0, self._clock() - failed_s)))
        except GossipError as error:
            log.warning("not published", extra={"about": name, "cause": str(error)})

    async def run(self) -> None:
        """Keep the policy's links and GPUs as the member table has them, until cancelled."""
        while True:
            self.look_at_links()
            self.look_at_gpus()  # An instance that has just come up runs on one that was judged before.
            await asyncio.sleep(_LOOK_S)

    def look_at_links(self) -> None:
        if self._membership is None:
            return
        now_s = self._clock()
        for (target, source), report in self._membership.facts.links.items():
            fact, said_s = report.fact, report.written_s
            age_s = fact.age_s + max(0.0, now_s - said_s)
            event = self._links.measured(NodeId(source), target, Measurement(fact.bytes_per_s, fact.spread, age_s), now_s)
            if event is not None:
                self._tell(event)

    def look_at_gpus(self) -> None:
        if self._membership is None:
            return
        by_node: defaultdict[NodeId, list[GpuHealth]] = defaultdict(list)
        for (node, _), report in self._membership.facts.gpus.items():
            by_node[node].append(report.fact)
        for node, gpus in by_node.items():
            self._gpus.seen(node, gpus)

    def describe(self) -> dict[str, Any] | None:
        return None if self._membership is None else self._membership.describe()

    @property
    def membership(self) -> Membership | None:
        return self._membership
