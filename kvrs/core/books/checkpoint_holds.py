"""Checkpoints of the open streams at agents: reservations held and released, and what became of
them. Peers keep replicas without any, which the policy's records have.

A reservation is made at the agent by the first engine that sends pages; from then on the proxy
renews it, until the stream has ended, or runs and needs that agent no more. Until then nothing is
released: a recovery that fails may have to fall back on it.
"""

from collections.abc import Callable, Mapping, Sequence

from kvrs.config.backup import BackupMode
from kvrs.config.file import Config
from kvrs.core.books.checkpoints import replicas_of
from kvrs.core.books.leases import Leases
from kvrs.core.fleet.known import Agents, Instances
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.cluster_view import Agent
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Copy, LiveStream
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import STORE, AgentInfo, AgentReport, Role

# Why an agent keeps nothing of a stream.
_GONE = "keeps nothing of it any more"
_NO_ROOM = "has no room"
_DOWN = "is down"


class CheckpointHolds:
    """Which agent keeps what of which open stream."""

    def __init__(
        self,
        config: Config,
        agents: Agents,
        instances: Instances,
        streams: Mapping[StreamId, LiveStream],
        tell: Callable[[ev.Event, float], None],
    ) -> None:
        self.agents = agents
        # Reserved room is scarce, so it is given back as soon as anything is sent to agents.
        self.leases = Leases(config.transfer.lease_s, release_s=config.proxy.load_interval_s)
        self._mode = config.ordered_backup.mode
        by_itself = config.backup.mode is not self._mode
        self._why_none = "SGLang keeps KV by itself" if by_itself else "backup.mode is off"
        self._instances = instances
        self._streams = streams
        self._tell = tell

    # Streams.

    def planned(self, live: LiveStream, plan: act.Plan) -> None:
        """Hold the reservations at the agents that the plan names."""
        for place in plan.places if self._mode is not BackupMode.PEER else ():
            live.copies.setdefault(place.holder, Copy()).lost = None
            self.leases.hold(place.holder, live.id)

    def resumed(self, live: LiveStream, now_s: float) -> None:
        """The plan has worked: release the agents that it does not name."""
        assert live.attempt.plan is not None
        places = {place.holder for place in live.attempt.plan.places}
        for agent in [name for name in live.copies if name not in places]:
            # Without a page seen there may be no reservation, and its release would shut out every
            # later attempt that has a place there again. If there is one, it runs out by itself.
            let_go = self.leases.release if live.copies.pop(agent).pages else self.leases.drop
            let_go(agent, live.id)
            self._tell(ev.RetentionLost(agent, (live.id,)), now_s)

    def adopt(self, live: LiveStream, kept: ev.Kept) -> None:
        """Hold what the proxy before this one had reserved for the stream."""
        known = self.agents.known.get(kept.holder)
        if known is not None and known.info is not None and known.info.epoch == kept.epoch:
            live.copies[kept.holder] = Copy(kept.pages)
            self.leases.hold(kept.holder, live.id)

    def ended(self, live: LiveStream) -> None:
        let_go = self.leases.drop if live.journal.resumable else self.leases.release
        for agent in live.copies:
            let_go(agent, live.id)

    # Agents.

    def up(self, known: Agent, info: AgentInfo, now_s: float) -> None:
        event = self.agents.accept(known, info)
        for live in self._streams.values():
            # Engines offer the pages again; after a denial for lack of room a copy counts only
            # when it was seen.
            if (copy := live.copies.get(known.id)) is not None and copy.lost != _NO_ROOM:
                copy.pages, copy.lost = 0, None
                self.leases.hold(known.id, live.id)
        self._tell(event, now_s)

    def reported(self, known: Agent, report: AgentReport, now_s: float) -> None:
        before, known.report = known.report, report
        pages: dict[StreamId, int] = {}
        for stream, count in report.pages.items():
            if (copy := self._copy(stream, known.id)) is None:
                continue
            if count == 0 < copy.pages:
                copy.lost = _GONE
            elif count > 0 and copy.lost is not None:
                copy.lost = None
                self.leases.hold(known.id, stream)
            pages[stream] = copy.pages = count
        if pages or before is None or _totals(before) != _totals(report):
            self._tell(
                ev.CheckpointsReported(
                    known.id,
                    report.epoch,
                    report.reserved_bytes,
                    report.checkpoints,
                    pages,
                    report.rows,
                ),
                now_s,
            )
        self._lose(known.id, report.denied, _NO_ROOM, now_s)

    def lost(self, known: Agent, cause: str, now_s: float) -> None:
        assert known.info is not None
        known.lose(cause)
        self.leases.forget(known.id)
        for live in self._streams.values():
            if (copy := live.copies.get(known.id)) is not None:
                copy.pages, copy.lost = 0, copy.lost or _DOWN
        self._tell(ev.HolderLost(known.id, known.info.epoch, cause), now_s)

    # For the state and metrics.

    def protected(self, live: LiveStream) -> dict[InstanceId, int]:
        """Leading full pages of the stream that each agent or peer keeps."""
        if self._mode is BackupMode.PEER:
            plan = live.attempt.plan
            chosen = () if plan is None else plan.places
            up = [place.holder for place in chosen if self._instances.is_up(place.holder)]
            return dict.fromkeys(up, 0) | replicas_of(live)
        kept = {agent: copy.pages for agent, copy in live.copies.items() if copy.lost is None}
        return kept | self._in_rows(live)

    def _in_rows(self, live: LiveStream) -> dict[InstanceId, int]:
        plan = live.attempt.plan
        if plan is None or not (there := self._instances.known[plan.decode]).rows:
            return {}
        tokens = len(live.journal.prompt_ids or ()) + len(live.journal.output_ids)
        if there.in_store:
            return {InstanceId(STORE): tokens // there.page_size_tokens}
        return {self.agents.by_node[there.node].id: tokens // there.page_size_tokens}

    def unprotected(self, live: LiveStream, unplaced: Mapping[StreamId, str]) -> str | None:
        """Why no agent keeps, or is about to keep, anything of the stream; `unplaced` is why the
        policy found none for it.
        """
        plan, kept = live.attempt.plan, self.protected(live)
        there = None if plan is None else self._instances.known[plan.decode]
        if self._mode is BackupMode.OFF and (there is None or not there.in_store):
            return self._why_none
        if plan is None or there is None:
            return "no instance was found for it yet"
        if any(kept.values()) or (kept and (there.checkpoints or there.rows)):
            return None
        if kept:
            return f"no agent keeps KV of {plan.decode}"
        if live.copies:
            return "; ".join(f"{agent} {copy.lost}" for agent, copy in live.copies.items())
        return unplaced.get(live.id, "no agent was found for it")

    def are_missing(self, known: Member) -> bool:
        """The instance is in use for decoding, and no agent gets anything of its streams."""
        is_asked = self._mode is not BackupMode.OFF and known.role is not Role.PREFILL
        has_some = known.checkpoints or bool(known.rows)
        return is_asked and self._instances.is_up(known.id) and not has_some

    def count_unprotected(self) -> int:
        """Streams that should be protected, and are not."""
        if self._mode is BackupMode.OFF:
            return 0
        return sum(self.unprotected(live, {}) is not None for live in self._streams.values())

    # Leases.

    def unknown(self, agent: InstanceId, streams: Sequence[StreamId], now_s: float) -> None:
        """The agent has no reservation for these: not yet, where nothing was seen of them, or no
        longer.
        """
        lost = []
        for stream in self.leases.unknown(agent, streams):
            if (copy := self._copy(stream, agent)) is None:
                continue
            if copy.pages > 0:
                lost.append(stream)
            elif copy.lost is None:
                self.leases.hold(agent, stream)
        self._lose(agent, lost, _GONE, now_s)

    def _lose(self, agent: InstanceId, streams: list[StreamId], why: str, now_s: float) -> None:
        lost = []
        for stream in streams:
            if (copy := self._copy(stream, agent)) is not None:
                copy.pages, copy.lost = 0, why
                self.leases.drop(agent, stream)
                lost.append(stream)
        if lost:
            self._tell(ev.RetentionLost(agent, tuple(lost)), now_s)

    def _copy(self, stream: StreamId, agent: InstanceId) -> Copy | None:
        live = self._streams.get(stream)
        return None if live is None else live.copies.get(agent)


def _totals(report: AgentReport) -> tuple[object, ...]:
    return report.reserved_bytes, report.checkpoints, report.rows
