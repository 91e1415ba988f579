"""Messages about slots between a simulated proxy and agents; they may pass each other."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import assert_never

from kvrs.core.books.agent_slots import ANSWER_TIMEOUT_S, AgentSlots, Denied, Granted
from kvrs.ids import InstanceId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotRequest, SlotUpdate
from kvrs_lab.sim.agent import SimAgent
from kvrs_lab.sim.invariants import Grants
from kvrs_lab.sim.process import Step
from kvrs_lab.sim.site import Site


class SlotMessages:
    def __init__(
        self,
        proxy: str,
        slots: AgentSlots,
        site: Site,
        grants: Grants,
        rng: Random,
        after: Callable[[float, Step], None],
    ) -> None:
        """`after` does a step later, unless the proxy has died by then."""
        self._proxy = proxy
        self._slots = slots
        # When all victims of this moment have asked.
        slots.has_message = lambda name: after(0.0, partial(self._post_to, name))
        self._site = site
        self._grants = grants
        self._rng = rng
        self._after = after
        self._asking: dict[SlotRequest, Callable[[Slot | None], None]] = {}
        self._wanted: set[SlotRequest] = set()  # Asked for, and not released.

    def acquire(
        self, asked: SlotRequest, granted: Callable[[int], None], denied: Callable[[float], None]
    ) -> None:
        """One of the two is called."""
        self._wanted.add(asked)
        outcome = self._slots.request(asked, self._site.clock.now_s)
        if not isinstance(outcome, str):
            self._decide(outcome, granted, denied)
            return
        agent, is_answered = outcome, False

        def answer(slot: Slot | None) -> None:
            nonlocal is_answered
            if not is_answered:
                is_answered = True
                decided = self._slots.answered(asked, agent, slot, self._site.clock.now_s)
                self._decide(decided, granted, denied)

        self._asking[asked] = answer
        self._after(ANSWER_TIMEOUT_S, lambda: answer(None))

    def _decide(
        self,
        outcome: Granted | Denied,
        granted: Callable[[int], None],
        denied: Callable[[float], None],
    ) -> None:
        match outcome:
            case Granted(token=token):
                granted(token)
            case Denied(wait_s=wait_s):
                denied(wait_s)
            case _:
                assert_never(outcome)

    def _post_to(self, name: InstanceId) -> None:
        update = self._slots.message(name)
        for asked in update.release:
            self._wanted.discard(asked)
            self._grants.released(asked)
        self._send(name, update)

    def _send(self, name: InstanceId, update: SlotUpdate) -> None:
        agent = self._site.holders[name]
        assert isinstance(agent, SimAgent)
        asking = [self._asking.pop(asked, None) for asked in update.acquire]

        def ask() -> None:
            answer = agent.update_slots(update)
            for asked, slot in zip(update.acquire, answer.acquired, strict=True):
                if slot.token and asked in self._wanted:
                    self._grants.granted(self._proxy, asked, agent.life)
            self._after(self._message_s(), lambda: answered(answer))

        def answered(answer: SlotAnswer) -> None:
            self._slots.renewed(name, update, answer)
            for callback, slot in zip(asking, answer.acquired, strict=True):
                if callback is not None:
                    callback(slot)

        agent.call(self._message_s(), ask)

    def _message_s(self) -> float:
        """Messages about slots may pass each other."""
        return self._rng.uniform(0.0001, 0.005)

    def renew(self) -> None:
        """Send the renewals that are due, now and from now on."""
        for name, update in self._slots.renewals(self._site.clock.now_s).items():
            self._send(name, update)
        self._after(self._slots.tick_s, self.renew)
