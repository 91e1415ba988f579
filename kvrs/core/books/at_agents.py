"""Requests of one proxy to agents: slots for transfers, and room for checkpoints.

Slot requests of one proxy to the agents, which arbitrate transfer slots between proxies.

The proxy requests a slot right before the decode call of an attempt that fetches. All requests of
one turn of the driver's loop go to an agent in one message, after the releases. Slots are renewed
in one message per agent and third of a lease, and released when the attempt has produced a token
or has ended. If an agent cannot be asked, the proxy grants its own share of the target's slots
locally and counts those grants. `SlotBook` records both kinds of grants.

Reservations of open streams at agents for their checkpoints.

The first engine that sends pages makes the reservation at the agent. The proxy renews the
reservation until the stream has ended, or runs by a plan without that agent. A reservation is never
released during a recovery: a recovery that fails may fall back on the checkpoint. Replicas at peers
need no reservation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from kvrs.config.backup import BackupMode
from kvrs.core.books.leases import Leases
from kvrs.core.books.waiting import HeldSlot, SlotBook
from kvrs.core.configured import Configured
from kvrs.core.fleet.known import Agents, Instances
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.core.model.streams import Copy, LiveStream
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import (
    STORE,
    AgentInfo,
    AgentReport,
    Role,
    Slot,
    SlotAnswer,
    SlotRequest,
    SlotUpdate,
)

LEASE_S = 10.0  # The slots of a dead proxy are free within this time.
ANSWER_TIMEOUT_S = 0.25  # Limit of a recovery's wait for an agent's answer.
AGENT_COOLDOWN_S = 1.0  # Pause before an agent that did not answer is asked again.
# Wait before a stream asks again when the proxy's own share of a target's slots is in use.
LOCAL_GRANT_WAIT_S = 0.25
# Longest interval between calls of `renewals`: a restarted agent learns of held slots within it.
RENEW_TICK_S = 0.1


class SlotOutcome(StrEnum):
    GRANTED = "granted"
    DENIED = "denied"
    LOCAL = "local"  # The proxy granted the slot from its own share, without an agent.
    LOST = "lost"  # The agent gave the slot to another proxy, and ends the transfer.


class Granted(msgspec.Struct, frozen=True):
    token: int  # The agent's number of the grant; 0: granted without an agent.


class Denied(msgspec.Struct, frozen=True):
    wait_s: float  # Time until a slot may be free.


@dataclass(slots=True)
class _Outbox:
    """Slot requests in the next message to one agent."""

    release: list[SlotRequest] = field(default_factory=list)
    acquire: list[SlotRequest] = field(default_factory=list)


class SlotShell(Protocol):
    """Sends the messages of `AgentSlots`, and counts."""

    def post_slots(self, agent: InstanceId) -> None:
        """Send the agent's next message when the present work is done, in which all victims of an
        event make their requests.
        """

    def count_slot(self, outcome: SlotOutcome) -> None:
        """Note the outcome of a request, or a lost slot."""


class AgentSlots:
    """Asks agents for slots and applies their answers."""

    def __init__(
        self,
        owner: str,
        book: SlotBook,
        agents: Agents,
        instances: Instances,
        lease_s: float,
        share: int,
        shell: SlotShell,
    ) -> None:
        """`owner` is unique to this process; `share`: slots of a target that are
        this proxy's while no agent arbitrates.
        """
        self._owner = owner
        self._book = book
        self._agents = agents
        self._instances = instances
        self._lease_s = min(lease_s, LEASE_S)
        self.tick_s = min(RENEW_TICK_S, self._lease_s / 3)
        self._shell = shell
        self.reload(share)
        self._outboxes: dict[InstanceId, _Outbox] = {}
        self._cooling_until_s: dict[InstanceId, float] = {}
        self._met: dict[InstanceId, AgentInfo] = {}
        self._renewed_s = 0.0

    def reload(self, share: int) -> None:
        self._share = max(1, share)

    def request(self, asked: SlotRequest, now_s: float) -> Granted | Denied | InstanceId:
        """Return the outcome, or the agent whose outbox now has the request; then call `answered`
        with that agent's answer.
        """
        agent = self._agents.by_node.get(self._instances.known[asked.target].node)
        if agent is None:
            return Granted(0)
        held = self._book.held[asked.stream]
        if agent.health is not Health.UP or now_s < self._cooling_until_s.get(agent.id, 0.0):
            return self._grant_locally(held)
        if agent.info is not None and next(self._asked_of(agent.id), None) is None:
            # The agent holds no slot of this proxy, so no earlier process of it matters.
            self._met[agent.id] = agent.info
        held.asked = agent.id, asked
        self._outbox(agent.id).acquire.append(asked)
        return agent.id

    def answered(
        self, asked: SlotRequest, agent: InstanceId, slot: Slot | None, now_s: float
    ) -> Granted | Denied:
        """Apply the agent's answer. `slot`: None if no answer came within ANSWER_TIMEOUT_S, so that
        the proxy grants from its own share.
        """
        held = self._held(agent, asked)
        if slot is None:
            self._cooling_until_s[agent] = now_s + AGENT_COOLDOWN_S
            return Granted(0) if held is None else self._grant_locally(held)
        if not slot.token:
            if held is not None:
                held.asked = None  # No release is sent: the request stays in the agent's queue.
            self._shell.count_slot(SlotOutcome.DENIED)
            return Denied(slot.wait_s)
        self._shell.count_slot(SlotOutcome.GRANTED)
        return Granted(slot.token)

    def _grant_locally(self, held: HeldSlot) -> Granted | Denied:
        others = self._book.held_at(held.target)
        if sum(each.is_local for each in others if each is not held) >= self._share:
            self._shell.count_slot(SlotOutcome.DENIED)
            return Denied(LOCAL_GRANT_WAIT_S)
        held.is_local = True
        self._shell.count_slot(SlotOutcome.LOCAL)
        return Granted(0)

    def message(self, agent: InstanceId) -> SlotUpdate:
        """Take the agent's next message: the releases, then the requests in order of arrival."""
        outbox = self._outboxes.pop(agent)
        return SlotUpdate(
            self._owner, self._lease_s, release=outbox.release, acquire=outbox.acquire
        )

    @property
    def has_asked(self) -> bool:
        """True if any slot was granted by an agent or is requested from one."""
        return any(each.asked is not None for each in self._book.held.values())

    def begin(self, now_s: float) -> None:
        """Count the interval until the next renewal from now."""
        self._renewed_s = now_s

    def renewals(self, now_s: float) -> dict[InstanceId, SlotUpdate]:
        """Return the renewals that are due; call every `tick_s`.

        A restarted agent gets a renewal at once: it knows of no slot, and could grant held slots to
        other proxies.
        """
        if is_due := now_s >= self._renewed_s + self._lease_s / 3:
            self._renewed_s = now_s
        found = {}
        for agent in self._agents.known.values():
            is_back = agent.health is Health.UP and self._met.get(agent.id) is not agent.info
            if is_back and agent.info is not None:
                self._met[agent.id] = agent.info
            held = [*self._asked_of(agent.id)]
            if held and (is_due or is_back):
                found[agent.id] = SlotUpdate(self._owner, self._lease_s, renew=held)
        return found

    def _asked_of(self, agent: InstanceId) -> Iterator[SlotRequest]:
        for each in self._book.held.values():
            if each.asked is not None and each.asked[0] == agent:
                yield each.asked[1]

    def renewed(self, agent: InstanceId, update: SlotUpdate, answer: SlotAnswer) -> None:
        """Drop the slots that the agent has given to other proxies; the agent ends their
        transfers.
        """
        for asked in update.renew:
            if asked.stream in answer.lost and (held := self._held(agent, asked)) is not None:
                held.asked = None
                self._shell.count_slot(SlotOutcome.LOST)

    def _held(self, agent: InstanceId, asked: SlotRequest) -> HeldSlot | None:
        """Return the slot of this request; None: its attempt has released the slot."""
        held = self._book.held.get(asked.stream)
        return held if held is not None and held.asked == (agent, asked) else None

    def release(self) -> None:
        """Note the slots that the book has released since the last call."""
        released = self._book.released.copy()
        self._book.released.clear()
        for agent, asked in released:
            self._outbox(agent).release.append(asked)

    def _outbox(self, agent: InstanceId) -> _Outbox:
        if agent not in self._outboxes:
            self._outboxes[agent] = _Outbox()
            self._shell.post_slots(agent)
        return self._outboxes[agent]


