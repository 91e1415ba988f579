"""What each way of recovery is predicted to cost, in seconds (DESIGN section 5, seed KVRS `ROM_DECIDE`)."""

from dataclasses import dataclass
from enum import StrEnum

from kvrs.ids import InstanceId, NodeId
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.geometry import KvGeometry
from kvrs.protocol.instance import Capability, Role


class Option(StrEnum):
    START = "start"  # Not a recovery: a new stream, or one that had no KV and no token yet.
    MIGRATE = "migrate"
    RECOMPUTE = "recompute"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Instance:
    """What the policy knows of an instance that is up."""

    id: InstanceId
    node: NodeId
    role: Role
    epoch: int
    geometry: KvGeometry
    prefill: PrefillTable
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class Estimate:
    """One option for one victim and target; `total_s` is what options are compared by."""

    option: Option
    target: InstanceId
    total_s: float
    queue_s: float = 0.0
    transfer_s: float = 0.0
    compute_s: float = 0.0
    extrapolated: bool = False  # A table was asked outside its measured range.
