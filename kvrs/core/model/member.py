"""The record of an instance: what the configuration says of it, what it reports, what this proxy
has sent there, and its health as its answers show it.

Its watch writes health, reports and epochs, the policy all that follows from its events.
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
from kvrs.protocol.instance import (
    Capability,
    InstanceInfo,
    LoadReport,
    Role,
    assumed_instance,
)

GOES_ON_NOWHERE = "-"  # The tokens of an instance that does not continue its own output exactly.

# Without any answer for this long, and several times what was predicted, nothing new is sent there.
UNANSWERED_S = 2.0
# Pauses of new requests, which double: after a failure, at an ejection, after a busy answer. An
# instance that answers every request wrongly gets three of them at most in any 10 s: now, after
# the first pause, and as the first probe.
FAILURE_PAUSE_S = 0.5
EJECTION_PAUSE_S = 4.0
BUSY_PAUSE_S = 2.0
LONGEST_PAUSE_S = 60.0
# While nothing else is open, a busy instance is tried again after so long, doubled, and at least so
# often.
_FIRST_BUSY_S = 0.25
_LONGEST_BUSY_S = 2.0
# After a busy pause one attempt goes there; the others wait so long for its answer.
_TRY_S = 0.5
_JITTER = 0.25


def fraction(*of: object) -> float:
    """A number from 0 to 1 that depends on nothing but `of`: jitter without randomness."""
    return crc32(":".join(map(str, of)).encode()) / 2**32


def pause_s(instance: InstanceId, first_s: float, count: int) -> float:
    """The pause number `count` (from 0) of an instance, with jitter: proxies that hold the same
    view of two instances do not probe both at the same moment.
    """
    return min(LONGEST_PAUSE_S, first_s * 2.0 ** min(count, 16)) * _jitter(instance, count)


def _jitter(instance: InstanceId, count: int) -> float:
    return 1 + _JITTER * fraction(instance, count)


# The info of an instance of which no process has come up.
UNKNOWN = assumed_instance(
    InstanceId(""), NodeId(""), Role.PREFILL, KvGeometry(1, 1, 1, 1, 1), (), epoch=0
)


class Health(StrEnum):
    STARTING = "starting"  # Never seen up.
    UP = "up"
    DOWN = "down"
    # It was taken out of the configuration. Kept, so that what still asks for it finds it not up.
    REMOVED = "removed"
    REFUSED = "refused"  # It answers, and must not be used; `reason` says why.


@dataclass(slots=True, eq=False)
class AnswerHealth:
    """The health of an instance as its answers show it, whatever its reports say.

    An instance does one stage of streams (prefill or decode), or both in one call, so that it has
    one record. A closed instance gets nothing new while another one is open; when its pause is
    over, one new request at a time finds out whether it works again.
    """

    consecutive: int = 0  # Failures since the last answer.
    refuses_wrongly: bool = False  # Others have accepted what it refused since its last answer.
    abrupt_s: float = -inf  # The last failure that came without an error.
    is_ejected: bool = False
    ejections: int = 0
    quick_deaths: int = 0  # Of the processes before it, in a row (`core/instances.py`).
    readmitted_s: float = -inf
    cause: str = ""  # Of the last closing.
    closed_s: float = -inf
    until_s: float | None = None  # The end of the pause; None: open.
    pauses: int = 0  # Since the last answer.
    probe: StreamId | None = None
    # It has said that it is busy: nothing goes there before then. None: it has not, or has answered
    # since.
    busy_until_s: float | None = None
    asked_until_s: float = -inf  # The end of the pause that it has asked for itself.
    busies: int = 0  # Since the last answer.
    tried_by: StreamId | None = None  # The attempt that tries it after the pause.
    # Streams that wait for its answer, oldest first: since when, and the wait that was predicted.
    awaited: dict[StreamId, tuple[float, float]] = field(default_factory=dict)
    awaited_from_s: float = -inf  # Not after the first of them.
    whole: set[StreamId] = field(default_factory=set)  # Those whose answers come in one piece.
    answered_s: float = -inf

    def is_overdue(self, now_s: float, queue_s: float) -> bool:
        """The instance has answered nothing for too long."""
        if not self.awaited or now_s - max(self.awaited_from_s, self.answered_s) <= UNANSWERED_S:
            return False
        since_s, predicted_s = next(iter(self.awaited.values()))
        limit_s = UNANSWERED_S + 4 * predicted_s + 2 * queue_s
        return now_s - max(since_s, self.answered_s) > limit_s

    def await_whole(self, stream: StreamId) -> None:
        """Its answer comes in one piece, so that its time is not known."""
        if self.awaited.pop(stream, None) is not None:
            self.whole.add(stream)

    def owes(self, stream: StreamId) -> bool:
        """The stream has got nothing of its answer yet."""
        return stream in self.awaited or stream in self.whole

    def is_busy(self, now_s: float) -> bool:
        return self.busy_until_s is not None and now_s < self.busy_until_s

    def note_busy(
        self, instance: InstanceId, stream: StreamId, retry_after_s: float, now_s: float
    ) -> None:
        """Pause, at least for as long as it asks; the pauses double with every busy answer but
        those to attempts from before the pause.
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
        """A stream has ended there, so that one more has room: whether streams wait for that."""
        if self.busy_until_s is None or now_s < self.asked_until_s or self.is_ejected:
            return False
        if self.until_s is not None:
            self.until_s = min(self.until_s, now_s)
        if not self.is_busy(now_s):
            return False
        self.busy_until_s, self.tried_by = now_s, None
        return True

    def try_busy(self, stream: StreamId, now_s: float) -> None:
        """The pause of a busy instance is over, and an attempt goes there."""
        self.tried_by, self.busy_until_s = stream, now_s + _TRY_S

    def close(self, cause: str, now_s: float, pause: float) -> None:
        self.cause, self.closed_s, self.until_s, self.probe = cause, now_s, now_s + pause, None
        self.pauses += 1

    def open(self) -> None:
        self.until_s = self.probe = None
        self.is_ejected, self.pauses, self.cause = False, 0, ""
        self.busy_until_s, self.busies, self.tried_by = None, 0, None

    def left(self, stream: StreamId) -> None:
        """The stream waits for no answer any more."""
        self.awaited.pop(stream, None)
        self.whole.discard(stream)
        if self.probe == stream:
            self.probe = None

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """Plain data for people."""
        return {
            "ejected": self.is_ejected,
            "failures_in_a_row": self.consecutive,
            "paused_s": 0.0 if self.until_s is None else max(0.0, self.until_s - now_s),
            "busy_s": max(0.0, (self.busy_until_s or 0.0) - now_s),
            "quick_deaths": self.quick_deaths,
            "cause": self.cause,
        }


