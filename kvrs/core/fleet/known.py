"""The configured instances and agents, with the state of each.

Only one model is served at a time. There are no agents when `backup.mode` is off.

Names of a model in requests: its own, its aliases, and those of its adapters.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from math import inf

import msgspec

from kvrs.core.configured import Configured
from kvrs.core.model import events as ev
from kvrs.core.model.agent import Agent
from kvrs.core.model.member import UNKNOWN, Health, Member
from kvrs.core.options.replay import REPLAY_S_MAX
from kvrs.errors import RequestError
from kvrs.ids import InstanceId, NodeId
from kvrs.profiles.catalog import engine_step_s, prefill_table
from kvrs.profiles.tables import PrefillTable
from kvrs.protocol.instance import EPOCHS_PER_START, AgentInfo, Capability, InstanceInfo, Role


class ServedName(msgspec.Struct, frozen=True):
    """A model name that clients may use."""

    name: str
    # Key that an instance must have among its `name_keys` to get streams of this name; empty: every
    # instance serves the name.
    key: str = ""
    parent: str | None = None  # Base model of an adapter; None: no adapter.
    root: str | None = None  # Path of an adapter's weights; None: no adapter.

    @property
    def adapter(self) -> str:
        """The adapter's part of the salt of its pages; empty: no adapter."""
        return "" if self.parent is None else self.key


def listed_names(info: InstanceInfo) -> list[str]:
    """Names that an instance serves, for display."""
    names = info.names
    return [info.model, *names.aliases, *(adapter.name for adapter in names.adapters)]


def served_names(model: str, infos: Iterable[InstanceInfo]) -> dict[str, ServedName]:
    """All names that both a prefill and a decode instance serve, the model's own first. If
    instances load an adapter from different places, the place of most instances counts.
    """
    infos = list(infos)
    found: dict[str, ServedName] = {}
    counts: dict[Role, Counter[str]] = {role: Counter() for role in (Role.PREFILL, Role.DECODE)}
    for info in infos:
        for alias in info.names.aliases:
            found.setdefault(alias, ServedName(alias, alias))
        for adapter in info.names.adapters:
            served = ServedName(adapter.name, adapter.key, model, adapter.root)
            found.setdefault(adapter.key, served)
        for role, count in counts.items():
            if info.role in (role, Role.BOTH):
                count.update(set(info.name_keys))
    # A role without a known instance may serve any name.
    needed = [
        count for role, count in counts.items() if any(i.role in (role, Role.BOTH) for i in infos)
    ]
    names = {model: ServedName(model)}
    for each in sorted(
        found.values(), key=lambda each: sum(c[each.key] for c in needed), reverse=True
    ):
        if all(count[each.key] for count in needed):
            names.setdefault(each.name, each)
    return names


def is_served_at(info: InstanceInfo, key: str) -> bool:
    """Return whether the instance serves the name with this key."""
    return not key or key in info.name_keys


# Number of an instance's last starts to which a late report of an exit is still attributed.
_STARTS_KEPT = 8


def overdue_after_s(interval_s: float) -> float:
    """Return the age at which a report with this interval is overdue."""
    return max(1.0, 4 * interval_s)


class Replays(Enum):
    """Instances that can generate a cut stream's output again (`core/options/replay.py`)."""

    NOWHERE = "nowhere"
    # Only some decode instances can replay, or only a part of the output in time.
    SOMEWHERE = "somewhere"
    ALWAYS = "always"


