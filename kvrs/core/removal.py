"""The removal of instances and agents while streams run.

An instance is drained before its removal. It is removed once no stream runs there, moved streams
have their next token elsewhere, and no KV is retained there for a stream; this wait is limited by
the time that its streams might have stayed.
"""

from typing import Any

from kvrs.core import kv_locations
from kvrs.core.control import Control
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import Health, Member
from kvrs.ids import InstanceId


def remove(control: Control[Any], instance: InstanceId, drain_s: float, now_s: float) -> bool:
    """Begin an instance's removal, which ends when `gone` returns it. True: removed at once,
    because it was never up and nothing could leave it.
    """
    known = control.instances.known[instance]
    if known.health is not Health.UP and not known.was_up:
        _take_out(control, known, now_s)
        return True
    control.drains.leave(instance, drain_s, now_s)
    return False


def gone(control: Control[Any], now_s: float) -> list[InstanceId]:
    """Remove the instances in `Drains.leaving` that all streams have left, and return them; call
    repeatedly until `Drains.leaving` is empty.
    """
    gone = [
        name
        for name, until_s in control.drains.leaving.items()
        if not control.produced_on(name)
        and not kv_locations.is_left_at(control.policy.state, name)
        and (now_s >= until_s or not control.leases.holds_any(name))
    ]
    for name in gone:
        _take_out(control, control.instances.known[name], now_s)
    return gone


def _take_out(control: Control[Any], known: Member, now_s: float) -> None:
    if known.health is Health.UP:
        known.lose("removed")
    control.instances.remove(known)
    for book in (control.self_tests, control.leases, control.drains, control.gpus):
        book.forget(known.id)
    control.tell(ev.InstanceRemoved(known.id, {}), now_s)
    control.weights_known((), now_s)  # One vote less.


def remove_agent(control: Control[Any], known: Agent, now_s: float) -> None:
    """Remove an agent: its checkpoints are useless from now on, and streams get others
    elsewhere.
    """
    if known.health is Health.UP:
        control.checkpoints.lost(known, "removed", now_s)
    control.agents.remove(known)
