"""Slots as one proxy sees them: grants, denials, agents that do not answer."""

from types import SimpleNamespace
from typing import Any, cast

from kvrs.core.books.agent_slots import Denied, Granted, SlotOutcome, Slots
from kvrs.core.fleet.known import Agents
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotRequest, SlotUpdate

AGENT, D1 = InstanceId("agent-n1"), InstanceId("d1")


def make_slots(
    share: int = 2, health: Health = Health.UP, lease_s: float = 9.0
) -> tuple[Slots, list[SlotOutcome]]:
    agents = Agents({AGENT: NodeId("n1")})
    agents.known[AGENT].health = health
    agents.known[AGENT].info = cast(Any, object())
    instances = cast(Any, SimpleNamespace(known={D1: SimpleNamespace(node="n1")}))
    counted: list[SlotOutcome] = []
    return Slots("me", agents, instances, lease_s, share, counted.append), counted


def asked(name: str, attempt: int = 1) -> SlotRequest:
    return SlotRequest(D1, StreamId(name), attempt)


def test_all_requests_of_one_turn_go_in_one_message_behind_the_releases() -> None:
    """The victims of one event have all asked by then, and what ends makes room."""
    slots, _ = make_slots()
    for name in ("a", "b"):
        assert slots.request(asked(name), 0.0) == AGENT
    slots.release(StreamId("a"), 0, 1)

    assert slots.waiting_agents() == [AGENT]
    message = slots.message(AGENT)

    assert message == SlotUpdate("me", 9.0, release=[asked("a")], acquire=[asked("a"), asked("b")])
    assert slots.waiting_agents() == []


def test_an_agent_that_does_not_answer_is_not_asked_for_a_second() -> None:
    """A recovery does not wait for an agent that hangs more than once."""
    slots, counted = make_slots()
    slots.request(asked("a"), 0.0)

    assert slots.answered(asked("a"), AGENT, None, 0.25) == Granted(0)
    assert slots.request(asked("b"), 1.24) == Granted(0)
    assert slots.request(asked("c"), 1.25) == AGENT
    assert counted == [SlotOutcome.LOCAL, SlotOutcome.LOCAL]


def test_local_grants_are_bounded_by_the_share() -> None:
    """All proxies together then take no more slots than there are."""
    slots, counted = make_slots(share=2, health=Health.DOWN)
    outcomes = [slots.request(asked(name), 0.0) for name in "abc"]

    assert outcomes == [Granted(0), Granted(0), Denied(0.25)]
    slots.release(StreamId("a"), 0, 1)
    assert slots.request(asked("c"), 0.0) == Granted(0)
    assert counted.count(SlotOutcome.DENIED) == 1


def test_the_end_of_an_older_attempt_releases_nothing_of_its_successor() -> None:
    """Only the attempt that holds a slot gives it back."""
    slots, _ = make_slots(share=1, health=Health.DOWN)
    slots.request(asked("a", attempt=2), 0.0)

    slots.release(StreamId("a"), 0, 1)

    assert slots.request(asked("b"), 0.0) == Denied(0.25)


def test_a_denied_request_is_not_renewed() -> None:
    """It keeps its place in the agent's queue, and holds nothing."""
    slots, _ = make_slots()
    slots.request(asked("a"), 0.0)

    assert slots.answered(asked("a"), AGENT, Slot(0, 0.5), 0.1) == Denied(0.5)
    assert slots.renewals(100.0) == {}


def test_slots_are_renewed_every_third_of_a_lease_and_when_the_agent_is_back() -> None:
    """An agent that restarted knows of nothing, and would grant to others what is held."""
    slots, _ = make_slots()
    agents = slots._agents
    slots.request(asked("a"), 0.0)
    slots.answered(asked("a"), AGENT, Slot(5), 0.1)
    slots.renewals(10.0)

    early = slots.renewals(12.9)
    agents.known[AGENT].info = cast(Any, object())
    back = slots.renewals(12.95)
    due = slots.renewals(13.0)

    update = SlotUpdate("me", 9.0, renew=[asked("a")])
    assert (early, back, due) == ({}, {AGENT: update}, {AGENT: update})
    slots.renewed(update, SlotAnswer([], [StreamId("a")]))
    assert slots.renewals(20.0) == {}


def test_slots_of_a_proxy_that_died_are_free_after_10_s_at_most() -> None:
    """A longer `slot_lease_s` is cut to it; a shorter one holds."""
    leases_s = []
    for lease_s in (3.0, 60.0):
        slots, _ = make_slots(lease_s=lease_s)
        slots.request(asked("a"), 0.0)
        leases_s.append(slots.message(AGENT).lease_s)

    assert leases_s == [3.0, 10.0]


def test_agents_that_are_back_are_looked_for_ten_times_a_second() -> None:
    """Such a one may grant to others what is held. A short lease is renewed in time."""
    assert [make_slots(lease_s=lease_s)[0].tick_s for lease_s in (9.0, 0.15)] == [0.1, 0.15 / 3]
