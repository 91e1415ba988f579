"""Addition and removal of instances and agents while streams run.

An instance is drained before its removal. It is removed once no stream runs there, moved streams
have their next token elsewhere, and no KV is retained there for a stream; this wait is limited by
the time that its streams might have stayed.
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
        # Time until which retained KV is awaited, by leaving instance.
        self.leaving: dict[InstanceId, float] = {}

    def add(
        self, instance: InstanceId, node: NodeId, role: Role, group: str | None = None
    ) -> Member:
        assert instance not in self.leaving
        return self._control.instances.add(instance, node, role, group)

    def remove(self, instance: InstanceId, drain_s: float, now_s: float) -> bool:
        """Begin an instance's removal, which ends when `gone` returns it. True: removed at once,
        because it was never up and nothing could leave it.
        """
        known = self._control.instances.known[instance]
        if known.health is not Health.UP and not known.was_up:
            self._take_out(known, now_s)
            return True
        self.leaving[instance] = now_s + drain_s
        self._control.drains.leave(instance, drain_s, now_s)
        return False

    def gone(self, now_s: float) -> list[InstanceId]:
        """Remove and return instances that all streams have left; call repeatedly while any is
        `leaving`.
        """
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
        """Remove an agent: its checkpoints are useless from now on, and streams get others
        elsewhere.
        """
        if known.health is Health.UP:
            self._control.checkpoints.lost(known, "removed", now_s)
        self._control.agents.remove(known)
