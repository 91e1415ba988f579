"""The instances of the configuration, and what this proxy knows of each. Only one model is served at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvrs.config import Config
from kvrs.ids import InstanceId, NodeId
from kvrs.policy.actions import Plan
from kvrs.policy.costs import Instance
from kvrs.profiles.catalog import prefill_table
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import Capability, InstanceInfo, LoadReport, Role
from kvrs.proxy.backends.backend import Backend


def overdue_after_s(interval_s: float) -> float:
    """When a report that comes every `interval_s` is late enough to doubt who sends it."""
    return max(1.0, 4 * interval_s)


class Health(StrEnum):
    STARTING = "starting"  # Never seen up.
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"  # It answers, and must not be used; `reason` says why.


@dataclass(slots=True, eq=False)
class Known:
    """One configured instance."""

    id: InstanceId
    node: NodeId
    role: Role
    backend: Backend
    health: Health = Health.STARTING
    reason: str | None = None
    info: InstanceInfo | None = None
    load: LoadReport | None = None
    reported_s: float = 0.0  # When it came.
    end_watch: Callable[[], None] | None = None  # Take its silence for its end.


class Instances:
    def __init__(self, config: Config, backends: Mapping[InstanceId, Backend]) -> None:
        self.known = {
            instance.id: Known(instance.id, node.id, instance.role, backends[instance.id])
            for node, instance in config.cluster.instances()
        }
        # Looked up now, so that an unknown name is told before anything starts.
        self._table = prefill_table(config.profiles.prefill) if config.profiles.prefill else None
        self._overdue_s = overdue_after_s(config.proxy.load_interval_s)
        # What the first instance serves, all must: a stream continues exactly only on equal weights.
        self._served: InstanceInfo | None = None

    @property
    def model(self) -> str | None:
        return None if self._served is None else self._served.model

    def is_up(self, instance: InstanceId) -> bool:
        return self.known[instance].health is Health.UP

    def ready(self) -> bool:
        """Whether a new stream could start now."""
        roles = {known.role for known in self.known.values() if known.health is Health.UP}
        return Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles

    def resumes_exactly(self, instance: InstanceId) -> bool:
        """Whether the engine continues text, stop strings, usage and sampling itself."""
        return self._can(instance, Capability.EXACT_RESUME)

    def sends_checkpoints(self, instance: InstanceId) -> bool:
        return self._can(instance, Capability.CHECKPOINT)

    def retains(self, instance: InstanceId) -> bool:
        return self._can(instance, Capability.RETAIN)

    def is_one_call(self, plan: Plan) -> bool:
        """Whether the decode instance has the history computed by the plan's prefill instance, which is of the same server."""
        info = self.known[plan.decode].info
        return plan.prefill is not None and info is not None and info.own_prefill == plan.prefill

    def _can(self, instance: InstanceId, capability: Capability) -> bool:
        info = self.known[instance].info
        return info is not None and capability in info.capabilities

    def is_reporting(self, instance: InstanceId, now_s: float) -> bool:
        """Whether its last report is no older than it should be."""
        return now_s - self.known[instance].reported_s < self._overdue_s

    def plain(self) -> InstanceId | None:
        """An instance to which a stream may have to go and that cannot continue everything exactly."""
        decoding = (known for known in self.known.values() if known.role is not Role.PREFILL and known.info is not None)
        return next((known.id for known in decoding if not self.resumes_exactly(known.id)), None)

    def queue_delay_s(self, instance: InstanceId) -> float:
        load = self.known[instance].load
        return 0.0 if load is None else load.queue_delay_s

    def queued(self, instance: InstanceId) -> int:
        """Streams that wait there until others have ended."""
        load = self.known[instance].load
        return 0 if load is None else load.queued

    def fault(self, known: Known, info: InstanceInfo, *, streams_open: bool) -> str | None:
        """Why an instance that answered cannot be used."""
        for what, wanted, got in (("id", known.id, info.id), ("node", known.node, info.node), ("role", known.role, info.role)):
            if wanted != got:
                return f"{what} is {str(got)!r}, the configuration says {str(wanted)!r}"
        if self._table is None and len(info.prefill.seconds) < 2:
            return f"its prefill table has {len(info.prefill.seconds)} entries, at least 2 are needed"
        own = info.own_prefill
        if own is not None and (own not in self.known or self.known[own].role is not Role.PREFILL):
            return f"own_prefill is {str(own)!r}, which the configuration does not have as a prefill instance"
        served = self._served
        others_up = any(other.health is Health.UP for other in self.known.values() if other is not known)
        if served is None or not (others_up or streams_open):
            return None
        for what in ("fingerprint", "geometry", "model"):
            if getattr(served, what) != getattr(info, what):
                return f"{what} is {getattr(info, what)!r}, instance {served.id} has {getattr(served, what)!r}"
        return None

    def accept(self, known: Known, info: InstanceInfo) -> Instance:
        """Note that the instance is used from now on; what the policy needs of it."""
        known.info = info
        known.health = Health.UP
        known.reason = None
        self._served = info
        return Instance(
            id=info.id,
            node=info.node,
            role=info.role,
            epoch=info.epoch,
            geometry=info.geometry,
            prefill=self._table or PrefillTable.from_measured(info.prefill),
            capabilities=frozenset(info.capabilities),
            max_model_len=info.max_model_len or None,
            own_prefill=info.own_prefill,
        )
