"""The record of an instance: its configuration, its reports, this proxy's bookings, and its health
by its answers.

The instance's watch writes health, reports and epochs; the policy writes everything that follows
from events.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any
from zlib import crc32

import msgspec

from kvrs.core.model.events import Promise
from kvrs.core.model.reforming import PredictedReforming
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, Role, assumed_instance

GOES_ON_NOWHERE = "-"  # `Member.tokens` of an instance that cannot continue any output exactly.

# An instance that has answered nothing for this time, and for several times the predicted time,
# gets no new requests.
UNANSWERED_S = 2.0
# First pauses, which double: after a failure, at an ejection, after a busy answer. An instance that
# fails every request gets at most three requests in 10 s: the first, one after the first pause, and
# the first probe.
FAILURE_PAUSE_S = 0.5
EJECTION_PAUSE_S = 4.0
BUSY_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
# First and longest pause before a busy instance is tried again while no other one is open.
_FIRST_BUSY_S = 0.25
_LONGEST_BUSY_S = 2.0
# Time for which a transfer that has outlived its request may go on: SGLang then keeps the pages of
# such a transfer by default.
TRANSFER_S = 30.0
_TRY_S = 0.5  # After a busy pause, one attempt goes first; others wait this long for its answer.
_JITTER = 0.25
_TIME_STEP = 0.1  # Smaller relative differences of times change no decision.
# A fair queue computes four tokens of histories for one of new prompts
# (`kvrs_engine/scheduling/fair_queue.py`).
SHARE_OF_NEW = 0.25
STEP_TOKENS = 2048  # Assumed for engines that report none: the least default of vLLM.


def fraction(*of: object) -> float:
    """Return a number from 0 to 1 that depends only on the arguments, for jitter without
    randomness.
    """
    return crc32(":".join(map(str, of)).encode()) / 2**32


def pause_s(instance: InstanceId, first_s: float, count: int) -> float:
    """Return pause number `count` (from 0) of an instance, with jitter, so that proxies do not
    probe two instances at the same time.
    """
    return min(LONGEST_PAUSE_S, first_s * 2.0 ** min(count, 16)) * _jitter(instance, count)


def _jitter(instance: InstanceId, count: int) -> float:
    return 1 + _JITTER * fraction(instance, count)


# The info of an instance before its first process.
UNKNOWN = assumed_instance(
    InstanceId(""), NodeId(""), Role.PREFILL, KvGeometry(1, 1, 1, 1, 1), (), epoch=0
)


class Health(StrEnum):
    STARTING = "starting"  # The instance has never been up.
    UP = "up"
    DOWN = "down"
    # The instance was removed from the configuration; its record stays for late look-ups.
    REMOVED = "removed"
    REFUSED = "refused"  # The instance answers but must not be used, because of `reason`.


@dataclass(slots=True, eq=False)
class AnswerHealth:
    """The health of an instance by its answers, independent of its reports.

    An instance runs one stage of a stream (prefill or decode), or both in one call, so one record
    is enough. A closed instance gets no new request while another one is open; after its pause, one
    new request at a time is a probe.
    """

    consecutive: int = 0  # Number of failures since the instance's last answer.
    refuses_wrongly: bool = False  # Another instance has accepted a request that this one refused.
    abrupt_s: float = -inf  # Time of the last failure without an error message.
    is_ejected: bool = False
    ejections: int = 0
    quick_deaths: int = 0  # Previous quick deaths in a row (`core/recovery.py`).
    readmitted_s: float = -inf
    cause: str = ""  # Reason why the instance was last closed to new requests.
    closed_s: float = -inf
    # End of the pause of a closed instance; None: the instance is open.
    until_s: float | None = None
    pauses: int = 0  # Number of pauses since the last answer.
    probe: StreamId | None = None
    # End of the pause after a busy answer; None: no busy answer since the last other answer.
    busy_until_s: float | None = None
    asked_until_s: float = -inf  # End of the pause that the instance has requested.
    busies: int = 0  # Number of busy answers since the last other answer.
    tried_by: StreamId | None = None  # The stream of the one attempt after the busy pause.
    # Streams that wait for an answer, oldest first: start of the wait, and predicted wait.
    awaited: dict[StreamId, tuple[float, float]] = field(default_factory=dict)
    awaited_from_s: float = -inf  # A lower bound of all starts in `awaited`.
    # Streams that wait for an answer in one piece.
    whole: set[StreamId] = field(default_factory=set)
    answered_s: float = -inf

    def is_overdue(self, now_s: float, queue_s: float) -> bool:
        """Return whether an answer is overdue by its predicted wait and the instance's queue."""
        if not self.awaited or now_s - max(self.awaited_from_s, self.answered_s) <= UNANSWERED_S:
            return False
        since_s, predicted_s = next(iter(self.awaited.values()))
        limit_s = UNANSWERED_S + 4 * predicted_s + 2 * queue_s
        return now_s - max(since_s, self.answered_s) > limit_s

    def await_whole(self, stream: StreamId) -> None:
        """Note that the stream gets one whole answer, whose time cannot be predicted."""
        if self.awaited.pop(stream, None) is not None:
            self.whole.add(stream)

    def owes(self, stream: StreamId) -> bool:
        """Return whether the stream still waits for the start of its answer."""
        return stream in self.awaited or stream in self.whole

    def is_busy(self, now_s: float) -> bool:
        return self.busy_until_s is not None and now_s < self.busy_until_s

    def note_busy(
        self, instance: InstanceId, stream: StreamId, retry_after_s: float, now_s: float
    ) -> None:
        """Pause after a busy answer, at least for `retry_after_s`. The pauses double, except for
        answers to attempts that began before the pause.
        """
        pause_s = 0.0
        if not self.is_busy(now_s) or self.tried_by == stream:
            pause_s = min(_LONGEST_BUSY_S, _FIRST_BUSY_S * 2.0 ** min(self.busies, 16))
            self.busies += 1
            self.tried_by, self.busy_until_s = None, now_s
        jitter = _jitter(instance, self.busies)
        retry_after_s = min(LONGEST_PAUSE_S, retry_after_s)
        self.asked_until_s = max(self.asked_until_s, now_s + retry_after_s * jitter)
        assert self.busy_until_s is not None
        self.busy_until_s = max(self.busy_until_s, now_s + pause_s * jitter, self.asked_until_s)

    def note_room(self, now_s: float) -> bool:
        """End the busy pause, because a stream has ended at the instance; return whether a pause
        has ended.
        """
        if self.busy_until_s is None or now_s < self.asked_until_s or self.is_ejected:
            return False
        if self.until_s is not None:
            self.until_s = min(self.until_s, now_s)
        if not self.is_busy(now_s):
            return False
        self.busy_until_s, self.tried_by = now_s, None
        return True

    def try_busy(self, stream: StreamId, now_s: float) -> None:
        """Note the first attempt after the pause of a busy instance."""
        self.tried_by, self.busy_until_s = stream, now_s + _TRY_S

    def close(self, cause: str, now_s: float, pause: float) -> None:
        self.cause, self.closed_s, self.until_s, self.probe = cause, now_s, now_s + pause, None
        self.pauses += 1

    def open(self) -> None:
        self.until_s = self.probe = None
        self.is_ejected, self.pauses, self.cause = False, 0, ""
        self.busy_until_s, self.busies, self.tried_by = None, 0, None

    def left(self, stream: StreamId) -> None:
        """Note that the stream no longer waits for an answer."""
        self.awaited.pop(stream, None)
        self.whole.discard(stream)
        if self.probe == stream:
            self.probe = None

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """Return the state as plain data, for display."""
        return {
            "ejected": self.is_ejected,
            "failures_in_a_row": self.consecutive,
            "paused_s": 0.0 if self.until_s is None else max(0.0, self.until_s - now_s),
            "busy_s": max(0.0, (self.busy_until_s or 0.0) - now_s),
            "quick_deaths": self.quick_deaths,
            "cause": self.cause,
        }