# Reasons why an agent has no checkpoint of a stream.
_GONE = "has dropped the pages of the stream"
_NO_ROOM = "has no room"
_DOWN = "is down"


class CheckpointHolds:
    """Records which agents keep pages of which open streams."""

    def __init__(
        self,
        configured: Configured,
        agents: Agents,
        instances: Instances,
        streams: Mapping[StreamId, LiveStream],
        tell: Callable[[ev.Event, float], None],
        leases_begun: Callable[[], None],
    ) -> None:
        self.agents = agents
        # Reserved room is scarce: releases go with the next message to the agents.
        self.leases = Leases(configured.lease_s, leases_begun, release_s=configured.load_interval_s)
        self._mode = configured.backup.mode
        by_itself = configured.engine_keeps_kv
        self._why_none = "SGLang keeps KV by itself" if by_itself else "backup.mode is off"
        self._instances = instances
        self._streams = streams
        self._tell = tell

    def planned(self, live: LiveStream, plan: act.Plan) -> None:
        """Start to renew the reservations at the agents of the plan."""
        for place in plan.places if self._mode is not BackupMode.PEER else ():
            live.copies.setdefault(place.holder, Copy()).lost = None
            self.leases.hold(place.holder, live.id)

    def resumed(self, live: LiveStream, now_s: float) -> None:
        """Release the agents outside the plan, after the plan's attempt has produced a token."""
        assert live.attempt.plan is not None
        places = {place.holder for place in live.attempt.plan.places}
        for agent in [name for name in live.copies if name not in places]:
            # Without a reported page there may be no reservation, and a release would bar later
            # attempts from this agent. A reservation that is dropped here expires by its lease.
            let_go = self.leases.release if live.copies.pop(agent).pages else self.leases.drop
            let_go(agent, live.id)
            self._tell(ev.RetentionLost(agent, (live.id,)), now_s)

    def adopt(self, live: LiveStream, kept: ev.Kept) -> None:
        """Renew the reservation that the stream's previous proxy held."""
        known = self.agents.known.get(kept.holder)
        if known is not None and known.info is not None and known.info.epoch == kept.epoch:
            live.copies[kept.holder] = Copy(kept.pages)
            self.leases.hold(kept.holder, live.id)

    def ended(self, live: LiveStream) -> None:
        let_go = self.leases.drop if live.journal.resumable else self.leases.release
        for agent in live.copies:
            let_go(agent, live.id)

    def up(self, known: Agent, info: AgentInfo, now_s: float) -> None:
        event = self.agents.accept(known, info)
        for live in self._streams.values():
            # Engines send the pages again; a copy that was denied room counts only when the agent
            # reports it.
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

    def protected(self, live: LiveStream) -> dict[InstanceId, int]:
        """Return the number of leading full pages that each agent or peer keeps of the stream."""
        if self._mode is BackupMode.PEER:
            plan = live.attempt.plan
            chosen = () if plan is None else plan.places
            up = [place.holder for place in chosen if self._instances.is_up(place.holder)]
            return dict.fromkeys(up, 0) | live.replicas
        kept = {agent: copy.pages for agent, copy in live.copies.items() if copy.lost is None}
        return kept | self._in_rows(live)

    def _in_rows(self, live: LiveStream) -> dict[InstanceId, int]:
        plan = live.attempt.plan
        if plan is None or not (there := self._instances.known[plan.decode]).shared.rows:
            return {}
        tokens = len(live.journal.prompt_ids or ()) + len(live.journal.output_ids)
        if there.shared.in_store:
            return {InstanceId(STORE): tokens // there.abilities.page_size_tokens}
        return {self.agents.by_node[there.node].id: tokens // there.abilities.page_size_tokens}

    def unprotected(self, live: LiveStream, unplaced: Mapping[StreamId, str]) -> str | None:
        """Return the reason why no agent keeps or will keep pages of the stream; None if one does.
        `unplaced` has the policy's reasons for choosing no agent.
        """
        plan, kept = live.attempt.plan, self.protected(live)
        there = None if plan is None else self._instances.known[plan.decode]
        if self._mode is BackupMode.OFF and (there is None or not there.shared.in_store):
            return self._why_none
        if plan is None or there is None:
            return "no instance was found for the stream yet"
        if any(kept.values()) or (kept and (there.abilities.checkpoints or there.shared.rows)):
            return None
        if kept:
            return f"no agent keeps KV of {plan.decode}"
        if live.copies:
            return "; ".join(f"{agent} {copy.lost}" for agent, copy in live.copies.items())
        return unplaced.get(live.id, "no agent was found for the stream")

    def are_missing(self, known: Member) -> bool:
        """Return whether the instance decodes and sends no pages to any agent, although backup is
        on.
        """
        is_asked = self._mode is not BackupMode.OFF and known.role is not Role.PREFILL
        has_some = known.abilities.checkpoints or bool(known.shared.rows)
        return is_asked and self._instances.is_up(known.id) and not has_some

    def count_unprotected(self) -> int:
        """Count the streams that should have a checkpoint and have none."""
        if self._mode is BackupMode.OFF:
            return 0
        return sum(self.unprotected(live, {}) is not None for live in self._streams.values())

    def unknown(self, agent: InstanceId, streams: Sequence[StreamId], now_s: float) -> None:
        """Handle an agent's answer that it has no reservation for these streams: not yet, if no
        page was reported, else no longer.
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
