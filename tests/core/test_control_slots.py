"""Slots as one proxy sees them: grants, denials, agents that do not answer."""

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrs.core.books.at_agents import AgentSlots, Denied, Granted, SlotOutcome
from kvrs.core.books.waiting import SlotBook
from kvrs.core.fleet.known import Agents
from kvrs.core.model.member import Health
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Slot, SlotAnswer, SlotRequest, SlotUpdate
from kvrs_testkit.slot_shell import NotingShell

AGENT, D1 = InstanceId("agent-n1"), InstanceId("d1")
A, B = StreamId("a"), StreamId("b")


def make_slots(
    share: int = 2, health: Health = Health.UP, lease_s: float = 9.0
) -> tuple[AgentSlots, SlotBook, NotingShell]:
    """The streams a, b and c have slots in the book of the proxy."""
    agents = Agents({AGENT: NodeId("n1")})
    agents.known[AGENT].health = health
    agents.known[AGENT].info = cast(Any, object())
    instances = cast(Any, SimpleNamespace(known={D1: SimpleNamespace(node="n1")}))
    shell = NotingShell()
    book = SlotBook(32)
    for name in "abc":
        book.acquire(D1, StreamId(name), 0.0, 1.0)
    return AgentSlots("me", book, agents, instances, lease_s, share, shell), book, shell


def asked(name: str, attempt: int = 1) -> SlotRequest:
    return SlotRequest(D1, StreamId(name), attempt)


def test_all_requests_of_one_turn_go_in_one_message_behind_the_releases() -> None:
    """The victims of one event have all asked by then, and what ends makes room."""
    slots, book, shell = make_slots()
    for name in ("a", "b"):
        assert slots.request(asked(name), 0.0) == AGENT
    book.release(A)
    slots.release()

    message = slots.message(AGENT)

    assert message == SlotUpdate("me", 9.0, release=[asked("a")], acquire=[asked("a"), asked("b")])
    assert shell.posted == [AGENT]
    book.release(B)
    slots.release()
    assert shell.posted == [AGENT, AGENT]


def test_an_agent_that_does_not_answer_is_not_asked_for_a_second() -> None:
    """A recovery does not wait for an agent that hangs more than once."""
    slots, _, shell = make_slots()
    slots.request(asked("a"), 0.0)

    assert slots.answered(asked("a"), AGENT, None, 0.25) == Granted(0)
    assert slots.request(asked("b"), 1.24) == Granted(0)
    assert slots.request(asked("c"), 1.25) == AGENT
    assert shell.counted == [SlotOutcome.LOCAL, SlotOutcome.LOCAL]


def test_local_grants_are_bounded_by_the_share() -> None:
    """All proxies together then take no more slots than there are."""
    slots, book, shell = make_slots(share=2, health=Health.DOWN)
    outcomes = [slots.request(asked(name), 0.0) for name in "abc"]

    assert outcomes == [Granted(0), Granted(0), Denied(0.25)]
    book.release(A)
    slots.release()
    assert slots.request(asked("c"), 0.0) == Granted(0)
    assert shell.counted.count(SlotOutcome.DENIED) == 1


def test_a_late_answer_to_an_older_attempt_changes_nothing_of_its_successor() -> None:
    """The slot that the stream has now is that of another request."""
    slots, book, _ = make_slots(share=1)
    slots.request(asked("a"), 0.0)
    book.release(A)
    slots.release()
    slots.message(AGENT)
    book.acquire(D1, A, 0.0, 1.0)
    slots.request(asked("a", attempt=2), 0.0)

    slots.answered(asked("a"), AGENT, Slot(0, 0.5), 0.1)
    slots.answered(asked("a"), AGENT, None, 0.1)

    assert slots.request(asked("b"), 0.1) == Granted(0), "none is granted locally before it"
    book.release(A)
    slots.release()
    assert slots.message(AGENT).release == [asked("a", attempt=2)]


def test_a_denied_request_is_not_renewed() -> None:
    """It keeps its place in the agent's queue, and holds nothing."""
    slots, book, _ = make_slots()
    slots.request(asked("a"), 0.0)

    assert slots.answered(asked("a"), AGENT, Slot(0, 0.5), 0.1) == Denied(0.5)
    book.deny(A, 0.6)

    assert slots.renewals(100.0) == {}
    assert not slots.message(AGENT).release


def test_slots_are_renewed_every_third_of_a_lease_and_when_the_agent_is_back() -> None:
    """An agent that restarted knows of nothing, and would grant to others what is held."""
    slots, _, _ = make_slots()
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
    slots.renewed(AGENT, update, SlotAnswer([], [A]))
    assert slots.renewals(20.0) == {}


def test_slots_of_a_proxy_that_died_are_free_after_10_s_at_most() -> None:
    """A longer `slot_lease_s` is cut to it; a shorter one holds."""
    leases_s = []
    for lease_s in (3.0, 60.0):
        slots, _, _ = make_slots(lease_s=lease_s)
        slots.request(asked("a"), 0.0)
        leases_s.append(slots.message(AGENT).lease_s)

    assert leases_s == [3.0, 10.0]


def test_agents_that_are_back_are_looked_for_ten_times_a_second() -> None:
    """Such a one may grant to others what is held. A short lease is renewed in time."""
    assert [make_slots(lease_s=lease_s)[0].tick_s for lease_s in (9.0, 0.15)] == [0.1, 0.15 / 3]


@pytest.mark.parametrize("seed", range(200))
def test_what_an_agent_may_have_granted_is_given_back_to_it_once(seed: int) -> None:
    """Whatever comes in any order: grants, denials, silence, an agent that is down, slots that it
    has given to others, and transfers that end in between.
    """
    random, (slots, book, _) = Random(seed), make_slots()
    agent = slots._agents.known[AGENT]
    may_hold: dict[StreamId, SlotRequest] = {}
    unanswered: list[SlotRequest] = []
    due: list[SlotRequest] = []
    released: list[SlotRequest] = []

    def release(stream: StreamId) -> None:
        book.release(stream)
        slots.release()
        if stream in may_hold:
            due.append(may_hold.pop(stream))
            released.extend(slots.message(AGENT).release)

    for attempt in range(1, 80):
        stream, now_s = random.choice([A, B]), 100.0 * attempt
        match random.randrange(4):
            case 0 if unanswered:
                request = unanswered.pop(random.randrange(len(unanswered)))
                slot = random.choice([Slot(attempt), Slot(0, 0.1), None])
                slots.answered(request, AGENT, slot, now_s)
                if slot == Slot(0, 0.1) and may_hold.get(request.stream) == request:
                    del may_hold[request.stream]
            case 1 if (update := slots.renewals(now_s).get(AGENT)) is not None:
                assert {each.stream: each for each in update.renew} == may_hold
                lost = random.choice(update.renew).stream
                slots.renewed(AGENT, update, SlotAnswer([], [lost]))
                del may_hold[lost]
            case 2:
                release(stream)
                assert book.acquire(D1, stream, now_s, 1.0)
            case _ if stream not in may_hold:
                agent.health = random.choice([Health.UP, Health.UP, Health.DOWN])
                request = asked(stream, attempt)
                if slots.request(request, now_s) == AGENT:
                    may_hold[stream] = request
                    unanswered.append(request)
            case _:
                pass

    assert released == due
    assert due