class Abilities(msgspec.Struct, frozen=True, gc=False):
    """Abilities of an instance, by its info and its rows: the facts that every decision reads."""

    prefills: bool = False
    decodes: bool = False
    pulls: bool = False
    retains: bool = False
    caches: bool = False
    splits: bool = False
    checkpoints: bool = False
    replays: bool = False
    has_fair_queue: bool = False
    # The engine continues text, stop strings, usage and sampling by itself.
    resumes_exactly: bool = False
    computes_prompts: bool = False  # A decode instance that can also prefill new streams.
    step_tokens: int = STEP_TOKENS  # Most tokens that the engine computes in one step.
    page_bytes: int = 0
    page_size_tokens: int = 0
    bytes_per_token: int = 0
    names: tuple[str, ...] = ()  # Served models, aliases and adapters.

    @classmethod
    def of(cls, info: InstanceInfo, *, has_rows: bool) -> "Abilities":
        """`has_rows`: the instance can load rows of its node's agent or of a store."""
        capabilities, geometry = info.capabilities, info.geometry
        pulls = Capability.PULL_PAGES in capabilities or has_rows
        return cls(
            prefills=info.role is not Role.DECODE,
            decodes=info.role is not Role.PREFILL,
            pulls=pulls,
            retains=Capability.RETAIN in capabilities,
            caches=Capability.PREFIX_CACHE in capabilities,
            splits=pulls and Capability.SPLIT in capabilities,
            checkpoints=Capability.CHECKPOINT in capabilities,
            replays=Capability.REPLAY in capabilities,
            has_fair_queue=Capability.FAIR_QUEUE in capabilities,
            resumes_exactly=Capability.EXACT_RESUME in capabilities,
            computes_prompts=info.computes_prompts and info.role is Role.DECODE,
            step_tokens=info.step_tokens or STEP_TOKENS,
            page_bytes=geometry.page_bytes,
            page_size_tokens=geometry.page_size_tokens,
            bytes_per_token=geometry.bytes_per_token,
            names=info.name_keys,
        )


