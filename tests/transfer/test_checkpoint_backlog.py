"""Pages sent to each holder, and their order, without a socket and without a clock."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.instance import CheckpointTarget
from kvrs.protocol.pages import root_tag
from kvrs.transfer.checkpoint_backlog import (
    LOOK_AGAIN_S,
    ROOM_S,
    STUCK_S,
    CheckpointBacklog,
    CheckpointDelivery,
)
from kvrs.transfer.peers import HeldPages, StoreCode
from kvrs_engine.scheduling.sequences import Sequence
from kvrs_testkit.examples import examples

PAGE = 4
A, B = InstanceId("agent-a"), InstanceId("agent-b")


def sequence_of(
    stream: str, pages: int, *, attempt: int = 1, owner_epoch: int = 0, prefill_only: bool = False
) -> Sequence:
    """A history of whole pages and one token more."""
    sequence = Sequence(
        StreamId(stream),
        (owner_epoch, attempt),
        [1] * (pages * PAGE + 1),
        0,
        root_tag("m", stream),
        prefill_only,
    )
    sequence.extend_tags(PAGE)
    return sequence


def compute(sequence: Sequence, pages: int) -> Sequence:
    """Let that many leading pages be full."""
    while len(sequence.token_ids) <= pages * PAGE:
        sequence.token_ids.append(1)
    sequence.extend_tags(PAGE)
    sequence.computed_tokens = pages * PAGE
    return sequence


def to(*agents: InstanceId) -> list[CheckpointTarget]:
    return [CheckpointTarget(agent, 1000) for agent in agents]


def ok(pages: int) -> HeldPages:
    return HeldPages(StoreCode.OK, pages)


def following(
    backlog: CheckpointBacklog, stream: str, pages: int, *agents: InstanceId, **how: Any
) -> Sequence:
    """A stream of which that many pages are full, and which is followed."""
    handed_over = how.pop("handed_over", False)
    sequence = sequence_of(stream, pages, **how)
    backlog.follow(sequence, to(*agents or (A,)), handed_over=handed_over)
    backlog.filled(compute(sequence, pages), 0.0)
    return sequence


def offer_all(
    backlog: CheckpointBacklog, held_pages: int = 0, now_s: float = 0.0, agent: InstanceId = A
) -> list[CheckpointDelivery]:
    """Make all offers that are due; the holder answers with that many pages of each."""
    offers = backlog.offers(agent, now_s)
    for delivery in offers:
        backlog.offered(delivery, ok(held_pages), now_s)
    return offers


def planned(
    backlog: CheckpointBacklog, budget: int = 100, now_s: float = 0.0, agent: InstanceId = A
) -> list[tuple[str, int, int]]:
    return [
        (delivery.claim.stream, first, end)
        for delivery, first, end in backlog.ranges(agent, now_s, budget)
    ]


def send_all(backlog: CheckpointBacklog, now_s: float = 0.0, agent: InstanceId = A) -> None:
    """One batch of everything, and the holder takes it."""
    for delivery, first, end in list(backlog.ranges(agent, now_s, 1 << 30)):
        backlog.stored(delivery, first, ok(end), now_s)


@pytest.mark.parametrize(
    ("code", "sending"),
    [(StoreCode.FENCED, False), (StoreCode.FENCED, True), (StoreCode.FULL, True)],
)
def test_what_is_refused_is_not_brought_again(code: StoreCode, sending: bool) -> None:
    """And its stream is counted as unprotected; another holder of it is not affected."""
    backlog = CheckpointBacklog(PAGE)
    sequence = following(backlog, "s", 2, A, B)
    [delivery] = backlog.offers(A, 0.0)
    if sending:
        backlog.offered(delivery, ok(0), 0.0)
        backlog.stored(delivery, 0, HeldPages(code, 0), 0.0)
    else:
        backlog.offered(delivery, HeldPages(code, 0), 0.0)

    assert backlog.filled(compute(sequence, 3), 0.0) == [B]
    assert (backlog.offers(A, 0.0), planned(backlog), backlog.due_in_s(A, 0.0)) == ([], [], None)
    assert (backlog.lag_pages, backlog.unprotected) == (3, 0)
    [other] = backlog.offers(B, 0.0)
    backlog.offered(other, HeldPages(StoreCode.FENCED, 0), 0.0)
    assert (backlog.lag_pages, backlog.unprotected) == (0, 1)
    backlog.check()


def test_what_found_no_room_is_offered_again_after_a_while() -> None:
    """Meanwhile it is no lag and takes nothing from other holders; when there is room it is brought
    whole.
    """
    backlog = CheckpointBacklog(PAGE)
    sequence = following(backlog, "s", 2, A, B)
    [delivery] = backlog.offers(A, 0.0)
    backlog.offered(delivery, HeldPages(StoreCode.FULL, 0), 0.0)
    offer_all(backlog, agent=B)
    assert (backlog.lag_pages, backlog.unprotected) == (2, 0)
    assert backlog.budget_pages(8, lent_pages=0) == 8  # One holder has something to get.
    send_all(backlog, agent=B)

    backlog.lost(A)  # Another process, with room or without, is asked no sooner.
    backlog.filled(compute(sequence, 3), 1.0)
    assert (backlog.offers(A, 1.0), planned(backlog, now_s=1.0), backlog.due_in_s(A, 1.0)) == (
        [],
        [],
        ROOM_S - 1.0,
    )
    backlog.check()

    assert offer_all(backlog, now_s=ROOM_S) == [delivery]
    assert (planned(backlog, now_s=ROOM_S), backlog.lag_pages, backlog.unprotected) == (
        [("s", 0, 3)],
        4,
        0,
    )
    send_all(backlog, now_s=ROOM_S)
    assert backlog.due_in_s(A, ROOM_S) is None
    backlog.check()


def test_a_prompt_that_found_no_room_waits_for_it_after_its_end() -> None:
    """It is dropped when it is retained no longer, like one whose holder does not answer."""
    backlog = CheckpointBacklog(PAGE)
    sequence = following(backlog, "s", 2, prefill_only=True)
    [delivery] = backlog.offers(A, 0.0)
    backlog.offered(delivery, HeldPages(StoreCode.FULL, 0), 0.0)
    backlog.ended(sequence, send_rest=True)

    assert (backlog.endings(A), backlog.unprotected, backlog.lag_pages) == ([delivery], 1, 0)
    backlog.drop(delivery)
    assert (backlog.due_in_s(A, 0.0), backlog.unprotected) == (None, 0)
    backlog.check()


def test_a_lost_holder_is_asked_again_and_the_stream_is_unprotected_meanwhile() -> None:
    """After a restart it may have less than it answered before."""
    backlog = CheckpointBacklog(PAGE)
    sequence = following(backlog, "s", 3)
    offer_all(backlog)
    send_all(backlog)

    backlog.lost(A)
    assert backlog.unprotected == 1
    backlog.filled(compute(sequence, 4), 1.0)
    assert planned(backlog) == []
    offer_all(backlog, held_pages=1)

    assert backlog.unprotected == 0
    assert planned(backlog) == [("s", 1, 4)]


@pytest.mark.parametrize("held_before", [0, 1])
def test_a_holder_that_took_nothing_is_offered_the_pages_again_later(held_before: int) -> None:
    """Not at once. It may be another process, which has reserved nothing: nor would it ever take
    the first page of a stream.
    """
    backlog = CheckpointBacklog(PAGE)
    following(backlog, "s", 3)
    offer_all(backlog, held_before)
    [(delivery, first, _)] = backlog.ranges(A, 0.0, 10)

    backlog.stored(delivery, first, ok(held_before), 0.0)

    assert (backlog.offers(A, STUCK_S / 2), planned(backlog, now_s=STUCK_S)) == ([], [])
    assert len(offer_all(backlog, held_before, now_s=STUCK_S)) == 1
    assert planned(backlog, now_s=STUCK_S) == [("s", held_before, 3)]


def test_a_higher_attempt_replaces_a_lower_one_and_never_the_other_way_round() -> None:
    """A request of an older attempt may arrive late."""
    backlog = CheckpointBacklog(PAGE)
    old = following(backlog, "s", 3, attempt=2)
    new = following(backlog, "s", 2, attempt=3)
    older_still = following(backlog, "s", 3, attempt=1)
    offer_all(backlog)

    assert [delivery.sequence for delivery, _, _ in backlog.ranges(A, 0.0, 10)] == [new]
    assert [backlog.filled(sequence, 0.0) for sequence in (old, older_still)] == [[], []]
    following(backlog, "s", 1, attempt=1, owner_epoch=1)
    [delivery] = backlog.offers(A, 0.0)
    assert (delivery.claim.owner_epoch, delivery.claim.attempt) == (1, 1)
    backlog.check()


def test_an_answer_to_a_superseded_delivery_changes_nothing() -> None:
    backlog = CheckpointBacklog(PAGE)
    following(backlog, "s", 3)
    [late] = offer_all(backlog)
    following(backlog, "s", 2, attempt=2)

    backlog.stored(late, 0, ok(3), 0.0)
    backlog.offered(late, HeldPages(StoreCode.FENCED, 0), 0.0)

    assert (backlog.lag_pages, backlog.unprotected) == (2, 0)
    backlog.check()


class TestHandOff:
    """The prefill instance sends the prompt's pages; decode sends its own, and the prompt's only if
    prefill does not.
    """

    def test_decode_asks_first_after_a_while_and_sends_what_is_left(self) -> None:
        backlog = CheckpointBacklog(PAGE)
        sequence = following(backlog, "s", 5, handed_over=True)

        assert backlog.due_in_s(A, 0.0) == LOOK_AGAIN_S
        assert (backlog.offers(A, 0.0), planned(backlog)) == ([], [])
        backlog.filled(compute(sequence, 6), LOOK_AGAIN_S)
        offer_all(backlog, held_pages=5, now_s=LOOK_AGAIN_S)

        assert planned(backlog, now_s=LOOK_AGAIN_S) == [("s", 5, 6)]

    def test_decode_waits_while_prefill_makes_progress(self) -> None:
        backlog = CheckpointBacklog(PAGE)
        following(backlog, "s", 5, handed_over=True)

        now_s = 0.0
        for held_pages in (0, 2, 4):
            now_s += LOOK_AGAIN_S
            assert len(offer_all(backlog, held_pages, now_s)) == 1
            assert planned(backlog, now_s=now_s) == []
        now_s += LOOK_AGAIN_S
        offer_all(backlog, 5, now_s)

        assert (backlog.lag_pages, backlog.due_in_s(A, now_s)) == (0, None)

    def test_decode_sends_the_prompt_when_prefill_does_not(self) -> None:
        """It died, or its checkpoints go elsewhere."""
        backlog = CheckpointBacklog(PAGE)
        following(backlog, "s", 5, handed_over=True)

        offer_all(backlog, 2, LOOK_AGAIN_S)
        offer_all(backlog, 2, 2 * LOOK_AGAIN_S)

        assert planned(backlog, now_s=2 * LOOK_AGAIN_S) == [("s", 2, 5)]

    def test_a_holder_that_comes_back_empty_gets_the_prompt_from_decode_at_once(self) -> None:
        """Prefill has sent it once and is done with it."""
        backlog = CheckpointBacklog(PAGE)
        sequence = following(backlog, "s", 5, handed_over=True)
        offer_all(backlog, 5, LOOK_AGAIN_S)

        backlog.lost(A)
        backlog.filled(compute(sequence, 6), 1.0)
        offer_all(backlog, 0, 1.0)

        assert planned(backlog, now_s=1.0) == [("s", 0, 6)]

    def test_prefill_and_decode_in_one_instance_are_one_delivery(self) -> None:
        """The second one goes on where the first one is: no other one sends them."""
        backlog = CheckpointBacklog(PAGE)
        prefill = following(backlog, "s", 5, prefill_only=True)
        offer_all(backlog)
        [(delivery, first, _)] = backlog.ranges(A, 0.0, 2)
        backlog.stored(delivery, first, ok(2), 0.0)
        backlog.ended(prefill, send_rest=True)

        following(backlog, "s", 5, handed_over=True)
        offer_all(backlog, 2)

        assert planned(backlog) == [("s", 2, 5)]
        backlog.check()

    def test_the_prompt_goes_on_being_sent_while_decode_waits_for_a_place_in_the_same_instance(
        self,
    ) -> None:
        """Its pages are there, retained, and in a full engine it may wait for long."""
        backlog = CheckpointBacklog(PAGE)
        prefill = following(backlog, "s", 5, prefill_only=True)
        offer_all(backlog)
        backlog.ended(prefill, send_rest=True)

        backlog.follow(sequence_of("s", 5), to(A), handed_over=True)
        backlog.check()
        offer_all(backlog)

        assert (planned(backlog), backlog.lag_pages) == ([("s", 0, 5)], 5)
        send_all(backlog)
        assert (backlog.lag_pages, backlog.due_in_s(A, 0.0)) == (0, None)
        backlog.check()


def test_what_a_prefill_computed_goes_on_after_its_end_and_is_forgotten_when_it_is_there() -> None:
    backlog = CheckpointBacklog(PAGE)
    sequence = following(backlog, "s", 5, prefill_only=True)
    backlog.ended(sequence, send_rest=True)
    assert backlog.lag_pages == 5

    offer_all(backlog)
    send_all(backlog)

    assert (backlog.lag_pages, backlog.unprotected, backlog.filled(sequence, 0.0)) == (0, 0, [])
    backlog.check()


def test_pages_that_were_given_up_wait_until_they_are_filled_again() -> None:
    """A preempted sequence computes them again; an ended one does not."""
    backlog = CheckpointBacklog(PAGE)
    running, over = following(backlog, "running", 3), following(backlog, "over", 3)
    backlog.ended(over, send_rest=True)
    offer_all(backlog)
    for delivery, _, _ in list(backlog.ranges(A, 0.0, 10)):
        backlog.missed(delivery)

    assert (planned(backlog), backlog.lag_pages) == ([], 3)
    running.computed_tokens = PAGE
    backlog.filled(running, 1.0)

    assert planned(backlog, now_s=1.0) == [("running", 0, 3)]
    backlog.check()


class Deliveries(RuleBasedStateMachine):
    """Streams that grow, end and are attempted again, towards two holders that lose, refuse and
    die.

    Each holder has a truth of its own. What is never allowed: to send over a gap, to send what a
    holder answered that it has, to send to one without a reservation, or to leave a lag once
    all holders answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.backlog = CheckpointBacklog(PAGE)
        self.now_s = 0.0
        self.sequences: list[Sequence] = []
        self.truth: dict[tuple[InstanceId, StreamId], int] = {}
        self.promised: set[tuple[InstanceId, StreamId]] = set()
        self.newest: dict[StreamId, int] = {}

    @rule(
        stream=st.integers(0, 3),
        pages=st.integers(0, 6),
        agents=st.sampled_from([(A,), (B,), (A, B)]),
        flags=st.tuples(*3 * [st.booleans()]),
    )
    def begin(
        self,
        stream: int,
        pages: int,
        agents: tuple[InstanceId, ...],
        flags: tuple[bool, bool, bool],
    ) -> None:
        prefill_only, handed_over, higher = flags
        name = StreamId(f"s{stream}")
        attempt = self.newest.get(name, 0) + higher or 1
        self.newest[name] = attempt
        sequence = sequence_of(name, pages, attempt=attempt, prefill_only=prefill_only)
        self.backlog.follow(sequence, to(*agents), handed_over=handed_over and not prefill_only)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), pages=st.integers(1, 3))
    def fill(self, data: st.DataObject, pages: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        compute(sequence, sequence.computed_tokens // PAGE + pages)
        self.backlog.filled(sequence, self.now_s)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), rest=st.booleans())
    def end(self, data: st.DataObject, rest: bool) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        self.backlog.ended(sequence, send_rest=rest)

    @rule(step_s=st.floats(0, 1))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @rule(
        agent=st.sampled_from([A, B]),
        budget=st.integers(1, 8),
        code=st.sampled_from([*4 * [StoreCode.OK], *StoreCode]),
    )
    def round(self, agent: InstanceId, budget: int, code: StoreCode) -> None:
        for delivery in self.backlog.offers(agent, self.now_s):
            stream = delivery.claim.stream
            assert not delivery.offered, "offered once more"
            if code is StoreCode.OK:
                self.promised.add((agent, stream))
            self.backlog.offered(
                delivery, HeldPages(code, self.truth.get((agent, stream), 0)), self.now_s
            )
        orders, pages = [], 0
        for delivery, first, end in list(self.backlog.ranges(agent, self.now_s, budget)):
            stream = delivery.claim.stream
            assert (agent, stream) in self.promised
            assert first == self.truth.get((agent, stream), 0), "over a gap, or once more"
            assert first < end <= delivery.full_pages
            orders.append(delivery.order)
            pages += end - first
            self.truth[agent, stream] = end
            self.backlog.stored(delivery, first, ok(end), self.now_s)
        assert orders == sorted(orders)
        assert pages <= budget

    @rule(agent=st.sampled_from([A, B]), keeps=st.booleans())
    def die(self, agent: InstanceId, keeps: bool) -> None:
        """It comes back with all that it had, or with nothing; either way it has promised nothing
        since.
        """
        self.backlog.lost(agent)
        self.promised -= {key for key in self.promised if key[0] == agent}
        if not keeps:
            self.truth = {key: pages for key, pages in self.truth.items() if key[0] != agent}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """All of it is given up before it was sent, and computed again."""
        sequence = data.draw(st.sampled_from(self.sequences))
        for agent in (A, B):
            for delivery, _, _ in list(self.backlog.ranges(agent, self.now_s, 100)):
                if delivery.sequence is sequence:
                    self.backlog.missed(delivery)
        self.backlog.filled(sequence, self.now_s)

    @invariant()
    def books_agree(self) -> None:
        self.backlog.check()
        assert self.backlog.lag_pages >= 0

    def teardown(self) -> None:
        """All agents answer from now on: within a few looks nothing is left."""
        for sequence in self.sequences:
            self.backlog.filled(sequence, self.now_s)
        for _ in range(20):
            self.now_s += max(LOOK_AGAIN_S, STUCK_S)
            for agent in (A, B):
                self.round(agent, 1 << 20, StoreCode.OK)
        assert self.backlog.lag_pages == 0
        assert all(self.backlog.due_in_s(agent, self.now_s) is None for agent in (A, B))


TestDeliveries = Deliveries.TestCase
TestDeliveries.settings = examples(150, stateful_step_count=40)
