"""The connector in vLLM's scheduler, beside a port that does as it is told."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrs.errors import RequestError
from kvrs.ids import InstanceId, StreamId
from kvrs.protocol.connector import connector_key, seal
from kvrs.protocol.instance import CheckpointTarget, KvrsParams, SourceRange
from kvrs.protocol.tags import Tag, page_tags, root_tag
from kvrs.vllm.ended import REST_S
from kvrs.vllm.scheduler import Done, SchedulerSide, WorkerStep
from kvrs.vllm.staging import StagingPlace
from kvrs.vllm.tracked import CopyRequest, FilledPages, Restore, SavedStream

PAGE = 4
KEY = connector_key(b"s" * 32, InstanceId("d0"))
PLACE = StagingPlace(1, 2, 16, 64)
AGENT = InstanceId("agent")
MAX_PINNED = 3
STREAM = StreamId("a" * 32)


@dataclass(eq=False)
class Request:
    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class FakePort:
    restores: list[Restore] = field(default_factory=list)
    released: list[Restore] = field(default_factory=list)
    tags: list[Tag] = field(default_factory=list)
    followed: list[SavedStream] = field(default_factory=list)
    computed_tokens: int = 0
    settled_tokens: list[tuple[int, int]] = field(default_factory=list)  # Loaded, computed.
    faults: list[str] = field(default_factory=list)  # Of these.
    ended_streams: list[tuple[SavedStream, bool]] = field(default_factory=list)
    sent: bool = False
    fenced: bool = False

    def fetch(self, restore: Restore) -> None:
        self.restores.append(restore)

    def release(self, restore: Restore) -> None:
        self.released.append(restore)

    def settled(
        self, restore: Restore, loaded_tokens: int, computed_tokens: int, fault: str
    ) -> None:
        assert restore not in self.released
        self.settled_tokens.append((loaded_tokens, computed_tokens))
        self.faults.append(fault)

    def follow(
        self, saved: SavedStream, checkpoints: Sequence[CheckpointTarget], *, handed_over: bool
    ) -> None:
        self.followed.append(saved)
        self.tags += saved.tags

    def filled(self, fills: Sequence[FilledPages]) -> None:
        for filled in fills:
            self.tags += filled.tags
            filled.saved.tags += filled.tags
            self.computed_tokens = filled.computed_tokens

    def copied(self, copies: Sequence[tuple[CopyRequest, int]]) -> None:
        for copy, pages in copies:
            copy.copied(pages)

    def ended(self, saved: SavedStream, *, send_rest: bool) -> None:
        self.ended_streams.append((saved, send_rest))

    def is_sent(self, saved: SavedStream) -> bool:
        return self.sent

    def is_fenced(self, stream: StreamId, attempt: tuple[int, int]) -> bool:
        return self.fenced


@dataclass
class FakePool:
    """Blocks by number; each has its own content until it is used for something else."""

    pinned: Counter[int] = field(default_factory=Counter)
    reused: set[int] = field(default_factory=set)
    uncached: set[int] = field(default_factory=set)

    def pin(self, block_ids: Sequence[int]) -> None:
        self.pinned.update(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        self.pinned.subtract(block_ids)
        assert all(count >= 0 for count in self.pinned.values())
        self.pinned = +self.pinned

    def content(self, block_id: int) -> object:
        return None if block_id in self.uncached else (block_id, block_id in self.reused)


class World:
    def __init__(self, ranks: int = 1, max_saved: int = 1000) -> None:
        self.now_s = 0.0
        self.port = FakePort()
        self.side = SchedulerSide(
            self.port,
            PLACE,
            "f",
            PAGE,
            [KEY],
            ranks=ranks,
            deadline_s=2.0,
            clock=lambda: self.now_s,
            max_pinned=MAX_PINNED,
            max_saved=max_saved,
        )
        self.pool = self.side.ended.pool = FakePool()

    def arrive(
        self, request: Request, *, sources: Sequence[SourceRange] = (), saves: bool = False
    ) -> None:
        params = KvrsParams(STREAM, 2, 1, sources=list(sources))
        if saves:
            params.checkpoints = [CheckpointTarget(AGENT, 1 << 20)]
        self.side.arrived(request, msgspec.to_builtins(seal(params, KEY)), "salt")

    def step(
        self, request: Request, tokens: int, blocks: Sequence[int] = range(100, 200)
    ) -> WorkerStep:
        step = self.side.step({request.request_id: tokens}, lambda _: blocks)
        request.num_computed_tokens += tokens
        return step

    def copy(self, request: Request, first: int, slots: list[int]) -> list[int]:
        counts: list[int] = []
        self.side.requested.append(CopyRequest(request.request_id, first, slots, counts.append))
        return counts


def from_agent(first: int, pages: int) -> SourceRange:
    return SourceRange(AGENT, first, pages, 7)


def test_nothing_is_promised_before_it_has_arrived_and_exactly_that_is_promised() -> None:
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])
    (restore,) = world.port.restores
    assert world.side.match("r", 0) is None
    restore.slots += [5, 6, 7]
    assert world.side.match("r", 0) is None
    restore.is_over = True
    assert world.side.match("r", 0) == 3 * PAGE
    world.side.allocated("r", [30, 31, 32, 33, 34], 3 * PAGE)
    assert world.side.match("r", 0) == 0  # Nothing is loaded twice.
    step = world.side.step({}, lambda _: [])
    assert step.loads == [("r", [(5, 30), (6, 31), (7, 32)])]
    assert step.place is PLACE
    # It is pickled for the workers in each step.
    assert world.side.step({}, lambda _: []) == WorkerStep()
    assert not world.port.released
    world.side.allocated("r", [], 0)  # vLLM calls it again behind the load.
    assert not world.port.released
    world.side.done(Done(loads={"r": 1}))
    assert world.port.released == [restore]
    assert world.port.settled_tokens == [(3 * PAGE, 6)]
    assert world.side.match("r", 0) == 0


def test_the_deadline_ends_the_wait_with_what_is_there() -> None:
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])
    world.port.restores[0].slots.append(3)
    world.now_s = 1.99
    assert world.side.match("r", 0) is None
    world.now_s = 2.0
    assert world.side.match("r", 0) == PAGE


def test_what_was_not_loaded_counts_as_computed_but_for_the_own_cache() -> None:
    """For each attempt once, also where vLLM takes nothing of what was promised."""
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])
    world.port.restores[0].is_over = True

    assert world.side.match("r", 2 * PAGE) == 0
    assert world.side.match("r", 2 * PAGE) == 0

    assert world.port.settled_tokens == [(0, 18 - 2 * PAGE)]


def test_a_load_that_a_worker_has_not_made_counts_for_nothing() -> None:
    """It answers for it all the same, or vLLM would wait, and turns the connector off."""
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 1)])
    restore = world.port.restores[0]
    restore.slots.append(3)
    restore.is_over = True
    assert world.side.match("r", 0) == PAGE
    world.side.allocated("r", [30, 31], PAGE)

    world.side.done(Done(loads={"r": 1}, off_reason="no memory"))

    assert world.port.settled_tokens == [(0, 18)]


def loads_all(world: World) -> None:
    world.port.restores[0].slots += [5, 6, 7, 8]
    world.port.restores[0].is_over = True


def is_late(world: World) -> None:
    world.port.restores[0].slots.append(5)
    world.now_s = 2.0


def has_failed(world: World) -> None:
    world.port.restores[0].slots.append(5)
    world.port.restores[0].fault = "agent: it is in another epoch"
    world.port.restores[0].is_over = True


@pytest.mark.parametrize(
    ("happens", "takes", "off_reason", "fault"),
    [
        (loads_all, True, None, ""),
        (is_late, True, None, "no more had come after 2 s"),
        (has_failed, True, None, "agent: it is in another epoch"),
        (loads_all, False, None, "vLLM had no use for it"),
        (loads_all, True, "no memory", "no memory"),
    ],
)
def test_it_is_said_why_no_more_is_loaded(
    happens: Callable[[World], None], takes: bool, off_reason: str | None, fault: str
) -> None:
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])
    happens(world)
    found = world.side.match("r", 0)
    assert found

    world.side.allocated("r", [30, 31, 32, 33, 34], found if takes else 0)
    world.side.done(Done(loads={"r": 1}, off_reason=off_reason))

    assert world.port.faults == [fault]


def test_slots_of_a_load_are_given_back_when_every_worker_has_copied_them() -> None:
    """On GPUs workers answer in different steps, and one may still read what others have."""
    world, request = World(ranks=2), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 1)])
    (restore,) = world.port.restores
    restore.slots.append(3)
    restore.is_over = True
    assert world.side.match("r", 0) == PAGE
    world.side.allocated("r", [30, 31], PAGE)

    world.side.done(Done(loads={"r": 1}))
    assert (world.port.released, world.port.settled_tokens) == ([], [])
    world.side.done(Done(loads={"r": 1}))
    assert world.port.released == [restore]
    assert world.port.settled_tokens == [(PAGE, 18 - PAGE)]


def test_an_abort_reports_no_fetch() -> None:
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])

    world.side.finished("r")

    assert world.port.settled_tokens == []


def test_one_token_is_left_to_compute() -> None:
    world, request = World(), Request("r", list(range(16)))
    world.arrive(request, sources=[from_agent(0, 4)])
    restore = world.port.restores[0]
    restore.slots += [1, 2, 3, 4]
    restore.is_over = True
    assert world.side.match("r", 0) == 3 * PAGE


@pytest.mark.parametrize(("local", "found"), [(0, 0), (4, 0), (8, 8), (12, 4), (16, 0), (20, 0)])
def test_pages_behind_a_gap_are_of_use_where_the_own_cache_fills_it(local: int, found: int) -> None:
    world, request = World(), Request("r", list(range(30)))
    world.arrive(request, sources=[from_agent(2, 2)])
    restore = world.port.restores[0]
    restore.slots += [1, 2]
    restore.is_over = True
    if local < 2 * PAGE:
        assert world.side.match("r", local) is None
        world.now_s = 2.0
    assert world.side.match("r", local) == found
    assert (world.port.released == [restore]) is (found == 0)
    if found:
        world.side.allocated("r", list(range(100, 108)), found)
        copies = world.side.step({}, lambda _: []).loads[0][1]
        assert copies == [(1 + page - 2, 100 + page) for page in range(local // PAGE, 4)]


@pytest.mark.parametrize("front_first", [False, True])
def test_a_history_waits_for_its_front_as_long_as_that_lives(front_first: bool) -> None:
    """However long it takes to compute; once it is there, what was fetched is loaded behind it."""
    world, request, front = split_world(front_first)
    restore = world.port.restores[0]
    restore.slots += [1, 2]
    restore.is_over = True
    for world.now_s in (0.0, 2.0, 100.0):
        for local in (0, PAGE):
            assert world.side.match(request.request_id, local) is None
    assert world.side.match(front.request_id, 0) == 0

    assert world.side.match(request.request_id, 2 * PAGE) == 2 * PAGE

    world.side.allocated("r", list(range(100, 108)), 2 * PAGE)
    assert world.side.step({}, lambda _: []).loads == [("r", [(1, 102), (2, 103)])]
    world.side.done(Done(loads={"r": 1}))
    assert world.port.settled_tokens == [(2 * PAGE, 30 - 4 * PAGE)]


def test_pages_alone_are_awaited_for_the_deadline_behind_a_front() -> None:
    """They may come as long as the front is computed."""
    world, _, _ = split_world()
    world.port.restores[0].slots.append(1)
    world.now_s = 100.0
    assert world.side.match("r", PAGE) is None

    world.now_s = 101.9
    assert world.side.match("r", 2 * PAGE) is None
    world.now_s = 102.0
    assert world.side.match("r", 2 * PAGE) == PAGE


def test_a_front_that_ends_for_nothing_ends_the_wait() -> None:
    """It has failed, or its pages have left vLLM's cache."""
    world, request, front = split_world()
    restore = world.port.restores[0]
    restore.slots += [1, 2]
    restore.is_over = True
    assert world.side.match("r", 0) is None

    world.side.finished(front.request_id)

    assert world.side.match("r", PAGE) == 0
    assert world.port.released == [restore]
    assert world.port.settled_tokens == [(0, request.num_tokens - PAGE)]
    assert world.port.faults == ["its front is not there"]