class Instances:
    def __init__(self, configured: Configured) -> None:
        self.known = {
            each.id: Member(each.id, each.node, each.role, each.group)
            for each in configured.instances
        }
        self.served_name = configured.served_name
        # Decode instances compute all prompts, so no prefill instance is missing.
        self.decodes_only = configured.decodes_only
        # The prefill table that the settings name; an unknown name is an error at the start.
        name = configured.prefill_profile
        self._table = prefill_table(name) if name else None
        # A table of the model alone lacks the engine's part of a step, which instances measure.
        self._lacks_engine = name is not None and not engine_step_s(name)
        self._overdue_s = overdue_after_s(configured.load_interval_s)
        # Fingerprint of the served model; empty: not known yet. All instances must have it: a
        # stream continues exactly only on equal weights.
        self.fingerprint = ""
        self._served: InstanceInfo | None = None  # The last accepted instance; None: none yet.
        # What refused instances say, for an order to accept one.
        self._refused: dict[InstanceId, InstanceInfo] = {}
        self.model: str | None = None  # Name of the served model.
        # Most tokens of prompt and output together at any instance; None: not known.
        self.max_model_len: int | None = None
        # A decode instance that cannot continue every stream exactly; None: no such instance.
        self.plain: InstanceId | None = None
        # Cached result of `replays()`; None: instances have changed.
        self._replays: Replays | None = None
        self._replay_tokens = 0.0  # Most tokens whose steps take no longer than REPLAY_S_MAX.
        # Cached result of `served_names`; None: the names have changed.
        self._served_names: Mapping[str, ServedName] | None = None

    def add(
        self, instance: InstanceId, node: NodeId, role: Role, group: str | None = None
    ) -> Member:
        self.decodes_only &= role is Role.DECODE
        known = self.known[instance] = Member(instance, node, role, group)
        return known

    def remove(self, known: Member) -> None:
        self.known[known.id] = Member(known.id, known.node, known.role, known.group, Health.REMOVED)
        known.health, known.reason, known.info, known.load = Health.REMOVED, None, UNKNOWN, None
        self._refused.pop(known.id, None)
        self._members_changed()

    def _members_changed(self) -> None:
        self.plain, self._replays = self._find_plain(), None
        lengths = (each.info.max_model_len for each in self.known.values() if each.was_up)
        self.max_model_len = max(lengths, default=0) or None
        self.names_changed()

    def names_changed(self) -> None:
        self._served_names = None

    def served_names(self) -> Mapping[str, ServedName]:
        """Names that clients may use, the model's own first; empty before an instance has come
        up.
        """
        if self.model is None:
            return {}
        if self._served_names is None:
            infos = (each.info for each in self.known.values() if each.was_up)
            self._served_names = served_names(self.model, infos)
        return self._served_names

    def present(self) -> Iterator[Member]:
        """Instances of the present configuration."""
        return (known for known in self.known.values() if known.health is not Health.REMOVED)

    def is_present(self, instance: InstanceId) -> bool:
        known = self.known.get(instance)
        return known is not None and known.health is not Health.REMOVED

    def is_up(self, instance: InstanceId) -> bool:
        return self.known[instance].health is Health.UP

    def ready(self) -> bool:
        """Return whether a new stream can start now: every role that it needs has an
        instance up.
        """
        missing = missing_roles(self)
        known = self.known.values()
        computes = any(
            each.abilities.computes_prompts for each in known if each.health is Health.UP
        )
        return computes if self.decodes_only or missing == [Role.PREFILL] else not missing

    def is_reporting(self, instance: InstanceId, now_s: float, token_s: float = -inf) -> bool:
        """Return whether the instance's last report is not overdue; `token_s` is the time of its
        last token, if tokens count as reports.
        """
        return now_s - max(self.known[instance].reported_s, token_s) < self._overdue_s

    def is_stalled(self, instance: InstanceId, now_s: float) -> bool:
        """Return whether the process sends heartbeats while its event loop sends no reports."""
        lives = now_s - self.known[instance].beat_s < self._overdue_s
        return lives and not self.is_reporting(instance, now_s)

    def _find_plain(self) -> InstanceId | None:
        decoding = (
            known
            for known in self.known.values()
            if known.role is not Role.PREFILL and known.was_up
        )
        return next((known.id for known in decoding if not known.abilities.resumes_exactly), None)

    def replays(self, max_tokens: int | None) -> Replays:
        """Return which instances can generate up to `max_tokens` output tokens again, by their
        processor, in the time that a replay may take (None: as many as the context has room for).
        """
        longest = self.max_model_len if max_tokens is None else max_tokens
        if self._replays is None:
            members = [known for known in self.known.values() if known.was_up]
            # Prefill gives the first token if it is called together with decode, and must replay
            # too.
            joins = any(known.info.joins_prefill for known in members)
            decoding = [
                known.abilities.replays
                for known in members
                if joins or known.role is not Role.PREFILL
            ]
            some = Replays.SOMEWHERE if any(decoding) else Replays.NOWHERE
            self._replays = Replays.ALWAYS if decoding and all(decoding) else some
            steps_s = [
                known.times.table.step_overhead_s for known in members if known.abilities.decodes
            ]
            step_s = max(steps_s, default=0.0)
            self._replay_tokens = REPLAY_S_MAX / step_s if step_s else inf
        is_bounded = longest is not None and longest <= self._replay_tokens
        is_rare = self._replays is Replays.NOWHERE
        return self._replays if is_bounded or is_rare else Replays.SOMEWHERE

    def queued(self, instance: InstanceId) -> int:
        """Number of streams in the instance's queue."""
        load = self.known[instance].load
        return 0 if load is None else load.queued

    def fault(self, known: Member, info: InstanceInfo, *, streams_open: bool) -> str | None:
        """Return why an instance that answered cannot be used; None: it can."""
        for what, wanted, got in (
            ("id", known.id, info.id),
            ("node", known.node, info.node),
            ("role", known.role, info.role),
        ):
            if wanted != got:
                return f"{what} is {str(got)!r}, the configuration says {str(wanted)!r}"
        if self.served_name not in (None, info.model):
            return f"model is {info.model!r}, cluster.served_name says {self.served_name!r}"
        if self._named_table(info) is None and len(info.prefill.seconds) < 2:
            return (
                f"its prefill table has {len(info.prefill.seconds)} entries, at least 2 are needed"
            )
        own = info.own_prefill
        is_known = own in self.known and self.known[own].role is Role.PREFILL
        if own is not None and not is_known and Capability.PULL_PAGES not in info.capabilities:
            return (
                f"own_prefill is {str(own)!r}, which the configuration does not have as a "
                f"prefill instance, and it fetches no pages of others"
            )
        if info.fingerprint != (self.fingerprint or info.fingerprint):
            return (
                f"fingerprint is {info.fingerprint!r}, the cluster serves {self.fingerprint!r}; "
                f"if the former is the new model: `kvrs accept {known.id}`"
            )
        if (served := self._served) is None:
            return None
        others_up = any(
            other.health is Health.UP for other in self.known.values() if other is not known
        )
        # Other sizes and names of the same model may come once nothing uses the old ones.
        for what in ("geometry", "model") if others_up or streams_open else ():
            if getattr(served, what) != getattr(info, what):
                return (
                    f"{what} is {getattr(info, what)!r}, the cluster serves "
                    f"{getattr(served, what)!r}"
                )
        return None

    def refused(self, known: Member, info: InstanceInfo) -> None:
        """Keep what an instance says that is refused for its model alone, until it is accepted,
        removed or says something else.
        """
        own = known.id, known.node, known.role
        if (info.id, info.node, info.role) == own and info.fingerprint != self.fingerprint:
            self._refused[known.id] = info
        else:
            self._refused.pop(known.id, None)

    def root_of(self, instance: InstanceId) -> str:
        """Path of the model that a refused instance reports; empty: it is not refused for it."""
        info = self._refused.get(instance)
        return "" if info is None else info.root

    def expect(self, known: Member) -> int:
        """Let the model of an instance, used or refused, be the served one from now on; return the
        epoch of the instance's present process. Instances with another model that are up stay until
        their processes end.

        Raises:
            RequestError: the instance is neither, or has KV of another shape.
        """
        if known.health is Health.UP:
            return known.info.epoch
        info, served = self._refused.get(known.id), self._served
        if known.health is not Health.REFUSED or info is None:
            found, allowed = (
                f"is {known.health}",
                "an instance that is up, or refused for its model",
            )
        elif served is not None and served.model != info.model:
            found = f"serves the name {info.model!r}"
            allowed = f"{served.model!r}, as the others (--served-model-name)"
        elif served is not None and served.geometry != info.geometry:
            found = f"has KV of another shape than the model that is served: {info.geometry}"
            allowed = f"{served.geometry}, or a proxy of its own"
        else:
            self.fingerprint = info.fingerprint
            return info.epoch
        raise RequestError(f"{known.id} {found}; allowed: {allowed}", param="id", status=409)

    def accept(self, known: Member, info: InstanceInfo) -> ev.InstanceUp:
        """Use the instance from now on, and return the event for the policy. A process that was up
        all the time keeps its record, whose `info` the policy updates.
        """
        table = self._named_table(info)
        self._served, self.model, self.fingerprint = info, info.model, info.fingerprint
        self._refused.pop(known.id, None)
        if info.own_prefill not in self.known:
            info = msgspec.structs.replace(info, own_prefill=None)
        if not known.is_same_process(info):
            known = self.known[known.id] = known.next_process(info, table)
        known.health, known.reason = Health.UP, None
        known.epochs[info.epoch // EPOCHS_PER_START] = info.epoch
        if len(known.epochs) > _STARTS_KEPT:
            del known.epochs[next(iter(known.epochs))]
        self._members_changed()
        return ev.InstanceUp(info, table)

    def _named_table(self, info: InstanceInfo) -> PrefillTable | None:
        """Return the prefill table of the settings. None: the instance's own table counts, because
        the settings name none, or because another instance computes its prompts, and it reads known
        tokens one per step.
        """
        if self._table is None or info.own_prefill is not None:
            return None
        return self._table.plus(info.prefill.engine_step_s) if self._lacks_engine else self._table


def all_refused(instances: Instances) -> str | None:
    """Return why no instance can come up: each answers and must not be used. None: an instance is
    up, or may come up.
    """
    causes = []
    for known in instances.known.values():
        if known.health is Health.REFUSED:
            causes.append(f"{known.id}: {known.reason}")
        elif known.health is not Health.REMOVED:
            return None
    return "; ".join(causes) or None


def others_of_other_format(instances: Instances, known: Member) -> list[InstanceId]:
    """Return the instances with which this one cannot exchange hand-offs, because NIXL's formats
    differ.
    """
    return [
        each.id
        for each in instances.present()
        if each.health is Health.UP
        and (
            (known.abilities.decodes and each.abilities.prefills)
            or (known.abilities.prefills and each.abilities.decodes)
        )
        and not known.reads_format_of(each)
    ]


def missing_roles(instances: Instances) -> list[Role]:
    """Roles without an instance that is up."""
    roles = {known.role for known in instances.present() if known.health is Health.UP}
    if Role.BOTH in roles:
        return []
    needed = (Role.DECODE,) if instances.decodes_only else (Role.PREFILL, Role.DECODE)
    return [role for role in needed if role not in roles]


class Agents:
    def __init__(self, nodes: Mapping[InstanceId, NodeId]) -> None:
        self.known = {name: Agent(name, node) for name, node in nodes.items()}
        self.by_node = {known.node: known for known in self.known.values()}

    def add(self, agent: InstanceId, node: NodeId) -> Agent:
        known = self.known[agent] = self.by_node[node] = Agent(agent, node)
        return known

    def remove(self, known: Agent) -> None:
        known.health, known.reason, known.info, known.report = Health.REMOVED, None, None, None
        del self.by_node[known.node]

    def present(self) -> Iterator[Agent]:
        """Agents of the present configuration."""
        return (known for known in self.known.values() if known.health is not Health.REMOVED)

    def is_up(self, agent: InstanceId) -> bool:
        return self.known[agent].health is Health.UP

    def fault(self, known: Agent, info: AgentInfo) -> str | None:
        """Return why an agent that answered cannot be used; None: it can."""
        for what, wanted, got in (("id", known.id, info.id), ("node", known.node, info.node)):
            if wanted != got:
                return f"{what} is {str(got)!r}, the configuration says {str(wanted)!r}"
        return None

    def accept(self, known: Agent, info: AgentInfo) -> ev.HolderUp:
        """Use the agent from now on, and return the event for the policy."""
        known.info = info
        known.report = None
        known.health = Health.UP
        known.reason = None
        return ev.HolderUp(
            known.id, known.node, info.epoch, info.capacity_bytes, info.host_to_device_bytes_per_s
        )
