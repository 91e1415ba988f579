"""KV locations by stream: instances that retain or cache it, and agents with checkpoints of it."""

from collections.abc import Callable, Iterable, Mapping

from kvrs.core.books.checkpoints import Checkpoints
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent, ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Holder, Stream
from kvrs.ids import InstanceId, StreamId


class KvLocations:
    """Writes the holders of `streams`, and by `Checkpoints` their checkpoints."""

    def __init__(
        self,
        view: ClusterView,
        checkpoints: Checkpoints,
        streams: Mapping[StreamId, Stream],
        agent_of: Callable[[ev.HolderUp], Agent],
    ) -> None:
        self._view = view
        self._checkpoints = checkpoints
        self._streams = streams
        self._agent_of = agent_of
        self._kept: dict[InstanceId, ev.PagesKept] = {}  # Of instances that are about to come up.

    def kept_pages(self, event: ev.PagesKept) -> None:
        self._kept[event.instance] = event

    def instance_up(self, member: Member) -> None:
        """Record the KV of open streams that the instance has kept."""
        event = self._kept.pop(member.id, None)
        if event is None or event.epoch != member.epoch:
            return
        for stream_id, pages in event.pages.items():
            if (stream := self._streams.get(stream_id)) is not None:
                self.retain(stream, member, pages)

    def agent_up(self, event: ev.HolderUp) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is not None and event.epoch <= agent.epoch:
            return
        if agent is not None:
            self._lose(agent, "replaced by a new epoch")
        self._view.agents[event.holder] = self._agent_of(event).begin(event)

    def agent_lost(self, event: ev.HolderLost) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is not None and event.epoch >= agent.epoch:
            self._lose(agent, event.cause)

    def reported(self, event: ev.CheckpointsReported) -> None:
        agent = self._view.agents.get(event.holder)
        if agent is None:
            self._replicated(event)
            return
        if event.epoch != agent.epoch:
            return
        agent.reported_bytes, agent.reported_checkpoints = event.reserved_bytes, event.checkpoints
        for stream_id, pages in event.pages.items():
            if (stream := self._streams.get(stream_id)) is not None:
                self._checkpoints.reported(stream, agent, pages)

    def _replicated(self, event: ev.CheckpointsReported) -> None:
        """An instance reports replicas. Of streams that it keeps under a lease it has more."""
        member = self._view.members.get(event.holder)
        if member is None or event.epoch != member.epoch:
            return
        for stream_id, pages in event.pages.items():
            stream = self._streams.get(stream_id)
            if stream is None:
                continue
            held = stream.holders.get(member.id)
            if held is not None and not held.is_replica:
                continue
            if pages:
                stream.holders[member.id] = Holder(member, pages, is_replica=True)
                member.held.add(stream_id)
            elif held is not None:
                self.forget(stream_id, member.id)

    def retain(self, stream: Stream, member: Member, pages: int) -> None:
        stream.holders[member.id] = Holder(member, pages)
        member.held.add(stream.id)

    def leave(self, stream: Stream, member: Member, pages: int) -> None:
        """The stream is moved from there, and may fetch what it has computed until it resumes."""
        held = stream.holders.get(member.id)
        kept = held.pages - held.left_pages if held is not None else 0
        stream.holders[member.id] = Holder(member, max(pages, kept), max(0, pages - kept))
        member.held.add(stream.id)

    def resumed(self, stream: Stream) -> None:
        """Elsewhere: what it has left behind may be overwritten from now on."""
        for instance, held in [*stream.holders.items()]:
            if held.left_pages == held.pages:
                self.forget(stream.id, instance)
            elif held.left_pages:
                self.retain(stream, held.member, held.pages - held.left_pages)

    def is_left_at(self, instance: InstanceId) -> bool:
        """Streams that were moved from there have not resumed yet."""
        member = self._view.members.get(instance)
        return member is not None and any(
            self._streams[each].holders[instance].left_pages for each in member.held
        )

    def forget(self, stream_id: StreamId, holder: InstanceId) -> None:
        """The holder keeps no KV of the stream any more."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        if holder in stream.checkpoints:
            self._checkpoints.lose(stream, holder, f"{holder} keeps no KV of it any more")
        if (found := stream.holders.pop(holder, None)) is not None:
            found.member.held.discard(stream_id)

    def distrust(self, stream: Stream) -> None:
        """Its KV may be what spoils its logits: the next attempt loads none of it, and finds none
        in a cache either, since the driver gives its pages another salt.
        """
        for holder in {*stream.holders, *stream.checkpoints}:
            self.forget(stream.id, holder)

    def of(self, stream_id: StreamId) -> tuple[ev.Kept, ...]:
        """All locations, for the proxy that may have to go on with the stream."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return ()
        held = [
            ev.Kept(holder, found.member.epoch, found.pages)
            for holder, found in stream.holders.items()
        ]
        return (
            *held,
            *(
                ev.Kept(name, found.agent.epoch, found.pages)
                for name, found in stream.checkpoints.items()
            ),
        )

    def inherit(self, stream: Stream, kept: Iterable[ev.Kept]) -> None:
        """Take over locations from another proxy, as far as those epochs are still up."""
        for each in kept:
            member, agent = self._view.members.get(each.holder), self._view.agents.get(each.holder)
            if member is not None and member.epoch == each.epoch:
                self.retain(stream, member, each.pages)
            elif agent is not None and agent.epoch == each.epoch:
                self._checkpoints.adopt(stream, agent, each.pages)

    def _lose(self, agent: Agent, cause: str) -> None:
        del self._view.agents[agent.id]
        for stream_id in list(agent.streams):
            self._checkpoints.lose(
                self._streams[stream_id], agent.id, f"{agent.id} was lost: {cause}"
            )