@pytest.mark.parametrize("gone", ["another attempt", "another stream", "before"])
def test_a_front_that_is_not_its_own_is_not_awaited(gone: str) -> None:
    world, request = World(), Request("r", list(range(30)))
    stream = StreamId("b" * 32) if gone == "another stream" else STREAM
    other = KvrsParams(stream, 1 if gone == "another attempt" else 2, 1)
    world.side.arrived(Request("f", [1] * 8), msgspec.to_builtins(seal(other, KEY)), "salt")
    if gone == "before":
        world.side.finished("f")
    world.arrive(request, sources=[from_agent(2, 2)])
    world.now_s = 1.99
    assert world.side.match("r", 0) is None
    world.now_s = 2.0
    assert world.side.match("r", 0) == 0


def test_a_request_that_saves_is_no_front() -> None:
    world, request = World(), Request("r", list(range(30)))
    world.arrive(Request("f", [1] * 8), saves=True)
    world.arrive(request, sources=[from_agent(2, 2)])
    world.now_s = 2.0
    assert world.side.match("r", 0) == 0


def split_world(front_first: bool = True) -> tuple[World, Request, Request]:
    """A request whose third and fourth page are fetched, beside its front."""
    world, request, front = World(), Request("r", list(range(30))), Request("f", list(range(8)))
    for each in (front, request) if front_first else (request, front):
        world.arrive(each, sources=[from_agent(2, 2)] if each is request else ())
    return world, request, front


