"""Causes of decisions that differ between a real cluster and the simulator.

Both sides write the proxy's event log, and both are run again from it. Each real decision of a
stream that was interrupted on both sides is made once more: as it was, with one of its inputs as
the simulator had it, and with all of them. Instances are paired by their place: near is the node of
the target, far is any other one. Rates and bytes of the simulator, whose pages are those of a
larger model, are divided by how much larger they are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvrs.core import placing
from kvrs.core.event_log import rerun
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.estimates import Option
from kvrs.core.model.member import Member
from kvrs.core.model.streams import Decision, Holder, Stream
from kvrs.core.recovery import RecoveryPolicy
from kvrs.core.state import State
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import MEMORY
from kvrs_lab.report.metrics import percentile

Row = dict[str, Any]
Ends = tuple[str, str]
_recover = placing.recover


@dataclass(frozen=True, slots=True)
class Inputs:
    """Facts that a decision was made from, by places; bytes are those of real pages."""

    option: str
    produced_tokens: int
    rates: dict[Ends, float]
    traffic: dict[Ends, int]  # Bytes in flight.
    queues: dict[str, float]
    waits: dict[str, float]  # Of a history in the queues.
    steps: dict[str, float]  # Times of decode steps.
    streams: dict[str, int]
    tables: dict[str, PrefillTable]
    pages: dict[str, int]  # That instances and agents hold of the history.
    moves_kv: dict[str, bool]  # As self-tests have seen it.
    restores: dict[str, bool]
    removed: frozenset[Option]  # That have failed the stream.
    slot_waits: dict[str, float]
    others: float


class Situation:
    """The records of a policy that is about to decide."""

    def __init__(
        self,
        state: State,
        stream: Stream,
        assigned: Member,
        limit: int,
        others: float,
        now_s: float,
    ) -> None:
        self._state = state
        self._stream = stream
        self._assigned = assigned
        self._limit = limit
        self._others = others
        self._now_s = now_s
        self._view = state.view
        self.members = self._placed_members()
        self.agents = {
            f"{self._node(agent.node)} agent": agent for agent in self._view.agents.values()
        }

    def _node(self, node: NodeId) -> str:
        if node == MEMORY:
            return "memory"
        return "near" if node == self._assigned.node else "far"

    def _placed_members(self) -> dict[str, Member]:
        numbers: Counter[str] = Counter()
        placed = {}
        for _, member in sorted(self._view.members.items()):
            place = f"{self._node(member.node)} {member.role.value}"
            numbers[place] += 1
            placed[f"{place} {numbers[place]}"] = member
        return placed

    def inputs(self, scale: float) -> Inputs:
        """`scale`: how much larger bytes are on this side."""
        links = {
            (self._node(source), self._node(target)): link
            for (source, target), link in self._view.links.items()
        }
        pages = {
            place: self._stream.holders[member.id].pages
            for place, member in self.members.items()
            if member.id in self._stream.holders
        }
        stored = {
            place: self._stream.checkpoints[agent.id].pages
            for place, agent in self.agents.items()
            if agent.id in self._stream.checkpoints
        }
        return Inputs(
            self.option(),
            self._stream.produced_tokens,
            {ends: link.bytes_per_s / scale for ends, link in links.items()},
            {ends: round(link.in_flight_bytes / scale) for ends, link in links.items()},
            {place: member.queue_s for place, member in self.members.items()},
            {place: member.ahead_s for place, member in self.members.items()},
            {place: member.times.step_s for place, member in self.members.items()},
            {place: member.streams for place, member in self.members.items()},
            {place: member.times.table for place, member in self.members.items()},
            pages | stored,
            {place: member.moves_kv for place, member in self.members.items()},
            {place: member.restores for place, member in self.members.items()},
            self._stream.recovery.removed,
            {
                place: self._state.slots.expected_wait_s(member.id, self._stream.id, self._now_s)
                for place, member in self.members.items()
            },
            self._others,
        )

    def option(self, others: float | None = None) -> str:
        """The decision, by these records as they are now."""
        found = _recover(
            self._state,
            self._stream,
            self._assigned,
            self._limit,
            self._others if others is None else others,
            self._now_s,
        )
        assert found is not None, "simulated streams are promised nothing"
        return found.chosen.option.value

    def option_with(self, names: Sequence[str], other: Inputs) -> str:
        """The decision with these inputs as they were on the other side."""
        with ExitStack() as stack:
            for name in names:
                if name != "other victims":
                    stack.enter_context(_REPLACED[name](self, other))
            return self.option(other.others if "other victims" in names else None)

    # One input as on the other side; what that side does not have stays as it is.

    @contextmanager
    def with_history(self, other: Inputs) -> Iterator[None]:
        with _set([(self._stream, "produced_tokens", other.produced_tokens)]):
            yield

    @contextmanager
    def with_links(self, what: str, values: Mapping[Ends, float]) -> Iterator[None]:
        changes = []
        for (source, target), link in self._view.links.items():
            value = values.get((self._node(source), self._node(target)))
            if value is not None:
                changes.append((link, what, value))
        with _set(changes):
            yield

    @contextmanager
    def with_members(self, **changes: Mapping[str, Any]) -> Iterator[None]:
        with _set(
            [
                (each.times if what in _TIMES else each, what, values[place])
                for what, values in changes.items()
                for place, each in self.members.items()
                if place in values
            ]
        ):
            yield

    @contextmanager
    def with_pages(self, other: Inputs) -> Iterator[None]:
        stream, pages = self._stream, other.pages
        holders = {
            member.id: Holder(member, pages[place])
            for place, member in self.members.items()
            if place in pages
        }
        stored = [
            (stream.checkpoints[agent.id], "pages", pages.get(place, 0))
            for place, agent in self.agents.items()
            if agent.id in stream.checkpoints
        ]
        with _set([(stream, "holders", holders), *stored]):
            yield

    @contextmanager
    def with_self_tests(self, other: Inputs) -> Iterator[None]:
        with self.with_members(moves_kv=other.moves_kv, restores=other.restores):
            yield

    @contextmanager
    def with_removed(self, other: Inputs) -> Iterator[None]:
        with _set([(self._stream.recovery, "removed", other.removed)]):
            yield

    @contextmanager
    def with_slots(self, other: Inputs) -> Iterator[None]:
        waits = {
            member.id: other.slot_waits.get(place, 0.0) for place, member in self.members.items()
        }

        def wait_s(target: InstanceId, stream: StreamId, now_s: float) -> float:
            return waits.get(target, 0.0)

        slots = self._state.slots
        with patch.object(slots, "expected_wait_s", wait_s), _set([(slots, "is_used", True)]):
            yield


_TIMES = ("step_s", "table")  # Of a member's times; the others are its own.
_REPLACED: Mapping[str, Callable[[Situation, Inputs], Any]] = {
    "history": Situation.with_history,
    "rates of links": lambda at, other: at.with_links("bytes_per_s", other.rates),
    "bytes in flight": lambda at, other: at.with_links("in_flight_bytes", other.traffic),
    "queues": lambda at, other: at.with_members(queue_s=other.queues, ahead_s=other.waits),
    "steps": lambda at, other: at.with_members(step_s=other.steps, streams=other.streams),
    "prefill tables": lambda at, other: at.with_members(table=other.tables),
    "pages held": Situation.with_pages,
    "self-tests": Situation.with_self_tests,
    "options tried": Situation.with_removed,
    "slots": Situation.with_slots,
}
INPUTS = (*_REPLACED, "other victims")


@contextmanager
def _set(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(one, name, getattr(one, name)) for one, name, _ in changes]
    for one, name, value in changes:
        setattr(one, name, value)
    try:
        yield
    finally:
        for one, name, value in before:
            setattr(one, name, value)


@dataclass(frozen=True, slots=True)
class Decided:
    """The first recovery of a request."""

    inputs: Inputs
    instead: dict[str, str]  # By the input that was replaced.


def decided(
    lines: Sequence[str],
    numbers: Mapping[StreamId, int],
    scale: float,
    other: Mapping[int, Decided] | None = None,
) -> dict[int, Decided]:
    """By number of the request. `other`: the side from which inputs are taken one at a time.

    Raises:
        AssertionError: run again from its log, the policy does something else.
    """
    last: dict[StreamId, Decided] = {}
    found: dict[int, Decided] = {}
    handle = RecoveryPolicy.handle

    def recover(
        state: State, stream: Stream, assigned: Member, limit: int, others: float, now_s: float
    ) -> Decision | None:
        if (number := numbers.get(stream.id)) is not None and number not in found:
            at = Situation(state, stream, assigned, limit, others, now_s)
            instead = {}
            if other is not None and number in other:
                there = other[number].inputs
                instead = {name: at.option_with([name], there) for name in INPUTS}
                instead["all of them"] = at.option_with(INPUTS, there)
            last[stream.id] = Decided(at.inputs(scale), instead)
        return _recover(state, stream, assigned, limit, others, now_s)

    def observed(self: RecoveryPolicy, event: ev.Event, now_s: float) -> list[act.Action]:
        actions = handle(self, event, now_s)
        for action in actions:
            if isinstance(action, act.Recovered) and action.stream in last:
                one = last.pop(action.stream)
                assert one.inputs.option == action.option.value, action
                found.setdefault(numbers[action.stream], one)
        return actions

    with (
        patch.object(placing, "recover", recover),
        patch.object(RecoveryPolicy, "handle", observed),
    ):
        again = rerun(lines)
    assert again.difference is None, again.difference
    return found


def causes(
    real: Mapping[int, Decided], simulated: Mapping[int, Decided], again: Mapping[int, Decided]
) -> list[Row]:
    """A row for each input: decisions that it changes alone, and those of the differing ones that
    become the simulator's. `again` is the simulator with other delays of messages: more than it
    agrees with itself it cannot agree with a cluster.
    """
    itself = [
        (simulated[number].inputs.option, again[number].inputs.option)
        for number in simulated.keys() & again
    ]
    both = [(real[number], simulated[number].inputs) for number in sorted(real.keys() & simulated)]
    differing = [(one, there) for one, there in both if one.inputs.option != there.option]
    rows = []
    for name in (*INPUTS, "all of them"):
        rows.append(
            {
                "input": name,
                "changed": sum(one.instead[name] != one.inputs.option for one, _ in both),
                "mended": sum(one.instead[name] == there.option for one, there in differing),
                "apart": _apart(name, [(one.inputs, there) for one, there in both]),
            }
        )
    first = {
        "input": "",
        "pairs": len(both),
        "differing": len(differing),
        "itself": len(itself),
        "alike": sum(one == other for one, other in itself),
    }
    return [first, *rows]


@dataclass(frozen=True, slots=True)
class Measured:
    """An input in figures."""

    unit: str
    values: Callable[[Inputs], Mapping[Any, float]]
    absent: float | None = None  # The value of what one side lacks; None: it is left out.


_MEASURED = {
    "history": Measured("tokens", lambda one: {"": one.produced_tokens}),
    "rates of links": Measured("MB/s", lambda one: _times(1e-6, _between_nodes(one.rates))),
    "bytes in flight": Measured("MB", lambda one: _times(1e-6, one.traffic)),
    "queues": Measured("ms", lambda one: _times(1e3, one.queues)),
    "steps": Measured("ms", lambda one: _times(1e3, one.steps)),
    "pages held": Measured("pages", lambda one: one.pages, 0.0),
    "slots": Measured("ms", lambda one: _times(1e3, one.slot_waits)),
    "other victims": Measured("streams", lambda one: {"": one.others}),
}


def _times(factor: float, values: Mapping[Any, float]) -> dict[Any, float]:
    return {key: factor * value for key, value in values.items()}


def _between_nodes(rates: Mapping[Ends, float]) -> dict[Ends, float]:
    """Those within a node are so high that they change nothing."""
    return {ends: rate for ends, rate in rates.items() if ends[0] != ends[1]}


def _apart(name: str, pairs: Sequence[tuple[Inputs, Inputs]]) -> str:
    """How far both sides are apart: the median and the largest of the most of each pair, and the
    mean of real less simulated.
    """
    if name not in _MEASURED or not pairs:
        return ""
    measured = _MEASURED[name]
    most, signed = [], []
    for one, other in pairs:
        here, there = measured.values(one), measured.values(other)
        absent = measured.absent
        keys = here.keys() & there if absent is None else here.keys() | there
        apart = [here.get(key, absent or 0.0) - there.get(key, absent or 0.0) for key in keys]
        most.append(max(map(abs, apart), default=0.0))
        signed += apart
    mean = sum(signed) / len(signed) if signed else 0.0
    return f"{percentile(most, 50):.4g}, at most {max(most):.4g} {measured.unit}; mean {mean:+.3g}"


def as_text(rows: Sequence[Row]) -> str:
    first, *inputs = rows
    lines = [
        f"real decisions made again: {first['pairs']}, of which {first['differing']} differ from "
        "the simulator's; with one input as it was there",
        "beside itself with other delays of messages the simulator decides "
        f"{first['alike']} of {first['itself']} alike",
        f"{'':18}{'changed':>9}{'as simulated':>14}   real from simulated, median",
    ]
    for row in inputs:
        lines.append(f"{row['input']:18}{row['changed']:>9}{row['mended']:>14}   {row['apart']}")
    return "\n".join(lines)
