"""The state of the policy: one object per proxy, with the settings that are read from it.

The functions of `kvrs/core` take it, and each field is written from one module.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvrs.config.backup import BackupMode, BackupSettings
from kvrs.config.policy import PolicySettings, SloSettings
from kvrs.core.books.learning import Differences, Spread
from kvrs.core.books.poison import PoisonCounter
from kvrs.core.books.prefills import PrefillScale
from kvrs.core.books.waiting import RetryBudget, SlotBook, Timers
from kvrs.core.model import actions as act
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.cluster_view import ClusterView
from kvrs.core.model.member import Member
from kvrs.core.model.streams import RestoredRows, Stream
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import Role


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """Holds the settings that the policy reads. A reload replaces the object."""

    policy: PolicySettings = field(default_factory=PolicySettings)
    slo: SloSettings = field(default_factory=SloSettings)
    backup: BackupSettings = field(default_factory=BackupSettings)
    # Derived settings: the deadlines of streams whose clients named none, and whether backup is on.
    deadlines: ev.Deadlines = field(init=False)
    keeps_checkpoints: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "deadlines", deadlines_of(ev.NO_DEADLINES, self.slo))
        object.__setattr__(self, "keeps_checkpoints", self.backup.mode is not BackupMode.OFF)


def deadlines_of(requested: ev.Deadlines, slo: SloSettings) -> ev.Deadlines:
    """Return the client's limits, and the operator's where the client named none."""
    return ev.Deadlines(
        ttft_s=slo.ttft_s if requested.ttft_s is None else requested.ttft_s,
        recovery_gap_s=slo.recovery_gap_s
        if requested.recovery_gap_s is None
        else requested.recovery_gap_s,
        end_to_end_s=slo.deadline_s if requested.end_to_end_s is None else requested.end_to_end_s,
    )


def new_member(up: ev.InstanceUp) -> Member:
    return Member.of(up.info, up.prefill)


def new_agent(up: ev.HolderUp) -> Agent:
    return Agent(up.holder, up.node)


@dataclass(slots=True, eq=False)
class State:
    """Holds the records of one policy. A comment above each group of fields names their writer."""

    settings: CoreSettings
    # Functions that make new records (`RecoveryPolicy.__init__`).
    member_of: Callable[[ev.InstanceUp], Member] = new_member
    agent_of: Callable[[ev.HolderUp], Agent] = new_agent
    stream_of: Callable[[StreamId], Stream] = Stream

    # Actions of the present event, in order.
    actions: list[act.Action] = field(default_factory=list)
    view: ClusterView = field(init=False)
    slots: SlotBook = field(init=False)
    timers: Timers = field(default_factory=Timers)
    retries: RetryBudget = field(default_factory=RetryBudget)

    # Written by `ledger.py`.
    streams: dict[StreamId, Stream] = field(default_factory=dict)
    idle: dict[StreamId, Stream] = field(default_factory=dict)  # The streams without an attempt.
    prefill_scale: PrefillScale = field(default_factory=PrefillScale)

    # Written by `kv_locations.py`. Pages kept by instances that are about to come up.
    kept: dict[InstanceId, ev.PagesKept] = field(default_factory=dict)
    # The agents with second copies of rows, by the node of the rows' engines.
    copying: defaultdict[NodeId, dict[InstanceId, Agent]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    # Written by `placing.py`.
    spread: Spread = field(default_factory=Spread)
    # Restores of rows that have brought a token, until their target has counted what it loaded.
    restored: dict[tuple[StreamId, int], RestoredRows] = field(default_factory=dict)

    # Written by `recovery.py`.
    differences: Differences = field(default_factory=Differences)

    # Written by `placing.py`. Waiting victims of losses, which are decided together at the end of a
    # short pause.
    gathered: dict[StreamId, Stream] = field(default_factory=dict)
    # Recoveries that the last event has begun, with the numbers of their attempts: their times are
    # predicted together before the next event.
    begun: list[tuple[Stream, int]] = field(default_factory=list)
    # New streams without room at the decode instances that compute their prompts.
    held_back: dict[StreamId, Stream] = field(default_factory=dict)
    roles_seen: set[Role] = field(default_factory=set)  # Roles that have had an instance.
    missing_roles: list[Role] = field(default_factory=list)  # Missing roles at the last look.
    missing_since_s: float = 0.0  # The time from which `missing_roles` holds.

    # Written by `recovery.py`.
    arrivals: int = 0

    # Written by `recovery.py`.
    # Consecutive quick deaths, and the time at which the first of these processes came up.
    quick_deaths: dict[InstanceId, tuple[int, float]] = field(default_factory=dict)
    # Instances with an unhealthy GPU, including their next process, which uses the same GPU.
    gpu_degraded: set[InstanceId] = field(default_factory=set)
    drain_ordered: set[InstanceId] = field(default_factory=set)

    # Written by `books/poison.py`.
    poison: PoisonCounter = field(init=False)

    def __post_init__(self) -> None:
        policy = self.settings.policy
        self.view = ClusterView(policy.assumed_link_bytes_per_s)
        self.slots = SlotBook(policy.slots_max)
        self.poison = PoisonCounter(self.streams)

    def reload(self, policy: PolicySettings, slo: SloSettings) -> None:
        """Replace the settings.

        Alarms that are set stay as they are, what was learned is kept, and slots beyond a smaller
        limit run to their end.
        """
        self.settings = replace(self.settings, policy=policy, slo=slo)
        self.view.assume(policy.assumed_link_bytes_per_s)
        self.slots.slots_max = policy.slots_max