def test_blocks_given_to_another_connector_release_what_was_fetched() -> None:
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])
    world.side.allocated("r", [], 0)
    assert world.port.released == world.port.restores
    assert world.side.match("r", 0) == 0


def test_tags_are_those_of_the_tokens_whatever_the_steps_are() -> None:
    ids = list(range(50, 50 + 23))
    world, request = World(), Request("r", ids[:10])
    world.arrive(request, saves=True)
    world.step(request, 7)
    assert world.port.computed_tokens == PAGE
    world.step(request, 3)
    assert world.port.computed_tokens == 2 * PAGE
    for token in ids[10:]:
        request.all_token_ids.append(token)
        world.step(request, 1)
    assert world.port.tags == page_tags(root_tag("f", "salt"), ids, PAGE)
    assert world.port.followed[0].tags == world.port.tags
    assert world.port.computed_tokens == 5 * PAGE


def test_a_page_whose_last_token_is_not_known_yet_is_not_reported() -> None:
    """With asynchronous scheduling, and with drafts."""
    world, request = World(), Request("r", list(range(7)))
    world.arrive(request, saves=True)
    world.step(request, 7 + 1 + 4)
    assert world.port.computed_tokens == PAGE


def test_copies_are_made_in_a_step_that_runs_the_request_and_answered_by_all_ranks() -> None:
    world, request = World(ranks=2), Request("r", list(range(12)))
    world.arrive(request, saves=True)
    world.step(request, 4)
    counts = world.copy(request, 1, [8, 9, 10])
    assert not world.side.step({}, lambda _: []).saves
    step = world.step(request, 8)
    assert step.saves == [(1, [(8, 101), (9, 102)])]
    assert step.place is PLACE
    world.side.done(Done(saves={1: 1}))
    assert counts == []
    world.side.done(Done(saves={1: 1}))
    assert counts == [2]


