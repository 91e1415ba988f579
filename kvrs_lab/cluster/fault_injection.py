"""Fault injection: signals to processes of this machine, and requests to instances and agents for
faults inside them.
"""

import asyncio
import contextlib
import itertools
import math
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, assert_never

from kvrs.config.file import Config
from kvrs.errors import ConfigError
from kvrs.ids import InstanceId, NodeId, StreamId
from kvrs.net.admin import AdminError
from kvrs.protocol.instance import DeviceFault, FaultRequest, LinkFault, NoFault, PageFault
from kvrs_lab.cluster.victims import (
    FaultError,
    closing_process,
    hosts_of,
    named,
    open_processes,
    open_rank,
    open_stage,
    pids_of,
)
from kvrs_lab.faults.language import Fault, Phase, VictimRole, What, Whom, phase_of
from kvrs_lab.faults.schedule import DueFault, InstanceView, possible_victims
from kvrs_lab.load.admin_port import AdminPort
from kvrs_lab.load.passes import Injection

WATCH_INTERVAL_S = 0.02
# Period in which a slowed process is stopped and continued: too short to be detected as a stop.
SLOW_PERIOD_S = 0.05
# A proxy detects a death within this time, since the kernel closes the watch connection.
NOTICE_S = 0.5

_ASKED_OF_INSTANCES = (What.LINK_RATE, What.LINK_CUT, What.CORRUPT_PAGE, What.LOSE_DEVICE)


async def check_faults(faults: list[Fault], port: AdminPort) -> None:
    """Check before any load that the cluster has the named victims, and that they accept the
    faults.

    Raises:
        ConfigError: one line per fault with an unknown victim, a refusal, or a process that must
            not be signalled.
        AdminError: the admin port does not answer.
    """
    state = await port.state()
    rows = rows_of(state)
    members = {
        name: InstanceView(
            VictimRole(row["role"]),
            NodeId(row["node"]),
            ranks=tuple(pids_of(row)),
            stages=tuple(hosts_of(row)),
        )
        for name, row in rows.items()
    }
    mistakes = unknown_victims(faults, members) or [*_not_signalled(faults, members, state)]
    if not mistakes and any(fault.what in _ASKED_OF_INSTANCES for fault in faults):
        mistakes = await _refusals(rows.values(), port)
    if mistakes:
        raise ConfigError(mistakes)


def unknown_victims(
    faults: Sequence[Fault], members: Mapping[InstanceId, InstanceView]
) -> list[str]:
    """One line per name that the faults use and the cluster does not have."""
    roles = {view.role for view in members.values()}
    if VictimRole.BOTH in roles:
        roles |= {VictimRole.PREFILL, VictimRole.DECODE}
    nodes = {view.node for view in members.values()}
    mistakes = []
    for number, fault in enumerate(faults):
        whom = fault.whom
        named: list[tuple[Sequence[str], Collection[str]]] = [
            ([whom.id] if whom.id else [], members),
            ([whom.node] if whom.node else whom.link or [], nodes),
            ([whom.role] if whom.role else [], roles),
        ]
        for names, allowed in named:
            unknown = [str(name) for name in names if name not in allowed]
            mistakes += [
                f"fault [{number}]: no {name!r} in the cluster; allowed: "
                f"{', '.join(sorted(allowed))}"
                for name in unknown
            ]
        mistakes += _unknown_parts(number, whom, members)
    return mistakes