class SharedRows(msgspec.Struct, frozen=True, gc=False):
    """Rows of an instance's KV that other instances can load."""

    # Namespace of the rows of the instance's CPU tier, which its node's agent serves (`has_tier`),
    # or of the store that its engine shares (`in_store`); empty: neither.
    rows: str = ""
    has_tier: bool = False
    in_store: bool = False
    row_tokens: int = 0  # Tokens in one row; 0: not reported.
    tier_tokens: int = 0  # Tokens that the CPU tier has room for; 0: not reported.
    store_share: float = 1.0  # Share of the requested KV that the store had, over recoveries.


NO_SHARED_ROWS = SharedRows()
NO_ABILITIES = Abilities()  # For an instance that has not been up.


@dataclass(slots=True, eq=False)
class ComputeTimes:
    """Times of an instance's prefills and decode steps: its table, and factors of it."""

    full_table: PrefillTable = field(init=False)  # The prefill table with all ranks.
    table: PrefillTable = field(init=False)  # The prefill table with the present ranks.
    # The prefill table before it is scaled by what the proxy observes (`books/prefills.py`): a
    # guess, or one that the settings name. None: the instance has measured its own.
    observed: PrefillTable | None = None
    prefill_factor: float = 1.0  # Factor of the prefill table after a loss of ranks.
    slower_token_s: float = 0.0  # Additional time per token after a loss of ranks.
    # Time of a decode step: by the last report, else the overhead of a step by the table.
    step_s: float = 0.0
    reported_step_s: float = 0.0  # Time of a decode step, by the last report; 0: not reported.
    # Factor of the prefill table by the times of the instance's own steps.
    slowness: float = 1.0
    has_own_slowness: bool = False  # The instance has reported it; else it is that of its like.

    @property
    def has_guess(self) -> bool:
        """True if the prefill table was a guess at first."""
        return self.observed is not None and self.observed.is_guess

    def set_pace(self, decode_factor: float, prefill_factor: float, token_s: float) -> None:
        """Set the step times relative to those with all ranks. `token_s` is a measured time per
        token.
        """
        self.slower_token_s = max(0.0, decode_factor - 1) * token_s
        if prefill_factor != self.prefill_factor:
            self.prefill_factor = prefill_factor
            self.set_table(self.full_table)

    def set_table(self, table: PrefillTable) -> None:
        """Set the prefill table that holds with all ranks."""
        self.table = self.full_table = table
        if (factor := self.prefill_factor * self.slowness) != 1.0:
            self.table = table.scaled(factor)
        self.step_s = self.reported_step_s or self.table.step_overhead_s

    def note_steps(self, report: LoadReport) -> bool:
        """Note the reported times of steps; return whether the slowness is another."""
        self.reported_step_s = report.step_s
        self.step_s = report.step_s or self.table.step_overhead_s
        if report.slowness is None or self.observed is not None:
            return False
        is_first, self.has_own_slowness = not self.has_own_slowness, True
        if not has_moved(report.slowness, self.slowness):
            return is_first
        self.set_slowness(report.slowness)
        return True

    def set_slowness(self, slowness: float) -> None:
        """Set the factor of the prefill table by the times of steps."""
        self.slowness = slowness
        self.set_table(self.full_table)

    def has_other_steps(self, report: LoadReport) -> bool:
        """Return whether the reported times of steps differ enough to change a decision."""
        return has_moved(report.step_s, self.reported_step_s) or self._has_other_slowness(report)

    def _has_other_slowness(self, report: LoadReport) -> bool:
        # The slowness is that of the declared table, and no table is scaled twice.
        if report.slowness is None or self.observed is not None:
            return False
        return not self.has_own_slowness or has_moved(report.slowness, self.slowness)