def test_no_more_pages_are_saved_beside_a_step_than_other_requests_can_wait_for() -> None:
    """A copy that does not fit is made in part, and the others in later steps, in their order."""
    world, request = World(max_saved=3), Request("r", list(range(8 * PAGE)))
    world.arrive(request, saves=True)
    world.step(request, 8 * PAGE)
    counts = [
        world.copy(request, first, [*range(8, 8 + pages)])
        for first, pages in ((0, 2), (2, 3), (5, 1), (6, 2))
    ]

    steps = [world.step(request, 1).saves for _ in range(3)]

    assert [[copies for _, copies in saves] for saves in steps] == [
        [[(8, 100), (9, 101)], [(8, 102)]],
        [[(8, 105)], [(8, 106), (9, 107)]],
        [],
    ]
    for saves in steps:
        world.side.done(Done(saves={job: 1 for job, _ in saves}))
    assert counts == [[2], [1], [1], [2]]


def test_slots_of_a_load_are_not_used_anew_when_the_connector_turns_off() -> None:
    """Workers may copy out of them in steps that follow, and requests go on with what they load."""
    world, loads, waits = World(), Request("r", list(range(18))), Request("s", list(range(18)))
    for each in (loads, waits):
        world.arrive(each, sources=[from_agent(0, 1)])
        world.port.restores[-1].slots.append(3)
        world.port.restores[-1].is_over = True
    assert world.side.match("r", 0) == PAGE
    world.side.allocated("r", [30, 31], PAGE)
    world.side.step({}, lambda _: [])

    world.side.close()

    assert world.port.released == world.port.restores[1:]