def _not_signalled(
    faults: Sequence[Fault], members: Mapping[InstanceId, InstanceView], state: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a line for each fault that would signal a process whose id is unknown, or an instance
    that `kvrs lab up` did not start: the admin port may belong to a cluster in production.
    """
    is_ours = any(proxy.get("launcher_pid") for proxy in state.get("proxies", ()))
    unknown = {name for name, row in rows_of(state).items() if row["pid"] == 0}
    for number, fault in enumerate(faults):
        if fault.what in _ASKED_OF_INSTANCES:
            continue
        what = f"fault [{number}]: {fault.what.value} of {fault.whom.label}"
        if not is_ours:
            yield (
                f"{what}: this proxy and its instances were not started by kvrs lab up; allowed: "
                f"kill, stop and slow in a cluster of kvrs lab up"
            )
            continue
        victims = {name for group in possible_victims(fault.whom, members) for name in group}
        if victims & unknown:
            allowed = ", ".join(sorted(members.keys() - unknown)) or "none"
            yield (
                f"{what}: the process id of {', '.join(sorted(victims & unknown))} is 0 (unknown); "
                f"allowed: {allowed}"
            )


def _unknown_parts(
    number: int, whom: Whom, members: Mapping[InstanceId, InstanceView]
) -> Iterator[str]:
    """Yield a line if no possible victim has the rank or stage."""
    views = [view for name, view in members.items() if whom.id in (None, name)]
    for what, part, present, nowhere in (
        ("rank", whom.rank, [view.ranks for view in views], "each instance is one process"),
        ("stage", whom.stage, [view.stages for view in views], "none is in a host"),
    ):
        found = {each for parts in present for each in parts}
        if part is None or not views or part in found or (part == "random" and found):
            continue
        allowed = ", ".join(map(str, sorted(found))) or f"none, {nowhere}"
        where = " in a host" if what == "stage" else ""
        yield (
            f"fault [{number}]: no {what} {part} of {whom.id or whom.role}{where}; allowed: "
            f"{allowed}"
        )


def members_of(config: Config) -> dict[InstanceId, InstanceView]:
    """The instances and agents of a cluster with this configuration."""
    members = {
        instance.id: InstanceView(
            VictimRole(instance.role.value),
            node.id,
            ranks=tuple(range(instance.ranks)) if instance.ranks > 1 else (),
            stages=tuple(instance.remote_stages),
        )
        for node, instance in config.cluster.instances()
    }
    if config.agents_run:
        members |= {
            node.agent_id: InstanceView(VictimRole.AGENT, node.id) for node in config.cluster.nodes
        }
    return members


def rows_of(state: Mapping[str, Any]) -> dict[InstanceId, dict[str, Any]]:
    """Every instance and agent of a cluster by id, each with a role."""
    agents = [row | {"role": VictimRole.AGENT.value} for row in state.get("agents", [])]
    return {InstanceId(row["id"]): row for row in [*state["instances"], *agents]}


async def _refusals(rows: Iterable[dict[str, Any]], port: AdminPort) -> list[str]:
    refusals = []
    for row in rows:
        try:
            await port.inject(row["id"], row["url"], NoFault())
        except AdminError as error:
            hint = (
                " (does its configuration say cluster.allow_faults: true?)"
                if "HTTP 404" in str(error)
                else ""
            )
            refusals.append(f"{named(row)} takes no faults{hint}: {error}")
    return refusals


async def inject_faults(injection: Injection) -> None:
    """Carry out every fault when it is due, until all are over. Page damage ends at cancellation. A
    victim that has already died is noted as `gone`.

    Raises:
        FaultError: a victim cannot be signalled from this process.
    """
    injector = _Injector(injection)
    try:
        async with asyncio.TaskGroup() as lasting:
            while injection.schedule.pending:
                if injection.schedule.needs_load(
                    time.monotonic() - injection.start_s, injection.requests_sent()
                ):
                    state = await injection.port.state()
                    for due in injection.schedule.due(
                        time.monotonic() - injection.start_s,
                        injection.requests_sent(),
                        views(state),
                    ):
                        await injector.carry_out(due, state, lasting)
                await asyncio.sleep(WATCH_INTERVAL_S)
    except BaseExceptionGroup as group:
        # Callers expect single errors.
        raise group.exceptions[0] from None
    finally:
        # Shielded, or the cancellation would leave links cut.
        await asyncio.shield(injector.undo())


def views(state: Mapping[str, Any]) -> dict[InstanceId, InstanceView]:
    """Every instance and agent that is up, in the form for a schedule."""
    works: Counter[str] = Counter()
    counts: defaultdict[str, dict[StreamId, Phase]] = defaultdict(dict)
    recovering = {row["stream"] for row in state["recoveries"] if row["outcome"] == "running"}
    for stream in state["streams"]:
        phase = phase_of(
            stream["stage"],
            stream["output_tokens"],
            stream["max_tokens"],
            stream["id"] in recovering,
        )
        if phase is None:
            continue
        # An instance of role `both` prefills for itself.
        works[stream[stream["stage"]] or stream["decode"]] += 1
        keepers = {agent for agent, pages in stream.get("protected", {}).items() if pages}
        for name in {stream["prefill"], stream["decode"]} | keepers:
            counts[name][StreamId(stream["id"])] = phase
    seen = {}
    for name, row in rows_of(state).items():
        if row["health"] == "up":
            role = VictimRole(row["role"])
            inflight = row["checkpoints"] or 0 if role is VictimRole.AGENT else works[name]
            seen[name] = InstanceView(
                role,
                NodeId(row["node"]),
                inflight,
                counts[name],
                tuple(pids_of(row)),
                tuple(hosts_of(row)),
            )
    return seen


class _Injector:
    def __init__(self, injection: Injection) -> None:
        self._injection = injection
        # Ids and URLs of instances with a requested fault.
        self._asked: set[tuple[str, str]] = set()

    async def carry_out(
        self, due: DueFault, state: Mapping[str, Any], lasting: asyncio.TaskGroup
    ) -> None:
        rows = rows_of(state)
        note = {
            "at_s": time.monotonic() - self._injection.start_s,
            "what": due.fault.what.value,
            "whom": due.whom,
            "fault": due.fault.label,
            "instances": list(due.instances),
            "pid": rows[due.instances[0]]["pid"],
            "inflight": due.inflight,
            "streams": len(due.streams),
            "phases": {
                phase.value: count for phase, count in Counter(due.streams.values()).items()
            },
        }
        keys = ("for_s", "factor", "bytes_per_s", "pages")
        note |= {key: value for key in keys if (value := getattr(due.fault, key)) is not None}
        note |= {"ranks": due.ranks} if due.ranks else {}
        note |= {"stages": due.stages} if due.stages else {}
        gone: list[InstanceId] = []
        if due.fault.what in _ASKED_OF_INSTANCES:
            gone = await self._ask(due, rows)
            # The time of damage to pages is unknown, and a link ends its fault at its time. A lost
            # device stays lost.
            if due.fault.what is not What.LOSE_DEVICE:
                lasting.create_task(asyncio.sleep(due.fault.for_s or math.inf))
        else:
            # All handles first, so that the victims of a fault are hit within microseconds.
            opened = {name: await self._open(rows[name], due) for name in due.instances}
            for process in itertools.chain(*opened.values()):
                _signal(due.fault, process, lasting)
            gone = [name for name, processes in opened.items() if not processes]
        self._injection.carried_out.append(note | ({"gone": gone} if gone else {}))

    async def _open(self, row: Mapping[str, Any], due: DueFault) -> list[int]:
        """Open handles on the victims' processes; none if they have died of another fault."""
        fault, name = due.fault, InstanceId(row["id"])
        rank, stage = due.ranks.get(name), due.stages.get(name)
        whole_node = fault.whom.node is not None and fault.whom.role is None
        try:
            if rank is not None:
                return [open_rank(row, rank)]
            if stage is not None:
                return [open_stage(row, stage)]
            return open_processes(row, workers=fault.workers, server_too=whole_node)
        except FaultError:
            if not await self._has_died(row, rank, stage):
                raise
            return []

    async def _has_died(
        self, row: Mapping[str, Any], rank: int | None, stage: int | None = None
    ) -> bool:
        """Return whether the instance, rank or host of this row has died since."""
        await asyncio.sleep(NOTICE_S)
        now = rows_of(await self._injection.port.state())[InstanceId(row["id"])]
        if (now["health"], now["pid"]) != ("up", row["pid"]):
            return True
        if stage is not None:
            # The state names the former host until the next one is there.
            return hosts_of(now).get(stage) != hosts_of(row)[stage] or now["state"] == "reforming"
        return rank is not None and pids_of(now).get(rank) != pids_of(row)[rank]

    async def _ask(self, due: DueFault, rows: Mapping[InstanceId, Any]) -> list[InstanceId]:
        """Request the fault of each victim; return the victims that have died of another fault."""
        gone = []
        for name in due.instances:
            row = rows[name]
            self._asked.add((row["id"], row["url"]))
            try:
                await self._injection.port.inject(name, row["url"], _request(due, row))
            except AdminError:
                if not await self._has_died(row, due.ranks.get(name)):
                    raise
                gone.append(name)
        return gone

    async def undo(self) -> None:
        """End the requested faults, so that they do not affect the next run."""
        for name, url in self._asked:
            # A killed process has lost its faults anyway.
            with contextlib.suppress(AdminError):
                await self._injection.port.inject(name, url, NoFault())


def _request(due: DueFault, row: Mapping[str, Any]) -> FaultRequest:
    """The request to one instance or agent."""
    fault, node = due.fault, NodeId(row["node"])
    if fault.what is What.LOSE_DEVICE:
        return DeviceFault(due.ranks.get(InstanceId(row["id"])))
    if fault.what is What.CORRUPT_PAGE:
        assert fault.pages is not None
        return PageFault(fault.pages)
    assert fault.whom.link is not None
    assert fault.for_s is not None
    (other,) = set(fault.whom.link) - {node}
    return LinkFault(other, fault.bytes_per_s or 0.0, fault.for_s)


def _signal(fault: Fault, process: int, lasting: asyncio.TaskGroup) -> None:
    match fault.what:
        case What.KILL:
            with closing_process(process):
                _send(process, signal.SIGKILL)
        case What.STOP:
            assert fault.for_s is not None
            lasting.create_task(_stop(process, fault.for_s))
        case What.SLOW:
            assert fault.for_s is not None
            assert fault.factor is not None
            lasting.create_task(_slow(process, fault.factor, fault.for_s))
        case What.LINK_RATE | What.LINK_CUT | What.CORRUPT_PAGE | What.LOSE_DEVICE:
            raise AssertionError(f"{fault.what} is no signal")
        case _:
            assert_never(fault.what)


async def _stop(process: int, for_s: float) -> None:
    with closing_process(process):
        try:
            _send(process, signal.SIGSTOP)
            await asyncio.sleep(for_s)
        finally:
            _send(process, signal.SIGCONT)


async def _slow(process: int, factor: float, for_s: float) -> None:
    """Run the process for 1/factor of every period."""
    with closing_process(process):
        try:
            ends_s = time.monotonic() + for_s
            while time.monotonic() < ends_s:
                _send(process, signal.SIGSTOP)
                await asyncio.sleep(SLOW_PERIOD_S * (1 - 1 / factor))
                _send(process, signal.SIGCONT)
                await asyncio.sleep(SLOW_PERIOD_S / factor)
        finally:
            _send(process, signal.SIGCONT)


def _send(process: int, number: signal.Signals) -> None:
    # The process may have died of another cause.
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, number)
