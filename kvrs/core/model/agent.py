"""The record of one agent: its health, its reports, and the bookings of streams there."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from kvrs.core.model import events as ev
from kvrs.core.model.member import LONGEST_PAUSE_S, Abilities, Health, Member
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.protocol.instance import AgentInfo, AgentReport
from kvrs.protocol.rows import NO_ROWS, RowsReport

_LOAD_PAUSE_S = 0.5
_ABILITIES = Abilities(caches=True)


@dataclass(slots=True, eq=False)
class Agent:
    """The agent of one node: its health, and its row of the load table of LUMEN section 4.2. An
    agent that is not up has no bookings.
    """

    id: InstanceId
    node: NodeId
    # `epoch`, `capacity_bytes` and `host_to_device_bytes_per_s` are those of the last `HolderUp`.
    epoch: int = 0
    capacity_bytes: int = 0
    host_to_device_bytes_per_s: float = 0.0
    reported_bytes: int = 0  # Bytes reserved by all proxies, by the last report.
    reported_checkpoints: int = 0
    booked_bytes: int = 0  # Bytes booked for streams of this proxy when the agent is chosen.
    # Booked bytes by the node that decodes the streams.
    booked_of: Counter[NodeId] = field(default_factory=Counter)
    streams: set[StreamId] = field(default_factory=set)  # Streams with a checkpoint or a booking.
    rows: RowsReport = NO_ROWS
    # Instances whose rows the agent did not have when a restore asked for them, since its last
    # report of changed rows (`kv_locations.py`).
    doubted: set[InstanceId] = field(default_factory=set)
    # `health`, `reason`, `info`, `report` and `beat_s` are written by the agent's watch.
    health: Health = Health.STARTING
    reason: str | None = None
    info: AgentInfo | None = None
    report: AgentReport | None = None  # The last report; None: the agent is not up.
    beat_s: float = -inf  # Time of the last heartbeat.
    cache_bit: int = 0  # The agent's bit in the index of stored prefixes (`cluster_view.py`).
    bytes_per_token: int = 0  # KV bytes per token in the agent's checkpoints; 0: not known.
    abilities: Abilities = _ABILITIES
    # Failed loads of new prompts in a row, and the end of the pause after them.
    failed_loads: int = 0
    no_loads_until_s: float = -inf

    def begin(self, up: ev.HolderUp) -> "Agent":
        """Reset the record for a new process of the agent."""
        assert not self.streams, self.id
        assert not self.booked_bytes, self.id
        self.epoch, self.capacity_bytes = up.epoch, up.capacity_bytes
        self.host_to_device_bytes_per_s = up.host_to_device_bytes_per_s
        self.reported_bytes = self.reported_checkpoints = 0
        return self

    def lose(self, cause: str) -> None:
        """Mark the agent as down."""
        self.health, self.reason, self.report = Health.DOWN, cause, None

    def note_load(self, began_s: float, now_s: float, *, has_failed: bool) -> None:
        """Note the result of loading a new prompt from the agent.

        The pause before the next load doubles with each failure; failures of loads that began
        before the pause do not count.
        """
        if not has_failed:
            self.failed_loads, self.no_loads_until_s = 0, -inf
        elif began_s >= self.no_loads_until_s:
            pause_s = _LOAD_PAUSE_S * 2.0 ** min(self.failed_loads, 16)
            self.no_loads_until_s = now_s + min(LONGEST_PAUSE_S, pause_s)
            self.failed_loads += 1

    @property
    def reserved_bytes(self) -> int:
        return max(self.booked_bytes, self.reported_bytes)

    @property
    def room_tokens(self) -> int:
        """Number of tokens whose KV the agent has room for; 0: not known."""
        return self.capacity_bytes // self.bytes_per_token if self.bytes_per_token else 0

    @property
    def checkpoints(self) -> int:
        return max(len(self.streams), self.reported_checkpoints)

    def rows_of(self, member: Member, namespace: str) -> float:
        """Return the part of the instance's rows of the namespace that the agent serves by its last
        report, from 0 to 1: all rows of an engine of its own node, or second copies.
        """
        if member.id in self.doubted:
            return 0.0
        if member.node == self.node:
            own = ((each.engine, each.namespace) for each in self.rows.regions)
            return float((member.id, namespace) in own)
        copied = (each for each in self.rows.copied if each.node == member.node)
        return max((each.share for each in copied if each.namespace == namespace), default=0.0)

    def has_room(self, need_bytes: int) -> bool:
        return self.reserved_bytes + need_bytes <= self.capacity_bytes
