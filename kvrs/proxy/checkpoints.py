"""What agents keep of the live streams: reservations held and released, and what became of them.

A reservation is made at the agent by the first engine that sends pages; from then on the proxy renews it, until the stream has
ended, or runs and needs that agent no more. Until then nothing is released: a recovery that fails may have to turn back to it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvrs.agent.config import BackupMode
from kvrs.config import Config
from kvrs.errors import UpstreamError
from kvrs.ids import InstanceId, StreamId
from kvrs.policy.events import CheckpointsReported, Event, HolderLost, RetentionLost
from kvrs.protocol.instance import AgentInfo, AgentReport, LeaseAnswer, LeaseUpdate
from kvrs.proxy.agents import Agents, KnownAgent
from kvrs.proxy.instances import Health
from kvrs.proxy.leases import Leases
from kvrs.proxy.streams import Copy, LiveStream

# Why an agent keeps nothing of a stream.
_GONE = "keeps nothing of it any more"
_NO_ROOM = "has no room"
_DOWN = "is down"


class Checkpoints:
    """Which agent keeps what of which live stream."""

    def __init__(
        self, config: Config, agents: Agents, streams: Mapping[StreamId, LiveStream], tell: Callable[[Event], None]
    ) -> None:
        self.agents = agents
        # Reserved room is scarce, so it is given back as soon as anything is told to agents.
        self.leases = Leases(config.transfer.lease_s, self._send, self._unknown, release_s=config.proxy.load_interval_s)
        self._mode = config.backup.mode
        self._streams = streams
        self._tell = tell

    # What becomes of streams.

    def planned(self, live: LiveStream) -> None:
        """Hold what the plan has checkpoints go to, and come from."""
        assert live.plan is not None
        for place in live.plan.places:
            live.copies.setdefault(place.holder, Copy()).lost = None
            self.leases.hold(place.holder, live.id)

    def resumed(self, live: LiveStream) -> None:
        """The plan has worked: let go of agents that it does not name."""
        assert live.plan is not None
        if not live.copies:
            return
        places = {place.holder for place in live.plan.places}
        for agent in live.copies.keys() - places:
            # Of which nothing was seen there may be no reservation; its release would shut out whatever attempt comes, also a
            # later one that has a place there again. If there is one it runs out by itself.
            let_go = self.leases.release if live.copies.pop(agent).pages else self.leases.drop
            let_go(agent, live.id)
            self._tell(RetentionLost(agent, (live.id,)))

    def adopt(self, live: LiveStream) -> None:
        """Another proxy had it: hold what it had reserved."""
        for kept in live.journal.kept:
            known = self.agents.known.get(kept.holder)
            if known is not None and known.info is not None and known.info.epoch == kept.epoch:
                live.copies[kept.holder] = Copy(kept.pages)
                self.leases.hold(kept.holder, live.id)

    def ended(self, live: LiveStream) -> None:
        let_go = self.leases.drop if live.resumable else self.leases.release
        for agent in live.copies:
            let_go(agent, live.id)

    # What becomes of agents.

    def up(self, known: KnownAgent, info: AgentInfo) -> None:
        event = self.agents.accept(known, info)
        for live in self._streams.values():
            # Engines offer the pages again; where they were told that there is no room, it is not counted on before it is seen.
            if (copy := live.copies.get(known.id)) is not None and copy.lost != _NO_ROOM:
                copy.pages, copy.lost = 0, None
                self.leases.hold(known.id, live.id)
        self._tell(event)

    def reported(self, known: KnownAgent, report: AgentReport) -> None:
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
            self._tell(CheckpointsReported(known.id, report.epoch, report.reserved_bytes, report.checkpoints, pages))
        self._lose(known.id, report.denied, _NO_ROOM)

    def lost(self, known: KnownAgent, cause: str) -> None:
        assert known.info is not None
        known.health = Health.DOWN
        known.reason = cause
        known.report = None
        self.leases.forget(known.id)
        for live in self._streams.values():
            if (copy := live.copies.get(known.id)) is not None:
                copy.pages, copy.lost = 0, copy.lost or _DOWN
        self._tell(HolderLost(known.id, known.info.epoch, cause))

    # What people see.

    def protected(self, live: LiveStream) -> dict[InstanceId, int]:
        """Leading full pages of the stream that each agent keeps."""
        return {agent: copy.pages for agent, copy in live.copies.items() if copy.lost is None}

    def unprotected(
        self, live: LiveStream, sends_checkpoints: Callable[[InstanceId], bool], unplaced: Mapping[StreamId, str]
    ) -> str | None:
        """Why no agent keeps, or is about to keep, anything of the stream; `unplaced` is why the policy found none for it."""
        if self._mode is BackupMode.OFF:
            return "backup.mode is off"
        plan, kept = live.plan, self.protected(live)
        if plan is None:
            return "no instance was found for it yet"
        if any(kept.values()) or (kept and sends_checkpoints(plan.decode)):
            return None
        if kept:
            return f"{plan.decode} sends no checkpoints"
        if live.copies:
            return "; ".join(f"{agent} {copy.lost}" for agent, copy in live.copies.items())
        return unplaced.get(live.id, "no agent was found for it")

    def count_unprotected(self, sends_checkpoints: Callable[[InstanceId], bool]) -> int:
        """Streams that should be protected, and are not."""
        if self._mode is BackupMode.OFF:
            return 0
        return sum(self.unprotected(live, sends_checkpoints, {}) is not None for live in self._streams.values())

    def describe(self) -> list[dict[str, Any]]:
        return [_described(known) for known in self.agents.known.values()]

    # Leases.

    async def _send(self, agent: InstanceId, update: LeaseUpdate) -> LeaseAnswer:
        if not self.agents.is_up(agent):
            raise UpstreamError("not up")
        return await self.agents.known[agent].backend.leases(update)

    def _unknown(self, agent: InstanceId, streams: tuple[StreamId, ...]) -> None:
        """The agent has no reservation for these: not yet, where nothing was seen of them, or no longer."""
        lost = []
        for stream in streams:
            if (copy := self._copy(stream, agent)) is None:
                continue
            if copy.pages > 0:
                lost.append(stream)
            elif copy.lost is None:
                self.leases.hold(agent, stream)
        self._lose(agent, lost, _GONE)

    def _lose(self, agent: InstanceId, streams: list[StreamId], why: str) -> None:
        lost = []
        for stream in streams:
            if (copy := self._copy(stream, agent)) is not None:
                copy.pages, copy.lost = 0, why
                self.leases.drop(agent, stream)
                lost.append(stream)
        if lost:
            self._tell(RetentionLost(agent, tuple(lost)))

    def _copy(self, stream: StreamId, agent: InstanceId) -> Copy | None:
        live = self._streams.get(stream)
        return None if live is None else live.copies.get(agent)


def _totals(report: AgentReport) -> tuple[int, int]:
    return report.reserved_bytes, report.checkpoints


def _described(known: KnownAgent) -> dict[str, Any]:
    info, report = known.info, known.report
    shown = {
        "id": known.id,
        "node": known.node,
        "url": known.backend.url,
        "pid": None if info is None else info.pid,
        "health": known.health,
        "epoch": None if info is None else info.epoch,
        "reserved_bytes": None if report is None else report.reserved_bytes,
        "held_bytes": None if report is None else report.held_bytes,
        "checkpoints": None if report is None else report.checkpoints,
        "capacity_bytes": None if info is None else info.capacity_bytes,
        "slots": {} if report is None else msgspec.to_builtins(report.slots),
    }
    return shown if known.reason is None else shown | {"reason": known.reason}