@dataclass(slots=True, eq=False, repr=False)
class Member:
    """One instance: one process of it in one epoch, which the policy has since `InstanceUp`, or
    what the configuration says of it while none was up. Its next process is another member.
    """

    id: InstanceId
    node: NodeId
    role: Role
    group: str | None = None  # Instances of one group lend each other the hosts of their stages.
    health: Health = Health.STARTING
    reason: str | None = None
    # `own_prefill` is None where the configuration does not have that instance.
    info: InstanceInfo = UNKNOWN
    load: LoadReport | None = None  # The last one; None: it is not up.
    reported_s: float = 0.0  # When `load` came.
    # When its last heartbeat came: while its event loop stalls, it has these alone.
    beat_s: float = -inf
    epochs: dict[int, int] = field(default_factory=dict)  # The last of each of its last starts.
    # KV really comes to it, or from it. False until a self-test has seen that, where there are any.
    moves_kv: bool = True
    restores: bool = True  # KV really comes to it from agents.
    # The tokens that it computes, as `GREEDY:SEEDED`: instances with equal parts go on exactly
    # where another one was cut. Empty: not known; `-`: none goes on exactly there.
    tokens: str = ""
    # Instances with equal names here compute the same but for near-ties. Empty: not known.
    weights: str = ""
    is_minority: bool = False  # More decode instances have other weights: it gets nothing new.
    up_s: float = 0.0  # When it came up, or gets work, if those before it died again and again.
    told: LoadReport | None = None  # Its last report that changed a decision.
    reported_queue_s: float = 0.0
    work_s: float = 0.0  # Predicted compute time of what was sent there and has no answer yet.
    queue_s: float = 0.0  # The larger of the two.
    bookings: int = 0
    # Streams that decode there or will after their prefill, those of all other proxies included.
    streams: int = 0
    others_reported: int = 0  # Streams of other proxies, by its last report.
    # Streams of which the current stage, or the only call, runs there.
    running: set[StreamId] = field(default_factory=set)
    held: set[StreamId] = field(default_factory=set)  # Streams of which it retains or caches pages.
    gpu_degraded: bool = False  # By the settings, for this state of its GPU it is to be drained.
    draining: bool = False  # The process has reported that it is about to end.
    drain_ordered: bool = False  # By an operator.
    reforming: PredictedReforming | None = None  # It computes nothing until it has other ranks.
    is_drained: bool = False  # For any of these it gets nothing new: others have its role.
    # Decoding with fewer ranks than it was configured with takes so much longer per token.
    slower_token_s: float = 0.0
    prefill_factor: float = 1.0  # Of its prefill table, for the same reason.
    answers: AnswerHealth = field(default_factory=AnswerHealth)
    # What every decision uses of `info`, looked up once.
    epoch: int = 0
    prefills: bool = False
    decodes: bool = False
    pulls: bool = False
    retains: bool = False
    caches: bool = False
    splits: bool = False
    checkpoints: bool = False
    replays: bool = False
    resumes_exactly: bool = False  # It continues text, stop strings, usage and sampling itself.
    computes_prompts: bool = False  # A decode instance that needs no other one for a new stream.
    names: tuple[str, ...] = ()  # Of models, aliases and adapters that it serves.
    # Namespace of rows of its CPU tier, which the agent of its node serves (`has_tier`), or of a
    # store that its engine loads from by itself (`in_store`); empty: it has neither.
    rows: str = ""
    has_tier: bool = False
    tier_tokens: int = 0  # Room of its CPU tier; 0: not told.
    in_store: bool = False
    store_share: float = 1.0  # Of what recoveries asked its store for, that this had.
    page_bytes: int = 0
    page_size_tokens: int = 0
    bytes_per_token: int = 0
    full_prefill: PrefillTable = field(init=False)  # With all its ranks.
    prefill: PrefillTable = field(init=False)  # With the ranks that it has.
    guess: PrefillTable | None = None  # The table as it came up with it, where that is a guess.
    # The order of decode instances: by streams, then by id.
    rank: tuple[int, InstanceId] = field(init=False)
    # Decode instances of its node that are not drained and can have its hand-offs.
    own_decoders: list["Member"] = field(default_factory=list)
    is_ranked: bool = False  # Among the decode instances that are not drained.
    # The order of prefill instances: by predicted work, by streams of the least loaded of
    # `own_decoders`, then by id; as of the last time at which they were sorted.
    place: tuple[float, int, InstanceId] = field(init=False)
    is_placed: bool = False  # Among the prefill instances that are not drained.
    cache_bit: int = 0  # In the index of prefixes (`prefixes.py`); 0: it has none there.
    reported_prompts: int = 0  # That a prefill instance runs or queues, by its last report.

    def __post_init__(self) -> None:
        self.rank = 0, self.id
        self.place = 0.0, 0, self.id

    @classmethod
    def of(cls, info: InstanceInfo, prefill: PrefillTable | None = None) -> "Member":
        """The member that `InstanceUp` makes where no configuration is known. `prefill`: its table;
        None: that which it has measured itself.
        """
        return cls(info.id, info.node, info.role).next_process(info, prefill)

    def next_process(self, info: InstanceInfo, prefill: PrefillTable | None) -> "Member":
        """The record of a process that has come up, in place of this one; `prefill` as in `of`."""
        made = Member(
            self.id,
            self.node,
            self.role,
            self.group,
            load=self.load,
            reported_s=self.reported_s,
            beat_s=self.beat_s,
            epochs=self.epochs,
        )
        made.prefill = made.full_prefill = prefill or PrefillTable.from_measured(info.prefill)
        made.guess = made.full_prefill if made.full_prefill.is_guess else None
        made.set_info(info)
        return made

    def set_info(self, info: InstanceInfo) -> None:
        """The same process, with what it says of itself now."""
        capabilities, geometry = info.capabilities, info.geometry
        self.info, self.epoch = info, info.epoch
        self.prefills = info.role is not Role.DECODE
        self.decodes = info.role is not Role.PREFILL
        self.pulls = Capability.PULL_PAGES in capabilities or bool(self.rows)
        self.retains = Capability.RETAIN in capabilities
        self.caches = Capability.PREFIX_CACHE in capabilities
        self.splits = self.pulls and Capability.SPLIT in capabilities
        self.checkpoints = Capability.CHECKPOINT in capabilities
        self.replays = Capability.REPLAY in capabilities
        self.resumes_exactly = Capability.EXACT_RESUME in capabilities
        self.computes_prompts = info.computes_prompts and info.role is Role.DECODE
        self.names = info.name_keys
        self.page_bytes = geometry.page_bytes
        self.page_size_tokens = geometry.page_size_tokens
        self.bytes_per_token = geometry.bytes_per_token

    def learn(self, **changes: Any) -> None:
        """The same process, of which these facts have changed."""
        self.set_info(msgspec.structs.replace(self.info, **changes))

    def set_rows(self, namespace: str, *, in_store: bool = False) -> None:
        """The agent of its node, or a store, has its rows, of this namespace; empty: neither."""
        self.in_store, self.has_tier = in_store, bool(namespace) and not in_store
        if namespace != self.rows and self.was_up:
            self.rows = namespace
            self.set_info(self.info)

    @property
    def store(self) -> str:
        """The kind of the store that its engine loads from by itself, as far as it is to be used;
        empty: none.
        """
        return "" if self.load is None or self.has_tier else self.load.store

    # As its watch sees it.

    @property
    def was_up(self) -> bool:
        """A process of the instance has come up, since the instance is in the configuration."""
        return self.info is not UNKNOWN

    @property
    def lost(self) -> InstanceInfo | None:
        """The process that was last lost and may still run."""
        return self.info if self.was_up and self.health is not Health.UP else None

    def is_same_process(self, info: InstanceInfo) -> bool:
        """The process, with its workers, has been up all the time: another proxy has fenced it."""
        before = self.info
        if self.health is not Health.UP or not _can_fence(info):
            return False
        return (info.pid, info.worker_pids) == (before.pid, before.worker_pids)

    def had_not_ended(self, info: InstanceInfo) -> bool:
        """The process, with its workers, ran on while it was taken for lost. One without a pid (0)
        is known by its epoch, which rises with every process.
        """
        lost = self.lost
        if lost is None or (info.pid, info.worker_pids) != (lost.pid, lost.worker_pids):
            return False
        return info.pid != 0 or info.epoch == lost.epoch

    def must_be_fenced(self, info: InstanceInfo) -> bool:
        """The process ran on while it was taken for lost."""
        return self.lost is not None and info.pid == self.lost.pid and _can_fence(info)

    def must_drain_before_use(self, info: InstanceInfo) -> bool:
        """The process is used again only when nothing runs on it: it was lost, runs on, and cannot
        be fenced.

        A process without a pid (0) is known by its epoch, which rises with every process.
        """
        lost = self.lost
        is_same = lost is not None and (info.pid, info.epoch) == (lost.pid, lost.epoch)
        return is_same and not _can_fence(info)

    def lose(self, cause: str) -> None:
        """It is not used any more."""
        self.health, self.reason, self.load = Health.DOWN, cause, None

    # As the policy sees it.

    @property
    def is_to_end(self) -> bool:
        """The instance is to be left for good, as far as is known."""
        return self.gpu_degraded or self.draining or self.drain_ordered

    @property
    def must_drain(self) -> bool:
        """Nothing new is to go there while another instance has its role."""
        return self.is_to_end or self.reforming is not None

    def has_lost_cells(self, stream: StreamId) -> bool:
        """It re-forms, and pages of the stream there are not whole until it has restored them."""
        return self.reforming is not None and self.reforming.pages_of(stream)[0] > 0

    @property
    def reported_wait_s(self) -> float:
        """Its queue and the rest of its re-forming, by its last report."""
        if (load := self.load) is None:
            return 0.0
        ready_in_s = 0.0 if load.reforming is None else load.reforming.ready_in_s
        return load.queue_delay_s + ready_in_s

    def note_queue(self, reported_s: float) -> None:
        self.reported_queue_s, self.queue_s = reported_s, max(reported_s, self.work_s)

    def is_clear(self, now_s: float) -> bool:
        """Fast path: no health restriction applies, the instance is open for new requests and for
        recoveries, and not busy.
        """
        health = self.answers
        return (
            health.until_s is None
            and health.busy_until_s is None
            and not self.is_minority
            and not health.is_ejected
            and (
                not health.awaited
                or now_s - health.awaited_from_s <= UNANSWERED_S
                or now_s - health.answered_s <= UNANSWERED_S
            )
        )

    def set_pace(self, decode_factor: float, prefill_factor: float, token_s: float) -> None:
        """It takes so many times as long as with all its ranks, at `token_s` per token now or
        before.
        """
        self.slower_token_s = max(0.0, decode_factor - 1) * token_s
        if prefill_factor != self.prefill_factor:
            self.prefill_factor = prefill_factor
            self.set_table(self.full_prefill)

    def set_table(self, table: PrefillTable) -> None:
        """Predict its prefills by this table from now on, which is that with all its ranks."""
        self.prefill = self.full_prefill = table
        if self.prefill_factor != 1.0:
            self.prefill = table.scaled(self.prefill_factor)

    def takes_from(self, prefill: "Member") -> bool:
        """A prefill there can be handed off to this instance. A server that pulls no pages takes
        hand-offs from its own prefill instance only, and NIXL in one of another format.
        """
        if self.info.own_prefill == prefill.id:
            return True
        return (self.pulls or self.info.own_prefill is None) and self.reads_format_of(prefill)

    def reads_format_of(self, prefill: "Member") -> bool:
        """NIXL can carry a hand-off from there, as far as is known: two values of one kind are
        equal.
        """
        own, theirs = self.info.hand_off_format, prefill.info.hand_off_format
        if not own or not theirs or own == theirs:
            return True
        return own.split()[0] != theirs.split()[0]

    def continues(self, tokens: str, promise: Promise = Promise.NONE) -> bool:
        """The instance goes on exactly with the output of one that computes `tokens`, as far as is
        known: with drawn tokens too, if these were promised.
        """
        if not tokens or not self.tokens:
            return True
        if promise is Promise.SAMPLED:
            return self.tokens == tokens and not tokens.endswith(":")
        return self.tokens.split(":")[0] == tokens.split(":")[0] != GOES_ON_NOWHERE


def _can_fence(info: InstanceInfo) -> bool:
    return Capability.FENCE in info.capabilities


def is_one_call(decode: Member, prefill: InstanceId | None) -> bool:
    """Prefill there and decode here begin together, and end as one attempt."""
    return prefill is not None and (decode.info.joins_prefill or decode.info.own_prefill == prefill)