def test_answers_of_ranks_to_one_step_are_added() -> None:
    world, request = World(ranks=2), Request("r", list(range(12)))
    world.arrive(request, saves=True)
    counts = world.copy(request, 0, [8, 9, 10])
    ((job, _),) = world.step(request, 12).saves
    one, other = Done(saves={job: 1}), Done(saves={job: 1}, off_reason="no memory")

    one.add(other)
    world.side.done(one)

    assert (counts, one.off_reason) == ([3], "no memory")


def test_a_history_without_a_full_page_fetches_nothing() -> None:
    world, request = World(), Request("r", list(range(PAGE - 1)))
    world.arrive(request, sources=[from_agent(0, 4)])
    assert world.side.match("r", 0) == 0
    assert world.port.restores == []


def test_requests_that_are_not_saved_have_no_pages() -> None:
    """A restore alone, and requests of no proxy."""
    world, request = World(), Request("r", list(range(18)))
    world.arrive(request, sources=[from_agent(0, 4)])

    world.side.step({"r": 18, "of no proxy": 30}, lambda _: [])

    assert (world.port.computed_tokens, world.port.followed) == (0, [])


def test_a_preempted_request_has_nothing_to_copy() -> None:
    world, request = World(), Request("r", list(range(12)))
    world.arrive(request, saves=True)
    world.step(request, 12)
    request.num_computed_tokens = 0
    counts = world.copy(request, 1, [8, 9])
    assert not world.step(request, 4).saves
    assert counts == [0]


def test_a_preempted_request_holds_up_no_pages_of_others() -> None:
    """An agent gets pages of all its streams together. The preempted one's are announced again, so
    that they are sent, when it has blocks again.
    """
    world, request, other = World(), Request("r", list(range(12))), Request("s", list(range(12)))
    for each in (request, other):
        world.arrive(each, saves=True)
        world.step(each, 12)
    waits = world.copy(request, 0, [8])
    world.step(other, 1)
    assert waits == []  # It is in no step, and still has its blocks.
    request.num_computed_tokens = 0

    late = world.copy(request, 1, [9])
    world.step(other, 1)

    assert (waits, late) == ([0], [0])
    world.port.computed_tokens = 0
    world.step(request, 12)
    assert world.port.computed_tokens == 12


@pytest.mark.parametrize("is_close", [False, True])
def test_an_end_answers_all_that_waits(is_close: bool) -> None:
    world, request = World(), Request("r", list(range(12)))
    world.arrive(request, saves=True, sources=[from_agent(0, 2)])
    under_way = world.copy(request, 0, [8])
    world.step(request, 12)
    waiting = world.copy(request, 1, [9])
    world.side.close() if is_close else world.side.finished("r")
    assert waiting == [0]
    assert under_way == ([0] if is_close else [])
    assert world.port.released == world.port.restores
    assert len(world.port.ended_streams) == 1
    late = world.copy(request, 1, [9])
    world.side.step({}, lambda _: [])
    assert late == [0]


def test_the_port_may_ask_for_copies_while_a_request_ends() -> None:
    """It does so in a thread of its own: here in the midst of the search for those of the request
    that ends.
    """
    world, request = World(), Request("r", list(range(12)))
    world.arrive(request, saves=True)
    later: list[list[int]] = []

    class ComparedSlowly(str):
        def __eq__(self, other: object) -> bool:
            later.append(world.copy(Request("s", []), 0, [7]))
            return str(self) == other

        __hash__ = str.__hash__

    world.copy(Request(ComparedSlowly("s"), []), 0, [8])
    waiting = world.copy(request, 0, [9])

    world.side.finished("r")

    assert waiting == [0]
    assert later == [[]]
    assert len(world.side.requested) == 2


def computed(world: World, pages: int) -> Request:
    request = Request("r", list(range(pages * PAGE)))
    world.arrive(request, saves=True)
    world.step(request, pages * PAGE)
    return request


def test_pages_of_a_prefill_request_are_saved_though_it_has_ended() -> None:
    world = World()
    computed(world, 3)
    waiting = world.copy(Request("r", []), 0, [8])
    world.side.finished("r", [100, 101, 102], send_rest=True)
    assert world.port.ended_streams[0][1]
    assert set(world.pool.pinned) == {100, 101, 102}
    assert world.side.has_work

    late = world.copy(Request("r", []), 1, [9, 10])
    saves = world.side.step({}, lambda _: []).saves
    assert [copies for _, copies in saves] == [[(8, 100)], [(9, 101), (10, 102)]]
    world.side.done(Done(saves={job: 1 for job, _ in saves}))
    assert (waiting, late) == ([1], [2])

    world.port.sent = True
    world.side.step({}, lambda _: [])
    assert not world.pool.pinned
    assert not world.side.has_work
    assert len(world.port.ended_streams) == 1


