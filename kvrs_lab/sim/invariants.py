"""Invariants of a policy's actions, given its events.

One observer per proxy sees each event with its actions before any action is applied. The observer
keeps its own books: a fault in the product's books cannot hide itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import assert_never

from kvrs.config.backup import BackupMode
from kvrs.config.file import Config
from kvrs.core.books.waiting import SLACK_S
from kvrs.core.control import Control
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.recovery import RecoveryPolicy
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import SlotRequest
from kvrs_lab.sim.process import require
from kvrs_lab.sim.streams import SimStream


class Grants:
    """Slots in use that agents have granted to proxies."""

    def __init__(self, slots_max: int) -> None:
        self._slots_max = slots_max
        self._granted: dict[SlotRequest, tuple[str, int]] = {}  # Proxy, and life of the agent.

    def granted(self, proxy: str, asked: SlotRequest, process: int) -> None:
        # The agent fences the attempt that a new one of the stream replaces.
        self._granted = {
            each: granted
            for each, granted in self._granted.items()
            if (each.stream, each.target) != (asked.stream, asked.target)
        }
        self._granted[asked] = proxy, process
        used = sum(
            each.target == asked.target and other == process
            for each, (_, other) in self._granted.items()
        )
        most = self._slots_max
        require(
            used <= most,
            f"{used} transfers into {asked.target} have a slot of its agent, of {most}",
        )

    def released(self, asked: SlotRequest) -> None:
        self._granted.pop(asked, None)

    def proxy_died(self, proxy: str) -> None:
        """Drop the slots of a dead proxy. Its agents may count them until the leases end."""
        self._granted = {
            asked: granted for asked, granted in self._granted.items() if granted[0] != proxy
        }


@dataclass(slots=True)
class _Writer:
    """The current attempt of a stream."""

    attempt: int = 0
    plan: act.Plan | None = None
    instance: InstanceId | None = None  # Instance of the current stage.
    runs: bool = False
    fetching_since_s: float | None = None  # Start of the slot; None: no slot.
    stays_until_s: float | None = None  # End of the stay at an instance that re-forms.

    def stop(self) -> None:
        self.runs, self.fetching_since_s = False, None


@dataclass(slots=True)
class _Known:
    """Instances that are up and KV that is held, according to the events of the policy."""

    up: dict[InstanceId, int] = field(default_factory=dict)  # Epoch by instance.
    kept: dict[tuple[InstanceId, StreamId], int] = field(default_factory=dict)  # Number of pages.
    # Pages in `kept` that instances report as replicas, without a lease.
    replicas: set[tuple[InstanceId, StreamId]] = field(default_factory=set)
    reforming: set[InstanceId] = field(default_factory=set)

    def keep(self, name: InstanceId, stream: StreamId, pages: int) -> None:
        """Note pages at an agent or under a lease; 0 pages end the lease."""
        self.kept.pop(key := (name, stream), None)
        self.replicas.discard(key)
        if pages:
            self.kept[key] = pages

    def reported(self, name: InstanceId, stream: StreamId, pages: int) -> None:
        """Note reported replicas, unless a lease covers the stream."""
        if (key := (name, stream)) in self.kept and key not in self.replicas:
            return
        self.kept.pop(key, None)
        self.replicas.discard(key)
        if pages:
            self.kept[key] = pages
            self.replicas.add(key)

    def lose(self, name: InstanceId) -> None:
        self.up.pop(name, None)
        self.reforming.discard(name)
        self.kept = {key: pages for key, pages in self.kept.items() if key[0] != name}
        self.replicas &= self.kept.keys()


class Invariants:
    def __init__(
        self,
        config: Config,
        nodes: Mapping[InstanceId, NodeId],
        streams: Mapping[StreamId, SimStream],
    ) -> None:
        """Create the books; `streams` are the proxy's, ended streams included."""
        self._config = config
        self._nodes = nodes
        self._streams = streams
        self._page_size = config.cluster.engine.page_size_tokens
        self._known = _Known()
        # Pages taken over by instances that are about to come up.
        self._taken_over: dict[InstanceId, ev.PagesKept] = {}
        self._writers: dict[StreamId, _Writer] = {}
        self._fetching: dict[StreamId, _Writer] = {}  # Writers that hold slots, or held them.

    def observe(self, now_s: float, event: ev.Event, actions: Sequence[act.Action]) -> None:
        """Apply one event, and check each action of the policy."""
        self._apply_to_holders(event)
        self._apply_to_agents(event)
        self._apply_to_writers(event)
        for action in actions:
            match action:
                case act.Start():
                    self._check_start(action, now_s)
                case act.Redirect():
                    self._check_redirect(action, event)
                case act.Halt():
                    self._check_halt(action, event, now_s)
                case act.Stay():
                    self._check_stay(action, event, now_s)
                case act.Recovered() | act.Settled():
                    self._require_current(action.stream, action.attempt, "a record")
                case act.GiveUp():
                    require(
                        not self._streams[action.stream].outcome,
                        f"{action.stream} is over and was given up",
                    )
                    self._writers.setdefault(action.stream, _Writer()).stop()
                case act.RowsLoaded() | act.Ejected() | act.Readmitted() | act.WakeAt():
                    pass
                case _:
                    assert_never(action)
        self.check_slots()

    def _apply_to_holders(self, event: ev.Event) -> None:
        known = self._known
        match event:
            case ev.InstanceUp(info=info, lives_on=lives_on):
                if info.epoch <= known.up.get(info.id, -1):
                    return
                if not lives_on or info.id not in known.up:
                    known.lose(info.id)
                    self._stop_at(info.id)
                known.up[info.id] = info.epoch
                left = self._taken_over.pop(info.id, None)
                if left is not None and left.epoch == info.epoch:
                    for stream, pages in left.pages.items():
                        known.keep(info.id, stream, pages)
            case ev.LoadReported(instance=name, report=report):
                if report.epoch != known.up.get(name):
                    return
                known.reforming.discard(name)
                if report.reforming is None:
                    return
                known.reforming.add(name)
                for stream, pages in report.reforming.missing_pages.items():
                    if pages:
                        known.kept.pop((name, stream), None)
            case ev.PagesKept(instance=name):
                self._taken_over[name] = event
            case ev.InstanceLost(instance=name, epoch=epoch, produced_tokens=produced):
                if epoch < known.up.get(name, 0):
                    return
                known.lose(name)
                for stream in produced:
                    self._writers.setdefault(stream, _Writer()).stop()
            case ev.InstanceRemoved(instance=name):
                known.lose(name)
            case ev.RetentionLost(instance=name, streams=streams):
                for stream in streams:
                    known.kept.pop((name, stream), None)
            case ev.StreamAdopted(stream=stream, kept=kept):
                for each in kept:
                    if known.up.get(each.holder) == each.epoch:
                        known.keep(each.holder, stream, each.pages)
            case _:
                pass  # No effect on these books.

    def _apply_to_agents(self, event: ev.Event) -> None:
        known = self._known
        match event:
            case ev.HolderUp(holder=name, epoch=epoch):
                if epoch > known.up.get(name, -1):
                    known.lose(name)
                    known.up[name] = epoch
            case ev.HolderLost(holder=name, epoch=epoch):
                if epoch >= known.up.get(name, 0):
                    known.lose(name)
            case ev.CheckpointsReported(holder=name, epoch=epoch, pages=pages):
                if epoch == known.up.get(name):
                    for stream, count in pages.items():
                        if not name.startswith("agent-"):
                            known.reported(name, stream, count)
                        elif count:
                            known.keep(name, stream, count)
            case _:
                pass  # No effect on these books.

    def _apply_to_writers(self, event: ev.Event) -> None:
        match event:
            case ev.PrefillDone():
                self._prefill_done(event)
            case ev.LoadReported(instance=name, report=report):
                if report.draining and report.epoch == self._known.up.get(name):
                    self._draining(name)
            case ev.DrainOrdered(instance=name, moves=True):
                self._draining(name)
            case ev.AttemptFailed() | ev.SlotDenied():
                if (writer := self._current(event.stream, event.attempt)) is not None:
                    writer.stop()
            case ev.StreamResumed():
                if (writer := self._current(event.stream, event.attempt)) is not None:
                    writer.fetching_since_s = None
            case ev.StreamEnded():
                if self._current(event.stream, event.attempt) is not None:
                    del self._writers[event.stream]
            case _:
                pass  # No effect on these books.

    def _prefill_done(self, event: ev.PrefillDone) -> None:
        writer = self._current(event.stream, event.attempt)
        if writer is None or writer.plan is None:
            return
        writer.instance = writer.plan.decode
        prefill = writer.plan.prefill or writer.plan.decode
        if prefill in self._known.up:
            pages = event.history_tokens // self._page_size
            self._known.keep(prefill, event.stream, pages)
        if writer.plan.decode not in self._known.up:
            writer.stop()  # No decode instance for the hand-off.

    def _draining(self, name: InstanceId) -> None:
        """Note the pages of a draining instance, kept until its streams resume elsewhere."""
        for stream, writer in self._writers.items():
            if writer.runs and writer.instance == name:
                history_tokens = self._streams[stream].true_history_tokens
                pages = (history_tokens - 1) // self._page_size
                # Prefill also computes the last token of a prompt.
                pages = max(pages, self._known.kept.get((name, stream), 0))
                self._known.keep(name, stream, pages)

    def _stop_at(self, name: InstanceId) -> None:
        for writer in self._writers.values():
            if writer.instance == name:
                writer.stop()

    def _current(self, stream: StreamId, attempt: int) -> _Writer | None:
        writer = self._writers.get(stream)
        return writer if writer is not None and writer.attempt == attempt else None

    def _require_current(self, stream: StreamId, attempt: int, what: str) -> None:
        require(
            self._current(stream, attempt) is not None,
            f"{stream}: {what} of an attempt that is over",
        )

    def _check_start(self, start: act.Start, now_s: float) -> None:
        """Check that a running attempt is replaced only after its slot expired."""
        live, writer = (
            self._streams[start.stream],
            self._writers.setdefault(start.stream, _Writer()),
        )
        require(not live.outcome, f"{live.id} is over and was started")
        require(
            start.attempt == writer.attempt + 1,
            f"attempt {start.attempt} of {live.id} follows attempt {writer.attempt}",
        )
        has_expired = self._has_expired(writer, now_s)
        require(not writer.runs or has_expired, f"{live.id} ran, and was moved")
        self._check_plan(live, start.plan)
        writer.attempt, writer.plan, writer.runs = start.attempt, start.plan, True
        writer.instance = start.plan.prefill or start.plan.decode
        writer.fetching_since_s = now_s if start.plan.runs else None
        if start.plan.runs:
            self._fetching[start.stream] = writer
        writer.stays_until_s = None

    def _check_redirect(self, action: act.Redirect, event: ev.Event) -> None:
        """Check that only a finished prefill is redirected, and only in its decode instance."""
        self._require_current(action.stream, action.attempt, "a new hand-off")
        writer = self._writers[action.stream]
        assert writer.plan is not None
        require(isinstance(event, ev.PrefillDone), f"{action.stream}: redirected without a prefill")
        require(
            action.plan.prefill == writer.plan.prefill,
            f"{action.stream}: redirected to another prefill",
        )
        self._check_plan(self._streams[action.stream], action.plan)
        writer.plan, writer.instance = action.plan, action.plan.decode

    def _check_halt(self, action: act.Halt, event: ev.Event, now_s: float) -> None:
        """Check the reason of a halt: a drain, a re-forming instance, a degraded or failing GPU, or
        the end of a slot or stay.
        """
        self._require_current(action.stream, action.attempt, "a halt")
        writer = self._writers[action.stream]
        moves = ev.GpuJudged | ev.DrainOrdered | ev.PrefillDone
        leaves = isinstance(event, ev.LoadReported) and (
            event.report.draining or event.report.reforming is not None
        )
        is_over = writer.stays_until_s is not None and now_s >= writer.stays_until_s - SLACK_S
        require(
            isinstance(event, moves) or leaves or is_over or self._has_expired(writer, now_s),
            f"{action.stream}: halted by {type(event).__name__}",
        )
        writer.stop()

    def _check_stay(self, action: act.Stay, event: ev.Event, now_s: float) -> None:
        """Check that a running stream stays at a re-forming instance until a future time."""
        self._require_current(action.stream, action.attempt, "a stay")
        writer = self._writers[action.stream]
        require(writer.runs, f"{action.stream} stays, and does not run")
        require(
            writer.instance in self._known.reforming,
            f"{action.stream} stays at {writer.instance}, which does not re-form",
        )
        require(action.until_s > now_s, f"{action.stream} stays until a moment that is past")
        writer.stays_until_s = action.until_s

    def _has_expired(self, writer: _Writer, now_s: float) -> bool:
        """Return whether the attempt has held a slot for a full slot lease."""
        since_s = writer.fetching_since_s
        return since_s is not None and now_s >= since_s + self._config.policy.slot_lease_s - SLACK_S

    def _check_plan(self, live: SimStream, plan: act.Plan) -> None:
        named = {
            plan.decode,
            plan.prefill,
            *(run.holder for run in plan.runs),
            None if plan.load is None else plan.load.agent,
            *(place.holder for place in plan.places),
        } - {None}
        down = sorted(str(name) for name in named if name not in self._known.up)
        require(not down, f"the plan for {live.id} names {', '.join(down)}, which is not up")
        require(
            plan.prefill is None or not plan.runs,
            f"the plan for {live.id} computes and fetches its whole history",
        )
        for before, after in pairwise(plan.runs):
            require(
                before.first_page + before.pages == after.first_page,
                f"the runs for {live.id} do not follow each other",
            )
        for run in plan.runs:
            self._check_run(live, plan, run)
        require(
            plan.load is None or not (plan.runs or live.output),
            f"the plan for {live.id} loads what is no new prompt",
        )
        self._check_places(live, plan)

    def _check_run(self, live: SimStream, plan: act.Plan, run: act.PageRange) -> None:
        which = f"the run of {live.id} from {run.holder}"
        require(run.holder != plan.decode, f"{which} is fetched by itself")
        epoch = self._known.up[run.holder]
        require(run.generation == epoch, f"{which} names an earlier epoch")
        require(
            run.pages > 0
            and run.first_page + run.pages <= (live.true_history_tokens - 1) // self._page_size,
            f"{which} is too long",
        )
        pages = self._known.kept.get((run.holder, live.id))
        require(pages is not None, f"{which}: nothing of it is known to be held there")
        assert pages is not None
        is_agent = run.holder.startswith("agent-")
        require(run.first_page <= pages, f"{which} begins behind the {pages} pages that are held")
        require(
            is_agent or run.first_page + run.pages <= pages,
            f"{which} ends behind the {pages} pages that are held",
        )

    def _check_places(self, live: SimStream, plan: act.Plan) -> None:
        serving = self._nodes[plan.decode]
        at_home = sorted(self._nodes[place.holder] == serving for place in plan.places)
        allowed: dict[BackupMode, list[list[bool]]] = {
            BackupMode.OFF: [[]],
            BackupMode.LOCAL: [[], [True]],
            BackupMode.REMOTE: [[], [False]],
            BackupMode.BOTH: [[], [True], [False], [False, True]],
            BackupMode.PEER: [[], [True], [False]],
        }
        require(
            at_home in allowed[self._config.backup.mode],
            f"checkpoints of {live.id} go to {plan.places}",
        )

    def check_slots(self) -> Counter[InstanceId]:
        """Check that one proxy's transfers into a target are within the limit. A proxy may have
        more slots than the agent granted, since the agent may not answer.
        """
        if not self._fetching:
            return Counter()
        for stream, writer in list(self._fetching.items()):
            if writer.fetching_since_s is None or self._writers.get(stream) is not writer:
                del self._fetching[stream]
        fetching = Counter(
            writer.plan.decode
            for stream, writer in self._fetching.items()
            if writer.plan is not None and not self._streams[stream].outcome
        )
        most = self._config.policy.slots_max
        for target, count in fetching.items():
            require(count <= most, f"{count} transfers into {target} hold slots, of {most}")
        return fetching

    def check_slot_book(self, policy: RecoveryPolicy) -> None:
        """Check that every held slot belongs to a transfer."""
        held = {
            target: row["held"]
            for target, row in policy.state.slots.snapshot().items()
            if row["held"]
        }
        fetching = dict(self.check_slots())
        require(held == fetching, f"slots are held: {held}, and used: {fetching}")

    def check_at_rest(self, control: Control[SimStream], name: str) -> None:
        """Check, after the last stream, that the proxy's books are empty."""
        seen = control.policy.snapshot()
        require(not control.streams, f"{name} has open streams: {list(control.streams)}")
        for leases in (control.leases, control.checkpoints.leases):
            renewed = [each for each in leases.batches(renew=True).values() if each.renew]
            require(not renewed, f"{name} renews leases: {renewed}")
        require(seen["slots"] == {}, f"{name} holds slots: {seen['slots']}")
        require(seen["waiting"] == [], f"{name} has streams waiting: {seen['waiting']}")
        require(set(seen["streams"].values()) == {0}, f"{name} has streams: {seen['streams']}")
        for link in seen["links"]:
            require(link["in_flight_bytes"] == 0, f"{name} books bytes on {link}")
        for row in seen["instances"]:
            booked = (row["work_s"], row["running"], row["decode_streams"], row["retained_streams"])
            require(booked == (0.0, 0, 0, 0), f"{name} books {row}")
        for row in seen["agents"]:
            require((row["booked_bytes"], row["own_streams"]) == (0, 0), f"{name} books {row}")
        require(not seen["checkpoints"] and not seen["unprotected"], f"{name} remembers streams")
