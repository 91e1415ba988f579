"""How a simulated proxy asks the agents of targets for slots: as `kvrs/proxy/slots.py`, with messages that pass each other."""

from collections.abc import Callable, Iterable
from functools import partial
from random import Random

from kvrs.config import Config
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Slot, SlotAsked
from kvrs.sim.agent import SimAgent
from kvrs.sim.laws import Laws
from kvrs.sim.site import Site
from kvrs.sim.streams import Live

PATIENCE_S = 0.25  # As the proxy's.


class Slots:
    def __init__(self, owner: str, site: Site, laws: Laws, rng: Random, is_up: Callable[[InstanceId], bool]) -> None:
        self._owner = owner
        self._site = site
        self._laws = laws
        self._rng = rng
        self._is_up = is_up
        self.denials = 0
        self.unarbitrated = 0

    def acquire(self, live: Live, granted: Callable[[], None], denied: Callable[[float], None]) -> None:
        """One of the two is called, unless the attempt is over by then. Whoever cannot be asked stops nobody."""
        assert live.plan is not None
        agent = self._agent_of(live.plan.decode)
        if agent is None or not self._is_up(agent.id):
            self.unarbitrated += agent is not None
            granted()
            return
        attempt, life = live.attempt, agent.life
        live.slot = asked = SlotAsked(live.plan.decode, live.id, attempt)
        is_answered = False

        def answer(slot: Slot | None) -> None:
            nonlocal is_answered
            if is_answered or live.attempt != attempt or live.broken or live.outcome:
                return
            is_answered = True
            if slot is not None and not slot.token:
                self.denials += 1
                live.slot = None
                denied(slot.wait_s)
                return
            self.unarbitrated += slot is None
            if slot is not None:
                live.slot_token = slot.token
                self._laws.slot_granted(asked, life)
            granted()

        def ask() -> None:
            slot = agent.acquire(self._owner, asked)
            self._site.clock.after(self._delay_s(), lambda: answer(slot))

        agent.call(self._delay_s(), ask, lambda: answer(None))
        self._site.clock.after(PATIENCE_S, lambda: answer(None))

    def release(self, live: Live) -> None:
        """It fetches nothing any more. This may come before what it asked for."""
        if live.slot is None:
            return
        asked, live.slot, live.slot_token = live.slot, None, 0
        self._laws.slot_left(asked)
        agent = self._agent_of(asked.target)
        assert agent is not None
        agent.call(self._delay_s(), lambda: agent.give_back(self._owner, asked))

    def renew(self, streams: Iterable[Live]) -> None:
        held: dict[InstanceId, list[SlotAsked]] = {}
        for live in streams:
            if live.slot is not None:
                held.setdefault(live.slot.target, []).append(live.slot)
        for target, renewed in held.items():
            agent = self._agent_of(target)
            if agent is not None and self._is_up(agent.id):
                agent.call(self._delay_s(), partial(agent.renew_slots, self._owner, renewed))

    def _agent_of(self, target: InstanceId) -> SimAgent | None:
        agent = self._site.holders.get(node_agent(self._site.config, target))
        return agent if isinstance(agent, SimAgent) else None

    def _delay_s(self) -> float:
        return self._rng.uniform(0.0001, 0.005)


def node_agent(config: Config, target: InstanceId) -> InstanceId:
    return next(node.agent_id for node, instance in config.cluster.instances() if instance.id == target)
