"""What the streams' attempts take up in the books: places, work, bytes on links, slots, alarms."""

from kvrs.ids import NodeId
from kvrs.policy.actions import Plan
from kvrs.policy.cluster_view import ClusterView, Member
from kvrs.policy.slots import SlotBook
from kvrs.policy.streams import Stage, Stream
from kvrs.policy.timers import Timers


class Attempts:
    def __init__(self, view: ClusterView, slots: SlotBook, timers: Timers) -> None:
        self._view = view
        self._slots = slots
        self._timers = timers

    def begin(self, stream: Stream, plan: Plan, work_s: float) -> None:
        """The stream's next attempt, whose prefill or decode computes for `work_s` before anything comes of it."""
        stream.attempt += 1
        stream.plan, stream.resumed = plan, False
        self._slots.leave(stream.id)
        self._timers.clear(stream.id)
        decode = self._view.members[plan.decode]
        runs_on = decode if plan.prefill is None else self._view.members[plan.prefill]
        runs_on.book(work_s)
        stream.booked_on, stream.booked_s = runs_on, work_s
        for run in plan.runs:
            agent = self._view.agents.get(run.holder)
            source = self._view.members[run.holder].instance.node if agent is None else agent.node
            self.put_on_link(stream, source, decode, run.pages * decode.page_bytes)
        self.run(stream, Stage.DECODE if runs_on is decode else Stage.PREFILL, runs_on, decodes_on=decode)
        if runs_on is not decode and decode.own_prefill == runs_on.instance.id:
            decode.running.add(stream.id)  # The one call of both stages goes there, and is lost with it.

    def run(self, stream: Stream, stage: Stage, member: Member, decodes_on: Member) -> None:
        """The attempt is now here."""
        self._leave_members(stream)
        if stream.decodes_on is not decodes_on:
            if stream.decodes_on is not None:
                self._view.count_stream(stream.decodes_on, -1)
            self._view.count_stream(decodes_on, 1)
        stream.stage, stream.runs_on, stream.decodes_on = stage, member, decodes_on
        member.running.add(stream.id)

    def put_on_link(self, stream: Stream, source: NodeId, target: Member, size_bytes: int) -> None:
        link = self._view.link(source, target.instance.node)
        link.in_flight_bytes += size_bytes
        stream.links.append((link, size_bytes))

    def done_waiting(self, stream: Stream) -> None:
        """Its work has been done and its bytes have arrived: something came of it."""
        if stream.booked_on is not None:
            stream.booked_on.unbook(stream.booked_s)
            stream.booked_on = None
        for link, size_bytes in stream.links:
            link.in_flight_bytes -= size_bytes
        stream.links.clear()

    def leave(self, stream: Stream) -> None:
        """Take the stream out of every book: its attempt is over, or its wait."""
        self._slots.release(stream.id)
        self._slots.leave(stream.id)
        self._end(stream)

    def deny(self, stream: Stream, until_s: float) -> None:
        """Its slot is not to be had before then: back from the attempt into the queue, where it was."""
        self._slots.deny(stream.id, until_s)
        self._end(stream)

    def _end(self, stream: Stream) -> None:
        self.done_waiting(stream)
        self._timers.clear(stream.id)
        self._leave_members(stream)
        stream.runs_on = None
        if stream.decodes_on is not None:
            self._view.count_stream(stream.decodes_on, -1)
            stream.decodes_on = None

    @staticmethod
    def _leave_members(stream: Stream) -> None:
        for member in (stream.runs_on, stream.decodes_on):
            if member is not None:
                member.running.discard(stream.id)
