"""Instances and agents that come and go while streams run.

One that is to go is drained first. It is removed once no stream runs there, those that were moved
have their next token elsewhere, and no KV is retained there for one, which is waited for as long as
its streams might have stayed.
"""

from typing import Any

from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId, NodeId
from kvrs.protocol.instance import Role


class Topology:
    """Changes of the instances and agents of one proxy."""

    def __init__(self, control: Control[Any]) -> None:
        self._control = control
        self.leaving: dict[InstanceId, float] = {}  # Until when retained KV is waited for.

    def add(
        self, instance: InstanceId, node: NodeId, role: Role, group: str | None = None
    ) -> Member:
        assert instance not in self.leaving
        return self._control.instances.add(instance, node, role, group)

    def remove(self, instance: InstanceId, drain_s: float, now_s: float) -> bool:
        """Begin to; it is removed when `gone` returns it. True: it is already, since it was never
        up and has nothing that could leave it.
        """
        known = self._control.instances.known[instance]
        if known.health is not Health.UP and not known.was_up:
            self._take_out(known, now_s)
            return True
        self.leaving[instance] = now_s + drain_s
        self._control.drains.leave(instance, drain_s, now_s)
        return False

    def gone(self, now_s: float) -> list[InstanceId]:
        """Remove what streams have left; ask again and again while any is `leaving`."""
        control = self._control
        gone = [
            name
            for name, until_s in self.leaving.items()
            if not control.produced_on(name)
            and not control.policy.is_left_at(name)
            and (now_s >= until_s or not control.leases.holds_any(name))
        ]
        for name in gone:
            del self.leaving[name]
            self._take_out(control.instances.known[name], now_s)
        return gone

    def _take_out(self, known: Member, now_s: float) -> None:
        control = self._control
        if known.health is Health.UP:
            known.lose("removed")
        control.instances.remove(known)
        for book in (control.self_tests, control.leases, control.drains, control.gpus):
            book.forget(known.id)
        control.tell(ev.InstanceRemoved(known.id, {}), now_s)

    def remove_agent(self, known: Agent, now_s: float) -> None:
        """Its checkpoints are of no use any more; streams get others elsewhere."""
        if known.health is Health.UP:
            self._control.checkpoints.lost(known, "removed", now_s)
        self._control.agents.remove(known)
