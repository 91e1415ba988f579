"""Slot requests of one proxy to the agents, which arbitrate transfer slots between proxies.

The proxy requests a slot right before the decode call of an attempt that fetches. All requests of
one turn of the driver's loop go to an agent in one message, after the releases. Slots are renewed
in one message per agent and third of a lease, and released when the attempt has produced a token
or has ended. If an agent cannot be asked, the proxy grants its own share of the target's slots
locally and counts those grants. `SlotBook` records both kinds of grants.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from kvrs.core.books.waiting import HeldSlot, SlotBook
from kvrs.core.fleet.known import Agents, Instances
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId
from kvrs.protocol.instance import AgentInfo, Slot, SlotAnswer, SlotRequest, SlotUpdate

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