@dataclass(slots=True, eq=False, repr=False)
class Member:
    """The record of one process of an instance, from its `InstanceUp` on, or the configuration of
    an instance that has not been up. The next process has a new record.
    """

    id: InstanceId
    node: NodeId
    role: Role
    # Name of the group whose instances lend each other hosts of stages; None: no group.
    group: str | None = None
    health: Health = Health.STARTING
    reason: str | None = None
    # The reported info; `own_prefill` is None if the prefill instance is not configured.
    info: InstanceInfo = UNKNOWN
    load: LoadReport | None = None  # The last load report; None: the instance is not up.
    reported_s: float = 0.0  # Time of `load`.
    beat_s: float = -inf  # Time of the last heartbeat, sent also while the event loop stalls.
    starts: int = 0  # Number of processes of the instance that have come up here.
    # The last epoch in each of the instance's last starts, by number of the start.
    epochs: dict[int, int] = field(default_factory=dict)
    # Transfers of KV to and from the instance work. False until a self-test has passed, if any.
    moves_kv: bool = True
    restores: bool = True  # True: transfers of KV from agents to the instance work.
    # Digests of self-tests, as `GREEDY:SEEDED`: instances with equal parts continue each other's
    # output exactly. Empty: not known; `-`: no output is continued exactly.
    tokens: str = ""
    # Digests of the tokens that the self-tests generate from one prompt, as `GREEDY:SEEDED`: of
    # instances with equal parts each generates the other's output again. Empty: not known.
    generates: str = ""
    # True: the weights are not the right ones, or not known while others are
    # (`fleet/self_tests.py`), so the instance gets new requests only if nothing else serves.
    is_doubted: bool = False
    # True: the watch fails although the instance delivers tokens, so it gets no new request.
    is_unwell: bool = False
    # Until then a transfer of a given-up attempt may go on there, so the instance gets new
    # hand-offs only if nothing else takes them.
    hung_until_s: float = -inf
    up_s: float = 0.0  # Time of coming up; later for a process after repeated quick deaths.
    told: LoadReport | None = None  # The last report passed to the policy; None: none.
    reported_queue_s: float = 0.0
    work_s: float = 0.0  # Predicted compute time of unanswered requests of this proxy.
    queue_s: float = 0.0  # The larger of `reported_queue_s` and `work_s`.
    # The part of `work_s` that is for histories, which recoveries compute.
    history_work_s: float = 0.0
    head_since_s: float = 0.0  # Time at which the first of the booked work began, if known.
    # Work before a history that comes now: `wait_of_history_s` at the last `look_ahead` of the
    # view, and the histories booked since.
    ahead_s: float = 0.0
    bookings: int = 0
    streams: int = 0  # Streams of all proxies that decode there, or will after their prefill.
    others_reported: int = 0  # Streams of other proxies, by the last report.
    # Streams whose current stage, or only call, runs at the instance.
    running: set[StreamId] = field(default_factory=set)
    # Streams with retained or cached pages at the instance.
    held: set[StreamId] = field(default_factory=set)
    # True: the state of the instance's GPU is a reason to drain, by the settings.
    gpu_degraded: bool = False
    draining: bool = False  # The process has reported that it drains.
    drain_ordered: bool = False  # An operator has ordered a drain.
    # The re-forming under way, in which the ranks compute nothing; None: none.
    reforming: PredictedReforming | None = None
    # True: the instance gets no new stream, for one of the four reasons above.
    is_drained: bool = False
    times: ComputeTimes = field(default_factory=ComputeTimes)
    answers: AnswerHealth = field(default_factory=AnswerHealth)
    epoch: int = 0  # Epoch of `info`, kept when the instance is removed.
    abilities: Abilities = NO_ABILITIES
    shared: SharedRows = NO_SHARED_ROWS
    # Sort key of decode instances: streams, then id.
    rank: tuple[int, InstanceId] = field(init=False)
    # Decode instances on the same node that are not drained and can take this instance's hand-offs.
    own_decoders: list["Member"] = field(default_factory=list)
    is_ranked: bool = False  # True: `ClusterView.decoders` lists the instance.
    # Sort key of prefill instances when last sorted: predicted work, streams of the least loaded of
    # `own_decoders`, id.
    place: tuple[float, int, InstanceId] = field(init=False)
    is_placed: bool = False  # True: `PrefillOrder` lists the instance.
    cache_bit: int = 0  # Bit in the index of prefixes (`cluster_view.py`); 0: none.
    reported_prompts: int = 0  # Prompts that a prefill instance runs or queues, by its report.

    def __post_init__(self) -> None:
        self.rank = 0, self.id
        self.place = 0.0, 0, self.id

    @classmethod
    def of(cls, info: InstanceInfo, prefill: PrefillTable | None = None) -> "Member":
        """Create the record of an instance without a configuration. `prefill` is its table; None:
        the table that the instance has measured.
        """
        return cls(info.id, info.node, info.role).next_process(info, prefill)

    def next_process(self, info: InstanceInfo, prefill: PrefillTable | None) -> "Member":
        """Return the record of the next process; `prefill` is as in `of`."""
        made = Member(
            self.id,
            self.node,
            self.role,
            self.group,
            load=self.load,
            reported_s=self.reported_s,
            beat_s=self.beat_s,
            epochs=self.epochs,
            starts=self.starts + (not self.had_not_ended(info)),
        )
        table = prefill or PrefillTable.from_measured(info.prefill)
        made.times.set_table(table)
        # An instance that keeps the pace of the named table declares it, and reports its slowness.
        if table.is_guess or table.label != info.prefill.label:
            made.times.observed = table
        made.set_info(info)
        return made

    def set_info(self, info: InstanceInfo) -> None:
        """Replace the info that the process reports about itself."""
        self.info, self.epoch = info, info.epoch
        self.abilities = Abilities.of(info, has_rows=bool(self.shared.rows))

    def learn(self, **changes: Any) -> None:
        """Replace fields of the info that the process has reported."""
        self.set_info(msgspec.structs.replace(self.info, **changes))

    def set_rows(self, namespace: str, *, in_store: bool = False) -> None:
        """Set the namespace of the instance's rows at its node's agent or in a store; empty:
        none.
        """
        before, has_tier = self.shared.rows, bool(namespace) and not in_store
        rows = namespace if self.was_up else before
        self.shared = msgspec.structs.replace(
            self.shared, rows=rows, has_tier=has_tier, in_store=in_store
        )
        if rows != before:
            self.set_info(self.info)

    @property
    def store(self) -> str:
        """The kind of the KV store from which the engine loads by itself; empty: none, or not
        used.
        """
        return "" if self.load is None or self.shared.has_tier else self.load.store

    @property
    def was_up(self) -> bool:
        """True if a process of the instance has come up since it was configured."""
        return self.info is not UNKNOWN

    @property
    def lost(self) -> InstanceInfo | None:
        """The info of the last lost process, which may still run; None: none was lost."""
        return self.info if self.was_up and self.health is not Health.UP else None

    def is_same_process(self, info: InstanceInfo) -> bool:
        """Return whether the process and its workers have run on, and another proxy has fenced
        them.
        """
        before = self.info
        if self.health is not Health.UP or not _can_fence(info):
            return False
        return (info.pid, info.worker_pids) == (before.pid, before.worker_pids)

    def had_not_ended(self, info: InstanceInfo) -> bool:
        """Return whether the process and its workers have run on while they were considered lost. A
        process without a pid (0) is identified by its epoch, which rises with every process.
        """
        lost = self.lost
        if lost is None or (info.pid, info.worker_pids) != (lost.pid, lost.worker_pids):
            return False
        return info.pid != 0 or info.epoch == lost.epoch

    def must_be_fenced(self, info: InstanceInfo) -> bool:
        """Return whether the process ran on while it was considered lost, and can be fenced."""
        return self.lost is not None and info.pid == self.lost.pid and _can_fence(info)

    def must_drain_before_use(self, info: InstanceInfo) -> bool:
        """Return whether the process ran on while it was considered lost, and cannot be fenced, so
        that it must become idle before it is used again.

        A process without a pid (0) is identified by its epoch, which rises with every process.
        """
        lost = self.lost
        is_same = lost is not None and (info.pid, info.epoch) == (lost.pid, lost.epoch)
        return is_same and not _can_fence(info)

    def lose(self, cause: str) -> None:
        """Mark the instance as down by this cause."""
        self.health, self.reason, self.load = Health.DOWN, cause, None

    @property
    def is_to_end(self) -> bool:
        """True if the instance has a permanent reason to drain."""
        return self.gpu_degraded or self.draining or self.drain_ordered

    @property
    def must_drain(self) -> bool:
        """True if the instance has any reason to drain."""
        return self.is_to_end or self.reforming is not None

    def has_lost_cells(self, stream: StreamId) -> bool:
        """Return whether the instance re-forms and has lost cells of the stream's pages."""
        return self.reforming is not None and self.reforming.pages_of(stream)[0] > 0

    @property
    def reported_wait_s(self) -> float:
        """The queueing delay plus the rest of a re-forming, by the last report."""
        if (load := self.load) is None:
            return 0.0
        ready_in_s = 0.0 if load.reforming is None else load.reforming.ready_in_s
        return load.queue_delay_s + ready_in_s

    def note_queue(self, reported_s: float) -> None:
        self.reported_queue_s, self.queue_s = reported_s, max(reported_s, self.work_s)

    def wait_of_history_s(self, now_s: float, besides_s: float = 0.0) -> float:
        """Return the time of the work before a history that comes now; `besides_s` of the booked
        histories are not counted.

        Of the first of the booked work, the time since its begin is done. A fair queue lets a
        history wait for a share of the new prompts.
        """
        share = SHARE_OF_NEW if self.abilities.has_fair_queue else 1.0
        booked_s = self.history_work_s - besides_s + share * (self.work_s - self.history_work_s)
        if self.bookings:
            booked_s -= min(max(0.0, now_s - self.head_since_s), self.work_s / self.bookings)
        return max(0.0, booked_s, share * self.reported_queue_s)

    def is_clear(self, now_s: float) -> bool:
        """Return whether no health restriction applies: a fast test for the common case."""
        health = self.answers
        return (
            health.until_s is None
            and health.busy_until_s is None
            and not self.is_doubted
            and not self.is_unwell
            and not health.is_ejected
            and now_s >= self.hung_until_s
            and (
                not health.awaited
                or now_s - health.awaited_from_s <= UNANSWERED_S
                or now_s - health.answered_s <= UNANSWERED_S
            )
        )

    def takes_from(self, prefill: "Member") -> bool:
        """Return whether `prefill` can hand off to this instance. A server that cannot pull pages
        takes hand-offs only from its own prefill instance.
        """
        if self.info.own_prefill == prefill.id:
            return True
        return (self.abilities.pulls or self.info.own_prefill is None) and self.reads_format_of(
            prefill
        )

    def reads_format_of(self, prefill: "Member") -> bool:
        """Return whether the hand-off formats are compatible, as far as known; two formats of one
        kind must be equal.
        """
        own, theirs = self.info.hand_off_format, prefill.info.hand_off_format
        if not own or not theirs or own == theirs:
            return True
        return own.split()[0] != theirs.split()[0]

    def continues(self, tokens: str, promise: Promise = Promise.NONE) -> bool:
        """Return whether the instance continues output of an instance with `tokens` exactly, as far
        as known; with a promise of sampled tokens, these too. An instance that is not tested keeps
        no promise to a stream of one that is.
        """
        if not tokens:
            return True
        if not self.tokens:
            return promise is Promise.NONE
        if promise is Promise.SAMPLED:
            return self.tokens == tokens and not tokens.endswith(":")
        return self.tokens.split(":")[0] == tokens.split(":")[0] != GOES_ON_NOWHERE


def has_moved(now: float, before: float) -> bool:
    """Return whether a time, or a factor of times, differs enough to change a decision."""
    return abs(now - before) > _TIME_STEP * before


def _can_fence(info: InstanceInfo) -> bool:
    return Capability.FENCE in info.capabilities


def is_one_call(decode: Member, prefill: InstanceId | None) -> bool:
    """Return whether the prefill and the decode call of an attempt run together, as one call."""
    return prefill is not None and (decode.info.joins_prefill or decode.info.own_prefill == prefill)