def test_a_copy_ends_with_the_pages_that_an_ended_request_has() -> None:
    """After a preemption it may have fewer than the port knows of."""
    world = World()
    computed(world, 3)
    world.side.finished("r", [100, 101], send_rest=True)

    counts = world.copy(Request("r", []), 1, [8, 9, 10])

    ((job, copies),) = world.side.step({}, lambda _: []).saves
    world.side.done(Done(saves={job: 1}))
    assert (copies, counts) == ([(8, 101)], [1])


def test_nothing_of_a_prompt_without_a_full_page_outlives_it() -> None:
    world = World()
    request = Request("r", list(range(PAGE - 1)))
    world.arrive(request, saves=True)
    world.step(request, PAGE - 1)

    world.side.finished("r", [100], send_rest=True)

    assert [rest for _, rest in world.port.ended_streams] == [False]
    assert not world.side.has_work


def test_only_so_many_blocks_are_pinned_and_others_saved_while_they_are_the_same() -> None:
    world = World()
    computed(world, 6)
    world.side.finished("r", range(100, 106), send_rest=True)
    assert set(world.pool.pinned) == {100, 101, 102}
    assert world.side.ended.pinned_blocks == MAX_PINNED

    world.pool.reused |= {101, 104}  # A pinned one cannot be; it is not even looked at.
    world.copy(Request("r", []), 1, [5, 6, 7, 8])
    ((_, copies),) = world.side.step({}, lambda _: []).saves
    assert copies == [(5, 101), (6, 102), (7, 103)]
    missed = world.copy(Request("r", []), 4, [5])
    world.side.step({}, lambda _: [])
    assert missed == [0]

    world.pool.reused.add(103)  # The first that is not pinned.
    missed = world.copy(Request("r", []), 3, [5])
    world.side.step({}, lambda _: [])
    assert missed == [0]


def test_blocks_that_are_not_in_the_cache_are_not_saved_unpinned() -> None:
    """Nothing tells whether they are still the same."""
    world = World()
    computed(world, 5)
    world.pool.uncached |= {100, 104}
    world.side.finished("r", range(100, 105), send_rest=True)

    world.copy(Request("r", []), 0, [5, 6, 7, 8, 9])

    ((_, copies),) = world.side.step({}, lambda _: []).saves
    assert copies == [(5, 100), (6, 101), (7, 102), (8, 103)]


def test_an_attempt_is_that_of_its_owner_and_of_its_slot() -> None:
    """By these it is fenced: by proxies, and by the agent that has granted the slot."""
    world, params = World(), KvrsParams(STREAM, 2, 1, owner_epoch=3, slot_token=5)
    params.sources, params.checkpoints = [from_agent(0, 4)], [CheckpointTarget(AGENT, 1 << 20)]
    request = Request("r", list(range(18)))

    world.side.arrived(request, msgspec.to_builtins(seal(params, KEY)), "salt")

    (restore,), (saved,) = world.port.restores, world.port.followed
    assert (restore.attempt, restore.slot_token, saved.attempt) == ((3, 2), 5, (3, 2))


def test_an_agent_that_takes_nothing_frees_the_blocks_in_time() -> None:
    world = World()
    computed(world, 3)
    world.side.finished("r", [100, 101, 102], send_rest=True)
    world.now_s += REST_S - 0.01
    world.side.step({}, lambda _: [])
    assert world.pool.pinned
    world.now_s += 0.02
    world.side.step({}, lambda _: [])
    assert not world.pool.pinned
    assert [rest for _, rest in world.port.ended_streams] == [True, False]
    late = world.copy(Request("r", []), 0, [8])
    assert world.side.has_work
    world.side.step({}, lambda _: [])
    assert late == [0]


def test_an_end_of_the_connector_frees_what_outlives_its_request() -> None:
    world = World()
    computed(world, 3)
    waiting = world.copy(Request("r", []), 0, [8])
    world.side.finished("r", [100, 101, 102], send_rest=True)

    world.side.close()

    assert not world.pool.pinned
    assert waiting == [0]
    assert [rest for _, rest in world.port.ended_streams] == [True, False]
    assert not world.side.has_work


def test_steps_go_on_until_workers_have_answered() -> None:
    """Also where no request is left: slots of copies are in use until then."""
    world = World()
    request = computed(world, 2)
    counts = world.copy(request, 0, [8])
    ((job, _),) = world.step(request, 1).saves
    world.side.finished("r")
    assert world.side.has_work

    world.side.done(Done(saves={job: 1}))

    assert counts == [1]
    assert not world.side.has_work


def test_without_vllm_s_blocks_nothing_outlives_a_request() -> None:
    world = World()
    world.side.ended.pool = None
    computed(world, 3)
    waiting = world.copy(Request("r", []), 0, [8])
    world.side.finished("r", [100, 101, 102], send_rest=True)
    assert waiting == [0]
    assert [rest for _, rest in world.port.ended_streams] == [False]


@pytest.mark.parametrize("seed", range(20))
def test_200_ends_and_aborts_in_mid_load_and_mid_save_leave_nothing(seed: int) -> None:
    """Whatever the order: 5 s after the last nothing is pinned, awaited, or owed an answer."""
    world, random = World(max_saved=1 + seed % 4), Random(seed)
    owed: list[list[int]] = []
    alive: dict[str, Request] = {}
    jobs: list[int] = []
    for number in range(200):
        name = f"r{number}"
        request = alive[name] = Request(name, list(range(random.randrange(4, 40))))
        world.arrive(
            request,
            saves=random.random() < 0.7,
            sources=[from_agent(random.randrange(2), 3)] if number % 2 else (),
        )
        for restore in world.port.restores[-1:]:
            restore.slots += [0, 1, 2][: random.randrange(4)]
            restore.is_over = random.random() < 0.8
        if found := world.side.match(name, 0):
            world.side.allocated(name, range(100, 120), found)
        elif random.random() < 0.5:
            world.side.allocated(name, [], 0)
        for each in random.sample([*alive.values()], min(3, len(alive))):
            owed.append(world.copy(each, random.randrange(3), [4, 5]))
        scheduled = {one: random.randrange(1, 9) for one in alive if random.random() < 0.5}
        step = world.side.step(scheduled, lambda _: range(100, 200))
        for one, tokens in scheduled.items():
            alive[one].num_computed_tokens += tokens
        jobs += [job for job, _ in step.saves]
        if random.random() < 0.7:  # Else workers answer after the end.
            world.side.done(Done(dict.fromkeys(jobs, 1), {one: 1 for one, _ in step.loads}))
            jobs.clear()
        for one in random.sample([*alive], random.randrange(len(alive) + 1)):
            world.side.finished(one, range(100, 200), send_rest=random.random() < 0.5)
            owed.append(world.copy(alive.pop(one), 0, [6]))
        world.now_s += random.random() * 0.2
        assert world.side.ended.pinned_blocks == world.pool.pinned.total() <= MAX_PINNED
    for one in alive:
        world.side.finished(one)

    for _ in range(50):
        step = world.side.step({}, lambda _: [])
        jobs += [job for job, _ in step.saves]
        world.side.done(Done(dict.fromkeys(jobs, 1), {one: 1 for one, _ in step.loads}))
        jobs.clear()
        world.now_s += 0.1

    assert not world.pool.pinned
    assert not world.side.has_work
    assert all(len(counts) == 1 for counts in owed)
    assert Counter(map(id, world.port.released)) == Counter(map(id, world.port.restores))


def test_an_announced_higher_attempt_is_refused() -> None:
    world = World()
    world.port.fenced = True
    with pytest.raises(RequestError, match="a higher attempt was announced"):
        world.arrive(Request("r", [1, 2, 3]))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 40),
    st.randoms(use_true_random=False),
)
def test_every_page_is_copied_from_its_own_block(chunks, prompt, random) -> None:  # type: ignore[no-untyped-def]
    world, request = World(), Request("r", list(range(prompt)))
    world.arrive(request, saves=True)
    for tokens in chunks:
        first = random.randrange(4)
        counts = world.copy(request, first, [random.randrange(16) for _ in range(3)])
        known = min(request.num_computed_tokens + tokens, request.num_tokens)
        for job, copies in world.step(request, tokens).saves:
            assert [block for _, block in copies] == [
                100 + first + index for index in range(len(copies))
            ]
            assert (first + len(copies)) * PAGE <= known
            world.side.done(Done(saves={job: 1}))
        assert len(counts) == 1
        request.all_token_ids.append(0)
    world.side.finished("r")
